package limiter

import (
	"context"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestBatchInTwoSteps: what this node decides is there before the others are asked, and what is wrong with one check
// concerns no other.
func TestBatchInTwoSteps(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, plain)}, func(t *testing.T, c *testCluster) {
		node := c.nodes[1]
		var b Batch
		for round := range int64(3) {
			b.Reset()
			for i := range 9 {
				b.Checks = append(b.Checks, named("p", c.owned("p", i%3, i/3), 1))
			}
			b.Checks[0].Key = ""
			b.Checks[1].Cost = -1
			b.Checks[3].Policy = "unknown"
			b.Checks[3].Key = c.owned("unknown", 1, 0)
			asked := c.carried
			open, err := node.Begin(t.Context(), &b)
			must.Equal(t, err, nil)
			if want := []int{2, 5, 6, 8}; !slices.Equal(open, want) || c.carried != asked {
				t.Fatalf("open are %v, want %v; %d messages were sent", open, want, c.carried-asked)
			}
			wantError(t, b.Results[0].Err, limit.Invalid, "key")
			wantError(t, b.Results[1].Err, limit.Invalid, "cost")
			wantError(t, b.Results[3].Err, limit.NotFound, "policy")
			for _, i := range []int{4, 7} {
				if d := b.Results[i].Decision; b.Results[i].Err != nil || !d.Allowed || d.Remaining != 9-round {
					t.Errorf("check %d, before the others are asked: %+v", i, b.Results[i])
				}
			}
			node.Finish(t.Context(), &b, open)
			for _, i := range []int{2, 4, 5, 6, 7, 8} {
				d := b.Results[i].Decision
				expect.True(t, b.Results[i].Err == nil && d.Allowed && d.Remaining == 9-round && !d.FailedOpen,
					"check %d: %+v", i, b.Results[i])
			}
			expect.Equal(t, c.carried-asked, 2, "messages for two other owners")
		}
		b.Reset()
		_, err := node.Begin(t.Context(), &b)
		expect.True(t, err != nil && err.Field == "checks", "a batch without checks: %v", err)
	})
}

// TestBatchIsFinishedInParts: what one part of a batch waits for concerns no other.
func TestBatchIsFinishedInParts(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, plain)}, func(t *testing.T, c *testCluster) {
		c.tamper(func(ctx context.Context, _ *testNode, to ownership.Node, _ []*Op, deliver func()) {
			if to.Name == "n1" {
				<-ctx.Done()
				return
			}
			deliver()
		})
		var b Batch
		for i := range 9 {
			b.Checks = append(b.Checks, named("p", c.owned("p", i%3, i/3), 1))
		}
		open, err := c.nodes[0].Begin(t.Context(), &b)
		must.True(t, err == nil && len(open) == 6, "%v %v", open, err)
		var slow sync.WaitGroup
		slow.Go(func() { c.nodes[0].Finish(t.Context(), &b, []int{1, 4, 5, 7}) })
		began := time.Now()
		c.nodes[0].Finish(t.Context(), &b, []int{2, 8})
		expect.Equal(t, time.Since(began), 0, "took")
		slow.Wait()
		for i, r := range b.Results {
			expect.True(t, r.Err == nil && r.Allowed && r.FailedOpen == (i%3 == 1), "check %d: %+v", i, r)
		}
	})
}

// TestABatchDecidesAsItsChecksAlone: what checks of a batch take over from one another changes no answer.
func TestABatchDecidesAsItsChecksAlone(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, hundred)}, func(t *testing.T, c *testCluster) {
		rng := rand.New(rand.NewPCG(1, 2))
		limits := []*algo.Limit{
			nil, {Algorithm: algo.TokenBucket, Limit: 3, Window: time.Minute},
			{Algorithm: algo.TokenBucket, Limit: 5, Window: time.Minute},
			{Algorithm: algo.SlidingLog, Limit: 3, Window: time.Minute},
		}
		for round := range 200 {
			batch := make([]limit.Check, 1+rng.IntN(80))
			for i := range batch {
				if batch[i] = (limit.Check{Cost: 1}); i > 0 && rng.IntN(3) > 0 {
					batch[i].Target = batch[i-1].Target
				} else if l := limits[rng.IntN(len(limits))]; l != nil {
					batch[i].Limit, batch[i].Namespace = l, []string{"", "other"}[rng.IntN(2)]
				} else {
					batch[i].Policy = []string{"fixed_window", "sliding_log"}[rng.IntN(2)]
				}
				batch[i].Key = fmt.Sprintf("%d.%d", round, rng.IntN(4))
				batch[i].Cost = int64(rng.IntN(3))
			}
			got := must.Value(c.nodes[0].Check(t.Context(), batch))(t)
			for i := range batch {
				batch[i].Key += " alone"
				want := c.nodes[1].check(t, batch[i])
				if g, w := got[i].Decision, want; g.Allowed != w.Allowed || g.Remaining != w.Remaining ||
					g.Limit != w.Limit || g.Policy != w.Policy || g.Window != w.Window {
					t.Fatalf("check %d of %d, %+v: %+v, alone %+v", i, len(batch), batch[i], g, w)
				}
			}
		}
	})
}

// TestFewChecksKeepLittle: checks that wait for another node keep no more room than twice as many would, whatever came
// before them.
func TestFewChecksKeepLittle(t *testing.T) {
	l := started(t, Config{Ownership: newTwoOthers(), Peers: prompt{}, Policies: policies(t, nine)})
	checks, results := make([]limit.Check, limit.MaxBatch), make([]limit.Result, limit.MaxBatch)
	for i := range checks {
		checks[i] = named("p", fmt.Sprint(i), 1)
	}
	for range 20 {
		for _, n := range []int{limit.MaxBatch, 2} {
			must.NoError(t, l.CheckTo(t.Context(), checks[:n], nil, results[:n]))
			pool := &l.batches[bits.Len(uint(n-1))]
			b := pool.Get().(*Batch)
			must.True(t, cap(b.room) <= 2*n && cap(b.ops) <= 2*n, "%d checks have room for %d operations", n,
				cap(b.room))
			pool.Put(b)
		}
	}
}

// TestOpIsSmall: the operation of a check takes two cache lines.
func TestOpIsSmall(t *testing.T) {
	n := unsafe.Sizeof(Op{})
	expect.True(t, n <= 128, "%d bytes", n)
}

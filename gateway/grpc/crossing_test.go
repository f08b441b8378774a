package grpc

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/store"
)

// halves is a view in which every second partition is another node's.
type halves struct{}

func (halves) Route(partition int) *ownership.Route {
	if partition%2 == 0 {
		return &ownership.Route{Standing: ownership.Owned}
	}
	return &ownership.Route{Standing: ownership.Elsewhere, Node: ownership.Node{Name: "other", Boot: 1}}
}

func (h halves) Await(_ context.Context, partition int, _ *ownership.Route) *ownership.Route {
	return h.Route(partition)
}

func (halves) AwaitProgress(context.Context, int, uint64, bool) (degraded, ok bool) {
	return true, true
}

// echo is the other node: its answer tells what was asked, after a while of its own. It refuses every third limit, for a moment.
type echo struct{ asked atomic.Int64 }

func (e *echo) Forward(_ context.Context, _ ownership.Node, ops []*limiter.Op) {
	e.asked.Add(int64(len(ops)))
	<-time.After(rand.N(2 * time.Millisecond))
	for _, op := range ops {
		d := limit.Decision{Allowed: true, Granted: op.Cost, Limit: op.Limit.Limit, Remaining: int64(len(op.Key))}
		if op.Limit.Limit%3 == 0 {
			d.Allowed, d.Granted, d.RetryAfter, d.RememberFor = false, 0, 3*time.Millisecond, 3*time.Millisecond
		}
		op.Outcome, *op.Decision = limiter.Outcome{}, d
	}
}

// TestAnswersDoNotCross has many callers, some of whom leave early, ask at once for few keys under many limits: memory that is
// used again must not bring one the answer to what another has asked.
func TestAnswersDoNotCross(t *testing.T) {
	noLeaks(t)
	other := new(echo)
	states := limiter.NewStore(store.Config{}, false)
	l := limiter.New(limiter.Config{Store: states, Ownership: halves{}, Peers: other})
	t.Cleanup(l.Close)
	for p := range ring.Partitions {
		states.Open(p)
	}
	c := client(t, ServerConfig{Service: l})

	const kinds = 30
	limitOf := func(n uint32) *weirv1.Limit {
		return &weirv1.Limit{Algorithm: weirv1.Algorithm_ALGORITHM_TOKEN_BUCKET, Limit: 1000 + int64(n), WindowNs: 1e6}
	}
	key := func() string { return strings.Repeat("k", 1+rand.N(60)) }
	type question struct {
		key    string
		target uint32
		cost   int64
	}
	// The other node's answers tell the length of the key, which is below what is left of any limit here.
	right := func(q question, allowed bool, granted, lim, remaining int64) bool {
		if lim != 1000+int64(q.target) || allowed && granted != q.cost || !allowed && granted != 0 {
			return false
		}
		if remaining < 100 {
			return remaining == int64(len(q.key)) && allowed == (lim%3 != 0)
		}
		return allowed
	}
	ask := func() []question {
		qs := make([]question, 1+rand.N(40))
		for i := range qs {
			qs[i] = question{key(), rand.Uint32N(kinds), 1 + rand.Int64N(5)}
		}
		return qs
	}
	var answers atomic.Int64
	stream := func(requests int, leaves bool) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := c.CheckStream(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		var mu sync.Mutex
		sent := make(map[uint64][]question)
		var writing sync.WaitGroup
		writing.Go(func() {
			for n := range uint64(requests) {
				in := &weirv1.CheckStreamRequest{Sequence: n, TimeoutMs: 10_000}
				if n%16 == 0 { // other numbers from now on
					for i := range uint32(kinds) {
						in.Define = append(in.Define, &weirv1.StreamTarget{Number: (i + uint32(n)) % kinds, Limit: limitOf(i), Namespace: "n"})
					}
				}
				qs := ask()
				for _, q := range qs {
					in.Targets = append(in.Targets, (q.target+uint32(n/16*16))%kinds)
					in.Keys = append(in.Keys, q.key...)
					in.KeyLengths = append(in.KeyLengths, uint32(len(q.key)))
					in.Costs = append(in.Costs, q.cost)
				}
				mu.Lock()
				sent[n] = qs
				mu.Unlock()
				if stream.Send(in) != nil {
					return
				}
				if n%8 == 7 {
					<-time.After(time.Millisecond)
				}
			}
		})
		defer writing.Wait()
		defer cancel()
		for left := requests; left > 0; {
			out, err := stream.Recv()
			if err != nil {
				t.Error(err)
				return
			}
			if out.Error != nil {
				t.Errorf("%v", out.Error)
				return
			}
			mu.Lock()
			qs := sent[out.Sequence]
			mu.Unlock()
			n := len(out.Checks)
			if n == 0 && !out.More {
				n = len(qs)
			}
			for i := range n {
				q := qs[wire.At(out.Checks, i, uint32(i))]
				if len(out.Checks) == 1 {
					q = qs[out.Checks[0]]
				}
				if !right(q, wire.At(out.Flags, i, 0)&1 != 0, wire.At(out.Granted, i, 0), wire.At(out.Limit, i, 0), wire.At(out.Remaining, i, 0)) {
					t.Errorf("%+v: %v", q, out)
					return
				}
				answers.Add(1)
			}
			if !out.More {
				left--
			}
			if leaves && left < requests/2 {
				return
			}
		}
	}
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() { stream(100, false) })
		callers.Go(func() {
			for range 5 {
				stream(40, true)
			}
		})
	}
	callers.Wait()
	if asked := other.asked.Load(); asked < 1000 || answers.Load() < 10_000 {
		t.Errorf("%d answers, of which %d from the other node: too few to say anything", answers.Load(), asked)
	}
}

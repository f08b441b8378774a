package limiter

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestReconcile: a key that nobody asks about is brought under the new policy at the change and not at its next check,
// when what the new algorithm counts as if admitted now would be dated too late.
func TestReconcile(t *testing.T) {
	inBubble(t, 1, Config{Policies: policies(t, plain)}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		inline := inlineTarget(algo.Limit{Algorithm: algo.SlidingLog, Limit: 10, Window: time.Minute}, "k")
		n.check(t, limit.Check{Target: inline, Cost: 6})
		n.check(t, named("p", "k", 6))
		c.setPolicies(`policies: [{name: p, algorithm: fixed_window, limit: 10, window: 1m}]`)
		synctest.Wait() // for the background to come to rest
		c.advance(59 * time.Second)
		d := n.check(t, named("p", "k", 0))
		expect.True(t, d.Remaining == 4 && d.ResetAfter == time.Second, "%+v", d)
		c.advance(time.Second)
		d = n.check(t, named("p", "k", 0))
		expect.Equal(t, d.Remaining, 10, "not brought under the new policy before its next check: %+v", d)
		// Limits sent along belong to nobody's file; a policy that goes takes nothing with it.
		c.setPolicies(`policies: []`)
		synctest.Wait()
		expect.Equal(t, n.check(t, limit.Check{Target: inline}).Remaining, 10)
		n.checkError(t, named("p", "k", 1), limit.NotFound, "policy")
	})
}

// TestSweep: idle states go by themselves, every one of them within one pass.
func TestSweep(t *testing.T) {
	inBubble(t, 1, Config{Policies: policies(t, plain)}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		for i := range 1000 {
			n.check(t, named("p", fmt.Sprint(i), 1))
		}
		c.advance(30 * time.Second)
		n.check(t, named("p", "late", 1))
		c.advance(30*time.Second + time.Microsecond)
		time.Sleep((sweepParts + 1) * sweepEvery) // virtual
		must.Equal(t, n.Store().Keys, 1, "states are left, want the one that is not idle")
		expect.Equal(t, n.check(t, named("p", "late", 0)).Remaining, 9)
	})
}

func TestFullStore(t *testing.T) {
	const text = `policies:
  - {name: open, algorithm: sliding_log, limit: 100000, window: 1m}
  - {name: closed, algorithm: sliding_log, limit: 100000, window: 1m, on_error: closed}
  - {name: c, algorithm: concurrency, limit: 100000, ttl: 1m, on_error: closed}`
	for _, test := range []struct {
		what   string
		bounds store.Config
	}{
		{"keys", store.Config{MaxKeys: 3}},
		{"memory", store.Config{MaxBytes: 200_000}},
	} {
		t.Run(test.what, func(t *testing.T) {
			inBubbleWithin(t, 2, test.bounds, Config{Policies: policies(t, text)}, func(t *testing.T, c *testCluster) {
				// All keys are the other node's: its want of memory is answered by it and not by the one that asks.
				key := func(policy string, i int) string { return c.owned(policy, 1, i) }
				n, admitted := c.nodes[0], 0
				var d limit.Decision
				for d = n.check(t, named("open", key("open", 0), 1)); !d.FailedOpen; d = n.check(t,
					named("open", key("open", admitted), 1)) {
					admitted++
					must.True(t, admitted <= 100_000, "never full")
				}
				expect.True(t, d.Allowed && d.Granted == 1 && !d.FailedClosed, "%+v", d)
				d = n.check(t, named("closed", key("closed", 0), 1))
				expect.True(t, !d.Allowed && d.FailedClosed && d.RetryAfter == time.Second, "%+v", d)
				d, err := n.Acquire(t.Context(), limit.Acquire{Target: onPolicy("c", key("c", 0)), Cost: 1})
				expect.True(t, err == nil && d.FailedClosed && d.LeaseID == "", "%+v, %v", d, err)
				// Peeks need no state; states that are there stay and are decided on.
				d = n.check(t, named("closed", key("closed", 0), 0))
				expect.True(t, d.Allowed && !d.FailedOpen && d.Remaining == 100_000, "%+v", d)
				expect.Equal(t, n.check(t, named("open", key("open", 0), 0)).Remaining, 99_999)
				c.wantStats(PolicyStats{Policy: "open", Allowed: uint64(admitted), FailedOpen: 1})
				c.wantStats(PolicyStats{Policy: "closed", FailedClosed: 1})
				expect.Equal(t, c.nodes[1].Store().Full, 3, "times full")
				// Idle states make room.
				c.advance(time.Minute + time.Second)
				for i := range 3 {
					d := n.check(t, named("open", key("open", i), 1))
					expect.True(t, d.Allowed && !d.FailedOpen, "%+v", d)
				}
			})
		})
	}
}

func TestStatsAndPeaks(t *testing.T) {
	inBubble(t, 1, Config{Policies: policies(t,
		`policies: [{name: p, algorithm: sliding_log, limit: 10, window: 1m}, {name: q, algorithm: token_bucket, limit: 1, window: 1m, capacity: 40}]`)}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		n.check(t, named("p", "a", 3))
		n.check(t, named("p", "b", 7))
		n.check(t, named("p", "c", 1))
		n.check(t, named("p", "b", 9))
		n.check(t, named("p", "c", 0))
		n.check(t, named("q", "c", 10))
		n.check(t, limit.Check{Target: inlineTarget(algo.Limit{Algorithm: algo.FixedWindow, Limit: 4,
			Window: time.Hour}, "k"), Cost: 1})
		n.checkError(t, named("z", "c", 1), limit.NotFound, "policy")
		want := map[string]PolicyStats{
			"p":         {Policy: "p", Allowed: 3, Refused: 1, PeakCount: 7, PeakUtilization: 0.7},
			"q":         {Policy: "q", Allowed: 1, PeakCount: 10, PeakUtilization: 0.25},
			"(inline)":  {Policy: "(inline)", Allowed: 1, PeakCount: 1, PeakUtilization: 0.25},
			"(unknown)": {Policy: "(unknown)", Errors: 1},
		}
		read := func() {
			t.Helper()
			got := n.ReadStats()
			expect.Equal(t, len(got), len(want), "policies")
			for _, s := range got {
				expect.Equal(t, s, want[s.Policy])
			}
		}
		read()
		// The peaks start anew, the counts go on.
		for name, s := range want {
			s.PeakCount, s.PeakUtilization = 0, 0
			want[name] = s
		}
		read()
		// A lowered limit leaves the key full, not more.
		c.setPolicies(`policies: [{name: p, algorithm: sliding_log, limit: 5, window: 1m}]`)
		n.check(t, named("p", "b", 1))
		want["p"] = PolicyStats{Policy: "p", Allowed: 3, Refused: 2, PeakCount: 5, PeakUtilization: 1}
		read() // q is gone and its counts are not
	})
}

// TestEverythingAtOnce is for the race detector: calls of all kinds, on all nodes, while policies, views and the clock
// change and the counters are read.
func TestEverythingAtOnce(t *testing.T) {
	const a = `policies: [{name: p, algorithm: sliding_log, limit: 10, window: 1m}, {name: c, algorithm: concurrency, limit: 9, ttl: 1s}]`
	const b = `policies: [{name: p, algorithm: token_bucket, limit: 7, window: 1m, overrides: [{key: "1", unlimited: true}]}, {name: c, algorithm: concurrency, limit: 3, ttl: 1s}]`
	inBubbleWithin(t, 3, store.Config{MaxKeys: 8}, Config{Timeout: 20 * time.Millisecond, Policies: policies(t, a)},
		func(t *testing.T, c *testCluster) {
			sets := []string{a, b}
			var wg sync.WaitGroup
			for g := range 12 {
				wg.Go(func() {
					for i := range 200 {
						n, key := c.nodes[(g+i)%3], fmt.Sprint(i%7)
						switch (g*7 + i) % 10 {
						case 0:
							n.SetPolicies(policies(t, sets[i%2]))
						case 1:
							c.see(n, func(p int) ownership.Route { return c.holder(n, (p+i%2)%3) })
						case 2:
							c.advance(time.Second)
						case 3:
							n.ReadStats()
							n.Store()
						case 4, 5:
							d, err := n.Acquire(t.Context(), limit.Acquire{Target: onPolicy("c", key), Cost: 1})
							if err == nil && d.LeaseID != "" {
								_, _ = c.nodes[i%3].Renew(t.Context(), onPolicy("c", key), d.LeaseID, 0)
								_, _ = c.nodes[i%3].Release(t.Context(), onPolicy("c", key), d.LeaseID)
							}
						default:
							inline := limit.Check{Target: inlineTarget(algo.Limit{Algorithm: algo.SlidingWindow,
								Limit: int64(i + 1), Window: time.Second}, key), Cost: 1}
							got, err := n.Check(t.Context(),
								[]limit.Check{named("p", key, 1), inline, named("p", key+"x", 1)})
							expect.True(t, err == nil && len(got) == 3, "%v %v", got, err)
						}
					}
				})
			}
			wg.Wait()
		})
}

// BenchmarkCheck is the local path: one check of a named policy that this node decides.
func BenchmarkCheck(b *testing.B) {
	l := started(b, Config{Policies: policies(b,
		`policies: [{name: p, algorithm: sliding_log, limit: 1000, window: 1s}]`)})
	checks, results := []limit.Check{named("p", "some-user-4711", 1)}, make([]limit.Result, 1)
	b.ReportAllocs()
	for b.Loop() {
		must.NoError(b, l.CheckTo(b.Context(), checks, nil, results))
	}
}

var keys = func() (list []string) {
	for i := range 1000 {
		list = append(list, fmt.Sprintf("user-%d", i))
	}
	return list
}()

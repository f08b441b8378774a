package limiter

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// always is a check that charges whether or not there is room.
func always(target limit.Target, cost int64) limit.Check {
	return limit.Check{Target: target, Cost: cost, Always: true}
}

// TestAlwaysEndsRememberedRefusals: what an entry node remembers of a refusal is gone once it has given units back, and
// a charge without room is never answered from memory.
func TestAlwaysEndsRememberedRefusals(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, hundred)}, func(t *testing.T, c *testCluster) {
		target := onPolicy("fixed_window", c.owned("fixed_window", 1, 0))
		entry := c.nodes[0]
		entry.check(t, always(target, 101))
		plain := limit.Check{Target: target, Cost: 1}
		for range 2 { // the second from memory
			must.True(t, !entry.check(t, plain).Allowed, "admitted")
		}
		carried := c.carried
		d := entry.check(t, always(target, 1))
		expect.True(t, !d.Allowed && d.Granted == 1 && c.carried != carried, "%+v, %d messages", d, c.carried-carried)
		entry.check(t, always(target, -50))
		d = entry.check(t, plain)
		expect.True(t, d.Allowed && d.Remaining == 47, "refused from memory: %+v", d)
	})
}

func TestAlwaysBadInput(t *testing.T) {
	inBubble(t, 1, Config{Policies: policies(t, hundred)}, func(t *testing.T, c *testCluster) {
		n, target := c.nodes[0], onPolicy("fixed_window", "k")
		partial := always(target, 1)
		partial.Partial = true
		n.checkError(t, partial, limit.Invalid, "partial")
		n.checkError(t, always(target, algo.MaxLimit+1), limit.Invalid, "cost")
		n.checkError(t, always(target, -algo.MaxLimit-1), limit.Invalid, "cost")
		n.checkError(t, limit.Check{Target: target, Cost: -1}, limit.Invalid, "cost")
		n.checkError(t, always(onPolicy("concurrency", "k"), 0), limit.Invalid, "policy")
		for _, checks := range [][]limit.Check{
			{always(target, 1), {Target: onPolicy("sliding_log", "k"), Cost: 1}},
			{{Target: onPolicy("sliding_log", "k"), Cost: 1}, always(target, 1)},
		} {
			wantError(t, expect.Err(n.CheckAll(t.Context(), checks)), limit.Invalid, "checks[1].always")
		}
		wantError(t, expect.Err(n.CheckAll(t.Context(), []limit.Check{always(target, -1)})), limit.Invalid, "always")
		wantError(t, expect.Err(n.CheckAll(t.Context(), []limit.Check{always(target, 0)})), limit.Invalid, "cost")
		_, err := n.CheckAll(t.Context(), []limit.Check{always(onPolicy("concurrency", "k"), 1)})
		wantError(t, err, limit.Invalid, "policy")
	})
}

// TestReservedNamespaces: what is the operator's is not for callers, and is not bounded like what is theirs.
func TestReservedNamespaces(t *testing.T) {
	inBubble(t, 2, Config{NoInline: true, InlineMaxWindow: time.Hour, InlineMaxKeys: 1},
		func(t *testing.T, c *testCluster) {
			l := algo.Limit{Algorithm: algo.FixedWindow, Limit: 10, Window: 365 * 24 * time.Hour, Period: algo.Epoch}
			for _, key := range []string{"a", "b", "c", "d", "e"} {
				target := limit.Target{Limit: &l, Namespace: limit.EnvoyNamespace + "d", Key: key, Configured: true}
				for i := range 2 {
					d := c.nodes[i].check(t, limit.Check{Target: target, Cost: 1})
					expect.True(t, d.Allowed && !d.FailedOpen && d.Remaining == 9-int64(i), "%+v", d)
				}
				target.Configured = false
				c.nodes[0].checkError(t, limit.Check{Target: target, Cost: 1}, limit.Invalid, "namespace")
				configured := target
				configured.Configured = true
				_, err := c.nodes[0].Check(t.Context(), []limit.Check{{Target: configured}, {Target: target, Cost: 1}})
				wantError(t, err, limit.Invalid, "checks[1].namespace") // behind one of the operator's
				target.Namespace, target.Configured = "mine", true
				c.nodes[0].checkError(t, limit.Check{Target: target, Cost: 1}, limit.Invalid, "namespace")
			}
		})
}

// TestAlwaysBounded: what a caller who may not charge has charged without room stays within the limit, with every
// algorithm, through any node.
func TestAlwaysBounded(t *testing.T) {
	forEachRate(t, hundred, func(t *testing.T, c *testCluster, p *policy.Policy) {
		for n := range 3 {
			target := onPolicy(p.Name, c.owned(p.Name, n, 0))
			for i, step := range []struct{ cost, granted, remaining int64 }{{60, 60, 40}, {1 << 53, 40, 0},
				{1 << 53, 0, 0}, {1, 0, 0}} {
				q := always(target, step.cost)
				q.Bounded = true
				d := c.nodes[i%3].check(t, q)
				several := len(d.Limits) > 0 // of which the larger one has more room
				expect.True(t, d.Allowed == (i == 0) && (d.Granted == step.granted || several) &&
					d.Remaining == step.remaining, "node %d, step %d: %+v, want %+v", n, i, d, step)
			}
			d := c.nodes[0].check(t, named(p.Name, target.Key, 1))
			expect.True(t, !d.Allowed && d.RetryAfter <= 24*time.Hour, "node %d: one unit more: %+v", n, d)
		}
	})
}

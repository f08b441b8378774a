package limiter

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func (n *testNode) reserve(t testing.TB, r limit.Reserve) limit.Decision {
	t.Helper()
	d := must.Value(n.Reserve(t.Context(), r))(t)
	return d
}

// commit ends a reservation with a cost that is to be no more than what was reserved.
func (n *testNode) commit(t testing.TB, target limit.Target, id string, cost int64) (int64, error) {
	got, err := n.Commit(t.Context(), limit.Commit{Target: target, ReservationID: id, Amount: units(cost), Exact: true})
	return got.Refunded, err
}

func (n *testNode) left(t testing.TB, target limit.Target) int64 {
	t.Helper()
	return n.check(t, limit.Check{Target: target}).Remaining
}

func TestWhatCannotBeReserved(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, hundred)}, func(t *testing.T, c *testCluster) {
		log := onPolicy("sliding_log", "k")
		for _, test := range []struct {
			r    limit.Reserve
			kind limit.Kind
			what string
		}{
			{limit.Reserve{Target: log}, limit.Invalid, "cost"},
			{limit.Reserve{Target: log, Amount: units(-1)}, limit.Invalid, "cost"},
			{limit.Reserve{Target: log, Amount: units(1), TTL: time.Hour + 1}, limit.Invalid, "ttl"},
			{limit.Reserve{Target: log, Amount: units(1), TTL: 1}, limit.Invalid, "ttl"},
			{limit.Reserve{Target: limit.Target{Policy: "sliding_log"}, Amount: units(1)}, limit.Invalid, "key"},
			{limit.Reserve{Target: onPolicy("nope", "k"), Amount: units(1)}, limit.NotFound, "policy"},
			{limit.Reserve{Target: onPolicy("concurrency", "k"), Amount: units(1)}, limit.Invalid, "policy"},
			{limit.Reserve{Target: inlineTarget(algo.Limit{Algorithm: algo.Concurrency, Limit: 1, Window: time.Second},
				"k"), Amount: units(1)}, limit.Invalid, "limit"},
		} {
			for _, n := range c.nodes {
				wantError(t, expect.Err(n.Reserve(t.Context(), test.r)), test.kind, test.what)
			}
		}
		_, err := c.nodes[0].commit(t, onPolicy("concurrency", "k"), "00000000000000000000000100000000", 1)
		wantError(t, err, limit.Invalid, "policy")
	})
}

func TestReserveWhereNothingIsHeld(t *testing.T) {
	const text = `policies:
  - {name: shadow, algorithm: sliding_log, limit: 1, window: 1m, shadow: true}
  - {name: free, algorithm: sliding_log, limit: 1, window: 1m, overrides: [{key: k, unlimited: true}]}
  - {name: blocked, algorithm: sliding_log, limit: 1, window: 1m, overrides: [{key: k, blocked: true}]}
  - {name: open, algorithm: sliding_log, limit: 1, window: 1m}
  - {name: closed, algorithm: sliding_log, limit: 1, window: 1m, on_error: closed}
`
	inBubble(t, 2, Config{Policies: policies(t, text)}, func(t *testing.T, c *testCluster) {
		for policy, want := range map[string]limit.Decision{
			"shadow":  {Allowed: true, Shadow: true},
			"free":    {Allowed: true},
			"blocked": {},
			"open":    {Allowed: true, FailedOpen: true},
			"closed":  {FailedClosed: true},
		} {
			key, cost := "k", int64(2)
			if want.FailedOpen || want.FailedClosed {
				c.tamper(refused)
				key = c.owned(policy, 1, 0)
			}
			d := c.nodes[0].reserve(t, limit.Reserve{Target: onPolicy(policy, key), Amount: units(cost)})
			expect.True(t, d.Allowed == want.Allowed && d.Shadow == want.Shadow && d.FailedOpen == want.FailedOpen &&
				d.FailedClosed == want.FailedClosed && d.ReservationID == "", "%s: %+v", policy, d)
			c.tamper(nil)
			_, err := c.nodes[0].Cancel(t.Context(), onPolicy(policy, key), "00000000000000000000000100000000")
			wantError(t, err, limit.NotFound, "reservation_id")
		}
	})
}

func TestACommitForgetsRefusals(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, refusing)}, func(t *testing.T, c *testCluster) {
		n, target := c.nodes[0], onPolicy("log", c.owned("log", 1, 0))
		d := n.reserve(t, limit.Reserve{Target: target, Amount: units(5)})
		n.check(t, limit.Check{Target: target, Cost: 1})
		must.Value(n.commit(t, target, d.ReservationID, 3))(t)
		for range 2 { // the same cost: of another it was never said that it is refused
			expect.True(t, n.check(t, limit.Check{Target: target, Cost: 1}).Allowed, "refused")
		}
	})
}

// TestReservationsUnderConcurrentCallers reserves, settles and checks from all sides: at no moment is more in use than
// the limit, and in the end exactly what was kept.
func TestReservationsUnderConcurrentCallers(t *testing.T) {
	for _, policy := range []string{"sliding_log", "token_bucket", "fixed_window"} {
		inBubble(t, 3, Config{Policies: policies(t, hundred)}, func(t *testing.T, c *testCluster) {
			target := onPolicy(policy, "k")
			var kept, held atomic.Int64
			var callers sync.WaitGroup
			for i := range 60 {
				callers.Go(func() {
					random := rand.New(rand.NewPCG(uint64(i), 0))
					n, other := c.nodes[i%3], c.nodes[(i+1)%3]
					for range 20 {
						cost := 1 + random.Int64N(10)
						d := n.reserve(t, limit.Reserve{Target: target, Amount: units(cost)})
						if !d.Allowed {
							continue
						}
						now := held.Add(cost)
						expect.True(t, now <= 100, "%d in use", now)
						keep := int64(0)
						if random.IntN(4) == 0 {
							keep = random.Int64N(cost + 1)
						}
						held.Add(keep - cost) // before the units are given back, so that they are not counted twice
						kept.Add(keep)
						refunded, err := other.commit(t, target, d.ReservationID, keep)
						expect.True(t, refunded == cost-keep && err == nil,
							"%d of %d back, %v", refunded, cost-keep, err)
					}
				})
			}
			callers.Wait()
			left := c.nodes[0].left(t, target)
			expect.True(t, left == 100-kept.Load(), "%s: %d left, %d kept", policy, left, kept.Load())
		})
	}
}

package limiter

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
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

// TestACommitKeepsTheActualCost does so with every algorithm, through any node.
func TestACommitKeepsTheActualCost(t *testing.T) {
	forEachRate(t, hundred, func(t *testing.T, c *testCluster, p *policy.Policy) {
		for n := range 3 {
			target := onPolicy(p.Name, c.owned(p.Name, n, 0))
			d := c.nodes[0].reserve(t, limit.Reserve{Target: target, Amount: units(60)})
			must.True(t, d.Allowed && d.Granted == 60 && d.Remaining == 40 && len(d.ReservationID) == 32,
				"%+v", d)
			if d := c.nodes[1].check(t, limit.Check{Target: target, Cost: 41}); d.Allowed {
				t.Errorf("admitted beside a reservation: %+v", d)
			}
			refunded, err := c.nodes[1].commit(t, target, d.ReservationID, 25)
			expect.True(t, refunded == 35 && err == nil, "commit: %d, %v", refunded, err)
			expect.Equal(t, c.nodes[2].left(t, target), 75, "left")
			refunded, err = c.nodes[2].commit(t, target, d.ReservationID, 25)
			expect.True(t, refunded == 35 && err == nil, "commit, repeated: %d, %v", refunded, err)
			_, err = c.nodes[2].commit(t, target, d.ReservationID, 24)
			wantError(t, err, limit.NotFound, "reservation_id")
			_, err = c.nodes[2].Cancel(t.Context(), target, d.ReservationID)
			wantError(t, err, limit.NotFound, "reservation_id")
			expect.Equal(t, c.nodes[2].left(t, target), 75, "left after another commit and a cancel")
		}
	})
}

func TestReservations(t *testing.T) {
	target := onPolicy("sliding_log", "k")
	type end func(t *testing.T, c *testCluster, id string) error
	cancel := func(t *testing.T, c *testCluster, id string) error {
		_, err := c.nodes[1].Cancel(t.Context(), target, id)
		return err
	}
	keep := func(cost int64) end {
		return func(t *testing.T, c *testCluster, id string) error {
			_, err := c.nodes[1].commit(t, target, id, cost)
			return err
		}
	}
	for _, test := range []struct {
		name  string
		after time.Duration
		end   end
		kind  limit.Kind // of the error; 0: none
		what  string
		left  int64
	}{
		{"cancel", 19 * time.Second, cancel, 0, "", 100},
		{"too late", 21 * time.Second, cancel, limit.NotFound, "reservation_id", 90},
		{"commit of nothing", 0, keep(0), 0, "", 100},
		{"commit of all", 0, keep(10), 0, "", 90},
		{"commit of more", 0, keep(11), limit.Invalid, "cost", 90},
		{"commit of less than nothing", 0, keep(-1), limit.Invalid, "cost", 90},
		{"commit of more, then of less", 0, func(t *testing.T, c *testCluster, id string) error {
			wantError(t, keep(11)(t, c, id), limit.Invalid, "cost")
			return keep(5)(t, c, id)
		}, 0, "", 95},
		{"of another key", 0, func(t *testing.T, c *testCluster, id string) error {
			_, err := c.nodes[1].Cancel(t.Context(), onPolicy("sliding_log", "other"), id)
			return err
		}, limit.NotFound, "reservation_id", 90},
		{"not an id", 0, func(t *testing.T, c *testCluster, _ string) error {
			return cancel(t, c, "0000000000000000")
		}, limit.Invalid, "reservation_id", 90},
		{"after a reset", 0, func(t *testing.T, c *testCluster, id string) error {
			must.NoError(t, c.nodes[1].Reset(t.Context(), target))
			return cancel(t, c, id)
		}, limit.NotFound, "reservation_id", 100},
		{"after the units have left the window", 0, func(t *testing.T, c *testCluster, _ string) error {
			d := c.nodes[0].reserve(t, limit.Reserve{Target: target, Amount: units(10), TTL: time.Hour})
			c.advance(2 * time.Minute)
			refunded, err := c.nodes[1].commit(t, target, d.ReservationID, 5)
			expect.Equal(t, refunded, 0, "refunded")
			return err
		}, 0, "", 100},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, 3, Config{Policies: policies(t, hundred)}, func(t *testing.T, c *testCluster) {
				d := c.nodes[0].reserve(t, limit.Reserve{Target: target, Amount: units(10), TTL: 20 * time.Second})
				c.advance(test.after)
				err := test.end(t, c, d.ReservationID)
				if test.kind == 0 && err != nil {
					t.Error(err)
				} else if test.kind != 0 {
					wantError(t, err, test.kind, test.what)
				}
				expect.Equal(t, c.nodes[2].left(t, target), test.left, "left")
			})
		})
	}
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

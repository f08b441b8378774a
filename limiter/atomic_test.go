package limiter

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
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

const atomicPolicies = `policies:
  - {name: a, algorithm: sliding_log, limit: 10, window: 1m}
  - {name: b, algorithm: token_bucket, limit: 10, window: 1d}
  - {name: c, algorithm: fixed_window, limit: 10, window: 1m}
  - {name: queue, algorithm: leaky_bucket, limit: 10, window: 1s}
  - {name: slow, algorithm: leaky_bucket, limit: 5, window: 1s}
  - {name: closed, algorithm: sliding_log, limit: 10, window: 1m, on_error: closed}
  - {name: shadow, algorithm: sliding_log, limit: 1, window: 1m, shadow: true}
  - {name: jobs, algorithm: concurrency, limit: 10, ttl: 1m}
  - {name: denied, algorithm: sliding_log, limit: 10, window: 1m, count_denied: true}
  - {name: free, algorithm: sliding_log, limit: 1, window: 1m, overrides: [{prefix: key, unlimited: true}]}
`

func (n *testNode) all(t testing.TB, checks ...limit.Check) limit.AllDecision {
	t.Helper()
	all := must.Value(n.CheckAll(t.Context(), checks))(t)
	must.True(t, len(all.Decisions) == len(checks), "%d decisions for %d checks", len(all.Decisions), len(checks))
	for i, d := range all.Decisions {
		expect.True(t, d.ReservationID == "" && d.RememberFor == 0 &&
			(all.Allowed || d.Granted == 0 && d.Delay == 0) && (!all.Allowed || d.Allowed),
			"decision %d of %+v", i, all)
	}
	return all
}

// spread is checks of cost 1 of policies a, b and c, one on each node.
func (c *testCluster) spread() []limit.Check {
	return []limit.Check{named("a", c.owned("a", 0, 0), 1), named("b", c.owned("b", 1, 0), 1),
		named("c", c.owned("c", 2, 0), 1)}
}

// wantLeft tells what is left of each key, and that no reservation is pending.
func (c *testCluster) wantLeft(checks []limit.Check, left ...int64) {
	c.t.Helper()
	for i, q := range checks {
		q.Cost = 0
		for _, n := range c.nodes {
			got := n.check(c.t, q).Remaining
			expect.True(c.t, got == left[i], "%s: %d left, want %d", q.Policy, got, left[i])
		}
	}
}

func TestAtomicRepeatsAreSummed(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, atomicPolicies)}, func(t *testing.T, c *testCluster) {
		x, y := named("a", c.owned("a", 1, 0), 3), named("b", c.owned("b", 2, 0), 1)
		all := c.nodes[0].all(t, x, y, x, x)
		expect.True(t, all.Allowed && all.Decisions[0].Granted == 3 && all.Decisions[3].Granted == 3 &&
			all.Decisions[3].Remaining == 1, "%+v", all)
		x.Cost = 1
		all = c.nodes[0].all(t, x, y, x)
		expect.True(t, !all.Allowed && !all.Decisions[0].Allowed && !all.Decisions[2].Allowed &&
			all.Decisions[1].Allowed, "%+v", all)
		c.wantLeft([]limit.Check{x, y}, 1, 9)
		// All of one key is one check, for which nothing needs to be settled. What was refused before is, behind its
		// answer.
		synctest.Wait()
		c.wantMessages(1, "one key", func() {
			expect.True(t, c.nodes[0].all(t, y, y, y).Allowed, "refused")
		})
		c.wantLeft([]limit.Check{y}, 6)
		inline := func(lim, cost int64) limit.Check {
			return limit.Check{Target: inlineTarget(algo.Limit{Algorithm: algo.SlidingLog, Limit: lim,
				Window: time.Minute}, "k"), Cost: cost}
		}
		all = c.nodes[0].all(t, inline(5, 2), inline(5, 2), y)
		expect.True(t, all.Allowed && all.Decisions[0].Remaining == 1, "%+v", all)
		_, err := c.nodes[0].CheckAll(t.Context(), []limit.Check{inline(5, 2), inline(6, 2)})
		wantError(t, err, limit.Invalid, "checks[1].limit")
		x.Cost = algo.MaxLimit
		_, err = c.nodes[0].CheckAll(t.Context(), []limit.Check{x, y, x})
		wantError(t, err, limit.Invalid, "checks[2].cost")
	})
}

func TestAtomicDelayIsTheLargest(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, atomicPolicies)}, func(t *testing.T, c *testCluster) {
		queue, slow := named("queue", c.owned("queue", 1, 0), 1), named("slow", c.owned("slow", 2, 0), 1)
		c.nodes[0].check(t, named("queue", queue.Key, 2))
		c.nodes[0].check(t, named("slow", slow.Key, 2))
		all := c.nodes[0].all(t, queue, slow)
		expect.True(t, all.Allowed && all.Delay == 400*time.Millisecond &&
			all.Decisions[0].Delay == 200*time.Millisecond, "%+v", all)
		other := c.nodes[0].all(t, slow, queue)
		expect.True(t, other.Allowed && other.Delay > all.Delay && other.Delay == other.Decisions[0].Delay,
			"the other way round: %+v", other)
	})
}

func TestAtomicErrors(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, atomicPolicies)}, func(t *testing.T, c *testCluster) {
		good := named("a", c.owned("a", 1, 0), 1)
		with := func(change func(*limit.Check)) limit.Check {
			q := named("b", c.owned("b", 2, 0), 1)
			change(&q)
			return q
		}
		for _, test := range []struct {
			q     limit.Check
			kind  limit.Kind
			field string
		}{
			{with(func(q *limit.Check) { q.Partial = true }), limit.Invalid, "partial"},
			{with(func(q *limit.Check) { q.Cost = 0 }), limit.Invalid, "cost"},
			{with(func(q *limit.Check) { q.Cost = -1 }), limit.Invalid, "cost"},
			{with(func(q *limit.Check) { q.RequestID = "r" }), limit.Invalid, "request_id"},
			{with(func(q *limit.Check) { q.Key = "" }), limit.Invalid, "key"},
			{with(func(q *limit.Check) { q.Policy = "jobs" }), limit.Invalid, "policy"},
			{with(func(q *limit.Check) { q.Policy = "denied" }), limit.Invalid, "policy"},
			{with(func(q *limit.Check) { q.Policy = "nope" }), limit.NotFound, "policy"},
			{with(func(q *limit.Check) {
				q.Policy, q.Limit = "", &algo.Limit{Algorithm: algo.SlidingLog, Limit: 1, Window: time.Second,
					CountDenied: true}
			}), limit.Invalid, "limit"},
			{with(func(q *limit.Check) {
				q.Policy, q.Limit = "", &algo.Limit{Algorithm: algo.Concurrency, Limit: 1, Window: time.Second}
			}), limit.Invalid, "limit"},
		} {
			for _, n := range c.nodes {
				_, err := n.CheckAll(t.Context(), []limit.Check{good, test.q})
				wantError(t, err, test.kind, "checks[1]."+test.field)
				wantError(t, expect.Err(n.CheckAll(t.Context(), []limit.Check{test.q})), test.kind, test.field)
			}
		}
		wantError(t, expect.Err(c.nodes[0].CheckAll(t.Context(), nil)), limit.Invalid, "checks")
		_, err := c.nodes[0].CheckAll(t.Context(), make([]limit.Check, limit.MaxBatch+1))
		wantError(t, err, limit.TooLarge, "checks")
		c.wantLeft([]limit.Check{good}, 10)
	})
}

func TestAtomicWithWhatIsAlwaysAdmitted(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, atomicPolicies)}, func(t *testing.T, c *testCluster) {
		good := named("a", c.owned("a", 1, 0), 1)
		shadow, free := named("shadow", c.owned("shadow", 2, 0), 5), named("free", c.owned("free", 2, 0), 5)
		all := c.nodes[0].all(t, good, shadow, free)
		expect.True(t, all.Allowed && all.Decisions[1].Shadow && all.Decisions[1].Granted == 5 &&
			all.Decisions[2].Limit == algo.Unlimited, "%+v", all)
		good.Cost = 10
		all = c.nodes[0].all(t, good, shadow, free)
		expect.True(t, !all.Allowed && all.Decisions[1].Allowed && all.Decisions[2].Allowed &&
			all.Decisions[2].Remaining == algo.Unlimited, "%+v", all)
		c.wantLeft([]limit.Check{good, shadow}, 9, 1)
	})
}

func TestAtomicWhereAnOwnerIsOutOfReach(t *testing.T) {
	unplug := func(name string) wire {
		return func(_ context.Context, _ *testNode, to ownership.Node, _ []*Op, deliver func()) {
			if to.Name != name {
				deliver()
			}
		}
	}
	inBubble(t, 3, Config{Policies: policies(t, atomicPolicies)}, func(t *testing.T, c *testCluster) {
		good, open, closed := named("a", c.owned("a", 1, 0), 1), named("b", c.owned("b", 2, 0), 1),
			named("closed", c.owned("closed", 2, 0), 1)
		c.tamper(unplug("n2"))
		all := c.nodes[0].all(t, good, open)
		expect.True(t, all.Allowed && all.Decisions[1].FailedOpen && !all.Decisions[0].FailedOpen, "open: %+v", all)
		all = c.nodes[0].all(t, good, closed)
		expect.True(t, !all.Allowed && all.Decisions[1].FailedClosed && all.Decisions[0].Allowed, "closed: %+v", all)
		c.nodes[0].Close()
		c.tamper(nil)
		c.wantLeft([]limit.Check{good, open, closed}, 9, 10, 10)
	})
}

// TestAtomicTakesNoPlaces: a state that is alone needs no reservation, and those of several are under no bound of their
// keys. Where nothing more may be reserved on_error answers, as where the store is full.
func TestAtomicTakesNoPlaces(t *testing.T) {
	for _, test := range []struct {
		cfg  store.Config
		keys []string
		open bool
	}{
		{store.Config{MaxReservations: -1}, []string{"k", "k"}, false},
		{store.Config{MaxKeyReservations: -1}, []string{"k", "l"}, false},
		{store.Config{MaxReservations: -1}, []string{"k", "l"}, true},
	} {
		l := started(t, Config{Policies: policies(t, atomicPolicies), Store: NewStore(test.cfg, true)})
		all, err := l.CheckAll(t.Context(), []limit.Check{named("a", test.keys[0], 1), named("a", test.keys[1], 1)})
		expect.True(t, err == nil && all.Allowed && all.Decisions[0].FailedOpen == test.open &&
			all.Decisions[1].FailedOpen == test.open, "%+v: %+v, %v", test, all, err)
	}
}

// TestReservationsOutliveTheirCall: what an atomic check reserves is held for longer than this node takes to settle it,
// and of several elements about one state the longest time counts.
func TestReservationsOutliveTheirCall(t *testing.T) {
	l := started(t, Config{Policies: policies(t, atomicPolicies), Timeout: 3 * time.Second})
	expect.True(t, l.hold() > 2*3*time.Second, "%v", l.hold())
	sum, err := l.gather("reserves", 2, func(i int) (*Op, *limit.Error) {
		return NewOp(OpReserve, named("a", "k", 1), Extra{TTL: []time.Duration{time.Minute, time.Second}[i]}), nil
	})
	must.Equal(t, err, nil)
	expect.True(t, len(sum.ops) == 1 && sum.ops[0].TTL == time.Minute && sum.ops[0].Cost == 2, "%+v", sum.ops)
}

func TestAtomicOfACallerWhoLeaves(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, atomicPolicies)}, func(t *testing.T, c *testCluster) {
		checks := c.spread()
		checks[2].Policy, checks[2].Key = "closed", c.owned("closed", 2, 0)
		ctx, cancel := context.WithCancel(t.Context())
		c.tamper(func(ctx context.Context, _ *testNode, to ownership.Node, _ []*Op, deliver func()) {
			if to.Name != "n2" {
				if ctx.Err() == nil {
					deliver()
				}
				return
			}
			synctest.Wait() // the other owner has answered
			cancel()
			<-ctx.Done()
		})
		expect.True(t, !must.Value(c.nodes[0].CheckAll(ctx, checks))(t).Allowed, "admitted")
		c.nodes[0].Close()
		c.tamper(nil)
		c.wantLeft(checks, 10, 10, 10)
	})
}

// TestAtomicNeverAdmitsWithoutACharge loses messages and answers at random: there may be charges without an admission,
// and never the reverse.
func TestAtomicNeverAdmitsWithoutACharge(t *testing.T) {
	const text = `policies:
  - {name: a, algorithm: sliding_log, limit: 60, window: 1h, on_error: closed}
  - {name: b, algorithm: token_bucket, limit: 60, window: 366d, on_error: closed}
  - {name: c, algorithm: fixed_window, limit: 60, window: 1h, on_error: closed}
`
	for seed := range uint64(40) {
		inBubble(t, 3, Config{Policies: policies(t, text)}, func(t *testing.T, c *testCluster) {
			var mu sync.Mutex
			random := rand.New(rand.NewPCG(seed, 9))
			roll := func(n int) int {
				mu.Lock()
				defer mu.Unlock()
				return random.IntN(n)
			}
			c.tamper(func(ctx context.Context, _ *testNode, _ ownership.Node, ops []*Op, deliver func()) {
				switch roll(6) {
				case 0: // the message is lost
				case 1: // the answer is
					deliver()
					unanswered(ops)
				default:
					deliver()
				}
			})
			admitted := map[string]int64{}
			for range 60 {
				var checks []limit.Check
				for _, p := range []string{"a", "b", "c"} {
					checks = append(checks, named(p, c.owned(p, roll(3), 0), 1+int64(roll(3))))
				}
				if c.nodes[roll(3)].all(t, checks...).Allowed {
					for _, q := range checks {
						admitted[fmt.Sprint(q.Policy, " ", q.Key)] += q.Cost
					}
				}
			}
			for _, n := range c.nodes {
				n.Close()
			}
			c.tamper(nil)
			for _, p := range []string{"a", "b", "c"} {
				for i := range 3 {
					key := c.owned(p, i, 0)
					used := 60 - c.nodes[0].left(t, onPolicy(p, key))
					got := admitted[fmt.Sprint(p, " ", key)]
					expect.True(t, got <= used, "seed %d: %s %s: %d admitted, %d charged", seed, p, key, got, used)
				}
			}
		})
	}
}

// TestARefusedAtomicCheckLeavesNoTrace has a user, most of whose units are used, refused again and again because the
// tenant has none left: after its window the user has all of them.
func TestARefusedAtomicCheckLeavesNoTrace(t *testing.T) {
	const text = `policies:
  - {name: tenant, algorithm: fixed_window, limit: 1, window: 1h}
  - {name: log, algorithm: sliding_log, limit: 10, window: 3s}
  - {name: window, algorithm: sliding_window, limit: 10, window: 3s}
  - {name: counter, algorithm: sliding_counter, limit: 10, window: 3s}
  - {name: fixed, algorithm: fixed_window, limit: 10, window: 3s}
  - {name: bucket, algorithm: token_bucket, limit: 10, window: 3s}
`
	for _, policy := range []string{"log", "window", "counter", "fixed", "bucket"} {
		for owner := range 3 {
			t.Run(fmt.Sprint(policy, " of node ", owner), func(t *testing.T) {
				inBubble(t, 3, Config{Policies: policies(t, text)}, func(t *testing.T, c *testCluster) {
					n := c.nodes[0]
					user, tenant := named(policy, c.owned(policy, owner, 0), 1), named("tenant", "k", 1)
					n.check(t, tenant)
					first := user
					first.Cost = 9
					n.check(t, first)
					for range 60 {
						c.advance(100 * time.Millisecond)
						must.True(t, !n.all(t, user, tenant).Allowed, "admitted beyond the tenant's limit")
					}
					expect.Equal(t, n.left(t, user.Target), 10, "left of 10, of which none was used in the last window")
				})
			})
		}
	}
}

// charges are checks that charge always, as a report of work that has been done does.
func charges(checks ...limit.Check) []limit.Check {
	for i := range checks {
		checks[i].Always = true
	}
	return checks
}

// TestAtomicCharges: all are charged, also beyond the limit, or none where an owner cannot be asked.
func TestAtomicCharges(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, atomicPolicies)}, func(t *testing.T, c *testCluster) {
		a, b := named("a", c.owned("a", 1, 0), 4), named("b", c.owned("b", 2, 0), 4)
		ask := func(want bool, checks ...limit.Check) limit.AllDecision {
			t.Helper()
			all, err := c.nodes[0].CheckAll(t.Context(), charges(checks...))
			expect.True(t, err == nil && all.Allowed == want, "%+v, %v, want allowed %v", all, err, want)
			return all
		}
		ask(true, a, b)
		all := ask(false, a, a, named("denied", c.owned("denied", 2, 0), 3))
		expect.Equal(t, all.Decisions[0].Remaining, 0, "a repeat is summed: %+v", all)
		// 12 of 10 are used: there is no room, and all is charged.
		all = ask(false, a, b)
		expect.True(t, !all.Decisions[0].Allowed && all.Decisions[1].Allowed && all.Decisions[1].Remaining == 2,
			"%+v", all)
		ask(false, b)
		c.nodes[0].Close() // which settles
		for _, n := range c.nodes {
			d := n.check(t, always(b.Target, 0))
			expect.True(t, !d.Allowed && d.Remaining == 0, "12 of 10: %+v", d)
		}
	})
	for _, lost := range []bool{true, false} { // the message to the second owner, or its answer
		inBubble(t, 3, Config{Policies: policies(t, atomicPolicies)}, func(t *testing.T, c *testCluster) {
			a, b := named("a", c.owned("a", 1, 0), 1), named("b", c.owned("b", 2, 0), 1)
			c.nodes[0].check(t, named("a", a.Key, 3))
			var once atomic.Bool
			c.tamper(func(_ context.Context, _ *testNode, to ownership.Node, ops []*Op, deliver func()) {
				hit := to.Name == "n2" && once.CompareAndSwap(false, true)
				if !hit || !lost {
					deliver()
				}
				if hit {
					unanswered(ops)
				}
			})
			_, err := c.nodes[0].CheckAll(t.Context(), charges(named("a", a.Key, 20), b))
			wantError(t, err, limit.Unavailable, "")
			c.nodes[0].Close()
			c.wantLeft([]limit.Check{a, b}, 7, 10)
		})
	}
}

package limiter

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func units(n int64) limit.Amount { return limit.Amount{Cost: n} }

// TestEachByItself: of several reservations on several nodes, each is extended and committed by itself.
func TestEachByItself(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, hundred)}, func(t *testing.T, c *testCluster) {
		var extends []limit.Extend
		var commits []limit.Commit
		for n := range 3 {
			target := onPolicy("sliding_log", c.owned("sliding_log", n, 0))
			d := c.nodes[0].reserve(t, limit.Reserve{Target: target, Amount: units(40)})
			extends = append(extends,
				limit.Extend{Target: target, ReservationID: d.ReservationID, Amount: units(int64(30 * (n + 1)))})
			commits = append(commits, limit.Commit{Target: target, ReservationID: d.ReservationID, Amount: units(50)})
		}
		unknown := onPolicy("nothing", "k")
		extends = append(extends,
			limit.Extend{Target: unknown, ReservationID: extends[0].ReservationID, Amount: units(1)})
		extended, err := c.nodes[1].ExtendEach(t.Context(), extends)
		must.True(t, err == nil && len(extended) == 4, "%v %v", extended, err)
		for i, want := range []int64{30, 60, 0} {
			r := extended[i]
			expect.True(t, r.Err == nil && r.Granted == want && r.Allowed == (want > 0), "%d: %+v", i, r)
		}
		if bad, ok := errors.AsType[*limit.Error](extended[3].Err); !ok || bad.Kind != limit.NotFound ||
			bad.Field != "policy" {
			t.Errorf("%+v", extended[3])
		}
		wrong := commits[0]
		wrong.ReservationID = "x"
		commits = append(commits, wrong,
			limit.Commit{Target: commits[0].Target, ReservationID: commits[1].ReservationID})
		settled, err := c.nodes[2].CommitEach(t.Context(), commits)
		must.True(t, err == nil && len(settled) == 5, "%v %v", settled, err)
		for i, want := range []limit.Settled{{Refunded: 20}, {Refunded: 50}, {Excess: 10}} {
			r := settled[i]
			expect.True(t, r.Err == nil && r.Settled == want, "%d: %+v, want %+v", i, r, want)
			left := c.nodes[0].left(t, commits[i].Target)
			expect.True(t, left == 50, "%d: %d are left", i, left)
		}
		for i, kind := range map[int]limit.Kind{3: limit.Invalid, 4: limit.NotFound} {
			if bad, ok := errors.AsType[*limit.Error](settled[i].Err); !ok || bad.Kind != kind ||
				bad.Field != "reservation_id" {
				t.Errorf("%+v", settled[i])
			}
		}
		for n, kind := range map[int]limit.Kind{0: limit.Invalid, limit.MaxBatch + 1: limit.TooLarge} {
			_, err := c.nodes[0].CommitEach(t.Context(), make([]limit.Commit, n))
			bad, ok := errors.AsType[*limit.Error](err)
			expect.True(t, ok && bad.Kind == kind && bad.Field == "commits", "%d: %v", n, err)
		}
	})
}

// TestCharge: never refused, charged once, and the retry_after that it leaves is exact.
func TestCharge(t *testing.T) {
	const debts = hundred + `
  - {name: carried, algorithm: fixed_window, limit: 100, window: 1m, carry_debt: true}
  - {name: bounded, algorithm: token_bucket, limit: 100, window: 1m, max_debt: 20}
`
	forEachRate(t, debts, func(t *testing.T, c *testCluster, p *policy.Policy) {
		target := onPolicy(p.Name, "k")
		charge := limit.Charge{Target: target, Amount: units(70), RequestID: "a"}
		for i := range 3 {
			d, err := c.nodes[i].Charge(t.Context(), charge)
			expect.True(t, err == nil && d.Allowed && d.Granted == 70 && d.Remaining == 30, "%+v, %v", d, err)
		}
		want := int64(70)
		if p.Name == "bounded" {
			want = 50
		}
		charge.RequestID = "b"
		for i := range 3 {
			d, err := c.nodes[i].Charge(t.Context(), charge)
			expect.True(t, err == nil && !d.Allowed && d.Granted == want && d.Remaining == 0 && !d.FailedOpen,
				"beyond the limit: %+v, %v", d, err)
		}
		charge.Cost = 71
		wantError(t, expect.Err(c.nodes[0].Charge(t.Context(), charge)), limit.Invalid, "request_id")
		d := c.nodes[1].check(t, limit.Check{Target: target, Cost: 1})
		must.True(t, !d.Allowed && d.RetryAfter > 0, "%+v", d)
		c.advance(d.RetryAfter - time.Microsecond) // a tick of the log's clock and more
		again := c.nodes[2].check(t, limit.Check{Target: target, Cost: 1})
		expect.True(t, !again.Allowed, "admitted before retry_after (%v): %+v", d.RetryAfter, again)
		c.advance(limit.MaxRemember) // so long a refusal may be remembered
		again = c.nodes[2].check(t, limit.Check{Target: target, Cost: 1})
		expect.True(t, again.Allowed, "refused after retry_after (%v): %+v", d.RetryAfter, again)
	})
	inBubble(t, 2, Config{Policies: policies(t, hundred)}, func(t *testing.T, c *testCluster) {
		c.tamper(lost)
		target := onPolicy("sliding_log", c.owned("sliding_log", 1, 0))
		_, err := c.nodes[0].Charge(t.Context(), limit.Charge{Target: target, Amount: units(1)})
		wantError(t, err, limit.Unavailable, "")
	})
}

const tokens = `policies:
  - name: tokens
    algorithm: fixed_window
    align: calendar
    window: month
    anchor: 17
    limit: 1_000_000
    prices: {input: 3, cached: 0, output: 15}
    estimate: auto
    initial_estimate: 700
    overrides: [{key: small, limit: 500}]
  - {name: fixed, algorithm: sliding_log, limit: 1000, window: 1m, estimate: 40}
  - {name: plain, algorithm: sliding_log, limit: 1000, window: 1m}
`

func TestPricesAndEstimates(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, tokens)}, func(t *testing.T, c *testCluster) {
		n, target := c.nodes[0], onPolicy("tokens", c.owned("tokens", 1, 0))
		used := func(u limit.Usage) limit.Amount { return limit.Amount{Usage: u} }
		d := n.reserve(t, limit.Reserve{Target: target,
			Amount: used(limit.Usage{"input": 100, "cached": 1 << 40, "output": 10})})
		expect.Equal(t, d.Granted, 450, "%+v", d)
		if d, err := n.Extend(t.Context(), limit.Extend{Target: target, ReservationID: d.ReservationID,
			Amount: used(limit.Usage{"output": 2})}); err != nil || d.Granted != 30 {
			t.Errorf("%+v, %v", d, err)
		}
		got, err := n.Commit(t.Context(),
			limit.Commit{Target: target, ReservationID: d.ReservationID, Amount: used(limit.Usage{"output": 33})})
		expect.True(t, err == nil && got.Excess == 15, "%+v, %v", got, err)
		d, err = n.Charge(t.Context(), limit.Charge{Target: target, Amount: used(limit.Usage{"input": 5})})
		expect.True(t, err == nil && d.Granted == 15 && d.Remaining == 1_000_000-510, "%+v, %v", d, err)
		for _, test := range []struct {
			policy string
			amount limit.Amount
			what   string
		}{
			{"plain", used(limit.Usage{"input": 1}), "usage"},
			{"tokens", used(limit.Usage{"input": 1, "imput": 1}), "usage.imput"},
			{"tokens", used(limit.Usage{"input": -1}), "usage.input"},
			{"tokens", used(limit.Usage{"input": 1 << 53}), "usage.input"},
			{"tokens", used(limit.Usage{"input": 1 << 51, "output": 1 << 50}), "usage.output"},
			{"tokens", used(limit.Usage{"output": 1 << 62}), "usage.output"},
			{"tokens", used(limit.Usage{"cached": 5}), "usage"},
			{"tokens", used(limit.Usage{"a\nb": 5}), `usage."a\nb"`},
			{"tokens", limit.Amount{Cost: 1, Usage: limit.Usage{"input": 1}}, "usage"},
		} {
			_, err := n.Reserve(t.Context(), limit.Reserve{Target: onPolicy(test.policy, "k"), Amount: test.amount})
			wantError(t, err, limit.Invalid, test.what)
		}

		estimate := func(policy, key, class string) int64 {
			t.Helper()
			target := onPolicy(policy, key)
			d := n.reserve(t, limit.Reserve{Target: target, Amount: units(1), Estimate: true, Class: class})
			expect.NoError(t, expect.Err(n.Cancel(t.Context(), target, d.ReservationID)))
			return d.Granted
		}
		for _, test := range []struct {
			policy, key, class string
			want               int64
		}{{"tokens", "k", "", 700}, {"tokens", "small", "", 500}, {"fixed", "k", "", 40}, {"plain", "k", "", 1}} {
			expect.Equal(t, estimate(test.policy, test.key, test.class), test.want, "%+v", test)
		}
		for i := range int64(100) {
			d := n.reserve(t, limit.Reserve{Target: target, Amount: units(1), Estimate: true, Class: "large"})
			_, err := n.Commit(t.Context(),
				limit.Commit{Target: target, ReservationID: d.ReservationID, Class: "large", Amount: units(1001 + i)})
			must.NoError(t, err)
		}
		expect.Equal(t, estimate("tokens", "k", "large"), 1090, "is not the 90th percentile of 1001 to 1100")
		for range 100 { // pieces of work that did not take place
			d := n.reserve(t, limit.Reserve{Target: target, Amount: units(1), Estimate: true, Class: "large"})
			_, err := n.Commit(t.Context(),
				limit.Commit{Target: target, ReservationID: d.ReservationID, Class: "large"})
			must.NoError(t, err)
		}
		expect.Equal(t, estimate("tokens", "k", "large"), 1090, "is learned of work that cost nothing")
		expect.Equal(t, estimate("tokens", "small", "large"), 500, "is more than the limit ever admits")
		// Another set of policies in force: what was learned goes with the policy's setting.
		n.SetPolicies(policies(t, hundred))
		n.SetPolicies(policies(t, tokens))
		expect.Equal(t, estimate("tokens", "k", "large"), 700)
	})
}

func TestReservationsAreBounded(t *testing.T) {
	bounds := store.Config{MaxReservations: 6, MaxKeyReservations: 3}
	inBubbleWithin(t, 2, bounds, Config{Policies: policies(t, hundred)}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		target := onPolicy("sliding_log", c.owned("sliding_log", 1, 0))
		id := n.reserve(t, limit.Reserve{Target: target, Amount: units(1)}).ReservationID
		n.reserve(t, limit.Reserve{Target: target, Amount: units(1)})
		_, err := n.Extend(t.Context(), limit.Extend{Target: target, ReservationID: id, Amount: units(1)})
		expect.NoError(t, err)
		_, err = n.Reserve(t.Context(), limit.Reserve{Target: target, Amount: units(1)})
		wantError(t, err, limit.Unavailable, "key")
		_, err = n.Extend(t.Context(), limit.Extend{Target: target, ReservationID: id, Amount: units(1)})
		wantError(t, err, limit.Unavailable, "key")
		expect.Equal(t, n.left(t, target), 97, "left: a rejected reservation has charged")
		for i := range 3 {
			n.reserve(t, limit.Reserve{Target: onPolicy("sliding_log", c.owned("sliding_log", 1, i+1)),
				Amount: units(1)})
		}
		other := onPolicy("sliding_log", c.owned("sliding_log", 1, 9))
		_, err = n.Reserve(t.Context(), limit.Reserve{Target: other, Amount: units(1)})
		wantError(t, err, limit.Unavailable, "")
		expect.NoError(t, expect.Err(n.Cancel(t.Context(), target, id)))
		n.reserve(t, limit.Reserve{Target: other, Amount: units(1)})
	})
}

// history is what was charged to one key, as anybody would count it.
type history struct {
	limit, most int64
	window      time.Duration
	charges     []*charged
}

type charged struct {
	at    time.Duration
	units int64
}

func (h *history) used(now time.Duration) (sum int64) {
	for _, c := range h.charges {
		if c.at > now-h.window {
			sum += c.units
		}
	}
	return sum
}

func (h *history) charge(now time.Duration, n int64) *charged {
	c := &charged{now, n}
	h.charges = append(h.charges, c)
	return c
}

// TestBudgets holds reservations of one key and of several, extensions, commits, charges, cancels and expiry, at random
// and through any node, to what a plain list of charges says.
func TestBudgets(t *testing.T) {
	const text = `policies:
  - {name: org, algorithm: sliding_log, limit: 60, window: 9995ms}
  - {name: user, algorithm: sliding_log, limit: 30, window: 4995ms, max_debt: 10}
`
	type pending struct {
		ids     string
		targets []limit.Target
		parts   map[limit.Target][]*charged
		until   time.Duration
	}
	for seed := range uint64(6) {
		inBubble(t, 3, Config{Policies: policies(t, text)}, func(t *testing.T, c *testCluster) {
			rng := rand.New(rand.NewPCG(seed, 7))
			var now time.Duration
			by := make(map[limit.Target]*history)
			var targets []limit.Target
			for n := range 3 {
				org, user := onPolicy("org", c.owned("org", n, 0)), onPolicy("user", c.owned("user", n, 0))
				by[org] = &history{limit: 60, most: 120, window: 9995 * time.Millisecond}
				by[user] = &history{limit: 30, most: 40, window: 4995 * time.Millisecond}
				targets = append(targets, org, user)
			}
			var open []*pending
			drop := func(p *pending) { open = slices.DeleteFunc(open, func(o *pending) bool { return o == p }) }
			for step := range 3000 {
				d := time.Duration(rng.IntN(20)) * 10 * time.Millisecond
				now += d
				c.advance(d)
				n := c.nodes[rng.IntN(3)]
				fail := func(format string, args ...any) {
					t.Helper()
					t.Fatalf("seed %d, step %d: %s", seed, step, fmt.Sprintf(format, args...))
				}
				switch op := rng.IntN(10); {
				case op < 4:
					p := &pending{parts: make(map[limit.Target][]*charged), until: now + 3*time.Second}
					var rs []limit.Reserve
					fits := true
					for _, i := range rng.Perm(len(targets))[:1+rng.IntN(3)] {
						to, cost := targets[i], 1+rng.Int64N(12)
						rs = append(rs, limit.Reserve{Target: to, Amount: units(cost), TTL: 3 * time.Second})
						p.targets = append(p.targets, to)
						fits = fits && by[to].used(now)+cost <= by[to].limit
					}
					all, err := n.ReserveAll(t.Context(), rs)
					if err != nil || all.Allowed != fits {
						fail("%+v: %+v, %v", rs, all, err)
					}
					if fits {
						p.ids = all.ReservationID
						for _, r := range rs {
							p.parts[r.Target] = []*charged{by[r.Target].charge(now, r.Cost)}
						}
						open = append(open, p)
					}
				case op < 6 && len(open) > 0:
					p := open[rng.IntN(len(open))]
					to, cost := p.targets[rng.IntN(len(p.targets))], 1+rng.Int64N(8)
					d, err := n.Extend(t.Context(), limit.Extend{Target: to, ReservationID: p.ids, Amount: units(cost)})
					if now >= p.until {
						wantError(t, err, limit.NotFound, "reservation_id")
						break
					}
					if fits := by[to].used(now)+cost <= by[to].limit; err != nil || d.Allowed != fits {
						fail("extend %+v by %d: %+v, %v", to, cost, d, err)
					} else if fits {
						p.parts[to] = append(p.parts[to], by[to].charge(now, cost))
					}
				case op < 8 && len(open) > 0:
					p := open[rng.IntN(len(open))]
					for _, to := range p.targets {
						reserved := int64(0)
						for _, part := range p.parts[to] {
							reserved += part.units
						}
						cost := rng.Int64N(reserved + 8)
						if rng.IntN(4) == 0 {
							cost = 0
						}
						got, err := n.Commit(t.Context(),
							limit.Commit{Target: to, ReservationID: p.ids, Amount: units(cost)})
						if now >= p.until {
							wantError(t, err, limit.NotFound, "reservation_id")
							continue
						}
						used := by[to].used(now)
						excess := max(min(cost-reserved, by[to].most-used), 0)
						want := limit.Settled{Excess: excess,
							Over: cost > reserved && used+cost-reserved > by[to].limit}
						keep := cost
						for _, part := range p.parts[to] {
							back := part.units - min(part.units, keep)
							keep -= part.units - back
							part.units -= back
							if part.at > now-by[to].window {
								want.Refunded += back
							}
						}
						if excess > 0 {
							by[to].charge(now, excess)
						}
						if err != nil || got != want {
							fail("commit %d of %d to %+v: %+v, %v, want %+v", cost, reserved, to, got, err, want)
						}
					}
					drop(p)
				case op == 8:
					to, cost := targets[rng.IntN(len(targets))], 1+rng.Int64N(15)
					used := by[to].used(now)
					granted := max(min(cost, by[to].most-used), 0)
					d, err := n.Charge(t.Context(), limit.Charge{Target: to, Amount: units(cost)})
					if err != nil || d.Allowed != (used+cost <= by[to].limit) || d.Granted != granted {
						fail("charge %d to %+v with %d in use: %+v, %v", cost, to, used, d, err)
					}
					by[to].charge(now, granted)
				default:
					to := targets[rng.IntN(len(targets))]
					want := max(by[to].limit-by[to].used(now), 0)
					if left := n.left(t, to); left != want {
						fail("%+v: %d left, want %d", to, left, want)
					}
				}
			}
		})
	}
}

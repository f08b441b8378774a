package limiter

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// hundred is not lent, so that all is decided by the owner.
const hundred = `policies:
  - {name: fixed_window, algorithm: fixed_window, limit: 100, window: 1m, lend: false}
  - {name: calendar, algorithm: fixed_window, limit: 100, align: calendar, window: day, lend: false}
  - {name: sliding_window, algorithm: sliding_window, limit: 100, window: 1m, lend: false}
  - {name: sliding_counter, algorithm: sliding_counter, limit: 100, window: 1m, lend: false}
  - {name: sliding_log, algorithm: sliding_log, limit: 100, window: 1m, lend: false}
  - {name: token_bucket, algorithm: token_bucket, limit: 100, window: 1d, lend: false}
  - {name: leaky_bucket, algorithm: leaky_bucket, limit: 100, window: 1d}
  - {name: several, limits: [100/1m, 1000/1h], algorithm: sliding_log, lend: false}
  - {name: concurrency, algorithm: concurrency, limit: 100, ttl: 30s}
`

func TestSeveralLimitsListEach(t *testing.T) {
	const text = `policies: [{name: p, algorithm: sliding_log, limits: [2/1s, 3/1m]}]`
	inBubble(t, 2, Config{Policies: policies(t, text)}, func(t *testing.T, c *testCluster) {
		c.nodes[0].check(t, named("p", "k", 2))
		c.advance(500 * time.Millisecond)
		d := c.nodes[1].check(t, named("p", "k", 1))
		expect.True(t, !d.Allowed && d.Limit == 2 && d.Window == time.Second && d.RetryAfter == 500*time.Millisecond,
			"%+v", d)
		expect.True(t, len(d.Limits) == 2 && d.Limits[0].Remaining == 0 && d.Limits[1].Remaining == 1 &&
			d.Limits[1].Limit == 3 && d.Limits[1].Window == time.Minute &&
			d.Limits[0].RetryAfter == 500*time.Millisecond && d.Limits[1].RetryAfter == 0, "%+v", d.Limits)
		c.advance(500 * time.Millisecond)
		d = c.nodes[0].check(t, named("p", "k", 1))
		// What a log's tick adds to its window is nothing to tell callers about.
		expect.True(t, d.Allowed && d.Limits[0].ResetAfter == time.Second && d.Limits[1].ResetAfter == time.Minute &&
			d.ResetAfter <= time.Minute, "%+v", d)
		d = c.nodes[0].check(t, named("p", "k", 1))
		expect.True(t, !d.Allowed && d.RetryAfter == 59*time.Second, "%+v", d)
	})
}

func TestOverridesAndShadow(t *testing.T) {
	const rules = `algorithm: sliding_log, limit: 2, window: 1m,
      overrides: [{key: admin, unlimited: true}, {key: bad, blocked: true}, {prefix: "partner:", limit: 5}]}`
	const text = "policies:\n  - {name: plain, " + rules + "\n  - {name: shadow, shadow: true, " + rules + "\n"
	for _, shadow := range []bool{false, true} {
		p := map[bool]string{false: "plain", true: "shadow"}[shadow]
		t.Run(p, func(t *testing.T) {
			inBubble(t, 3, Config{Policies: policies(t, text)}, func(t *testing.T, c *testCluster) {
				ask := func(key string, cost int64) limit.Decision {
					return c.nodes[len(key)%3].check(t, named(p, key, cost))
				}
				refusal := func(key string, cost int64, d limit.Decision, retry time.Duration) {
					t.Helper()
					granted := int64(0)
					if shadow {
						granted, retry = cost, 0
					}
					expect.True(t, d.Allowed == shadow && d.Shadow == shadow && d.Granted == granted &&
						d.RetryAfter == retry && d.Remaining == 0, "%s: %+v", key, d)
				}
				for i, key := range []string{"u", "u", "partner:x", "partner:x", "partner:x", "partner:x",
					"partner:x"} {
					d := ask(key, 1)
					expect.True(t, d.Allowed && !d.Shadow, "%d %s: %+v", i, key, d)
				}
				refusal("u", 1, ask("u", 1), time.Minute)
				refusal("partner:x", 1, ask("partner:x", 1), time.Minute)
				refusal("bad", 3, ask("bad", 3), algo.Never)
				refusal("u", 0, ask("u", 0), time.Minute) // a peek is answered likewise and not counted
				refusal("bad", 0, ask("bad", 0), algo.Never)
				d := ask("bad", 1)
				expect.True(t, d.Limit == 0 && d.Window == 0, "blocked: %+v", d)
				for range 10 {
					d := ask("admin", 1000)
					expect.True(t, d.Allowed && !d.Shadow && d.Limit == algo.Unlimited &&
						d.Remaining == algo.Unlimited && d.Granted == 1000, "unlimited: %+v", d)
				}
				want := PolicyStats{Policy: p, Allowed: 2 + 5 + 10}
				if shadow {
					want.Shadowed = 4
				} else {
					want.Refused = 4
				}
				c.wantStats(want)
			})
		})
	}
}

// TestResetOfStatelessKey: a key that was counted before it became unlimited is as new once it is limited again.
func TestResetOfStatelessKey(t *testing.T) {
	const limited = `policies: [{name: p, algorithm: sliding_log, limit: 2, window: 1m}]`
	const free = `policies: [{name: p, algorithm: sliding_log, limit: 2, window: 1m, overrides: [{key: k, unlimited: true}]}]`
	inBubble(t, 1, Config{Policies: policies(t, limited)}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		n.check(t, named("p", "k", 2))
		c.setPolicies(free)
		expect.NoError(t, n.Reset(t.Context(), onPolicy("p", "k")))
		c.setPolicies(limited)
		expect.Equal(t, n.check(t, named("p", "k", 0)).Remaining, 2)
	})
}

// TestRequestIDsAreTheCallersOwn: who guesses another caller's request id gets an answer of its own, through any node,
// and nothing that the other caller holds; nor does an id that it took before keep the other caller from using it.
func TestRequestIDsAreTheCallersOwn(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, hundred)}, func(t *testing.T, c *testCluster) {
		for n := range 3 {
			of := func(policy, caller string) limit.Target {
				return limit.Target{Policy: policy, Key: c.owned(policy, n, 0), Caller: caller}
			}
			reserve := func(at int, caller string, cost int64) limit.Decision {
				d, err := c.nodes[at].Reserve(t.Context(),
					limit.Reserve{Target: of("fixed_window", caller), Amount: units(cost), RequestID: "order-17"})
				must.True(t, err == nil && d.Allowed, "%v %v", d, err)
				return d
			}
			acquire := func(at int, caller string) string {
				d, err := c.nodes[at].Acquire(t.Context(),
					limit.Acquire{Target: of("concurrency", caller), Cost: 1, RequestID: "order-17"})
				must.True(t, err == nil && d.Allowed, "%v %v", d, err)
				return d.LeaseID
			}
			refund := func(at int, caller string) int64 {
				back := must.Value(c.nodes[at].Refund(t.Context(), of("fixed_window", caller), 1, "order-17"))(t)
				return back
			}
			victim, thief := reserve(0, "shop", 60), reserve(1, "thief", 10)
			must.True(t, victim.ReservationID != thief.ReservationID, "the thief has the victim's reservation")
			expect.Equal(t, reserve(2, "shop", 60).ReservationID, victim.ReservationID, "the victim's own repetition")
			back, err := c.nodes[1].Cancel(t.Context(), of("fixed_window", "thief"), thief.ReservationID)
			expect.True(t, err == nil && back == 10, "the thief's own reservation: %d, %v", back, err)
			expect.Equal(t, c.nodes[0].left(t, of("fixed_window", "shop")), 40, "left beside the victim's reservation")
			own, other := acquire(0, "shop"), acquire(1, "thief")
			expect.True(t, own != other && acquire(2, "shop") == own, "leases %s and %s", own, other)
			for _, caller := range []string{"shop", "thief", "shop"} { // the last repeats the first
				expect.Equal(t, refund(n, caller), 1, "%s gets nothing back", caller)
			}
			expect.Equal(t, c.nodes[0].left(t, of("fixed_window", "shop")), 42, "left after two refunds")
		}
	})
}

func TestUnknownPolicy(t *testing.T) {
	const text = `policies: [{name: p, algorithm: sliding_log, limit: 2, window: 1m}]`
	target := onPolicy("nope", "k")
	for _, unknown := range []Unknown{UnknownError, UnknownAllow, UnknownDeny} {
		inBubble(t, 2, Config{Policies: policies(t, text), UnknownPolicy: unknown}, func(t *testing.T, c *testCluster) {
			for _, n := range c.nodes {
				switch unknown {
				case UnknownError:
					n.checkError(t, limit.Check{Target: target, Cost: 1}, limit.NotFound, "policy")
					_, err := n.Acquire(t.Context(), limit.Acquire{Target: target, Cost: 1})
					wantError(t, err, limit.NotFound, "policy")
				case UnknownAllow:
					d := n.check(t, limit.Check{Target: target, Cost: 3})
					expect.True(t, d.Allowed && d.Granted == 3 && d.Limit == algo.Unlimited, "%+v", d)
					d = must.Value(n.Acquire(t.Context(), limit.Acquire{Target: target, Cost: 1}))(t)
					expect.True(t, d.Allowed, "%+v", d)
				case UnknownDeny:
					d := n.check(t, limit.Check{Target: target, Cost: 3})
					expect.True(t, !d.Allowed && d.RetryAfter == algo.Never, "%+v", d)
					d = must.Value(n.Acquire(t.Context(), limit.Acquire{Target: target, Cost: 1}))(t)
					expect.True(t, !d.Allowed, "%+v", d)
				}
				wantError(t, expect.Err(n.Refund(t.Context(), target, 1, "")), limit.NotFound, "policy")
				wantError(t, expect.Err(n.Renew(t.Context(), target, "0000000000000001", 0)), limit.NotFound, "policy")
				wantError(t, expect.Err(n.Release(t.Context(), target, "0000000000000001")), limit.NotFound, "policy")
				wantError(t, n.Reset(t.Context(), target), limit.NotFound, "policy")
			}
			want := PolicyStats{Policy: "(unknown)"}
			*map[Unknown]*uint64{UnknownError: &want.Errors, UnknownAllow: &want.Allowed,
				UnknownDeny: &want.Refused}[unknown] = 4
			c.wantStats(want)
		})
	}
}

// TestOnlyTheOwnerKnowsPolicies: a node with an older file than the owner's forwards all the same.
func TestOnlyTheOwnerKnowsPolicies(t *testing.T) {
	const text = `policies: [{name: new, algorithm: sliding_log, limit: 2, window: 1m}]`
	inBubble(t, 2, Config{}, func(t *testing.T, c *testCluster) {
		c.nodes[1].SetPolicies(policies(t, text))
		q := named("new", c.owned("new", 1, 0), 1)
		d := c.nodes[0].check(t, q)
		expect.True(t, d.Allowed && d.Remaining == 1, "%+v", d)
		c.nodes[0].checkError(t, named("new", c.owned("new", 0, 0), 1), limit.NotFound, "policy")
		c.nodes[1].checkError(t, named("new", c.owned("new", 0, 0), 1), limit.NotFound, "policy")
	})
}

func TestInlineIdentity(t *testing.T) {
	base := algo.Limit{Algorithm: algo.SlidingLog, Limit: 10, Window: time.Minute}
	with := func(change func(*algo.Limit)) *algo.Limit {
		l := base
		change(&l)
		return &l
	}
	berlin := must.Value(time.LoadLocation("Europe/Berlin"))(t)
	sameBerlin, _ := time.LoadLocation("Europe/Berlin")
	window := algo.Limit{Algorithm: algo.SlidingWindow, Limit: 10, Window: time.Minute}
	tens := window
	tens.Slots = 10
	fives := window
	fives.Slots = 5
	day := func(zone *time.Location) *algo.Limit {
		return &algo.Limit{Algorithm: algo.FixedWindow, Limit: 10, Period: algo.Day, Zone: zone}
	}
	bucket := &algo.Limit{Algorithm: algo.TokenBucket, Limit: 10, Window: time.Hour}
	bigBucket := &algo.Limit{Algorithm: algo.TokenBucket, Limit: 10, Window: time.Hour, Capacity: 30}
	for _, test := range []struct {
		what         string
		first, other limit.Target
		left         int64 // of other, when 4 were taken from first; 10 or -1 where the states are different
	}{
		{"same", limit.Target{Limit: &base}, limit.Target{Limit: with(func(*algo.Limit) {})}, 6},
		{"default namespace", limit.Target{Limit: &base}, limit.Target{Limit: &base, Namespace: "default"}, 6},
		{"other namespace", limit.Target{Limit: &base}, limit.Target{Limit: &base, Namespace: "x"}, 10},
		{"namespaces are not parsed", limit.Target{Limit: &base, Namespace: "a"},
			limit.Target{Limit: &base, Namespace: "//a"}, 10},
		{"limit raised on live state", limit.Target{Limit: &base},
			limit.Target{Limit: with(func(l *algo.Limit) { l.Limit = 20 })}, 16},
		{"limit lowered on live state", limit.Target{Limit: &base},
			limit.Target{Limit: with(func(l *algo.Limit) { l.Limit = 3 })}, 0},
		{"count_denied", limit.Target{Limit: &base},
			limit.Target{Limit: with(func(l *algo.Limit) { l.CountDenied = true })}, 6},
		{"max_log is not the caller's", limit.Target{Limit: &base},
			limit.Target{Limit: with(func(l *algo.Limit) { l.MaxLog = 5 })}, 6},
		{"other window", limit.Target{Limit: &base}, limit.Target{Limit: with(func(l *algo.Limit) { l.Window++ })}, 10},
		{"other algorithm", limit.Target{Limit: &base}, limit.Target{Limit: &window}, 10},
		{"default slots", limit.Target{Limit: &window}, limit.Target{Limit: &tens}, 6},
		{"other slots", limit.Target{Limit: &window}, limit.Target{Limit: &fives}, 10},
		{"capacity", limit.Target{Limit: bucket}, limit.Target{Limit: bigBucket}, 26},
		{"period", limit.Target{Limit: day(nil)},
			limit.Target{Limit: &algo.Limit{Algorithm: algo.FixedWindow, Limit: 10, Period: algo.Hour}}, 10},
		{"UTC", limit.Target{Limit: day(nil)}, limit.Target{Limit: day(time.UTC)}, 6},
		{"zone", limit.Target{Limit: day(nil)}, limit.Target{Limit: day(berlin)}, 10},
		{"zone loaded again", limit.Target{Limit: day(berlin)}, limit.Target{Limit: day(sameBerlin)}, 6},
		{"a policy named inline", limit.Target{Limit: &base}, limit.Target{Policy: "inline"}, 10},
		{"a policy named default", limit.Target{Limit: &base}, limit.Target{Policy: "default"}, 10},
		{"unlimited keeps no state", limit.Target{Limit: &base},
			limit.Target{Limit: with(func(l *algo.Limit) { l.Limit = algo.Unlimited })}, algo.Unlimited},
	} {
		const text = `policies: [{name: inline, algorithm: sliding_log, limit: 10, window: 1m}, {name: default, algorithm: sliding_log, limit: 10, window: 1m}]`
		inBubble(t, 3, Config{Policies: policies(t, text)}, func(t *testing.T, c *testCluster) {
			test.first.Key, test.other.Key = "k", "k"
			c.nodes[0].check(t, limit.Check{Target: test.first, Cost: 4})
			d := c.nodes[1].check(t, limit.Check{Target: test.other})
			expect.True(t, d.Remaining == test.left, "%s: %d left, want %d", test.what, d.Remaining, test.left)
		})
	}
}

// TestInlineCache: forgetting what was worked out changes nothing, and another zone pointer is the same zone.
func TestInlineCache(t *testing.T) {
	inBubble(t, 1, Config{}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		target := inlineTarget(algo.Limit{Algorithm: algo.SlidingLog, Limit: 10, Window: time.Minute}, "k")
		n.check(t, limit.Check{Target: target, Cost: 4})
		for i := range 3 * maxInlineRules / 2 {
			n.check(t, limit.Check{Target: inlineTarget(algo.Limit{Algorithm: algo.SlidingLog, Limit: int64(i + 1),
				Window: time.Hour}, "k")})
			must.True(t, len(n.inline.by) <= maxInlineRules, "%d rules kept", len(n.inline.by))
		}
		expect.Equal(t, n.check(t, limit.Check{Target: target}).Remaining, 6)
	})
}

func TestNoInline(t *testing.T) {
	inBubble(t, 2, Config{NoInline: true, Policies: policies(t, hundred)}, func(t *testing.T, c *testCluster) {
		target := inlineTarget(algo.Limit{Algorithm: algo.SlidingLog, Limit: 10, Window: time.Minute}, "k")
		for _, n := range c.nodes {
			n.checkError(t, limit.Check{Target: target, Cost: 1}, limit.Invalid, "limit")
			n.check(t, named("sliding_log", "k", 1))
		}
		// Not even for a peer with another setting.
		op := &Op{Kind: OpCheck, Check: &limit.Check{Target: target, Cost: 1}, Hops: 1}
		rest := c.nodes[0].Receive([]*Op{op})
		expect.True(t, rest == nil && op.Outcome.Err != nil && op.Outcome.Err.Field == "limit", "%+v", op.Outcome)
	})
}

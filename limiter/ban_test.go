package limiter

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const banning = `policies:
  - {name: login, algorithm: sliding_log, limit: 2, window: 1m, ban: 1h, overrides: [{key: vip, limit: 100}, {key: free, unlimited: true}]}
  - {name: tried, algorithm: sliding_log, limit: 2, window: 1m, ban: 1h, shadow: true}
  - {name: beside, algorithm: sliding_log, limit: 2, window: 1m, ban: 1h, candidate: {algorithm: fixed_window, limit: 1, window: 1m}}
  - {name: short, algorithm: sliding_log, limit: 1, window: 1s, ban: 500ms}
  - {name: jobs, algorithm: concurrency, limit: 1, ttl: 1m, ban: 1h}
`

// TestBan: the refusal of a key begins a ban, which all nodes answer by for as long as it lasts and no longer.
func TestBan(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, banning)}, func(t *testing.T, c *testCluster) {
		key, n := c.owned("login", 1, 0), c.nodes[0]
		login := onPolicy("login", key)
		n.check(t, named("login", key, 2))
		first := n.check(t, named("login", key, 1))
		must.True(t, !first.Allowed && first.Banned && first.RetryAfter == time.Hour &&
			first.ResetAfter == time.Hour && first.Remaining == 0 && first.RememberFor == time.Second,
			"the first refusal: %+v", first)
		c.advance(500 * time.Millisecond)
		c.wantMessages(0, "asked again", func() {
			d := n.check(t, named("login", key, 1))
			left := time.Hour - 500*time.Millisecond
			expect.True(t, !d.Allowed && d.Banned && d.RetryAfter >= left && d.RetryAfter <= left+time.Millisecond,
				"from memory: %+v", d)
		})
		c.stats("login") // whose peaks begin anew
		c.advance(2 * time.Minute)
		n.check(t, named("login", key, 1))
		got := c.stats("login")
		expect.True(t, got.PeakCount == 0 && got.PeakUtilization == 0, "a banned key whose window is empty: %+v", got)
		// Nothing makes it longer, and no unit that comes back ends it.
		for range 56 {
			c.advance(time.Minute)
			for _, other := range c.nodes {
				d := other.check(t, named("login", key, 1))
				must.True(t, !d.Allowed && d.Banned, "during the ban: %+v", d)
			}
		}
		back, err := n.Refund(t.Context(), login, 2, "")
		expect.True(t, err == nil && back == 0, "%v %v", back, err)
		d := n.check(t, named("login", key, 0))
		expect.True(t, !d.Allowed && d.Banned && d.RetryAfter == time.Hour-58*time.Minute-500*time.Millisecond,
			"a peek: %+v", d)
		state, holds, err := c.nodes[1].Describe(&login)
		expect.True(t, err == nil && holds && state.Banned == time.Hour-58*time.Minute-500*time.Millisecond,
			"described as %+v, %v", state, err)
		// Work that is done is charged, and neither refused nor held against the key.
		d, err = n.Charge(t.Context(), limit.Charge{Target: login, Amount: units(1)})
		expect.True(t, err == nil && d.Allowed && d.Granted == 1 && d.Banned, "a charge: %+v, %v", d, err)
		c.advance(2*time.Minute - 500*time.Millisecond - 1)
		d = n.check(t, named("login", key, 1))
		expect.True(t, !d.Allowed && d.RetryAfter == 1, "at its end: %+v", d)
		c.advance(1)
		d = n.check(t, named("login", key, 1))
		expect.True(t, d.Allowed && !d.Banned, "after the ban: %+v", d)
		// 1 at first, 1 from memory, 1 after two minutes, 3 a minute, and 1 at the end.
		got = c.stats("login")
		expect.True(t, got.Refused == 172 && got.Banned == got.Refused && got.Bans == 1, "counted %+v", got)
	})
}

// TestBanEndsWhenItsMemoryDoes: a forwarding node answers by a ban no longer than the ban lasts.
func TestBanEndsWhenItsMemoryDoes(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, banning)}, func(t *testing.T, c *testCluster) {
		key, n := c.owned("short", 1, 0), c.nodes[0]
		n.check(t, named("short", key, 1))
		c.advance(700 * time.Millisecond)
		d := n.check(t, named("short", key, 1))
		must.True(t, d.Banned && d.RetryAfter == 500*time.Millisecond, "%+v", d) // later than the window has room
		c.advance(490 * time.Millisecond)
		c.wantMessages(0, "before its end", func() { n.check(t, named("short", key, 1)) })
		c.advance(10 * time.Millisecond)
		expect.True(t, n.check(t, named("short", key, 1)).Allowed, "refused")
		// A window that has no room for longer than the ban: the same check passes then, and not before.
		c.advance(100 * time.Millisecond)
		d = n.check(t, named("short", key, 1))
		expect.True(t, d.Banned && d.RetryAfter >= 900*time.Millisecond && d.RetryAfter <= 901*time.Millisecond,
			"%+v", d)
	})
}

// TestBanOfOtherCalls: reservations and leases are refused by bans and begin them, atomic checks as well; what was
// admitted before is not concerned.
func TestBanOfOtherCalls(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, banning)}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		login := onPolicy("login", "r")
		held := must.Value(n.Reserve(t.Context(), limit.Reserve{Target: login, Amount: units(1)}))(t)
		must.True(t, held.Allowed, "%v", held)
		d, err := n.Reserve(t.Context(), limit.Reserve{Target: login, Amount: units(2)})
		must.True(t, err == nil && !d.Allowed && d.Banned && d.ReservationID == "", "%v %v", d, err)
		extend := limit.Extend{Target: login, ReservationID: held.ReservationID, TTL: time.Minute}
		expect.True(t, must.Value(n.Extend(t.Context(), extend))(t).Allowed, "prolonged")
		extend.Cost = 1
		d, err = n.Extend(t.Context(), extend)
		expect.True(t, err == nil && !d.Allowed && d.Banned, "extended: %+v, %v", d, err)
		got, err := n.Commit(t.Context(),
			limit.Commit{Target: login, ReservationID: held.ReservationID, Amount: units(2)})
		expect.True(t, err == nil && got.Excess == 1 && !got.Over, "committed: %+v, %v", got, err)

		job := onPolicy("jobs", "j")
		lease := must.Value(n.Acquire(t.Context(), limit.Acquire{Target: job, Cost: 1}))(t)
		must.True(t, lease.Allowed, "%v", lease)
		d, err = n.Acquire(t.Context(), limit.Acquire{Target: job, Cost: 1})
		expect.True(t, err == nil && !d.Allowed && d.RetryAfter == time.Hour, "%+v, %v", d, err)
		left, err := n.Renew(t.Context(), job, lease.LeaseID, 0)
		expect.True(t, err == nil && left == time.Minute, "%v %v", left, err)
		ended, err := n.Release(t.Context(), job, lease.LeaseID)
		expect.True(t, err == nil && ended, "%v %v", ended, err)
		d, err = n.Acquire(t.Context(), limit.Acquire{Target: job, Cost: 1})
		expect.True(t, err == nil && !d.Allowed && d.Banned && d.LeaseID == "", "released: %+v, %v", d, err)

		// A request id that was admitted before is admitted again.
		once := limit.Check{Target: onPolicy("login", "i"), Cost: 1, RequestID: "one"}
		n.check(t, once)
		n.check(t, named("login", "i", 2))
		d = n.check(t, once)
		expect.True(t, d.Allowed && d.Granted == 1 && !d.Banned, "repeated: %+v", d)

		checks := []limit.Check{named("login", "a", 2), named("login", "b", 1)}
		n.check(t, named("login", "b", 2))
		all := must.Value(n.CheckAll(t.Context(), checks))(t)
		expect.True(t, !all.Allowed && !all.Decisions[0].Banned && all.Decisions[1].Banned, "%+v", all)
		expect.True(t, n.check(t, named("login", "a", 2)).Allowed, "the other one")
	})
}

// TestBanBesideOthers: shadow mode admits what a ban would refuse, and a candidate has bans of its own.
func TestBanBesideOthers(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, banning)}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		for i := range 4 {
			if d := n.check(t, named("tried", "k", 1)); !d.Allowed || d.Banned != (i >= 2) || d.Shadow != d.Banned {
				t.Errorf("check %d in shadow mode: %+v", i, d)
			}
			c.advance(time.Minute / 4)
		}
		got := c.stats("tried")
		expect.True(t, got.Shadowed == 2 && got.Banned == 2 && got.Bans == 1, "in shadow mode: %+v", got)
		for range 3 {
			n.check(t, named("beside", "k", 1))
		}
		c.advance(2 * time.Minute)
		n.check(t, named("beside", "k", 1))
		if got := c.stats("beside"); got.CandidateAllowed != 1 || got.CandidateRefused != 3 || got.Refused != 2 {
			t.Errorf("beside a candidate: %+v", got)
		}

		// What the file says holds at once: a ban that is shorter, or that there is none.
		n.check(t, named("login", "k", 2))
		n.check(t, named("login", "k", 1))
		c.setPolicies("policies: [{name: login, algorithm: sliding_log, limit: 2, window: 1m, ban: 10m}]")
		expect.Equal(t, n.check(t, named("login", "k", 1)).RetryAfter, 10*time.Minute, "shortened")
		c.advance(2 * time.Minute)
		c.setPolicies("policies: [{name: login, algorithm: sliding_log, limit: 2, window: 1m}]")
		d := n.check(t, named("login", "k", 1))
		expect.True(t, d.Allowed && !d.Banned, "lifted: %+v", d)
	})
}

package limiter

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const nine = `policies: [{name: p, algorithm: token_bucket, limit: 9, window: 1s}]`

const plain = `policies: [{name: p, algorithm: sliding_log, limit: 10, window: 1m}]`

// TestOwnersAreAskedSideBySide: each owner's answer waits for the other's question.
func TestOwnersAreAskedSideBySide(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, plain)}, func(t *testing.T, c *testCluster) {
		var both sync.WaitGroup
		both.Add(2)
		c.tamper(func(_ context.Context, _ *testNode, _ ownership.Node, _ []*Op, deliver func()) {
			both.Done()
			both.Wait()
			deliver()
		})
		checks := []limit.Check{named("p", c.owned("p", 1, 0), 1), named("p", c.owned("p", 0, 0), 1),
			named("p", c.owned("p", 2, 0), 1)}
		got := must.Value(c.nodes[0].Check(t.Context(), checks))(t)
		for i := range got {
			expect.True(t, got[i].Allowed && !got[i].FailedOpen, "check %d: %+v", i, got[i])
		}
	})
}

// script answers messages in turn and notes whom they were for.
type script struct {
	mu      sync.Mutex
	answers []func(*Op, func())
	asked   []string
}

func (s *script) wire(_ context.Context, _ *testNode, to ownership.Node, ops []*Op, deliver func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, to.Name)
	if len(s.answers) == 0 {
		return // unreachable
	}
	s.answers[0](ops[0], deliver)
	s.answers = s.answers[1:]
}

func TestNotHolderIsRetried(t *testing.T) {
	hint := func(name string, n uint64) func(*Op, func()) {
		return func(op *Op, _ func()) {
			op.Outcome.NotHolder = &ownership.Route{Standing: ownership.Elsewhere,
				Node: ownership.Node{Name: name, Boot: 1}, Term: ownership.Term{N: n}}
		}
	}
	decide := func(_ *Op, deliver func()) { deliver() }
	for _, test := range []struct {
		what    string
		term    uint64 // of the entry node's own view, which names n1
		answers []func(*Op, func())
		asked   []string
	}{
		{"the view is asked again", 0, []func(*Op, func()){hint("", 0), hint("", 9), decide},
			[]string{"n1", "n1", "n1"}},
		{"a hint is followed", 0, []func(*Op, func()){hint("n2", 1), decide}, []string{"n1", "n2"}},
		{"and rising ones in turn", 0, []func(*Op, func()){hint("n2", 1), hint("n3", 2), hint("n2", 3), decide},
			[]string{"n1", "n2", "n3", "n2"}},
		{"not without a term", 0, []func(*Op, func()){hint("n2", 0), decide}, []string{"n1", "n1"}},
		{"not twice", 0, []func(*Op, func()){hint("n2", 1), hint("n3", 1), decide}, []string{"n1", "n2", "n1"}},
		{"nor later on", 0, []func(*Op,
			func()){hint("n2", 5), hint("", 0), hint("n3", 4), hint("n3", 5), hint("n3", 6), decide},
			[]string{"n1", "n2", "n1", "n1", "n1", "n3"}},
		{"not below the view's own term", 4, []func(*Op, func()){hint("n2", 4), hint("n2", 5), decide},
			[]string{"n1", "n1", "n2"}},
		{"unreachable ends it", 0, []func(*Op, func()){hint("n2", 1)}, []string{"n1", "n2"}},
	} {
		t.Run(test.what, func(t *testing.T) {
			inBubble(t, 4, Config{Policies: policies(t, plain)}, func(t *testing.T, c *testCluster) {
				for i, n := range c.nodes {
					if i == 0 {
						c.see(n, func(int) ownership.Route {
							return ownership.Route{Standing: ownership.Elsewhere,
								Node: ownership.Node{Name: "n1", Boot: 2}, Term: ownership.Term{N: test.term}}
						})
					} else {
						c.see(n, func(int) ownership.Route { return ownership.Route{Standing: ownership.Owned} })
					}
				}
				s := &script{answers: test.answers}
				c.tamper(s.wire)
				d := c.nodes[0].check(t, named("p", "k", 1))
				expect.True(t, slices.Equal(s.asked, test.asked), "asked %v, want %v", s.asked, test.asked)
				expect.True(t, d.Allowed && d.FailedOpen == (test.what == "unreachable ends it"), "%+v", d)
			})
		})
	}
}

// TestViewsThatDisagree: operations go round among nodes of which none takes itself for the holder. Hops stay bounded,
// the caller gets an answer in time, and once the views agree it is a decision, charged once.
func TestViewsThatDisagree(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, plain)}, func(t *testing.T, c *testCluster) {
		for i, n := range c.nodes {
			c.see(n, func(int) ownership.Route { return c.holder(n, (i+1)%3) })
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		start := time.Now()
		got, err := c.nodes[0].Check(ctx, []limit.Check{named("p", "k", 1), named("p", "l", 1)})
		expect.True(t, err == nil && got[0].FailedOpen && got[1].FailedOpen, "%+v, %v", got, err)
		expect.Equal(t, time.Since(start), 280*time.Millisecond, "answered after")
		expect.True(t, c.hops == 2 && c.hops <= MaxHops, "%d hops", c.hops)
		expect.True(t, c.carried <= 2*(280/5+2), "%d messages", c.carried) // one more when a pause ends at the deadline

		// Two that point at each other, until one of them learns better.
		c.see(c.nodes[0], func(int) ownership.Route { return c.holder(c.nodes[0], 1) })
		c.see(c.nodes[1], func(int) ownership.Route { return c.holder(c.nodes[1], 0) })
		done := make(chan limit.Decision)
		go func() { done <- c.nodes[0].check(t, named("p", "k", 1)) }()
		synctest.Wait() // it pauses before it asks again
		c.see(c.nodes[1], func(int) ownership.Route { return c.holder(c.nodes[1], 1) })
		d := <-done
		expect.True(t, d.Allowed && !d.FailedOpen && d.Remaining == 9, "%+v", d)
		expect.Equal(t, c.nodes[0].check(t, named("p", "k", 0)).Remaining, 9)
		// The entry node may come to be the holder itself.
		c.see(c.nodes[1], func(int) ownership.Route { return c.holder(c.nodes[1], 0) })
		go func() { done <- c.nodes[0].check(t, named("p", "m", 1)) }()
		synctest.Wait()
		c.see(c.nodes[0], func(int) ownership.Route { return c.holder(c.nodes[0], 0) })
		d = <-done
		expect.True(t, d.Allowed && !d.FailedOpen && d.Remaining == 9, "%+v", d)
	})
}

func TestReceiveChecksWhatItGets(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, plain)}, func(t *testing.T, c *testCluster) {
		here, there := c.owned("p", 0, 0), c.owned("p", 1, 0)
		op := func(hops int, q limit.Check) *Op { return &Op{Kind: OpCheck, Check: &q, Hops: uint8(hops)} }
		ops := []*Op{
			op(1, named("p", here, 1)), op(2, named("p", there, 1)), op(255, named("p", there, 1)),
			op(1, named("p", "", 1)), op(1, named("p", here, -1)), op(1, named("p", there, 1)),
		}
		rest := c.nodes[0].Receive(ops)
		must.True(t, rest != nil, "nothing to hand on")
		if !ops[0].Decision.Allowed {
			t.Errorf("%+v", ops[0].Outcome)
		}
		for _, o := range ops[1:3] {
			h := o.Outcome.NotHolder
			expect.True(t, h != nil && h.Node == (ownership.Node{Name: "n1", Boot: 2}), "%+v", o.Outcome)
		}
		wantError(t, ops[3].Outcome.Err, limit.Invalid, "key")
		wantError(t, ops[4].Outcome.Err, limit.Invalid, "cost")
		part := op(1, named("p", here, 1))
		// a store's own number of one of its parts
		part.Kind, part.Extra = OpReserve, &Extra{Reservation: ReservationID{1, 15: 1}}
		c.nodes[0].Receive([]*Op{part})
		wantError(t, part.Outcome.Err, limit.Invalid, "reservation_id")
		rest(t.Context())
		if d := ops[5].Decision; !d.Allowed || d.Remaining != 9 || c.hops != 2 {
			t.Errorf("%+v after %d hops", ops[5].Outcome, c.hops)
		}
		c.wantStats(PolicyStats{Policy: "p", Allowed: 2})
		// Nobody is known.
		c.see(c.nodes[0], func(int) ownership.Route { return ownership.Route{Standing: ownership.Elsewhere} })
		lone := op(1, named("p", here, 1))
		rest = c.nodes[0].Receive([]*Op{lone})
		expect.True(t, rest == nil && lone.Outcome.NotHolder != nil && lone.Outcome.NotHolder.Node.Name == "",
			"%+v", lone.Outcome)
	})
}

// TestUnreachableBehindAnotherNode: a node that hands on in vain says so, and the entry node answers by its on_error.
func TestUnreachableBehindAnotherNode(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, plain)}, func(t *testing.T, c *testCluster) {
		c.see(c.nodes[0], func(int) ownership.Route { return c.holder(c.nodes[0], 1) })
		c.see(c.nodes[1], func(int) ownership.Route { return c.holder(c.nodes[1], 2) })
		c.tamper(func(ctx context.Context, _ *testNode, to ownership.Node, _ []*Op, deliver func()) {
			if to.Name == "n1" {
				deliver()
			}
		})
		d := c.nodes[0].check(t, named("p", "k", 1))
		expect.True(t, d.FailedOpen, "%+v", d)
		c.wantStats(PolicyStats{Policy: "p", FailedOpen: 1}) // at the entry node and nowhere else
	})
}

const failing = `policies:
  - {name: open, algorithm: sliding_log, limit: 10, window: 1m}
  - {name: closed, algorithm: token_bucket, limit: 10, window: 1m, capacity: 20, on_error: closed,
     overrides: [{key: free, unlimited: true}, {key: bad, blocked: true}, {prefix: few, limit: 3}]}
  - {name: bans, algorithm: sliding_log, limit: 10, window: 1m, overrides: [{key: bad, blocked: true}]}
  - {name: shadow, algorithm: sliding_log, limit: 10, window: 1m, shadow: true, on_error: closed}
  - {name: leases, algorithm: concurrency, limit: 10, ttl: 1m, on_error: closed}
`

func TestOnErrorAnswersForAnUnreachableOwner(t *testing.T) {
	open := func(lim int64, window time.Duration) limit.Decision {
		return limit.Decision{Allowed: true, Granted: 2, FailedOpen: true, Limit: lim, Window: window}
	}
	for _, wire := range []struct {
		what string
		wire wire
		took time.Duration
	}{{"refused", refused, 0}, {"lost", lost, 980 * time.Millisecond}} {
		for _, test := range []struct {
			target limit.Target
			want   limit.Decision
		}{
			{limit.Target{Policy: "open"}, open(10, time.Minute)},
			{limit.Target{Policy: "closed"},
				limit.Decision{FailedClosed: true, Limit: 20, Window: 2 * time.Minute, RetryAfter: time.Second}},
			{onPolicy("closed", "few"),
				limit.Decision{FailedClosed: true, Limit: 20, Window: 400 * time.Second, RetryAfter: time.Second}},
			// What needs no state needs no owner.
			{onPolicy("closed", "free"),
				limit.Decision{Allowed: true, Granted: 2, Limit: algo.Unlimited, Remaining: algo.Unlimited}},
			{onPolicy("closed", "bad"), limit.Decision{RetryAfter: algo.Never}},
			{onPolicy("bans", "bad"), limit.Decision{RetryAfter: algo.Never}},
			{limit.Target{Policy: "bans"}, open(10, time.Minute)},
			// A policy in shadow mode admits whatever happens.
			{limit.Target{Policy: "shadow"}, limit.Decision{Allowed: true, Granted: 2, FailedOpen: true, Shadow: true,
				Limit: 10, Window: time.Minute}},
			{limit.Target{Policy: "nobody-knows"}, open(0, 0)},
			{limit.Target{Limit: &algo.Limit{Algorithm: algo.FixedWindow, Limit: 5, Window: time.Hour}},
				open(5, time.Hour)},
			{limit.Target{Limit: &algo.Limit{Algorithm: algo.FixedWindow, Limit: algo.Unlimited}},
				limit.Decision{Allowed: true, Granted: 2, Limit: algo.Unlimited, Remaining: algo.Unlimited}},
		} {
			inBubble(t, 2, Config{Policies: policies(t, failing)}, func(t *testing.T, c *testCluster) {
				c.tamper(wire.wire)
				c.see(c.nodes[0], func(int) ownership.Route { return c.holder(c.nodes[0], 1) })
				q := limit.Check{Target: test.target, Cost: 2, RequestID: "r"}
				if q.Key == "" {
					q.Key = "k"
				}
				want := test.want
				if want.Policy, want.RequestID = q.Policy, "r"; q.Limit != nil {
					want.Policy = "inline"
				}
				// With a caller's deadline, without, and as a peek.
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				start := time.Now()
				got, err := c.nodes[0].Check(ctx, []limit.Check{q})
				if err != nil || !sameDecision(got[0].Decision, want) {
					t.Errorf("%s, %s: %+v, %v, want %+v", wire.what, q.Policy, got[0].Decision, err, want)
				}
				expect.Equal(t, time.Since(start), wire.took, "%s, %s: answered after", wire.what, q.Policy)
				q.Cost = 0
				want.Granted = 0
				expect.True(t, sameDecision(c.nodes[0].check(t, q), want), "peek at %s: %+v", q.Policy, want)
				name := want.Policy
				switch name {
				case "inline":
					name = "(inline)"
				case "nobody-knows":
					name = "(unknown)"
				}
				stats := PolicyStats{Policy: name}
				switch {
				case want.FailedOpen:
					stats.FailedOpen = 1
				case want.FailedClosed:
					stats.FailedClosed = 1
				case want.Allowed:
					stats.Allowed = 1
				default:
					stats.Refused = 1
				}
				c.wantStats(stats)
			})
		}
	}
}

func sameDecision(a, b limit.Decision) bool {
	a.RememberFor, b.RememberFor = 0, 0
	return reflect.DeepEqual(a, b)
}

func TestUnknownPolicyOfAnUnreachableOwner(t *testing.T) {
	for unknown, closed := range map[Unknown]bool{UnknownError: false, UnknownAllow: false, UnknownDeny: true} {
		inBubble(t, 2, Config{UnknownPolicy: unknown}, func(t *testing.T, c *testCluster) {
			c.tamper(refused)
			d := c.nodes[0].check(t, named("p", c.owned("p", 1, 0), 1))
			expect.True(t, d.FailedClosed == closed && d.FailedOpen != closed && d.Allowed != closed,
				"unknown policies %d: %+v", unknown, d)
		})
	}
}

// TestCallsWithoutOnError: the callers of these have to learn that they may or may not have been carried out.
func TestCallsWithoutOnError(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, failing)}, func(t *testing.T, c *testCluster) {
		c.tamper(lost)
		c.see(c.nodes[0], func(int) ownership.Route { return c.holder(c.nodes[0], 1) })
		n, open, leases := c.nodes[0], onPolicy("open", "k"), onPolicy("leases", "k")
		wantError(t, expect.Err(n.Refund(t.Context(), open, 1, "")), limit.Unavailable, "")
		wantError(t, n.Reset(t.Context(), open), limit.Unavailable, "")
		wantError(t, expect.Err(n.Cancel(t.Context(), open, "00000000000000000000000100000000")), limit.Unavailable, "")
		wantError(t, expect.Err(n.Renew(t.Context(), leases, "0000000000000001", 0)), limit.Unavailable, "")
		wantError(t, expect.Err(n.Release(t.Context(), leases, "0000000000000001")), limit.Unavailable, "")
		_, err := n.Release(t.Context(), onPolicy("unknown", "k"), "0000000000000001")
		wantError(t, err, limit.Unavailable, "")
		// Acquire has its on_error. A lease is not made up.
		d, err := n.Acquire(t.Context(), limit.Acquire{Target: leases, Cost: 1})
		expect.True(t, err == nil && !d.Allowed && d.FailedClosed && d.LeaseID == "", "%+v, %v", d, err)
		inline := inlineTarget(algo.Limit{Algorithm: algo.Concurrency, Limit: 3, Window: time.Minute}, "k")
		d, err = n.Acquire(t.Context(), limit.Acquire{Target: inline, Cost: 1})
		expect.True(t, err == nil && d.Allowed && d.FailedOpen && d.LeaseID == "", "%+v, %v", d, err)
		// What this node knows to be wrong is wrong with and without an owner.
		n.checkError(t, limit.Check{Target: leases, Cost: 1}, limit.Invalid, "policy")
		n.checkError(t, limit.Check{Target: inline, Cost: 1}, limit.Invalid, "limit")
		wantError(t, expect.Err(n.Acquire(t.Context(), limit.Acquire{Target: open, Cost: 1})), limit.Invalid, "policy")
		wantError(t, expect.Err(n.Refund(t.Context(), leases, 1, "")), limit.Invalid, "policy")
		c.wantStats(PolicyStats{Policy: "leases", FailedClosed: 1, Errors: 1})
		c.wantStats(PolicyStats{Policy: "(inline)", FailedOpen: 1, Errors: 1})
		c.wantStats(PolicyStats{Policy: "open", Errors: 1})
	})
}

func TestDeadlines(t *testing.T) {
	for _, test := range []struct{ timeout, caller, want time.Duration }{
		{0, 0, DefaultTimeout},
		{300 * time.Millisecond, 0, 300 * time.Millisecond},
		{300 * time.Millisecond, time.Hour, 300 * time.Millisecond},
		// A part of the caller's time is left for the answer to reach it.
		{0, 500 * time.Millisecond, 480 * time.Millisecond},
		{0, 50 * time.Millisecond, 40 * time.Millisecond},
		{0, time.Millisecond, 800 * time.Microsecond},
	} {
		inBubble(t, 2, Config{Timeout: test.timeout}, func(t *testing.T, c *testCluster) {
			c.tamper(lost)
			ctx := t.Context()
			if test.caller != 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, test.caller)
				defer cancel()
			}
			start := time.Now()
			got, err := c.nodes[0].Check(ctx,
				[]limit.Check{named("p", c.owned("p", 1, 0), 1), named("p", c.owned("p", 1, 1), 1)})
			expect.True(t, err == nil && got[0].FailedOpen && got[1].FailedOpen, "%+v, %v", got, err)
			expect.Equal(t, time.Since(start), test.want, "%+v: answered after", test)
		})
	}
	inBubble(t, 2, Config{}, func(t *testing.T, c *testCluster) {
		ctx, cancel := context.WithCancel(t.Context())
		c.tamper(func(ctx context.Context, from *testNode, to ownership.Node, ops []*Op, deliver func()) {
			cancel() // a caller that goes away
			lost(ctx, from, to, ops, deliver)
		})
		start := time.Now()
		got, err := c.nodes[0].Check(ctx, []limit.Check{named("p", c.owned("p", 1, 0), 1)})
		expect.True(t, err == nil && got[0].FailedOpen && time.Since(start) == 0,
			"%+v, %v after %v", got, err, time.Since(start))
	})
}

// TestNobodyIsKnown: no holder, or no way to reach one.
func TestNobodyIsKnown(t *testing.T) {
	inBubble(t, 1, Config{Policies: policies(t, failing)}, func(t *testing.T, c *testCluster) {
		c.see(c.nodes[0], func(int) ownership.Route { return ownership.Route{Standing: ownership.Elsewhere} })
		d := c.nodes[0].check(t, named("open", "k", 1))
		expect.True(t, d.FailedOpen, "%+v", d)
		expect.Equal(t, c.carried, 0, "asked nobody")
	})
	l := started(t, Config{Ownership: &alone{Standing: ownership.Elsewhere, Node: ownership.Node{Name: "other"}}})
	got, err := l.Check(t.Context(), []limit.Check{named("open", "k", 1)})
	expect.True(t, err == nil && got[0].FailedOpen, "%+v, %v", got, err)
}

// TestNobodyDecides: in the last instants of a hand-over a check waits for the receiver to decide, and then asks it all
// the same; while a partition is unclaimed it waits as long as it may.
func TestNobodyDecides(t *testing.T) {
	frozen := ownership.Route{Standing: ownership.Frozen, Node: ownership.Node{Name: "n1", Boot: 2}}
	for _, test := range []struct {
		what  string
		route ownership.Route
		after time.Duration // until n1 decides as far as n0 knows
		took  time.Duration
		open  bool // answered by on_error
	}{
		{"handed over at once", frozen, 10 * time.Millisecond, 10 * time.Millisecond, false},
		{"handed over late", frozen, time.Hour, 50 * time.Millisecond, false},
		{"claimed at once", ownership.Route{}, 10 * time.Millisecond, 10 * time.Millisecond, false},
		{"claimed late", ownership.Route{}, 300 * time.Millisecond, 300 * time.Millisecond, false},
		{"not claimed", ownership.Route{}, time.Hour, time.Second, true},
	} {
		t.Run(test.what, func(t *testing.T) {
			inBubble(t, 2, Config{Policies: policies(t, failing), Timeout: time.Second},
				func(t *testing.T, c *testCluster) {
					start := time.Now()
					c.see(c.nodes[0], func(int) ownership.Route {
						if time.Since(start) >= test.after {
							return c.holder(c.nodes[0], 1)
						}
						return test.route
					})
					c.see(c.nodes[1], func(int) ownership.Route { return c.holder(c.nodes[1], 1) })
					d := c.nodes[0].check(t, named("open", "k", 1))
					took := time.Since(start)
					expect.True(t, d.FailedOpen == test.open && took >= test.took &&
						took <= test.took+2*time.Millisecond,
						"after %v: %+v", took, d)
				})
		})
	}
}

// TestTermsOfOneHolder: what one process holds under different terms goes to it in one message, in the order in which
// it was asked.
func TestTermsOfOneHolder(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, plain)}, func(t *testing.T, c *testCluster) {
		termOf := func(p int) ownership.Term { return ownership.Term{Epoch: 1, N: uint64(p % 5)} }
		c.see(c.nodes[0], func(p int) ownership.Route {
			h := c.holder(c.nodes[0], 1+p%2)
			h.Term = termOf(p)
			return h
		})
		for i, n := range c.nodes[1:] {
			c.see(n, func(int) ownership.Route { return c.holder(n, i+1) })
		}
		var mu sync.Mutex
		got := make(map[string][]string)
		c.wire = func(_ context.Context, _ *testNode, to ownership.Node, ops []*Op, deliver func()) {
			defer deliver()
			mu.Lock()
			defer mu.Unlock()
			expect.True(t, got[to.Name] == nil, "%s is asked a second time", to.Name)
			for _, op := range ops {
				got[to.Name] = append(got[to.Name], op.Key)
			}
		}
		var checks []limit.Check
		for i := range 100 {
			checks = append(checks, named("p", keys[i%40], 1)) // some more than once
		}
		results := must.Value(c.nodes[0].Check(t.Context(), checks))(t)
		for i, r := range results {
			expect.True(t, r.Err == nil && !r.FailedOpen, "%d: %+v", i, r)
		}
		for name, asked := range got {
			at := 0
			for _, ck := range checks {
				if at < len(asked) && ck.Key == asked[at] {
					at++
				}
			}
			expect.Equal(t, at, len(asked), "%s is asked in another order: %v", name, asked)
		}
		expect.Equal(t, len(got["n1"])+len(got["n2"]), len(checks), "%d and %d asked", len(got["n1"]), len(got["n2"]))
	})
}

// twoOthers is a view in which two others hold every partition, each under a term of its own.
type twoOthers []ownership.Route

func newTwoOthers() twoOthers {
	all := make(twoOthers, ring.Partitions)
	for p := range all {
		all[p] = ownership.Route{
			Standing: ownership.Elsewhere, Node: ownership.Node{Name: [...]string{"n1", "n2"}[p%2],
				Boot: uint64(1 + p%2)}, Term: ownership.Term{N: uint64(p)},
		}
	}
	return all
}

func (e twoOthers) Route(p int) *ownership.Route { return &e[p] }

func (e twoOthers) Await(_ context.Context, p int, _ *ownership.Route) *ownership.Route { return &e[p] }

func (twoOthers) AwaitProgress(context.Context, int, uint64, bool) (degraded, ok bool) {
	return false, true
}

// prompt are peers who admit everything.
type prompt struct{}

func (prompt) Forward(_ context.Context, _ ownership.Node, ops []*Op) {
	for _, op := range ops {
		*op.Decision = limit.Decision{Allowed: true, Granted: op.Cost}
	}
}

// mistaken are peers who panic when they are asked about the key panic.
type mistaken struct{}

func (mistaken) Forward(_ context.Context, _ ownership.Node, ops []*Op) {
	for _, op := range ops {
		if op.Key == "panic" {
			panic(op.Key)
		}
		*op.Decision = limit.Decision{Allowed: true, Granted: op.Cost}
	}
}

// changing is a view in which all partitions have another standing than two others', and one more once that has been
// waited for.
type changing struct {
	twoOthers
	now, then ownership.Standing
}

func (c *changing) Route(p int) *ownership.Route {
	r := c.twoOthers[p]
	r.Standing = c.now
	return &r
}

func (c *changing) Await(_ context.Context, p int, _ *ownership.Route) *ownership.Route {
	c.now = c.then
	return c.Route(p)
}

// TestPanicsBesideACall: a panic in a goroutine that carries out a part of a call is passed on to who called, and is
// not the end of the process. What was taken in for the call is given back.
func TestPanicsBesideACall(t *testing.T) {
	check := named("p", "panic", 1)
	other := check
	for i := 0; ring.Partition(ring.Hash(ring.HashKey{}, "p", other.Key))%2 == ring.Partition(ring.Hash(ring.HashKey{},
		"p", check.Key))%2; i++ {
		other.Key = fmt.Sprint(i)
	}
	for name, test := range map[string]struct {
		owners Ownership
		call   func(l *Limiter)
	}{
		"several holders": {newTwoOthers(),
			func(l *Limiter) { _, _ = l.Check(t.Context(), []limit.Check{check, other}) }},
		"being handed over": {&changing{newTwoOthers(), ownership.Frozen, ownership.Frozen}, func(l *Limiter) {
			_, _ = l.Check(t.Context(), []limit.Check{check})
		}},
		"from a peer, no holder yet": {&changing{newTwoOthers(), ownership.Unclaimed, ownership.Elsewhere},
			func(l *Limiter) {
				l.Receive([]*Op{{Kind: OpCheck, Check: &check, Hops: 1, Left: time.Second}})(t.Context())
			}},
		"from a peer": {newTwoOthers(), func(l *Limiter) {
			l.Receive([]*Op{{Kind: OpCheck, Check: &check, Hops: 1, Left: time.Second}})(t.Context())
		}},
	} {
		l := New(Config{Ownership: test.owners, Peers: mistaken{},
			Policies: policies(t, nine)})
		err := panics.Call(func() error { test.call(l); return nil })
		p, ok := errors.AsType[*panics.Error](err)
		expect.True(t, ok && p.Value == "panic", "%s: %v", name, err)
		n := l.Load().InFlight
		expect.True(t, n == 0, "%s: %d operations are in flight", name, n)
		l.Close()
	}
}

// TestPanicsBehindAnAnswer: a panic in what is done behind an answer is the end of that alone, and told.
func TestPanicsBehindAnAnswer(t *testing.T) {
	told := make(chan *panics.Error, 1)
	l := New(Config{Panicked: func(p *panics.Error) { told <- p }})
	must.True(t, l.settling.start(func() { panic("behind") }), "not started")
	p := <-told
	expect.True(t, p.Value == "behind", "told of %v", p)
	l.Close() // which waits for it
}

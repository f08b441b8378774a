package limiter

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const refusing = `policies:
  - {name: log, algorithm: sliding_log, limit: 5, window: 10s}
  - {name: short, algorithm: sliding_log, limit: 1, window: 100ms}
  - {name: bucket, algorithm: token_bucket, limit: 4, window: 1s, capacity: 2}
  - {name: two, algorithm: sliding_log, limits: [5/10s, 6/1h]}
  - {name: denied, algorithm: sliding_log, limit: 5, window: 10s, count_denied: true}
  - {name: shadow, algorithm: sliding_log, limit: 5, window: 10s, shadow: true}
  - {name: jobs, algorithm: concurrency, limit: 5, ttl: 10s}
  - {name: blocked, algorithm: sliding_log, limit: 5, window: 10s, overrides: [{prefix: key, blocked: true}]}
`

// messages runs f and returns how many messages it took.
func (c *testCluster) messages(f func()) int {
	c.mu.Lock()
	before := c.carried
	c.mu.Unlock()
	f()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.carried - before
}

func (c *testCluster) wantMessages(want int, what string, f func()) {
	c.t.Helper()
	n := c.messages(f)
	expect.True(c.t, n == want, "%s: %d messages, want %d", what, n, want)
}

func TestARefusalIsRememberedWhereItWasAsked(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, refusing)}, func(t *testing.T, c *testCluster) {
		key, n := c.owned("log", 1, 0), c.nodes[0]
		n.check(t, named("log", key, 4))
		c.advance(3 * time.Second)
		first := n.check(t, named("log", key, 2))
		must.True(t, !first.Allowed && first.RetryAfter >= 7*time.Second && first.RememberFor == time.Second,
			"%+v", first)
		c.advance(400 * time.Millisecond)
		c.wantMessages(0, "asked again", func() {
			d := n.check(t, named("log", key, 2))
			left := first.RetryAfter - 400*time.Millisecond
			expect.True(t, !d.Allowed && d.RetryAfter >= left && d.RetryAfter <= left+time.Millisecond &&
				d.Policy == "log" && d.Limit == 5 && d.Remaining == 1, "%+v, want a retry_after of %v", d, left)
			reset := first.ResetAfter - 400*time.Millisecond
			expect.True(t, d.ResetAfter >= reset && d.ResetAfter <= reset+time.Millisecond,
				"reset after %v, want %v", d.ResetAfter, reset)
			expect.True(t, d.RememberFor > 0 && d.RememberFor <= 600*time.Millisecond,
				"to be remembered for %v", d.RememberFor)
		})
		c.wantMessages(1, "of more", func() { n.check(t, named("log", key, 5)) })
		c.wantMessages(0, "of as many, again", func() { n.check(t, named("log", key, 2)) })
		c.wantMessages(1, "of less", func() {
			expect.True(t, n.check(t, named("log", key, 1)).Allowed, "refused")
		})
		c.wantMessages(1, "of what can never pass", func() {
			d := n.check(t, named("log", key, 6))
			expect.True(t, !d.Allowed && d.RetryAfter == algo.Never, "%+v", d)
		})
		c.wantMessages(0, "of what can never pass, again", func() {
			d := n.check(t, named("log", key, 6))
			expect.True(t, !d.Allowed && d.RetryAfter == algo.Never, "%+v", d)
		})
		c.advance(598 * time.Millisecond) // a second, less what two clocks may disagree by
		c.wantMessages(1, "a second later", func() { n.check(t, named("log", key, 2)) })
		c.wantStats(PolicyStats{Policy: "log", Allowed: 2, Refused: 7, Remembered: 3})
	})
}

func TestWhatIsNotRemembered(t *testing.T) {
	reserve := func(t *testing.T, n *testNode, target limit.Target) string {
		d, err := n.Reserve(t.Context(), limit.Reserve{Target: target, Amount: units(1)})
		must.True(t, err == nil && d.Allowed && d.ReservationID != "", "%+v, %v", d, err)
		return d.ReservationID
	}
	for _, test := range []struct {
		name, policy string
		ask          func(t *testing.T, n *testNode, target limit.Target)
		cost         int64
		again        int // messages of the second time
	}{
		{name: "a plain refusal is", policy: "log", cost: 5},
		{name: "a bucket's is", policy: "bucket", cost: 2},
		{name: "a blocked key's is", policy: "blocked"},
		{name: "count_denied", policy: "denied", cost: 5, again: 1},
		{name: "shadow", policy: "shadow", cost: 5, again: 1},
		{name: "partial", policy: "log", cost: 5, again: 1, ask: func(t *testing.T, n *testNode, target limit.Target) {
			n.check(t, limit.Check{Target: target, Cost: 1, Partial: true})
		}},
		{name: "asked partially", policy: "log", cost: 5, again: 1,
			ask: func(t *testing.T, n *testNode, target limit.Target) {
				n.check(t, limit.Check{Target: target, Cost: 1})
				n.check(t, limit.Check{Target: target, Cost: 1, Partial: true})
			}},
		{name: "peek", policy: "log", cost: 5, again: 1, ask: func(t *testing.T, n *testNode, target limit.Target) {
			n.check(t, limit.Check{Target: target})
		}},
		{name: "request id", policy: "log", cost: 5, again: 1,
			ask: func(t *testing.T, n *testNode, target limit.Target) {
				n.check(t, limit.Check{Target: target, Cost: 1, RequestID: "r"})
			}},
		{name: "lease", policy: "jobs", again: 1, ask: func(t *testing.T, n *testNode, target limit.Target) {
			expect.NoError(t, expect.Err(n.Acquire(t.Context(), limit.Acquire{Target: target, Cost: 5})))
		}},
		{name: "reservation", policy: "log", cost: 5, again: 1,
			ask: func(t *testing.T, n *testNode, target limit.Target) {
				d, err := n.Reserve(t.Context(), limit.Reserve{Target: target, Amount: units(1)})
				expect.True(t, err == nil && !d.Allowed && d.RememberFor == 0, "%+v, %v", d, err)
			}},
		{name: "reservation pending", policy: "log", cost: 4, again: 1,
			ask: func(t *testing.T, n *testNode, target limit.Target) {
				if d := n.check(t, limit.Check{Target: target, Cost: 1}); d.Allowed {
					reserve(t, n, target)
				}
			}},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, 2, Config{Policies: policies(t, refusing)}, func(t *testing.T, c *testCluster) {
				n := c.nodes[0]
				target := onPolicy(test.policy, c.owned(test.policy, 1, 0))
				if test.name == "reservation pending" {
					reserve(t, n, target)
				}
				if test.cost > 0 {
					n.check(t, limit.Check{Target: target, Cost: test.cost})
				}
				if test.ask == nil {
					test.ask = func(t *testing.T, n *testNode, target limit.Target) { n.check(t, limit.Check{Target: target, Cost: 1}) }
				}
				test.ask(t, n, target)
				c.wantMessages(test.again, "again", func() { test.ask(t, n, target) })
			})
		})
	}
}

// TestWhatMayBeChargedForgets: a charge that was made, or may have been without an answer, makes those wait longer who
// were refused more.
func TestWhatMayBeChargedForgets(t *testing.T) {
	const text = "policies: [{name: p, algorithm: sliding_log, limit: 5, window: 10s, on_error: closed}]"
	for what, lost := range map[string]bool{"beyond the limit": false, "whose answer is lost": true} {
		inBubble(t, 2, Config{Policies: policies(t, text)}, func(t *testing.T, c *testCluster) {
			n, key := c.nodes[0], c.owned("p", 1, 0)
			n.check(t, named("p", key, 4))
			c.advance(9500 * time.Millisecond)
			d := n.check(t, named("p", key, 5))
			must.True(t, !d.Allowed && d.RetryAfter <= time.Second, "%+v", d)
			charge := named("p", key, 1)
			if lost {
				c.tamper(func(_ context.Context, _ *testNode, _ ownership.Node, ops []*Op, deliver func()) {
					deliver()
					unanswered(ops)
				})
			} else {
				charge.Cost, charge.Always = 2, true
			}
			must.True(t, !n.check(t, charge).Allowed, "admitted")
			c.tamper(nil)
			d = n.check(t, named("p", key, 5))
			expect.True(t, !d.Allowed && d.RetryAfter >= 9*time.Second, "after a charge %s: %+v", what, d)
		})
	}
}

func TestWhatGivesBackForgets(t *testing.T) {
	for name, give := range map[string]func(n *testNode, target limit.Target) error{
		"refund": func(n *testNode, target limit.Target) error {
			_, err := n.Refund(n.c.t.Context(), target, 1, "")
			return err
		},
		"reset": func(n *testNode, target limit.Target) error { return n.Reset(n.c.t.Context(), target) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, 3, Config{Policies: policies(t, refusing)}, func(t *testing.T, c *testCluster) {
				target := onPolicy("log", c.owned("log", 2, 0))
				one, five := limit.Check{Target: target, Cost: 1}, limit.Check{Target: target, Cost: 5}
				c.nodes[0].check(t, five)
				for _, n := range c.nodes {
					must.True(t, !n.check(t, one).Allowed, "not exhausted")
				}
				must.NoError(t, give(c.nodes[0], target))
				// What another node gave back is found out within the second.
				expect.True(t, !c.nodes[1].check(t, one).Allowed, "another node knew")
				c.advance(time.Second)
				d := c.nodes[1].check(t, limit.Check{Target: target})
				expect.True(t, d.Allowed, "a second later another node does not know")
				expect.True(t, c.nodes[0].check(t, one).Allowed, "the node that gave back did not know")
			})
		})
	}
}

// TestAnExtensionForgetsRefusals: who was refused more has to wait for longer when a node has units added to a
// reservation of which it did not know.
func TestAnExtensionForgetsRefusals(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, refusing)}, func(t *testing.T, c *testCluster) {
		target := onPolicy("log", c.owned("log", 2, 0))
		n, more := c.nodes[0], limit.Check{Target: target, Cost: 5}
		n.check(t, limit.Check{Target: target, Cost: 1})
		d := n.check(t, more)
		must.True(t, !d.Allowed && d.RememberFor != 0, "%+v", d)
		d, err := c.nodes[1].Reserve(t.Context(), limit.Reserve{Target: target, Amount: units(1), TTL: time.Minute})
		must.True(t, err == nil && d.Allowed, "%+v, %v", d, err)
		c.wantMessages(0, "asked again", func() { n.check(t, more) })
		d, err = n.Extend(t.Context(), limit.Extend{Target: target, ReservationID: d.ReservationID, Amount: units(1)})
		must.True(t, err == nil && d.Allowed, "%+v, %v", d, err)
		c.wantMessages(1, "asked after the extension", func() { n.check(t, more) })
	})
}

// TestARefusalInFlightIsForgotten has units given back between the decision and the arrival of its answer.
func TestARefusalInFlightIsForgotten(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, refusing)}, func(t *testing.T, c *testCluster) {
		n, target := c.nodes[0], onPolicy("log", c.owned("log", 1, 0))
		n.check(t, limit.Check{Target: target, Cost: 5})
		c.tamper(func(ctx context.Context, _ *testNode, _ ownership.Node, _ []*Op, deliver func()) {
			deliver()
			c.tamper(nil)
			expect.NoError(t, expect.Err(n.Refund(ctx, target, 5, "")))
		})
		must.True(t, !n.check(t, limit.Check{Target: target, Cost: 1}).Allowed, "not exhausted")
		d := n.check(t, limit.Check{Target: target, Cost: 1})
		expect.True(t, d.Allowed, "an answer older than the refund was remembered: %+v", d)
	})
}

// TestASlowAnswerIsNotRememberedLonger counts from the question, not from the answer.
func TestASlowAnswerIsNotRememberedLonger(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, refusing)}, func(t *testing.T, c *testCluster) {
		n, q := c.nodes[0], named("log", c.owned("log", 1, 0), 5)
		n.check(t, q)
		c.tamper(func(_ context.Context, _ *testNode, _ ownership.Node, _ []*Op, deliver func()) {
			deliver()
			c.advance(900 * time.Millisecond)
		})
		n.check(t, q)
		c.tamper(nil)
		c.wantMessages(0, "at once", func() { n.check(t, q) })
		c.advance(100 * time.Millisecond)
		c.wantMessages(1, "a second after the question", func() { n.check(t, q) })
	})
}

func TestANewPolicyForgetsRefusals(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, refusing)}, func(t *testing.T, c *testCluster) {
		n, q := c.nodes[0], named("log", c.owned("log", 1, 0), 5)
		n.check(t, q)
		n.check(t, q)
		c.setPolicies(`policies: [{name: log, algorithm: sliding_log, limit: 10, window: 10s}]`)
		expect.True(t, n.check(t, q).Allowed, "refused")
	})
}

func TestAnInlineRefusalIsOfItsLimit(t *testing.T) {
	inBubble(t, 2, Config{}, func(t *testing.T, c *testCluster) {
		q := func(lim int64) limit.Check {
			return limit.Check{Target: inlineTarget(algo.Limit{Algorithm: algo.SlidingLog, Limit: lim,
				Window: time.Minute}, "k1"), Cost: 1}
		}
		n, op := c.nodes[0], Op{Kind: OpCheck, Check: new(q(1))}
		must.Equal(t, n.plan(n.table.Load(), &op), nil)
		if n.Route(int(op.partition)).Standing == ownership.Owned {
			n = c.nodes[1]
		}
		n.check(t, q(1))
		n.check(t, q(1))
		c.wantMessages(0, "again", func() { n.check(t, q(1)) })
		expect.True(t, n.check(t, q(2)).Allowed, "a larger limit")
	})
}

// eachDrift takes 4,000 steps under each policy, with clocks of one owner and one entry node at all rates that are
// allowed. A step says whether it was answered from memory, as some have to be.
func eachDrift(t *testing.T,
	step func(t *testing.T, c *testCluster, dice int, id string, q limit.Check) (remembered bool)) {
	for _, policy := range []string{"log", "short", "bucket", "two"} {
		for _, rates := range [][2]int64{{0, 0}, {1, -1}, {-1, 1}} {
			t.Run(fmt.Sprintf("%s%v", policy, rates), func(t *testing.T) {
				inBubble(t, 3, Config{Policies: policies(t, refusing)}, func(t *testing.T, c *testCluster) {
					random := rand.New(rand.NewPCG(1, 2))
					c.nodes[2].rate.Store(rates[0])
					c.nodes[0].rate.Store(rates[1])
					key, remembered := c.owned(policy, 2, 0), 0
					for i := range 4000 {
						c.advance(time.Duration(random.ExpFloat64() * float64(40*time.Millisecond)))
						if step(t, c, random.IntN(8), fmt.Sprint(i), named(policy, key, 1+random.Int64N(3))) {
							remembered++
						}
					}
					expect.True(t, remembered >= 50, "only %d answers were from memory", remembered)
				})
			})
		}
	}
}

// TestARefusalFromMemoryIsNeverWrong holds every answer of an entry node, whose clock runs at another rate than the
// owner's, to a peek at the owner in the same instant.
func TestARefusalFromMemoryIsNeverWrong(t *testing.T) {
	eachDrift(t, func(t *testing.T, c *testCluster, dice int, id string, q limit.Check) bool {
		would := c.nodes[2].check(t, limit.Check{Target: q.Target}).Remaining >= q.Cost
		var d limit.Decision
		n := c.messages(func() { d = c.nodes[dice%2].check(t, q) })
		must.True(t, d.Allowed == would, "step %s: cost %d: %+v, the owner says %v", id, q.Cost, d, would)
		return n == 0
	})
}

// TestALateRefusalIsNotWrong holds every answer of an entry node to a peek at the owner in the same instant, where
// answers of that are late: a refusal that comes after the answers to younger checks, admitted ones among them, refuses
// nothing from memory for which there is room.
func TestALateRefusalIsNotWrong(t *testing.T) {
	for _, policy := range []string{"log", "short", "bucket"} {
		t.Run(policy, func(t *testing.T) {
			inBubble(t, 2, Config{Policies: policies(t, refusing)}, func(t *testing.T, c *testCluster) {
				type held struct{}
				c.tamper(func(ctx context.Context, _ *testNode, _ ownership.Node, _ []*Op, deliver func()) {
					deliver()
					if late, ok := ctx.Value(held{}).(chan struct{}); ok {
						<-late
					}
				})
				random := rand.New(rand.NewPCG(1, 2))
				entry, owner, key := c.nodes[0], c.nodes[1], c.owned(policy, 1, 0)
				var late chan struct{}
				var asking sync.WaitGroup
				// while the latest late one was asked, and not after that; answers from memory then
				admitted, remembered := false, 0
				for i := range 20_000 {
					c.advance(time.Duration(random.ExpFloat64() * float64(10*time.Millisecond)))
					switch {
					case late == nil && random.IntN(3) == 0:
						late, admitted = make(chan struct{}), false
						ctx, q := context.WithValue(t.Context(), held{}, late), named(policy, key, 2)
						asking.Go(func() { _, _ = entry.Check(ctx, []limit.Check{q}) })
						synctest.Wait()
					case late != nil && random.IntN(3) == 0:
						close(late)
						asking.Wait()
						late = nil
					}
					cost := 1 + random.Int64N(2)
					would := owner.check(t, limit.Check{Target: onPolicy(policy, key)}).Remaining >= cost
					var d limit.Decision
					if c.messages(func() { d = entry.check(t, named(policy, key, cost)) }) == 0 && late == nil &&
						admitted {
						remembered++
					}
					must.True(t, d.Allowed == would, "step %d: cost %d: %+v, the owner says %v", i, cost, d, would)
					if d.Allowed {
						admitted = late != nil
					}
				}
				if late != nil {
					close(late)
				}
				asking.Wait()
				expect.True(t, remembered >= 10, "only %d answers were from the memory of late refusals", remembered)
			})
		})
	}
}

// TestARefusalFromMemoryHasTheRetryAfterOfItsCost holds the retry_after of every refusal by an entry node that alone
// asks to what the owner says in the same instant to the same check.
func TestARefusalFromMemoryHasTheRetryAfterOfItsCost(t *testing.T) {
	eachDrift(t, func(t *testing.T, c *testCluster, dice int, id string, q limit.Check) bool {
		entry, owner := c.nodes[0], c.nodes[2]
		switch dice {
		case 0:
			q.Partial = true
		case 1:
			q.RequestID = id
		case 2:
			must.Value(entry.Reserve(t.Context(),
				limit.Reserve{Target: q.Target, Amount: units(q.Cost), TTL: time.Millisecond}))(t)
			return false
		}
		var d limit.Decision
		n := c.messages(func() { d = entry.check(t, q) })
		if !d.Allowed {
			want := owner.check(t, q).RetryAfter
			// Each clock is taken to be wrong by a thousandth at most, and no answer is older than a second.
			must.True(t, d.RetryAfter >= want && (d.RetryAfter <= want+4*time.Millisecond || d.RetryAfter == want),
				"step %s: cost %d: retry after %v, the owner says %v", id, q.Cost, d.RetryAfter, want)
		}
		return n == 0
	})
}

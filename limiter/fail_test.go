package limiter

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const partial = `policies:
  - {name: window, algorithm: fixed_window, limit: 10, window: 1m, on_error: share}
  - {name: log, algorithm: sliding_log, limit: 20, window: 1m, on_error: share}
  - {name: bucket, algorithm: token_bucket, limit: 60, window: 1m, capacity: 9, on_error: share}
  - {name: several, algorithm: sliding_log, limits: [4/1s, 12/1m], on_error: share}
  - {name: few, algorithm: fixed_window, limit: 2, window: 1m, on_error: share}
  - {name: shadow, algorithm: fixed_window, limit: 3, window: 1m, on_error: share, shadow: true}
  - name: overrides
    algorithm: fixed_window
    limit: 10
    window: 1m
    on_error: share
    overrides:
      - {prefix: "key-", limit: 30}
`

// TestOnErrorShare: while the owner cannot be asked each node admits its part of the limit, and no more; the owner
// never hears of it.
func TestOnErrorShare(t *testing.T) {
	members := 3
	inBubble(t, 3, Config{Policies: policies(t, partial), Members: func() int { return members }},
		func(t *testing.T, c *testCluster) {
			c.tamper(refused)
			admitted := func(n *testNode, policy, key string, asks int) (count int) {
				t.Helper()
				for range asks {
					d := n.check(t, named(policy, key, 1))
					switch {
					case d.Allowed != d.FailedOpen || d.Allowed == d.FailedClosed:
						t.Errorf("%s: %+v", policy, d)
					case d.Allowed:
						count++
					case d.RetryAfter != time.Second:
						t.Errorf("%s: %+v", policy, d)
					}
				}
				return count
			}
			for _, test := range []struct {
				policy string
				each   int
			}{{"window", 3}, {"log", 6}, {"bucket", 3}, {"several", 1}, {"few", 0}, {"overrides", 10}} {
				key := c.owned(test.policy, 0, 0)
				for _, n := range c.nodes[1:] {
					expect.Equal(t, admitted(n, test.policy, key, 12), test.each, "%s: %s admitted", test.policy,
						n.name)
				}
			}
			key := c.owned("shadow", 0, 0)
			for i := range 3 {
				d := c.nodes[1].check(t, named("shadow", key, 1))
				expect.True(t, d.Allowed && d.FailedOpen && d.Shadow == (i > 0), "in shadow mode, %d: %+v", i, d)
			}
			// A peek charges nothing, and what comes back comes back.
			key = c.owned("window", 0, 1)
			d := c.nodes[1].check(t, named("window", key, 0))
			expect.True(t, d.Allowed && d.FailedOpen && d.Remaining == 3, "a peek: %+v", d)
			expect.Equal(t, admitted(c.nodes[1], "window", key, 5), 3, "after a peek")
			c.advance(time.Minute)
			expect.Equal(t, admitted(c.nodes[1], "window", key, 5), 3, "in the next window")
			// Fewer members: a larger part, of which what was used is used.
			members = 2
			expect.Equal(t, admitted(c.nodes[1], "window", key, 5), 2, "with two members")
			c.tamper(nil)
			d = c.nodes[1].check(t, named("window", key, 1))
			expect.True(t, d.Allowed && !d.FailedOpen && d.Remaining == 9, "the owner is back: %+v", d)
		})
}

// sharer answers by its shares of one limit.
type sharer struct {
	*Limiter
	rule *rule
	now  algo.Instant
}

func newSharer(l algo.Limit) *sharer {
	s := &sharer{rule: &rule{Rule: store.Rule{Scope: "p", Limits: algo.Limits{l}}, share: true},
		now: algo.Instant{Mono: int64(time.Hour)}}
	s.Limiter = &Limiter{shares: newShares(), clock: func() algo.Instant { return s.now }}
	return s
}

func (s *sharer) decide(key string, n int, c limit.Check) *limit.Decision {
	s.cfg.Members = func() int { return n }
	op := NewOp(OpCheck, c, Extra{})
	op.Key, op.subject = key, subject{ring.Hash(ring.HashKey{}, "p", key), s.rule}
	s.failByShare(op)
	return op.Decision
}

// TestSharesTogether: in any window of a sliding log the parts of all nodes admit no more than its limit, whatever is
// asked where.
func TestSharesTogether(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 1))
		const window = time.Second
		total := int64(1 + random.IntN(40))
		all := make([]*sharer, 2+random.IntN(4))
		for i := range all {
			all[i] = newSharer(algo.Limit{Algorithm: algo.SlidingLog, Limit: total, Window: window})
		}
		type grant struct{ at, units int64 }
		var grants []grant
		now := int64(time.Hour)
		for range 2000 {
			now += random.Int64N(int64(window) / 20)
			c, one := limit.Check{Cost: 1 + random.Int64N(3), Partial: random.IntN(3) == 0}, all[random.IntN(len(all))]
			one.now.Mono = now
			d := one.decide("k", len(all), c)
			if d.Allowed {
				grants = append(grants, grant{now, d.Granted})
			}
			sum := int64(0)
			for _, g := range grants {
				if g.at > now-int64(window) {
					sum += g.units
				}
			}
			must.True(t, sum <= total,
				"seed %d: %d nodes admitted %d of %d within a window", seed, len(all), sum, total)
		}
		expect.True(t, total < int64(len(all)) || len(grants) != 0, "seed %d: nothing was admitted", seed)
	}
}

// TestSharesAreBounded: no more keys are kept than there may be; idle ones make way.
func TestSharesAreBounded(t *testing.T) {
	p := newSharer(algo.Limit{Algorithm: algo.FixedWindow, Limit: 10, Window: time.Minute})
	ask := func(key string) bool { return p.decide(key, 2, limit.Check{Cost: 1}).Allowed }
	for i := range maxShares {
		must.True(t, ask(fmt.Sprint(i)), "key %d is refused", i)
	}
	if ask("one more") || p.shares.Stats().Keys != maxShares {
		t.Errorf("one more is admitted; %d are kept", p.shares.Stats().Keys)
	}
	expect.True(t, ask("7"), "a known key is refused")
	p.now.Mono += int64(time.Minute)
	expect.True(t, ask("one more"), "idle keys do not make way")
	// Logs take memory, which is bounded too.
	p = newSharer(algo.Limit{Algorithm: algo.SlidingLog, Limit: 8 << 20, Window: time.Hour})
	for range 4 << 20 {
		p.now.Mono += 1 << 11 // another tick of the log
		p.decide("log", 1, limit.Check{Cost: 2})
	}
	if d := p.decide("log", 1, limit.Check{Cost: 1}); d.Allowed || p.shares.Stats().Bytes > maxShareBytes {
		t.Errorf("%d bytes are taken: %+v", p.shares.Stats().Bytes, d)
	}
}

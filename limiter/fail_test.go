package limiter

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
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

// severed is a wire that carries nothing.
func severed(context.Context, *testNode, ownership.Node, []*Op, func()) {}

// TestOnErrorShare: while the owner cannot be asked each node admits its part of the limit, and no more; the owner never hears of it.
func TestOnErrorShare(t *testing.T) {
	members := 3
	inBubble(t, 3, Config{Policies: policies(t, partial), Members: func() int { return members }}, func(t *testing.T, c *testCluster) {
		c.tamper(severed)
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
				expect.Equal(t, admitted(n, test.policy, key, 12), test.each, "%s: %s admitted", test.policy, n.name)
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

// TestPartsOfCharges: what asks for as much as there is, or for no room at all, is decided by a part as it is by the whole.
func TestPartsOfCharges(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, partial), Members: func() int { return 2 }}, func(t *testing.T, c *testCluster) {
		c.tamper(severed)
		n, key := c.nodes[1], c.owned("window", 0, 0)
		all := limit.Check{Target: limit.Target{Policy: "window", Key: key}, Cost: 7, Partial: true}
		d := n.check(t, all)
		expect.True(t, d.Allowed && d.Granted == 5, "of a part of 5: %+v", d)
		charge := limit.Check{Target: limit.Target{Policy: "window", Key: c.owned("window", 0, 1)}, Cost: 7, Always: true}
		d = n.check(t, charge)
		expect.Equal(t, d.Granted, 7, "a charge beyond a part of 5: %+v", d)
		charge.Always, charge.Cost = false, 1
		d = n.check(t, charge)
		expect.True(t, !d.Allowed, "after it: %+v", d)
	})
}

// parts is the store of one node's parts, and a rule that they are of.
type parts struct {
	*store.Store
	rule
}

func newTestParts(l algo.Limit) *parts {
	return &parts{newParts(), rule{Rule: store.Rule{Scope: "p", Limits: algo.Limits{l}}, share: true}}
}

func (p *parts) decide(key string, n int, now algo.Instant, r algo.Request) algo.Decision {
	return p.decidePart(p.Store, n, store.Key{Hash: ring.Hash(ring.HashKey{}, "p", key), Key: key}, now, r)
}

// TestPartsOfOtherSizes: what was charged to a part counts once in a part of another size.
func TestPartsOfOtherSizes(t *testing.T) {
	p := newTestParts(algo.Limit{Algorithm: algo.TokenBucket, Limit: 60, Window: time.Minute, Capacity: 9})
	now := algo.Instant{Mono: int64(time.Hour)}
	d := p.decide("k", 3, now, algo.Request{Cost: 2})
	must.True(t, d.Allowed, "%+v", d)
	first := p.decide("k", 1, now, algo.Request{})
	for range 3 {
		if d := p.decide("k", 1, now, algo.Request{}); d.Remaining != first.Remaining || d.Remaining > 7 {
			t.Errorf("%d are left of 9, and before %d", d.Remaining, first.Remaining)
		}
	}
}

// TestPartsTogether: in any window of a sliding log the parts of all nodes admit no more than its limit, whatever is asked where.
func TestPartsTogether(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 1))
		const window = time.Second
		total := int64(1 + random.IntN(40))
		all := make([]*parts, 2+random.IntN(4))
		for i := range all {
			all[i] = newTestParts(algo.Limit{Algorithm: algo.SlidingLog, Limit: total, Window: window})
		}
		type grant struct{ at, units int64 }
		var grants []grant
		now := int64(time.Hour)
		for range 2000 {
			now += random.Int64N(int64(window) / 20)
			r := algo.Request{Cost: 1 + random.Int64N(3), Partial: random.IntN(3) == 0}
			d := all[random.IntN(len(all))].decide("k", len(all), algo.Instant{Mono: now}, r)
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

// TestPartsAreBounded: no more keys are kept than there may be; idle ones make way.
func TestPartsAreBounded(t *testing.T) {
	p := newTestParts(algo.Limit{Algorithm: algo.FixedWindow, Limit: 10, Window: time.Minute})
	now := algo.Instant{Mono: int64(time.Hour)}
	ask := func(key string) bool { return p.decide(key, 2, now, algo.Request{Cost: 1}).Allowed }
	for i := range maxParts {
		must.True(t, ask(fmt.Sprint(i)), "key %d is refused", i)
	}
	if ask("one more") || p.Stats().Keys != maxParts {
		t.Errorf("one more is admitted; %d are kept", p.Stats().Keys)
	}
	expect.True(t, ask("7"), "a known key is refused")
	now.Mono += int64(time.Minute)
	expect.True(t, ask("one more"), "idle keys do not make way")
	// Logs take memory, which is bounded too.
	p = newTestParts(algo.Limit{Algorithm: algo.SlidingLog, Limit: 8 << 20, Window: time.Hour})
	for range 4 << 20 {
		now.Mono += 1 << 11 // another tick of the log
		p.decide("log", 1, now, algo.Request{Cost: 2})
	}
	if d := p.decide("log", 1, now, algo.Request{Cost: 1}); d.Allowed || p.Stats().Bytes > maxPartBytes {
		t.Errorf("%d bytes are taken: %+v", p.Stats().Bytes, d)
	}
}

package limiter

import (
	"context"
	"testing"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestStrictWaitsForGrant: a node that has just become the holder gets its grant a moment later, and checks under
// strict rules wait for that moment, but not for longer.
func TestStrictWaitsForGrant(t *testing.T) {
	start := time.Now()
	cfg := Config{BootClock: func() int64 { return int64(time.Since(start)) }}
	inBubble(t, 2, cfg, func(t *testing.T, c *testCluster) {
		start = time.Now() // the bubble's
		c.setPolicies("policies: [{name: p, limits: [9/1m], durability: sync, consistency: strict}]")
		key := c.owned("p", 0, 0)
		part := ring.Partition(ring.Hash(testKey, "p", key))
		held := c.nodes[0].store
		held.Unguarded(part, true)
		ask := func(n *testNode) (limit.Decision, time.Duration) {
			began := time.Now()
			r, err := n.Check(t.Context(), []limit.Check{{Target: onPolicy("p", key), Cost: 1}})
			if err != nil || r[0].Err != nil {
				t.Fatal(err, r[0].Err)
			}
			return r[0].Decision, time.Since(began)
		}
		for _, n := range c.nodes {
			if d, took := ask(n); !d.FailedClosed || took != grantMost {
				t.Errorf("through %s, never a grant: %+v after %v", n.name, d, took)
			}
			go func() {
				time.Sleep(22 * time.Millisecond)
				held.Lease(part, int64(time.Since(start)+time.Second))
			}()
			if d, took := ask(n); !d.Allowed || d.FailedClosed || took != 25*time.Millisecond {
				t.Errorf("through %s, a grant after 22ms: %+v after %v", n.name, d, took)
			}
			d, took := ask(n)
			expect.True(t, !d.FailedClosed && took == 0, "through %s, under a grant: %+v after %v", n.name, d, took)
			held.Lease(part, 0)
		}
	})
}

// TestRenewalsUnderLease: of a strict rule nothing is renewed, and no excess of a commit charged, without a lease, nor
// is the answer used after it.
func TestRenewalsUnderLease(t *testing.T) {
	start := time.Now()
	cfg := Config{Timeout: 10 * time.Second, BootClock: func() int64 { return int64(time.Since(start)) }}
	inBubble(t, 2, cfg, func(t *testing.T, c *testCluster) {
		start = time.Now() // the bubble's
		c.setPolicies(`policies:
  - {name: jobs, algorithm: concurrency, limit: 9, ttl: 1m, durability: sync, consistency: strict}
  - {name: p, limits: [9/1m], durability: sync, consistency: strict}`)
		time.Sleep(time.Second)
		jobs, window := onPolicy("jobs", c.owned("jobs", 0, 0)), onPolicy("p", c.owned("p", 0, 0))
		held := c.nodes[0].store
		grant := func(until time.Duration) {
			for _, target := range []limit.Target{jobs, window} {
				part := ring.Partition(ring.Hash(testKey, target.Policy, target.Key))
				held.Unguarded(part, true)
				held.Lease(part, int64(time.Since(start)+until))
			}
		}
		grant(time.Hour)
		n := c.nodes[1]
		lease := must.Value(n.Acquire(t.Context(), limit.Acquire{Target: jobs, Cost: 1}))(t)
		must.True(t, lease.Allowed, "%v", lease)
		call := map[string]func() error{
			"renewal": func() error {
				_, err := n.Renew(t.Context(), jobs, lease.LeaseID, time.Minute)
				return err
			},
			"commit": func() error {
				reserved := must.Value(n.Reserve(t.Context(), limit.Reserve{Target: window, Amount: units(1)}))(t)
				must.True(t, reserved.Allowed, "%v", reserved)
				_, err := n.Commit(t.Context(),
					limit.Commit{Target: window, ReservationID: reserved.ReservationID, Amount: units(2)})
				return err
			},
		}
		look := func(of *Op) limit.Decision {
			grant(time.Hour)
			return c.nodes[0].check(t, named(of.Policy, of.Key, 0))
		}
		for what, do := range call {
			grant(time.Hour)
			expect.NoError(t, do(), "a %s under a lease", what)
			for name, way := range map[string]struct {
				there,
				back time.Duration
			}{"without a lease": {1001 * time.Millisecond, 0},
				"answered late": {0, 1001 * time.Millisecond}} {
				grant(time.Hour)
				c.tamper(func(_ context.Context, _ *testNode, _ ownership.Node, ops []*Op, deliver func()) {
					if ops[0].Kind != OpRenew && ops[0].Kind != OpSettle {
						deliver()
						return
					}
					c.advance(time.Second) // a renewal shows
					before := look(ops[0])
					grant(time.Second)
					time.Sleep(way.there)
					deliver()
					time.Sleep(way.back)
					if after := look(ops[0]); way.there > 0 &&
						(after.Remaining != before.Remaining || after.ResetAfter != before.ResetAfter) {
						t.Errorf("a %s %s was carried out: %+v, before %+v", what, name, after, before)
					}
				})
				wantError(t, do(), limit.Unavailable, "")
				must.True(t, !t.Failed(), "a %s %s", what, name)
				c.tamper(nil)
			}
		}
	})
}

// TestAnswersUnderLease: an answer of another node's may be used for as long as its lease had left when it was decided,
// counted from the moment the question was sent, and for somewhat less, as clocks differ.
func TestAnswersUnderLease(t *testing.T) {
	start := time.Now()
	cfg := Config{Timeout: 10 * time.Second, BootClock: func() int64 { return int64(time.Since(start)) }}
	inBubble(t, 2, cfg, func(t *testing.T, c *testCluster) {
		start = time.Now() // the bubble's
		c.setPolicies("policies: [{name: p, limits: [9/1m], durability: sync, consistency: strict}]")
		key := c.owned("p", 0, 0)
		part := ring.Partition(ring.Hash(testKey, "p", key))
		held := c.nodes[0].store
		held.Unguarded(part, true)
		for _, way := range []struct {
			there, back time.Duration
			used        bool
		}{
			{0, 0, true},
			{0, 990 * time.Millisecond, true},
			{0, 999 * time.Millisecond, false}, // this clock may be slow, and that one fast
			{0, 1001 * time.Millisecond, false},
			{400 * time.Millisecond, 100 * time.Millisecond, true},
			{400 * time.Millisecond, 300 * time.Millisecond, false}, // 600 ms were left
		} {
			held.Lease(part, int64(time.Since(start)+time.Second))
			c.tamper(func(_ context.Context, _ *testNode, _ ownership.Node, _ []*Op, deliver func()) {
				time.Sleep(way.there)
				deliver()
				time.Sleep(way.back)
			})
			r, err := c.nodes[1].Check(t.Context(), []limit.Check{{Target: onPolicy("p", key), Cost: 1}})
			if err != nil || r[0].Err != nil {
				t.Fatal(err, r[0].Err)
			}
			if d := r[0].Decision; d.FailedClosed == way.used || d.Allowed != way.used {
				t.Errorf("%v there and %v back: %+v", way.there, way.back, d)
			}
		}
	})
}

package limiter

import (
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const warned = `policies:
  - {name: one, algorithm: sliding_log, limit: 10, window: 1m, warn_at: 0.8, overrides: [{key: large, limit: 100}, {key: free, unlimited: true}, {key: shut, blocked: true}]}
  - {name: several, limits: [10/1s, 100/1h], warn_at: 0.5}
  - {name: bucket, algorithm: token_bucket, limit: 10, capacity: 20, window: 1m, warn_at: 1}
  - {name: tried, algorithm: fixed_window, limit: 2, window: 1m, warn_at: 1, shadow: true}
  - {name: never, algorithm: sliding_log, limit: 1, window: 1m}
`

// TestNearLimit: decisions say that the policy's warn_at of a limit is in use, through whichever node, and are counted.
func TestNearLimit(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, warned)}, func(t *testing.T, c *testCluster) {
		turn := 0
		near := func(policy, key string, cost int64, want bool) {
			t.Helper()
			turn++
			n := c.nodes[turn%len(c.nodes)]
			expect.Equal(t, n.check(t, named(policy, key, cost)).NearLimit, want, "%s %s, cost %d", policy, key, cost)
		}
		near("one", "k", 7, false)
		near("one", "k", 1, true)
		near("one", "k", 0, true)
		near("one", "k", 9, true) // refused
		near("one", "k", 9, true) // perhaps from memory
		near("one", "other", 11, false)
		near("one", "large", 79, false)
		near("one", "large", 1, true)
		near("one", "free", 1000, false)
		near("one", "shut", 1, false)
		expect.Equal(t, c.stats("one").NearLimit, 4, "counted")

		// Of several limits any, also where another one is the tightest.
		for range 5 {
			near("several", "k", 10, true) // of the first one
			c.advance(1100 * time.Millisecond)
		}
		near("several", "k", 0, true) // of the second one alone
		near("several", "fresh", 4, false)
		near("several", "fresh", 1, true)

		near("bucket", "k", 19, false)
		near("bucket", "k", 1, true)
		near("tried", "k", 2, true)
		near("tried", "k", 1, true)
		got := c.stats("tried")
		expect.True(t, got.Shadowed == 1 && got.NearLimit == 2, "in shadow mode: %+v", got)
		near("never", "k", 1, false)
		near("never", "k", 1, false)

		// A changed policy warns at once.
		c.setPolicies("policies: [{name: never, algorithm: sliding_log, limit: 1, window: 1m, warn_at: 0.000001}]")
		near("never", "k", 0, true)
		near("never", "unused", 0, false)
	})
}

// TestNoNearLimit: an answer by on_error says nothing of what is in use.
func TestNoNearLimit(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, `policies:
  - {name: open, algorithm: sliding_log, limit: 1, window: 1m, warn_at: 0.1}
  - {name: closed, algorithm: sliding_log, limit: 1, window: 1m, warn_at: 0.1, on_error: closed}
  - {name: share, algorithm: sliding_log, limit: 2, window: 1m, warn_at: 0.1, on_error: share}
`)}, func(t *testing.T, c *testCluster) {
		c.tamper(lost)
		for _, policy := range []string{"open", "closed", "share"} {
			key := c.owned(policy, 1, 0)
			d := c.nodes[0].check(t, named(policy, key, 1))
			expect.True(t, !d.NearLimit && (d.FailedOpen || d.FailedClosed), "%s: %+v", policy, d)
		}
	})
}

// TestWarnUnits: the number of units is the least whole one that is the share.
func TestWarnUnits(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 3))
	for range 10000 {
		millionths, lim := 1+random.Int64N(policy.WarnAtWhole), 1+random.Int64N(algo.MaxLimit>>random.IntN(53))
		product := new(big.Int).Mul(big.NewInt(millionths), big.NewInt(lim))
		want := product.Add(product, big.NewInt(policy.WarnAtWhole-1)).Div(product,
			big.NewInt(policy.WarnAtWhole)).Int64()
		must.Equal(t, warnUnits(millionths, lim), want, "%d millionths of %d", millionths, lim)
		must.True(t, (!nearLimit(millionths, lim, lim-want+1) || want <= 1) && nearLimit(millionths, lim, lim-want),
			"%d millionths of %d: wrong at %d", millionths, lim, want)
	}
}

package limiter

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const tried = `policies:
  - {name: tried, algorithm: fixed_window, limit: 7, window: 1m, candidate: {limits: [3/10s, 9/1m]}}
  - {name: plain, algorithm: fixed_window, limit: 7, window: 1m}
  - {name: other, limits: [3/10s, 9/1m]}
  - name: mixed
    algorithm: sliding_log
    limit: 2
    window: 1m
    candidate: {algorithm: token_bucket, limit: 5, window: 1m}
    overrides:
      - {key: vip, limit: 100}
      - {key: banned, blocked: true}
`

// TestCandidate: a policy with a candidate answers as one without, and its candidate counts what a policy of these
// limits that is asked the same would have answered. Refunds and resets are for both.
func TestCandidate(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, tried)}, func(t *testing.T, c *testCluster) {
		random := rand.New(rand.NewPCG(7, 7))
		disagreed := uint64(0)
		for i := range 4000 {
			// longer than refusals are remembered
			c.advance(1100*time.Millisecond + time.Duration(random.Int64N(int64(time.Second))))
			n := c.nodes[random.IntN(3)]
			key, cost := fmt.Sprint(random.IntN(5)), random.Int64N(4)
			switch random.IntN(20) {
			case 0:
				for _, policy := range []string{"tried", "plain", "other"} {
					must.Value(n.Refund(t.Context(), onPolicy(policy, key), 2, ""))(t)
				}
			case 1:
				for _, policy := range []string{"tried", "plain", "other"} {
					must.NoError(t, n.Reset(t.Context(), onPolicy(policy, key)))
				}
			default:
				partial := cost > 0 && random.IntN(2) == 0
				ask := func(policy string) limit.Decision {
					return n.check(t, limit.Check{Target: onPolicy(policy, key), Cost: cost, Partial: partial})
				}
				got, want, other := ask("tried"), ask("plain"), ask("other")
				if cost > 0 && got.Allowed != other.Allowed {
					disagreed++
				}
				must.True(t, got.Allowed == want.Allowed && got.Granted == want.Granted &&
					got.Remaining == want.Remaining && got.RetryAfter == want.RetryAfter,
					"check %d: %+v, and %+v without a candidate", i, got, want)
			}
		}
		got, want := c.stats("tried"), c.stats("other")
		expect.True(t, got.CandidateAllowed == want.Allowed && got.CandidateRefused == want.Refused &&
			got.CandidateDisagreed == disagreed,
			"the candidate: %+v; asked by itself: %+v, %d other answers", got, want, disagreed)
		expect.True(t, want.Allowed != 0 && want.Refused != 0 && disagreed != 0,
			"nothing is tested: %+v, %d", want, disagreed)

		// Keys with an override have no candidate.
		for _, key := range []string{"vip", "banned"} {
			c.nodes[0].check(t, named("mixed", key, 1))
		}
		got = c.stats("mixed")
		expect.Equal(t, got.CandidateAllowed+got.CandidateRefused, 0, "keys with an override: %+v", got)
		for range 6 {
			c.nodes[0].check(t, named("mixed", "key", 1))
		}
		got = c.stats("mixed")
		expect.True(t, got.CandidateAllowed == 5 && got.CandidateRefused == 1 && got.CandidateDisagreed == 3,
			"six checks: %+v", got)
		// A policy without one counts no more.
		c.setPolicies("policies: [{name: mixed, algorithm: sliding_log, limit: 2, window: 1m}]")
		c.nodes[0].check(t, named("mixed", "key", 1))
		expect.Equal(t, c.stats("mixed").CandidateAllowed, 5, "without a candidate")
	})
}

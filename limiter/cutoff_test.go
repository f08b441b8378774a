package limiter

import (
	"fmt"
	"testing"
	"time"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const cutOffPolicies = `policies:
  - {name: open, algorithm: sliding_log, limit: 1000, window: 1h}
  - {name: closed, algorithm: sliding_log, limit: 1000, window: 1h, on_error: closed}
  - {name: share, algorithm: sliding_log, limit: 1000, window: 1h, on_error: share}
`

// TestLoanOfAnOwnerThatIsCutOff: a node admits from its loan while the owner of the key cannot be reached. Once that is
// used up, or its term is over with units left, on_error answers. Whatever that was, the owner charges all that was on
// loan, once.
func TestLoanOfAnOwnerThatIsCutOff(t *testing.T) {
	for _, policy := range []string{"open", "closed", "share"} {
		for _, usedUp := range []bool{true, false} {
			name := policy + ", until the loan is over"
			if usedUp {
				name = policy + ", until the loan is used up"
			}
			t.Run(name, func(t *testing.T) {
				cfg := Config{Policies: policies(t, cutOffPolicies), Members: func() int { return 2 },
					Timeout: 50 * time.Millisecond}
				inBubble(t, 2, cfg, func(t *testing.T, c *testCluster) {
					owner, node := c.nodes[0], c.nodes[1]
					key := c.owned(policy, 0, 0)
					c.heat(node, named(policy, key, 1))
					c.pass(20 * time.Millisecond)
					free, held := owner.check(t, named(policy, key, 0)).Remaining, c.onLoan(owner, policy, key)
					c.tamper(refused)
					var lent int64
					last := node.check(t, named(policy, key, 1))
					for ; last.Allowed && !last.FailedOpen; last = node.check(t, named(policy, key, 1)) {
						lent++
						must.True(t, lent <= held, "%d were admitted of %d on loan", lent, held)
						if !usedUp && lent == 3 {
							c.advance(time.Second)
						}
					}
					must.True(t, lent != 0 && (usedUp || lent == 3), "%d were admitted of %d on loan", lent, held)
					// By on_error, and not counted anywhere: but for share, which counts here.
					open := 0
					for range 600 {
						must.True(t, last.FailedOpen != last.FailedClosed && last.Allowed == last.FailedOpen &&
							(!last.FailedClosed || last.RetryAfter == time.Second), "%+v", last)
						if last.FailedOpen {
							open++
						}
						last = node.check(t, named(policy, key, 1))
					}
					want := map[string]int{"open": 600, "closed": 0, "share": 500}[policy]
					expect.Equal(t, open, want, "on_error admitted")
					c.tamper(nil)
					c.pass(1300 * time.Millisecond) // in which all is reported, or the owner's record of it ends
					if d := owner.check(t, named(policy, key, 0)); d.Remaining != free ||
						c.onLoan(owner, policy, key) != 0 {
						t.Errorf("%d are left, %d on loan: want %d left", d.Remaining, c.onLoan(owner, policy, key),
							free)
					}
					d := node.check(t, limit.Check{Target: onPolicy(policy, key), Cost: free + 1})
					expect.True(t, !d.Allowed && !d.RetryAfterEstimated, "more than the limit: %+v", d)
					d = node.check(t, named(policy, key, free))
					expect.True(t, d.Allowed && !d.FailedOpen, "what is left: %+v", d)
				})
			})
		}
	}
}

// TestLoansOverReload: what is on loan when a policy changes may be spent for the rest of its term; from then on the
// new policy holds, and what was spent counts under it. A node, which knows the policy, no longer admits from a loan
// what is blocked.
func TestLoansOverReload(t *testing.T) {
	const limited = "policies: [{name: p, algorithm: %s}]"
	for name, test := range map[string]struct {
		to   string
		most int64 // admitted in all, beside what was on loan
		ends bool  // nothing is on loan in the end
	}{
		"lowered": {"sliding_log, limit: 70, window: 1h", 70, true},
		"blocked": {"sliding_log, limit: 10000, window: 1h, overrides: [{prefix: key, blocked: true}]", 0,
			true},
		"not lent":          {"sliding_log, limit: 10000, window: 1h, lend: false", 10000, true},
		"another algorithm": {"fixed_window, limit: 100, window: 1h", 100, true},
		"raised":            {"sliding_log, limit: 20000, window: 1h", 20000, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, 2, Config{Policies: policies(t, fmt.Sprintf(limited, "sliding_log, limit: 10000, window: 1h"))},
				func(t *testing.T, c *testCluster) {
					owner, node := c.nodes[0], c.nodes[1]
					key := c.owned("p", 0, 0)
					used := c.heat(node, named("p", key, 1))
					c.pass(10 * time.Millisecond)
					held := c.onLoan(owner, "p", key)
					must.True(t, held != 0, "nothing is on loan")
					c.setPolicies(fmt.Sprintf(limited, test.to))
					var admitted, late int64 // since then, and after the loans' terms
					for i := range 300 {
						for range 3 {
							if d := node.check(t, named("p", key, 1)); d.Allowed {
								must.True(t, !d.FailedOpen && test.most != 0, "%+v", d)
								if admitted++; i > 220 {
									late++
								}
							}
						}
						c.pass(5 * time.Millisecond)
					}
					expect.True(t, admitted <= held+max(test.most-used, 0),
						"%d were admitted of %d, beside %d on loan", used+admitted, test.most, held)
					expect.Equal(t, test.most <= used+900, late == 0,
						"%d were admitted after the loans' terms, of %d in all", late, admitted)
					n := c.onLoan(owner, "p", key)
					expect.Equal(t, test.ends, n == 0, "%d are on loan", n)
				})
		})
	}
}

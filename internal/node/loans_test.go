package node

import (
	"testing"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// TestStatusOfLoans: whichever node is asked, what its owner has lent of a key is in the status, under the owner alone.
func TestStatusOfLoans(t *testing.T) {
	t.Parallel()
	const lendable = "policies:\n  - {name: login, algorithm: sliding_log, limit: 1000, window: 1h}\n"
	nodes := startCluster(t, "a b", func(_ int, cfg *Config) { cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", lendable) })
	b1 := limit.Borrow{Target: limit.Target{Policy: "login", Key: "alice"}, ID: algo.LoanID{Borrower: 7}, Want: 16}
	// lend makes another loan, as those before may have ended, and returns its owner.
	lend := func() (owner *Node) {
		b1.ID.Number++
		for _, n := range nodes {
			out := make([]limit.Lent, 1)
			wait := must.Value(n.limiter.Lend(t.Context(), []limit.Borrow{b1}, out))(t)
			if wait != nil {
				wait()
			}
			if !out[0].Unheard {
				owner = n
			}
		}
		return owner
	}
	// shown has both nodes show the loans of a key's owner.
	shown := func(want func(*weirv1.Loans) bool) bool {
		owner := lend()
		if owner == nil {
			return false
		}
		for _, n := range nodes {
			for _, m := range n.Status(t.Context()).Members {
				l := m.Loans
				if l == nil || m.Name == owner.cfg.Name && !want(l) { // nil: it did not answer in time
					return false
				}
				expect.True(t, m.Name == owner.cfg.Name || l.OnLoan+uint64(l.Borrowers)+l.Recalls+l.Expired == 0,
					"%s has lent nothing: %v", m.Name, l)
			}
		}
		return true
	}
	testkit.Eventually(t, "a loan to be seen", func() bool {
		return shown(func(l *weirv1.Loans) bool { return l.GetOnLoan() >= 16 && l.GetBorrowers() == 1 })
	})
	owner := lend()
	defer owner.limiter.OpenBorrower(7, func(limit.Recall) {})()
	testkit.Eventually(t, "an unanswered recall to be seen", func() bool {
		lend()
		q := []limit.Check{{Target: b1.Target, Cost: 1000}}
		r, err := owner.limiter.Check(t.Context(), q)
		must.True(t, err == nil && r[0].Err == nil && !r[0].Allowed, "%v %v", r, err)
		return shown(func(l *weirv1.Loans) bool { return l.GetRecalls() > 0 && l.GetUnanswered() > 0 })
	})
	testkit.Eventually(t, "expired units to be seen", func() bool {
		return shown(func(l *weirv1.Loans) bool { return l.GetExpired() >= 16 })
	})
}

package client

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// lendingNode lends as much of every key as it is told to, and keeps what borrowers report.
type lendingNode struct {
	granted int64

	mu      sync.Mutex
	recall  func(limit.Recall)
	reports []limit.Borrow
}

func (n *lendingNode) Lend(_ context.Context, in []limit.Borrow, out []limit.Lent) (func(), error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.reports = append(n.reports, in...)
	for i, r := range in {
		out[i] = limit.Lent{Granted: max(r.Totals.Granted, n.granted), Spent: r.Totals.Spent, Term: algo.LoanTerm, Limit: 1 << 30}
	}
	return nil, nil
}

func (n *lendingNode) OpenBorrower(_ uint64, recall func(limit.Recall)) func() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.recall = recall
	return func() {}
}

// reported returns whether a report is as f says.
func (n *lendingNode) reported(f func(limit.Borrow) bool) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.ContainsFunc(n.reports, f)
}

// lent dials a node that lends, and returns how to ask for its key, and the number of the loan, of which the client has spent some.
func lent(t *testing.T, n *lendingNode) (ask func(), number uint64) {
	t.Helper()
	addr, _ := serve(t, nodeOver(newBook(), n))
	c := dial(t, addr, WithTimeout(time.Minute))
	must.NoError(t, c.Ready(t.Context()))
	l := c.Inline("n", algo.Limit{Algorithm: algo.TokenBucket, Limit: 1 << 30, Window: time.Hour})
	ask = func() {
		d, err := l.Allow(t.Context(), "k")
		must.True(t, err == nil && d.Allowed && !d.FailedOpen, "%v %v", d, err)
	}
	testkit.Eventually(t, "a loan of which some is spent", func() bool {
		ask()
		return n.reported(func(r limit.Borrow) bool { number = r.ID.Number; return r.Totals.Spent > 0 })
	})
	return ask, number
}

// TestRecall: a client whose loan is recalled returns what it has left at once, although its key is asked about all the time, and what
// the recall says was granted besides.
func TestRecall(t *testing.T) {
	const granted, besides = 1 << 20, 1000
	n := &lendingNode{granted: granted}
	ask, number := lent(t, n)
	n.mu.Lock()
	recall := n.recall
	n.mu.Unlock()
	recall(limit.Recall{Number: number, Granted: granted + besides})
	testkit.Eventually(t, "all of it to be returned", func() bool {
		ask()
		return n.reported(func(r limit.Borrow) bool {
			return r.ID.Number == number && r.Totals.Returned > 0 && r.Totals.Returned+r.Totals.Spent == granted+besides
		})
	})
}

// TestKnown: a report says what the answers have confirmed, so that who holds the key next knows what was counted.
func TestKnown(t *testing.T) {
	n := &lendingNode{granted: 1 << 20}
	ask, number := lent(t, n)
	testkit.Eventually(t, "a report of what is known", func() bool {
		ask()
		return n.reported(func(r limit.Borrow) bool { return r.ID.Number == number && r.Known > 0 && r.Known <= r.Totals.Spent })
	})
}

// TestLoanOverASuspension: nothing is spent of a loan whose term passed while the machine was suspended: Go's monotonic clock does not
// tell, the wall clock does.
func TestLoanOverASuspension(t *testing.T) {
	mono, wall := int64(time.Hour), int64(time.Hour)
	l := newLoans(nil, func() (int64, int64) { return mono, wall })
	key := loanKey{of: "p", key: "k"}
	lendable := Decision{Allowed: true, Limit: 1000}
	for l.book.Loans() == 0 {
		l.missed(key, 1, &lendable, true)
	}
	reports, _ := l.book.Report(l.clock())
	l.book.Answered(l.clock(), l.clock(), []lend.Answer[*member]{{Number: reports[0].Number, Lent: limit.Lent{Granted: 100, Term: algo.LoanTerm}}})
	_, _, ok := l.book.Take(key, 1, l.clock)
	must.True(t, ok, "nothing is lent")
	wall += int64(2 * algo.LoanTerm)
	_, _, ok = l.book.Take(key, 1, l.clock)
	expect.True(t, !ok, "a unit was spent after its term, which passed while the machine was suspended")
}

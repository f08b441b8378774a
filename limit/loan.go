package limit

import (
	"context"
	"time"

	"github.com/weirlimit/weir/algo"
)

// Borrow is a borrower's report of a loan of a key's units, and its request for more: see algo.Loans.
type Borrow struct {
	Target
	ID     algo.LoanID
	Totals algo.Totals
	Known  int64 // spent units that answers have confirmed
	Want   int64 // units that it asks for; 0: none
	// Counted says that the borrower counts its decisions itself, in its own metrics. Otherwise the lender counts them.
	Counted bool
}

// Lent is the answer to a Borrow.
type Lent struct {
	Granted int64 // units of the loan, in all
	Spent   int64 // spent units that the owner knows of, in all
	Ended   bool  // the loan has ended; the next one needs another number
	// Term is how long the borrower may spend, from the instant at which it sent the report. 0: it must return what it
	// has left, and asking for more is of no use before Again has passed.
	Term, Again time.Duration
	// Fields for the borrower's own Decisions. Remaining is without the units on loan.
	Limit, Remaining   int64
	Window, ResetAfter time.Duration
	// Limits has each limit of a policy that has several, with its own Remaining; empty otherwise.
	Limits []LimitStatus
	// WarnAt is the number of units in use, of any limit, from which a decision is NearLimit; 0: none is.
	WarnAt  int64
	Unheard bool   // this node does not decide for the key, and has ignored the report
	Holder  string // name of another node that decides for the key, or is about to; empty: not known
}

// Recall asks a borrower to return what it has left of a loan.
type Recall struct {
	Number  uint64 // of the loan's ID
	Granted int64  // units of the loan, in all; the answer that grants them may still be on its way
}

// Lender lends units of keys. Its methods are safe for concurrent use.
type Lender interface {
	// Lend processes reports and lends. out has the length of in, and gets the answer to each. An error means that
	// nothing was processed. wait nil: the answers may be sent. Otherwise the caller must call wait once before it
	// sends them: wait returns when other nodes know of the units lent, or has taken such units out of the answers,
	// when time ran out or ctx has ended.
	Lend(ctx context.Context, in []Borrow, out []Lent) (wait func(), err error)
	// OpenBorrower registers the function that recalls loans of a borrower, until end is called. recall is called with
	// locks held, possibly before OpenBorrower returns, and must return at once.
	OpenBorrower(borrower uint64, recall func(Recall)) (end func())
}

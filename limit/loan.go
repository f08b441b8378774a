package limit

import (
	"context"
	"time"

	"github.com/weirlimit/weir/algo"
)

// Borrow is what a borrower says of a loan of a key's units, and what it asks for: see algo.Loans.
type Borrow struct {
	Target
	ID     algo.LoanID
	Totals algo.Totals
	Known  int64 // units spent that the answers so far have confirmed
	Want   int64 // units that it would like to have; 0: no more of this key
	// Counted says that the borrower counts its decisions itself, where they can be read. Otherwise who lends counts them.
	Counted bool
}

// Lent is the answer to a Borrow.
type Lent struct {
	Granted int64 // in all
	Spent   int64 // in all, as far as the owner knows
	Ended   bool  // the loan is over: the next one has another number
	// Term is for how long the borrower may spend, from the instant at which it sent what this answers. 0: it is to return what it
	// has, and Again is until when it is no use asking for more.
	Term, Again time.Duration
	// What a Decision says besides. Remaining is without what is on loan.
	Limit, Remaining   int64
	Window, ResetAfter time.Duration
	// Limits lists every limit of a policy that has several, each with its own Remaining; empty otherwise.
	Limits []LimitStatus
	// WarnAt is how many units of Limit are in use when a decision is to be NearLimit, of whichever limit; 0: none is.
	WarnAt  int64
	Unheard bool   // this node does not decide for the key, and took in nothing
	Holder  string // where another node decides for the key, or is about to: its name; empty where that is not known
}

// Recall asks a borrower for what it has left of a loan.
type Recall struct {
	Number  uint64 // of the loan's ID
	Granted int64  // in all: the answer that says so may be on its way
}

// Lender lends units. Its methods are safe for concurrent use.
type Lender interface {
	// Lend takes in what a borrower reports, and lends. Each answer has its place in out, which is as long as in. The error means
	// that nothing was taken in. wait is nil where the answers may be given at once. Otherwise it is to be called before, once, and
	// returns when what must not be lent before others know of it may be, or cannot be and is taken out of the answers, for want of time
	// or because ctx ends.
	Lend(ctx context.Context, in []Borrow, out []Lent) (wait func(), err error)
	// OpenBorrower says how to ask a borrower for what it has left, until end is called. recall is called under locks, at once where that is
	// being asked for, and must return at once.
	OpenBorrower(borrower uint64, recall func(Recall)) (end func())
}

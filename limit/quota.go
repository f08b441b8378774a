package limit

import (
	"context"

	"github.com/weirlimit/weir/algo"
)

// Quota is what a borrower that works with Quotas says of a loan of a key's units, and what it asks for: see algo.Quota. With an
// algo.Quota that has a Term it asks for the loan, or, with Totals, that one which it has be known; otherwise it reports. With all of it
// reported spent or returned the loan ends, and its rate with it.
type Quota struct {
	Target
	ID     algo.LoanID
	Totals algo.Totals
	Known  int64 // units spent that the answers so far have confirmed
	Ask    algo.Quota
}

// QuotaLent is the answer to a Quota.
type QuotaLent struct {
	Granted int64 // units
	Rate    int64 // units per hour besides
	Spent   int64 // in all, as far as the owner knows
	// Free: the key has no limit, or one in shadow mode, and may be used without a loan. Charged: what was used is to be charged.
	Free, Charged bool
	Err           error // nothing was taken in, or it is not known whether it was; usually an *Error
}

// Quotas lends by Quotas. Its methods are safe for concurrent use.
type Quotas interface {
	// Quota takes in what a borrower reports, and lends, wherever the keys are decided for. Each answer has its place in out, which
	// is as long as in.
	Quota(ctx context.Context, in []Quota, out []QuotaLent) error
}

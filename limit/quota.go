package limit

import (
	"context"

	"github.com/weirlimit/weir/algo"
)

// Quota is a report of a borrower that works with Quotas, or its request for one: see algo.Quota. With Ask.Term 0 it
// only reports. With Ask.Term above 0 it asks for the loan or, with Totals, has the owner know a loan that the borrower
// has. When all units are reported spent or returned, the loan ends, and its rate with it.
type Quota struct {
	Target
	ID     algo.LoanID
	Totals algo.Totals
	Known  int64 // spent units that answers have confirmed
	Ask    algo.Quota
}

// QuotaLent is the answer to a Quota.
type QuotaLent struct {
	Granted int64 // units
	Rate    int64 // units per hour, in addition to Granted
	Spent   int64 // spent units that the owner knows of, in all
	// Free: the key is unlimited or its policy in shadow mode, and may be used without a loan. Charged: what is used
	// must be charged.
	Free, Charged bool
	Err           error // nothing was processed, or it is not known whether it was; usually an *Error
}

// Quotas lends units by algo.Quota. Its methods are safe for concurrent use.
type Quotas interface {
	// Quota processes reports and lends, for keys that any node decides for. out has the length of in, and gets the
	// answer to each.
	Quota(ctx context.Context, in []Quota, out []QuotaLent) error
}

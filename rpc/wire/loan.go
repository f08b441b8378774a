package wire

import (
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// Borrow converts a borrower's report of a loan. A negative Want becomes 0. The error names the field.
func Borrow(borrower uint64, r *weirv1.LoanReport) (limit.Borrow, *limit.Error) {
	t, err := Target(r.GetTarget())
	return limit.Borrow{
		Target: t, ID: algo.LoanID{Borrower: borrower, Number: r.GetNumber()},
		Totals: algo.Totals{Granted: r.GetGranted(), Spent: r.GetSpent(), Returned: r.GetReturned(),
			Checks: r.GetChecks()},
		Known: r.GetKnown(), Want: max(r.GetWant(), 0),
	}, err
}

// ProtoBorrow is the inverse of Borrow.
func ProtoBorrow(b *limit.Borrow) *weirv1.LoanReport {
	return &weirv1.LoanReport{
		Number: b.ID.Number, Target: ProtoTarget(b.Target),
		Granted: b.Totals.Granted, Spent: b.Totals.Spent, Returned: b.Totals.Returned, Checks: b.Totals.Checks,
		Known: b.Known, Want: b.Want,
	}
}

// ProtoLent converts the answer to a report of the loan with that number.
func ProtoLent(number uint64, a *limit.Lent) *weirv1.LoanAnswer {
	return &weirv1.LoanAnswer{
		Number: number, Granted: a.Granted, Spent: a.Spent, Ended: a.Ended, TermNs: int64(a.Term),
		AgainNs: int64(a.Again), Limit: a.Limit, WindowNs: int64(a.Window), Remaining: a.Remaining,
		ResetAfterNs: int64(a.ResetAfter), WarnAt: a.WarnAt, Unheard: a.Unheard, Holder: a.Holder,
		Limits: ProtoLimits(a.Limits),
	}
}

// Lent is the inverse of ProtoLent. It bounds the term to algo.LoanTerm.
func Lent(a *weirv1.LoanAnswer) limit.Lent {
	return limit.Lent{
		Granted: a.GetGranted(), Spent: a.GetSpent(), Ended: a.GetEnded(),
		Term: min(time.Duration(a.GetTermNs()), algo.LoanTerm), Again: time.Duration(a.GetAgainNs()),
		Limit: a.GetLimit(), Window: time.Duration(a.GetWindowNs()), Remaining: a.GetRemaining(),
		ResetAfter: time.Duration(a.GetResetAfterNs()),
		WarnAt:     a.GetWarnAt(), Unheard: a.GetUnheard(), Holder: a.GetHolder(), Limits: Limits(a.GetLimits()),
	}
}

package peer

import (
	"context"
	"reflect"
	"testing"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// Reports and recalls of loans cross, and so does what comes of them; the borrower is who sends, whoever it says it is, unless it forwards
// what a client has reported.
func TestLoansCross(t *testing.T) {
	noLeaks(t)
	target := limit.Target{Policy: "p", Key: "k"}
	report := limit.Borrow{ID: algo.LoanID{Borrower: 99, Number: 3}, Totals: algo.Totals{Granted: 9, Spent: 4, Returned: 1, Checks: 2}, Known: 3, Want: 16}
	lent := limit.Lent{Granted: 20, Spent: 4, Term: 5, Again: 6, Limit: 7, Remaining: 8, Window: 9, ResetAfter: 10, WarnAt: 11,
		Limits: []limit.LimitStatus{{Limit: 12, Window: 13, Remaining: 14, ResetAfter: 15}, {Limit: 16, Window: 17, Remaining: 18, ResetAfter: 19}}}
	var got []limiter.LoanCall
	var gotTarget limit.Target
	_, addr := servePeer(t, bob, receiver(func(ops []*limiter.Op) func(context.Context) {
		for _, op := range ops {
			got = append(got, *op.Loan)
			switch {
			case op.Kind == limiter.OpBorrow:
				op.Loan.Lent, gotTarget = lent, op.Target
			case op.Loan.Recall.Number == 3:
				op.Loan.Known = true
				op.Loan.Report = limit.Borrow{ID: algo.LoanID{Number: 3}, Totals: report.Totals, Known: 3}
			}
		}
		return nil
	}))
	p := newPeers(t, addr)
	ofClient := report
	ofClient.ID.Borrower = 77
	ops := []*limiter.Op{
		limiter.NewOp(limiter.OpBorrow, limit.Check{Target: target}, limiter.Extra{Loan: &limiter.LoanCall{Report: report}}),
		limiter.NewOp(limiter.OpRecall, limit.Check{}, limiter.Extra{Loan: &limiter.LoanCall{Recall: limit.Recall{Number: 3, Granted: 20}}}),
		limiter.NewOp(limiter.OpRecall, limit.Check{}, limiter.Extra{Loan: &limiter.LoanCall{Recall: limit.Recall{Number: 4, Granted: 20}}}),
		limiter.NewOp(limiter.OpBorrow, limit.Check{Target: target}, limiter.Extra{Loan: &limiter.LoanCall{Report: ofClient, Forwarded: true}}),
	}
	p.Forward(t.Context(), bob, ops)
	for _, op := range ops {
		must.True(t, !op.Outcome.Unreachable && op.Outcome.Err == nil && op.Outcome.NotHolder == nil, "%+v", op.Outcome)
	}
	want := report
	want.ID.Borrower, want.Counted = alice.Boot, true
	expect.True(t, got[0].Report == want && gotTarget == target, "%+v arrives, want %+v", got[0].Report, want)
	want = ofClient
	want.Counted = false
	expect.True(t, got[3].Report == want && got[3].Forwarded, "%+v arrives of a client's, want %+v", got[3], want)
	expect.True(t, got[1].Recall == ops[1].Loan.Recall && got[1].Report.ID.Borrower == alice.Boot, "%+v", got[1])
	l := ops[0].Loan.Lent
	expect.True(t, reflect.DeepEqual(l, lent), "%+v is answered, want %+v", l, lent)
	if l := ops[1].Loan; !l.Known || l.Report.Totals != report.Totals || l.Report.Known != 3 {
		t.Errorf("%+v", l)
	}
	if l := ops[2].Loan; l.Known {
		t.Errorf("of a loan that there is not: %+v", l)
	}
}

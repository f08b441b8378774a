package limiter

import (
	"context"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// This file lends to borrowers that report rarely and cannot be asked to return units, such as Envoys (algo.Quota;
// gateway/envoyquota is the borrower's side). Quota makes an OpQuota of each request and runs them like other
// operations, so that each is forwarded to the holder of its key; quota carries one out there. A quota has a fixed end,
// and a key's holder never recalls it (openRound).

// Quota implements limit.Quotas.
func (l *Limiter) Quota(ctx context.Context, in []limit.Quota, out []limit.QuotaLent) error {
	return l.each(ctx, len(in), func(i int) (*Op, *limit.Error) {
		q := &in[i]
		report := limit.Borrow{ID: q.ID, Totals: q.Totals, Known: q.Known}
		return NewOp(OpQuota, limit.Check{Target: q.Target}, Extra{Loan: &LoanCall{Report: report, Ask: q.Ask}}), nil
	}, func(i int, op *Op, err error) {
		if out[i] = op.Loan.Quota; err != nil {
			out[i] = limit.QuotaLent{Err: err}
		}
	})
}

// quota carries out an operation of the kind OpQuota.
func (l *Limiter) quota(op *Op, now *moment) {
	report, a, r := &op.Loan.Report, &op.Loan.Quota, op.rule
	*a = limit.QuotaLent{}
	switch {
	case r.missing:
		l.answer(op)
		return
	case r.Limits == nil:
		a.Free = r.units == algo.Unlimited || r.shadow
		return
	}
	totals := report.Totals
	totals.Checks = totals.Spent // each request of a data plane takes one unit
	call := store.Borrow{ID: report.ID, Totals: totals, Known: report.Known, Quota: op.Loan.Ask, Caller: op.Caller,
		Boot: r.boot(now)}
	if r.shadow || r.Limits.Unlimited() {
		a.Free, a.Charged = true, !r.Limits.Unlimited()
		call.Quota = algo.Quota{}
	} else if r.entry != nil && r.entry.Divisible() != nil {
		call.Quota = algo.Quota{} // the policy has changed since the bucket was assigned
	}
	lent, err := l.store.Lend(op.storeKey(), &r.Rule, now.Instant, call)
	if err != nil {
		l.setError(op, err)
		return
	}
	l.loans.spent.Add(uint64(lent.Charged))
	l.countSpent(r, op.Key, &lent)
	a.Granted, a.Rate, a.Spent = lent.Granted, lent.Rate, lent.Spent
	if call.Quota.Term > 0 && lent.Granted > 0 {
		l.loans.granted.Add(1)
	}
	op.Outcome.ticket = lent.Ticket
}

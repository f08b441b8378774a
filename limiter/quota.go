package limiter

import (
	"context"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// QuotaOp is what is asked and answered by an operation of the kind OpQuota.
type QuotaOp struct {
	ID     algo.LoanID
	Totals algo.Totals
	Known  int64
	Ask    algo.Quota
	// Lent is the answer, without Err.
	Lent limit.QuotaLent
}

// Quota implements limit.Quotas.
func (l *Limiter) Quota(ctx context.Context, in []limit.Quota, out []limit.QuotaLent) error {
	var ops []*Op
	var places []int
	t := l.table.Load()
	for i := range in {
		q := &in[i]
		op := NewOp(OpQuota, limit.Check{Target: q.Target}, Extra{Quota: &QuotaOp{ID: q.ID, Totals: q.Totals, Known: q.Known, Ask: q.Ask}})
		if err := l.plan(t, op); err != nil {
			out[i] = limit.QuotaLent{Err: err}
			continue
		}
		ops, places = append(ops, op), append(places, i)
	}
	if err := l.expired(ctx, len(ops)); err != nil {
		return err
	}
	l.run(ctx, ops...)
	for j, i := range places {
		if out[i] = ops[j].Quota.Lent; ops[j].Outcome.Err != nil {
			out[i] = limit.QuotaLent{Err: ops[j].Outcome.Err}
		}
	}
	return nil
}

// quota carries out an operation of the kind OpQuota.
func (l *Limiter) quota(op *Op, now *moment) {
	q, r := op.Quota, op.rule
	q.Lent = limit.QuotaLent{}
	switch {
	case r.missing:
		l.answer(op)
		return
	case r.Limits == nil:
		q.Lent.Free = r.units == algo.Unlimited || r.shadow
		return
	}
	totals := q.Totals
	totals.Checks = totals.Spent // each request takes a unit
	call := store.Borrow{ID: q.ID, Totals: totals, Known: q.Known, Quota: q.Ask, Caller: op.Caller, Boot: r.boot(now)}
	if r.shadow || r.Limits.Unlimited() {
		q.Lent.Free, q.Lent.Charged = true, !r.Limits.Unlimited()
		call.Quota = algo.Quota{}
	} else if r.entry != nil && r.entry.Divisible() != nil {
		call.Quota = algo.Quota{} // the policy has changed since the bucket was assigned
	}
	lent, err := l.store.Lend(op.storeKey(), &r.Rule, now.Instant, call)
	if err != nil {
		l.failed(op, err)
		return
	}
	l.loans.spent.Add(uint64(lent.Charged))
	l.countSpent(r, op.Key, &lent)
	q.Lent.Granted, q.Lent.Rate, q.Lent.Spent = lent.Granted, lent.Rate, lent.Spent
	if call.Quota.Term > 0 && lent.Granted > 0 {
		l.loans.granted.Add(1)
	}
	op.Outcome.ticket = lent.Ticket
}

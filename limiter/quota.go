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
	ops := make([]Op, 0, len(in))
	places := make([]int, 0, len(in))
	for i := range in {
		q := &in[i]
		op := Op{Kind: OpQuota, Check: limit.Check{Target: q.Target}, Quota: &QuotaOp{ID: q.ID, Totals: q.Totals, Known: q.Known, Ask: q.Ask}}
		if err := l.prepare(&op); err != nil {
			out[i] = limit.QuotaLent{Err: err}
			continue
		}
		ops, places = append(ops, op), append(places, i)
	}
	if err := l.expired(ctx, len(ops)); err != nil {
		return err
	}
	l.run(ctx, ops)
	for j, i := range places {
		o := &ops[j]
		if out[i] = o.Quota.Lent; o.Outcome.Err != nil {
			out[i] = limit.QuotaLent{Err: o.Outcome.Err}
		}
	}
	return nil
}

// quota carries out an operation of the kind OpQuota.
func (l *Limiter) quota(e *entry, op *Op, now *moment) {
	q := op.Quota
	q.Lent = limit.QuotaLent{}
	var rule *store.Rule
	switch {
	case op.inline != nil && op.inline.unlimited:
		q.Lent.Free = true
		return
	case op.inline != nil:
		rule = &op.inline.Rule
	case e == nil:
		l.unknown(op)
		return
	default:
		r := e.Rule(op.Key)
		if r.Unlimited || r.Blocked {
			q.Lent.Free = r.Unlimited || e.Shadow
			return
		}
		rule = e.rule(r)
	}
	k := store.Key{Hash: op.hash, Partition: op.partition, Key: op.Key}
	totals := q.Totals
	totals.Checks = totals.Spent // each request takes a unit
	call := store.Borrow{ID: q.ID, Totals: totals, Known: q.Known, Quota: q.Ask, Caller: op.Caller}
	if e != nil && e.Shadow || rule.Limits.Unlimited() {
		q.Lent.Free, q.Lent.Charged = true, !rule.Limits.Unlimited()
		call.Quota = algo.Quota{}
	} else if e != nil && e.Divisible() != nil {
		call.Quota = algo.Quota{} // the policy has changed since the bucket was assigned
	}
	if rule.Strict {
		call.Boot = now.bootTime()
	}
	lent, err := l.store.Lend(k, rule, now.Instant, call)
	if err != nil {
		l.failed(e, op, err)
		return
	}
	l.loans.spent.Add(uint64(lent.Charged))
	l.countSpent(e, &op.subject, rule, op.Key, &lent)
	q.Lent.Granted, q.Lent.Rate, q.Lent.Spent = lent.Granted, lent.Rate, lent.Spent
	if call.Quota.Term > 0 && lent.Granted > 0 {
		l.loans.granted.Add(1)
	}
	op.Outcome.ticket = lent.Ticket
}

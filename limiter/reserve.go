package limiter

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"unicode/utf8"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// This file has the operations on costs that are known late: Charge, Reserve, Extend, Commit, Cancel, and their forms
// for several targets. The path of one call:
//
//  1. reserveOp, extendOp or commitOp turns the request into an Op, and its Amount into units (cost, estimate). Charge
//     and Cancel do so themselves.
//  2. single, decided or each plans the Op and has it carried out (batch.go).
//  3. On the holder, admit (decide.go) decides Charge, Reserve and Extend; settle carries out Commit and Cancel.
//  4. committed answers a Commit, and has learn note its units for later estimates.
//
// ReserveAll is an atomic check (atomic.go) whose reservations, all under one id, the caller settles.
//
// Prices and estimates are those of the node that the caller has asked: the holder gets units only.

// Charge implements Service.
func (l *Limiter) Charge(ctx context.Context, c limit.Charge) (limit.Decision, error) {
	cost, bad := l.cost(&c.Target, c.Amount)
	if bad == nil && cost == 0 {
		bad = invalid(costField(c.Amount), "comes to 0 units: there is nothing to charge")
	}
	if bad == nil && cost < 0 {
		bad = invalid("cost", "is negative: to give units back, send a refund")
	}
	if bad != nil {
		return limit.Decision{}, bad
	}
	check := limit.Check{Target: c.Target, Cost: cost, Always: true, Spent: true, RequestID: c.RequestID}
	d, err := l.decided(ctx, NewOp(OpCheck, check, Extra{}), nil)
	if d.FailedOpen || d.FailedClosed {
		return limit.Decision{}, unavailable(
			"the node that decides for this key cannot be reached, or has no memory left for it; whether the cost was charged is not known: charge again, under the same request_id")
	}
	return d, err
}

// Reserve implements Service.
func (l *Limiter) Reserve(ctx context.Context, r limit.Reserve) (limit.Decision, error) {
	op, bad := l.reserveOp(&r)
	op.Reservation = newReservationID()
	return l.decided(ctx, op, bad)
}

func (l *Limiter) reserveOp(r *limit.Reserve) (*Op, *limit.Error) {
	bad := validClass(r.Class)
	var cost int64
	if bad == nil {
		cost, bad = l.cost(&r.Target, r.Amount)
	}
	if r.Estimate {
		cost = l.estimate(&r.Target, r.Class, cost)
	}
	if bad == nil && cost == 0 && r.Usage != nil {
		bad = invalid("usage", "comes to 0 units: there is nothing to reserve")
	}
	return NewOp(OpReserve, limit.Check{Target: r.Target, Cost: cost, RequestID: r.RequestID},
		Extra{TTL: r.TTL, Release: r.Release}), bad
}

// newReservationID draws an id that cannot be guessed, because a caller that knows the id can end the reservation.
func newReservationID() (id ReservationID) {
	_, _ = rand.Read(id[:]) // never fails
	return id.Whole()
}

func parseReservation(s string) (ReservationID, *limit.Error) {
	var id ReservationID
	n, err := hex.Decode(id[:], []byte(s[:min(len(s), 2*len(id))]))
	if err != nil || n != len(id) || len(s) != 2*n || id == (ReservationID{}) || id != id.Whole() {
		return id, invalid("reservation_id",
			"is not one that reserve gave: 24 hexadecimal digits, not all of them 0, and 8 zeros")
	}
	return id, nil
}

// ReserveAll implements Service. It is an atomic check. If all reservations are admitted, the caller settles them;
// otherwise ReserveAll cancels them.
func (l *Limiter) ReserveAll(ctx context.Context, rs []limit.Reserve) (limit.AllDecision, error) {
	if err := limit.ValidEach("reserves", len(rs)); err != nil {
		return limit.AllDecision{}, err
	}
	all, bad := l.gather("reserves", len(rs), func(i int) (*Op, *limit.Error) {
		op, err := l.reserveOp(&rs[i])
		if rs[i].RequestID != "" {
			err = invalid("request_id", "cannot be given in a reservation of several targets, which is not remembered")
		}
		return op, err
	})
	if bad != nil {
		return limit.AllDecision{}, bad
	}
	all.reserve(newReservationID())
	if err := l.expired(ctx, len(all.ops)); err != nil {
		return limit.AllDecision{}, err
	}
	l.run(ctx, all.ops...)
	err := all.err()
	allowed := err == nil && all.allowed()
	if !allowed {
		l.settleAll(ctx, all.ops, false)
	}
	if err != nil {
		return limit.AllDecision{}, err
	}
	return all.decision(allowed), nil
}

// Extend implements Service.
func (l *Limiter) Extend(ctx context.Context, e limit.Extend) (limit.Decision, error) {
	op, bad := l.extendOp(&e)
	return l.decided(ctx, op, bad)
}

func (l *Limiter) extendOp(e *limit.Extend) (*Op, *limit.Error) {
	id, bad := parseReservation(e.ReservationID)
	var cost int64
	if bad == nil {
		cost, bad = l.cost(&e.Target, e.Amount)
	}
	if bad == nil && cost == 0 && e.TTL == 0 {
		bad = invalid(costField(e.Amount), "is 0 and no ttl is given: say how many units more, for how long, or both")
	}
	return NewOp(OpExtend, limit.Check{Target: e.Target, Cost: cost, RequestID: e.RequestID},
		Extra{Reservation: id, TTL: e.TTL}), bad
}

// ExtendEach implements Service.
func (l *Limiter) ExtendEach(ctx context.Context, es []limit.Extend) ([]limit.Result, error) {
	if err := limit.ValidEach("extends", len(es)); err != nil {
		return nil, err
	}
	results := make([]limit.Result, len(es))
	err := l.each(ctx, len(es), func(i int) (*Op, *limit.Error) { return l.extendOp(&es[i]) },
		func(i int, op *Op, err error) {
			results[i] = limit.Result{Decision: *op.Decision, Err: err}
		})
	return results, err
}

// each carries out n independent operations. opOf returns the i-th operation, and an error if it is not valid; each
// calls done with every operation and its error.
func (l *Limiter) each(ctx context.Context, n int,
	opOf func(int) (*Op, *limit.Error), done func(int, *Op, error)) error {
	if err := l.expired(ctx, n); err != nil {
		return err
	}
	ops := make([]*Op, n)
	for i := range ops {
		op, bad := opOf(i)
		op.Outcome.Err, ops[i] = bad, op
	}
	l.planAll(ops)
	l.run(ctx, ops...)
	for i, op := range ops {
		done(i, op, op.err())
	}
	return nil
}

// Commit implements Service.
func (l *Limiter) Commit(ctx context.Context, c limit.Commit) (limit.Settled, error) {
	op, bad := l.commitOp(&c)
	if err := l.single(ctx, op, bad); err != nil {
		return limit.Settled{}, err
	}
	return l.committed(&c, op), nil
}

// CommitEach implements Service.
func (l *Limiter) CommitEach(ctx context.Context, cs []limit.Commit) ([]limit.SettledResult, error) {
	if err := limit.ValidEach("commits", len(cs)); err != nil {
		return nil, err
	}
	results := make([]limit.SettledResult, len(cs))
	err := l.each(ctx, len(cs), func(i int) (*Op, *limit.Error) { return l.commitOp(&cs[i]) },
		func(i int, op *Op, err error) {
			if results[i].Err = err; err == nil {
				results[i].Settled = l.committed(&cs[i], op)
			}
		})
	return results, err
}

func (l *Limiter) commitOp(c *limit.Commit) (*Op, *limit.Error) {
	id, bad := parseReservation(c.ReservationID)
	if bad == nil {
		bad = validClass(c.Class)
	}
	var cost int64
	if bad == nil {
		cost, bad = l.cost(&c.Target, c.Amount)
	}
	return NewOp(OpSettle, limit.Check{Target: c.Target, Cost: cost, Bounded: c.Bounded},
		Extra{Reservation: id, Exact: c.Exact}), bad
}

// committed returns the answer to a Commit that was carried out, and learns from its cost.
func (l *Limiter) committed(c *limit.Commit, op *Op) limit.Settled {
	if op.Cost > 0 { // a cost of 0 means that the work did not take place
		l.learn(&c.Target, c.Class, op.Cost)
	}
	return limit.Settled{Refunded: op.Reply.Refunded, Excess: op.Reply.Excess, Over: op.Reply.Over}
}

// Cancel implements Service.
func (l *Limiter) Cancel(ctx context.Context, t limit.Target, reservationID string) (int64, error) {
	id, bad := parseReservation(reservationID)
	op := NewOp(OpSettle, limit.Check{Target: t}, Extra{Reservation: id})
	err := l.single(ctx, op, bad)
	return op.Reply.Refunded, err
}

// settle ends a reservation in this node's own store.
func (l *Limiter) settle(op *Op, k store.Key, now *moment) {
	how := store.Settlement{
		ID: op.Reservation, Keep: op.Cost, Exact: op.Exact, Bounded: op.Bounded, Whole: !op.recalled, Caller: op.Caller,
		Boot: op.rule.boot(now),
	}
	got, err := l.store.Settle(k, &op.rule.Rule, now.Instant, how)
	switch {
	case err != nil:
		l.setError(op, err)
	case !got.Known:
		op.Outcome.Err = storeError(store.ErrNotPending)
	case got.OnLoan > 0:
		op.Outcome.onLoan = true
	default:
		op.Reply.Refunded, op.Reply.Excess, op.Reply.Over = got.Returned, got.Excess, got.Over
		op.Outcome.ticket, op.Outcome.until = got.Ticket, got.Until
	}
}

// cost returns an Amount in units. It converts usage by the policy's prices.
func (l *Limiter) cost(t *limit.Target, a limit.Amount) (int64, *limit.Error) {
	switch {
	case a.Usage == nil:
		return a.Cost, nil
	case a.Cost != 0:
		return 0, invalid("usage", "is given beside cost: send one of them")
	case t.Policy == "":
		return 0, invalid("usage", "is for policies with prices: of a limit sent along, say the cost")
	}
	e := l.table.Load().by[t.Policy]
	if e == nil {
		return 0, limit.NewError(limit.NotFound, "policy",
			"there is no policy of this name on this node, and so no prices for the usage")
	}
	return e.Prices.Cost(a.Usage)
}

// costField returns the name of the request's field that gives the Amount.
func costField(a limit.Amount) string {
	if a.Usage != nil {
		return "usage"
	}
	return "cost"
}

func validClass(class string) *limit.Error {
	switch {
	case len(class) > limit.MaxClass:
		return limit.NewError(limit.TooLarge, "class", "is longer than 128 bytes")
	case !utf8.ValidString(class):
		return invalid("class", "is not valid UTF-8")
	}
	return nil
}

// estimate returns how many units to reserve for work whose caller gives no cost: what this node has learned from
// commits, or the policy's estimate, at least 1 and at most the largest of the key's limits. If the policy has no
// estimate, it returns otherwise.
func (l *Limiter) estimate(t *limit.Target, class string, otherwise int64) int64 {
	e := l.table.Load().by[t.Policy]
	if t.Policy == "" || e == nil || e.Estimate == 0 {
		return otherwise
	}
	units := e.Estimate
	if e.EstimateAuto {
		if learned, ok := l.estimates.Estimate(t.Policy, class); ok {
			units = learned
		}
	}
	if r := e.Rule(t.Key); len(r.Limits) > 0 {
		units = min(units, r.Limits.Largest())
	}
	return max(units, 1)
}

// learn notes the cost of work, for later estimates.
func (l *Limiter) learn(t *limit.Target, class string, cost int64) {
	if e := l.table.Load().by[t.Policy]; t.Policy != "" && e != nil && e.EstimateAuto {
		l.estimates.Add(t.Policy, class, t.Caller, cost)
	}
}

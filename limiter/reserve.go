package limiter

import (
	"context"
	"errors"
	"math/rand/v2"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// Reserve implements Service.
func (l *Limiter) Reserve(ctx context.Context, r limit.Reserve) (limit.Decision, error) {
	op := Op{Kind: OpReserve, Check: limit.Check{Target: r.Target, Cost: r.Cost, RequestID: r.RequestID}, TTL: r.TTL}
	if err := l.prepare(&op); err != nil {
		return limit.Decision{}, err
	}
	op.Reservation = l.reservationID(&op)
	err := l.carry(ctx, &op)
	return op.Outcome.Decision, err
}

// reservationID chooses the id of a reservation: hard to guess, and the same again for a request that is repeated.
func (l *Limiter) reservationID(op *Op) uint64 {
	if op.RequestID == "" {
		return rand.Uint64() | 1
	}
	return l.cfg.IDKey.Scope("reservation").Scope(op.state().scope).Scope(op.Key).Hash(op.RequestID) | 1
}

// Commit implements Service.
func (l *Limiter) Commit(ctx context.Context, t limit.Target, reservationID string, cost int64) (int64, error) {
	id, ok := parseID(reservationID)
	if !ok {
		return 0, limit.NewError(limit.Invalid, "reservation_id", "is not one that reserve gave: 16 hexadecimal digits, not all of them 0")
	}
	op := Op{Kind: OpSettle, Check: limit.Check{Target: t, Cost: cost}, Reservation: id}
	err := l.one(ctx, &op)
	return op.Outcome.Refunded, err
}

// Cancel implements Service.
func (l *Limiter) Cancel(ctx context.Context, t limit.Target, reservationID string) (int64, error) {
	return l.Commit(ctx, t, reservationID, 0)
}

// settle ends a reservation on this node's own state.
func (l *Limiter) settle(e *entry, rule *store.Rule, k store.Key, op *Op, now algo.Instant) {
	refunded, known, err := l.store.Settle(k, rule, now, op.Reservation, op.Cost)
	switch {
	case errors.Is(err, store.ErrReserved):
		op.Outcome.Err = limit.NewError(limit.Invalid, "cost", "is above what was reserved, and nothing was changed: commit at most that, and check what is beyond")
	case err != nil:
		l.failed(e, op, err)
	case !known:
		op.Outcome.Err = notPending()
	default:
		op.Outcome.Refunded = refunded
	}
}

func notPending() *limit.Error {
	return limit.NewError(limit.NotFound, "reservation_id", "is not pending here: it was committed or cancelled before, or its ttl has passed and all that it charged stays charged")
}

package limiter

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"

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
	op.Reservation = newReservationID()
	err := l.carry(ctx, &op)
	return op.Outcome.Decision, err
}

// newReservationID draws an id that cannot be guessed: who knows it can end the reservation.
func newReservationID() (id ReservationID) {
	_, _ = rand.Read(id[:]) // never fails
	return id
}

func parseReservation(s string) (id ReservationID, ok bool) {
	n, err := hex.Decode(id[:], []byte(s[:min(len(s), 2*len(id))]))
	return id, err == nil && n == len(id) && len(s) == 2*n && id != (ReservationID{})
}

// Commit implements Service.
func (l *Limiter) Commit(ctx context.Context, t limit.Target, reservationID string, cost int64) (int64, error) {
	id, ok := parseReservation(reservationID)
	if !ok {
		return 0, limit.NewError(limit.Invalid, "reservation_id", "is not one that reserve gave: 32 hexadecimal digits, not all of them 0")
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
	return limit.NewError(limit.NotFound, "reservation_id", "is not pending here: it was ended in another way before, or its ttl has passed and all that it charged stays charged")
}

package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/weirlimit/weir/limit"
)

// Reservation is a number of units that are charged for work whose cost is known only afterwards, until Commit or
// Cancel. One that hears neither within its ttl stays charged in full. Its methods are safe for concurrent use; those
// of a nil *Reservation do nothing. The first Commit or Cancel that succeeds counts, and those after it do nothing, so
// that Cancel can be deferred.
type Reservation struct {
	c      *Client
	target target
	id     string        // empty: nothing is held, and there is nothing to settle
	units  int64         // that are charged
	safe   time.Duration // of Client.now: before, the reservation has surely not run out

	mu      sync.Mutex // held while settling
	settled bool
	unheard bool // an attempt was not answered, and may have settled it
}

// Commit ends the reservation: cost units, at most what was reserved, stay charged and the rest is given back. It takes
// at most the client's timeout. It fails with ErrNotFound when the reservation has run out and with ErrUnavailable when
// nobody could be asked; in both cases all of it stays charged, in the second until it is called again in time.
func (r *Reservation) Commit(cost int64) error {
	switch {
	case r == nil || r.id == "":
		return nil
	case cost < 0 || cost > r.units:
		return &Error{ErrInvalid, "cost", fmt.Sprintf("must be 0 to the %d units that were reserved, not %d", r.units, cost)}
	}
	return r.settle(cost)
}

// Cancel ends the reservation and gives back all of it. It takes as long, and fails for the same reasons, as Commit.
func (r *Reservation) Cancel() error {
	if r == nil || r.id == "" {
		return nil
	}
	return r.settle(0)
}

func (r *Reservation) settle(cost int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.settled {
		return nil
	}
	if err := r.c.begin(r.c.ctx); err != nil {
		return ErrClosed
	}
	defer r.c.running.Done()
	defer r.c.memory.forget(&r.target)
	_, err := r.c.call(r.c.ctx, true, func(ctx context.Context) error {
		err := r.c.backend.settle(ctx, r.target, r.id, cost)
		r.unheard = r.unheard || errors.Is(err, ErrUnavailable)
		return err
	})
	// A reservation that is gone before its time was settled by the attempt whose answer did not come.
	r.settled = err == nil || errors.Is(err, ErrNotFound) && r.unheard && r.c.now() < r.safe
	if r.settled {
		return nil
	}
	return err
}

// newReservation is what reserve at asked was given. The owner reckons its life from a later moment than this one does.
func newReservation(c *Client, t target, got held, ttl, asked time.Duration) *Reservation {
	if ttl == 0 {
		ttl = limit.DefaultReservation
	}
	return &Reservation{c: c, target: t, id: got.id, units: got.Granted, safe: asked + limit.Shortened(ttl)}
}

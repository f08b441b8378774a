package client

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/weirlimit/weir/limit"
)

// Lease is a number of units of a concurrency policy, held until Release. It renews itself. Its methods are safe for
// concurrent use; those of a nil *Lease do nothing.
type Lease struct {
	c      *Client
	target limit.Target
	id     string        // empty: the lease holds nothing
	ttl    time.Duration // as asked for; 0: the policy's window

	lost    chan struct{}      // closed when the lease may have ended
	stop    context.CancelFunc // ends the renewals
	stopped chan struct{}      // closed when they have ended

	mu       sync.Mutex // held while releasing
	released bool
}

// newLease returns a Lease and starts its renewal. asked is when the caller asked for it. The caller must have called
// begin.
func newLease(c *Client, t limit.Target, got *Decision, ttl time.Duration, asked time.Time) *Lease {
	l := &Lease{c: c, target: t, id: got.LeaseID, ttl: ttl, lost: make(chan struct{})}
	if l.id == "" {
		return l
	}
	// The decision does not say how long the lease lives. Its windows and ttl are upper bounds, and the life is the
	// smallest of them or longer. The first renewal returns the true life.
	bounds := []time.Duration{ttl, got.Window}
	for _, s := range got.Limits {
		bounds = append(bounds, s.Window)
	}
	lives := time.Second
	if bounds = slices.DeleteFunc(bounds, func(d time.Duration) bool { return d <= 0 }); len(bounds) > 0 {
		lives = slices.Min(bounds)
	}
	ctx, stop := context.WithCancel(c.ctx)
	l.stop, l.stopped = stop, make(chan struct{})
	c.running.Go(func() { l.renew(ctx, lives, asked.Add(lives)) })
	return l
}

// renew renews a lease that lives until expiry at least, each time when a third of its life has passed. It repeats a
// renewal that no node has answered after a ninth of its life.
//
// expiry counts from the moment before a renewal was sent, and the owner counts from a later one. So the lease is given
// up here before it ends at the owner, as far as the two clocks run at the same rate.
func (l *Lease) renew(ctx context.Context, lives time.Duration, expiry time.Time) {
	defer close(l.stopped)
	defer l.stop()
	pause := lives / 3
	for {
		if l.c.sleep(ctx, pause) != nil {
			if l.c.ctx.Err() != nil {
				close(l.lost) // no renewal follows
			}
			return
		}
		sent := time.Now()
		if !sent.Before(expiry) {
			close(l.lost)
			return
		}
		var left time.Duration
		_, err := l.c.attempt(ctx, true, func(ctx context.Context) (err error) {
			ctx, cancel := context.WithDeadline(ctx, expiry)
			defer cancel()
			left, err = l.c.svc.Renew(ctx, l.target, l.id, l.ttl)
			return err
		})
		switch {
		case err == nil && left > 0:
			lives, expiry = left, sent.Add(left)
			pause = lives / 3
		case ctx.Err() != nil:
			pause = 0 // the lease was released or the client closed; sleep tells which
		case errors.Is(err, ErrUnavailable):
			pause = min(lives/9, time.Until(expiry))
		default:
			close(l.lost)
			return
		}
	}
}

// Lost returns a channel that is closed when the lease may have ended without a Release: its owner says that it has
// ended, it could not be renewed in time, or the Client was closed. The work should then stop. The channel is nil for a
// nil *Lease.
func (l *Lease) Lost() <-chan struct{} {
	if l == nil {
		return nil
	}
	return l.lost
}

// Release gives the units back and ends the renewals. It takes at most the client's timeout. If it fails, with
// ErrUnavailable or ErrClosed, the units come back when the lease's time to live has passed; the caller may call
// Release again. A second Release, or one of a lost lease, is no error.
func (l *Lease) Release() error {
	if l == nil || l.id == "" {
		return nil
	}
	l.stop()
	<-l.stopped
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released {
		return nil
	}
	err := l.c.carryOut(l.c.ctx, true, func(ctx context.Context) error {
		_, err := l.c.svc.Release(ctx, l.target, l.id)
		return err
	})
	if err == nil || errors.Is(err, ErrNotFound) {
		l.released = true
		return nil
	}
	return err
}

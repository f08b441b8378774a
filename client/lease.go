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
	id     string        // empty: nothing is held, and there is nothing to renew or release
	ttl    time.Duration // as asked for; 0: the policy's window

	lost    chan struct{}      // closed when the lease can no longer be counted on
	stop    context.CancelFunc // ends the renewals
	stopped chan struct{}      // closed when they have ended

	mu       sync.Mutex // held while releasing
	released bool
}

// newLease starts the renewal of a lease that was asked for at asked. The caller is counted in.
func newLease(c *Client, t limit.Target, got *Decision, ttl time.Duration, asked time.Time) *Lease {
	l := &Lease{c: c, target: t, id: got.LeaseID, ttl: ttl, lost: make(chan struct{})}
	if l.id == "" {
		return l
	}
	// The decision does not say how long the lease lives, only what bounds that from above: the window, or one of them.
	// The smallest is at most the truth, and the first renewal brings the truth.
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

// renew renews a lease that is known to live until expiry, each time a third of its life has passed. An attempt that
// no node answers is repeated after a ninth.
//
// expiry is reckoned from the moment a renewal was sent. The owner reckons from a later one, so the lease is given up
// here before it ends there, never after, as far as the two clocks run at the same rate.
func (l *Lease) renew(ctx context.Context, lives time.Duration, expiry time.Time) {
	defer close(l.stopped)
	defer l.stop()
	pause := lives / 3
	for {
		if l.c.sleep(ctx, pause) != nil {
			if l.c.ctx.Err() != nil {
				close(l.lost) // it is renewed no more
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
			pause = 0 // released or closed; the sleep tells which
		case errors.Is(err, ErrUnavailable):
			pause = min(lives/9, time.Until(expiry))
		default:
			close(l.lost)
			return
		}
	}
}

// Lost returns a channel that is closed when the lease can no longer be counted on although it was not released: its
// owner says that it has ended, it could not be renewed in time, or the Client was closed. The work it was taken for
// should then stop. It is nil for a nil *Lease.
func (l *Lease) Lost() <-chan struct{} {
	if l == nil {
		return nil
	}
	return l.lost
}

// Release gives the units back and ends the renewals. It takes at most the client's timeout. If it fails, with
// ErrUnavailable or ErrClosed, the units come back when the lease's time to live has passed; calling it again tries
// again. Releasing what is released or lost is no error.
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

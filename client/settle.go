package client

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/limit"
)

const (
	// maxSettling and maxSettlingBytes bound the reservations that are settled in the background.
	maxSettling, maxSettlingBytes = 4096, 4 << 20
	// settlingBytes is about what one takes besides its texts and its goroutine.
	settlingBytes = 512
	// minSettlePause is the first pause before an attempt; each further one is twice as long, up to maxSettlePause.
	minSettlePause, maxSettlePause = 100 * time.Millisecond, time.Second
	// settleTimeout bounds how long Close waits for what is being settled.
	settleTimeout = time.Second
)

// settling are the reservations whose Commit or Cancel no node has answered. Each has a goroutine, which Close waits for, and is
// settled by the same message again and again until a node answers or its ttl has passed: nodes answer a repeated commit as the first.
type settling struct {
	mu         sync.Mutex
	now, bytes int
	closing    chan struct{} // closed when the Client is
	unsettled  atomic.Uint64 // given up, ever
}

// settleLater settles a reservation in the background, and reports false where too many are. The caller is counted in.
func (c *Client) settleLater(r *Reservation, ask limit.Commit) bool {
	size := settlingBytes + len(ask.Policy) + len(ask.Namespace) + len(ask.Key) + len(ask.ReservationID) + len(ask.Class)
	for class := range ask.Usage {
		size += len(class) + 16
	}
	s := &c.settling
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now >= maxSettling || s.bytes+size > maxSettlingBytes {
		return false
	}
	s.now, s.bytes = s.now+1, s.bytes+size
	target, until := r.target, r.safe
	c.running.Go(func() {
		if !c.settleUntil(&target, ask, until) {
			s.unsettled.Add(1)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.now, s.bytes = s.now-1, s.bytes-size
	})
	return true
}

// settleUntil repeats a commit until it is answered, and reports false if it never was, or with another error than that the reservation
// is settled.
func (c *Client) settleUntil(t *limit.Target, ask limit.Commit, until time.Duration) bool {
	closing := c.settling.closing
	for pause := minSettlePause; ; pause = min(2*pause, maxSettlePause) {
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-closing:
			pause, closing = minSettlePause/2, nil // Close does not wait for long
		case <-c.ctx.Done():
			return false
		}
		if c.now() >= until {
			return false
		}
		_, err := c.call(c.ctx, true, func(ctx context.Context) error {
			_, err := c.svc.Commit(ctx, ask)
			return err
		})
		if err == nil || errors.Is(err, ErrNotFound) { // one that is gone before its time was settled by an attempt that was not answered
			c.memory.forget(t)
			return true
		}
		if !errors.Is(err, ErrUnavailable) {
			return false
		}
	}
}

// drain has what is being settled tried once more at once, and waits for it, but not for long.
func (s *settling) drain(now func() time.Duration) {
	close(s.closing)
	for end := now() + settleTimeout; s.count() > 0 && now() < end; {
		time.Sleep(time.Millisecond)
	}
}

func (s *settling) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

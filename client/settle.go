package client

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/limit"
)

const (
	// maxSettling bounds the reservations that are settled in the background, each of some 2 KiB at most and a goroutine.
	maxSettling = 4096
	// minSettlePause is the first pause before an attempt; each further one is twice as long, up to maxSettlePause.
	minSettlePause, maxSettlePause = 100 * time.Millisecond, time.Second
	// settleTimeout bounds how long Close waits for what is being settled.
	settleTimeout = time.Second
)

// settling are the reservations whose Commit or Cancel no node has answered. Each has a goroutine, which Close waits for, and is
// settled by the same message again and again until a node answers or its ttl has passed: nodes answer a repeated commit as the first.
type settling struct {
	now       atomic.Int64
	closing   chan struct{} // closed when the Client is
	unsettled atomic.Uint64 // given up, ever
}

// settleLater settles a reservation in the background, and reports false where too many are. The caller is counted in.
func (c *Client) settleLater(r *Reservation, ask limit.Commit) bool {
	r.mu.Lock()
	until := r.safe
	r.mu.Unlock()
	s := &c.settling
	if s.now.Add(1) > maxSettling {
		s.now.Add(-1)
		return false
	}
	c.running.Go(func() {
		defer s.now.Add(-1)
		if !c.settleUntil(ask, until) {
			s.unsettled.Add(1)
		}
	})
	return true
}

// settleUntil repeats a commit until it is answered, and reports false if it never was, or with another error than that the reservation
// is settled.
func (c *Client) settleUntil(ask limit.Commit, until time.Duration) bool {
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
		_, err := c.attempt(c.ctx, true, func(ctx context.Context) error {
			_, err := c.svc.Commit(ctx, ask)
			return err
		})
		// A reservation that is gone before its time was settled by an attempt that was not answered, or was forgotten in a crash of its
		// owner, as the policy's durability allows.
		if err == nil || errors.Is(err, ErrNotFound) {
			c.memory.forget(&ask.Target)
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
	for end := now() + settleTimeout; s.now.Load() > 0 && now() < end; {
		time.Sleep(time.Millisecond)
	}
}

package client

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/limit"
)

// This file ends the reservations whose Commit or Cancel no node has answered. settleLater starts a goroutine for each.
// settleUntil repeats the same message, with pauses, until a node answers or the ttl has passed: nodes answer a
// repeated commit as the first one. Close waits for the goroutines (drain).

const (
	// maxSettling bounds the reservations that are settled in the background. Each takes up to 2 KiB and a goroutine.
	maxSettling = 4096
	// minSettlePause is the first pause before an attempt; each further one is twice as long, up to maxSettlePause.
	minSettlePause, maxSettlePause = 100 * time.Millisecond, time.Second
	// settleTimeout bounds how long Close waits for reservations that are being settled.
	settleTimeout = time.Second
)

// settling counts the reservations that are settled in the background.
type settling struct {
	now       atomic.Int64  // those that are being settled
	closing   chan struct{} // closed when Close begins
	unsettled atomic.Uint64 // those that the Client has given up
}

// settleLater settles a reservation in the background. It returns false if maxSettling are being settled already. The
// caller must have called begin.
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

// settleUntil repeats a commit until a node answers, and reports whether the reservation is settled. It is not if no
// node answers before until, or if a node answers with an error other than ErrNotFound.
func (c *Client) settleUntil(ask limit.Commit, until time.Duration) bool {
	closing := c.settling.closing
	for pause := minSettlePause; ; pause = min(2*pause, maxSettlePause) {
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-closing:
			pause, closing = minSettlePause/2, nil // Close waits for settleTimeout only
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
		// If a node does not find the reservation before its ttl has passed, an attempt without an answer has settled
		// it, or its owner has lost it in a crash, as the policy's durability allows.
		if err == nil || errors.Is(err, ErrNotFound) {
			c.memory.forget(&ask.Target)
			return true
		}
		if !errors.Is(err, ErrUnavailable) {
			return false
		}
	}
}

// drain makes each goroutine try once more, soon, and waits for settleTimeout at most.
func (s *settling) drain(now func() time.Duration) {
	close(s.closing)
	for end := now() + settleTimeout; s.now.Load() > 0 && now() < end; {
		time.Sleep(time.Millisecond)
	}
}

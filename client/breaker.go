package client

import (
	"sync"
	"sync/atomic"
	"time"
)

// outcome is what a call tells about the cluster.
type outcome uint8

const (
	answered   outcome = iota // a node answered, be it with an error
	unanswered                // no node answered although there was time for it
	unknown                   // the caller gave up too early to tell
)

// breaker refuses calls for a while after several failures in a row, then lets one at a time through until one is
// answered. It is safe for concurrent use.
type breaker struct {
	threshold int           // failures in a row that open it; 0 keeps it closed for ever
	cooldown  time.Duration // from opening, or from the last failed probe, to the next probe

	trouble atomic.Bool // open, or closed with failures: otherwise calls need not take the lock

	mu       sync.Mutex
	failures int       // in a row, while closed
	open     bool      // refuses calls
	retry    time.Time // when open: the earliest moment of the next probe
	probing  bool      // a probe is in flight
}

// allow tells whether a call may be made. A caller that is told so reports to done, with the same probe.
func (b *breaker) allow() (probe, ok bool) {
	if !b.trouble.Load() {
		return false, true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.open {
		return false, true
	}
	if b.probing || time.Now().Before(b.retry) {
		return false, false
	}
	b.probing = true
	return true, true
}

// done takes in the outcome of a call that allow let through.
func (b *breaker) done(probe bool, o outcome) {
	if b.threshold == 0 || o == answered && !b.trouble.Load() {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	defer func() { b.trouble.Store(b.open || b.failures > 0) }()
	if probe {
		b.probing = false
	}
	switch o {
	case answered:
		// Even from a call that began before the breaker opened: a node answers.
		b.failures, b.open = 0, false
	case unanswered:
		switch {
		case probe:
			b.retry = time.Now().Add(b.cooldown)
		case !b.open:
			if b.failures++; b.failures >= b.threshold {
				b.open, b.retry = true, time.Now().Add(b.cooldown)
			}
		}
	}
}

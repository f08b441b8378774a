package client

import (
	"math"
	"sync/atomic"
	"time"
)

// outcome is what the end of a call says about the cluster.
type outcome uint8

const (
	answered   outcome = iota // a node answered, possibly with an error
	unanswered                // no node answered although there was time for it
	unknown                   // the caller gave up too early to say
)

// breaker refuses calls for a while after several failures in a row. Then it lets one call at a time through, until a
// node has answered one. It is safe for concurrent use. Instants are those of one clock that never runs backwards.
type breaker struct {
	threshold int64         // failures in a row that open it; 0: it never opens
	cooldown  time.Duration // from opening, or from the last failed probe, to the next probe

	failures atomic.Int64 // in a row
	retry    atomic.Int64 // the earliest instant of the next probe, or probing; 0: it is closed
}

const probing = math.MaxInt64 // the value of retry while a probe is in flight

// allow reports whether a call may be made. If so, the caller must call done with the same probe.
func (b *breaker) allow(now time.Duration) (probe, ok bool) {
	retry := b.retry.Load()
	if retry == 0 {
		return false, true
	}
	probe = int64(now) >= retry && b.retry.CompareAndSwap(retry, probing)
	return probe, probe
}

// done takes in the outcome of a call that allow has let through.
func (b *breaker) done(now time.Duration, probe bool, o outcome) {
	switch {
	case o == answered && b.failures.Load() == 0:
	case o == answered:
		// The call may have begun before the breaker opened: a node answers all the same.
		b.failures.Store(0)
		b.retry.Store(0)
	case probe && o == unknown:
		b.retry.CompareAndSwap(probing, int64(now))
	case probe:
		b.retry.CompareAndSwap(probing, int64(now+b.cooldown))
	case o == unanswered && b.threshold > 0 && b.failures.Add(1) >= b.threshold:
		b.retry.CompareAndSwap(0, int64(now+b.cooldown))
	}
}

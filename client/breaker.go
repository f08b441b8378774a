package client

import (
	"math"
	"sync/atomic"
	"time"
)

// This file keeps a client from waiting for nodes that do not answer. grant (decide.go) calls allow before a call, and
// done after it.
//
//	closed   all calls are made. After threshold unanswered calls in a row, done opens the breaker
//	open     no calls are made, except one probe after each cooldown. The answer to any call closes the breaker

// outcome is what the end of a call says about the cluster, or about one node (member.heard).
type outcome uint8

const (
	answered   outcome = iota // a node answered, possibly with an error
	unanswered                // no node answered although there was time for it
	unknown                   // the caller gave up too early to say
)

// breaker is the circuit breaker of a client. It is safe for concurrent use. Instants are those of one clock that never
// runs backwards.
type breaker struct {
	threshold int64         // unanswered calls in a row that open the breaker; 0: it never opens
	cooldown  time.Duration // from opening, or from the last unanswered probe, to the next probe

	failures atomic.Int64 // unanswered calls since the last answered one
	retry    atomic.Int64 // the earliest instant of the next probe, or probing; 0: the breaker is closed
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
		// This also closes the breaker if the call is no probe: it began before the breaker opened.
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

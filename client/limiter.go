package client

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/limit"
)

// How a check is decided (Allow, AllowN; Check takes the same steps for many, Wait repeats them):
//
//	lent           admits it from a loan that the client has (loans.go)
//	allowPrepared  asks the Service of this process, in a client that New made, by a prepared handle
//	decide         repeats a refusal that the memory has (memory.go), or waits a moment for a loan that is on its way (awaitLoan)
//	grant          asks the Service, unless the circuit breaker is open; attempt gives it a time and a second try (decide.go, breaker.go)
//	sendAll        chooses the node: the owner of the key, if the ring is known (topology.go), or else one that is well (nodes.go)
//	send           puts it on the stream to that node, and await waits for the answer (member.go, remote.go)
//	fallback       is the fail policy's answer, when no node has answered in time
//
// A request is the checks of one call that go to one node. There is one connection with one stream to each node that the client has asked.

// Limiter is a handle to one limit: a policy, or an inline limit. It holds no counters, is cheap to make, and is safe for
// concurrent use. One that is kept for many calls remembers its policy, which saves a client that decides in this process half
// of the time of a check. Client.Policy and Client.Inline make one.
type Limiter struct {
	c        *Client
	target   limit.Target                   // without a key
	prepared atomic.Pointer[limit.Prepared] // the latest prepared handle; only of New
}

// Allow is short for AllowN(ctx, key, 1).
func (l *Limiter) Allow(ctx context.Context, key string) (d Decision, err error) {
	err = l.decide(ctx, key, 1, &d)
	return d, err
}

// AllowN asks whether n units for key may go ahead now, all or none, and charges them if so. An n of 0 is a Peek. An n
// above the limit is refused with a RetryAfter of Never. Of a concurrency policy only a peek can be asked; see Acquire.
func (l *Limiter) AllowN(ctx context.Context, key string, n int64) (d Decision, err error) {
	err = l.decide(ctx, key, n, &d)
	return d, err
}

// decide is AllowN with the answer in *d, which is zero before: a Decision is large to copy.
func (l *Limiter) decide(ctx context.Context, key string, n int64, d *Decision) (err error) {
	open := !l.c.closed.Load() && ctx.Err() == nil
	if !(open && (l.c.lent(&l.target, key, n, d) || l.allowPrepared(ctx, key, n, d))) {
		err = l.allow(ctx, key, n, d)
	}
	l.c.observeOne(&l.target, key, n, d, err)
	return err
}

// allowPrepared answers the plainest check: one of a policy and a key that the Service of this process has a prepared handle for and knows.
// It reports false, and nothing is charged, where there is more to it or something to say about the call.
func (l *Limiter) allowPrepared(ctx context.Context, key string, n int64, d *Decision) bool {
	h := l.handle()
	if h == nil {
		return false
	}
	b, ok := h.Check(ctx, key, n)
	if !ok {
		return false
	}
	d.Policy, d.Allowed, d.Granted, d.Shadow = nameOf(&l.target), b.Allowed, b.Granted, b.Shadow
	d.Limit, d.Window, d.Remaining, d.NearLimit = b.Limit, b.Window, b.Remaining, b.NearLimit
	d.RetryAfter, d.ResetAfter, d.Delay = b.RetryAfter, b.ResetAfter, b.Delay
	h.Count(b, n)
	return true
}

// handle returns the latest prepared handle, or nil.
func (l *Limiter) handle() limit.Prepared {
	if h := l.prepared.Load(); h != nil {
		return *h
	}
	return nil
}

// prepare brings the prepared handle up to date, for the next check.
func (l *Limiter) prepare() {
	if l.c.nodes != nil {
		return // they have none
	}
	target, last := l.target, l.handle()
	if next := l.c.svc.Prepare(&target, last); next != last {
		l.prepared.Store(&next)
	}
}

// allow is decide for what neither a loan nor the prepared handle answers.
func (l *Limiter) allow(ctx context.Context, key string, n int64, d *Decision) error {
	ck := l.check(key, n)
	if err := valid(ck); err != nil {
		return err
	}
	if err := l.c.begin(ctx); err != nil {
		return err
	}
	defer l.c.running.Done()
	l.prepare()
	return l.c.decideOne(ctx, ck, d)
}

// Peek tells how key stands, and whether an Allow would pass now. It charges nothing.
func (l *Limiter) Peek(ctx context.Context, key string) (Decision, error) {
	return l.AllowN(ctx, key, 0)
}

// Wait is short for WaitN(ctx, key, 1).
func (l *Limiter) Wait(ctx context.Context, key string) (Decision, error) {
	return l.WaitN(ctx, key, 1)
}

// Bounds of how long WaitN sleeps longer than RetryAfter says.
const (
	// minSleep keeps a limit of many units per second from being asked in a busy loop.
	minSleep = time.Millisecond
	// maxSpread is added at random, up to an eighth of the sleep, so that those who were refused together do not come back together.
	maxSpread = 100 * time.Millisecond
)

// WaitN blocks until n units for key are admitted, and through the Delay of a leaky_bucket, and returns the decision that
// admitted them. An n of 0 waits until 1 would be admitted. Waiters are not served in the order of their arrival, except
// by a leaky_bucket.
//
// It fails at once with ErrNever if the request can never pass, and with ErrDeadline if it would pass only after ctx's
// deadline; the decision that says so is returned along with the error. It fails with ctx's error when ctx ends. A place
// in a leaky_bucket's queue that would come after the deadline is given back; one whose Delay is cut short by ctx is left
// empty, because those behind it have been told their own moments already.
//
// When no node can be asked it goes ahead under FailOpen. Under FailClosed it keeps asking, and fails with ErrUnavailable
// once ctx leaves no time to ask again.
func (l *Limiter) WaitN(ctx context.Context, key string, n int64) (Decision, error) {
	ck := l.check(key, n)
	if err := valid(ck); err != nil {
		return Decision{}, err
	}
	if err := l.c.begin(ctx); err != nil {
		return Decision{}, err
	}
	defer l.c.running.Done()
	for {
		var d Decision
		err := l.c.decideOne(ctx, ck, &d)
		if l.c.observe(ck, &d, err); err != nil {
			return d, err
		}
		if d.Allowed {
			return d, l.waitDelay(ctx, ck, d)
		}
		after := d.RetryAfter
		if d.FailedClosed {
			after = failedRetry
		}
		if after == Never {
			return d, fmt.Errorf("%w: %s, cost %d", ErrNever, l, n)
		}
		sleep := max(after, minSleep)
		sleep += rand.N(min(sleep/8, maxSpread) + 1)
		if deadline, ok := ctx.Deadline(); ok {
			left := time.Until(deadline)
			switch {
			case left < after && d.FailedClosed:
				return d, limit.NewError(ErrUnavailable, "", "no node could be asked, and the context's deadline leaves no time to ask again")
			case left < after:
				return d, fmt.Errorf("%w: %s would pass in %v, the deadline is in %v", ErrDeadline, l, after, left)
			}
			// What is added to after is no reason to miss the deadline.
			sleep = max(min(sleep, left*9/10), after)
		}
		if err := l.c.sleep(ctx, sleep); err != nil {
			return d, err
		}
	}
}

// waitDelay waits for the moment that a leaky bucket gave a check, or gives the place back.
func (l *Limiter) waitDelay(ctx context.Context, ck *limit.Check, d Decision) error {
	if d.Delay <= 0 {
		return nil
	}
	if deadline, ok := ctx.Deadline(); ok {
		if left := time.Until(deadline); left < d.Delay {
			// If this fails the place stays empty, which admits less, not more.
			_, _ = l.c.attempt(ctx, false, func(ctx context.Context) error {
				_, err := l.c.svc.Refund(ctx, ck.Target, d.Granted, "")
				return err
			})
			l.c.memory.forget(&ck.Target)
			return fmt.Errorf("%w: the turn of %s comes in %v, the deadline is in %v", ErrDeadline, l, d.Delay, left)
		}
	}
	return l.c.sleep(ctx, d.Delay)
}

// sleep returns nil after d, or earlier with an error when ctx ends or the client is closed.
func (c *Client) sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-c.ctx.Done():
		return ErrClosed
	}
}

// Refund gives n units back, the oldest first (the newest of a leaky_bucket's queue), and returns how many that were: never
// more than key has in use. Unless WithRetry gives it a request id it is not retried, for a refund made twice would admit too
// much: after an ErrUnavailable it may or may not have been made.
func (l *Limiter) Refund(ctx context.Context, key string, n int64) (int64, error) {
	return l.RefundWithID(ctx, key, n, l.c.requestID())
}

// RefundWithID is a Refund that may be repeated: under the same requestID, of at most 128 bytes, a key's units are given back
// once, and the answer is the same again for as long as the cluster remembers it (the window, 1 to 5 minutes). It is an
// ErrInvalid when the first was of another number of units. Ids of refunds are apart from those of checks.
func (l *Limiter) RefundWithID(ctx context.Context, key string, n int64, requestID string) (int64, error) {
	ck := l.check(key, n)
	ck.RequestID = requestID
	if n < 1 {
		return 0, invalid("cost", "must be at least 1, not %d", n)
	}
	if err := valid(ck); err != nil {
		return 0, err
	}
	defer l.c.memory.forget(&ck.Target)
	var refunded int64
	err := l.c.carryOut(ctx, requestID != "", func(ctx context.Context) (err error) {
		refunded, err = l.c.svc.Refund(ctx, ck.Target, n, requestID)
		return err
	})
	return refunded, err
}

// Reset makes key's state as new.
func (l *Limiter) Reset(ctx context.Context, key string) error {
	ck := l.check(key, 0)
	if err := valid(ck); err != nil {
		return err
	}
	defer l.c.memory.forget(&ck.Target)
	return l.c.carryOut(ctx, true, func(ctx context.Context) error { return l.c.svc.Reset(ctx, ck.Target) })
}

// Acquire is short for AcquireN(ctx, key, 1, 0).
func (l *Limiter) Acquire(ctx context.Context, key string) (*Lease, Decision, error) {
	return l.AcquireN(ctx, key, 1, 0)
}

// AcquireN asks a concurrency policy for a lease of n units, n being at least 1. The lease is nil if and only if the
// decision refuses or the error is not nil. Hold it while the work runs, and Release it.
//
// ttl is how long the lease lives when it is not renewed, as when this process dies: at most the policy's window, and 0
// stands for it. A lease renews itself until it is released or the Client is closed.
//
// Under FailOpen, when no node can be asked, the Decision is FailedOpen and the lease an empty one: it is never lost, and
// releasing it does nothing.
func (l *Limiter) AcquireN(ctx context.Context, key string, n int64, ttl time.Duration) (*Lease, Decision, error) {
	ck := l.check(key, n)
	if n < 1 {
		return nil, Decision{}, invalid("cost", "must be at least 1, not %d", n)
	}
	if err := valid(ck); err != nil {
		return nil, Decision{}, err
	}
	if err := l.c.begin(ctx); err != nil {
		return nil, Decision{}, err
	}
	defer l.c.running.Done()
	ck.RequestID = l.c.requestID()
	asked := time.Now()
	got, err := l.c.grantOne(ctx, ck, func(ctx context.Context) (Decision, error) {
		return l.c.svc.Acquire(ctx, limit.Acquire{Target: ck.Target, Cost: n, TTL: ttl, RequestID: ck.RequestID})
	})
	if err != nil || !got.Allowed {
		return nil, got, err
	}
	return newLease(l.c, ck.Target, &got, ttl, asked), got, nil
}

// String describes the limit for messages.
func (l *Limiter) String() string {
	if l.target.Limit == nil {
		return "policy " + l.target.Policy
	}
	return fmt.Sprintf("inline %s limit %d", l.target.Limit.Algorithm, l.target.Limit.Limit)
}

// check is a check of a key as nodes are asked it.
func (l *Limiter) check(key string, cost int64) *limit.Check {
	ck := &limit.Check{Target: l.target, Cost: cost}
	ck.Key = key
	return ck
}

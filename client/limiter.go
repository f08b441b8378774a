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
//	lent           admits the check from a loan that the client has (loans.go)
//	allowPrepared  asks the Service of this process, in a client that New made, by a prepared handle
//	decide         repeats a refusal that memory has (memory.go), or waits a moment for a loan that a node is about to
//	               grant (awaitLoan)
//	grant          asks the Service, unless the circuit breaker is open; attempt sets the time and makes a second try
//	               (decide.go, breaker.go)
//	sendAll        chooses the node: the owner of the key, if the ring is known (topology.go), or else the node that
//	               pick returns (nodes.go)
//	send           puts the check on the stream to that node, and await waits for the answer (member.go, remote.go)
//	fallback       returns the fail policy's answer, if no node has answered in time
//
// A request is the checks of one call that go to one node. There is one connection with one stream to each node that
// the client has asked.

// Limiter is a handle to one limit: a policy, or an inline limit. Client.Policy and Client.Inline make it. It holds no
// counters, is cheap to make, and is safe for concurrent use. A Limiter that is kept for many calls remembers its
// policy, which halves the time of a check in a client that decides in this process.
type Limiter struct {
	c        *Client
	target   limit.Target                   // without a key
	prepared atomic.Pointer[limit.Prepared] // the latest prepared handle; only with New
}

// Allow is short for AllowN(ctx, key, 1).
func (l *Limiter) Allow(ctx context.Context, key string) (d Decision, err error) {
	err = l.decide(ctx, key, 1, &d)
	return d, err
}

// AllowN asks whether n units for key may go ahead now, all or none, and charges them if so. An n of 0 is a Peek. If n
// is above the limit, the Decision refuses with a RetryAfter of Never. A concurrency policy can only be peeked at; see
// Acquire.
func (l *Limiter) AllowN(ctx context.Context, key string, n int64) (d Decision, err error) {
	err = l.decide(ctx, key, n, &d)
	return d, err
}

// decide is AllowN with the answer in *d, which must be zero before the call: a Decision is large to copy.
func (l *Limiter) decide(ctx context.Context, key string, n int64, d *Decision) (err error) {
	open := !l.c.closed.Load() && ctx.Err() == nil
	if !(open && (l.c.lent(&l.target, key, n, d) || l.allowPrepared(ctx, key, n, d))) {
		err = l.allow(ctx, key, n, d)
	}
	l.c.observeOne(&l.target, key, n, d, err)
	return err
}

// allowPrepared answers the plainest check: of a policy and a key that the Service of this process knows and has a
// prepared handle for. If the check or its answer needs more than that, it returns false and charges nothing.
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

// prepare renews the prepared handle, for the next check.
func (l *Limiter) prepare() {
	if l.c.nodes != nil {
		return // nodes have no prepared handles
	}
	target, last := l.target, l.handle()
	if next := l.c.svc.Prepare(&target, last); next != last {
		l.prepared.Store(&next)
	}
}

// allow is decide for a check that neither a loan nor the prepared handle has answered.
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

// Peek returns the state of key, and whether an Allow would pass now. It charges nothing.
func (l *Limiter) Peek(ctx context.Context, key string) (Decision, error) {
	return l.AllowN(ctx, key, 0)
}

// Wait is short for WaitN(ctx, key, 1).
func (l *Limiter) Wait(ctx context.Context, key string) (Decision, error) {
	return l.WaitN(ctx, key, 1)
}

// WaitN sleeps longer than RetryAfter by these.
const (
	// minSleep keeps a limit of many units per second from being asked in a busy loop.
	minSleep = time.Millisecond
	// At random up to maxSpread is added, and up to an eighth of the sleep, so that callers that were refused together
	// do not ask again together.
	maxSpread = 100 * time.Millisecond
)

// WaitN blocks until n units for key are admitted, and through the Delay of a leaky_bucket. It returns the decision
// that admitted them. An n of 0 waits until 1 would be admitted. Waiters are not served in the order of their arrival,
// except by a leaky_bucket.
//
// WaitN fails at once with ErrNever if the request can never pass, and with ErrDeadline if it would pass only after
// ctx's deadline; it also returns the decision that says so. It fails with ctx's error when ctx ends. If a place in a
// leaky_bucket's queue would come after the deadline, WaitN gives it back. If ctx ends during the Delay, the place
// stays empty, because the callers behind it have been told their own moments already.
//
// If no node answers, WaitN goes ahead under FailOpen. Under FailClosed it keeps asking, and fails with ErrUnavailable
// when ctx leaves no time to ask again.
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
				return d, limit.NewError(ErrUnavailable, "",
					"no node could be asked, and the context's deadline leaves no time to ask again")
			case left < after:
				return d, fmt.Errorf("%w: %s would pass in %v, the deadline is in %v", ErrDeadline, l, after, left)
			}
			// The time that is added to after must not make the caller miss the deadline.
			sleep = max(min(sleep, left*9/10), after)
		}
		if err := l.c.sleep(ctx, sleep); err != nil {
			return d, err
		}
	}
}

// waitDelay waits for the moment that a leaky bucket gave a check, or gives the place back if that is after the
// deadline.
func (l *Limiter) waitDelay(ctx context.Context, ck *limit.Check, d Decision) error {
	if d.Delay <= 0 {
		return nil
	}
	if deadline, ok := ctx.Deadline(); ok {
		if left := time.Until(deadline); left < d.Delay {
			// If the refund fails, the place stays empty, which admits less, not more.
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

// Refund gives n units back, the oldest first (of a leaky_bucket's queue the newest first), and returns how many it
// gave back: at most what key has in use. Without WithRetry a Refund has no request id and is not retried, because a
// refund made twice would admit too much. After ErrUnavailable it may or may not have been made.
func (l *Limiter) Refund(ctx context.Context, key string, n int64) (int64, error) {
	return l.RefundWithID(ctx, key, n, l.c.requestID())
}

// RefundWithID is a Refund that may be repeated. Under the same requestID, of at most 128 bytes, the units of a key are
// given back once, and a repetition returns the same answer for as long as the cluster remembers it (the window, 1 to 5
// minutes). A repetition with another n is ErrInvalid. Request ids of refunds and of checks are separate.
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

// Reset removes key's state: all its units are free again.
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

// AcquireN asks a concurrency policy for a lease of n units, at least 1. The lease is nil if and only if the decision
// refuses or the error is not nil. The caller should Release it when the work is done.
//
// ttl is how long the lease lives without a renewal, such as after the end of this process: at most the policy's
// window; 0 stands for the window. A lease renews itself until it is released or the Client is closed.
//
// If no node answers, under FailOpen the Decision is FailedOpen and the lease is empty: it is never lost, and Release
// does nothing.
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

// String describes the limit in messages.
func (l *Limiter) String() string {
	if l.target.Limit == nil {
		return "policy " + l.target.Policy
	}
	return fmt.Sprintf("inline %s limit %d", l.target.Limit.Algorithm, l.target.Limit.Limit)
}

// check returns a check of a key.
func (l *Limiter) check(key string, cost int64) *limit.Check {
	ck := &limit.Check{Target: l.target, Cost: cost}
	ck.Key = key
	return ck
}

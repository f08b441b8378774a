package limiter

import (
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// This file answers by a policy's on_error where no usable answer of the holder has come in time (undecided in
// route.go), the store has no memory for a new key (setError in decide.go), or this node's queue of waiting operations
// is full (shed.go):
//
//	open    allowed, with the whole cost; FailedOpen
//	closed  refused; FailedClosed. Under shadow it is allowed, with Shadow and FailedOpen
//	share   decided by this node's part of the limits; FailedOpen or FailedClosed

// failedRetry is the RetryAfter of an operation that on_error refuses.
const failedRetry = time.Second

// fail answers an operation by on_error. An inline limit fails open, and so does a policy that this node does not know,
// unless unknown policies are denied. A blocked or unlimited key is answered as always: no holder is needed for that.
func (l *Limiter) fail(op *Op) {
	r, d := op.rule, op.Decision
	if r.Limits == nil && !r.missing {
		l.answer(op)
		return
	}
	*d = limit.Decision{Policy: op.PolicyName(), RequestID: op.RequestID}
	if r.Limits != nil {
		first := &r.Limits[0]
		d.Limit, d.Window = first.Limit, quotaWindow(first)
		if first.Capacity > 0 {
			d.Limit = first.Capacity
		}
	}
	switch {
	case r.share:
		l.failByShare(op)
	case r.closed && !r.shadow:
		d.FailedClosed, d.RetryAfter = true, failedRetry
	default:
		d.FailedOpen, d.Allowed, d.Granted, d.Shadow = true, true, op.Cost, r.closed
	}
	if op.Cost > 0 {
		r.stats.mine().count(d)
	}
}

// The bounds of the store in which this node counts for on_error: share. No other node has a copy of it. When it is
// full, it refuses keys that it does not know.
const (
	maxShares     = 16 << 10
	maxShareBytes = 16 << 20
)

// newShares returns the store in which this node counts for on_error: share.
func newShares() *store.Store {
	return store.New(store.Config{Partitions: 1, MaxKeys: maxShares, MaxBytes: maxShareBytes})
}

// failByShare decides an operation by its rule's limits divided by the number of members. It refuses the operation if
// there is no memory, or a limit divided is 0.
func (l *Limiter) failByShare(op *Op) {
	members := 1
	if l.cfg.Members != nil {
		members = max(l.cfg.Members(), 1)
	}
	r, d := op.rule, op.Decision
	var got store.Answer
	if limits := divided(r.Limits, members); limits != nil {
		share := store.Rule{Scope: r.Scope, Limits: limits, Durability: store.None}
		call := store.Call{Request: requestOf(op.Check)}
		if answer, err := l.shares.Decide(store.Key{Hash: op.hash, Key: op.Key}, &share, l.clock(), call,
			nil); err == nil {
			got = answer
		}
	}
	d.Allowed, d.Granted, d.Remaining, d.Delay, d.ResetAfter = got.Allowed, got.Granted, got.Remaining, got.Delay,
		got.ResetAfter
	switch {
	case d.Allowed:
	case r.shadow:
		shadow(d, op.Cost)
	default:
		// The holder may be back before this node's part has units again.
		d.FailedClosed, d.RetryAfter = true, failedRetry
	}
	d.FailedOpen = d.Allowed
}

// divided returns the limits divided by n, rounded down; nil if one of them would be 0.
func divided(limits algo.Limits, n int) algo.Limits {
	out := slices.Clone(limits)
	for i := range out {
		l := &out[i]
		if l.Limit == algo.Unlimited {
			continue
		}
		capacity := l.Capacity
		l.Limit /= int64(n)
		l.Capacity /= int64(n)
		if l.Limit == 0 || capacity > 0 && l.Capacity == 0 {
			return nil
		}
	}
	return out
}

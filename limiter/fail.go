package limiter

import (
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// This file answers by on_error: where the node that decides cannot be reached in time (unreachable in route.go), where the store has no
// room for a new key (failed in decide.go), and where more operations wait than the node takes in (shed.go).

// failedRetry is when a check may come back that was refused because the node that decides could not be asked.
const failedRetry = time.Second

// fail answers an operation that asks for units by on_error. A limit sent along fails open, and so does a policy that this node does not know,
// unless unknown policies are denied. A blocked key stays blocked, and an unlimited one unlimited.
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
		l.failByPart(op)
	case r.closed && !r.shadow:
		d.FailedClosed, d.RetryAfter = true, failedRetry
	default:
		d.FailedOpen, d.Allowed, d.Granted, d.Shadow = true, true, op.Cost, r.closed
	}
	if op.Cost > 0 {
		r.stats.mine().count(d)
	}
}

// What on_error: share counts is kept in a small store of its own, of which no other node hears. These are its bounds: beyond them keys that
// it does not know are refused.
const (
	maxParts     = 16 << 10
	maxPartBytes = 16 << 20
)

// divided returns limits of which each is one of n equal parts, rounded down; nil when one of them would be nothing.
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

// newParts returns the store of parts.
func newParts() *store.Store {
	return store.New(store.Config{Partitions: 1, MaxKeys: maxParts, MaxBytes: maxPartBytes})
}

// decidePart decides a request by one of n equal parts of the rule's limits. It refuses what cannot be decided, because there is no memory
// or a part would be nothing.
func (r *rule) decidePart(parts *store.Store, n int, k store.Key, now algo.Instant, request algo.Request) algo.Decision {
	if limits := divided(r.Limits, max(n, 1)); limits != nil {
		part := store.Rule{Scope: r.Scope, Limits: limits, Durability: store.None}
		if got, err := parts.Decide(k, &part, now, store.Call{Request: request}, nil); err == nil {
			return got.Decision
		}
	}
	return algo.Decision{Limit: r.Limits[0].Limit, RetryAfter: algo.Never}
}

// failByPart answers an operation by this node's part of its rule's limits.
func (l *Limiter) failByPart(op *Op) {
	members := 1
	if l.cfg.Members != nil {
		members = l.cfg.Members()
	}
	r, d := op.rule, op.Decision
	request := algo.Request{Cost: op.Cost, Partial: op.Partial, Always: op.Always, Bounded: op.Bounded}
	got := r.decidePart(l.parts, members, store.Key{Hash: op.hash, Key: op.Key}, l.clock(), request)
	d.Allowed, d.Granted, d.Remaining, d.Delay = got.Allowed, got.Granted, got.Remaining, got.Delay
	d.RetryAfter, d.ResetAfter = got.RetryAfter, got.ResetAfter
	d.FailedOpen, d.FailedClosed = d.Allowed, !d.Allowed
	switch {
	case d.FailedOpen:
	case r.shadow:
		shadow(d, op.Cost)
		d.FailedOpen, d.FailedClosed = true, false
	default:
		// The node that decides may be back before a part has room again.
		d.RetryAfter = failedRetry
	}
}

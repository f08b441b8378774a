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

// What on_error: share counts is kept in a small store of its own, of which no other node hears. These are its bounds: beyond them keys that
// it does not know are refused.
const (
	maxShares     = 16 << 10
	maxShareBytes = 16 << 20
)

// newShares returns the store of what on_error: share counts.
func newShares() *store.Store {
	return store.New(store.Config{Partitions: 1, MaxKeys: maxShares, MaxBytes: maxShareBytes})
}

// failByShare answers an operation by this node's share of its rule's limits, one of as many as the cluster has members. It refuses where there is no
// memory, or a share would be nothing.
func (l *Limiter) failByShare(op *Op) {
	members := 1
	if l.cfg.Members != nil {
		members = max(l.cfg.Members(), 1)
	}
	r, d := op.rule, op.Decision
	got := store.Answer{Decision: algo.Decision{RetryAfter: algo.Never}}
	if limits := divided(r.Limits, members); limits != nil {
		share := store.Rule{Scope: r.Scope, Limits: limits, Durability: store.None}
		call := store.Call{Request: requestOf(op.Check)}
		if answer, err := l.shares.Decide(store.Key{Hash: op.hash, Key: op.Key}, &share, l.clock(), call, nil); err == nil {
			got = answer
		}
	}
	d.Allowed, d.Granted, d.Remaining, d.Delay, d.ResetAfter = got.Allowed, got.Granted, got.Remaining, got.Delay, got.ResetAfter
	switch {
	case d.Allowed:
	case r.shadow:
		shadow(d, op.Cost)
	default:
		// The node that decides may be back before a share has room again.
		d.FailedClosed, d.RetryAfter = true, failedRetry
	}
	d.FailedOpen = d.Allowed
}

// divided returns limits of which each is one of n equal shares, rounded down; nil when one of them would be nothing.
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

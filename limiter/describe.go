package limiter

import (
	"errors"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// maxReturns bounds the instants that are told of a limit.
const maxReturns = 64

// RouteOf returns the route to the node that decides for a target's key, as far as this node knows. The route is not to
// be changed.
func (l *Limiter) RouteOf(t *limit.Target) (*ownership.Route, *limit.Error) {
	var s subject
	if err := l.identify(l.table.Load(), t, &s); err != nil {
		return nil, err
	}
	return l.cfg.Ownership.Route(l.partition(s.hash)), nil
}

// Describe tells how a target's key stands under each limit of its rule, without charging anything. There is none where
// the key needs no state: it is unlimited, or blocked. Node is not set. holds is false when this node does not decide
// for the key.
func (l *Limiter) Describe(t *limit.Target) (state limit.KeyState, holds bool, err error) {
	op := NewOp(OpCheck, limit.Check{Target: *t}, Extra{})
	if err := l.plan(l.table.Load(), op); err != nil {
		return state, false, err
	}
	rule := op.rule
	switch {
	case rule.missing:
		return state, false, limit.NewError(limit.NotFound, "policy", "there is no policy named "+op.Policy)
	case rule.Limits == nil:
		return state, true, nil
	}
	k := op.storeKey()
	each, returns, banned, failure := l.store.Look(k, &rule.Rule, l.clock(), maxReturns)
	if errors.Is(failure, store.ErrShut) {
		return state, false, nil
	}
	if failure != nil {
		return state, true, storeError(failure)
	}
	for i := range each {
		of := &rule.Limits[i]
		state.Limits = append(state.Limits, limit.LimitState{
			Algorithm: of.Algorithm, Limit: each[i].Limit, Remaining: each[i].Remaining, Window: of.Window,
			Returns: returns[i],
		})
	}
	state.Banned = banned
	state.OnLoan = l.store.OnLoan(k, rule.Scope)
	return state, true, nil
}

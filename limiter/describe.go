package limiter

import (
	"errors"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// maxReturns bounds the instants that are told of a limit.
const maxReturns = 64

// RouteOf tells who decides for a target's key, as far as this node knows. Nobody changes what it returns.
func (l *Limiter) RouteOf(t *limit.Target) (*ownership.Route, *limit.Error) {
	var s subject
	if err := l.identify(l.table.Load(), t, &s); err != nil {
		return nil, err
	}
	return l.cfg.Ownership.Route(l.partition(s.hash)), nil
}

// Describe tells how a target's key stands under each limit of its rule, without charging anything. There is none where the key
// needs no state: it is unlimited, or blocked. Node is not set. holds is false when this node does not decide for the key.
func (l *Limiter) Describe(t *limit.Target) (state limit.KeyState, holds bool, err error) {
	op := Op{Kind: OpCheck, Check: limit.Check{Target: *t}}
	if err := l.prepare(&op); err != nil {
		return state, false, err
	}
	var rule *store.Rule
	switch e := l.table.Load().entryOf(&op); {
	case op.inline != nil:
		if !op.inline.unlimited {
			rule = &op.inline.Rule
		}
	case e == nil:
		return state, false, limit.NewError(limit.NotFound, "policy", "there is no policy named "+op.Policy)
	default:
		rule = e.rule(e.Rule(op.Key))
	}
	if rule == nil {
		return state, true, nil
	}
	k := store.Key{Hash: op.hash, Partition: op.partition, Key: op.Key}
	each, returns, banned, failure := l.store.Look(k, rule, l.clock(), maxReturns)
	if errors.Is(failure, store.ErrShut) {
		return state, false, nil
	}
	if failure != nil {
		return state, true, storeError(failure)
	}
	for i := range each {
		of := &rule.Limits[i]
		state.Limits = append(state.Limits, limit.LimitState{
			Algorithm: of.Algorithm, Limit: each[i].Limit, Remaining: each[i].Remaining, Window: of.Window, Returns: returns[i],
		})
	}
	state.Banned = banned
	state.OnLoan = l.store.OnLoan(k, rule.Scope)
	return state, true, nil
}

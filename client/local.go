package client

import (
	"context"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
)

// Local returns a Client that decides in this process, by the same rules as a node with those policies, for tests and for
// programs that are a single process. Nil stands for no policies; limits can be sent along (Client.Inline) either way.
// Its counters live and die with it. Close it when done.
func Local(policies *policy.Set) *Client {
	// With a hash key of its own, nobody can choose keys that all lie in one place of a table.
	l := limiter.New(limiter.Config{Policies: policies, HashKey: ring.RandomHashKey()})
	c := newLocal(l, l.Close)
	c.here = l
	return c
}

// allowHere answers the plainest question of all: one check of a client that decides in this process, of a policy and a key
// that are known. It reports false, and nothing is charged, where there is more to it or something to say about the call.
func (l *Limiter) allowHere(ctx context.Context, key string, n int64, d *Decision) bool {
	standing := l.standing.Load()
	if standing == nil || l.c.ended.Load() {
		return false
	}
	var b limiter.Brief
	if !l.c.here.CheckAt(ctx, standing, key, n, &b) {
		return false
	}
	d.Policy = l.target.policy
	if l.target.limit != nil {
		d.Policy = "inline"
	}
	d.Allowed, d.Granted, d.Shadow = b.Allowed, b.Granted, b.Shadow
	d.Limit, d.Window, d.Remaining = b.Limit, b.Window, b.Remaining
	d.RetryAfter, d.ResetAfter, d.Delay = b.RetryAfter, b.ResetAfter, b.Delay
	standing.Count(&b, n)
	return true
}

// checkHere is a check of a client that decides in this process, without anything around it: nothing waits, so there is
// nothing for Close to wait for. It reports false, and nothing is charged, where there is something to say about the call,
// which the usual way says. The next question may be one for allowHere.
func (l *Limiter) checkHere(ctx context.Context, key string, n int64, d *Decision) (done bool, err error) {
	if l.c.ended.Load() || ctx.Err() != nil {
		return false, nil
	}
	target := l.target.service()
	l.standing.Store(l.c.here.Standing(&target, l.standing.Load()))
	target.Key = key
	checks := [1]limit.Check{{Target: target, Cost: n}}
	var results [1]limit.Result
	if l.c.here.CheckTo(ctx, checks[:], nil, results[:]) != nil {
		return false, nil
	}
	if err := results[0].Err; err != nil {
		return true, serviceError(err)
	}
	fillDecision(d, &results[0].Decision)
	return true, nil
}

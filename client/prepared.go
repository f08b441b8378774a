package client

import (
	"context"

	"github.com/weirlimit/weir/limit"
)

// prepared is what a Limiter keeps of a limit.Prepared.
type prepared struct{ limit.Prepared }

// allowPrepared answers the plainest check: one of a policy and a key that the Service of this process has a
// prepared handle for and knows. It reports false, and nothing is charged, where there is more to it or something to say about
// the call.
func (l *Limiter) allowPrepared(ctx context.Context, key string, n int64, d *Decision) bool {
	handle := l.prepared.Load()
	if handle == nil || l.c.ended.Load() {
		return false
	}
	b, ok := handle.Check(ctx, key, n)
	if !ok {
		return false
	}
	d.Policy = nameOf(&l.target)
	d.Allowed, d.Granted, d.Shadow = b.Allowed, b.Granted, b.Shadow
	d.NearLimit = b.NearLimit
	d.Limit, d.Window, d.Remaining = b.Limit, b.Window, b.Remaining
	d.RetryAfter, d.ResetAfter, d.Delay = b.RetryAfter, b.ResetAfter, b.Delay
	handle.Count(b, n)
	return true
}

// prepare brings the prepared handle up to date.
func (l *Limiter) prepare(target *limit.Target) {
	var last limit.Prepared
	if handle := l.prepared.Load(); handle != nil {
		last = handle.Prepared
	}
	switch next := l.c.preparer.Prepare(target, last); {
	case next == nil:
		l.prepared.Store(nil)
	case next != last:
		l.prepared.Store(&prepared{next})
	}
}

// checkPrepared is a check by a Service of this process with prepared handles, without anything around it: nothing waits, so
// there is nothing for Close to wait for. It reports false, and nothing is charged, where there is something to say about the
// call, which the usual way says. The next check may be one for allowPrepared.
func (l *Limiter) checkPrepared(ctx context.Context, key string, n int64, d *Decision) (done bool, err error) {
	if l.c.ended.Load() || ctx.Err() != nil {
		return false, nil
	}
	target := l.target
	l.prepare(&target)
	target.Key = key
	checks := [1]limit.Check{{Target: target, Cost: n}}
	var results [1]limit.Result
	if l.c.preparer.CheckTo(ctx, checks[:], nil, results[:]) != nil {
		return false, nil
	}
	if err := results[0].Err; err != nil {
		return true, err
	}
	*d = results[0].Decision
	return true, nil
}

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
	if handle == nil {
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

// prepare brings the prepared handle up to date, so that the next check may be one for allowPrepared.
func (l *Limiter) prepare() {
	if l.c.preparer == nil {
		return
	}
	var last limit.Prepared
	if handle := l.prepared.Load(); handle != nil {
		last = handle.Prepared
	}
	target := l.target
	switch next := l.c.preparer.Prepare(&target, last); {
	case next == nil:
		l.prepared.Store(nil)
	case next != last:
		l.prepared.Store(&prepared{next})
	}
}

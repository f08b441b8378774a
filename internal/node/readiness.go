package node

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"
)

// readinessConfig says what a node waits for. All fields are required.
type readinessConfig struct {
	// Joined reports whether the node is an active member, or why not.
	Joined func() (ok bool, why string)
	// Conditions are what a member waits for, looked at in this order.
	Conditions []condition
	// Held is how many partitions the node holds. As long as they become more, it waits.
	Held func() int
	// Now tells the time.
	Now func() time.Time
	// Became is called when the node becomes ready, unless it has begun to stop.
	Became func()
	Logger *slog.Logger
}

// condition is something that a node waits for.
type condition struct {
	What  string // for an operator: what is waited for
	Holds func(ctx context.Context) bool
}

// readiness is that of one node. Its methods are safe for concurrent use.
//
// A node is ready for traffic once it is a member and each of its conditions holds; or, as a member, once nothing has changed for a while,
// because unreachable members must not delay it for ever. It becomes ready once, and stays so until it begins to stop, whatever becomes of
// the conditions.
type readiness struct {
	cfg     readinessConfig
	awaited atomic.Pointer[string] // what the node waited for when it last looked, before it was ready
	became  chan struct{}
	stopped context.Context // ends with Stop
	stop    context.CancelFunc
}

// newReadiness returns the readiness of a node that starts.
func newReadiness(cfg readinessConfig) *readiness {
	r := &readiness{cfg: cfg, became: make(chan struct{})}
	r.stopped, r.stop = context.WithCancel(context.Background())
	return r
}

// patience is how long a node that is a member already waits for the others: one that cannot be asked, or keeps another
// view, must not hold it up for ever. But as long as more and more partitions come, it waits: who restarts nodes one by one
// takes one that is ready for one that holds its share.
const patience = 10 * time.Second

// waiting is how far a node has got in that. The zero value has not begun.
type waiting struct {
	until time.Time
	held  int // the most partitions so far
}

// enough takes in how things stand, and reports whether the node has waited long enough.
func (w *waiting) enough(now time.Time, member bool, held int) bool {
	if !member || held > w.held || w.until.IsZero() {
		w.until, w.held = now.Add(patience), max(held, w.held)
	}
	return now.After(w.until)
}

// Settle makes the node ready when it is time, and returns then, or when ctx ends.
func (r *readiness) Settle(ctx context.Context) {
	var w waiting
	for {
		what := r.awaits(ctx)
		if what == "" {
			break
		}
		r.awaited.Store(&what)
		member, _ := r.cfg.Joined()
		if w.enough(r.cfg.Now(), member, r.cfg.Held()) {
			r.cfg.Logger.Warn("readiness wait timed out", "awaited", what)
			break
		}
		if !pause(ctx) {
			return
		}
	}
	if !r.Stopping() {
		r.cfg.Became()
		close(r.became)
	}
}

// awaits says what the node has to wait for; nothing when that is empty.
func (r *readiness) awaits(ctx context.Context) string {
	if member, why := r.cfg.Joined(); !member {
		return why
	}
	for _, c := range r.cfg.Conditions {
		if !c.Holds(ctx) {
			return c.What
		}
	}
	return ""
}

// Stop has the node be ready no more.
func (r *readiness) Stop() { r.stop() }

// Stopping reports whether Stop was called.
func (r *readiness) Stopping() bool { return r.stopped.Err() != nil }

// Became is closed once the node has become ready.
func (r *readiness) Became() <-chan struct{} { return r.became }

// Follow is Settled, with a channel that is closed when that changes.
func (r *readiness) Follow() (settled bool, changed <-chan struct{}) {
	if r.Stopping() {
		return false, nil
	}
	select {
	case <-r.became:
		return true, r.stopped.Done()
	default:
		return false, r.became
	}
}

// Settled reports whether the node has become ready and is not stopping.
func (r *readiness) Settled() bool {
	settled, _ := r.Follow()
	return settled
}

// Ready reports whether the node is ready, or why not.
func (r *readiness) Ready() (ok bool, why string) {
	member, why := r.cfg.Joined()
	ready := r.Settled()
	switch {
	case why != "" || ready:
	case r.Stopping():
		why = "stopping"
	default:
		if what := r.awaited.Load(); what != nil {
			why = *what
		}
	}
	return member && ready, why
}

// pause waits a moment before something is looked at again. It returns false at once when ctx is done.
func pause(ctx context.Context) bool {
	select {
	case <-time.After(25 * time.Millisecond):
		return true
	case <-ctx.Done():
		return false
	}
}

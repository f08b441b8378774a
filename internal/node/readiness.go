package node

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"
)

// readinessConfig configures readiness. All fields are required.
type readinessConfig struct {
	// Joined reports whether the node is an active member, or why not.
	Joined func() (ok bool, why string)
	// Conditions are what a member waits for, in this order.
	Conditions []condition
	// Held returns how many partitions the node holds. While the number grows, the node waits.
	Held func() int
	// Became is called when the node becomes ready, unless it has begun to stop.
	Became func()
	Logger *slog.Logger
}

// condition is something that a node waits for.
type condition struct {
	What  string // what the node waits for, for an operator
	Holds func(ctx context.Context) bool
}

// readiness says when a node is ready. Its methods are safe for concurrent use.
//
// A node is ready for traffic once it is a member and each of its conditions holds. It is also ready if, as a member,
// it has waited for patience without progress, because unreachable members must not delay it for ever. It becomes ready
// once, and stays so until it begins to stop, even if a condition no longer holds.
type readiness struct {
	cfg     readinessConfig
	awaited atomic.Pointer[string] // what the node waited for when Settle last looked
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

// patience bounds how long a member waits for the others: one that does not answer, or has another view, must not delay
// it for ever. While the number of its partitions grows, the node goes on waiting, because a rolling restart takes a
// ready node for one that holds its share.
const patience = 10 * time.Second

// Settle makes the node ready once it may be. It returns then, or when ctx ends.
func (r *readiness) Settle(ctx context.Context) {
	var until time.Time // the end of the wait
	most := 0           // partitions so far
	for {
		what := r.awaits(ctx)
		if what == "" {
			break
		}
		r.awaited.Store(&what)
		member, _ := r.cfg.Joined()
		if held := r.cfg.Held(); !member || held > most || until.IsZero() {
			until, most = time.Now().Add(patience), max(held, most)
		}
		if time.Now().After(until) {
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

// awaits returns what the node has to wait for, or "".
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

// Stop ends the readiness for good.
func (r *readiness) Stop() { r.stop() }

// Stopping reports whether Stop was called.
func (r *readiness) Stopping() bool { return r.stopped.Err() != nil }

// Became returns a channel that is closed once the node has become ready.
func (r *readiness) Became() <-chan struct{} { return r.became }

// Follow returns Settled, and a channel that is closed when Settled changes.
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

// pause waits a moment before the caller looks again. It returns false at once when ctx is done.
func pause(ctx context.Context) bool {
	select {
	case <-time.After(25 * time.Millisecond):
		return true
	case <-ctx.Done():
		return false
	}
}

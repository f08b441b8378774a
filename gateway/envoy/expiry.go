package envoy

import (
	"context"
	"sync"
	"time"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
)

const (
	// expiryMargin is how much longer than its TTL a reservation lives, so that it is there to be cancelled when that is over.
	expiryMargin = 10 * time.Second
	// pendingBytes is what is kept of a reservation, and targetBytes what of each of its targets besides the key.
	pendingBytes, targetBytes = 512, 192
)

// expiry cancels reservations that have not been committed within their TTL: a Service's own stay charged then, those of Kuadrant's
// protocol do not. One whose node has ended meanwhile stays charged.
type expiry struct {
	service  limit.Service // of the node: nobody asks
	panicked func(*panics.Error)
	kept     *fairshare.Places // bytes

	mu      sync.Mutex
	pending map[string]pending // by reservation id
	ended   bool
	running sync.WaitGroup // of cancellations
}

// pending is a reservation that has not been committed, and the bytes that it takes.
type pending struct {
	timer *time.Timer
	bytes fairshare.Taken
}

// room takes the bytes that a caller's reservation of targets takes while it is pending; false where the caller has no more.
func (e *expiry) room(caller string, targets []limit.Target) (fairshare.Taken, bool) {
	bytes := pendingBytes
	for i := range targets {
		bytes += targetBytes + len(targets[i].Key)
	}
	return e.kept.TakeAll(caller, bytes)
}

// add has a reservation cancelled when its TTL is over. The bytes that room has taken are given back when it ends; at once without an id.
func (e *expiry) add(id string, targets []limit.Target, ttl time.Duration, bytes fairshare.Taken) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if id == "" || e.ended {
		e.kept.Give(bytes)
		return
	}
	e.pending[id] = pending{time.AfterFunc(ttl, func() { e.cancel(id, targets) }), bytes}
}

// remove leaves a reservation as it is.
func (e *expiry) remove(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p, ok := e.pending[id]; ok {
		p.timer.Stop()
		e.kept.Give(p.bytes)
		delete(e.pending, id)
	}
}

// cancel cancels a reservation, unless it has been removed.
func (e *expiry) cancel(id string, targets []limit.Target) {
	e.mu.Lock()
	if _, ok := e.pending[id]; !ok {
		e.mu.Unlock()
		return
	}
	e.running.Add(1)
	e.mu.Unlock()
	defer e.running.Done()
	defer e.remove(id)
	panics.Tell(e.panicked, func() {
		for _, t := range targets {
			// What has been committed elsewhere is pending no more. What cannot be cancelled stays charged.
			_, _ = e.service.Cancel(context.Background(), t, id)
		}
	})
}

// close cancels nothing more, and waits for what is being cancelled.
func (e *expiry) close() {
	e.mu.Lock()
	e.ended = true
	for _, p := range e.pending {
		p.timer.Stop()
		e.kept.Give(p.bytes)
	}
	clear(e.pending)
	e.mu.Unlock()
	e.running.Wait()
}

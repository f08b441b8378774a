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
	// expiryMargin is how much longer a reservation lives than its TTL, so that cancel still finds it.
	expiryMargin = 10 * time.Second
	// What a pending reservation takes of Kept, in bytes: pendingBytes for itself, and targetBytes and the key's length
	// for each target.
	pendingBytes, targetBytes = 512, 192
)

// expiry cancels reservations of Kuadrant's protocol that are not committed within their TTL. The Service alone would
// leave them charged, as it does with those of a node that has ended.
type expiry struct {
	service  limit.Service // in the name of the node, without authorization
	panicked func(*panics.Error)
	kept     *fairshare.Places // budget in bytes

	mu      sync.Mutex
	pending map[string]pending // by reservation id
	ended   bool
	running sync.WaitGroup // of cancellations
}

// pending is a reservation that has not been committed, and the bytes that it has taken.
type pending struct {
	timer *time.Timer
	bytes fairshare.Taken
}

// room takes the bytes for a reservation of some targets from the caller's share. It returns false when the share has
// no room.
func (e *expiry) room(caller string, targets []limit.Target) (fairshare.Taken, bool) {
	bytes := pendingBytes
	for i := range targets {
		bytes += targetBytes + len(targets[i].Key)
	}
	return e.kept.TakeAll(caller, bytes)
}

// add has a reservation cancelled when its TTL is over. The bytes are given back when the reservation ends, and at once
// when id is empty.
func (e *expiry) add(id string, targets []limit.Target, ttl time.Duration, bytes fairshare.Taken) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if id == "" || e.ended {
		e.kept.Give(bytes)
		return
	}
	e.pending[id] = pending{time.AfterFunc(ttl, func() { e.cancel(id, targets) }), bytes}
}

// remove forgets a reservation without cancelling it.
func (e *expiry) remove(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p, ok := e.pending[id]; ok {
		p.timer.Stop()
		e.kept.Give(p.bytes)
		delete(e.pending, id)
	}
}

// cancel cancels a reservation, unless it was removed.
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
			// A Commit through another node has ended the reservation: Cancel then does nothing. After other errors the
			// units stay charged.
			_, _ = e.service.Cancel(context.Background(), t, id)
		}
	})
}

// close stops all pending cancellations, and waits for those that run.
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

package envoy

import (
	"context"
	"sync"
	"time"

	"github.com/weirlimit/weir/internal/recovered"
	"github.com/weirlimit/weir/limit"
)

const (
	// expiryMargin is how much longer than its TTL a reservation lives, so that it is there to be cancelled when that is over.
	expiryMargin = 10 * time.Second
	// maxExpiring is how many reservations are cancelled by this node when their TTL is over. What is past it stays charged.
	maxExpiring = 50_000
)

// expiry cancels reservations that have not been committed within their TTL: a Service's own stay charged then, those of Kuadrant's
// protocol do not. One whose node has ended meanwhile stays charged.
type expiry struct {
	service  limit.Service // of the node: nobody asks
	panicked func(*recovered.Error)

	mu      sync.Mutex
	timers  map[string]*time.Timer // by reservation id
	ended   bool
	running sync.WaitGroup // of cancellations
}

// add has a reservation cancelled when its TTL is over.
func (e *expiry) add(id string, targets []limit.Target, ttl time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ended || len(e.timers) >= maxExpiring {
		return
	}
	if e.timers == nil {
		e.timers = make(map[string]*time.Timer)
	}
	e.timers[id] = time.AfterFunc(ttl, func() { e.cancel(id, targets) })
}

// remove leaves a reservation as it is.
func (e *expiry) remove(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.timers[id]; t != nil {
		t.Stop()
		delete(e.timers, id)
	}
}

// cancel cancels a reservation, unless it has been removed.
func (e *expiry) cancel(id string, targets []limit.Target) {
	e.mu.Lock()
	if e.timers[id] == nil {
		e.mu.Unlock()
		return
	}
	delete(e.timers, id)
	e.running.Add(1)
	e.mu.Unlock()
	defer e.running.Done()
	recovered.Tell(e.panicked, func() {
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
	for _, t := range e.timers {
		t.Stop()
	}
	clear(e.timers)
	e.mu.Unlock()
	e.running.Wait()
}

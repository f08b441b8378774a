package admission

import (
	"sync"
	"time"
)

// awaited are the calls whose first messages have not come yet. It ends those that take too long. All are given the same time, so that
// they come in the order of their deadlines, and one timer is enough: it goes on from the oldest to the next, and rests when there is
// none. The zero value is ready for use.
type awaited struct {
	mu      sync.Mutex
	calls   call // the ends of a ring: next is the oldest; used for nothing else
	timer   *time.Timer
	running bool // the timer is
}

// add has a call end after so long, from now on, which is the same for all calls.
func (a *awaited) add(k *call, now time.Time, patience time.Duration) {
	k.deadline = now.Add(patience)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.timer == nil {
		a.calls.prev, a.calls.next = &a.calls, &a.calls
		a.timer = time.AfterFunc(patience, func() { a.expire(time.Now()) })
	} else if !a.running {
		a.timer.Reset(patience)
	}
	a.running = true
	k.prev, k.next = a.calls.prev, &a.calls
	k.prev.next, a.calls.prev = k, k
}

// remove takes a call out whose message has come, or which is over. It is cheap from the second time on.
func (a *awaited) remove(k *call) {
	if k.came.Load() || k.came.Swap(true) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.removeLocked(k)
}

// removeLocked does nothing for a call that is not among them.
func (a *awaited) removeLocked(k *call) {
	if k.next != nil {
		k.prev.next, k.next.prev = k.next, k.prev
		k.prev, k.next = nil, nil
	}
}

// expire ends the calls whose time is over.
func (a *awaited) expire(now time.Time) {
	var late []*call
	a.mu.Lock()
	for k := a.calls.next; k != &a.calls && !k.deadline.After(now); k = a.calls.next {
		a.removeLocked(k)
		late = append(late, k)
	}
	if oldest := a.calls.next; oldest != &a.calls {
		a.timer.Reset(oldest.deadline.Sub(now))
	} else {
		a.running = false
	}
	a.mu.Unlock()
	for _, k := range late {
		k.end(noMessage)
	}
}

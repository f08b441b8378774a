package admission

import (
	"net/netip"
	"slices"
	"sync"
)

// anonymousCalls bounds the calls on connections that are not authenticated, such as health checks. The zero value is
// ready for use.
type anonymousCalls struct {
	mu  sync.Mutex
	all int
	of  map[netip.Prefix][]*call // by source, the oldest first
}

// enter counts a call. If there are then more than most calls, enter ends the oldest call of the source that has the
// most calls.
func (a *anonymousCalls) enter(c *call, from netip.Prefix, most int) (leave func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.of == nil {
		a.of = make(map[netip.Prefix][]*call)
	}
	a.of[from] = append(a.of[from], c)
	if a.all++; a.all > most {
		largest := from
		for source, calls := range a.of {
			if len(calls) > len(a.of[largest]) {
				largest = source
			}
		}
		oldest := a.of[largest][0]
		a.leaveLocked(oldest, largest)
		oldest.end(tooManyAnonymous)
	}
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.leaveLocked(c, from)
	}
}

// leaveLocked does nothing if the call has left already.
func (a *anonymousCalls) leaveLocked(c *call, from netip.Prefix) {
	i := slices.Index(a.of[from], c)
	if i < 0 {
		return
	}
	a.all--
	if a.of[from] = slices.Delete(a.of[from], i, i+1); len(a.of[from]) == 0 {
		delete(a.of, from)
	}
}

// Package fairshare divides a number of places among callers, so that no caller takes all of them.
//
// While at most half of the places are taken, a caller may take any number, and only their sum is counted. Beyond that,
// a caller may have no more of the other places than are free. One caller that takes all that it gets leaves a quarter
// of all places free. If n callers take one place at a time, they leave as many free as each of them has of the second
// half. These are the dynamic thresholds of Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory
// packet switches", IEEE/ACM Transactions on Networking 6(2), 1998, with a factor of 1.
//
// No caller is sure of a number of places, and places are not taken back.
package fairshare

import (
	"sync"
	"sync/atomic"
)

// Places is a number of places. It is safe for concurrent use.
type Places struct {
	most int64
	all  atomic.Int64

	mu sync.Mutex
	of map[string]int64 // by caller, the places taken while more than half of all were taken
}

// New returns Places for most places; 0 is no bound.
func New(most int) *Places { return &Places{most: int64(most)} }

// Taken is what a caller has taken. The caller must pass it to Give once.
type Taken struct {
	N       int // may be less than the caller asked for
	who     string
	counted bool
}

// Take takes up to n places for the caller named who. An empty name has no share of its own: it gets what is free.
func (p *Places) Take(who string, n int) Taken {
	want := int64(n)
	all := p.all.Add(want)
	if p.most == 0 || all*2 <= p.most {
		return Taken{N: n}
	}
	before := all - want
	free := max(p.most-before, 0)
	if who == "" {
		got := min(want, free)
		p.all.Add(got - want)
		return Taken{N: int(got)}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	got := max(p.most/2-before, (free-p.of[who]+1)/2, 0)
	got = min(got, want)
	p.all.Add(got - want)
	if got > 0 {
		if p.of == nil {
			p.of = make(map[string]int64)
		}
		p.of[who] += got
	}
	return Taken{N: int(got), who: who, counted: got > 0}
}

// TakeAll takes n places for the caller named who, or none if it cannot get n.
func (p *Places) TakeAll(who string, n int) (t Taken, ok bool) {
	if t = p.Take(who, n); t.N < n {
		p.Give(t)
		return Taken{}, false
	}
	return t, true
}

// Give gives back what Take or TakeAll has taken.
func (p *Places) Give(t Taken) {
	p.all.Add(-int64(t.N))
	if !t.counted {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of[t.who] -= int64(t.N); p.of[t.who] == 0 {
		delete(p.of, t.who)
	}
}

// Force takes n places even if they are not free. The caller must give them back with Release.
func (p *Places) Force(n int) { p.all.Add(int64(n)) }

// Release gives back n places that Force has taken.
func (p *Places) Release(n int) { p.all.Add(-int64(n)) }

// InUse returns how many places are taken, and how many there are (0: no bound).
func (p *Places) InUse() (taken, most int64) { return p.all.Load(), p.most }

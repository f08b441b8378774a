// Package fairshare divides a number of places among those who take them, so that nobody takes all of them.
//
// While half of the places are free, everybody takes as many as they like, and nothing is counted but their number. Beyond that
// somebody may have no more places than are free: one who takes all that can be had leaves a quarter, and n of them who take one at a
// time leave as many as each has got of the other half. These are the dynamic thresholds of Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
// switches", IEEE/ACM Transactions on Networking 6(2), 1998, with a factor of 1.
//
// It promises nobody a number of places, and takes none back.
package fairshare

import (
	"sync"
	"sync/atomic"
)

// Places are a number of places. They are safe for concurrent use.
type Places struct {
	most int64
	all  atomic.Int64

	mu sync.Mutex
	of map[string]int64 // those that were taken when half of all were
}

// New returns places; 0 stands for any number.
func New(most int) *Places { return &Places{most: int64(most)} }

// Taken is what somebody has taken. It is to be given back, once.
type Taken struct {
	N       int // may be less than was asked for
	who     string
	counted bool
}

// Take takes up to n places for somebody. An empty name is nobody's: those without one take what there is.
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

// TakeAll takes n places for somebody, or none where that many are not to be had.
func (p *Places) TakeAll(who string, n int) (t Taken, ok bool) {
	if t = p.Take(who, n); t.N < n {
		p.Give(t)
		return Taken{}, false
	}
	return t, true
}

// Give gives back what Take has returned.
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

// Force takes n places, whether or not they are free. They are given back with Release.
func (p *Places) Force(n int) { p.all.Add(int64(n)) }

// Release gives back what Force has taken.
func (p *Places) Release(n int) { p.all.Add(-int64(n)) }

// InUse returns how many places are taken, and how many there are.
func (p *Places) InUse() (taken, most int64) { return p.all.Load(), p.most }

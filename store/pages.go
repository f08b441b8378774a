package store

import (
	"sync"

	"github.com/weirlimit/weir/algo"
)

const (
	// slabPages is how many pages are taken from the runtime at a time, at most. Each piece of memory costs the garbage
	// collector something to mark and to sweep: for a million keys there are 8000 pages.
	slabPages = 32
	// slabShare bounds what a small store takes ahead: no slab is larger than this share of the pages in use.
	slabShare = 16
)

// pages cuts the pages of a store's arenas from slabs, and gives a slab back when none of its pages is in use. It is
// safe for concurrent use. Bytes are counted by the arenas, by the page: what lies idle in slabs is not, and is at most
// what was in use before, but for the rest of one slab.
type pages struct {
	mu     sync.Mutex
	slabs  []slab
	vacant []int32 // slabs that were given back
	open   []int32 // slabs with free pages, of which the last is used first
	used   int     // pages
}

// slab is one run of pages.
type slab struct {
	free []*algo.Page
	size int // pages in all
	at   int // in pages.open, where any is free
}

// Get implements algo.Pages.
func (p *pages) Get() (mem *algo.Page, number int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.open) == 0 {
		p.grow()
	}
	number = p.open[len(p.open)-1]
	s := &p.slabs[number]
	last := len(s.free) - 1
	mem = s.free[last]
	s.free[last] = nil
	if s.free = s.free[:last]; last == 0 {
		p.open = p.open[:len(p.open)-1]
	}
	p.used++
	return mem, number
}

func (p *pages) grow() {
	n := min(max(1, p.used/slabShare), slabPages)
	run, s := make([]algo.Page, n), slab{size: n, free: make([]*algo.Page, n)}
	for i := range run {
		s.free[n-1-i] = &run[i]
	}
	var number int32
	if last := len(p.vacant) - 1; last >= 0 {
		number, p.vacant = p.vacant[last], p.vacant[:last]
		p.slabs[number] = s
	} else {
		number = int32(len(p.slabs))
		p.slabs = append(p.slabs, s)
	}
	p.open = append(p.open, number)
}

// Put implements algo.Pages.
func (p *pages) Put(mem *algo.Page, number int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := &p.slabs[number]
	if len(s.free) == 0 {
		s.at = len(p.open)
		p.open = append(p.open, number)
	}
	s.free = append(s.free, mem)
	p.used--
	if len(s.free) < s.size {
		return
	}
	last := p.open[len(p.open)-1]
	p.open[s.at] = last
	p.slabs[last].at = s.at
	p.open = p.open[:len(p.open)-1]
	*s = slab{}
	p.vacant = append(p.vacant, number)
}

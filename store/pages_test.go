package store

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// Pages that are in use are different ones, whatever comes and goes, and a slab without one in use is given back.
func TestPages(t *testing.T) {
	type taken struct {
		mem    *algo.Page
		number int32
	}
	r := rand.New(rand.NewPCG(1, 2))
	p, in, inUse := &pages{}, []taken{}, map[*algo.Page]bool{}
	for step := range 40_000 {
		if grow := step/8000%2 == 0; r.IntN(10) < 7 == grow || len(in) == 0 {
			mem, number := p.Get()
			must.True(t, !inUse[mem], "a page was given out twice")
			inUse[mem] = true
			in = append(in, taken{mem, number})
		} else {
			i := r.IntN(len(in))
			p.Put(in[i].mem, in[i].number)
			delete(inUse, in[i].mem)
			in[i] = in[len(in)-1]
			in = in[:len(in)-1]
		}
		held, free, open := 0, 0, 0
		if step%100 != 0 {
			continue
		}
		for i := range p.slabs {
			held += p.slabs[i].size
			free += len(p.slabs[i].free)
			if len(p.slabs[i].free) > 0 {
				open++
			}
		}
		must.True(t, held-free == len(in) && p.used == len(in) && open == len(p.open),
			"%d pages in slabs, %d of them free, %d open; %d are in use", held, free, open, len(in))
	}
	for _, e := range in {
		p.Put(e.mem, e.number)
	}
	expect.True(t, len(p.vacant) == len(p.slabs) && len(p.open) == 0 && p.used == 0,
		"of %d slabs %d were given back", len(p.slabs), len(p.vacant))
}

// A store whose keys have become idle gives back what they took.
func TestPagesGoBack(t *testing.T) {
	if underRace {
		t.Skip("memory is not what it is under the race detector")
	}
	before := heap()
	s := fill(t, algo.Limit{Algorithm: algo.TokenBucket, Limit: 100, Window: time.Hour}, 100_000)
	full := heap() - before
	s.Sweep(algo.Instant{Mono: int64(2 * time.Hour)}, 1)
	for s.trim() {
	}
	// Tables are given back with their last key.
	if left := heap() - before; s.Stats().Keys != 0 || left > full/10 {
		t.Errorf("%d of %d bytes are left, with %d keys", left, full, s.Stats().Keys)
	}
	expect.Equal(t, len(s.pages.slabs)-len(s.pages.vacant), 0, "slabs are left")
}

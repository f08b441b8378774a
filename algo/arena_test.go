package algo

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// testBudget allows so many pages.
type testBudget struct{ left int }

func (b *testBudget) Take(bytes int) bool {
	if b.left < bytes {
		return false
	}
	b.left -= bytes
	return true
}
func (b *testBudget) Give(bytes int) { b.left += bytes }

// TestArena allocates and frees at random and fills every block with a pattern of its own: blocks that overlap, or
// that were freed and not cleared, show.
func TestArena(t *testing.T) {
	const pages = 40
	r := rand.New(rand.NewPCG(7, 7))
	budget := &testBudget{pages * PageBytes}
	a := NewArena(budget)
	type block struct {
		ref     Ref
		words   int
		pattern uint64
	}
	var blocks []block
	refused := 0
	check := func(b block) {
		for i, w := range a.Block(b.ref, BlockWords(b.words)) {
			must.Equal(t, w, b.pattern+uint64(i), "block %x: word %d was overwritten", b.ref, i)
		}
	}
	for step := range 60_000 {
		grow := step/6000%2 == 0
		if r.IntN(10) < 7 == grow {
			words := 1 + r.IntN(MaxBlock)
			if r.IntN(3) > 0 {
				words = 1 + r.IntN(40)
			}
			ref, ok := a.Alloc(words)
			if !ok {
				refused++
				continue
			}
			must.True(t, ref != 0, "a block has the zero Ref")
			n := BlockWords(words)
			must.True(t, n >= words && n <= 2*words, "%d words in a block for %d", n, words)
			b := block{ref, words, r.Uint64()}
			m := a.Block(ref, BlockWords(words))
			for i := range m {
				must.Equal(t, m[i], 0, "a new block is not zero")
				m[i] = b.pattern + uint64(i)
			}
			blocks = append(blocks, b)
		} else if n := len(blocks); n > 0 {
			i := r.IntN(n)
			check(blocks[i])
			a.Free(blocks[i].ref, blocks[i].words)
			blocks[i] = blocks[n-1]
			blocks = blocks[:n-1]
		}
		must.True(t, a.Bytes()+budget.left == pages*PageBytes,
			"%d bytes held and %d left of %d", a.Bytes(), budget.left, pages*PageBytes)
	}
	expect.True(t, refused != 0, "the budget never refused")
	for _, b := range blocks {
		check(b)
		a.Free(b.ref, b.words)
	}
	n := a.Bytes() / PageBytes
	expect.True(t, n <= maxSpares && liveBlocks(a) == 0, "%d pages held for nothing", n)
}

// fill takes all of an arena's budget, so that nothing that needs a page goes on, and all room in pages there are.
func fill(a *Arena) (undo func()) {
	type block struct {
		ref   Ref
		words int
	}
	var blocks []block
	for c := len(blockClasses) - 1; c >= 0; c-- {
		for {
			r, ok := a.Alloc(int(blockClasses[c]))
			if !ok {
				break
			}
			blocks = append(blocks, block{r, int(blockClasses[c])})
		}
	}
	return func() {
		for _, b := range blocks {
			a.Free(b.ref, b.words)
		}
	}
}

// TestNoMemoryChargesNothing refuses memory to one of several limits: the others are not charged, and the request
// passes as soon as there is memory.
func TestNoMemoryChargesNothing(t *testing.T) {
	log := func(n int64, w time.Duration) Limit { return Limit{Algorithm: SlidingLog, Limit: n, Window: w} }
	for _, ls := range []Limits{
		{log(1000, sec)},
		{{Algorithm: Concurrency, Limit: 1000, Window: sec}},
		{{Algorithm: FixedWindow, Limit: 1000, Window: sec}, log(1000, sec),
			{Algorithm: TokenBucket, Limit: 1000, Window: sec}},
		{log(2, sec), log(Unlimited, 0), log(1000, time.Minute), {Algorithm: SlidingWindow, Limit: 1000, Window: sec}},
	} {
		for before := range 60 {
			a := NewArena(&testBudget{6 * PageBytes})
			s := make(State, ls.Words())
			ls.Init(s, Instant{})
			for i := range before {
				must.Value(ls.Decide(a, s, Instant{Mono: int64(i) * 1e6}, Request{Cost: 1}, nil))(t)
			}
			used := make([]int64, len(ls))
			now := Instant{Mono: int64(before) * 1e6}
			for i := range ls {
				used[i] = ls.Used(a, s, now, i)
			}
			undo := fill(a)
			refused := false
			for range 70 {
				d, err := ls.Decide(a, s, now, Request{Cost: 1}, nil)
				if refused = err != nil; refused {
					must.True(t, err == ErrNoMemory && d == (Decision{}), "%+v, %v", d, err)
					break
				}
				for i := range ls {
					if ls[i].Limit != Unlimited {
						used[i] += d.Granted
					}
				}
				now.Mono += 32 // so that the log has to grow
			}
			for i := range ls {
				if got := ls.Used(a, s, now, i); refused && got != used[i] {
					t.Fatalf("limit %d of %+v: %d in use, want %d", i, ls, got, used[i])
				}
			}
			idle := ls.Idle(a, s, now)
			undo()
			must.True(t, before != 0 || !refused || (idle || used[0] != 0) && (!idle || liveBlocks(a) == 0),
				"%+v: idle %v with %d blocks", ls, idle, liveBlocks(a))
			d, err := ls.Decide(a, s, now, Request{Cost: 1, Partial: true}, nil)
			must.True(t, err == nil && (d.Allowed || ls[0].Limit <= 2), "with memory: %+v, %v", d, err)
			ls.Free(a, s)
			must.Equal(t, liveBlocks(a), 0, "blocks are nobody's")
		}
	}
}

// TestNoMemoryDenied: a refusal stands even if it cannot be counted.
func TestNoMemoryDenied(t *testing.T) {
	ls := Limits{{Algorithm: SlidingLog, Limit: 6, Window: sec, CountDenied: true}}
	a, s := NewArena(&testBudget{2 * PageBytes}), make(State, ls.Words())
	ls.Init(s, Instant{})
	for i := range 6 {
		must.True(t, must.Value(ls.Decide(a, s, Instant{Mono: int64(i)}, Request{Cost: 1}, nil))(t).Allowed, "refused")
	}
	undo := fill(a)
	d, err := ls.Decide(a, s, Instant{Mono: 100}, Request{Cost: 1}, nil)
	expect.True(t, err == nil && !d.Allowed && d.RetryAfter == sec-100,
		"%+v, %v; want a refusal that is not counted", d, err)
	undo()
	d, err = ls.Decide(a, s, Instant{Mono: 100}, Request{Cost: 1}, nil)
	expect.True(t, err == nil && !d.Allowed && d.RetryAfter == sec-99,
		"%+v, %v; want a refusal that is counted", d, err)
}

// TestNoMemoryConvert: nothing happens to the old state.
func TestNoMemoryConvert(t *testing.T) {
	from := Limits{{Algorithm: FixedWindow, Limit: 10, Window: sec}, {Algorithm: SlidingLog, Limit: 10, Window: sec}}
	to := Limits{{Algorithm: SlidingLog, Limit: 10, Window: time.Hour},
		{Algorithm: SlidingLog, Limit: 9, Window: time.Minute}}
	a := NewArena(&testBudget{2 * PageBytes})
	s, u := make(State, from.Words()), make(State, to.Words())
	from.Init(s, Instant{})
	must.Value(from.Decide(a, s, Instant{}, Request{Cost: 7}, nil))(t)
	before := fmt.Sprintf("%x", from.Append(nil, a, s, Instant{}))
	undo := fill(a)
	must.Equal(t, from.Convert(a, s, Instant{}, to, u), ErrNoMemory)
	after := fmt.Sprintf("%x", from.Append(nil, a, s, Instant{}))
	expect.True(t, after == before, "the old state was %s and is %s", before, after)
	undo()
	must.NoError(t, from.Convert(a, s, Instant{}, to, u))
	d, err := to.Decide(a, u, Instant{}, Request{Cost: 3}, nil)
	expect.True(t, err == nil && !d.Allowed && d.Remaining == 2 && d.Tightest == 1, "%+v, %v", d, err)
	to.Free(a, u)
	expect.Equal(t, liveBlocks(a), 0, "blocks are nobody's")
}

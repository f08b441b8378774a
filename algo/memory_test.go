package algo

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func heapInUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestLogMemory measures what an admission in a full log costs, that is, all of what keys with full logs take in the
// heap: segments and their headers, room left in them and in pages, and the Arena's own tables. The logs have been full
// for a while, so that their oldest segment is partly used up and their newest not yet.
func TestLogMemory(t *testing.T) {
	if underRace {
		t.Skip("the race detector takes memory of its own")
	}
	for _, tt := range []struct {
		limit, keys int
		most        float64 // bytes an admission
	}{
		{5, 50_000, 8.5},
		{100, 2500, 6},
		{1000, 250, 4.8},
		{10_000, 25, 4.4},
		{100_000, 10, 4.2},
		{1 << 20, 1, 4.1},
	} {
		ls := Limits{{Algorithm: SlidingLog, Limit: int64(tt.limit), Window: time.Minute}}
		before := heapInUse()
		a := NewArena(nil)
		states := make([]State, tt.keys)
		for k := range states {
			states[k] = make(State, ls.Words())
			ls.Init(states[k], Instant{})
		}
		own := heapInUse() - before // the states' fixed part
		step := int64(time.Minute) / int64(tt.limit)
		for i := range tt.limit + tt.limit/3 {
			for k := range states {
				now := Instant{Mono: int64(i)*step + int64(k)}
				if d, err := ls.Decide(a, states[k], now, Request{Cost: 1}, nil); err != nil {
					t.Fatal(err)
				} else if i < tt.limit && !d.Allowed {
					t.Fatal("not full yet, and refused")
				}
			}
		}
		var units int64
		for k := range states {
			units += ls.Used(a, states[k], Instant{}, 0)
		}
		heap := heapInUse() - before - own
		each := float64(heap) / float64(units)
		t.Logf("%d keys of %d: %.3f bytes an admission in the heap, %.3f in the Arena; %d in all", tt.keys, tt.limit,
			each, float64(a.Bytes())/float64(units), units)
		expect.True(t, each <= tt.most,
			"%d keys of %d: %.3f bytes an admission, want at most %.1f", tt.keys, tt.limit, each, tt.most)
		expect.True(t, float64(units) >= 0.95*float64(tt.limit*tt.keys), "the logs are not full: %d", units)
		// Idle, they hold nothing.
		for k := range states {
			must.True(t, ls.Idle(a, states[k], Instant{Mono: int64(time.Hour)}), "not idle")
		}
		held := a.Bytes()
		expect.True(t, held <= maxSpares*PageBytes, "%d bytes held by idle logs", held)
		runtime.KeepAlive(a)
	}
}

// TestLogShrinks: what has expired of a log that was large holds no segment but that of the oldest entry.
func TestLogShrinks(t *testing.T) {
	ls, a := Limits{{Algorithm: SlidingLog, Limit: 1 << 20, Window: time.Minute}}, NewArena(nil)
	s := make(State, ls.Words())
	ls.Init(s, Instant{})
	var now Instant
	decide := func(cost int64) Decision {
		d := must.Value(ls.Decide(a, s, now, Request{Cost: cost}, nil))(t)
		return d
	}
	for range 100_000 {
		now.Mono += 1000
		decide(1)
	}
	now.Mono += int64(59 * time.Second)
	for range 3 {
		now.Mono += 1e6
		decide(1)
	}
	held := slidingLog{}.chainWords(s[1:])
	must.True(t, held >= 50_000, "%d words held", held)
	now.Mono += int64(2 * time.Second)
	must.Equal(t, decide(0).Remaining, 1<<20-3)
	g := segmentAt(a, slidingLog{}.firstSegment(s[1:]))
	held = slidingLog{}.chainWords(s[1:])
	expect.True(t, held == g.words() && held <= 256, "three entries hold %d words", held)
	expect.Equal(t, decide(1).Remaining, 1<<20-4)
}

// TestRunsAreCompact: many units at one tick take one entry.
func TestRunsAreCompact(t *testing.T) {
	ls, a := Limits{{Algorithm: SlidingLog, Limit: MaxLimit, MaxLog: MaxLimit, Window: time.Minute}}, NewArena(nil)
	s := make(State, ls.Words())
	ls.Init(s, Instant{})
	for i := range int64(100_000) {
		must.True(t, must.Value(ls.Decide(a, s, Instant{Mono: 64}, Request{Cost: 1 + i%3}, nil))(t).Allowed, "refused")
	}
	held := slidingLog{}.chainWords(s[1:])
	expect.True(t, held <= 4, "one instant holds %d words", held)
}

// steady are limits for which one request after another is admitted or refused for long.
func steady() []Limit {
	return []Limit{
		{Algorithm: FixedWindow, Limit: 100, Window: time.Second},
		{Algorithm: FixedWindow, Limit: 100, Period: Day},
		{Algorithm: SlidingWindow, Limit: 100, Window: time.Second},
		{Algorithm: SlidingCounter, Limit: 100, Window: time.Second},
		{Algorithm: SlidingLog, Limit: 100, Window: time.Second},
		{Algorithm: SlidingLog, Limit: 100, Window: time.Second, CountDenied: true},
		{Algorithm: TokenBucket, Limit: 100, Window: time.Second},
		{Algorithm: LeakyBucket, Limit: 100, Window: time.Second},
		{Algorithm: Concurrency, Limit: 100, Window: time.Second},
		{Algorithm: TokenBucket, Limit: Unlimited},
	}
}

// TestNoAllocations: nothing that is done for every request takes memory from the runtime.
func TestNoAllocations(t *testing.T) {
	cases := []Limits{{steady()[4], steady()[6], steady()[1]}}
	for _, l := range steady() {
		cases = append(cases, Limits{l})
	}
	for _, ls := range cases {
		a, s, each := NewArena(nil), make(State, ls.Words()), make([]Decision, len(ls))
		ls.Init(s, Instant{})
		var now Instant
		use := func() {
			now = later(now, 5*time.Millisecond)
			for _, r := range []Request{{Cost: 1}, {}, {Cost: 3}, {Cost: 7, Partial: true}} {
				d := must.Value(ls.Decide(a, s, now, r, each))(t)
				if d.Lease != 0 && d.Lease%3 == 0 {
					ls.Renew(a, s, now, d.Lease, 0)
					ls.Release(a, s, now, d.Lease)
				}
			}
			ls.Refund(a, s, now, 1)
			ls.Idle(a, s, now)
			ls.Used(a, s, now, 0)
		}
		for range 2000 {
			use() // until the Arena has the pages
		}
		n := testing.AllocsPerRun(2000, use)
		expect.True(t, n == 0, "%+v: %v allocations", ls, n)
	}
}

func BenchmarkDecide(b *testing.B) {
	for i, l := range steady() {
		ls := Limits{l}
		b.Run(fmt.Sprintf("%v/%d", l.Algorithm, i), func(b *testing.B) {
			a, s := NewArena(nil), make(State, ls.Words())
			ls.Init(s, Instant{})
			var now Instant
			b.ReportAllocs()
			for b.Loop() {
				now = later(now, 9*time.Millisecond) // a little more often than admitted
				if _, err := ls.Decide(a, s, now, Request{Cost: 1}, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestLogAfterCancels: reservations that were cancelled leave no segments, though an old unit stays in the log.
func TestLogAfterCancels(t *testing.T) {
	const batch = 300
	for _, kept := range []int{0, 1, 100} { // of each batch
		ls, a := Limits{{Algorithm: SlidingLog, Limit: 100_000, Window: time.Hour}}, NewArena(nil)
		s, now := make(State, ls.Words()), Instant{Mono: 1}
		ls.Init(s, now)
		must.NoError(t, ls.Charge(a, s, now, 1))
		for range 50 {
			var hs Holds
			for range batch {
				now.Mono += 1000
				must.NoError(t, ls.Charge(a, s, now, 1))
				hs = append(hs, ls.NewHold(s))
			}
			for i := range hs {
				if i%batch >= kept {
					expect.Equal(t, ls.GiveBack(a, s, now, hs, i, 1), 1, "given back")
				}
			}
		}
		units := 1 + 50*kept
		expect.Equal(t, ls.Used(a, s, now, 0), int64(units), "units")
		most := 1024 + 16*units // a full segment has two units in a word of 8 bytes
		expect.True(t, a.InUse() <= most, "%d bytes for %d units, want at most %d", a.InUse(), units, most)
	}
}

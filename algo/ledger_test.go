package algo

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// ledger is a limit and what it decides when, entry by entry; at is the time since the state was made.
type ledger struct {
	name    string
	limit   Limit
	entries []entry
}

type entry struct {
	at      time.Duration
	cost    int64
	partial bool
	// times makes the entry stand for that many requests in a row with the same answer; 0 stands for 1.
	times int

	granted int64 // of a peek: 1 when it would pass
	retry   time.Duration
	delay   time.Duration
}

const (
	ms  = time.Millisecond
	sec = time.Second
)

// The worked examples of the documentation, and around them what is easily got wrong.
var ledgers = []ledger{
	{"log", Limit{Algorithm: SlidingLog, Limit: 2, Window: 1000 * ms}, []entry{
		{at: 100 * ms, cost: 1, granted: 1},
		{at: 400 * ms, cost: 1, granted: 1},
		{at: 500 * ms, cost: 1, retry: 600 * ms},
		{at: 1099_999_999, cost: 1, retry: 1},
		{at: 1100 * ms, cost: 1, granted: 1},
	}},
	{"log of a minute", Limit{Algorithm: SlidingLog, Limit: 2, Window: time.Minute}, []entry{
		{at: 60 * sec, cost: 1, granted: 1},
		{at: 80 * sec, cost: 1, granted: 1},
		{at: 105 * sec, cost: 1, retry: 15 * sec},
		{at: 145 * sec, cost: 1, granted: 1},
	}},
	{"log, one per window", Limit{Algorithm: SlidingLog, Limit: 1, Window: sec}, []entry{
		{at: 0, cost: 1, granted: 1},
		{at: 1 * sec, cost: 1, granted: 1},
		{at: 2 * sec, cost: 1, granted: 1},
		{at: 3*sec - 1, cost: 1, retry: 1},
	}},
	{"log, rounded up to a tick of 32 ns", Limit{Algorithm: SlidingLog, Limit: 1, Window: time.Minute}, []entry{
		{at: 33, cost: 1, granted: 1},
		{at: 60*sec + 63, cost: 1, retry: 1},
		{at: 60*sec + 64, cost: 1, granted: 1},
	}},
	{"log, boundary", Limit{Algorithm: SlidingLog, Limit: 200, Window: time.Minute}, []entry{
		{at: 59_900 * ms, cost: 1, times: 200, granted: 1},
		{at: 60_100 * ms, cost: 1, times: 200, retry: 59_800 * ms},
	}},
	{"log, clock steps back", Limit{Algorithm: SlidingLog, Limit: 2, Window: sec}, []entry{
		{at: 5 * sec, cost: 1, granted: 1},
		{at: 1 * sec, cost: 1, granted: 1},
		{at: 2 * sec, cost: 1, retry: sec}, // at 5 s for the state
		{at: 6*sec - 1, cost: 1, retry: 1},
		{at: 6 * sec, cost: 2, granted: 2},
	}},
	{"log, weights", Limit{Algorithm: SlidingLog, Limit: 10, Window: sec}, []entry{
		{at: 0, cost: 4, granted: 4},
		{at: 100 * ms, cost: 3, granted: 3},
		{at: 200 * ms, cost: 4, retry: 800 * ms},
		{at: 200 * ms, cost: 8, retry: 900 * ms},
		{at: 200 * ms, cost: 11, retry: Never},
		{at: 200 * ms, cost: 11, partial: true, granted: 3},
		{at: 300 * ms, cost: 0, retry: 700 * ms},
		{at: 1000 * ms, cost: 0, granted: 1},
		{at: 1000 * ms, cost: 4, granted: 4},
	}},
	{"log, refusals counted", Limit{Algorithm: SlidingLog, Limit: 2, Window: sec, CountDenied: true}, []entry{
		{at: 0, cost: 1, times: 2, granted: 1},
		{at: 900 * ms, cost: 1, retry: 100 * ms},   // keeps one of 0 and this
		{at: 950 * ms, cost: 1, retry: 950 * ms},   // keeps 900 and 950
		{at: 1800 * ms, cost: 2, retry: 1000 * ms}, // both at 1800 now
		{at: 2799 * ms, cost: 0, retry: 1 * ms},
		{at: 2800 * ms, cost: 2, granted: 2},
	}},
	{"calendar", Limit{Algorithm: FixedWindow, Limit: 200, Period: Minute}, []entry{
		{at: 59_900 * ms, cost: 1, times: 200, granted: 1},
		{at: 59_900 * ms, cost: 1, retry: 100 * ms},
		{at: 60_100 * ms, cost: 1, times: 200, granted: 1},
		{at: 60_100 * ms, cost: 1, retry: 59_900 * ms},
	}},
	{"first hit", Limit{Algorithm: FixedWindow, Limit: 3, Window: sec}, []entry{
		{at: 700 * ms, cost: 1, granted: 1},
		{at: 1600 * ms, cost: 2, granted: 2},
		{at: 1650 * ms, cost: 1, retry: 50 * ms},
		{at: 1700 * ms, cost: 3, granted: 3},
		{at: 1600 * ms, cost: 1, retry: 1000 * ms},
	}},
	{"first hit, refusals counted", Limit{Algorithm: FixedWindow, Limit: 3, Window: sec, CountDenied: true}, []entry{
		{at: 0, cost: 2, granted: 2},
		{at: 0, cost: 2, retry: sec},
		{at: 1 * ms, cost: 1, retry: 999 * ms}, // the refusal took the third
	}},
	{"slots, boundary", Limit{Algorithm: SlidingWindow, Limit: 200, Window: time.Minute}, []entry{
		{at: 59_900 * ms, cost: 1, times: 200, granted: 1},
		{at: 60_100 * ms, cost: 1, times: 200, retry: 59_900 * ms},
		{at: 120_000 * ms, cost: 200, granted: 200},
	}},
	{"slots", Limit{Algorithm: SlidingWindow, Limit: 100, Window: time.Minute, Slots: 6}, []entry{
		{at: 45 * sec, cost: 100, granted: 100},
		{at: 45 * sec, cost: 1, retry: 65 * sec},
		{at: 110*sec - 1, cost: 1, retry: 1},
		{at: 110 * sec, cost: 100, granted: 100},
	}},
	{"slots, refusals counted",
		Limit{Algorithm: SlidingWindow, Limit: 2, Window: time.Minute, Slots: 6, CountDenied: true}, []entry{
			{at: 5 * sec, cost: 2, granted: 2},
			{at: 65 * sec, cost: 1, retry: 5 * sec}, // keeps one of 5 and this
			{at: 69 * sec, cost: 1, retry: 61 * sec},
			{at: 130 * sec, cost: 2, granted: 2},
		}},
	{"counter", Limit{Algorithm: SlidingCounter, Limit: 100, Window: time.Minute}, []entry{
		{at: 30 * sec, cost: 88, granted: 88},
		{at: 60 * sec, cost: 12, granted: 12},
		{at: 75 * sec, cost: 22, granted: 22}, // 88·45/60 + 12 = 78
		{at: 75 * sec, cost: 1, retry: 681_818_182},
		{at: 75_681_818_181, cost: 1, retry: 1},
		{at: 75_681_818_182, cost: 1, granted: 1},
	}},
	{"tokens", Limit{Algorithm: TokenBucket, Limit: 3, Window: time.Minute}, []entry{
		{at: 0, cost: 1, granted: 1},
		{at: 10 * sec, cost: 2, granted: 2},
		{at: 10 * sec, cost: 1, retry: 10 * sec},
		{at: 70 * sec, cost: 3, granted: 3},
	}},
	{"tokens, burst", Limit{Algorithm: TokenBucket, Limit: 1, Window: 10 * ms, Capacity: 500}, []entry{
		{at: time.Hour, cost: 500, granted: 500},
		{at: time.Hour, cost: 1, retry: 10 * ms},
		{at: time.Hour + 10*ms, cost: 1, granted: 1},
		{at: time.Hour + 20*ms - 1, cost: 1, retry: 1},
		{at: time.Hour + 20*ms, cost: 1, granted: 1},
		{at: time.Hour, cost: 1, retry: 10 * ms},
		{at: time.Hour + 30*ms, cost: 501, retry: Never},
	}},
	{"tokens, partial", Limit{Algorithm: TokenBucket, Limit: 10, Window: time.Minute}, []entry{
		{at: 0, cost: 8, granted: 8},
		{at: 0, cost: 5, partial: true, granted: 2},
		{at: 0, cost: 5, partial: true, retry: 6 * sec}, // until one unit passes
		{at: 0, cost: 5, retry: 30 * sec},
	}},
	{"queue", Limit{Algorithm: LeakyBucket, Limit: 4, Window: sec, Capacity: 10}, []entry{
		{at: 0, cost: 1, granted: 1, delay: 0},
		{at: 0, cost: 1, granted: 1, delay: 250 * ms},
		{at: 0, cost: 1, granted: 1, delay: 500 * ms},
		{at: 0, cost: 1, granted: 1, delay: 750 * ms},
		{at: 0, cost: 1, granted: 1, delay: 1000 * ms},
		{at: 0, cost: 1, granted: 1, delay: 1250 * ms},
		{at: 0, cost: 1, granted: 1, delay: 1500 * ms},
		{at: 0, cost: 1, granted: 1, delay: 1750 * ms},
		{at: 0, cost: 1, granted: 1, delay: 2000 * ms},
		{at: 0, cost: 1, granted: 1, delay: 2250 * ms},
		{at: 0, cost: 1, times: 10, retry: 250 * ms},
	}},
	{"leases", Limit{Algorithm: Concurrency, Limit: 2, Window: time.Minute}, []entry{
		{at: 0, cost: 1, granted: 1},
		{at: 10 * sec, cost: 1, granted: 1},
		{at: 20 * sec, cost: 1, retry: 40 * sec},
		{at: 60*sec - 1, cost: 1, retry: 1},
		{at: 60 * sec, cost: 2, retry: 10 * sec},
		{at: 60 * sec, cost: 2, partial: true, granted: 1},
	}},
	{"unlimited", Limit{Algorithm: TokenBucket, Limit: Unlimited}, []entry{
		{at: 0, cost: MaxLimit, times: 100, granted: MaxLimit},
		{at: 0, cost: 0, granted: 1},
	}},
}

func TestLedgers(t *testing.T) {
	for _, l := range ledgers {
		t.Run(l.name, func(t *testing.T) {
			ls, a := Limits{l.limit}, NewArena(nil)
			must.NoError(t, ls.Validate())
			s := make(State, ls.Words())
			ls.Init(s, Instant{})
			for i, e := range l.entries {
				for range max(e.times, 1) {
					d := must.Value(ls.Decide(a, s, Instant{int64(e.at), int64(e.at)},
						Request{Cost: e.cost, Partial: e.partial}, nil))(t)
					granted := d.Granted
					if e.cost == 0 && d.Allowed {
						granted = 1
					}
					must.True(t, granted == e.granted && d.Allowed == (e.granted > 0) && d.RetryAfter == e.retry &&
						d.Delay == e.delay, "entry %d: %+v\n got %+v", i, e, d)
				}
			}
		})
	}
}

// TestSlidingWindowNarrows lowers a limit across the size at which two counts share a word.
func TestSlidingWindowNarrows(t *testing.T) {
	from := Limits{{Algorithm: SlidingWindow, Limit: MaxLimit, Window: time.Minute}}
	to := Limits{{Algorithm: SlidingWindow, Limit: 5, Window: time.Minute}}
	a, s, u := NewArena(nil), make(State, from.Words()), make(State, to.Words())
	from.Init(s, Instant{})
	for i := range 3 {
		d := must.Value(from.Decide(a, s, Instant{Mono: int64(i) * int64(6*sec)}, Request{Cost: 1 << 40}, nil))(t)
		must.True(t, d.Allowed, "%v", d)
	}
	must.NoError(t, from.Convert(a, s, Instant{}, to, u))
	d, err := to.Decide(a, u, Instant{}, Request{Cost: 1}, nil)
	if want := 66 * time.Second; err != nil || d.Allowed || d.RetryAfter != want || d.ResetAfter != want {
		t.Errorf("%+v, %v; want a refusal for %v", d, err, want)
	}
}

// TestConvertHeirs is who takes over from whom.
func TestConvertHeirs(t *testing.T) {
	log := func(n int64, w time.Duration) Limit { return Limit{Algorithm: SlidingLog, Limit: n, Window: w} }
	fixed := func(n int64, w time.Duration) Limit { return Limit{Algorithm: FixedWindow, Limit: n, Window: w} }
	day := Limit{Algorithm: FixedWindow, Limit: 50, Period: Day}
	leases := Limit{Algorithm: Concurrency, Limit: 50, Window: time.Hour}
	for _, tt := range []struct {
		name     string
		from, to Limits
		used     []int64 // of to, after limit i of from used 3 + i
	}{
		{"the same", Limits{log(50, sec), fixed(50, sec)}, Limits{log(60, sec), fixed(60, sec)}, []int64{3, 4}},
		{"swapped", Limits{log(50, sec), fixed(50, sec)}, Limits{fixed(60, sec), log(60, sec)}, []int64{4, 3}},
		{"one more in front", Limits{log(50, sec)}, Limits{log(9, time.Hour), log(50, sec)}, []int64{0, 3}},
		{"one more behind", Limits{log(50, sec)}, Limits{log(50, sec), log(50, time.Hour)}, []int64{3, 0}},
		{"one less", Limits{log(50, sec), log(50, time.Hour)}, Limits{log(50, time.Hour)}, []int64{4}},
		{"twins", Limits{log(50, sec), log(40, sec)}, Limits{log(7, time.Hour), log(40, sec)}, []int64{3, 4}},
		{"another algorithm", Limits{log(50, sec)}, Limits{{Algorithm: TokenBucket, Limit: 50, Window: sec}},
			[]int64{3}},
		{"another window", Limits{log(50, sec)}, Limits{log(2, time.Hour)}, []int64{3}},
		{"to the calendar", Limits{fixed(50, time.Hour)}, Limits{day}, []int64{3}},
		{"to unlimited", Limits{log(50, sec)}, Limits{log(Unlimited, sec)}, []int64{0}},
		{"from unlimited", Limits{log(Unlimited, sec)}, Limits{log(50, sec)}, []int64{0}},
		{"to leases", Limits{log(50, sec)}, Limits{leases}, []int64{0}},
		{"from leases", Limits{leases}, Limits{log(50, sec)}, []int64{0}},
		{"leases", Limits{leases}, Limits{{Algorithm: Concurrency, Limit: 1, Window: time.Minute}}, []int64{3}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, s, u := NewArena(nil), make(State, tt.from.Words()), make(State, tt.to.Words())
			now := Instant{Mono: 1000, Wall: 1e18}
			tt.from.Init(s, now)
			// Decide charges all alike: so limit by limit.
			for i, at := 0, 1; i < len(tt.from); i++ {
				l := &tt.from[i]
				if c := l.counter(); c != nil {
					words := s[at : at+l.words()]
					c.advance(l, a, words, now)
					must.True(t, c.ensureMemory(l, a, words, 3+int64(i)), "no memory")
					c.charge(l, a, words, now, 3+int64(i))
				}
				at += l.words()
			}
			must.NoError(t, tt.from.Convert(a, s, now, tt.to, u))
			for j, want := range tt.used {
				got := tt.to.Used(a, u, now, j)
				expect.True(t, got == want, "limit %d: %d in use, want %d", j, got, want)
			}
			tt.to.Free(a, u)
			expect.Equal(t, liveBlocks(a), 0, "blocks are nobody's")
		})
	}
}

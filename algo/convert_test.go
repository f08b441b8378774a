package algo

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const (
	ms  = time.Millisecond
	sec = time.Second
)

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

package algo

import (
	"fmt"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// For every algorithm, and whatever was admitted before: what the list says can be used again at an instant is admitted
// then and not a nanosecond before.
func TestReturns(t *testing.T) {
	second := time.Second
	for _, l := range []Limit{
		{Algorithm: SlidingLog, Limit: 5, Window: 10 * second},
		{Algorithm: SlidingLog, Limit: 1_000_000, Window: time.Hour},
		{Algorithm: SlidingWindow, Limit: 20, Window: 10 * second, Slots: 5},
		{Algorithm: SlidingCounter, Limit: 20, Window: 10 * second},
		{Algorithm: FixedWindow, Limit: 20, Window: 10 * second},
		{Algorithm: FixedWindow, Limit: 20, Period: Minute},
		{Algorithm: TokenBucket, Limit: 20, Window: 10 * second, Capacity: 7},
		{Algorithm: LeakyBucket, Limit: 20, Window: 10 * second},
	} {
		t.Run(fmt.Sprintf("%v,%d", l.Algorithm, l.Limit), func(t *testing.T) {
			must.NoError(t, l.Validate())
			ls, a := Limits{l}, NewArena(nil)
			now := Instant{Mono: int64(time.Hour), Wall: 1_800_000_007_123_456_789}
			later := func(d time.Duration) Instant { return Instant{now.Mono + int64(d), now.Wall + int64(d)} }
			s := make(State, ls.Words())
			ls.Init(s, now)
			expect.True(t, ls.Returns(a, s, now, 0, 100) == nil, "of a fresh state")
			for _, cost := range []int64{1, 3, 1, 2, l.holds()} {
				must.Value(ls.Decide(a, s, now, Request{Cost: cost, Partial: true}, nil))(t)
				now = later(1234567 * time.Microsecond)
				list := ls.Returns(a, s, now, 0, 1000)
				peek, _ := ls.Decide(a, s, now, Request{}, nil)
				free, last := peek.Remaining, time.Duration(-1)
				for i, r := range list {
					must.True(t, r.Units >= 1 && r.After > last, "%d: %+v after %v", i, r, last)
					last = r.After
					snapshot := ls.Append(nil, a, s, now)
					for _, tt := range []struct {
						after time.Duration
						want  int64
					}{{r.After - 1, free}, {r.After, free + r.Units}} {
						if tt.after < 0 {
							continue
						}
						u := make(State, ls.Words())
						must.Value(ls.Restore(a, u, now, snapshot))(t)
						d, _ := ls.Decide(a, u, later(tt.after), Request{}, nil)
						expect.True(t, d.Remaining == tt.want,
							"%v of %v: %d are free %v later, want %d", r, list, d.Remaining, tt.after, tt.want)
						ls.Free(a, u)
					}
					free += r.Units
				}
				expect.True(t, free == l.holds() || len(list) >= 1000, "%v: %d come back of %d", list, free, l.holds())
				short := ls.Returns(a, s, now, 0, 1)
				expect.True(t, len(list) == 0 || len(short) == 1 && short[0] == list[0], "at most 1: %v", short)
			}
		})
	}
}

func TestReturnsOfOthers(t *testing.T) {
	ls := Limits{{Algorithm: FixedWindow, Limit: 3, Window: time.Second},
		{Algorithm: SlidingLog, Limit: 5, Window: time.Minute}}
	a, s, now := NewArena(nil), make(State, ls.Words()), Instant{Mono: 1e9}
	ls.Init(s, now)
	must.Value(ls.Decide(a, s, now, Request{Cost: 2}, nil))(t)
	got := ls.Returns(a, s, now, 0, 9)
	expect.True(t, len(got) == 1 && got[0] == (Return{2, time.Second}), "%v", got)
	got = ls.Returns(a, s, now, 1, 9)
	expect.True(t, len(got) == 1 && got[0].Units == 2 && got[0].After >= time.Minute, "%v", got)
	expect.True(t, ls.Returns(a, s, now, 2, 9) == nil, "of a limit that there is not")
	leases := Limits{{Algorithm: Concurrency, Limit: 2, Window: time.Minute}}
	s = make(State, leases.Words())
	leases.Init(s, now)
	must.Value(leases.Decide(a, s, now, Request{Cost: 1, TTL: time.Second}, nil))(t)
	expect.True(t, leases.Returns(a, s, now, 0, 9) == nil, "of leases")
}

package algo

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestFill: no limit has room any more, and what a unit costs is what it always costs.
func TestFill(t *testing.T) {
	for i, l := range shapes(t) {
		if l.Limit == Unlimited {
			continue
		}
		ls := Limits{l}
		if l.Algorithm != SlidingLog {
			ls = append(ls, Limit{Algorithm: SlidingLog, Limit: 1 + int64(i%7), Window: time.Second})
		}
		now := origins[i%len(origins)]
		r := newReplica(ls, now)
		r.ask(t, now, int64(i%3))
		must.NoError(t, ls.Fill(r.a, r.s, now))
		for j, d := range r.ask(t, now, 0) {
			used := ls.Used(r.a, r.s, now, j)
			if l.Algorithm == Concurrency && j == 0 {
				used -= int64(i % 3) // leases stay
			}
			if d.Allowed || d.Remaining != 0 || used != ls[j].holds() {
				t.Fatalf("%+v: %+v with %d used", ls[j], d, ls.Used(r.a, r.s, now, j))
			}
		}
		r.clone(t, now)
		if err := ls.Fill(r.a, r.s, now); err != nil ||
			l.Algorithm != Concurrency && ls.Used(r.a, r.s, now, 0) != ls[0].holds() {
			t.Fatalf("%+v: filled twice, %d used, %v", ls[0], ls.Used(r.a, r.s, now, 0), err)
		}
		must.True(t, l.Period != 0 || ls.Idle(r.a, r.s, later(now, max(ls.Horizon(), 0))),
			"%+v: in use after its horizon, %v", ls, ls.Horizon())
	}
}

// TestFillForgetsWhatWas: room that was about to come back does not, since it is not known when the last admission was.
func TestFillForgetsWhatWas(t *testing.T) {
	for i, l := range shapes(t) {
		if l.Limit == Unlimited || l.Period != 0 || l.Algorithm == Concurrency {
			continue
		}
		ls := Limits{l}
		now := origins[i%len(origins)]
		r, fresh := newReplica(ls, now), newReplica(ls, now)
		r.ask(t, now, l.holds()) // all of it, a window ago but for a moment
		now = later(now, l.Window-min(l.Window/7, time.Millisecond))
		fresh.ls.Init(fresh.s, now)
		for _, filled := range []*replica{&r, &fresh} {
			must.NoError(t, ls.Fill(filled.a, filled.s, now))
		}
		for _, n := range []int64{1, (l.holds() + 1) / 2, l.holds()} {
			for _, after := range []time.Duration{0, l.Window / 3, l.Window - 1, l.Window, 2 * l.Window} {
				got := r.clone(t, now).ask(t, later(now, after), n)[0]
				want := fresh.clone(t, now).ask(t, later(now, after), n)[0]
				must.True(t, !got.Allowed || want.Allowed,
					"%+v: %d units %v after it was filled: %+v, where a new one says %+v", l, n, after, got, want)
			}
		}
	}
}

// TestChargeLeases: what is charged to a concurrency limit is nobody's to release.
func TestChargeLeases(t *testing.T) {
	ls := Limits{{Algorithm: Concurrency, Limit: 10, Window: time.Minute}}
	r := newReplica(ls, Instant{})
	given := r.ask(t, Instant{}, 2)[0].Lease
	must.NoError(t, ls.Charge(r.a, r.s, Instant{Mono: 1e9}, 3))
	must.NoError(t, ls.Fill(r.a, r.s, Instant{Mono: 2e9}))
	r = r.clone(t, Instant{Mono: 2e9})
	for slot := range uint64(64) {
		for nonce := range uint64(3) {
			id := nonce<<slotBits | slot
			must.True(t, id == given || !ls.Release(r.a, r.s, Instant{}, id), "%x was released", id)
		}
	}
	for _, e := range []struct {
		at   time.Duration
		used int64
	}{{2 * time.Second, 15}, {60 * time.Second, 13}, {61 * time.Second, 10}, {62 * time.Second, 0}} {
		expect.Equal(t, ls.Used(r.a, r.s, Instant{Mono: int64(e.at)}, 0), e.used, "used at %v", e.at)
	}
	expect.Equal(t, liveBlocks(r.a), 0, "an idle state owns blocks")
}

// TestChargeSaturates: whatever is charged, and however often, the state is one that can be moved and runs off.
func TestChargeSaturates(t *testing.T) {
	for i, l := range append(shapes(t), Limit{Algorithm: Concurrency, Limit: 5, Window: time.Hour}) {
		ls := Limits{l}
		r, now := newReplica(ls, Instant{}), Instant{}
		for j := range 5 {
			now = later(now, time.Duration(int64(l.Window)/10*int64(i%2)))
			for _, n := range []int64{MaxLimit - 1, 1<<63 - 1, 0, -5} {
				must.NoError(t, ls.Charge(r.a, r.s, now, n))
			}
			if u := transplant(t, r, r.clone(t, now), now); j > 2 {
				must.NoError(t, ls.Join(r.a, r.s, now, u))
				ls.Free(r.a, u)
			} else {
				ls.Free(r.a, u)
			}
			d := r.clone(t, now).ask(t, now, 0)[0]
			must.True(t, l.Limit == Unlimited || d.Remaining <= 0 || l.holds() >= MaxLimit/2,
				"%+v: room after everything was charged: %+v", l, d)
		}
		end := later(now, 2*MaxFill) // perhaps of a window that has just begun
		idle := ls.Idle(r.a, r.s, end) || ls.Idle(r.a, r.s, later(end, 3*wallMargin))
		must.True(t, idle && liveBlocks(r.a) == 0, "%+v: in use for ever", l)
	}
}

// transplant makes a copy of u in the Arena of r.
func transplant(t testing.TB, r, u replica, now Instant) State {
	t.Helper()
	s := make(State, r.ls.Words())
	must.Value(r.ls.Restore(r.a, s, now, u.ls.Append(nil, u.a, u.s, now)))(t)
	return s
}

// TestChargeNoMemory: all limits are charged or none.
func TestChargeNoMemory(t *testing.T) {
	ls := Limits{
		{Algorithm: FixedWindow, Limit: 10, Window: time.Hour},
		{Algorithm: SlidingLog, Limit: 10, Window: time.Hour},
		{Algorithm: SlidingLog, Limit: 1, Window: time.Hour}, // its block has another size, and so another page
	}
	for pages, want := range []error{ErrNoMemory, ErrNoMemory, nil} {
		for name, charge := range map[string]func(*Arena, State) error{
			"charge": func(a *Arena, s State) error { return ls.Charge(a, s, Instant{}, 1) },
			"fill":   func(a *Arena, s State) error { return ls.Fill(a, s, Instant{}) },
		} {
			a, s := NewArena(&testBudget{pages * PageBytes}), make(State, ls.Words())
			ls.Init(s, Instant{})
			before := ls.Mark(s)
			expect.Equal(t, charge(a, s), want, "%s, %d pages", name, pages)
			idle := ls.Idle(a, s, Instant{})
			expect.True(t, idle == (want != nil) && (!idle || liveBlocks(a) == 0 && ls.Mark(s) == before),
				"%s, %d pages: idle %v with %d blocks", name, pages, idle, liveBlocks(a))
		}
	}
}

func TestHorizon(t *testing.T) {
	const day = 24 * time.Hour
	for _, tt := range []struct {
		limit Limit
		want  time.Duration
	}{
		{Limit{Algorithm: FixedWindow, Limit: 5, Window: time.Minute}, time.Minute},
		{Limit{Algorithm: FixedWindow, Limit: 5, Period: Minute}, time.Minute},
		{Limit{Algorithm: FixedWindow, Limit: 5, Period: Hour}, time.Hour},
		{Limit{Algorithm: FixedWindow, Limit: 5, Period: Day}, 2 * day},
		{Limit{Algorithm: FixedWindow, Limit: 5, Period: Week}, 8 * day},
		{Limit{Algorithm: FixedWindow, Limit: 5, Period: Month}, 32 * day},
		{Limit{Algorithm: FixedWindow, Limit: 5, Period: Year}, 367 * day},
		{Limit{Algorithm: SlidingWindow, Limit: 5, Window: time.Minute}, 66 * time.Second},
		{Limit{Algorithm: SlidingCounter, Limit: 5, Window: time.Minute}, 2 * time.Minute},
		{Limit{Algorithm: SlidingLog, Limit: 5, Window: time.Minute}, time.Minute + 32},
		{Limit{Algorithm: TokenBucket, Limit: 5, Window: time.Minute}, time.Minute},
		{Limit{Algorithm: TokenBucket, Limit: 3, Capacity: 10, Window: time.Second}, 3_333_333_334},
		{Limit{Algorithm: LeakyBucket, Limit: 1, Capacity: 100, Window: MaxWindow}, MaxFill},
		{Limit{Algorithm: Concurrency, Limit: 5, Window: time.Minute}, time.Minute},
		{Limit{Algorithm: SlidingLog, Limit: Unlimited, Window: time.Minute}, 0},
	} {
		expect.Equal(t, (Limits{tt.limit}).Horizon(), tt.want, "%+v", tt.limit)
	}
	ls := Limits{{Algorithm: FixedWindow, Limit: 5, Window: time.Minute},
		{Algorithm: FixedWindow, Limit: 5, Period: Day}, {Algorithm: FixedWindow, Limit: Unlimited}}
	expect.Equal(t, ls.Horizon(), 2*day, "of several")
}

package algo

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
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
		if err := ls.Fill(r.a, r.s, now); err != nil {
			t.Fatal(err)
		}
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
		if err := ls.Fill(r.a, r.s, now); err != nil || l.Algorithm != Concurrency && ls.Used(r.a, r.s, now, 0) != ls[0].holds() {
			t.Fatalf("%+v: filled twice, %d used, %v", ls[0], ls.Used(r.a, r.s, now, 0), err)
		}
		if l.Period == 0 && !ls.Idle(r.a, r.s, later(now, max(ls.Horizon(), 0))) {
			t.Fatalf("%+v: in use after its horizon, %v", ls, ls.Horizon())
		}
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
			if err := ls.Fill(filled.a, filled.s, now); err != nil {
				t.Fatal(err)
			}
		}
		for _, n := range []int64{1, (l.holds() + 1) / 2, l.holds()} {
			for _, after := range []time.Duration{0, l.Window / 3, l.Window - 1, l.Window, 2 * l.Window} {
				got := r.clone(t, now).ask(t, later(now, after), n)[0]
				want := fresh.clone(t, now).ask(t, later(now, after), n)[0]
				if got.Allowed && !want.Allowed {
					t.Fatalf("%+v: %d units %v after it was filled: %+v, where a new one says %+v", l, n, after, got, want)
				}
			}
		}
	}
}

// TestFillKeepsWindows: what was in use of a sliding counter counts for no less, whatever its windows.
func TestFillKeepsWindows(t *testing.T) {
	const w = time.Second
	ls := Limits{{Algorithm: SlidingCounter, Limit: 10, Window: w}}
	for moved := time.Duration(0); moved < w; moved += w / 10 {
		now := Instant{Mono: int64(moved)}
		r := newReplica(ls, Instant{})
		r.ask(t, Instant{}, 10)
		u := newReplica(ls, now)
		u.s = transplant(t, u, r, Instant{})
		u.s[1] += uint64(moved) // a window of another process
		filled := u.clone(t, now)
		if err := ls.Fill(filled.a, filled.s, now); err != nil {
			t.Fatal(err)
		}
		for at := time.Duration(0); at < 2*w; at += w / 20 {
			if got, want := ls.Used(filled.a, filled.s, later(now, at), 0), ls.Used(u.a, u.s, later(now, at), 0); got < want {
				t.Fatalf("moved by %v: %d in use %v after it was filled, and %d of it were", moved, got, at, want)
			}
		}
	}
}

// TestChargeLeases: what is charged to a concurrency limit is nobody's to release.
func TestChargeLeases(t *testing.T) {
	ls := Limits{{Algorithm: Concurrency, Limit: 10, Window: time.Minute}}
	r := newReplica(ls, Instant{})
	given := r.ask(t, Instant{}, 2)[0].Lease
	if err := ls.Charge(r.a, r.s, Instant{Mono: 1e9}, 3); err != nil {
		t.Fatal(err)
	}
	if err := ls.Fill(r.a, r.s, Instant{Mono: 2e9}); err != nil {
		t.Fatal(err)
	}
	r = r.clone(t, Instant{Mono: 2e9})
	for slot := range uint64(64) {
		for nonce := range uint64(3) {
			if id := nonce<<slotBits | slot; id != given && ls.Release(r.a, r.s, Instant{}, id) {
				t.Fatalf("%x was released", id)
			}
		}
	}
	for _, e := range []struct {
		at   time.Duration
		used int64
	}{{2 * time.Second, 15}, {60 * time.Second, 13}, {61 * time.Second, 10}, {62 * time.Second, 0}} {
		if got := ls.Used(r.a, r.s, Instant{Mono: int64(e.at)}, 0); got != e.used {
			t.Errorf("%d used at %v, want %d", got, e.at, e.used)
		}
	}
	if liveBlocks(r.a) != 0 {
		t.Error("an idle state owns blocks")
	}
}

// TestChargeSaturates: whatever is charged, and however often, the state is one that can be moved and runs off.
func TestChargeSaturates(t *testing.T) {
	for i, l := range append(shapes(t), Limit{Algorithm: Concurrency, Limit: 5, Window: time.Hour}) {
		ls := Limits{l}
		r, now := newReplica(ls, Instant{}), Instant{}
		for j := range 5 {
			now = later(now, time.Duration(int64(l.Window)/10*int64(i%2)))
			for _, n := range []int64{MaxLimit - 1, 1<<63 - 1, 0, -5} {
				if err := ls.Charge(r.a, r.s, now, n); err != nil {
					t.Fatal(err)
				}
			}
			if u := transplant(t, r, r.clone(t, now), now); j > 2 {
				if err := ls.Merge(r.a, r.s, now, u); err != nil {
					t.Fatal(err)
				}
				ls.Free(r.a, u)
			} else {
				ls.Free(r.a, u)
			}
			if d := r.clone(t, now).ask(t, now, 0)[0]; l.Limit != Unlimited && d.Remaining > 0 && l.holds() < MaxLimit/2 {
				t.Fatalf("%+v: room after everything was charged: %+v", l, d)
			}
		}
		if !ls.Idle(r.a, r.s, later(now, 2*MaxFill)) || liveBlocks(r.a) != 0 {
			t.Fatalf("%+v: in use for ever", l)
		}
	}
}

// transplant makes a copy of u in the Arena of r.
func transplant(t testing.TB, r, u replica, now Instant) State {
	t.Helper()
	s := make(State, r.ls.Words())
	if _, err := r.ls.Restore(r.a, s, now, u.ls.Append(nil, u.a, u.s, now)); err != nil {
		t.Fatal(err)
	}
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
			if err := charge(a, s); err != want {
				t.Errorf("%s, %d pages: %v, want %v", name, pages, err, want)
			}
			if idle := ls.Idle(a, s, Instant{}); idle != (want != nil) || idle && (liveBlocks(a) != 0 || ls.Mark(s) != before) {
				t.Errorf("%s, %d pages: idle %v with %d blocks", name, pages, idle, liveBlocks(a))
			}
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
		if got := (Limits{tt.limit}).Horizon(); got != tt.want {
			t.Errorf("%+v: %v, want %v", tt.limit, got, tt.want)
		}
	}
	ls := Limits{{Algorithm: FixedWindow, Limit: 5, Window: time.Minute}, {Algorithm: FixedWindow, Limit: 5, Period: Day}, {Algorithm: FixedWindow, Limit: Unlimited}}
	if got := ls.Horizon(); got != 2*day {
		t.Errorf("of several: %v", got)
	}
}

// split is a history of admissions, each charged to one state that sees everything and to one of two that divide it.
type split struct {
	t      testing.TB
	l      Limit
	r      replica  // the one that sees everything
	parts  [2]State // in the same Arena
	events []event
	now    Instant
	// counters are what the parts are if they are sliding counters.
	counters [2]counterOracle
	// both is for how long both parts, were they buckets, have owed.
	both *big.Rat
	owed [2]bucketOracle
}

func newSplit(t testing.TB, src source, l Limit, now Instant) *split {
	s := &split{t: t, l: l, r: newReplica(Limits{l}, now), now: now, both: new(big.Rat)}
	for i := range s.parts {
		s.parts[i] = make(State, s.r.ls.Words())
		s.r.ls.Init(s.parts[i], now)
		s.counters[i] = counterOracle{l: l}
		s.owed[i] = bucketOracle{l, new(big.Rat).SetInt64(now.Mono)}
	}
	return s
}

// pass lets time go by.
func (s *split) pass(d int64) {
	if s.l.Algorithm == TokenBucket || s.l.Algorithm == LeakyBucket {
		owe := new(big.Rat).SetInt64(d)
		for _, o := range s.owed {
			left := new(big.Rat).Sub(o.full, new(big.Rat).SetInt64(s.now.Mono))
			if left.Sign() < 0 {
				left.SetInt64(0)
			}
			if left.Cmp(owe) < 0 {
				owe = left
			}
		}
		s.both.Add(s.both, owe)
	}
	s.now = later(s.now, time.Duration(d))
}

// check asks for n units of the one, and charges what that admits to a part as well.
func (s *split) check(n int64, part int) {
	s.t.Helper()
	d, err := s.r.ls.Decide(s.r.a, s.r.s, s.now, Request{Cost: n, Partial: true}, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	if d.Granted == 0 {
		return
	}
	if err := s.r.ls.Charge(s.r.a, s.parts[part], s.now, d.Granted); err != nil {
		s.t.Fatal(err)
	}
	s.events = append(s.events, event{s.now.Mono, d.Granted})
	if s.l.Algorithm == SlidingCounter {
		s.counters[part].admit(s.now, d.Granted)
	}
	if s.l.Algorithm == TokenBucket || s.l.Algorithm == LeakyBucket {
		s.owed[part].admit(s.now, d.Granted)
	}
}

// rephase takes a part to a process with another clock and back, which moves its slots, windows and ticks against the
// instants, though not the ages of what it has counted.
func (s *split) rephase(part int, by int64) {
	s.t.Helper()
	ls, u := s.r.ls, s.parts[part]
	if !ls.Idle(s.r.a, u, s.now) {
		return
	}
	// A unit long ago at a phase of its own, and then nothing but the phase is left of it.
	there := newReplica(ls, Instant{Mono: s.now.Mono + by, Wall: s.now.Wall})
	if err := ls.Charge(there.a, there.s, Instant{Mono: s.now.Mono + by, Wall: s.now.Wall}, 1); err != nil {
		s.t.Fatal(err)
	}
	ls.Free(s.r.a, u)
	data := ls.Append(nil, there.a, there.s, Instant{Mono: s.now.Mono + by, Wall: s.now.Wall})
	if _, err := ls.Restore(s.r.a, u, s.now, data); err != nil {
		s.t.Fatal(err)
	}
	s.events = append(s.events, event{s.now.Mono, 1})
	s.counters[part].admit(Instant{Mono: s.now.Mono + by}, 1)
	s.counters[part].shift(-by)
	if err := ls.Charge(s.r.a, s.r.s, s.now, 1); err != nil {
		s.t.Fatal(err)
	}
}

// play runs a history of about three windows.
func (s *split) play(src source) {
	w := max(int64(s.l.Window), int64(time.Hour)/60)
	if s.l.Algorithm == TokenBucket || s.l.Algorithm == LeakyBucket {
		w = int64(Limits{s.l}.Horizon())
	}
	sequential := src.n(2) == 0 // first one part, then the other
	change := src.n(39)
	for i := range int64(40) {
		s.pass(src.n([]int64{1, w / 1000, w / 10, w / 3}[src.n(3)]))
		part := int(src.n(1))
		if sequential {
			part = int(max(min(i-change, 1), 0))
		}
		n := 1 + src.n(2)
		if src.n(5) == 0 {
			n = 1 + src.n(max(s.l.holds()/2, 1))
		}
		s.check(n, part)
	}
	s.pass(src.n(w / 5))
}

// merge adds part 1 to part 0, and returns that as a replica of its own.
func (s *split) merge() replica {
	s.t.Helper()
	ls := s.r.ls
	before := (replica{ls, s.r.a, s.parts[1]}).contents(s.now)
	if err := ls.Merge(s.r.a, s.parts[0], s.now, s.parts[1]); err != nil {
		s.t.Fatal(err)
	}
	if after := (replica{ls, s.r.a, s.parts[1]}).contents(s.now); after != before {
		s.t.Fatalf("%+v: what was merged has changed:\n got %s\nwant %s", s.l, after, before)
	}
	return replica{ls, s.r.a, s.parts[0]}
}

// in is the number of units admitted after an instant.
func (s *split) in(after int64) (n int64) {
	for _, e := range s.events {
		if e.at > after {
			n += e.n
		}
	}
	return n
}

func splitShapes(t testing.TB) []Limit {
	var few []Limit
	for i, l := range shapes(t) {
		if i%3 == 0 && l.Limit != Unlimited && l.Limit <= 1<<40 {
			l.CountDenied = false
			few = append(few, l)
		}
	}
	return few
}

// TestMergeExact: where ticks, slots and windows begin at the same instants, a merged log, sliding window, sliding
// counter and calendar window say in all respects what one says that saw everything.
func TestMergeExact(t *testing.T) {
	for i, l := range splitShapes(t) {
		if l.Algorithm == FixedWindow && l.Period == 0 || l.Algorithm >= TokenBucket {
			continue
		}
		src := seeded(uint64(i), 0)
		s := newSplit(t, src, l, origins[i%len(origins)])
		s.play(src)
		one := replica{s.r.ls, s.r.a, s.r.s}.contents(s.now)
		m := s.merge()
		if got := m.contents(s.now); got != one {
			t.Fatalf("%d: %+v:\n got %s\nwant %s", i, l, got, one)
		}
		// And goes on to.
		for range 10 {
			s.now = later(s.now, time.Duration(src.n(max(int64(l.Window), 1e9)/4)))
			if x, y := m.ask(t, s.now, 2), s.r.ask(t, s.now, 2); x[0] != y[0] {
				t.Fatalf("%d: %+v:\n got %+v\nwant %+v", i, l, x[0], y[0])
			}
		}
	}
}

// TestMergePhases: where they do not, nothing is admitted that the limit forbids, and little is held back.
func TestMergePhases(t *testing.T) {
	for i, l := range splitShapes(t) {
		if l.Algorithm == FixedWindow || l.Algorithm >= TokenBucket {
			continue
		}
		src := seeded(uint64(i), 0)
		s := newSplit(t, src, l, origins[i%len(origins)])
		w := int64(l.Window)
		for part := range s.parts {
			s.rephase(part, src.n(2*w))
		}
		s.play(src)
		// The windows of the parts in which something is in use, the later one last, and the units that they know.
		var phases []int64
		var known []event
		for _, o := range s.counters {
			prev, cur, elapsed := o.windows(s.now)
			if known = slices.Concat(known, prev, cur); len(prev)+len(cur) > 0 {
				phases = append(phases, s.now.Mono-elapsed)
			}
		}
		slices.Sort(phases)
		var slack int64 // how late a unit may expire
		switch l.Algorithm {
		case SlidingLog:
			slack = 2 << l.tickShift()
		case SlidingWindow:
			slack = 2 * slidingWindow{}.width(&l)
		}
		// As the merged state runs off, it says at every instant what the units admitted so far say.
		m := s.merge()
		for at := s.now; ; at = later(at, time.Duration(1+src.n(w/7))) {
			used := s.r.ls.Used(m.a, m.s, at, 0)
			least, most := s.in(at.Mono-w), s.in(at.Mono-w-slack)
			if l.Algorithm == SlidingCounter {
				least, most = 0, s.in(s.now.Mono-2*w)
				for j, p := range phases {
					o := counterOracle{l, p, known}
					least = max(least, o.used(at))
					if j == len(phases)-1 && at.Mono-w >= s.now.Mono {
						most = o.used(later(at, -l.Window))
					}
				}
			}
			if used < least || used > most {
				t.Fatalf("%d: %+v: %d used %v after the merge, want %d to %d", i, l, used, time.Duration(at.Mono-s.now.Mono), least, most)
			}
			if used == 0 {
				break
			}
		}
	}
}

// TestMergeTicks: what does not lie on the ticks of s goes to the next, not beyond now's.
func TestMergeTicks(t *testing.T) {
	ls := Limits{{Algorithm: SlidingLog, Limit: 9, Window: time.Minute}}
	r, there := newReplica(ls, Instant{}), newReplica(ls, Instant{})
	for _, at := range []int64{64, 128} {
		r.ask(t, Instant{Mono: at}, 1)
	}
	for _, at := range []int64{32, 128, 160} {
		there.ask(t, Instant{Mono: at}, 1)
	}
	// What was at 160 there is at 167 here.
	u := make(State, ls.Words())
	if _, err := ls.Restore(r.a, u, Instant{Mono: 167}, ls.Append(nil, there.a, there.s, Instant{Mono: 160})); err != nil {
		t.Fatal(err)
	}
	if _, err := ls.Decide(r.a, u, Instant{Mono: 190}, Request{Cost: 1}, nil); err != nil { // 199
		t.Fatal(err)
	}
	if err := ls.Merge(r.a, r.s, Instant{Mono: 191}, u); err != nil {
		t.Fatal(err)
	}
	got := logEvents(&ls[0], r.a, r.s[1:])
	if want := "[{64 2} {128 1} {160 1} {192 2}]"; fmt.Sprint(got) != want {
		t.Errorf("entries %d, want %s", got, want)
	}
}

// TestMergeFixed: the later window with both counts.
func TestMergeFixed(t *testing.T) {
	for i, l := range splitShapes(t) {
		if l.Algorithm != FixedWindow || l.Period != 0 {
			continue
		}
		src := seeded(uint64(i), 0)
		s := newSplit(t, src, l, origins[i%len(origins)])
		s.play(src)
		want, start := int64(0), int64(-1<<63)
		for _, u := range s.parts {
			if n := s.r.ls.Used(s.r.a, u, s.now, 0); n > 0 {
				want, start = want+n, max(start, int64(u[1]))
			}
		}
		m := s.merge()
		if got := s.r.ls.Used(m.a, m.s, s.now, 0); got != want {
			t.Fatalf("%d: %+v: %d used, want %d", i, l, got, want)
		}
		if d := m.ask(t, s.now, 0)[0]; want > 0 && d.ResetAfter != l.later(time.Duration(start+int64(l.Window)-s.now.Mono), want) {
			t.Fatalf("%d: %+v: %+v", i, l, d)
		}
	}
}

// TestMergeBuckets: what the two owe, exactly; and that one bucket does not owe more, but for what was repaid twice.
func TestMergeBuckets(t *testing.T) {
	for i, l := range splitShapes(t) {
		if l.Algorithm != TokenBucket && l.Algorithm != LeakyBucket {
			continue
		}
		src := seeded(uint64(i), 0)
		s := newSplit(t, src, l, origins[i%len(origins)])
		s.play(src)
		m := s.merge()
		o := bucketOracle{l, new(big.Rat)}
		o.setDeficit(s.now, new(big.Rat).Add(s.owed[0].deficit(s.now), s.owed[1].deficit(s.now)))
		one := s.r.ls.Used(s.r.a, s.r.s, s.now, 0)
		twice := s.both.Mul(s.both, new(big.Rat).SetFrac64(l.Limit, int64(l.Window)))
		for range 5 {
			if got, want := s.r.ls.Used(m.a, m.s, s.now, 0), o.used(s.now); got != want || one > got+ceilRat(twice) {
				t.Fatalf("%d: %+v: owes %d, want %d, one bucket %d and %v repaid twice", i, l, got, want, one, twice)
			}
			s.now = later(s.now, time.Duration(src.n(int64(Limits{l}.Horizon())/10)))
			one = 0
		}
	}
}

// TestMergeCalendar: the same window adds up, and an earlier one is forgotten.
func TestMergeCalendar(t *testing.T) {
	const day = int64(24 * time.Hour)
	for _, tt := range []struct {
		s, t  int64 // wall clock at which each was charged: s for 3, t for 4
		limit int64
		carry bool
		want  int64
	}{{day, day + 5, 10, false, 7}, {day, 2 * day, 10, false, 4}, {2 * day, day, 10, false, 3},
		{day, day + 5, 2, true, 7}, {day, 2 * day, 2, true, 5}, {2 * day, day, 2, true, 5}, {3 * day, day, 2, true, 3}, {day, 4 * day, 2, true, 4}} {
		ls := Limits{{Algorithm: FixedWindow, Limit: tt.limit, Period: Day, CarryDebt: tt.carry}}
		r := newReplica(ls, Instant{Wall: tt.s})
		u := make(State, ls.Words())
		ls.Init(u, Instant{})
		for _, c := range []struct {
			s    State
			wall int64
			n    int64
		}{{r.s, tt.s, 3}, {u, tt.t, 4}} {
			if err := ls.Charge(r.a, c.s, Instant{Wall: c.wall}, c.n); err != nil {
				t.Fatal(err)
			}
		}
		// The wall clock was set back to the first day: windows that were opened stay.
		if err := ls.Merge(r.a, r.s, Instant{Wall: day}, u); err != nil {
			t.Fatal(err)
		}
		if got := ls.Used(r.a, r.s, Instant{Wall: day}, 0); got != tt.want {
			t.Errorf("%+v: %d used", tt, got)
		}
	}
}

// TestMergeSeveral: each limit by itself, and memory for all or for none.
func TestMergeSeveral(t *testing.T) {
	ls := Limits{
		{Algorithm: SlidingLog, Limit: 9000, Window: time.Minute},
		{Algorithm: TokenBucket, Limit: Unlimited},
		{Algorithm: TokenBucket, Limit: 9000, Window: time.Hour},
		{Algorithm: SlidingLog, Limit: 8000, Window: time.Hour},
	}
	budget := &testBudget{1 << 20}
	a, s, u := NewArena(budget), make(State, ls.Words()), make(State, ls.Words())
	ls.Init(s, Instant{})
	ls.Init(u, Instant{})
	for i := range 3000 {
		for _, v := range []State{s, u} {
			if _, err := ls.Decide(a, v, Instant{Mono: int64(i) * 1e4}, Request{Cost: 1}, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	now := Instant{Mono: 30e6}
	before, mark := (replica{ls, a, s}).contents(now), ls.Mark(s)
	blocks := liveBlocks(a)
	failures := 0
	for ; ; failures++ {
		budget.left = failures * PageBytes
		a.Trim()
		if err := ls.Merge(a, s, now, u); err == nil {
			break
		} else if err != ErrNoMemory || failures > 100 {
			t.Fatal(err)
		}
		if got := (replica{ls, a, s}).contents(now); got != before || ls.Mark(s) != mark || liveBlocks(a) != blocks {
			t.Fatalf("a merge without memory: %d blocks, were %d\n got %s\nwant %s", liveBlocks(a), blocks, got, before)
		}
	}
	if failures == 0 {
		t.Error("memory sufficed at once")
	}
	for i, want := range []int64{6000, 0, 6000, 6000} {
		if got := ls.Used(a, s, now, i); got != want {
			t.Errorf("limit %d: %d used, want %d", i, got, want)
		}
	}
	ls.Free(a, s)
	ls.Free(a, u)
	if n := liveBlocks(a); n != 0 {
		t.Errorf("%d blocks are nobody's", n)
	}
}

// TestMergeLongLogs has logs of many segments, and runs.
func TestMergeLongLogs(t *testing.T) {
	for seed := range uint64(6) {
		src := seeded(seed, 0)
		l := Limit{Algorithm: SlidingLog, Limit: 20_000, Window: time.Second}
		s := newSplit(t, src, l, origins[0])
		for range 6000 {
			s.pass(src.n(200_000))
			n := int64(1)
			if src.n(9) == 0 {
				n = src.n(20)
			}
			s.check(n, int(src.n(1)))
		}
		one := replica{s.r.ls, s.r.a, s.r.s}.contents(s.now)
		m := s.merge()
		if got := m.contents(s.now); got != one {
			t.Fatal("the merged log differs")
		}
		for _, u := range []State{m.s, s.parts[1], s.r.s} {
			s.r.ls.Free(s.r.a, u)
		}
		if n := liveBlocks(s.r.a); n != 0 {
			t.Errorf("%d blocks are nobody's", n)
		}
	}
}

// TestMergeLeases has several states part from each other and meet again, and knows every lease by its id.
func TestMergeLeases(t *testing.T) {
	for seed := range uint64(18) {
		r := rand.New(rand.NewPCG(seed, 9))
		l := Limit{Algorithm: Concurrency, Limit: MaxLimit, Window: time.Minute}
		ls, a := Limits{l}, NewArena(nil)
		now := Instant{}
		type side struct {
			s    State
			live map[uint64]event
			anon []event
		}
		newSide := func() *side {
			d := &side{s: make(State, ls.Words()), live: map[uint64]event{}}
			ls.Init(d.s, now)
			return d
		}
		act := func(d *side, crowd int) {
			for range crowd {
				now.Mono += r.Int64N(int64(time.Second) / 20)
				for id, e := range d.live {
					if e.at <= now.Mono {
						delete(d.live, id)
					}
				}
				switch k := r.IntN(20); {
				case k < 10:
					n, ttl := 1+r.Int64N(3), 1+r.Int64N(int64(l.Window))
					got, err := ls.Decide(a, d.s, now, Request{Cost: n, Nonce: r.Uint64(), TTL: time.Duration(ttl)}, nil)
					if err != nil {
						t.Fatal(err)
					}
					d.live[got.Lease] = event{now.Mono + ttl, n}
				case k == 10:
					if err := ls.Charge(a, d.s, now, 2); err != nil {
						t.Fatal(err)
					}
					d.anon = append(d.anon, event{now.Mono + int64(l.Window), 2})
				default:
					for id, e := range d.live { // any
						if k < 15 {
							ttl := 1 + r.Int64N(int64(l.Window))
							if _, ok := ls.Renew(a, d.s, now, id, time.Duration(ttl)); !ok {
								t.Fatalf("seed %d: %x cannot be renewed", seed, id)
							}
							d.live[id] = event{now.Mono + ttl, e.n}
						} else {
							if !ls.Release(a, d.s, now, id) || ls.Release(a, d.s, now, id) {
								t.Fatalf("seed %d: %x cannot be released, or twice", seed, id)
							}
							delete(d.live, id)
						}
						break
					}
				}
			}
		}
		judge := func(d *side) {
			t.Helper()
			var want int64
			for _, e := range d.live {
				if e.at > now.Mono {
					want += e.n
				}
			}
			for _, e := range d.anon {
				if e.at > now.Mono {
					want += e.n
				}
			}
			if got := ls.Used(a, d.s, now, 0); got != want {
				t.Fatalf("seed %d: %d used, want %d", seed, got, want)
			}
		}
		x := newSide()
		crowd := []int{5, 40, 400}[seed%3]
		act(x, crowd)
		for range 6 {
			// The other side begins as a copy, or as nothing.
			y := newSide()
			if r.IntN(3) > 0 {
				if _, err := ls.Restore(a, y.s, now, ls.Append(nil, a, x.s, now)); err != nil {
					t.Fatal(err)
				}
				for id, e := range x.live {
					y.live[id] = e
				}
				y.anon = append(y.anon, x.anon...)
			}
			act(x, crowd)
			act(y, crowd)
			judge(x)
			judge(y)
			if err := ls.Merge(a, x.s, now, y.s); err != nil {
				t.Fatal(err)
			}
			for id, e := range y.live {
				x.live[id] = event{max(e.at, x.live[id].at), e.n}
			}
			x.anon = append(x.anon, y.anon...)
			judge(x)
			judge(y)
			ls.Free(a, y.s)
			if r.IntN(2) == 0 { // a move knows the moved leases, too
				data := ls.Append(nil, a, x.s, now)
				ls.Free(a, x.s)
				if n := liveBlocks(a); n != 0 {
					t.Fatalf("%d blocks are nobody's", n)
				}
				if _, err := ls.Restore(a, x.s, now, data); err != nil {
					t.Fatal(err)
				}
				judge(x)
			}
			act(x, crowd)
			judge(x)
		}
		for id, e := range x.live {
			if e.at > now.Mono && !ls.Release(a, x.s, now, id) {
				t.Fatalf("seed %d: %x is lost", seed, id)
			}
		}
		x.live = nil
		judge(x)
		if !ls.Idle(a, x.s, later(now, l.Window)) || liveBlocks(a) != 0 {
			t.Fatalf("seed %d: %d blocks are nobody's", seed, liveBlocks(a))
		}
	}
}

// TestMovedLease: a lease that had to move is found by its own id, not by the slot that it is in, and no longer than it
// lives, even if its nonce is drawn again.
func TestMovedLease(t *testing.T) {
	ls, a := Limits{{Algorithm: Concurrency, Limit: 9, Window: time.Minute}}, NewArena(nil)
	s, u := make(State, ls.Words()), make(State, ls.Words())
	acquire := func(s State, nonce uint64) uint64 {
		d, err := ls.Decide(a, s, Instant{}, Request{Cost: 1, Nonce: nonce}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return d.Lease
	}
	ls.Init(s, Instant{})
	ls.Init(u, Instant{})
	stays, moves := acquire(s, 5), acquire(u, 7)
	if stays&slotMask != moves&slotMask {
		t.Fatal("they are in different slots")
	}
	if err := ls.Merge(a, s, Instant{}, u); err != nil {
		t.Fatal(err)
	}
	slot, ok := concurrency{}.find(a, s[1:], moves)
	if !ok || uint64(slot) == moves&slotMask {
		t.Fatalf("in slot %d, %v", slot, ok)
	}
	if ls.Release(a, s, Instant{}, 7<<slotBits|uint64(slot)) {
		t.Error("released by an id that it does not have")
	}
	if !ls.Release(a, s, Instant{}, moves) {
		t.Error("not released")
	}
	if again := acquire(s, 7); again != 7<<slotBits|uint64(slot) {
		t.Errorf("%x is in another slot than %d", again, slot)
	}
	if ls.Release(a, s, Instant{}, moves) {
		t.Error("released twice")
	}
	if ls.Used(a, s, Instant{}, 0) != 2 {
		t.Error("the leases that there are do not count")
	}
}

// TestMergeLeasesNoMemory: without memory for all of them the leases are as they were.
func TestMergeLeasesNoMemory(t *testing.T) {
	ls := Limits{{Algorithm: Concurrency, Limit: 10_000, Window: time.Minute}}
	budget := &testBudget{1 << 24}
	a := NewArena(budget)
	s, u := make(State, ls.Words()), make(State, ls.Words())
	var ids []uint64
	for i, v := range []State{s, u} {
		ls.Init(v, Instant{})
		for j := range 300 {
			d, err := ls.Decide(a, v, Instant{}, Request{Cost: 1, Nonce: uint64(2*j+i+1) * 0x9e3779b97f4a7}, nil)
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, d.Lease)
		}
	}
	before, blocks, failures := (replica{ls, a, s}).contents(Instant{}), liveBlocks(a), 0
	for ; ; failures++ {
		a.Trim()
		budget.left = failures * PageBytes
		err := ls.Merge(a, s, Instant{}, u)
		if err == nil {
			break
		}
		if got := (replica{ls, a, s}).contents(Instant{}); err != ErrNoMemory || got != before || liveBlocks(a) != blocks {
			t.Fatalf("%v: %d blocks, were %d", err, liveBlocks(a), blocks)
		}
	}
	if failures < 3 {
		t.Errorf("only %d failures", failures)
	}
	for _, id := range ids {
		if !ls.Release(a, s, Instant{}, id) {
			t.Fatalf("%x is lost", id)
		}
	}
	ls.Free(a, u)
	if n := liveBlocks(a); n != 0 || ls.Used(a, s, Instant{}, 0) != 0 {
		t.Errorf("%d blocks are nobody's", n)
	}
}

// TestMergeManyLeases: look-ups of moved leases take about the same time however many there are.
func TestMergeManyLeases(t *testing.T) {
	const n = 50_000
	ls, a := Limits{{Algorithm: Concurrency, Limit: MaxLimit, Window: time.Hour}}, NewArena(nil)
	states := []State{make(State, ls.Words()), make(State, ls.Words())}
	var ids []uint64
	r := rand.New(rand.NewPCG(1, 1))
	for _, s := range states {
		ls.Init(s, Instant{})
		for range n {
			d, err := ls.Decide(a, s, Instant{}, Request{Cost: 1, Nonce: r.Uint64()}, nil)
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, d.Lease)
		}
	}
	if err := ls.Merge(a, states[0], Instant{}, states[1]); err != nil {
		t.Fatal(err)
	}
	s := states[0][1:]
	longest := 0
	for _, id := range ids[n:] {
		steps := 1
		for i := (concurrency{}).hash(s, id); (concurrency{}).moved(a, s, i)[0] != id; i = (concurrency{}).nextPlace(s, i) {
			steps++
		}
		longest = max(longest, steps)
	}
	if longest > 200 {
		t.Errorf("%d steps to a moved lease", longest)
	}
	for i, id := range ids {
		if !ls.Release(a, states[0], Instant{}, id) {
			t.Fatalf("lease %d is lost", i)
		}
	}
	if got := fmt.Sprint(ls.Used(a, states[0], Instant{}, 0)); got != "0" {
		t.Errorf("%s used", got)
	}
}

// TestChargeApart charges two sliding counters and what holds some of each apart, moves them to other processes and merges them: what is held
// apart counts each unit for as long as its answer said, and not for longer but for the time of the moves and, after the merge, a Window.
func TestChargeApart(t *testing.T) {
	const w = int64(time.Second)
	ls := Limits{{Algorithm: SlidingCounter, Limit: 1000, Window: time.Duration(w)}}
	type charge struct {
		units, until int64
		late         int64 // for how much longer it may count
	}
	type side struct {
		whole, apart State
		charges      []*charge // of apart
	}
	for seed := range uint64(4000) {
		rng := rand.New(rand.NewPCG(seed, 31))
		a, now := NewArena(nil), Instant{Mono: 1e15 + rng.Int64N(w)}
		sides := []*side{{}, {}}
		add := func(s *side, past bool) {
			n := 1 + rng.Int64N(20)
			d, err := ls.Decide(a, s.whole, now, Request{Cost: n}, nil)
			if err != nil || !d.Allowed {
				t.Fatal(d, err)
			}
			c := &charge{units: n, until: now.Mono + int64(d.ResetAfter)}
			if past {
				return
			}
			if err := ls.ChargeApart(a, s.apart, now, s.whole, n); err != nil {
				t.Fatal(err)
			}
			s.charges = append(s.charges, c)
		}
		moved := func(s State, there Instant) State {
			u := make(State, ls.Words())
			if _, err := ls.Restore(a, u, there, ls.Append(nil, a, s, now)); err != nil {
				t.Fatal(err)
			}
			return u
		}
		move := func(s *side) {
			there := later(now, time.Duration(rng.Int64N(w)))
			whole, apart := moved(s.whole, there), moved(s.apart, there)
			for _, c := range s.charges {
				c.late += there.Mono - now.Mono
			}
			s.whole, s.apart, now = whole, apart, there
		}
		judge := func(of []*side, step string) {
			for i, s := range of {
				least, most := new(big.Int), new(big.Int)
				for _, c := range s.charges {
					count := func(to *big.Int, until int64) {
						to.Add(to, big.NewInt(c.units*min(max(until-now.Mono, 0), w)))
					}
					count(least, c.until)
					count(most, c.until+c.late)
				}
				used := func(s State) *big.Int {
					t := ls.sliding(s, 0, now)
					if t == nil {
						return new(big.Int)
					}
					return big.NewInt(int64(t[1])*slidingCounter{}.covered(&ls[0], t, now) + int64(t[2])*w)
				}
				if got := used(s.apart); got.Cmp(least) < 0 || got.Cmp(most) > 0 {
					t.Fatalf("seed %d: after %s %d counts %v at %d, not %v to %v", seed, step, i, got, now.Mono, least, most)
				}
			}
		}
		for _, s := range sides {
			s.whole, s.apart = make(State, ls.Words()), make(State, ls.Words())
			ls.Init(s.whole, now)
			ls.Init(s.apart, now)
			for range rng.IntN(3) {
				now.Mono += rng.Int64N(w / 2)
				add(s, true)
			}
			move(s)
		}
		for step := range 30 {
			now.Mono += rng.Int64N(w / 3)
			s := sides[rng.IntN(2)]
			if rng.IntN(6) == 0 {
				move(s)
			} else {
				add(s, false)
			}
			judge(sides, fmt.Sprint("step ", step))
		}
		s, other := sides[0], sides[1]
		if ls.Differ(s.whole, now, other.whole) {
			ls.Match(s.whole, now, other.whole, []State{s.apart, other.apart})
			for _, c := range slices.Concat(s.charges, other.charges) {
				c.late += w
			}
		}
		judge(sides, "the match")
		if err := ls.Merge(a, s.whole, now, other.apart); err != nil {
			t.Fatal(err)
		}
		for step := range 15 {
			now.Mono += rng.Int64N(w / 4)
			judge(sides, fmt.Sprint("the merge, step ", step))
		}
	}
}

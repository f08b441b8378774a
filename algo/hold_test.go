package algo

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

var holdHistories = flag.Uint64("histories", 300, "histories of each algorithm and mode in TestGiveBack")

// holdMode says what happens in a history of TestGiveBack besides reservations, checks, commits and cancels.
type holdMode struct {
	charges bool // regardless of room
	refunds bool
	moves   bool // to processes with other clocks
	expires bool // reservations end by themselves
}

// holdEvent is something that has happened to a state. A replay repeats it without the units that were given back.
type holdEvent struct {
	kind byte // 'c' charge, 'r' refund, 'm' move
	at   Instant
	n    int64
	back int64 // cancelled
}

// holdCopy is a copy of the state, and the mark of what it has.
type holdCopy struct {
	s    State
	mark uint64
}

// holdWorld is one history of TestGiveBack.
type holdWorld struct {
	t     *testing.T
	rng   *rand.Rand
	mode  holdMode
	ls    Limits
	scale int64 // the longest window
	// Clocks differ by multiples of phase: a state without the charge may have been empty in between, and have begun
	// its windows anew.
	phase     int64
	a         *Arena
	s         State
	start     Instant
	now       Instant
	events    []*holdEvent
	holds     Holds
	of        []*holdEvent     // of holds
	copies    [2]holdCopy      // of processes that follow
	refunded  [MaxLimits]int64 // units that refunds found
	different bool             // some cancel was not exact
	log       []string
}

func (w *holdWorld) say(format string, args ...any) {
	w.log = append(w.log, fmt.Sprintf("%v: ", time.Duration(w.now.Mono-w.start.Mono))+fmt.Sprintf(format, args...))
}

func (w *holdWorld) fail(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("%s\n%+v\n%s", fmt.Sprintf(format, args...), w.ls, strings.Join(w.log, "\n"))
}

// found is how many units a refund could find.
func found(ls Limits, a *Arena, s State, now Instant) (n [MaxLimits]int64) {
	ls.walk(a, s, s.tick(now), func(k int, c counter, t []uint64) {
		if n[k] = c.used(&ls[k], a, t, s.Latest(now)); ls[k].Algorithm == SlidingCounter {
			n[k] = int64(t[1] + t[2])
		}
	})
	return n
}

// moved returns a state as another process has it at an instant there.
func (w *holdWorld) moved(s State, now, there Instant) State {
	next := make(State, w.ls.Words())
	if _, err := w.ls.Restore(w.a, next, there, w.ls.Append(nil, w.a, s, now)); err != nil {
		w.fail("%v", err)
	}
	w.ls.Free(w.a, s)
	return next
}

// replay returns the state without what was given back and without refusals that were counted, and how many units
// refunds found.
func (w *holdWorld) replay() (s State, refunded [MaxLimits]int64) {
	s = make(State, w.ls.Words())
	w.ls.Init(s, w.start)
	for _, e := range w.events {
		switch e.kind {
		case 'c':
			if err := w.ls.Charge(w.a, s, e.at, e.n-e.back); err != nil {
				w.fail("%v", err)
			}
		case 'r':
			for k, n := range found(w.ls, w.a, s, e.at) {
				refunded[k] += min(n, e.n)
			}
			w.ls.Refund(w.a, s, e.at, e.n)
		case 'm':
			s = w.moved(s, e.at, Instant{e.at.Mono + e.n, e.at.Wall})
		}
	}
	return s, refunded
}

// standing is all that can be asked of one limit.
type standing struct {
	used, reset int64
	waits       []int64 // for one unit, two, and so on
}

func standings(ls Limits, a *Arena, s State, now Instant) (all []standing) {
	now = s.tick(now)
	ls.walk(a, s, now, func(k int, c counter, t []uint64) {
		l := &ls[k]
		v := standing{used: c.used(l, a, t, now), reset: int64(c.resetAfter(l, a, t, now))}
		for n := int64(1); n <= l.holds(); n++ {
			v.waits = append(v.waits, int64(l.wait(c, a, t, now, n)))
		}
		all = append(all, v)
	})
	return all
}

// firstHit reports whether windows begin with charges.
func (w *holdWorld) firstHit() bool {
	return slices.ContainsFunc(w.ls, func(l Limit) bool { return l.Algorithm == FixedWindow && l.Period == 0 })
}

func (w *holdWorld) charge(always, hold bool) {
	if w.firstHit() && w.ls.Idle(w.a, w.s, w.now) {
		hold = false // a window that a reservation opens stays where it began, see TestWindowOfAReservation
	}
	n := 1 + w.rng.Int64N(max(w.ls[0].holds()/3, 1))
	w.ls.Lower(w.s, w.now, w.holds)
	if always {
		if err := w.ls.Charge(w.a, w.s, w.now, n); err != nil {
			w.fail("%v", err)
		}
	} else if d, err := w.ls.Decide(w.a, w.s, w.now, Request{Cost: n}, nil); err != nil {
		w.fail("%v", err)
	} else if !d.Allowed {
		w.say("refused %d", n)
		return
	}
	e := &holdEvent{kind: 'c', at: w.now, n: n}
	w.events = append(w.events, e)
	if hold {
		w.holds, w.of = append(w.holds, w.ls.NewHold(w.s)), append(w.of, e)
	}
	w.say("charge %d, always %v, hold %v", n, always, hold)
}

func (w *holdWorld) refund() {
	n := 1 + w.rng.Int64N(max(w.ls[0].holds()/3, 1))
	for k, there := range found(w.ls, w.a, w.s, w.now) {
		w.refunded[k] += min(there, n)
	}
	w.say("refund %d: %d", n, w.ls.Refund(w.a, w.s, w.now, n))
	w.events = append(w.events, &holdEvent{kind: 'r', at: w.now, n: n})
}

// move brings everything to a process with another clock.
func (w *holdWorld) move() {
	there := Instant{w.now.Mono + w.rng.Int64N(w.scale/w.phase+1)*w.phase, w.now.Wall}
	w.events = append(w.events, &holdEvent{kind: 'm', at: w.now, n: there.Mono - w.now.Mono})
	data := w.ls.AppendHolds(nil, w.a, w.s, w.now, w.holds)
	next := w.moved(w.s, w.now, there)
	hs, rest, err := w.ls.ReadHolds(w.a, next, there, len(w.holds), data)
	if err != nil || len(rest) > 0 {
		w.fail("%v, %d bytes left", err, len(rest))
	}
	w.say("move")
	w.s, w.now, w.holds = next, there, hs
	for i := range w.copies {
		w.ls.Free(w.a, w.copies[i].s)
		w.ls.Init(w.copies[i].s, there)
		w.copies[i].mark = 0
	}
}

// tell brings one of the copies up to date.
func (w *holdWorld) tell() {
	to := &w.copies[w.rng.IntN(len(w.copies))]
	data := w.ls.AppendSince(nil, w.a, w.s, w.now, to.mark)
	if rest, err := w.ls.Extend(w.a, to.s, w.now, data); err != nil || len(rest) > 0 {
		w.fail("%v, %d bytes left", err, len(rest))
	}
	to.mark = w.ls.Mark(w.s)
	got, want := standings(w.ls, w.a, to.s, w.now), standings(w.ls, w.a, w.s, w.now)
	if fmt.Sprint(got) != fmt.Sprint(want) {
		w.fail("the copy %v\nis not %v", got, want)
	}
}

// giveBack ends a reservation and judges the state.
func (w *holdWorld) giveBack() {
	i := w.rng.IntN(len(w.holds))
	e := w.of[i]
	if w.mode.expires && w.rng.IntN(3) == 0 {
		w.say("expire %d", i)
	} else {
		e.back = e.n
		if w.rng.IntN(3) == 0 {
			e.back = w.rng.Int64N(e.n + 1)
		}
		n := w.ls.GiveBack(w.a, w.s, w.now, w.holds, i, e.back)
		w.say("give back %d of %d: %d", e.back, i, n)
		if n > e.back {
			w.fail("%d of %d units were given back", n, e.back)
		}
	}
	w.holds = w.holds.Remove(i)
	w.of = slices.Delete(w.of, i, i+1)
	w.judge()
}

// judge holds the state to one without what was given back. It never has more room, but for what refunds found only
// because of units that were given back later.
func (w *holdWorld) judge() {
	want, refunded := w.replay()
	has, without := standings(w.ls, w.a, w.s, w.now), standings(w.ls, w.a, want, w.now)
	for k := range has {
		more := max(w.refunded[k]-refunded[k], 0)
		g, v := &has[k], &without[k]
		same := g.used == v.used && slices.Equal(g.waits, v.waits)
		if same = same && g.reset == v.reset; !same {
			w.different = true
		}
		if g.used+more < v.used {
			w.fail("%d units are in use of %d", g.used, v.used)
		}
		for n := range g.waits {
			if n >= int(more) && g.waits[n] < v.waits[n-int(more)] {
				w.fail("%d units pass after %d, not %d", n+1, g.waits[n], v.waits[n-int(more)])
			}
		}
	}
	w.ls.Free(w.a, want)
}

func (w *holdWorld) step() {
	if w.rng.IntN(3) > 0 {
		d := w.rng.Int64N(w.scale/6 + 1)
		switch w.rng.IntN(8) {
		case 0:
			d = 1
		case 1:
			d = w.scale / 10
		case 2:
			d = w.rng.Int64N(w.scale + 1)
		}
		w.now.Mono += d
		w.now.Wall += d
	}
	switch op := w.rng.IntN(12); {
	case op < 6:
		always := w.mode.charges && w.rng.IntN(3) == 0
		w.charge(always, op < 3)
	case op == 6 && w.mode.refunds && !w.firstHit(): // which may empty a window
		w.refund()
	case op < 10 && len(w.holds) > 0:
		w.giveBack()
	case op == 10 && w.mode.moves:
		w.move()
	case op == 11:
		w.tell()
	}
}

// holdKind makes limits for TestGiveBack. exact says that without refunds the state is the same as one without the
// charge.
type holdKind struct {
	name  string
	exact bool
	limit func(*rand.Rand) Limit
}

// limits returns one limit, or where limit is nil, several of other kinds.
func (k *holdKind) limits(rng *rand.Rand) (ls Limits) {
	if k.limit != nil {
		ls = Limits{k.limit(rng)}
		ls[0].Limit = 3 + rng.Int64N(28)
		return ls
	}
	for _, i := range []int{0, 1, 2, 4, 6, 0} {
		l := holdKinds[i].limit(rng)
		l.Limit, l.Window = 3+rng.Int64N(28), time.Duration(1+2*rng.IntN(2))*time.Second
		if l.Slots > 0 {
			l.Slots = 8 // the width of which divides 3 s
		}
		ls = append(ls, l)
	}
	return ls
}

var holdKinds = []holdKind{
	{"sliding_log", true, func(r *rand.Rand) Limit {
		if r.IntN(4) == 0 {
			return Limit{Algorithm: SlidingLog, Window: 40 * 24 * time.Hour} // with ticks of milliseconds
		}
		return Limit{Algorithm: SlidingLog, Window: holdWindow(r)}
	}},
	{"sliding_window", true, func(r *rand.Rand) Limit {
		return Limit{Algorithm: SlidingWindow, Window: holdWindow(r), Slots: 1 + r.Int32N(12)}
	}},
	{"sliding_counter", true, func(r *rand.Rand) Limit {
		return Limit{Algorithm: SlidingCounter, Window: holdWindow(r)}
	}},
	{"fixed_window", true, func(r *rand.Rand) Limit { return Limit{Algorithm: FixedWindow, Window: holdWindow(r)} }},
	{"epoch", true, func(r *rand.Rand) Limit {
		return Limit{Algorithm: FixedWindow, Period: Epoch, Window: time.Duration(1+r.IntN(3)) * time.Second}
	}},
	{"calendar", true, func(*rand.Rand) Limit { return Limit{Algorithm: FixedWindow, Period: Minute} }},
	{"token_bucket", true, func(r *rand.Rand) Limit {
		return Limit{Algorithm: TokenBucket, Capacity: 3 + r.Int64N(28), Window: holdWindow(r)}
	}},
	{"leaky_bucket", true, func(r *rand.Rand) Limit {
		return Limit{Algorithm: LeakyBucket, Capacity: 3 + r.Int64N(28), Window: holdWindow(r)}
	}},
	{"denied log", false, func(r *rand.Rand) Limit {
		return Limit{Algorithm: SlidingLog, Window: holdWindow(r), CountDenied: true}
	}},
	{"denied window", false, func(r *rand.Rand) Limit {
		return Limit{Algorithm: SlidingWindow, Window: holdWindow(r), CountDenied: true}
	}},
	{"denied counter", false, func(r *rand.Rand) Limit {
		return Limit{Algorithm: SlidingCounter, Window: holdWindow(r), CountDenied: true}
	}},
	{"denied epoch", false, func(*rand.Rand) Limit {
		return Limit{Algorithm: FixedWindow, Period: Epoch, Window: time.Second, CountDenied: true}
	}},
	{"carry epoch", false, func(r *rand.Rand) Limit {
		w := time.Duration(1+r.IntN(3)) * time.Second
		return Limit{Algorithm: FixedWindow, Period: Epoch, Window: w, CarryDebt: true}
	}},
}

func holdWindow(r *rand.Rand) time.Duration {
	return []time.Duration{time.Second, time.Second + 7, 10 * time.Millisecond, time.Minute}[r.IntN(4)]
}

// TestGiveBack makes random histories of reservations, checks, charges, refunds, commits, cancels and moves, and holds
// the state after each commit and cancel to one to which the units that were given back were never charged.
func TestGiveBack(t *testing.T) {
	modes := []holdMode{
		{}, {charges: true}, {charges: true, moves: true, expires: true}, {charges: true, refunds: true, moves: true},
	}
	kinds := append(holdKinds[:len(holdKinds):len(holdKinds)], holdKind{"several", true, nil})
	for _, kind := range kinds {
		for _, mode := range modes {
			t.Run(fmt.Sprintf("%s/%+v", kind.name, mode), func(t *testing.T) {
				t.Parallel()
				for seed := range *holdHistories {
					rng := rand.New(rand.NewPCG(seed, 77))
					holdHistory(t, kind.limits(rng), mode, rng, kind.exact)
				}
			})
		}
	}
}

func holdHistory(t *testing.T, ls Limits, mode holdMode, rng *rand.Rand, exact bool) {
	now := Instant{Mono: 1e12 + rng.Int64N(1e10), Wall: 1_800_000_000e9 + rng.Int64N(1e11)}
	w := &holdWorld{t: t, rng: rng, mode: mode, ls: ls, a: NewArena(nil), start: now, now: now}
	w.s = make(State, ls.Words())
	for i := range ls {
		w.scale, w.phase = max(w.scale, int64(ls[i].longest())), 1
		switch c := ls[i].counter().(type) {
		case slidingLog:
			w.phase = 1 << ls[i].tickShift()
		case slidingWindow:
			w.phase = c.width(&ls[i])
		case slidingCounter:
			w.phase = int64(ls[i].Window)
		}
	}
	if len(ls) > 1 {
		w.phase = int64(3 * time.Second)
	}
	ls.Init(w.s, now)
	for i := range w.copies {
		w.copies[i].s = make(State, ls.Words())
		ls.Init(w.copies[i].s, now)
	}
	for range 30 {
		w.step()
	}
	if exact && !mode.refunds && w.different {
		w.fail("a cancel has left a trace")
	}
	ls.Free(w.a, w.s)
	for i := range w.copies {
		ls.Free(w.a, w.copies[i].s)
	}
	if w.a.InUse() != 0 {
		w.fail("%d bytes are in use", w.a.InUse())
	}
}

// TestReadHolds reads holds with random bytes in them, and gives back what they say. A peer may send anything: no state
// breaks, and nothing is given back that is not in use.
func TestReadHolds(t *testing.T) {
	for seed := range uint64(20000) {
		rng := rand.New(rand.NewPCG(seed, 79))
		ls, a, now := fuzzLimits(t, byte(rng.IntN(9))), NewArena(nil), Instant{Mono: 1e15, Wall: 1_700_000_000e9}
		if rng.IntN(4) == 0 {
			ls = fuzzLimits(t, 10)
		}
		s, hs := make(State, ls.Words()), Holds(nil)
		ls.Init(s, now)
		for range 4 {
			now.Mono += rng.Int64N(1e8)
			ls.Lower(s, now, hs)
			must.NoError(t, ls.Charge(a, s, now, 1+rng.Int64N(3)))
			hold := ls.NewHold(s)
			if rng.IntN(4) == 0 {
				hold = nil
			}
			hs = append(hs, hold)
		}
		data := ls.AppendHolds(nil, a, s, now, hs)
		for range 1 + rng.IntN(4) {
			data[rng.IntN(len(data))] = byte(rng.Uint32())
		}
		hs, _, err := ls.ReadHolds(a, s, now, len(hs), data)
		if err != nil {
			continue
		}
		for len(hs) > 0 {
			i := rng.IntN(len(hs))
			used, most := found(ls, a, s, now), int64(0)
			for k := range ls {
				most = max(most, used[k])
			}
			n := ls.GiveBack(a, s, now, hs, i, 1+rng.Int64N(3))
			must.True(t, n <= most, "seed %d: %d units were given back of %d", seed, n, most)
			hs = hs.Remove(i)
		}
		ls.Free(a, s)
	}
}

// TestWindowOfAReservation: a fixed window that a reservation opened stays where it began, and gives back what it
// counts of the reservation. One that has ended gives nothing back, also where its debt is carried over.
func TestWindowOfAReservation(t *testing.T) {
	for _, carry := range []bool{false, true} {
		ls := Limits{{Algorithm: FixedWindow, Limit: 10, Window: time.Second, CarryDebt: carry}}
		a, s, hs := NewArena(nil), make(State, ls.Words()), Holds(nil)
		at := func(d time.Duration) Instant { return Instant{Mono: 1e12 + int64(d)} }
		charge := func(d time.Duration, n int64, hold bool) {
			t.Helper()
			must.NoError(t, ls.Charge(a, s, at(d), n))
			if hold {
				hs = append(hs, ls.NewHold(s))
			}
		}
		want := func(d time.Duration, back, used int64, reset time.Duration) {
			t.Helper()
			n := ls.GiveBack(a, s, at(d), hs, 0, 4)
			hs = hs.Remove(0)
			got, err := ls.Decide(a, s, at(d), Request{}, nil)
			expect.True(t, n == back && err == nil && 10-got.Remaining == used && got.ResetAfter == reset,
				"carry %v, after %v: %d were given back, want %d; %+v, %v", carry, d, n, back, got, err)
		}
		ls.Init(s, at(0))
		charge(0, 4, true)
		charge(300*time.Millisecond, 3, false)
		want(400*time.Millisecond, 4, 3, 600*time.Millisecond)
		charge(500*time.Millisecond, 12, true)
		charge(1100*time.Millisecond, 1, false)
		if carry { // 5 of 15, and 1
			want(1200*time.Millisecond, 0, 6, 800*time.Millisecond)
		} else {
			want(1200*time.Millisecond, 0, 1, 900*time.Millisecond)
		}
	}
}

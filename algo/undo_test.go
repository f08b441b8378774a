package algo

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// charged is a charge of a history.
type charged struct {
	at    Instant
	units int64
}

// answers is all that can be asked of a state: of each limit what it has room for, and how long more would have to wait.
func answers(ls Limits, a *Arena, s State, now Instant) string {
	var out []any
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		l := &ls[i]
		out = append(out, c.room(l, a, t, now), c.used(l, a, t, now), c.reset(l, a, t, now))
		for n := int64(1); n <= min(l.holds(), 40); n++ {
			out = append(out, c.wait(l, a, t, now, n))
		}
	})
	return fmt.Sprint(out...)
}

// carried moves a state and its charges to another process, where the time is there.
func carried(t *testing.T, ls Limits, a *Arena, s State, now Instant, u *Undoable, there Instant) (State, *Undoable) {
	t.Helper()
	var units []int64
	for i := range u.charges {
		units = append(units, u.charges[i].units)
	}
	beside := ls.AppendUndoable(nil, a, s, now, u)
	next, v := make(State, ls.Words()), &Undoable{}
	if _, err := ls.Restore(a, next, there, ls.Append(nil, a, s, now)); err != nil {
		t.Fatal(err)
	}
	if rest, err := ls.ReadUndoable(a, next, there, v, units, beside); err != nil || len(rest) > 0 || len(v.charges) != len(units) {
		t.Fatalf("%v, %d left: %+v", err, len(rest), beside)
	}
	ls.Free(a, s)
	return next, v
}

// TestUndo reserves, charges, commits and cancels at random, moves the state to other processes, and holds it at every step to
// one to which only what has stayed was ever charged.
func TestUndo(t *testing.T) {
	const second = time.Second
	limit := func(a Algorithm, n int64, w time.Duration) Limit { return Limit{Algorithm: a, Limit: n, Window: w} }
	long := limit(SlidingLog, 12, 30*second)
	for name, ls := range map[string]Limits{
		"sliding_log":     {limit(SlidingLog, 12, second)},
		"long ticks":      {limit(SlidingLog, 300, 60*second)},
		"sliding_window":  {limit(SlidingWindow, 12, second)},
		"wide counts":     {{Algorithm: SlidingWindow, Limit: 1 << 40, Window: second, Slots: 4}},
		"sliding_counter": {limit(SlidingCounter, 12, second)},
		"token_bucket":    {{Algorithm: TokenBucket, Limit: 7, Capacity: 12, Window: second}},
		"leaky_bucket":    {{Algorithm: LeakyBucket, Limit: 13, Capacity: 9, Window: second}},
		"fixed_window":    {limit(FixedWindow, 12, second)},
		"calendar":        {{Algorithm: FixedWindow, Limit: 12, Period: Minute}},
		"several":         {limit(SlidingLog, 6, second), long, limit(SlidingWindow, 9, 2*second), {Algorithm: TokenBucket, Limit: 7, Capacity: 12, Window: second}, limit(SlidingCounter, 11, 2*second)},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(100) {
				undoHistory(t, ls, seed)
			}
		})
	}
}

func undoHistory(t *testing.T, ls Limits, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 7))
	a, u := NewArena(nil), &Undoable{}
	s := make(State, ls.Words())
	now := Instant{Mono: 1e12, Wall: 1_800_000_000e9}
	var moved int64 // by how much the present process's clock is ahead of the first one's
	here := func() Instant { return Instant{Mono: now.Mono + moved, Wall: now.Wall} }
	ls.Init(s, here())
	copied := make(State, ls.Words()) // of a process that follows
	ls.Init(copied, here())
	var mark uint64
	var history []*charged
	var held []*charged // of u
	var told []bool
	var log []string
	fixed := ls[0].Algorithm == FixedWindow && ls[0].Period == 0
	tell := func() {
		data := ls.AppendSince(nil, a, s, here(), mark)
		if rest, err := ls.Extend(a, copied, here(), data); err != nil || len(rest) > 0 {
			t.Fatalf("seed %d: %v", seed, err)
		}
		mark = ls.Mark(s)
		for i := range told {
			told[i] = true
		}
		if got, want := answers(ls, a, copied, here()), answers(ls, a, s, here()); got != want {
			t.Fatalf("seed %d: the copy %s\nis not %s\n%v", seed, got, want, log)
		}
	}
	for range 60 {
		step := time.Duration(rng.Int64N(int64(150 * time.Millisecond)))
		if rng.IntN(4) == 0 {
			step = time.Duration(rng.Int64N(3)) * 50 * time.Millisecond
		}
		if fixed { // see below
			step /= 20
		}
		now.Mono += int64(step)
		now.Wall += int64(step)
		switch op := rng.IntN(10); {
		case op < 5:
			n := 1 + rng.Int64N(4)
			if ls[0].Limit >= 300 {
				n = 1 + rng.Int64N(40)
			}
			d, err := ls.Decide(a, s, here(), Request{Cost: n}, nil)
			if err != nil {
				t.Fatal(err)
			}
			log = append(log, fmt.Sprint("charge ", n, " at ", now.Mono-1e12, d.Allowed))
			if !d.Allowed {
				break
			}
			e := &charged{now, n}
			history = append(history, e)
			may := op < 3
			ls.Charged(s, u, n, may)
			if may {
				held, told = append(held, e), append(told, false)
			}
		case op < 8 && len(held) > 0:
			i := rng.IntN(len(held))
			units := held[i].units
			if rng.IntN(3) == 0 {
				units = rng.Int64N(units + 1)
			}
			ls.Undo(a, s, here(), u, i, units, told[i])
			u.Remove(i)
			held[i].units -= units
			held, told = slices.Delete(held, i, i+1), slices.Delete(told, i, i+1)
			log = append(log, fmt.Sprint("undo ", i, " of ", units, " at ", now.Mono-1e12))
		case op == 8:
			tell()
		default:
			// To another process, whose clock differs by a multiple of all windows and slots.
			tell()
			ahead := rng.Int64N(9) * 60e9
			there := Instant{Mono: here().Mono + ahead, Wall: now.Wall}
			s, u = carried(t, ls, a, s, here(), u, there)
			moved += ahead
			ls.Free(a, copied)
			ls.Init(copied, there)
			mark = 0
			tell()
		}
		want := make(State, ls.Words())
		start := Instant{Mono: 1e12, Wall: 1_800_000_000e9}
		ls.Init(want, start)
		for _, e := range history {
			if err := ls.Charge(a, want, e.at, e.units); err != nil {
				t.Fatal(err)
			}
		}
		if got, want := answers(ls, a, s, here()), answers(ls, a, want, now); got != want {
			t.Fatalf("seed %d: %s\nis not %s\n%v", seed, got, want, log)
		}
		ls.Free(a, want)
		if fixed && now.Mono-1e12 > int64(800*time.Millisecond) {
			// A window that ends while a charge that opened it may be undone stays where it was. So this is of one window.
			break
		}
	}
	ls.Free(a, s)
	ls.Free(a, copied)
	if n := a.Bytes(); n != 0 && a.InUse() != 0 {
		t.Fatalf("seed %d: %d bytes in use", seed, a.InUse())
	}
}

// TestUndoAfterConvert changes the limits of a state some of whose charges are undone later, and holds it to one to which only what
// has stayed was ever charged, and of which the limits changed alike: it never admits more, and less by no more than rounding. Of
// buckets and of windows that weigh less as they age, what was carried to another algorithm is not known by the unit.
func TestUndoAfterConvert(t *testing.T) {
	const second = time.Second
	all := map[string]Limit{
		"log": {Algorithm: SlidingLog, Limit: 40, Window: second}, "longer log": {Algorithm: SlidingLog, Limit: 30, Window: 3 * second},
		"window": {Algorithm: SlidingWindow, Limit: 40, Window: second}, "counter": {Algorithm: SlidingCounter, Limit: 40, Window: second},
		"bucket": {Algorithm: TokenBucket, Limit: 9, Capacity: 40, Window: second}, "slower bucket": {Algorithm: LeakyBucket, Limit: 5, Capacity: 40, Window: second},
		"fixed": {Algorithm: FixedWindow, Limit: 40, Window: 8 * second}, "calendar": {Algorithm: FixedWindow, Limit: 40, Period: Hour},
		"longer counter": {Algorithm: SlidingCounter, Limit: 40, Window: 3 * second},
	}
	for from := range all {
		for to := range all {
			t.Run(from+" to "+to, func(t *testing.T) {
				for seed := range uint64(30) {
					undoAfterConvert(t, Limits{all[from]}, Limits{all[to]}, seed)
				}
			})
		}
	}
}

func undoAfterConvert(t *testing.T, from, to Limits, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 11))
	a, u := NewArena(nil), &Undoable{}
	now := Instant{Mono: 1e12, Wall: 1_800_000_000e9}
	start := now
	ls, s := from, make(State, from.Words())
	ls.Init(s, now)
	var history, held []*charged
	var converted Instant
	var log []string
	convert := func(s State, at Instant, u *Undoable) State {
		next := make(State, to.Words())
		if err := from.ConvertBeside(a, s, at, to, next, u); err != nil {
			t.Fatal(err)
		}
		return next
	}
	for step := range 40 {
		d := time.Duration(rng.Int64N(int64(100 * time.Millisecond)))
		now.Mono += int64(d)
		now.Wall += int64(d)
		switch op := rng.IntN(6); {
		case step == 20:
			s, ls, converted = convert(s, now, u), to, now
			log = append(log, fmt.Sprint("convert at ", now.Mono-1e12))
		case op < 4:
			e := &charged{now, 1 + rng.Int64N(3)}
			d, err := ls.Decide(a, s, now, Request{Cost: e.units}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if !d.Allowed {
				continue
			}
			history = append(history, e)
			ls.Charged(s, u, e.units, op < 2)
			if op < 2 {
				held = append(held, e)
			}
			log = append(log, fmt.Sprint("charge ", e.units, " at ", now.Mono-1e12, op < 2))
		case len(held) > 0:
			i := rng.IntN(len(held))
			ls.Undo(a, s, now, u, i, held[i].units, false)
			u.Remove(i)
			log = append(log, fmt.Sprint("undo ", i, " at ", now.Mono-1e12))
			held[i].units = 0
			held = slices.Delete(held, i, i+1)
		}
		want, under := make(State, from.Words()), from
		under.Init(want, start)
		for _, e := range history {
			if converted != (Instant{}) && e.at.Mono > converted.Mono && len(under) > 0 && &under[0] == &from[0] {
				want, under = convert(want, converted, nil), to
			}
			if err := under.Charge(a, want, e.at, e.units); err != nil {
				t.Fatal(err)
			}
		}
		if converted != (Instant{}) && &under[0] == &from[0] {
			want, under = convert(want, converted, nil), to
		}
		used := func(ls Limits, s State) (n int64) {
			ls.walk(a, s, now, func(i int, c counter, t []uint64) { n = c.used(&ls[i], a, t, now) })
			return n
		}
		got, should := used(ls, s), used(under, want)
		most := int64(0)
		if converted != (Instant{}) {
			most = 12 // a unit of each charge that was carried
		}
		if got < should || got > should+most {
			t.Fatalf("seed %d: %d are in use, want %d\n%v", seed, got, should, log)
		}
		under.Free(a, want)
	}
	ls.Free(a, s)
	if n := a.InUse(); n != 0 {
		t.Fatalf("seed %d: %d bytes in use", seed, n)
	}
}

// TestUndoBesideUnknown: a bucket owes what it owed before a charge of which it is not known where its units are, also when one after
// that is undone.
func TestUndoBesideUnknown(t *testing.T) {
	for _, algorithm := range []Algorithm{TokenBucket, LeakyBucket} {
		ls := Limits{{Algorithm: algorithm, Limit: 10, Window: time.Minute}}
		a, u, s := NewArena(nil), &Undoable{}, make(State, ls.Words())
		now := Instant{Mono: 1e12}
		ls.Init(s, now)
		charge := func(units int64, may bool) {
			if err := ls.Charge(a, s, now, units); err != nil {
				t.Fatal(err)
			}
			ls.Charged(s, u, units, may)
		}
		charge(5, false)
		u.Add(1) // as of a reservation that has come with a merge, and its units have not
		charge(1, false)
		charge(2, true)
		if n := ls.Undo(a, s, now, u, 1, 2, false); n != 2 {
			t.Errorf("%v: %d units came back of 2", algorithm, n)
		}
		d, err := ls.Decide(a, s, now, Request{}, nil)
		if err != nil || d.Remaining != 4 {
			t.Errorf("%v: %d of 10 remain (%v), where 6 are in use", algorithm, d.Remaining, err)
		}
	}
}

// TestUndoOfCarriedDebt charges windows beyond their limit, so that the next ones begin with what is over, undoes charges of windows
// that have ended, moves the state to other processes, and holds it at every step to one to which only what has stayed was ever charged.
func TestUndoOfCarriedDebt(t *testing.T) {
	const second = time.Second
	for name, test := range map[string]struct {
		limit Limit
		step  time.Duration // the longest
		first int64         // charged to begin with, and never undone
	}{
		"seconds": {Limit{Algorithm: FixedWindow, Limit: 12, Period: Epoch, Window: second, CarryDebt: true}, second * 2 / 5, 0},
		"days":    {Limit{Algorithm: FixedWindow, Limit: 12, Period: Day, CarryDebt: true}, 10 * time.Hour, 0},
		// A window that ends while a charge that opened it may be undone stays where it was: this one is opened by none of these.
		"first hit": {Limit{Algorithm: FixedWindow, Limit: 12, Window: second, CarryDebt: true}, second * 2 / 5, 400},
	} {
		t.Run(name, func(t *testing.T) {
			undone := int64(0)
			for seed := range uint64(200) {
				undone += undoDebts(t, Limits{test.limit}, seed, test.step, test.first)
			}
			if undone < 100 {
				t.Errorf("%d units of windows that had ended were given back", undone)
			}
		})
	}
}

// TestUndoOfDebtNoLongerCarried: where debt is not carried over any more, what is left of a reservation is given back until the window ends that
// had begun with it, and not out of what others are charged later.
func TestUndoOfDebtNoLongerCarried(t *testing.T) {
	for _, test := range []struct {
		later time.Duration
		back  int64
		used  int64
	}{{0, 5, 8}, {time.Second, 0, 6}} {
		from := Limits{{Algorithm: FixedWindow, Limit: 12, Window: time.Second, CarryDebt: true}}
		to := Limits{{Algorithm: FixedWindow, Limit: 12, Window: time.Second}}
		a, u, s, converted := NewArena(nil), &Undoable{}, make(State, from.Words()), make(State, to.Words())
		now := Instant{Mono: 1e12}
		from.Init(s, now)
		for n := range 2 {
			if err := from.Charge(a, s, now, int64(5+15*n)); err != nil {
				t.Fatal(err)
			}
			from.Charged(s, u, int64(5+15*n), n == 0)
		}
		now.Mono += 1e9
		if err := from.ConvertBeside(a, s, now, to, converted, u); err != nil {
			t.Fatal(err)
		}
		if test.later > 0 {
			now.Mono += int64(test.later)
			if err := to.Charge(a, converted, now, 6); err != nil {
				t.Fatal(err)
			}
			to.Charged(converted, u, 6, false)
		}
		back := to.Undo(a, converted, now, u, 0, 5, false)
		d, err := to.Decide(a, converted, now, Request{}, nil)
		if back != test.back || err != nil || 12-d.Remaining != test.used {
			t.Errorf("%v later %d units came back, want %d; %+v, %v", test.later, back, test.back, d, err)
		}
	}
}

// undoDebts returns how many units of windows that had ended were given back.
func undoDebts(t *testing.T, ls Limits, seed uint64, longest time.Duration, first int64) (back int64) {
	rng := rand.New(rand.NewPCG(seed, 13))
	a, u := NewArena(nil), &Undoable{}
	start := Instant{Mono: 1e12, Wall: 1_800_000_000e9}
	now := start
	var moved int64
	here := func() Instant { return Instant{Mono: now.Mono + moved, Wall: now.Wall} }
	s := make(State, ls.Words())
	ls.Init(s, start)
	var history, held []*charged
	var log []string
	charge := func(n int64, may bool) {
		if err := ls.Charge(a, s, here(), n); err != nil {
			t.Fatal(err)
		}
		ls.Charged(s, u, n, may)
		e := &charged{now, n}
		history = append(history, e)
		if may {
			held = append(held, e)
		}
		log = append(log, fmt.Sprint("charge ", n, " at ", time.Duration(now.Mono-start.Mono), may))
	}
	if first > 0 {
		charge(first, false)
	}
	for range 50 {
		step := rng.Int64N(int64(longest))
		now.Mono += step
		now.Wall += step
		switch op := rng.IntN(10); {
		case op < 6:
			charge(1+rng.Int64N(9), op < 4)
		case op < 9 && len(held) > 0:
			i := rng.IntN(len(held))
			units := held[i].units
			if rng.IntN(3) == 0 {
				units = rng.Int64N(units + 1)
			}
			n := ls.Undo(a, s, here(), u, i, units, true)
			if now.Wall-held[i].at.Wall > 86400e9 || ls[0].Period != Day && now.Wall-held[i].at.Wall > 1e9 {
				back += n
			}
			u.Remove(i)
			held[i].units -= units
			held = slices.Delete(held, i, i+1)
			log = append(log, fmt.Sprint("undo ", i, " of ", units, ": ", n, " at ", time.Duration(now.Mono-start.Mono)))
		case op == 9 && s[len(s)-1] > 0:
			ahead := rng.Int64N(9) * 60e9
			there := Instant{Mono: here().Mono + ahead, Wall: now.Wall}
			s, u = carried(t, ls, a, s, here(), u, there)
			moved += ahead
			log = append(log, "move")
		}
		want := make(State, ls.Words())
		ls.Init(want, start)
		for _, e := range history {
			if err := ls.Charge(a, want, e.at, e.units); err != nil {
				t.Fatal(err)
			}
		}
		if got, want := answers(ls, a, s, here()), answers(ls, a, want, now); got != want {
			t.Fatalf("seed %d: %s\nis not %s\n%v", seed, got, want, log)
		}
	}
	return back
}

// TestUndoAfterMergeOfWhatIsGone: a charge of which nothing counts any more is not to be found in what is merged into its window, which a
// sliding counter may have begun to count anew, from another instant.
func TestUndoAfterMergeOfWhatIsGone(t *testing.T) {
	ls := Limits{{Algorithm: SlidingCounter, Limit: 100, Window: time.Second}}
	at := func(d time.Duration) Instant { return Instant{Mono: int64(d)} }
	r, other := newReplica(ls, at(0)), newReplica(ls, at(0))
	charge := func(r replica, now Instant, u *Undoable) {
		t.Helper()
		if err := ls.Charge(r.a, r.s, now, 5); err != nil {
			t.Fatal(err)
		}
		ls.Charged(r.s, u, 5, true)
	}
	var u, v Undoable
	charge(r, at(1850*time.Millisecond), &u)
	r.s[1] = uint64(900 * time.Millisecond) // as in a process with other windows: it counts until 2.9 s
	charge(other, at(1990*time.Millisecond), &v)
	charge(r, at(2950*time.Millisecond), &u) // from 2 s on
	if _, err := ls.MergeBeside(r.a, r.s, at(2950*time.Millisecond), other.s, &u, &v, func(int) bool { return false }, false); err != nil {
		t.Fatal(err)
	}
	if n := ls.Undo(r.a, r.s, at(2950*time.Millisecond), &u, 0, 5, false); n != 0 {
		t.Errorf("%d units were given back of a charge that had expired", n)
	}
}

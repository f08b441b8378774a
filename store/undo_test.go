package store

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/must"
)

// undoWorld is two stores that each are the holder of one partition at times, and what was charged and has stayed.
type undoWorld struct {
	t       *testing.T
	rng     *rand.Rand
	first   *Rule // and the present one
	rule    *Rule
	stores  [2]*Store
	ahead   [2]time.Duration // of their clocks
	holder  int
	reloads bool
	expires bool // reservations are short, and expire with release
	now     time.Duration
	history []*undoCharge
	held    []*undoCharge
	again   []func(s *Store) error // what may be repeated at any time
}

type undoCharge struct {
	at    time.Duration
	units int64
	id    ReservationID
	until time.Duration
	more  []*undoCharge // what was added to it
	// always says that it was charged whether or not there was room.
	always bool
	lost   bool  // its state was converted or joined since
	rule   *Rule // of a reload, which charges nothing
}

// keep takes off a reservation what is not kept of it, what was added last first, and returns what was missing. What is
// lost stays charged.
func (c *undoCharge) keep(units int64) (missing int64) {
	for _, p := range append([]*undoCharge{c}, c.more...) {
		kept := min(p.units, units)
		if units -= kept; !p.lost {
			p.units = kept
		}
	}
	return units
}

// givable is how many units of a reservation are not lost.
func (c *undoCharge) givable() (units int64) {
	for _, p := range append([]*undoCharge{c}, c.more...) {
		if !p.lost {
			units += p.units
		}
	}
	return units
}

func (c *undoCharge) reserved() (units int64) {
	for _, p := range append([]*undoCharge{c}, c.more...) {
		units += p.units
	}
	return units
}

func (w *undoWorld) here(i int) algo.Instant { return at(w.now + w.ahead[i]) }

// pass tells the other one, in small chunks, what has changed.
func (w *undoWorld) pass(staged bool) {
	w.t.Helper()
	from, to := w.holder, 1-w.holder
	for more := true; more; {
		var chunk []byte
		var version uint64
		chunk, version, more = w.stores[from].Drain(0, ownership.Backup, w.here(from), 1+w.rng.IntN(200))
		must.NoError(w.t, w.stores[to].Apply(0, staged, w.here(to), chunk))
		w.stores[from].Confirm(0, ownership.Backup, version)
	}
}

func (w *undoWorld) compare(what string) {
	w.t.Helper()
	limits, rule := w.rule.Limits, w.first
	want := New(Config{})
	k := want.key("p", "k")
	for _, c := range w.history {
		if c.rule != nil {
			rule = c.rule
			reload(want, rule, at(c.at))
		}
		if c.units == 0 {
			continue
		}
		call := cost(c.units)
		call.Always = c.always
		a, err := want.Decide(k, rule, at(c.at), call, nil)
		must.True(w.t, err == nil && (a.Allowed || c.always) && a.Granted == c.units,
			"%s: what has stayed is more than the limit admits: %+v, %v", what, a, err)
	}
	each := [2][]algo.Decision{make([]algo.Decision, len(limits)), make([]algo.Decision, len(limits))}
	got := must.Value(w.stores[w.holder].Decide(k, w.rule, w.here(w.holder), cost(0), each[0]))(w.t)
	should := must.Value(want.Decide(k, w.rule, at(w.now), cost(0), each[1]))(w.t)
	for i := range limits {
		must.True(w.t, each[0][i].Remaining <= each[1][i].Remaining,
			"%s: limit %d has room for more than without what was given back: %+v, %+v", what, i, each[0], each[1])
	}
	if got.Decision != should.Decision || !slices.Equal(each[0], each[1]) {
		w.t.Fatalf("%s: %+v, want %+v", what, each[0], each[1])
	}
}

func reload(s *Store, r *Rule, now algo.Instant) {
	s.Reconcile(func() algo.Instant { return now }, func(string, []byte) *Rule { return r })
}

// reload changes the limits. What is pending gives nothing back.
func (w *undoWorld) reload() {
	limits := slices.Clone(w.rule.Limits)
	for i := range limits {
		switch l := &limits[i]; {
		case w.rng.IntN(2) == 0:
			l.Limit += 1 + w.rng.Int64N(3)
		case l.Window > time.Second:
			l.Window = time.Second
		default:
			l.Window = 2 * time.Second
		}
	}
	w.rule = rule("p", limits...)
	w.rule.ReleaseExpired = w.expires
	reload(w.stores[w.holder], w.rule, w.here(w.holder))
	w.history = append(w.history, &undoCharge{at: w.now, rule: w.rule})
	w.lose()
}

// lose notes that what is pending gives nothing back.
func (w *undoWorld) lose() {
	for _, c := range w.held {
		for _, p := range append([]*undoCharge{c}, c.more...) {
			p.lost = true
		}
	}
}

// TestUndoAcrossStores reserves, extends, commits (also more than was reserved), cancels, charges and checks at random
// while the partition is copied, moved and claimed from its copy, reservations expire, and its limits change. It holds
// the partition to a store to which only what has stayed was ever charged.
func TestUndoAcrossStores(t *testing.T) {
	limit := func(a algo.Algorithm, n int64, w time.Duration) algo.Limit {
		return algo.Limit{Algorithm: a, Limit: n, Window: w}
	}
	for name, limits := range map[string]algo.Limits{
		"sliding_log":     {limit(algo.SlidingLog, 12, time.Second)},
		"sliding_window":  {limit(algo.SlidingWindow, 12, time.Second)},
		"sliding_counter": {limit(algo.SlidingCounter, 12, time.Second)},
		"token_bucket":    {limit(algo.TokenBucket, 12, time.Second)},
		"several": {limit(algo.SlidingLog, 8, time.Second), limit(algo.SlidingLog, 20, 2*time.Second),
			limit(algo.LeakyBucket, 9, time.Second)},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(100) {
				w := &undoWorld{t: t, rng: rand.New(rand.NewPCG(seed, 3)), first: rule("p", limits...),
					reloads: seed%3 == 0}
				w.expires = seed%2 == 0
				w.first.ReleaseExpired = w.expires
				w.rule = w.first
				// Windows and slots begin alike by both clocks.
				w.ahead[1] = time.Duration(w.rng.IntN(9)) * minute
				w.stores[0], w.stores[1] = New(Config{}), New(Config{Shut: true})
				w.stores[0].TakeOver(0, w.here(0))
				w.stores[0].Attach(0, ownership.Backup, true)
				for step := range 120 {
					w.step(uint64(step) + 1)
					w.compare(fmt.Sprintf("seed %d, step %d", seed, step))
				}
			}
		})
	}
}

func (w *undoWorld) step(id uint64) {
	s := w.stores[w.holder]
	k := s.key("p", "k")
	w.now += time.Duration(w.rng.Int64N(int64(120 * time.Millisecond)))
	s.Sweep(w.here(w.holder), 100)
	w.held = slices.DeleteFunc(w.held, func(c *undoCharge) bool {
		expired := c.until <= w.now
		if expired {
			c.keep(0)
		}
		return expired
	})
	if w.reloads && w.rng.IntN(15) == 0 {
		w.reload()
		return
	}
	switch op := w.rng.IntN(15); {
	case op == 12 && len(w.held) > 0:
		w.extend(s, k, w.held[w.rng.IntN(len(w.held))], id)
		return
	case op == 13 && len(w.rule.Limits) == 1: // of several, each may be charged another number of units
		call := cost(1 + w.rng.Int64N(4))
		call.Always, call.RequestID = true, fmt.Sprint("charge ", id)
		first := must.Value(s.Decide(k, w.rule, w.here(w.holder), call, nil))(w.t)
		w.history = append(w.history, &undoCharge{at: w.now, units: first.Granted, always: true})
		w.again = append(w.again, func(s *Store) error {
			a, err := s.Decide(s.key("p", "k"), w.rule, w.here(w.holder), call, nil)
			if err == nil && (a.Granted != first.Granted || a.Allowed != first.Allowed) {
				err = fmt.Errorf("charge %d again: %+v, was %+v", id, a, first)
			}
			return err
		})
		return
	case op == 14 && len(w.again) > 0:
		must.NoError(w.t, w.again[w.rng.IntN(len(w.again))](s))
		return
	case op >= 12:
		return
	}
	switch op := w.rng.IntN(12); {
	case op < 6:
		call := cost(1 + w.rng.Int64N(4))
		if op < 4 {
			call.Reservation, call.ReserveFor = reservationOf(id), minute
			if w.expires {
				call.ReserveFor = time.Duration(1+w.rng.IntN(20)) * 50 * time.Millisecond
			}
		}
		a := must.Value(s.Decide(k, w.rule, w.here(w.holder), call, nil))(w.t)
		if !a.Allowed {
			return
		}
		c := &undoCharge{at: w.now, units: a.Granted, id: a.Reservation, until: w.now + call.ReserveFor}
		w.history = append(w.history, c)
		if op < 4 {
			w.held = append(w.held, c)
		}
	case op < 9 && len(w.held) > 0:
		i := w.rng.IntN(len(w.held))
		c := w.held[i]
		keep := int64(0)
		if w.rng.IntN(3) == 0 {
			keep = w.rng.Int64N(c.reserved() + 1)
			if w.rng.IntN(3) == 0 && len(w.rule.Limits) == 1 {
				keep = c.reserved() + 1 + w.rng.Int64N(3)
			}
		}
		how := Settlement{ID: c.id, Keep: keep}
		n, err := s.Settle(k, w.rule, w.here(w.holder), how)
		most := min(c.givable(), max(c.reserved()-keep, 0)) * int64(len(w.rule.Limits))
		must.True(w.t, n.Known && err == nil && n.Returned <= most && n.Excess <= max(keep-c.reserved(), 0),
			"%+v, %v", n, err)
		w.again = append(w.again, func(s *Store) error {
			again, err := s.Settle(s.key("p", "k"), w.rule, w.here(w.holder), how)
			if err == nil && again != n {
				err = fmt.Errorf("settled again: %+v, was %+v", again, n)
			}
			return err
		})
		must.NoError(w.t, w.again[len(w.again)-1](s))
		if c.keep(keep) > 0 && n.Excess > 0 {
			w.history = append(w.history, &undoCharge{at: w.now, units: n.Excess, always: true})
		}
		w.held = slices.Delete(w.held, i, i+1)
	case op == 9:
		w.pass(false)
	case op == 10:
		// A move.
		s.Shut(0)
		w.pass(false)
		w.holder = 1 - w.holder
		w.stores[w.holder].Open(0)
		w.stores[w.holder].AttachCurrent(0, ownership.Backup, true)
	default:
		// A claim from the copy, and a merge with the other one, which has nothing besides.
		w.pass(false)
		before := w.holder
		w.holder = 1 - w.holder
		next := w.stores[w.holder]
		take(next, w.here(w.holder))
		if w.rng.IntN(2) == 0 {
			s.Attach(0, ownership.Backup, true)
			s.Shut(0)
			next.Stage(0)
			w.holder = before
			w.pass(true)
			w.holder = 1 - before
			must.NoError(w.t, next.Merge(0, w.here(w.holder)))
			w.lose()
		}
		s.Shut(0)
		next.Attach(0, ownership.Backup, true)
		s.Discard(0)
		w.pass(false)
	}
}

// extend adds units to a reservation, time, or both.
func (w *undoWorld) extend(s *Store, k Key, c *undoCharge, id uint64) {
	call := cost(w.rng.Int64N(4))
	call.Reservation, call.Extend, call.ReserveFor = c.id, true, time.Duration(w.rng.IntN(2))*2*minute
	if call.Cost > 0 && w.rng.IntN(2) == 0 {
		call.RequestID = fmt.Sprint("extend ", id)
	}
	a := must.Value(s.Decide(k, w.rule, w.here(w.holder), call, nil))(w.t)
	if !a.Allowed {
		return
	}
	must.True(w.t, a.Granted == call.Cost && a.Reservation == c.id, "%+v for %+v", a, call)
	if call.RequestID != "" {
		a, err := s.Decide(k, w.rule, w.here(w.holder), call, nil)
		must.True(w.t, err == nil && a.Allowed && a.Granted == call.Cost && a.Reservation == c.id,
			"repeated: %+v, %v", a, err)
	}
	if call.ReserveFor > 0 {
		c.until = w.now + call.ReserveFor
	}
	if a.Granted > 0 {
		more := &undoCharge{at: w.now, units: a.Granted}
		c.more = append(c.more, more)
		w.history = append(w.history, more)
	}
}

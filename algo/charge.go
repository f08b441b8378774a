package algo

import (
	"math"
	"time"
)

// Charge adds n units at now to every limit without asking for room, as far as a state can count: MaxLimit units. A
// concurrency limit lends them to nobody, so that nothing but the end of its Window gives them back. A charge of 0 or
// less does nothing.
//
// The only error is ErrNoMemory, and nothing was charged then.
func (ls Limits) Charge(a *Arena, s State, now Instant, n int64) error {
	if n = min(n, MaxLimit); n <= 0 {
		return nil
	}
	return ls.chargeEach(a, s, now, func(l *Limit, c counter, t []uint64, now Instant) int64 {
		return min(n, MaxLimit-c.used(l, a, t, now))
	}, step(n))
}

// Hold keeps what buckets owe from having been repaid since the newest instant that s has seen. What is charged to a state
// that is kept to be added to another one, which fills by itself, must not be repaid twice.
func (ls Limits) Hold(s State, now Instant) {
	before := Instant{Mono: int64(s[0])}
	now = s.tick(now)
	for i, rest := 0, s[1:]; i < len(ls); i++ {
		c := ls[i].counter()
		if c == nil {
			continue
		}
		n := c.words(&ls[i])
		if b, ok := c.(bucket); ok {
			b.setOwed(&ls[i], rest[:n:n], now, b.owed(&ls[i], rest[:n:n], before))
		}
		rest = rest[n:]
	}
}

// ChargeApart charges n units to s that have just been charged to whole, of which s holds apart what some charged: held, see Hold, and in
// the windows of whole. Windows of its own, of which the first begins with the first unit that is held apart, would end within those of whole.
// What s holds of a fixed window that whole has ended is dropped. What it holds of a sliding counter that has been empty in whole since, as
// more was given back there than here, counts for up to a Window longer.
//
// The error is that of Charge.
func (ls Limits) ChargeApart(a *Arena, s State, now Instant, whole State, n int64) error {
	now = whole.Latest(now)
	ls.Hold(s, now)
	for i := range ls {
		if _, ok := ls[i].counter().(fixedWindow); !ok {
			continue
		}
		at := ls.place(i)
		if of := whole[at : at+2]; of[1] != 0 {
			s[at], s[at+1] = of[0], min(s[at+1], of[1]-min(of[1], uint64(n)))
		}
	}
	if err := ls.Charge(a, s, now, n); err != nil {
		return err
	}
	for k := range ls {
		if t, of := ls.sliding(s, k, now), ls.sliding(whole, k, now); t != nil && of != nil {
			slidingCounter{}.meet(t, int64(of[0]))
			t[0] = of[0]
		}
	}
	return nil
}

// Differ reports whether sliding counters of s and t have units in windows that begin at different instants.
func (ls Limits) Differ(s State, now Instant, t State) bool {
	now = t.tick(s.tick(now))
	s.tick(now)
	for k := range ls {
		if t, of := ls.sliding(s, k, now), ls.sliding(t, k, now); t != nil && of != nil && t[0] != of[0] {
			return true
		}
	}
	return false
}

// Match gives the sliding counters of s and t, and of what is held apart from either, the windows with which a merge of the two goes on: so
// that a unit goes on to count in a state as it does in what holds it apart.
func (ls Limits) Match(s State, now Instant, t State, apart []State) {
	now = t.tick(s.tick(now))
	for _, d := range apart {
		now = d.Latest(now)
	}
	for _, d := range apart {
		ls.Hold(d, now)
	}
	s.tick(now)
	t.tick(now)
	states := append([]State{s, t}, apart...)
	for k := range ls {
		first, last := int64(math.MaxInt64), int64(math.MinInt64)
		for _, s := range states {
			if t := ls.sliding(s, k, now); t != nil {
				first, last = min(first, int64(t[0])), max(last, int64(t[0]))
			}
		}
		for _, s := range states {
			t := ls.sliding(s, k, now)
			if t == nil || first == last {
				continue
			}
			other := first
			if int64(t[0]) < last {
				other = last
			}
			slidingCounter{}.meet(t, other)
		}
	}
}

// sliding returns the words of a sliding counter, brought to now; nil where limit k is none, or has nothing in use.
func (ls Limits) sliding(s State, k int, now Instant) []uint64 {
	c, ok := ls[k].counter().(slidingCounter)
	if !ok {
		return nil
	}
	t := s[ls.place(k):]
	t = t[:c.words(&ls[k])]
	if c.advance(&ls[k], nil, t, now); t[1]|t[2] == 0 {
		return nil
	}
	return t
}

// Fill makes of s what it is when every limit was used up at now, whatever s has seen of that: it stands in for admissions
// that are lost. So room that units in use would soon have given back does not come sooner, and a window, but for one of
// the calendar, begins at now. Leases stay, for their holders to renew and release, beside a whole limit that is lent to
// nobody.
//
// The only error is ErrNoMemory, and s is as it was then.
func (ls Limits) Fill(a *Arena, s State, now Instant) error {
	now = s.tick(now)
	fresh := make(State, len(s))
	ls.Init(fresh, now)
	each := func(do func(l *Limit, c counter, t, u []uint64, anew bool)) {
		ls.walk(a, s, now, func(i int, c counter, t []uint64) {
			anew := true
			switch c.(type) {
			case calendarWindow, concurrency:
				anew = false
			case bucket:
				anew = c.used(&ls[i], a, t, now) <= ls[i].holds() // one that owes more goes on owing it
			}
			at := ls.place(i)
			do(&ls[i], c, t, fresh[at:at+len(t)], anew)
		})
	}
	units := func(l *Limit, c counter, t []uint64, anew bool) int64 {
		if _, leases := c.(concurrency); leases || anew {
			return min(l.holds(), MaxLimit-c.used(l, a, t, now))
		}
		return c.room(l, a, t, now)
	}
	ok := true
	each(func(l *Limit, c counter, t, u []uint64, anew bool) {
		if anew {
			t = u
		}
		n := units(l, c, t, anew)
		ok = ok && (n <= 0 || c.reserve(l, a, t, n))
	})
	if !ok {
		ls.Free(a, fresh)
		ls.trim(a, s)
		return ErrNoMemory
	}
	each(func(l *Limit, c counter, t, u []uint64, anew bool) {
		start, inUse := int64(t[0]), c.used(l, a, t, now) > 0
		if anew {
			c.free(l, a, t)
			copy(t, u)
		}
		if n := units(l, c, t, anew); n > 0 {
			c.charge(l, a, t, now, n)
		}
		if c, ok := c.(slidingCounter); ok && inUse {
			c.meet(t, start) // where that is later, units that were in use would have counted for longer
		}
	})
	if p := ls.position(s); p != nil {
		*p += generation
	}
	return nil
}

// chargeEach charges what units says to each limit, or nothing to any, and then moves the position by so much.
func (ls Limits) chargeEach(a *Arena, s State, now Instant, units func(*Limit, counter, []uint64, Instant) int64, by uint64) error {
	now = s.tick(now)
	var charges [MaxLimits]int64
	ok := true
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		charges[i] = units(&ls[i], c, t, now)
		ok = ok && (charges[i] <= 0 || c.reserve(&ls[i], a, t, charges[i]))
	})
	if !ok {
		ls.trim(a, s)
		return ErrNoMemory
	}
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		if charges[i] > 0 {
			c.charge(&ls[i], a, t, now, charges[i])
		}
	})
	if p := ls.position(s); p != nil {
		*p += by
	}
	return nil
}

// Merge adds to s what t, a state of the same limits in the same Arena, holds; t stays as it is. What is to count once
// must be in one of them only, but for leases, which have identity. Of two states that divide what was charged between
// them,
//
//   - sliding_log becomes the log that saw everything, its entries in the order of their instants. Where the ticks of
//     the two differ, those of t are late by less than one.
//   - sliding_window becomes the one that saw everything, too, where the slots of the two begin at the same instants.
//     Otherwise units of t expire late by less than the width of a slot.
//   - fixed_window goes on with the window that opened later, and counts in it what the open windows of both have
//     counted. It may hold back the units of the other less than a Window too long. What either has counted in a window
//     that has ended is gone, even where one window that saw everything would have opened later and have it still.
//   - fixed_window by the calendar adds the counts of the same window, and otherwise keeps the later window.
//   - sliding_counter goes on with the windows that began later. Of the units that neither has forgotten, its estimate
//     is at no later instant less than that of one counter in the windows of either, and never more than what that of
//     one in the later windows was a Window before. Where the windows of the two begin at the same instants it is the
//     same.
//   - token_bucket and leaky_bucket owe what the two owe together. Each has been repaid at the full rate while it was
//     apart: one bucket that saw everything may owe as much more as the rate comes to in the time in which both owed.
//   - concurrency has the union of the leases by their ids, each until the later of its two ends, and each can be
//     renewed and released as before. What Charge has lent has no id, and adds up.
//
// Counts end at MaxLimit. What is in use may exceed the limit; then nothing passes until enough of it has expired.
//
// The only error is ErrNoMemory, and s is as it was then.
func (ls Limits) Merge(a *Arena, s State, now Instant, t State) error {
	now = t.tick(s.tick(now))
	s.tick(now)
	u := make(State, len(s))
	ls.Init(u, now)
	var merged [MaxLimits]bool
	ok := true
	ls.walk(a, s, now, func(i int, c counter, s []uint64) {
		at, l := ls.place(i), &ls[i]
		t, u := t[at:at+len(s)], u[at:at+len(s)]
		c.advance(l, a, t, now)
		if ok && c.used(l, a, t, now) != 0 {
			merged[i] = true
			ok = c.merge(l, a, s, t, now, u)
		}
	})
	if !ok {
		ls.Free(a, u)
		return ErrNoMemory
	}
	ls.walk(a, s, now, func(i int, c counter, s []uint64) {
		if merged[i] {
			c.free(&ls[i], a, s)
			copy(s, u[ls.place(i):])
		}
	})
	if p := ls.position(s); p != nil {
		*p += generation
	}
	return nil
}

// Horizon is the longest time for which something charged to these limits can matter. It is that of a state that was
// never made to hold more than its limits; a bucket that is charged again before it is full also goes on owing for
// longer, and a calendar window stays for as long as the wall clock is set back. It is 0 when all are unlimited.
func (ls Limits) Horizon() time.Duration {
	var longest time.Duration
	for i := range ls {
		if c := ls[i].counter(); c != nil {
			longest = max(longest, c.horizon(&ls[i]))
		}
	}
	return longest
}

package algo

import (
	"math"
	"slices"
)

// Holds are the pending reservations of one state, in the order in which they were charged. For each, they keep where
// its units are, so that a commit or cancel can give them back. GiveBack takes units from the place of the charge and
// from nowhere else:
//
//	sliding_log       the entries of the charge's tick
//	sliding_window    the slot of the charge's instant
//	sliding_counter   the present or the previous window, whichever the charge's instant lies in
//	fixed_window      the open window, if it was open at the charge's instant; its start stays
//	calendar windows  the open window, if the charge was in it
//	token_bucket,     what the bucket owes, but no more than the least that it has owed since the charge
//	leaky_bucket
//
// Units that have left their place are not given back. So GiveBack admits less than a state without the charge would,
// or as much. Two cases are not exact: a fixed window that the reservation opened stays where it began, and a count
// that was cut down because the state can hold no more stays cut down.
//
// A bucket does not show what a charge made it owe, because it fills meanwhile: without the charge it would have become
// full, and stayed so, for a part of that time. What it owes without a charge is less by the units of the charge, or by
// the least that it has owed since (Lindley, The theory of queues with a single server, 1952). Each hold keeps this
// minimum, its low, from its charge to the charge of the next hold. Lower must be called before each operation that may
// charge the state. What replaces or converts the state calls Lose.
//
// The zero value has no holds. Holds belong to one state, and one goroutine may use them at a time.
type Holds []Hold

// Hold is what is kept of one reservation, of each limit. Nil is lost: it gives nothing back, and the charge counts as
// one without a reservation.
type Hold []mark

// mark is what a hold keeps of one limit: of a log the instant of its entry, of a calendar window the window's start,
// of other windows the instant of the charge. A bucket's mark is the low, in nanoseconds and limit-ths of one.
type mark struct {
	low     bool
	n, rest int64
}

// gone is the instant that stands for units that are no longer in a log.
const gone = math.MinInt64

func (m *mark) lower(n, rest int64) {
	if n < m.n || n == m.n && rest < m.rest {
		m.n, m.rest = n, rest
	}
}

// owed returns a low as bucket.owed does.
func (m *mark) owed(l *Limit) u128 { return mul(m.n, l.Limit).add(u128{lo: uint64(m.rest)}) }

// newest returns the newest of the first n holds that is not lost, or nil.
func (hs Holds) newest(n int) Hold {
	for n--; n >= 0; n-- {
		if hs[n] != nil {
			return hs[n]
		}
	}
	return nil
}

// Lower notes what the buckets of s owe at now. It must be called before each operation that may charge s. It does not
// change s.
func (ls Limits) Lower(s State, now Instant, hs Holds) {
	h := hs.newest(len(hs))
	if h == nil {
		return
	}
	now = s.Latest(now)
	for k := range h {
		if m := &h[k]; m.low {
			m.lower(bucket{}.owed(&ls[k], s[ls.place(k):], now).div(ls[k].Limit))
		}
	}
}

// NewHold returns the hold of the charge that is the latest operation on s, which charged each limit the same number of
// units. The hold is lost if a count may have been cut down.
func (ls Limits) NewHold(s State) Hold {
	now := Instant{Mono: int64(s[0])}
	h := make(Hold, len(ls))
	for k := range ls {
		l, m, t := &ls[k], &h[k], s[ls.place(k):]
		switch c := l.counter().(type) {
		case slidingLog:
			m.n = int64(t[logNewest])
		case calendarWindow:
			m.n = int64(t[0])
		case bucket:
			owed := c.owed(l, t, now)
			m.low = true
			m.n, m.rest = owed.div(l.Limit)
			if !owed.less(mul(l.Limit, int64(MaxFill))) {
				return nil
			}
		case slidingWindow:
			m.n = now.Mono
			if c.narrow(l) && c.count(l, t, 0) == math.MaxUint32 {
				return nil
			}
		default:
			m.n = now.Mono
		}
	}
	return h
}

// Lose makes all holds give nothing back, because the state is gone, converted, filled, or joined with another one.
func (hs Holds) Lose() { clear(hs) }

// Remove returns hs without hold i, the units of which stay charged as they are.
func (hs Holds) Remove(i int) Holds {
	for k, m := range hs[i] {
		if !m.low {
			continue
		}
		if before := hs.newest(i); before != nil {
			before[k].lower(m.n, m.rest)
		}
	}
	return slices.Delete(hs, i, i+1)
}

// GiveBack takes up to units, which are no more than hold i charged, from where they were charged. It returns how many
// were there, the most of any limit. The hold stays, for Remove.
func (ls Limits) GiveBack(a *Arena, s State, now Instant, hs Holds, i int, units int64) int64 {
	h := hs[i]
	if h == nil || units <= 0 {
		return 0
	}
	ls.Lower(s, now, hs)
	now = s.tick(now)
	var most int64
	ls.walk(a, s, now, func(k int, c counter, t []uint64) {
		l, m, n := &ls[k], &h[k], int64(0)
		switch c := c.(type) {
		case slidingLog:
			n = c.takeAt(a, t, l.tickShift(), m.n, units)
		case slidingWindow:
			if slot, ok := c.slotOf(l, t, m.n); ok {
				n = min(units, c.count(l, t, slot))
				c.setCount(l, t, slot, c.count(l, t, slot)-n)
			}
		case slidingCounter:
			if w, ok := c.windowOf(l, t, m.n); ok {
				n = min(units, int64(t[w]))
				t[w] -= uint64(n)
			}
		case fixedWindow:
			if m.n >= int64(t[0]) {
				n = c.refund(l, a, t, now, units)
			}
		case calendarWindow:
			if m.n == int64(t[0]) {
				n = c.refund(l, a, t, now, units)
			}
		case bucket:
			n = c.giveBack(l, t, now, hs[i:], k, units)
		}
		most = max(most, n)
	})
	if p := ls.position(s); p != nil && most > 0 {
		*p += generation // a copy may have the units, which need not be the oldest
	}
	return most
}

// giveBack is GiveBack for the first of some holds, which are the newest. k is the place of the bucket among the
// limits.
func (c bucket) giveBack(l *Limit, t []uint64, now Instant, hs Holds, k int, units int64) int64 {
	back := mul(units, int64(l.Window))
	for _, h := range hs {
		if h != nil {
			if low := h[k].owed(l); low.less(back) {
				back = low
			}
		}
	}
	for _, h := range hs {
		if h != nil {
			h[k].n, h[k].rest = h[k].owed(l).sub(back).div(l.Limit)
		}
	}
	c.setOwed(l, t, now, c.owed(l, t, now).sub(back))
	n, rest := back.div(int64(l.Window))
	if rest > 0 {
		n++
	}
	return n
}

// slotOf returns the slot of an instant, and whether the window still has it.
func (c slidingWindow) slotOf(l *Limit, s []uint64, at int64) (int, bool) {
	i := -floorDiv(at-int64(s[0]), c.width(l))
	return int(max(i, 0)), s[1] > 0 && i <= int64(c.slots(l))
}

// windowOf returns the word that counts the window of an instant, and whether the counter still has that window.
func (slidingCounter) windowOf(l *Limit, s []uint64, at int64) (int, bool) {
	switch start := int64(s[0]); {
	case s[1]|s[2] == 0:
		return 0, false
	case at >= start:
		return 2, true
	default:
		return 1, at >= start-int64(l.Window)
	}
}

// AppendHolds appends what ReadHolds needs beside a copy of s. Of each hold it writes 0 if it is lost, or else 1 and,
// for each limit that counts,
//
//	sliding_log       1 more than the number of newer units, or 0 where its units are gone
//	calendar windows  the start of the window, signed
//	token_bucket,     the low: nanoseconds and remainder
//	leaky_bucket
//	others            the age of the charge
func (ls Limits) AppendHolds(dst []byte, a *Arena, s State, now Instant, hs Holds) []byte {
	now = s.Latest(now)
	for _, h := range hs {
		if h == nil {
			dst = append(dst, 0)
			continue
		}
		dst = append(dst, 1)
		for k := range ls {
			m, t := &h[k], s[ls.place(k):]
			switch c := ls[k].counter().(type) {
			case nil:
			case slidingLog:
				rank := int64(0)
				if r, older, ok := c.find(a, t, ls[k].tickShift(), m.n); ok {
					rank = 1 + int64(t[logUnits]) - older - r.passInstant(r.instant)
				}
				dst = appendUint(dst, rank)
			case calendarWindow:
				dst = appendInt(dst, m.n)
			case bucket:
				dst = appendUint(appendUint(dst, m.n), m.rest)
			default:
				dst = appendUint(dst, min(now.Mono-m.n, longestAge)) // what is older is in no window
			}
		}
	}
	return dst
}

// longestAge is longer than any charge counts in a window.
const longestAge = 3 * int64(MaxWindow)

// ReadHolds reads n holds that AppendHolds wrote beside a copy of s, and returns what follows them. The bytes need not
// be trusted. The error is ErrSnapshot.
func (ls Limits) ReadHolds(a *Arena, s State, now Instant, n int, data []byte) (hs Holds, rest []byte, err error) {
	now = s.Latest(now)
	r := &reader{data: data}
	for range n {
		if r.uint(1) == 0 {
			hs = append(hs, nil)
			continue
		}
		h := make(Hold, len(ls))
		for k := range ls {
			m, t := &h[k], s[ls.place(k):]
			switch c := ls[k].counter().(type) {
			case nil:
			case slidingLog:
				m.n = gone
				if rank, units := r.uint(MaxLimit), int64(t[logUnits]); rank > 0 && rank <= units {
					m.n = c.unitAt(a, t, ls[k].tickShift(), units-rank+1)
				}
			case calendarWindow:
				m.n = r.int(math.MaxInt64)
			case bucket:
				*m = mark{low: true, n: r.uint(int64(MaxFill)), rest: r.uint(ls[k].Limit - 1)}
			default:
				m.n = now.Mono - r.uint(longestAge)
			}
		}
		hs = append(hs, h)
	}
	return hs, r.data, r.err
}

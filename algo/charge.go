package algo

import "time"

// Charge adds n units at now to every limit without asking for room, as far as a state can count: MaxLimit units. Under
// a concurrency limit the units belong to no lease, so that only the end of its Window gives them back. A charge of 0
// or less does nothing.
//
// The only error is ErrNoMemory, and nothing was charged then.
func (ls Limits) Charge(a *Arena, s State, now Instant, n int64) error {
	if n = min(n, MaxLimit); n <= 0 {
		return nil
	}
	now = s.tick(now)
	var charges [MaxLimits]int64
	ls.walk(a, s, now, func(i int, c counter, t []uint64) { charges[i] = min(n, MaxLimit-c.used(&ls[i], a, t, now)) })
	if !ls.ensureMemory(a, s, &charges) {
		return ErrNoMemory
	}
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		if charges[i] > 0 {
			c.charge(&ls[i], a, t, now, charges[i])
		}
	})
	if p := ls.position(s); p != nil {
		*p += step(n)
	}
	return nil
}

// Fill makes s a state whose limits were all used up at now, in place of admissions that may have been lost: what is in
// use counts as if admitted now, and is brought up to the limit. No room comes back earlier than that of units that
// were admitted now, and a window begins at now, unless it is one of the calendar. Leases stay, so that their holders
// can renew and release them, beside units of the whole limit that belong to no lease.
//
// The only error is ErrNoMemory, and s is as it was then.
func (ls Limits) Fill(a *Arena, s State, now Instant) error {
	now = s.tick(now)
	var charges [MaxLimits]int64
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		charges[i] = max(c.used(&ls[i], a, t, now), ls[i].holds())
		if _, leases := c.(concurrency); leases {
			charges[i] = min(ls[i].holds(), MaxLimit-c.used(&ls[i], a, t, now))
		}
	})
	if !ls.ensureMemory(a, s, &charges) {
		return ErrNoMemory
	}
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		used := c.used(&ls[i], a, t, now)
		switch c.(type) {
		case slidingLog, slidingCounter: // a refund of all would free what was reserved, and forget when windows begin
			c.charge(&ls[i], a, t, now, charges[i])
			c.refund(&ls[i], a, t, now, used)
		default:
			c.refund(&ls[i], a, t, now, used)
			c.charge(&ls[i], a, t, now, charges[i])
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

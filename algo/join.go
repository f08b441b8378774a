package algo

// Join makes s the join of s and t, a state of the same limits in the same Arena; t stays as it is. Two sides of a
// split may have gone on from the same state. Units have no identity, so it cannot be known which of them both sides
// count. Of two counts Join keeps the larger, at every instant. It is idempotent, commutative and associative, and
// the join admits at no later instant more than s or t would:
//
//   - sliding_log and sliding_window: from each instant to now the larger number of units. The join holds at no
//     instant more than the larger of the two. Only where the two have different ticks or slots, units of one side
//     expire late, by less than one of these.
//   - fixed_window goes on with the window that opened later and the larger count.
//   - fixed_window by the calendar keeps the later window; of the same window, the larger count.
//   - sliding_counter goes on with the windows that began later, and in each with the larger count.
//   - token_bucket and leaky_bucket owe the larger debt.
//   - concurrency has the union of the leases by their ids, each until the later of its two ends, and each can be
//     renewed and released as before. Of the units that Charge has added, which have no id, the larger number counts,
//     until the last of both sides' ones end.
//
// In a window that began later, units of the other side may count for less than a Window too long.
//
// The only error is ErrNoMemory, and s is as it was then.
func (ls Limits) Join(a *Arena, s State, now Instant, t State) error {
	now = t.tick(s.tick(now))
	s.tick(now)
	u := make(State, len(s))
	ls.Init(u, now)
	var joined [MaxLimits]bool
	ok := true
	ls.walk(a, s, now, func(i int, c counter, s []uint64) {
		at, l := ls.place(i), &ls[i]
		t, u := t[at:at+len(s)], u[at:at+len(s)]
		c.advance(l, a, t, now)
		if ok && !l.idle(c, a, t, now) {
			joined[i] = true
			ok = c.join(l, a, s, t, now, u)
		}
	})
	if !ok {
		ls.Free(a, u)
		return ErrNoMemory
	}
	ls.walk(a, s, now, func(i int, c counter, s []uint64) {
		if joined[i] {
			c.free(&ls[i], a, s)
			copy(s, u[ls.place(i):])
		}
	})
	if p := ls.position(s); p != nil {
		*p += generation
	}
	return nil
}

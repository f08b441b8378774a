package algo

import (
	"math"
	"slices"
)

// Undoable are charges to one state that may yet be undone, in the order in which they were made: for each where its units
// are, so that Undo takes these and no others, whatever has happened to the state since. It belongs to its state. Every
// charge to the state while there are any is to be told by Charged, and what replaces, converts or merges the state goes
// through the methods below. The zero value is none. It is for one goroutine at a time.
//
// What a charge did to a bucket is not to be seen in the bucket: part of it may have been repaid while the bucket, without the
// charge, would have been full. But what a bucket owes is the most of what is owed on each run of charges that ends with the
// latest (Lindley, The theory of queues with a single server, 1952). So the instants at which it will be full are kept by where
// the runs begin: up to each of the charges here, and after the newest. To undo a charge makes those sooner that begin before it
// was made.
type Undoable struct {
	charges []undoable
	last    []place // of each limit, of buckets: the runs that begin after the newest charge
}

type undoable struct {
	units  int64
	places []place // of each limit
}

// place is where a charge's units are in one counter.
type place struct {
	in bool // false: nowhere that is known
	// at is the instant of the charge; of a calendar window, its start.
	at int64
	// of a fixed window, first says that the charge opened it, and next, if not unset, is the instant of the next charge. Of a
	// bucket, next and rest are the instant at which it will be full, in nanoseconds and limit-ths of one.
	first, bucket bool
	next, rest    int64
	// ended says that a window of those that carry debt has begun since, and debt is the least that any of them has begun with: as much of the
	// charge, at most, still counts.
	ended bool
	debt  int64
	// carried says that the charge was to a limit of another kind, of which most units still counted when this one took its place.
	carried bool
	most    int64
}

// worth is how many units so many of a charge's are in the counter.
func (p *place) worth(units, of int64) int64 {
	if !p.carried || of == 0 {
		return units
	}
	n, _ := mul(min(p.most, of), units).div(of)
	return n
}

const unset = math.MinInt64

// over reports whether a charge was to a fixed or calendar window before the one that begins at start.
func (p *place) over(start int64) bool { return p.ended || p.at < start }

// began notes that the window in which a charge was made has ended, and that later ones have begun with no more than so many units.
func (p *place) began(with int64) {
	if !p.ended {
		p.ended, p.debt = true, with
	}
	p.debt = min(p.debt, with)
}

// Lose makes the charges such that there is nothing left to undo, as the state is dropped.
func (u *Undoable) Lose() {
	for i := range u.charges {
		clear(u.charges[i].places)
	}
	u.last = nil
}

// Lose is the same where the state is not dropped but s now, in which nothing of the charges is known any more.
func (ls Limits) Lose(s State, u *Undoable) {
	u.Lose()
	for k := range ls {
		if _, ok := ls[k].counter().(bucket); ok {
			at, last := ls.place(k), u.lastOf(k)
			last.next, last.rest = int64(s[at]), int64(s[at+1])
		}
	}
}

// Add adds a charge of which it is not known where its units are.
func (u *Undoable) Add(units int64) { u.charges = append(u.charges, undoable{units: units}) }

// place returns the place of charge i in limit k.
func (u *Undoable) place(i, k int) *place {
	c := &u.charges[i]
	if k >= len(c.places) {
		c.places = append(c.places, make([]place, k+1-len(c.places))...)
	}
	return &c.places[k]
}

// each calls do with the place in limit k of every charge whose units are there.
func (u *Undoable) each(k int, do func(*place)) {
	if u == nil {
		return
	}
	for i := range u.charges {
		if c := &u.charges[i]; k < len(c.places) && c.places[k].in {
			do(&c.places[k])
		}
	}
}

func (u *Undoable) lastOf(k int) *place {
	for k >= len(u.last) {
		u.last = append(u.last, place{next: unset})
	}
	return &u.last[k]
}

// Remove forgets charge i, which stays as it is.
func (u *Undoable) Remove(i int) {
	for k := range u.charges[i].places {
		p := u.place(i, k)
		if !p.in || !p.bucket {
			continue
		}
		to := u.lastOf(k)
		for j := i + 1; j < len(u.charges); j++ {
			if q := u.place(j, k); q.in {
				to = q
				break
			}
		}
		to.raise(p)
	}
	u.charges = slices.Delete(u.charges, i, i+1)
	if len(u.charges) == 0 {
		*u = Undoable{}
	}
}

// raise makes a bucket's instant another one, if that is later. Of other limits it has no meaning.
func (p *place) raise(by *place) {
	if p.next < by.next || p.next == by.next && p.rest < by.rest {
		p.next, p.rest = by.next, by.rest
	}
}

// move makes a bucket's instant later by what so many units owe, or sooner.
func (p *place) move(l *Limit, units int64) {
	owed := mul(max(units, -units), int64(l.Window))
	if most := mul(int64(MaxFill), l.Limit); most.less(owed) {
		owed = most // as a bucket that is charged more owes no more
	}
	ns, rest := owed.div(l.Limit)
	p.shift(l, ns, rest, units < 0)
}

// atMost makes a bucket's instant no later than what the bucket says itself.
func (p *place) atMost(next, rest int64) {
	if p.next != unset && (p.next > next || p.next == next && p.rest > rest) {
		p.next, p.rest = next, rest
	}
}

// shift makes the instant later, or sooner, by nanoseconds and limit-ths of one.
func (p *place) shift(l *Limit, ns, rest int64, sooner bool) {
	if p.next == unset {
		return
	}
	if sooner {
		p.next, p.rest = p.next-ns, p.rest-rest
		if p.rest < 0 {
			p.next, p.rest = p.next-1, p.rest+l.Limit
		}
		return
	}
	p.next, p.rest = p.next+ns, p.rest+rest
	if p.rest >= l.Limit {
		p.next, p.rest = p.next+1, p.rest-l.Limit
	}
}

// Charged tells u that units were charged to s, or counted for a refusal, which is what happened to s last. may says that the
// charge may be undone: it becomes the newest of u.
func (ls Limits) Charged(s State, u *Undoable, units int64, may bool) {
	n := len(u.charges)
	if !may && n == 0 {
		return
	}
	now := int64(s[0])
	if may {
		u.charges = append(u.charges, undoable{units, make([]place, len(ls))})
	}
	for k := range ls {
		l := &ls[k]
		t := s[ls.place(k):]
		p := place{in: true, at: now}
		switch l.counter().(type) {
		case nil, concurrency:
			continue
		case calendarWindow:
			p.at = int64(t[0])
			u.began(l, k, p.at, int64(t[2])-units)
		case fixedWindow:
			u.began(l, k, int64(t[0]), int64(t[1])-units)
			p.first, p.next = int64(t[1]) == units, unset
			if n > 0 {
				if before := u.place(n-1, k); before.in && before.next == unset && before.at >= int64(t[0]) {
					before.next = now
				}
			}
		case bucket:
			last := u.lastOf(k)
			if !u.follows(k) {
				last.next, last.rest = int64(t[0]), int64(t[1])
			} else {
				for i := range n {
					if q := u.place(i, k); q.in {
						q.move(l, units)
						q.atMost(int64(t[0]), int64(t[1]))
					}
				}
				last.raise(&place{next: now})
				last.move(l, units)
				last.atMost(int64(t[0]), int64(t[1]))
			}
			p.bucket, p.next, p.rest = true, last.next, last.rest
			if may {
				last.next, last.rest = unset, 0
			}
		}
		if may {
			u.charges[n].places[k] = p
		}
	}
}

// began notes of the charges to a window that carries debt, and has ended, that the one which begins at start has begun with no more than
// so many units.
func (u *Undoable) began(l *Limit, k int, start, with int64) {
	if !l.CarryDebt {
		return
	}
	for i := range u.charges {
		if p := u.place(i, k); p.in && p.over(start) {
			p.began(max(with, 0))
		}
	}
}

// turned is began for a window as it is now.
func (u *Undoable) turned(l *Limit, k int, t []uint64) {
	switch c := l.counter().(type) {
	case fixedWindow, calendarWindow:
		u.began(l, k, int64(t[0]), c.used(l, nil, t, Instant{}))
	}
}

// Turn tells u of the windows of s that have begun by now. Where refusals are counted it is called before a request is decided, because Charged
// does not know how much of a window is a refusal.
func (ls Limits) Turn(a *Arena, s State, now Instant, u *Undoable) {
	ls.walk(a, s, s.tick(now), func(k int, _ counter, t []uint64) { u.turned(&ls[k], k, t) })
}

// repay notes that so many units of charge i, which still counted in windows after its own, do not any more.
func (u *Undoable) repay(i, k int, units int64) {
	p := u.place(i, k)
	p.debt -= units
	for j := range u.charges {
		q := u.place(j, k)
		if !q.in || !q.ended || j == i {
			continue
		}
		if j < i {
			q.debt = min(q.debt, p.debt)
		} else {
			q.debt = max(q.debt-units, 0)
		}
	}
}

// follows says whether any run of charges to a bucket is known: none is before the first charge, nor while it is not known of any where
// its units are.
func (u *Undoable) follows(k int) bool {
	if u.lastOf(k).next != unset {
		return true
	}
	for i := range u.charges {
		if u.place(i, k).in {
			return true
		}
	}
	return false
}

// Undo takes up to units of charge i, the units of which are where they were put or where Convert, Merge and the like have put
// them since, and returns how many that were, the most of any limit. What has expired, was repaid or was refunded meanwhile is
// not given back again. The state is then as if they had never been charged, but that a fixed window which has ended stays
// where it was, and one that began with several charges of one instant may end as late as the next one's would. told
// says that followers may have been told of the charge, see AppendSince. The charge stays in u.
func (ls Limits) Undo(a *Arena, s State, now Instant, u *Undoable, i int, units int64, told bool) int64 {
	now = s.tick(now)
	c := &u.charges[i]
	units = min(max(units, 0), c.units)
	whole := units == c.units
	var most int64
	ls.walk(a, s, now, func(k int, counter counter, t []uint64) {
		l, p := &ls[k], u.place(i, k)
		if !p.in {
			return
		}
		units := p.worth(units, c.units)
		switch counter := counter.(type) {
		case bucket:
			full := *u.lastOf(k)
			for j := range u.charges {
				q := u.place(j, k)
				if !q.in {
					continue // nor are the runs up to that charge in the state
				}
				if j <= i {
					q.move(l, -units)
				}
				full.raise(q)
			}
			full.raise(&place{next: now.Mono})
			before := counter.owed(l, t, now)
			if after := mul(full.next-now.Mono, l.Limit).add(u128{lo: uint64(full.rest)}); after.less(before) {
				counter.setOwed(l, t, now, after)
				back, rest := before.sub(after).div(int64(l.Window))
				if rest > 0 {
					back++
				}
				most = max(most, back)
			}
		case fixedWindow, calendarWindow:
			start, open := int64(t[0]), counter.used(l, a, t, now) > 0
			u.turned(l, k, t)
			n := take(l, a, t, now, p, units)
			if most = max(most, n); p.ended {
				u.repay(i, k, n)
			}
			if !whole || !open || l.Period != 0 || p.over(start) {
				return
			}
			if p.first && p.at == start && p.next != unset {
				t[0] = uint64(p.next)
				if i+1 < len(u.charges) {
					if q := u.place(i+1, k); q.in && q.at == p.next {
						q.first = true
					}
				}
			}
			if i > 0 {
				if q := u.place(i-1, k); q.in && q.next == p.at {
					q.next = p.next
				}
			}
		default:
			most = max(most, take(l, a, t, now, p, units))
		}
	})
	if p := ls.position(s); p != nil && most > 0 {
		if moved := step(units); !told && moved < generation && *p%generation >= moved {
			*p -= moved
		} else {
			*p += generation
		}
	}
	for k := range c.places {
		if p := &c.places[k]; p.carried {
			p.most -= p.worth(units, c.units)
		}
	}
	c.units -= units
	return most
}

// UndoApart is Undo for a state to which the units of charge i were charged by ChargeApart besides the one that u belongs to. u stays as it
// is.
func (ls Limits) UndoApart(a *Arena, s State, now Instant, u *Undoable, i int, units int64) int64 {
	now = s.Latest(now)
	ls.Hold(s, now)
	var most int64
	ls.walk(a, s, now, func(k int, _ counter, t []uint64) {
		if p := u.place(i, k); p.in {
			most = max(most, take(&ls[k], a, t, now, p, p.worth(units, u.charges[i].units)))
		}
	})
	if p := ls.position(s); p != nil && most > 0 {
		*p += generation
	}
	return most
}

// take takes units from where a charge put them and returns how many there were.
func take(l *Limit, a *Arena, t []uint64, now Instant, p *place, units int64) int64 {
	switch c := l.counter().(type) {
	case slidingLog:
		return c.takeAt(a, t, l.tickShift(), p.at, units)
	case slidingWindow:
		i, ok := c.slotOf(l, t, p.at)
		if !ok {
			return 0
		}
		n := min(units, c.count(l, t, i))
		c.setCount(l, t, i, c.count(l, t, i)-n)
		return n
	case slidingCounter:
		w, ok := c.windowOf(l, t, p.at)
		if !ok {
			return 0
		}
		n := min(units, int64(t[w]))
		t[w] -= uint64(n)
		return n
	case fixedWindow, calendarWindow:
		if p.ended {
			units = min(units, p.debt)
		} else if p.over(int64(t[0])) {
			return 0
		}
		return c.refund(l, a, t, now, units)
	case bucket:
		return c.refund(l, a, t, now, units)
	}
	return 0
}

// there reports whether something is left where a charge put its units.
func there(l *Limit, a *Arena, t []uint64, p *place) bool {
	if !p.in {
		return false
	}
	switch c := l.counter().(type) {
	case slidingLog:
		_, _, ok := c.find(a, t, l.tickShift(), p.at)
		return ok
	case slidingWindow:
		i, ok := c.slotOf(l, t, p.at)
		return ok && c.count(l, t, i) > 0
	case slidingCounter:
		w, ok := c.windowOf(l, t, p.at)
		return ok && t[w] > 0
	case fixedWindow, calendarWindow:
		return c.used(l, a, t, Instant{}) > 0 && (!p.over(int64(t[0])) || p.ended && p.debt > 0)
	case bucket:
		return true
	}
	return false
}

// slotOf returns the slot of an instant.
func (c slidingWindow) slotOf(l *Limit, s []uint64, at int64) (int, bool) {
	i := -floorDiv(at-int64(s[0]), c.width(l))
	return int(max(i, 0)), s[1] > 0 && i <= int64(c.slots(l))
}

// windowOf returns the word that counts the window of an instant.
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

// meetAt moves the place of a charge as meet is about to move its units.
func (c slidingCounter) meetAt(l *Limit, s []uint64, other int64, p *place) {
	w, ok := c.windowOf(l, s, p.at)
	if p.in, p.at = ok && s[w] > 0, max(int64(s[0]), other); w == 1 && int64(s[0]) < other {
		p.at--
	}
}

// RefundBeside is Refund for a state some of whose charges may yet be undone.
func (ls Limits) RefundBeside(a *Arena, s State, now Instant, units int64, u *Undoable) int64 {
	now = s.tick(now)
	var before [MaxLimits]u128
	each := func(do func(k int, owed u128)) {
		for k := range ls {
			if c, ok := ls[k].counter().(bucket); ok {
				do(k, c.owed(&ls[k], s[ls.place(k):], now))
			}
		}
	}
	each(func(k int, owed u128) { before[k] = owed })
	n := ls.Refund(a, s, now, units)
	each(func(k int, owed u128) {
		ns, rest := before[k].sub(owed).div(ls[k].Limit)
		for i := range u.charges {
			if p := u.place(i, k); p.in {
				p.shift(&ls[k], ns, rest, true)
			}
		}
		u.lastOf(k).shift(&ls[k], ns, rest, true)
	})
	return n
}

// ConvertBeside is Convert for a state some of whose charges may yet be undone.
func (ls Limits) ConvertBeside(a *Arena, s State, now Instant, to Limits, t State, u *Undoable) error {
	if u == nil || len(u.charges) == 0 {
		return ls.Convert(a, s, now, to, t)
	}
	now = s.tick(now)
	from := ls.heirs(to)
	next := Undoable{charges: make([]undoable, len(u.charges))}
	for i := range next.charges {
		next.charges[i] = undoable{u.charges[i].units, make([]place, len(to))}
	}
	ranks := make([][MaxLimits]int64, len(u.charges))
	var counting [MaxLimits][]int64
	carried := [MaxLimits]bool{}
	for k := range to {
		old := from[k]
		if old < 0 || ls[old].counter() == nil || to[k].counter() == nil {
			continue
		}
		l, words := &ls[old], s[ls.place(old):]
		words = words[:l.words():l.words()]
		l.counter().advance(l, a, words, now)
		u.turned(l, old, words)
		same := sameKind(l, &to[k])
		if _, ok := l.counter().(slidingCounter); ok {
			same = same && l.Window == to[k].Window
		}
		if !same {
			counting[k] = u.counting(l, a, words, now, old)
		}
		for i := range u.charges {
			p := *u.place(i, old)
			if p.in = there(l, a, words, &p); !p.in {
				continue
			}
			switch c := l.counter().(type) {
			case slidingLog:
				ranks[i][k], _, _ = c.find(a, words, l.tickShift(), p.at)
			case slidingWindow:
				if same && (l.Window != to[k].Window || c.width(l) != c.width(&to[k])) {
					slot, _ := c.slotOf(l, words, p.at)
					p.at = min(int64(words[0])-int64(slot-1)*c.width(l)-1, now.Mono)
				}
			case bucket:
				if same && (l.Limit != to[k].Limit || l.Window != to[k].Window) {
					p.rerate(l, &to[k], now)
				}
			case fixedWindow, calendarWindow:
				if p.ended && !to[k].CarryDebt { // what is left of it counts until the window that is open ends
					n := p.worth(u.charges[i].units, u.charges[i].units)
					p = place{in: true, at: int64(words[0]), next: unset, carried: true, most: min(n, p.debt)}
				}
			}
			next.charges[i].places[k] = p
		}
		if _, ok := l.counter().(bucket); ok && same {
			last := *u.lastOf(old)
			if last.next != unset && (l.Limit != to[k].Limit || l.Window != to[k].Window) {
				last.rerate(l, &to[k], now)
			}
			*next.lastOf(k) = last
		}
		carried[k] = !same
	}
	if err := ls.Convert(a, s, now, to, t); err != nil {
		return err
	}
	for k := range to {
		words := t[to.place(k):]
		if carried[k] {
			to.carryBeside(words, k, now, &next, counting[k])
			continue
		}
		if c, ok := to[k].counter().(slidingLog); ok {
			for i := range next.charges {
				if p := &next.charges[i].places[k]; p.in {
					p.at, p.in = c.instantAt(a, words, to[k].tickShift(), ranks[i][k])
				}
			}
		}
	}
	*u = next
	return nil
}

// counting is of how many units each charge makes what limit k, whose words s are, has in use: no more than it charged, and fewer
// where part has been repaid or refunded, or has lost weight. Those of all together are no more than the difference that they make.
func (u *Undoable) counting(l *Limit, a *Arena, s []uint64, now Instant, k int) []int64 {
	units := make([]int64, len(u.charges))
	t := slices.Clone(s)
	log, isLog := l.counter().(slidingLog)
	b, isBucket := l.counter().(bucket)
	without := func(skip int) u128 { // what a bucket owes without the charges up to one
		full := *u.lastOf(k)
		for j := range u.charges {
			q := *u.place(j, k)
			if !q.in {
				continue
			}
			for i := j; i <= skip; i++ {
				if u.place(i, k).in {
					q.move(l, -u.place(i, k).worth(u.charges[i].units, u.charges[i].units))
				}
			}
			full.raise(&q)
		}
		full.raise(&place{next: now.Mono})
		owed := mul(full.next-now.Mono, l.Limit).add(u128{lo: uint64(full.rest)})
		if before := b.owed(l, s, now); before.less(owed) {
			return before
		}
		return owed
	}
	left := make(map[int64]int64) // of a log, by how many units are newer
	var debt int64                // of a window, that is of charges before
	for i := range u.charges {
		p := u.place(i, k)
		if !there(l, a, t, p) {
			continue
		}
		n := p.worth(u.charges[i].units, u.charges[i].units)
		switch {
		case isLog:
			// A refund takes the oldest: where units at the charge's instant are gone there are no older ones.
			newer, _, _ := log.find(a, t, l.tickShift(), p.at)
			if _, ok := left[newer]; !ok {
				left[newer] = int64(t[logUnits]) - newer
			}
			units[i] = min(n, left[newer])
			left[newer] -= units[i]
		case isBucket:
			less := b.owed(l, s, now).sub(without(i))
			if i > 0 {
				less = without(i - 1).sub(without(i))
			}
			units[i], _ = less.div(int64(l.Window)) // rounded down: what is left is rounded up
		default:
			q := *p
			q.debt = max(q.debt-debt, 0)
			units[i] = take(l, a, t, now, &q, n)
			if p.ended {
				debt += units[i]
			}
			if c, ok := l.counter().(slidingCounter); ok {
				if w, _ := c.windowOf(l, s, p.at); w == 1 { // rounded down as well
					units[i], _ = mul(units[i], max(int64(l.Window)-(now.Mono-int64(s[0])), 0)).div(int64(l.Window))
				}
			}
		}
		units[i] = min(units[i], u.charges[i].units)
	}
	return units
}

// carryBeside says where charges are in limit k, whose words s are, when all that the former limit had in use has been charged to it
// at once: those of u first, then the others.
func (ls Limits) carryBeside(s []uint64, k int, now Instant, u *Undoable, units []int64) {
	l := &ls[k]
	full := place{next: int64(s[0]), rest: int64(s[1])}
	for i := range u.charges {
		p := &u.charges[i].places[k]
		in := p.in && units[i] > 0
		*p = place{in: in, at: now.Mono, next: unset, carried: true, most: units[i]}
		switch l.counter().(type) {
		case slidingLog:
			p.at = int64(s[logNewest])
		case calendarWindow:
			p.at = int64(s[0])
		case fixedWindow:
			p.next = now.Mono
		case bucket:
			p.bucket, p.next, p.rest = true, full.next, full.rest
			if in {
				full.move(l, -units[i])
			}
		}
	}
	if _, ok := l.counter().(bucket); ok {
		*u.lastOf(k) = full
	}
}

// rerate makes a bucket's instant that of another rate, as convert does.
func (p *place) rerate(l, to *Limit, now Instant) {
	c, s := bucket{}, []uint64{uint64(p.next), uint64(p.rest)}
	n := c.used(l, nil, s, now)
	c.setOwed(to, s, now, mul(n, int64(to.Window)))
	p.next, p.rest = int64(s[0]), int64(s[1])
}

// MergeBeside is Merge for states some of whose charges may yet be undone: u of s, v of t. Those of v that are in t, and that
// skip does not name, become the newest of u; their indices are returned. apart says that t is held apart from the state that v
// belongs to, see UndoApart.
func (ls Limits) MergeBeside(a *Arena, s State, now Instant, t State, u, v *Undoable, skip func(i int) bool, apart bool) (moved []int, err error) {
	now = t.tick(s.tick(now))
	s.tick(now)
	w := Undoable{last: slices.Clone(v.last)}
	for i := range v.charges {
		w.charges = append(w.charges, undoable{v.charges[i].units, slices.Clone(v.charges[i].places)})
	}
	for i := len(v.charges) - 1; i >= 0; i-- {
		if skip(i) {
			w.Remove(i)
		} else {
			moved = append(moved, i)
		}
	}
	slices.Reverse(moved)
	fresh := make([]undoable, len(moved))
	for n := range fresh {
		fresh[n] = undoable{w.charges[n].units, make([]place, len(ls))}
	}
	var lasts []place
	in := make([]bool, len(fresh))
	ls.walk(a, s, now, func(k int, c counter, x []uint64) {
		l, at := &ls[k], ls.place(k)
		y := t[at : at+len(x) : at+len(x)]
		c.advance(l, a, y, now)
		_, fills := c.(bucket)
		if c.used(l, a, y, now) == 0 && !fills {
			return
		}
		empty := c.used(l, a, x, now) == 0
		for n := range fresh {
			p := *w.place(n, k)
			if p.in = there(l, a, y, &p); p.in {
				in[n] = true
				fresh[n].places[k] = p
			}
		}
		each := func(of []undoable, do func(p *place)) { (&Undoable{charges: of}).each(k, do) }
		each(u.charges, func(p *place) { p.in = there(l, a, x, p) }) // what is merged is not in the place of what is gone
		switch c := c.(type) {
		case slidingLog:
			each(fresh, func(p *place) { p.at = c.mergedAt(l, a, x, y, now, p.at) })
		case slidingWindow:
			if !empty {
				each(fresh, func(p *place) {
					slot, _ := c.slotOf(l, y, p.at)
					p.at = min(int64(y[0])-int64(slot-1)*c.width(l)-1, now.Mono)
				})
			}
		case slidingCounter:
			if !empty && x[0] != y[0] {
				each(u.charges, func(p *place) { c.meetAt(l, x, int64(y[0]), p) })
				each(fresh, func(p *place) { c.meetAt(l, y, int64(x[0]), p) })
			}
		case fixedWindow:
			start := int64(y[0])
			if !empty {
				start = max(start, int64(x[0]))
			}
			put := func(of []uint64) func(p *place) {
				return func(p *place) {
					if p.in = !p.over(int64(of[0])) || p.ended; !empty {
						p.at, p.first, p.next = start, false, unset
					}
				}
			}
			each(u.charges, put(x))
			each(fresh, put(y))
		case bucket:
			ns, rest := c.owed(l, y, now).div(l.Limit)
			each(u.charges, func(p *place) { p.raise(&place{next: now.Mono}); p.shift(l, ns, rest, false) })
			// Where no charge came after the newest that may be undone, what the other state holds has: without that charge it is owed.
			if u.follows(k) {
				last := u.lastOf(k)
				last.raise(&place{next: now.Mono})
				last.shift(l, ns, rest, false)
			}
			if len(fresh) == 0 {
				return
			}
			ns, rest = c.owed(l, x, now).div(l.Limit)
			last := *w.lastOf(k)
			if apart {
				// What is held owes each charge as a whole.
				last = place{next: max(int64(y[0]), now.Mono), rest: int64(y[1])}
				for n := range fresh {
					if p := &fresh[n].places[k]; p.in {
						p.next, p.rest = last.next, last.rest
						last.move(l, -fresh[n].units)
					}
				}
			}
			for k >= len(lasts) {
				lasts = append(lasts, place{next: unset})
			}
			each(fresh, func(p *place) { p.raise(&place{next: now.Mono}); p.shift(l, ns, rest, false) })
			if w.follows(k) {
				last.raise(&place{next: now.Mono})
				last.shift(l, ns, rest, false)
			}
			lasts[k] = last
		}
	})
	if err := ls.Merge(a, s, now, t); err != nil {
		return nil, err
	}
	kept := moved[:0]
	for n, i := range moved {
		if in[n] {
			u.charges = append(u.charges, fresh[n])
			kept = append(kept, i)
		}
	}
	if len(kept) > 0 {
		for k := range lasts {
			u.lastOf(k).raise(&lasts[k])
		}
	}
	return kept, nil
}

// AppendUndoable appends what ReadUndoable needs to know of u beside a copy of s: for each limit of each charge, 0 where its
// units are in none, or 1, and 2 more and of how many units it was carried over from another algorithm, and 4 more and how many units, at
// most, are debt of windows that have ended. For a charge without such debt follows
//
//	fixed_window     time from the window's start to the charge, whether that opened it; 0, or 1 more than the time from there to
//	                 the next charge; of a calendar window nothing
//	sliding_window   number of slots that are newer
//	sliding_counter  number of windows that are newer
//	sliding_log      number of units that are newer
//	token_bucket,    signed time until it will be full, remainder, of runs up to the charge
//	leaky_bucket
//
// and then, for each bucket, the same of the runs after the newest charge.
func (ls Limits) AppendUndoable(dst []byte, a *Arena, s State, now Instant, u *Undoable) []byte {
	now = s.tick(now)
	ls.walk(a, s, now, func(int, counter, []uint64) { /* what has expired goes */ })
	full := func(p *place) {
		dst = appendUint(appendInt(dst, p.next-now.Mono), p.rest)
	}
	for i := range u.charges {
		for k := range ls {
			c := ls[k].counter()
			if c == nil {
				continue
			}
			l, p := &ls[k], u.place(i, k)
			t := s[ls.place(k):]
			t = t[:c.words(l):c.words(l)]
			u.turned(l, k, t)
			if !there(l, a, t, p) {
				dst = append(dst, 0)
				continue
			}
			in := byte(1)
			if p.carried {
				in |= 2
			}
			if p.ended {
				in |= 4
			}
			if dst = append(dst, in); p.carried {
				dst = appendUint(dst, p.most)
			}
			if p.ended {
				dst = appendUint(dst, p.debt)
				continue
			}
			switch c := c.(type) {
			case bucket:
				full(p)
			case slidingLog:
				rank, _, _ := c.find(a, t, l.tickShift(), p.at)
				dst = appendUint(dst, rank)
			case slidingWindow:
				slot, _ := c.slotOf(l, t, p.at)
				dst = appendUint(dst, int64(slot))
			case slidingCounter:
				w, _ := c.windowOf(l, t, p.at)
				dst = appendUint(dst, int64(2-w))
			case fixedWindow:
				dst = appendUint(dst, p.at-int64(t[0]))
				first, next := int64(0), int64(0)
				if p.first {
					first = 1
				}
				if p.next != unset {
					next = 1 + p.next - p.at
				}
				dst = appendUint(appendUint(dst, first), next)
			}
		}
	}
	for k := range ls {
		if _, ok := ls[k].counter().(bucket); ok {
			if last := u.lastOf(k); last.next != unset {
				dst = append(dst, 1)
				full(last)
			} else {
				dst = append(dst, 0)
			}
		}
	}
	return dst
}

// ReadUndoable makes u, whose charges it replaces, what AppendUndoable wrote of so many units each beside a copy of s, and
// returns what follows it. The bytes need not be trusted. The error is ErrSnapshot.
func (ls Limits) ReadUndoable(a *Arena, s State, now Instant, u *Undoable, units []int64, data []byte) (rest []byte, err error) {
	now = s.tick(now)
	ls.walk(a, s, now, func(int, counter, []uint64) { /* as above */ })
	*u = Undoable{}
	r := &reader{data: data}
	full := func(l *Limit) place {
		return place{in: true, at: now.Mono, bucket: true, next: now.Mono + r.int(int64(MaxFill)), rest: r.uint(l.Limit - 1)}
	}
	for _, n := range units {
		c := undoable{n, make([]place, len(ls))}
		for k := range ls {
			counter := ls[k].counter()
			if counter == nil {
				continue
			}
			in := r.byte()
			if in > 7 || in != 0 && in&1 == 0 {
				return nil, ErrSnapshot
			} else if in == 0 {
				continue
			}
			l, p := &ls[k], place{in: true, next: unset}
			carried, ended := in&2 != 0, in&4 != 0
			var most int64
			if carried {
				most = r.uint(MaxLimit) // the charge may be one of which the reader knows nothing
			}
			t := s[ls.place(k):]
			if ended {
				if !l.CarryDebt {
					return nil, ErrSnapshot
				}
				p.at, p.ended, p.debt, p.carried, p.most = int64(t[0])-1, true, r.uint(MaxLimit), carried, most
				c.places[k] = p
				continue
			}
			switch c := counter.(type) {
			case slidingLog:
				p.at, p.in = c.instantAt(a, t, l.tickShift(), r.uint(MaxLimit))
			case slidingWindow:
				p.at = int64(t[0]) - r.uint(int64(c.slots(l)))*c.width(l)
			case slidingCounter:
				p.at = int64(t[0]) - r.uint(1)
			case fixedWindow:
				p.at = int64(t[0]) + r.uint(int64(MaxWindow))
				p.first = r.uint(1) == 1
				if next := r.uint(int64(MaxWindow)); next > 0 {
					p.next = p.at + next - 1
				}
			case calendarWindow:
				p.at = int64(t[0])
			case bucket:
				p = full(l)
			default:
				return nil, ErrSnapshot
			}
			p.carried, p.most = carried, most
			c.places[k] = p
		}
		u.charges = append(u.charges, c)
	}
	for k := range ls {
		if _, ok := ls[k].counter().(bucket); !ok {
			continue
		}
		if in := r.byte(); in > 1 {
			return nil, ErrSnapshot
		} else if in == 1 {
			last := full(&ls[k])
			last.in = false
			*u.lastOf(k) = last
		}
	}
	if r.err != nil {
		return nil, r.err
	}
	if len(u.charges) == 0 {
		*u = Undoable{}
	}
	return r.data, nil
}

package algo

import (
	"math"
	"time"
)

// slidingWindow divides time into slots of equal width and counts what each admitted. A slot counts until its end is
// l.Window old: so never more than the limit pass in any Window, and an admission is held against its caller for at
// most one slot's width too long. (The "ring of buckets" of many limiters, which usually forget a slot when its
// beginning is one Window old and then let too much pass.)
//
// Words: start of the newest slot; sum of the counts; then the counts, the newest slot's first, slots+1 of them since
// the oldest still counts while the newest fills. Two counts share a word when the limit is below 1<<32.
//
// The slots of a fresh state begin at multiples of their width. After a move to a process with another clock they
// begin where they did before, in terms of age, until the state has been empty.
type slidingWindow struct{ inline }

// slots is the number of slots that make up a window. There is one more counter.
func (slidingWindow) slots(l *Limit) int {
	if l.Slots == 0 {
		return DefaultSlots
	}
	return int(l.Slots)
}

// width of a slot in nanoseconds.
func (c slidingWindow) width(l *Limit) int64 {
	n := int64(c.slots(l))
	return (int64(l.Window) + n - 1) / n
}

// narrow reports whether two counts share a word.
func (slidingWindow) narrow(l *Limit) bool { return l.Limit <= math.MaxUint32 }

func (c slidingWindow) words(l *Limit) int {
	n := c.slots(l) + 1
	if c.narrow(l) {
		n = (n + 1) / 2
	}
	return 2 + n
}

func (c slidingWindow) count(l *Limit, s []uint64, i int) int64 {
	if c.narrow(l) {
		return int64(uint32(s[2+i/2] >> (i % 2 * 32)))
	}
	return int64(s[2+i])
}

// setCount puts n in slot i. What does not fit is cut down to what is beyond the limit still: only a lowered limit gets
// there.
func (c slidingWindow) setCount(l *Limit, s []uint64, i int, n int64) {
	if c.narrow(l) {
		n = min(n, math.MaxUint32)
		w, shift := &s[2+i/2], i%2*32
		s[1] += uint64(n) - *w>>shift&math.MaxUint32
		*w = *w&^(math.MaxUint32<<shift) | uint64(n)<<shift
		return
	}
	s[1] += uint64(n) - s[2+i]
	s[2+i] = uint64(n)
}

// expiry is the instant at which slot i no longer counts.
func (c slidingWindow) expiry(l *Limit, s []uint64, i int) int64 {
	return int64(s[0]) - int64(i-1)*c.width(l) + int64(l.Window)
}

func (c slidingWindow) advance(l *Limit, _ *Arena, s []uint64, now Instant) {
	if s[1] == 0 {
		return
	}
	last, width := c.slots(l), c.width(l)
	if steps := (now.Mono - int64(s[0])) / width; steps > int64(last) {
		clear(s)
		return
	} else if steps > 0 {
		for i := last; i >= 0; i-- {
			var n int64
			if j := i - int(steps); j >= 0 {
				n = c.count(l, s, j)
			}
			c.setCount(l, s, i, n)
		}
		s[0] += uint64(steps * width)
	}
	// When the slots do not divide the window evenly the oldest goes before the newest is full.
	if now.Mono >= c.expiry(l, s, last) {
		c.setCount(l, s, last, 0)
	}
}

func (slidingWindow) used(_ *Limit, _ *Arena, s []uint64, _ Instant) int64 { return int64(s[1]) }

func (c slidingWindow) wait(l *Limit, _ *Arena, s []uint64, now Instant, n int64) time.Duration {
	over := int64(s[1]) + n - l.Limit
	i := c.slots(l)
	for over -= c.count(l, s, i); over > 0; over -= c.count(l, s, i) {
		i--
	}
	return time.Duration(c.expiry(l, s, i) - now.Mono)
}

func (c slidingWindow) resetAfter(l *Limit, _ *Arena, s []uint64, now Instant) time.Duration {
	if s[1] == 0 {
		return 0
	}
	i := 0
	for c.count(l, s, i) == 0 {
		i++
	}
	return time.Duration(c.expiry(l, s, i) - now.Mono)
}

func (c slidingWindow) charge(l *Limit, _ *Arena, s []uint64, now Instant, n int64) {
	if s[1] == 0 {
		s[0] = uint64(floorDiv(now.Mono, c.width(l)) * c.width(l))
	}
	c.setCount(l, s, 0, c.count(l, s, 0)+n)
}

func (c slidingWindow) refund(l *Limit, _ *Arena, s []uint64, _ Instant, n int64) int64 {
	n = min(n, int64(s[1]))
	left := n
	for i := c.slots(l); left > 0; i-- {
		have := c.count(l, s, i)
		take := min(left, have)
		c.setCount(l, s, i, have-take)
		left -= take
	}
	return n
}

// convert keeps the slots if they stay as wide, and as many. Otherwise their units count as admitted now.
func (c slidingWindow) convert(l *Limit, _ *Arena, s []uint64, now Instant, to *Limit, t []uint64) {
	switch {
	case s[1] == 0:
	case l.Window == to.Window && c.slots(l) == c.slots(to):
		t[0] = s[0]
		for i := range c.slots(l) + 1 {
			c.setCount(to, t, i, c.count(l, s, i))
		}
	default:
		c.charge(to, nil, t, now, min(int64(s[1]), MaxLimit))
	}
}

func (c slidingWindow) snapshot(dst []byte, l *Limit, _ *Arena, s []uint64, now Instant) []byte {
	last := c.slots(l)
	for c.count(l, s, last) == 0 {
		last--
	}
	dst = appendUint(dst, now.Mono-int64(s[0]))
	dst = appendUint(dst, int64(last))
	for i := range last + 1 {
		dst = appendUint(dst, c.count(l, s, i))
	}
	return dst
}

func (c slidingWindow) restore(l *Limit, _ *Arena, s []uint64, now Instant, r *reader) error {
	most := MaxLimit
	if c.narrow(l) {
		most = math.MaxUint32
	}
	s[0] = uint64(now.Mono - r.age())
	last := int(r.uint(int64(c.slots(l))))
	for i := 0; i <= last && r.err == nil; i++ {
		c.setCount(l, s, i, r.uint(most))
	}
	if r.err == nil && int64(s[1]) > MaxLimit {
		return ErrSnapshot
	}
	return r.err
}

// join compares suffix counts: from each slot to the newest, the larger number. It goes on with the slots of the side
// whose newest began later. A slot of the other side counts in the one that has its last instant, so that its units
// expire late, by less than a width, where the slots of the two do not begin at the same instants.
func (c slidingWindow) join(l *Limit, _ *Arena, s, t []uint64, _ Instant, u []uint64) bool {
	if s[1] == 0 || int64(s[0]) < int64(t[0]) && t[1] != 0 {
		s, t = t, s
	}
	var moved [MaxSlots + 1]int64
	width := c.width(l)
	for i := range c.slots(l) + 1 {
		if n := c.count(l, t, i); n > 0 {
			last := int64(t[0]) - int64(i-1)*width - 1
			moved[-floorDiv(last-int64(s[0]), width)] += n
		}
	}
	u[0] = s[0]
	var mine, other, joined int64
	for i := range c.slots(l) + 1 {
		mine, other = mine+c.count(l, s, i), other+moved[i]
		c.setCount(l, u, i, max(mine, other)-joined)
		joined = max(mine, other)
	}
	return true
}

// horizon: a slot counts until its end is a Window old.
func (c slidingWindow) horizon(l *Limit) time.Duration { return l.Window + time.Duration(c.width(l)) }

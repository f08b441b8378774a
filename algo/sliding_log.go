package algo

import (
	"math"
	"math/bits"
	"time"
)

// slidingLog keeps the instant of every admission of the last l.Window, and so knows exactly how many there were in any
// half-open interval of that length. (The "sliding window log" of the literature; Redis users know it as a sorted set.)
//
// The log counts instants in ticks. A tick is the shortest power of two of nanoseconds for which the window and one tick
// more are at most 1<<31 ticks. An instant is rounded up to its tick, so that it expires late by less than a tick, and
// never early. Ticks of a fresh log are multiples of their length; in a log that has been moved they are where they were
// before, in terms of age, until it has been empty.
//
// The log is a chain of segments, blocks of the Arena with entries of 32-bit words. An entry is
//
//	tick                      one unit
//	tick, more|n              1 + n units at one tick, n below 1<<31
//	tick, more|low, more|high beyond that, 31 bits in each word
//
// where tick is the lowest 31 bits of the instant in ticks: since no two entries are 1<<31 ticks apart, that and the
// newest entry's whole instant tell every other's. The bit more tells a count from a tick, so that the newest entry can be
// found from the end of its segment. No unit takes more than one 32-bit word. With headers, room left in segments and
// pages, and the Arena's tables, a full log of single units takes, for each of them, 8.1 bytes when its limit is 5, 5.9 at
// 100, 4.7 at 1000, 4.3 at 10,000, 4.1 at 100,000 and beyond (TestLogMemory); besides the words of the state.
//
// Words: instant of the newest entry in nanoseconds; units; oldest and newest segment; words of all segments (32 bits) and
// where in its segment the oldest entry begins (32).
//
// Invariants: all words are zero when the log is empty. Otherwise the oldest segment has an entry; others may have none.
// Entries are in the order of their instants. Each segment counts its units, and their sum is that of the log.
//
// What happens to an admission: reserve makes room in the newest segment, and charge writes it there (add). advance removes
// it when it has expired, from the oldest segment on (expire). Before that refund may take it as one of the oldest units, or
// takeAt as one of the units of its instant, when a reservation is cancelled. wait looks for the unit whose expiry makes
// room (unitAt). entries writes it into a snapshot, or into what a copy is told, and readEntries reads it there.
type slidingLog struct{}

const (
	logNewest = iota
	logUnits
	logChain
	logPlace
	logWords
)

const (
	tickBits    = 31
	tickMask    = 1<<tickBits - 1
	moreFlag    = 1 << tickBits
	longestTick = 1 << 24 // of MaxWindow, in nanoseconds
)

func (slidingLog) words(*Limit) int { return logWords }

func (slidingLog) init(_ *Limit, s []uint64, _ Instant) { clear(s) }

// tickShift is the logarithm of the length of a tick in nanoseconds.
func (l *Limit) tickShift() int {
	window := uint64(l.Window)
	k := max(bits.Len64(window)-tickBits, 0)
	if window+1<<k > 1<<(tickBits+k) {
		k++
	}
	return k
}

// tickOf is the tick of an instant that lies on one.
func tickOf(instant int64, k int) uint32 { return uint32(instant>>k) & tickMask }

// instantOf is the instant of an entry, in nanoseconds.
func instantOf(s []uint64, tick uint32, k int) int64 {
	newest := int64(s[logNewest])
	return newest - int64((tickOf(newest, k)-tick)&tickMask)<<k
}

// roundUp is the first multiple of a tick that is not before now.
func roundUp(now int64, k int) int64 { return (now + 1<<k - 1) >> k << k }

// segment is a block of the log: two words of header, then entries.
//
// Word 0 holds the next segment's Ref (32 bits), the words of the block (16) and the entries' end (16), counted in
// 32-bit words. Word 1 holds the number of units in the segment.
type segment []uint64

const segmentHeader = 2

func segmentAt(a *Arena, r Ref) segment {
	return segment(a.Block(r, segment(a.Block(r, segmentHeader)).size()))
}

func newSegment(a *Arena, words int) (Ref, bool) {
	r, ok := a.Alloc(words)
	if ok {
		a.Block(r, 1)[0] = uint64(words) << 16
	}
	return r, ok
}

func (g segment) next() Ref     { return Ref(g[0] >> 32) }
func (g segment) size() int     { return int(g[0] >> 16 & 0xffff) }
func (g segment) end() int      { return int(g[0] & 0xffff) }
func (g segment) capacity() int { return 2 * (len(g) - segmentHeader) }

func (g segment) setNext(r Ref)  { g[0] = g[0]&0xffff_ffff | uint64(r)<<32 }
func (g segment) setEnd(end int) { g[0] = g[0]&^0xffff | uint64(end) }

func (g segment) get(i int) uint32 { return uint32(g[segmentHeader+i>>1] >> (uint(i) & 1 * 32)) }

func (g segment) set(i int, v uint32) {
	w, shift := &g[segmentHeader+i>>1], uint(i)&1*32
	*w = *w&^(0xffff_ffff<<shift) | uint64(v)<<shift
}

// entry returns the entry at i and the number of 32-bit words it takes.
func (g segment) entry(i int) (tick uint32, n int64, size int) {
	tick, n, size = g.get(i), 1, 1
	for end := g.end(); i+size < end && g.get(i+size)&moreFlag != 0; size++ {
		n += int64(g.get(i+size)&tickMask) << (tickBits * (size - 1))
	}
	return tick, n, size
}

// setUnits makes the entry at i one of n units, in the size words that it takes.
func (g segment) setUnits(i, size int, n int64) {
	n--
	for k := 1; k < size; k++ {
		g.set(i+k, uint32(n&tickMask)|moreFlag)
		n >>= tickBits
	}
}

// entrySize is the number of 32-bit words that an entry of n units takes.
func entrySize(n int64) int {
	switch {
	case n == 1:
		return 1
	case (n-1)>>tickBits == 0:
		return 2
	}
	return 3
}

// pos is where the oldest entry begins in its segment, and size the words of all segments.
func (slidingLog) pos(s []uint64) int           { return int(uint32(s[logPlace])) }
func (slidingLog) size(s []uint64) int          { return int(s[logPlace] >> 32) }
func (slidingLog) setPos(s []uint64, pos int)   { s[logPlace] = s[logPlace]&^0xffff_ffff | uint64(pos) }
func (slidingLog) addSize(s []uint64, more int) { s[logPlace] += uint64(more) << 32 }

func (slidingLog) oldest(s []uint64) Ref { return Ref(s[logChain] >> 32) }
func (slidingLog) newest(s []uint64) Ref { return Ref(s[logChain]) }

func (slidingLog) setChain(s []uint64, oldest, newest Ref) {
	s[logChain] = uint64(oldest)<<32 | uint64(newest)
}

func (c slidingLog) free(_ *Limit, a *Arena, s []uint64) {
	for r := c.oldest(s); r != 0; {
		g := segmentAt(a, r)
		next := g.next()
		a.Free(r, g.size())
		r = next
	}
	clear(s)
}

// dropSegment frees the oldest segment with all that is in it; there must be a next.
func (c slidingLog) dropSegment(a *Arena, s []uint64, g segment) {
	c.addSize(s, -g.size())
	c.setPos(s, 0)
	s[logUnits] -= g[1]
	next := g.next()
	a.Free(c.oldest(s), g.size())
	c.setChain(s, next, c.newest(s))
}

// dropEmpty frees the oldest segments that have no entry any more, of a log that has some.
func (c slidingLog) dropEmpty(a *Arena, s []uint64) {
	for {
		g := segmentAt(a, c.oldest(s))
		if c.pos(s) < g.end() {
			return
		}
		c.dropSegment(a, s, g)
	}
}

func (c slidingLog) advance(l *Limit, a *Arena, s []uint64, now Instant) {
	if s[logUnits] != 0 {
		c.expire(l, a, s, l.tickShift(), now.Mono-int64(l.Window))
	}
}

// expire removes what is not later than horizon from a log that is not empty.
func (c slidingLog) expire(l *Limit, a *Arena, s []uint64, k int, horizon int64) {
	if g := segmentAt(a, c.oldest(s)); instantOf(s, g.get(c.pos(s)), k) > horizon {
		return
	}
	if int64(s[logNewest]) <= horizon {
		c.free(l, a, s)
		return
	}
	for {
		g, pos := segmentAt(a, c.oldest(s)), c.pos(s)
		// What precedes an expired entry has expired: so whole segments first, for a log that was full and then left alone.
		if next := g.next(); next != 0 {
			if h := segmentAt(a, next); h.end() > 0 && instantOf(s, h.get(0), k) <= horizon {
				c.dropSegment(a, s, g)
				continue
			}
		}
		for pos < g.end() {
			tick, n, size := g.entry(pos)
			if instantOf(s, tick, k) > horizon {
				c.setPos(s, pos)
				return
			}
			pos += size
			g[1] -= uint64(n)
			s[logUnits] -= uint64(n)
		}
		c.dropSegment(a, s, g)
	}
}

func (slidingLog) used(_ *Limit, _ *Arena, s []uint64, _ Instant) int64 { return int64(s[logUnits]) }

func (c slidingLog) wait(l *Limit, a *Arena, s []uint64, now Instant, n int64) time.Duration {
	over := int64(s[logUnits]) + n - l.Limit
	// Room is made when the over-th oldest unit expires.
	return time.Duration(c.unitAt(a, s, l.tickShift(), over)-now.Mono) + l.Window
}

func (slidingLog) resetAfter(l *Limit, _ *Arena, s []uint64, now Instant) time.Duration {
	if s[logUnits] == 0 {
		return 0
	}
	return time.Duration(int64(s[logNewest])-now.Mono) + l.Window
}

// reserve makes sure that the newest segment has room for what charge may write. The first segments are small, for most
// keys are; later ones are such that the half-empty ones at both ends and the headers of those between weigh about the
// same: the root of twice what the log holds, as a power of two, for these use up pages without remainder.
func (c slidingLog) reserve(l *Limit, a *Arena, s []uint64, n int64) bool {
	last := c.newest(s)
	if last != 0 {
		if g := segmentAt(a, last); g.end()+entrySize(max(n, 1)) <= g.capacity() {
			return true
		}
	}
	words := min(max(4, 1<<(bits.Len(uint(2*c.size(s)))/2)), MaxBlock)
	switch {
	case last != 0:
	case l.Limit <= 2 && n <= 2:
		words = segmentHeader + 1 // the whole log, as below
	case l.Limit == 5 || l.Limit == 6:
		words = segmentHeader + 3
	}
	r, ok := newSegment(a, words)
	if !ok {
		return false
	}
	c.addSize(s, words)
	if last == 0 {
		c.setChain(s, r, r)
		return true
	}
	segmentAt(a, last).setNext(r)
	c.setChain(s, c.oldest(s), r)
	return true
}

func (c slidingLog) charge(l *Limit, a *Arena, s []uint64, now Instant, n int64) {
	k := l.tickShift()
	instant := roundUp(now.Mono, k)
	if s[logUnits] > 0 {
		instant = c.onTick(s, k, now.Mono)
	}
	c.add(a, s, instant, k, n)
}

// add writes n units at an instant on a tick that is not before the newest entry's. Units of that tick join the newest entry if it is in the
// newest segment. It then takes no more words in addition than an entry of n units has.
func (c slidingLog) add(a *Arena, s []uint64, instant int64, k int, n int64) {
	g := segmentAt(a, c.newest(s))
	at := g.end()
	g[1] += uint64(n)
	s[logUnits] += uint64(n)
	if at > 0 && instant == int64(s[logNewest]) {
		for at--; g.get(at)&moreFlag != 0; {
			at--
		}
		_, have, _ := g.entry(at)
		n += have
	}
	s[logNewest] = uint64(instant)
	size := entrySize(n)
	g.set(at, tickOf(instant, k))
	g.setUnits(at, size, n)
	g.setEnd(at + size)
}

func (c slidingLog) refund(l *Limit, a *Arena, s []uint64, _ Instant, n int64) int64 {
	n = min(n, int64(s[logUnits]))
	if n == int64(s[logUnits]) {
		c.free(l, a, s)
		return n
	}
	left := n
	g := segmentAt(a, c.oldest(s))
	for left >= int64(g[1]) {
		left -= int64(g[1])
		c.dropSegment(a, s, g)
		g = segmentAt(a, c.oldest(s))
	}
	g[1] -= uint64(left)
	s[logUnits] -= uint64(left)
	pos := c.pos(s)
	for left > 0 {
		_, have, size := g.entry(pos)
		if left < have {
			g.setUnits(pos, size, have-left)
			break
		}
		left -= have
		pos += size
	}
	c.setPos(s, pos)
	return n
}

// convert moves the chain. When the ticks change it rewrites each in its place, rounded up; entries that come to share a
// tick need not be merged.
func (c slidingLog) convert(l *Limit, a *Arena, s []uint64, now Instant, to *Limit, t []uint64) {
	copy(t, s)
	k, k2 := l.tickShift(), to.tickShift()
	if k == k2 || t[logUnits] == 0 {
		return
	}
	// What a shorter window does not hold goes first: the new ticks could not tell it from the rest.
	c.expire(l, a, t, k, now.Mono-int64(min(l.Window, to.Window)))
	if t[logUnits] == 0 {
		return
	}
	newest := roundUp(int64(t[logNewest]), k2)
	// The oldest instant that the new ticks reach. Beyond it is only what the longer ticks of before had rounded up.
	oldest := newest - tickMask<<k2
	pos := c.pos(t)
	for r := c.oldest(t); r != 0; pos = 0 {
		g := segmentAt(a, r)
		for pos < g.end() {
			tick, _, size := g.entry(pos)
			instant := max(roundUp(instantOf(t, tick, k), k2), oldest)
			g.set(pos, tickOf(instant, k2))
			pos += size
		}
		r = g.next()
	}
	t[logNewest] = uint64(newest)
}

// snapshot is written from the oldest to the newest, as restore adds them.
func (c slidingLog) snapshot(dst []byte, l *Limit, a *Arena, s []uint64, now Instant) []byte {
	dst = appendUint(dst, int64(s[logUnits]))
	return c.entries(dst, l, a, s, now, 0)
}

// since writes what extend needs to bring a copy up to s that has all but the newest n units: all units and those.
func (c slidingLog) since(dst []byte, l *Limit, a *Arena, s []uint64, now Instant, n int64) []byte {
	units := int64(s[logUnits])
	n = min(n, units)
	dst = appendUint(dst, units)
	dst = appendUint(dst, n)
	if n == 0 {
		return dst
	}
	return c.entries(dst, l, a, s, now, units-n)
}

// entries writes all units but the given number of oldest ones, of which there must be more.
func (c slidingLog) entries(dst []byte, l *Limit, a *Arena, s []uint64, now Instant, skip int64) []byte {
	r, newest := c.read(a, s, l.tickShift()), int64(s[logNewest])
	r.pass(skip)
	dst = appendInt(dst, now.Mono-newest)
	dst = appendUint(dst, (newest-r.at)>>r.k)
	last, g, pos := tickOf(r.at, r.k), r.g, r.pos
	_, skip, _ = g.entry(pos)
	skip -= r.n
	for { // without the reader, which works out instants: a snapshot would take half as long again
		for pos < g.end() {
			tick, n, size := g.entry(pos)
			n, skip = n-skip, 0
			since := int64((tick - last) & tickMask)
			if last, pos = tick, pos+size; n == 1 {
				dst = appendUint(dst, since<<1)
				continue
			}
			dst = appendUint(dst, since<<1|1)
			dst = appendUint(dst, n)
		}
		if g.next() == 0 {
			return dst
		}
		g, pos = segmentAt(a, g.next()), 0
	}
}

func (c slidingLog) restore(l *Limit, a *Arena, s []uint64, now Instant, r *reader) error {
	units := r.uint(MaxLimit)
	if r.err == nil && units == 0 {
		return ErrSnapshot
	}
	return c.readEntries(l, a, s, now, r, units)
}

// extend reads what since wrote into a copy of the log that it is about. A log loses nothing but its oldest units, by
// whatever it loses them: so the copy keeps as many of its newest as the log still had besides those that follow.
func (c slidingLog) extend(l *Limit, a *Arena, s []uint64, now Instant, r *reader) error {
	units := r.uint(MaxLimit)
	n := r.uint(units)
	if r.err != nil {
		return r.err
	}
	if over := int64(s[logUnits]) - (units - n); over > 0 {
		c.refund(l, a, s, now, over)
	}
	if n == 0 {
		return nil
	}
	return c.readEntries(l, a, s, now, r, n)
}

// readEntries adds what entries wrote, so many units, to the end of the log. An empty log takes over the writer's
// ticks. A log with entries keeps its own, and an entry between two ticks gets the later one. An entry that would be older
// than the newest one, because its message travelled faster, gets the newest one's instant.
func (c slidingLog) readEntries(l *Limit, a *Arena, s []uint64, now Instant, r *reader, units int64) error {
	k, empty := l.tickShift(), s[logUnits] == 0
	age := r.int(2 * int64(MaxWindow))
	if age < -longestTick {
		return ErrSnapshot
	}
	newest := now.Mono - age
	span := r.uint(tickMask)
	for units > 0 && r.err == nil {
		step, n := r.uint(tickMask<<1|1), int64(1)
		if step&1 != 0 {
			n = r.uint(units)
		}
		span -= step >> 1
		units -= n
		if r.err != nil || n == 0 || span < 0 || units < 0 {
			return ErrSnapshot
		}
		if !c.reserve(l, a, s, n) {
			return ErrNoMemory
		}
		instant := newest - span<<k
		if !empty {
			instant = c.onTick(s, k, min(instant, now.Mono))
		}
		c.add(a, s, instant, k, n)
	}
	if r.err == nil && span != 0 {
		return ErrSnapshot
	}
	return r.err
}

// onTick is the first tick of a log that is not empty which is neither before an instant nor before the newest entry.
func (slidingLog) onTick(s []uint64, k int, instant int64) int64 {
	newest := int64(s[logNewest])
	return newest + roundUp(max(instant-newest, 0), k)
}

// join compares suffix counts: from each instant to now, the larger number. It goes on with the ticks of the side that has the
// newest entry. Entries of the other side expire late, by less than a tick, where the two have different ones.
func (c slidingLog) join(l *Limit, a *Arena, s, t []uint64, _ Instant, u []uint64) bool {
	if s[logUnits] == 0 || int64(s[logNewest]) < int64(t[logNewest]) {
		s, t = t, s
	}
	k, newest := l.tickShift(), int64(s[logNewest])
	// What the ticks before newest reach. Beyond it is only what longer ticks, of a former window, had rounded up.
	oldest := newest - tickMask<<k
	x, y := c.read(a, s, k), c.read(a, t, k)
	mine, other := int64(s[logUnits]), int64(t[logUnits]) // units that are not before the instant
	for x.n != 0 || y.n != 0 {
		instant, before := min(x.instant(), y.instant()), max(mine, other)
		mine -= x.skip(instant)
		other -= y.skip(instant)
		n := before - max(mine, other)
		if n == 0 {
			continue
		}
		if !c.reserve(l, a, u, n) {
			return false
		}
		c.add(a, u, max(newest-(newest-instant)>>k<<k, oldest), k, n)
	}
	return true
}

// horizon: an instant is rounded up to a tick.
func (slidingLog) horizon(l *Limit) time.Duration { return l.Window + 1<<l.tickShift() }

// logReader reads a log's entries from the oldest to the newest.
type logReader struct {
	a         *Arena
	s         []uint64
	k         int
	g         segment // that the present entry is in
	pos, size int     // of the entry
	at, n     int64   // its instant and units; n is 0 after the newest entry
}

// read returns a reader that is at the oldest entry.
func (c slidingLog) read(a *Arena, s []uint64, k int) logReader {
	r := logReader{a: a, s: s, k: k}
	if s[logUnits] != 0 {
		r.g, r.pos = segmentAt(a, c.oldest(s)), c.pos(s)
		r.load()
	}
	return r
}

func (r *logReader) next() {
	r.pos += r.size
	r.load()
}

// load reads the entry that begins at pos, or the first one after it.
func (r *logReader) load() {
	for r.pos == r.g.end() {
		if r.g.next() == 0 {
			r.n = 0
			return
		}
		r.segment()
	}
	var tick uint32
	tick, r.n, r.size = r.g.entry(r.pos)
	r.at = instantOf(r.s, tick, r.k)
}

// segment goes to the beginning of the next segment, which must exist.
func (r *logReader) segment() {
	r.g, r.pos = segmentAt(r.a, r.g.next()), 0
}

// pass reads past so many units from the oldest entry, of which there must be more. Of an entry that it passes in part, n is the rest.
func (r *logReader) pass(units int64) {
	for units >= int64(r.g[1]) {
		units -= int64(r.g[1])
		r.segment()
	}
	for {
		_, n, size := r.g.entry(r.pos)
		if units < n {
			break
		}
		units, r.pos = units-n, r.pos+size
	}
	r.load()
	r.n -= units
}

// instant is that of the present entry; after the newest, one that is later than all.
func (r *logReader) instant() int64 {
	if r.n == 0 {
		return math.MaxInt64
	}
	return r.at
}

// skip reads past the entries of an instant and returns their units.
func (r *logReader) skip(instant int64) (n int64) {
	for ; r.n != 0 && r.at == instant; r.next() {
		n += r.n
	}
	return n
}

// unitAt is the instant of the i-th oldest unit, counted from 1.
func (c slidingLog) unitAt(a *Arena, s []uint64, k int, i int64) int64 {
	g, pos := segmentAt(a, c.oldest(s)), c.pos(s)
	for i > int64(g[1]) {
		i -= int64(g[1])
		g, pos = segmentAt(a, g.next()), 0
	}
	for {
		tick, n, size := g.entry(pos)
		if i <= n {
			return instantOf(s, tick, k)
		}
		i -= n
		pos += size
	}
}

// find returns a reader at the oldest entry that is not before an instant and less than a tick after it, and how many units are older.
func (c slidingLog) find(a *Arena, s []uint64, k int, at int64) (r logReader, older int64, ok bool) {
	if s[logUnits] == 0 || at > int64(s[logNewest]) {
		return r, 0, false
	}
	r = c.read(a, s, k)
	for r.g.next() != 0 {
		if h := segmentAt(a, r.g.next()); h.end() == 0 || instantOf(s, h.get(0), k) >= at {
			break
		}
		older += int64(r.g[1])
		r.segment()
	}
	for r.load(); r.at < at; r.next() {
		older += r.n
	}
	return r, older, r.at < at+1<<k
}

// takeAt takes up to n units off the entries at the first tick from an instant on, and returns how many there were.
func (c slidingLog) takeAt(a *Arena, s []uint64, k int, at, n int64) (taken int64) {
	r, _, ok := c.find(a, s, k, at)
	if !ok {
		return 0
	}
	for target := r.at; taken < n && r.n != 0 && r.at == target; {
		m := min(r.n, n-taken)
		taken += m
		r.g[1] -= uint64(m)
		s[logUnits] -= uint64(m)
		if m < r.n {
			r.g.setUnits(r.pos, r.size, r.n-m)
			break
		}
		if s[logUnits] == 0 {
			c.free(nil, a, s)
			return taken
		}
		end := r.g.end() - r.size
		for i := r.pos; i < end; i++ {
			r.g.set(i, r.g.get(i+r.size))
		}
		r.g.setEnd(end)
		r.load()
	}
	c.dropEmpty(a, s)
	s[logNewest] = uint64(c.unitAt(a, s, k, int64(s[logUnits])))
	return taken
}

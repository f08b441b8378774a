package algo

import (
	"math"
	"math/bits"
	"time"
)

// slidingLog keeps the instant of every admission of the last l.Window, rounded up to a tick, and so counts the units
// of the last window. (The "sliding window log" of the literature; Redis users know it as a sorted set.)
//
// Costs: an admission takes constant time, now and then with a new segment; expiry takes a step for each entry, or for
// each segment of which all entries have expired. A refusal passes the segments and the entries of one (unitAt): a log
// of n units has about sqrt(n) segments. takeAt moves the entries of one segment, and passes the segments behind it
// (merge).
//
// The path of an admission:
//
//  1. advance removes the units that have expired, from the oldest segment on (expire).
//  2. The request is refused if used is too high. wait then looks for the unit whose expiry makes room (unitAt).
//  3. reserve, which has nothing to do with reservations, adds a segment if the newest has no room. charge writes the
//     units there (add).
//  4. snapshot and since write entries for a copy (entries); restore and extend read them into it (readEntries).
//  5. Units are removed by expire, by refund, which takes the oldest first, and by takeAt, which takes those of a
//     cancelled reservation. A log that no call touches keeps its segments until the store's sweep calls advance.
//
// Words:
//
//	word     64 bits, of the state and of the Arena; sizes of segments are in words
//	cell     32 bits; ends, positions and capacities are in cells
//	instant  nanoseconds of Instant.Mono
//	tick     the unit in which entries count instants; also the lowest 31 bits of an instant, counted in ticks
//	entry    a tick and the units at it, in 1 to 3 cells
//	segment  a block of the Arena with entries; a log is a chain of segments
//	newest   the instant of the newest entry (logNewest, and variables of that name); the method newest returns the Ref
//	         of the last segment of the chain, which is the newest segment
//	size     words: of a segment, those of its block; of a log, those of all its segments
//
// The length of a tick is the smallest 1<<k nanoseconds for which the window and one tick more are at most 1<<31 ticks.
// An instant is rounded up to its tick, so that it expires late by less than a tick, and never early. In a fresh log
// instants are multiples of a tick. In a log that was read from another process they have that process's offset until
// it is empty.
//
// The cells of an entry are
//
//	tick                      one unit
//	tick, more|n              1 + n units, n below 1<<31
//	tick, more|low, more|high beyond that, 31 bits in each cell
//
// No two entries are 1<<31 ticks apart, so a tick and the newest instant tell an entry's instant. The bit more tells a
// count from a tick, so that the newest entry can be found from the end of its segment. A charge writes at most one
// cell for each unit. An entry from which refund or takeAt has taken units keeps its cells. With headers, room left in
// segments and pages, and the Arena's tables, a full log of single units takes, for each of them, 8.1 bytes when its
// limit is 5, 5.9 at 100, 4.7 at 1000, 4.3 at 10,000, 4.1 at 100,000 and beyond (TestLogMemory); besides the words of
// the state.
//
// Invariants:
//
//   - All words of the state are zero when the log is empty. Otherwise the oldest segment has an entry; others may have
//     none.
//   - Entries are in the order of their instants. Several neighbours may have the same one.
//   - Each segment counts its units, and their sum is that of the log.
//   - After takeAt no two neighbours fit into the first of them, the newest segment aside (merge). So cancelled
//     reservations leave at most half of a log's cells without use.
//   - Other files change a log by the methods of the interface counter (limits.go) and by takeAt only. With each change
//     but the removal of the oldest units, they advance the state's position, which Mark reads (extend.go).
//   - reserve gives an empty log an empty segment. In the same decision charge fills it, or Limits.trim frees it
//     (Limits.reserve).
type slidingLog struct{}

const (
	logNewest = iota // the newest instant
	logUnits
	logChain // the Refs of the oldest and the newest segment, 32 bits each
	// the words of all segments, and the cell of the oldest segment where the oldest entry begins, 32 bits each
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

// roundUp is the first multiple of a tick that is not before an instant.
func roundUp(instant int64, k int) int64 { return (instant + 1<<k - 1) >> k << k }

// segment is a block of the log: two words of header, then entries.
//
// Word 0 holds the next segment's Ref (32 bits), the words of the block (16) and the cell at which the entries end
// (16). Word 1 holds the number of units in the segment.
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

// entry returns the entry that begins at cell i, and how many cells it has.
func (g segment) entry(i int) (tick uint32, n int64, cells int) {
	tick, n, cells = g.get(i), 1, 1
	for end := g.end(); i+cells < end && g.get(i+cells)&moreFlag != 0; cells++ {
		n += int64(g.get(i+cells)&tickMask) << (tickBits * (cells - 1))
	}
	return tick, n, cells
}

// setUnits makes the entry at cell i, which has so many cells, one of n units.
func (g segment) setUnits(i, cells int, n int64) {
	n--
	for end := i + cells; i+1 < end; i++ {
		g.set(i+1, uint32(n&tickMask)|moreFlag)
		n >>= tickBits
	}
}

// cellsFor is the number of cells that a new entry of n units gets.
func cellsFor(n int64) int {
	switch {
	case n == 1:
		return 1
	case (n-1)>>tickBits == 0:
		return 2
	}
	return 3
}

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

// dropSegment frees the oldest segment, which is g, with all that is in it; there must be a next.
func (c slidingLog) dropSegment(a *Arena, s []uint64, g segment) {
	c.addSize(s, -g.size())
	c.setPos(s, 0)
	s[logUnits] -= g[1]
	next := g.next()
	a.Free(c.oldest(s), g.size())
	c.setChain(s, next, c.newest(s))
}

// dropEmpty frees the oldest segments that have no entry any more. The log must have an entry.
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

// expire removes the entries that are not later than the instant cutoff from a log that is not empty.
func (c slidingLog) expire(l *Limit, a *Arena, s []uint64, k int, cutoff int64) {
	if g := segmentAt(a, c.oldest(s)); instantOf(s, g.get(c.pos(s)), k) > cutoff {
		return
	}
	if int64(s[logNewest]) <= cutoff {
		c.free(l, a, s)
		return
	}
	for {
		g, pos := segmentAt(a, c.oldest(s)), c.pos(s)
		// If the next segment begins with an expired entry, all of this one has expired. So a log that was full and
		// then left alone is freed without reading its entries.
		if next := g.next(); next != 0 {
			if h := segmentAt(a, next); h.end() > 0 && instantOf(s, h.get(0), k) <= cutoff {
				c.dropSegment(a, s, g)
				continue
			}
		}
		for pos < g.end() {
			tick, n, cells := g.entry(pos)
			if instantOf(s, tick, k) > cutoff {
				c.setPos(s, pos)
				return
			}
			pos += cells
			g[1] -= uint64(n)
			s[logUnits] -= uint64(n)
		}
		c.dropSegment(a, s, g)
	}
}

func (slidingLog) used(_ *Limit, _ *Arena, s []uint64, _ Instant) int64 { return int64(s[logUnits]) }

func (c slidingLog) wait(l *Limit, a *Arena, s []uint64, now Instant, n int64) time.Duration {
	over := int64(s[logUnits]) + n - l.Limit
	// n is at most l.Limit, so the log has at least as many units. There is room when the over-th oldest one expires.
	return time.Duration(c.unitAt(a, s, l.tickShift(), over)-now.Mono) + l.Window
}

func (slidingLog) resetAfter(l *Limit, _ *Arena, s []uint64, now Instant) time.Duration {
	if s[logUnits] == 0 {
		return 0
	}
	return time.Duration(int64(s[logNewest])-now.Mono) + l.Window
}

// reserve makes sure that the newest segment has room for what charge may write. There are three sizes of segments:
//
//   - The first segment has 4 words, because most logs are small; 3 words for limits 1 and 2, and 5 for limits 5 and 6.
//     So a full log of up to 6 single units is one segment.
//   - A later segment has about sqrt(2 × words of the log), as a power of two, 4 to MaxBlock. Then the unused cells of
//     the oldest and the newest segment take about as much as all headers. Blocks of a power of two fill a page
//     exactly.
func (c slidingLog) reserve(l *Limit, a *Arena, s []uint64, n int64) bool {
	last := c.newest(s)
	if last != 0 {
		if g := segmentAt(a, last); g.end()+cellsFor(max(n, 1)) <= g.capacity() {
			return true
		}
	}
	words := min(max(4, 1<<(bits.Len(uint(2*c.size(s)))/2)), MaxBlock)
	switch {
	case last != 0:
	case l.Limit <= 2 && n <= 2:
		words = segmentHeader + 1 // this segment holds the whole log; the next case does the same for limits 5 and 6
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

// add writes n units at an instant on a tick that is not before the newest one. Units of the newest instant join the
// newest entry, if it is in the newest segment. The joined entry grows by at most cellsFor(n), so what reserve made is
// enough.
func (c slidingLog) add(a *Arena, s []uint64, instant int64, k int, n int64) {
	g := segmentAt(a, c.newest(s))
	i := g.end()
	g[1] += uint64(n)
	s[logUnits] += uint64(n)
	if i > 0 && instant == int64(s[logNewest]) {
		for i--; g.get(i)&moreFlag != 0; {
			i--
		}
		_, have, _ := g.entry(i)
		n += have
	}
	s[logNewest] = uint64(instant)
	cells := cellsFor(n)
	g.set(i, tickOf(instant, k))
	g.setUnits(i, cells, n)
	g.setEnd(i + cells)
}

// refund removes the oldest n units.
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
		_, have, cells := g.entry(pos)
		if left < have {
			g.setUnits(pos, cells, have-left)
			break
		}
		left -= have
		pos += cells
	}
	c.setPos(s, pos)
	return n
}

// convert gives the chain of s to t; the caller must clear s and not free it. If the ticks change, convert rounds each
// entry's instant up to the new ones, in its place.
func (c slidingLog) convert(l *Limit, a *Arena, s []uint64, now Instant, to *Limit, t []uint64) {
	copy(t, s)
	k, k2 := l.tickShift(), to.tickShift()
	if k == k2 || t[logUnits] == 0 {
		return
	}
	// Entries that a shorter window does not hold are removed first, because the new ticks may not reach back to them.
	c.expire(l, a, t, k, now.Mono-int64(min(l.Window, to.Window)))
	if t[logUnits] == 0 {
		return
	}
	newest := roundUp(int64(t[logNewest]), k2)
	// The new ticks reach back to oldest. Only an entry that the longer ticks had rounded up can be before that.
	oldest := newest - tickMask<<k2
	pos := c.pos(t)
	for r := c.oldest(t); r != 0; pos = 0 {
		g := segmentAt(a, r)
		for pos < g.end() {
			tick, _, cells := g.entry(pos)
			instant := max(roundUp(instantOf(t, tick, k), k2), oldest)
			g.set(pos, tickOf(instant, k2))
			pos += cells
		}
		r = g.next()
	}
	t[logNewest] = uint64(newest)
}

func (c slidingLog) snapshot(dst []byte, l *Limit, a *Arena, s []uint64, now Instant) []byte {
	dst = appendUint(dst, int64(s[logUnits]))
	return c.entries(dst, l, a, s, now, 0)
}

// since writes what extend needs to bring a copy up to s. The copy has every unit of s but the newest n; since writes
// the number of all units, n, and those n.
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

// entries skips the `without` oldest units, and writes the others from the oldest to the newest; the log must have more
// than `without`. It writes the age of the newest, the ticks from the first unit to the newest, and each entry's ticks
// since the one before, with its units if there are several.
func (c slidingLog) entries(dst []byte, l *Limit, a *Arena, s []uint64, now Instant, without int64) []byte {
	r, newest := c.read(a, s, l.tickShift()), int64(s[logNewest])
	r.pass(without)
	dst = appendInt(dst, now.Mono-newest)
	dst = appendUint(dst, (newest-r.instant)>>r.k)
	last, g, pos := tickOf(r.instant, r.k), r.g, r.pos
	_, passed, _ := g.entry(pos)
	passed -= r.n // units of the first entry that are not written
	for {         // without the reader, which works out instants: with it, a snapshot would take 1.5 times as long
		for pos < g.end() {
			tick, n, cells := g.entry(pos)
			n, passed = n-passed, 0
			ticks := int64((tick - last) & tickMask)
			if last, pos = tick, pos+cells; n == 1 {
				dst = appendUint(dst, ticks<<1)
				continue
			}
			dst = appendUint(dst, ticks<<1|1)
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

// extend reads what since wrote, into a copy of that log. It drops the copy's oldest units until the copy has only
// those that the log has besides the n newest, and then adds these n. That is right if, since the copy's mark, the log
// has lost only its oldest units, and units that it was charged after the mark.
//
// AppendSince sends a snapshot in place of this if the mark is of an earlier generation of positions. GiveBack, which
// calls takeAt, begins a new generation.
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
// ticks. A log with entries keeps its own, and an entry between two ticks gets the later one. There, an instant after
// now counts as now. If an entry would be older than the newest one, because its message took less time, it gets the
// newest instant.
func (c slidingLog) readEntries(l *Limit, a *Arena, s []uint64, now Instant, r *reader, units int64) error {
	k, empty := l.tickShift(), s[logUnits] == 0
	age := r.int(2 * int64(MaxWindow))
	if age < -longestTick {
		return ErrSnapshot
	}
	newest := now.Mono - age
	span := r.uint(tickMask)
	for units > 0 && r.err == nil {
		ticks, n := r.uint(tickMask<<1|1), int64(1)
		if ticks&1 != 0 {
			n = r.uint(units)
		}
		span -= ticks >> 1
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

// onTick is the instant of the first tick that is neither before an instant nor before the newest entry. The log must
// not be empty.
func (slidingLog) onTick(s []uint64, k int, instant int64) int64 {
	newest := int64(s[logNewest])
	return newest + roundUp(max(instant-newest, 0), k)
}

// join makes u the log that has, from each instant to now, the larger of the numbers of units that s and t have. It
// passes the instants of both from the oldest on. At each, u gets n units: those by which the larger of the two counts,
// from the instant to now, falls when the instant is passed. u has the ticks of the side with the newest entry. If the
// other side has other ticks, its entries expire late, by less than a tick.
func (c slidingLog) join(l *Limit, a *Arena, s, t []uint64, _ Instant, u []uint64) bool {
	if s[logUnits] == 0 || int64(s[logNewest]) < int64(t[logNewest]) {
		s, t = t, s
	}
	k, newest := l.tickShift(), int64(s[logNewest])
	// The ticks reach back to oldest. Only an entry that longer ticks, of a former window, had rounded up can be before
	// that.
	oldest := newest - tickMask<<k
	x, y := c.read(a, s, k), c.read(a, t, k)
	mine, other := int64(s[logUnits]), int64(t[logUnits]) // units that have not been passed
	for x.n != 0 || y.n != 0 {
		instant, before := min(x.instant, y.instant), max(mine, other)
		mine -= x.passInstant(instant)
		other -= y.passInstant(instant)
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

// horizon is longer than the window by the tick to which an instant is rounded up.
func (slidingLog) horizon(l *Limit) time.Duration { return l.Window + 1<<l.tickShift() }

// logReader reads a log's entries from the oldest to the newest.
type logReader struct {
	a          *Arena
	s          []uint64
	k          int
	before     segment // the one before g; nil: g is the oldest
	g          segment // that the entry is in
	pos, cells int     // of the entry
	n          int64   // units of the entry that have not been passed; 0 after the newest entry
	instant    int64   // of the entry; after the newest one, later than all
}

// read returns a reader that is at the oldest entry.
func (c slidingLog) read(a *Arena, s []uint64, k int) logReader {
	r := logReader{a: a, s: s, k: k, instant: math.MaxInt64}
	if s[logUnits] != 0 {
		r.g, r.pos = segmentAt(a, c.oldest(s)), c.pos(s)
		r.load()
	}
	return r
}

func (r *logReader) next() {
	r.pos += r.cells
	r.load()
}

// load reads the entry that begins at pos, or the first one after it.
func (r *logReader) load() {
	for r.pos == r.g.end() {
		if r.g.next() == 0 {
			r.n, r.instant = 0, math.MaxInt64
			return
		}
		r.nextSegment()
	}
	var tick uint32
	tick, r.n, r.cells = r.g.entry(r.pos)
	r.instant = instantOf(r.s, tick, r.k)
}

// nextSegment goes to the beginning of the next segment, which must exist. It does not read an entry.
func (r *logReader) nextSegment() {
	r.before, r.g, r.pos = r.g, segmentAt(r.a, r.g.next()), 0
}

// pass skips the `units` oldest units; the log must have more than `units`.
func (r *logReader) pass(units int64) {
	for units >= int64(r.g[1]) {
		units -= int64(r.g[1])
		r.nextSegment()
	}
	for {
		_, n, cells := r.g.entry(r.pos)
		if units < n {
			break
		}
		units, r.pos = units-n, r.pos+cells
	}
	r.load()
	r.n -= units
}

// passInstant passes the entries of an instant, if the reader is at it, and returns their units.
func (r *logReader) passInstant(instant int64) (n int64) {
	for ; r.n != 0 && r.instant == instant; r.next() {
		n += r.n
	}
	return n
}

// unitAt is the instant of the i-th oldest unit, counted from 1. It uses no reader: with a reader, a refusal would take
// 1.5 times as long.
func (c slidingLog) unitAt(a *Arena, s []uint64, k int, i int64) int64 {
	g, pos := segmentAt(a, c.oldest(s)), c.pos(s)
	for i > int64(g[1]) {
		i -= int64(g[1])
		g, pos = segmentAt(a, g.next()), 0
	}
	for {
		tick, n, cells := g.entry(pos)
		if i <= n {
			return instantOf(s, tick, k)
		}
		i -= n
		pos += cells
	}
}

// find returns a reader at the oldest entry that is not before an instant and less than a tick after it, and how many
// units are older.
func (c slidingLog) find(a *Arena, s []uint64, k int, instant int64) (r logReader, older int64, ok bool) {
	if s[logUnits] == 0 || instant > int64(s[logNewest]) {
		return r, 0, false
	}
	r = c.read(a, s, k)
	for r.g.next() != 0 {
		if h := segmentAt(a, r.g.next()); h.end() == 0 || instantOf(s, h.get(0), k) >= instant {
			break
		}
		older += int64(r.g[1])
		r.nextSegment()
	}
	for r.load(); r.instant < instant; r.next() {
		older += r.n
	}
	return r, older, r.instant < instant+1<<k
}

// takeAt takes up to n units from the entries at the instant of the oldest entry not before `instant`, if that is less
// than a tick after `instant`. It returns how many it took.
func (c slidingLog) takeAt(a *Arena, s []uint64, k int, instant, n int64) (taken int64) {
	r, _, ok := c.find(a, s, k, instant)
	if !ok {
		return 0
	}
	first := r.g
	if r.before != nil {
		first = r.before
	}
	for target := r.instant; taken < n && r.n != 0 && r.instant == target; {
		m := min(r.n, n-taken)
		taken += m
		r.g[1] -= uint64(m)
		s[logUnits] -= uint64(m)
		if m < r.n {
			r.g.setUnits(r.pos, r.cells, r.n-m)
			break
		}
		if s[logUnits] == 0 {
			c.free(nil, a, s)
			return taken
		}
		end := r.g.end() - r.cells
		for i := r.pos; i < end; i++ {
			r.g.set(i, r.g.get(i+r.cells))
		}
		r.g.setEnd(end)
		r.load()
	}
	c.merge(a, s, first)
	c.dropEmpty(a, s)
	s[logNewest] = uint64(c.unitAt(a, s, k, int64(s[logUnits])))
	return taken
}

// merge moves the entries of each segment after g into the one before it, if they fit there, and frees the empty one.
// The newest segment stays, because the next charge may go there.
func (c slidingLog) merge(a *Arena, s []uint64, g segment) {
	for g.next() != 0 {
		r, end := g.next(), g.end()
		h := segmentAt(a, r)
		if h.next() == 0 || end+h.end() > g.capacity() {
			g = h
			continue
		}
		for i := range h.end() {
			g.set(end+i, h.get(i))
		}
		g.setEnd(end + h.end())
		g[1] += h[1]
		g.setNext(h.next())
		c.addSize(s, -h.size())
		a.Free(r, h.size())
	}
}

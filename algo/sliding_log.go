package algo

import (
	"math"
	"math/bits"
	"time"
)

// slidingLog counts the units (what a request costs) that were admitted in the last Limit.Window, by the instants of
// their admissions. (The "sliding window log" of the literature; Redis users know it as a sorted set.)
//
// It has no fields: each method works on a log, which is the state s of one key (logWords words) and the log's segments
// in the Arena a. A copy is another node's log of the same key, which messages keep up to date.
//
// Words:
//
//	word         64 bits, of the state and of the Arena. Sizes of segments are in words
//	cell         32 bits. Positions, ends and capacities in a segment are in cells
//	instant      nanoseconds of Instant.Mono
//	tick         a length of 1<<k nanoseconds; k comes from tickShift. A log rounds instants up to whole ticks
//	tick number  the lowest 31 bits of an instant in ticks (tickOf)
//	entry        a tick number and the units at it, in 1 to 3 cells
//	newest       the instant of the newest entry (logNewest)
//	grid         the instants newest − i ticks, for i below 1<<31. All entries lie on it, so the tick number and
//	             newest tell an entry's instant (instantOf)
//	earliest     the first instant of the grid
//	segment      a block of the Arena with entries
//	chain        the segments of a log, each with the Ref of the next, from the oldest to the newest
//
// The path of an admission:
//
//  1. advance removes the units that have expired, from the oldest segment on (expire).
//  2. The request is refused if used is too high. wait then looks for the unit whose expiry makes room (unitAt).
//  3. ensureMemory adds a segment to the chain if the newest one has no room for another entry.
//  4. charge writes the units there (add).
//
// Callers keep this order: advance before all methods but init, free and restore, at the same now; ensureMemory before
// charge; wait only after a refusal.
//
// Copies get a log by snapshot and since, which write entries, and read it by restore and extend (readEntries). Units
// are removed by expire, by refund, which takes the oldest first, and by takeAt, which takes those of a cancelled
// reservation (hold.go). A log that no call touches keeps its segments until the store's sweep calls advance.
//
// A tick is the shortest for which the window and one tick more are at most 1<<31 ticks. Entries that have not expired
// are later than now − window, and newest is less than a tick after now. So all entries are less than 1<<31 ticks
// apart, and no two instants have the same tick number.
//
// Rounding makes an entry expire late by less than a tick, and never early. convert, readEntries and join may each
// round it up once more. After a reload from a window with longer ticks, newest may be up to such a tick after now.
// Until now has reached it, charges are put at newest, and convert and join move entries that are before the grid to
// earliest. So these expire late by up to the longer tick.
//
// In a new log, the instants of the grid are multiples of a tick. A log that was read from another process has that
// process's grid, until the log is empty or convert changes its ticks.
//
// The cells of an entry are
//
//	number                      one unit
//	number, more|n              1 + n units, n below 1<<31
//	number, more|low, more|high beyond that, 31 bits in each cell
//
// The bit more tells a count from a tick number, so that the newest entry can be found from the end of its segment. A
// charge writes at most one cell for each unit. An entry from which refund or takeAt has taken units keeps its cells.
//
// An admission takes constant time, now and then with a new segment. Expiry takes a step for each entry, or for each
// segment of which all entries have expired. A refusal passes the segments and the entries of one (unitAt): a log of n
// units has about sqrt(n) segments, until they reach MaxBlock. takeAt moves entries within the segments that have its
// instant, usually one, and passes the segments behind them (merge). With headers, room left in segments and pages, and
// the Arena's tables, a full log of single units takes, for each of them, 8.1 bytes when its limit is 5, 5.9 at 100,
// 4.7 at 1000, 4.3 at 10,000, 4.1 at 100,000 and beyond (TestLogMemory); besides the words of the state.
//
// Invariants:
//
//   - Entries are in the order of their instants, on one grid. Neighbours may have the same instant, in several
//     segments too.
//   - A segment counts the units that are left in it, and the sum of these counts is logUnits. Only in the oldest
//     segment do removed entries have cells left: those before firstCell.
//   - All words of the state are zero when the log is empty.
//   - All segments but the newest have an entry. The newest may have none, after ensureMemory or takeAt, but a segment
//     that is the only one has an entry.
//   - An exception to the last two: after ensureMemory, an empty log has one segment without entries. charge fills it,
//     or Limits.trim frees it, in the same decision.
//   - After a change, takeAt merges each segment, from the one before the change on, into the segment before it, if it
//     fits there. The newest segment stays. So cancelled reservations leave at most about half of a log's
//     cells without use.
//   - Other files change a log by the methods of the interface counter (limits.go), extend and takeAt only. After each
//     change but the removal of the oldest units, those files increase the state's position. (That number is not among
//     these words. A copy's Mark remembers its value: extend.go.)
//
// To change the sizes of segments: only ensureMemory chooses them. A segment needs room for cellsFor(n) cells, has at
// most MaxBlock words, and its end, in cells, must fit into 16 bits. The bytes above and merge's half depend on sizes.
//
// To change the cells of an entry: entry, setUnits, cellsFor and add know them, and expire, find and convert use that
// the first one is the tick number. takeAt and merge move cells, so an entry must not depend on its neighbours. refund
// and takeAt change its units in their place. Messages do not depend on cells.
//
// TestAgainstOracle and TestLongLogs compare decisions with a reference, TestGiveBack cancels, TestReplicaLate and
// TestMark copies, TestJoinLattice joins, TestLogMemory and TestLogAfterCancels sizes, TestTick the grid.
type slidingLog struct{}

const (
	logNewest = iota // the newest instant
	logUnits         // how many units the log has
	logChain         // the Ref of the oldest segment, and of the newest one, 32 bits each, the first in the upper half
	logSizes         // the words of all segments, and firstCell, where the oldest entry begins, as in logChain
	logWords
)

const (
	tickBits    = 31
	tickMask    = 1<<tickBits - 1
	moreFlag    = 1 << tickBits
	longestTick = 1 << 24 // the tick of MaxWindow, in nanoseconds
)

func (slidingLog) words(*Limit) int { return logWords }

func (slidingLog) init(_ *Limit, s []uint64, _ Instant) { clear(s) }

// tickShift is the logarithm of the length of a tick in nanoseconds. In this file << and >> bind more tightly than +
// and −, as always in Go: window+1<<k is window+(1<<k).
func (l *Limit) tickShift() int {
	window := uint64(l.Window)
	k := max(bits.Len64(window)-tickBits, 0)
	if window+1<<k > 1<<(tickBits+k) {
		k++
	}
	return k
}

// tickOf is the tick number of an instant. It drops the instant's remainder by a tick, which all of a grid share.
func tickOf(instant int64, k int) uint32 { return uint32(instant>>k) & tickMask }

// instantOf is the instant of an entry.
func instantOf(s []uint64, num uint32, k int) int64 {
	newest := int64(s[logNewest])
	return newest - int64((tickOf(newest, k)-num)&tickMask)<<k
}

// roundUp is the first multiple of a tick that is not before an instant.
func roundUp(instant int64, k int) int64 { return (instant + 1<<k - 1) >> k << k }

// earliestOf is the first instant of the grid of a newest instant.
func earliestOf(newest int64, k int) int64 { return newest - tickMask<<k }

// onTick is the first instant of the grid, continued beyond newest, that is neither before an instant nor before
// newest. The log must not be empty.
func (slidingLog) onTick(s []uint64, k int, instant int64) int64 {
	newest := int64(s[logNewest])
	return newest + roundUp(max(instant-newest, 0), k)
}

// segment is a block of the log: two words of header, then entries.
//
// Word 0 holds the next segment's Ref (32 bits), the words of the block (16) and the cell at which the entries end
// (16; MaxBlock is small enough for it). Word 1 holds the number of units that are left in the segment.
type segment []uint64

const segmentHeader = 2

// segmentAt returns the segment at a Ref. It reads the header first, which tells the length of the block.
func segmentAt(a *Arena, ref Ref) segment {
	return segment(a.Block(ref, segment(a.Block(ref, segmentHeader)).words()))
}

// newSegment returns a segment without entries. Alloc zeroes the block.
func newSegment(a *Arena, words int) (Ref, bool) {
	ref, ok := a.Alloc(words)
	if ok {
		a.Block(ref, 1)[0] = uint64(words) << 16
	}
	return ref, ok
}

func (g segment) next() Ref     { return Ref(g[0] >> 32) }
func (g segment) words() int    { return int(g[0] >> 16 & 0xffff) }
func (g segment) end() int      { return int(g[0] & 0xffff) }
func (g segment) capacity() int { return 2 * (len(g) - segmentHeader) }

func (g segment) setNext(r Ref)  { g[0] = g[0]&0xffff_ffff | uint64(r)<<32 }
func (g segment) setEnd(end int) { g[0] = g[0]&^0xffff | uint64(end) }

func (g segment) get(i int) uint32 { return uint32(g[segmentHeader+(i>>1)] >> ((uint(i) & 1) * 32)) }

func (g segment) set(i int, v uint32) {
	w, shift := &g[segmentHeader+(i>>1)], (uint(i)&1)*32
	*w = *w&^(0xffff_ffff<<shift) | uint64(v)<<shift
}

// entry returns the entry that begins at cell i, and how many cells it has.
func (g segment) entry(i int) (num uint32, n int64, cells int) {
	num, n, cells = g.get(i), 1, 1
	for end := g.end(); i+cells < end && g.get(i+cells)&moreFlag != 0; cells++ {
		n += int64(g.get(i+cells)&tickMask) << (tickBits * (cells - 1))
	}
	return num, n, cells
}

// setUnits gives n units to the entry at cell i. The entry keeps its cells, which must be at least cellsFor(n).
func (g segment) setUnits(i, cells int, n int64) {
	n--
	for end := i + cells; i+1 < end; i++ {
		g.set(i+1, uint32(n&tickMask)|moreFlag)
		n >>= tickBits
	}
}

// cellsFor is the number of cells that a new entry of n units gets. n is at least 1.
func cellsFor(n int64) int {
	switch {
	case n == 1:
		return 1
	case (n-1)>>tickBits == 0:
		return 2
	}
	return 3
}

func (slidingLog) firstCell(s []uint64) int { return int(uint32(s[logSizes])) }
func (slidingLog) setFirstCell(s []uint64, cell int) {
	s[logSizes] = s[logSizes]&^0xffff_ffff | uint64(cell)
}
func (slidingLog) chainWords(s []uint64) int          { return int(s[logSizes] >> 32) }
func (slidingLog) addChainWords(s []uint64, more int) { s[logSizes] += uint64(more) << 32 }

func (slidingLog) firstSegment(s []uint64) Ref { return Ref(s[logChain] >> 32) }
func (slidingLog) lastSegment(s []uint64) Ref  { return Ref(s[logChain]) }

func (slidingLog) setChain(s []uint64, oldest, newest Ref) {
	s[logChain] = uint64(oldest)<<32 | uint64(newest)
}

func (c slidingLog) free(_ *Limit, a *Arena, s []uint64) {
	for ref := c.firstSegment(s); ref != 0; {
		g := segmentAt(a, ref)
		next := g.next()
		a.Free(ref, g.words())
		ref = next
	}
	clear(s)
}

// dropSegment frees the oldest segment, which is g, with all that is in it. It must not be the only one.
func (c slidingLog) dropSegment(a *Arena, s []uint64, g segment) {
	c.addChainWords(s, -g.words())
	c.setFirstCell(s, 0)
	s[logUnits] -= g[1]
	next := g.next()
	a.Free(c.firstSegment(s), g.words())
	c.setChain(s, next, c.lastSegment(s))
}

// dropEmpty frees the oldest segments that have no entry any more. The log must have an entry.
func (c slidingLog) dropEmpty(a *Arena, s []uint64) {
	for {
		g := segmentAt(a, c.firstSegment(s))
		if c.firstCell(s) < g.end() {
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
	if g := segmentAt(a, c.firstSegment(s)); instantOf(s, g.get(c.firstCell(s)), k) > cutoff {
		return
	}
	if int64(s[logNewest]) <= cutoff {
		c.free(l, a, s)
		return
	}
	for {
		g, pos := segmentAt(a, c.firstSegment(s)), c.firstCell(s)
		// If the next segment begins with an expired entry, all of this one has expired. So a log that was full and
		// then left alone is freed without reading its entries.
		if next := g.next(); next != 0 {
			if h := segmentAt(a, next); h.end() > 0 && instantOf(s, h.get(0), k) <= cutoff {
				c.dropSegment(a, s, g)
				continue
			}
		}
		for pos < g.end() {
			num, n, cells := g.entry(pos)
			if instantOf(s, num, k) > cutoff {
				c.setFirstCell(s, pos)
				return
			}
			pos += cells
			g[1] -= uint64(n)
			s[logUnits] -= uint64(n)
		}
		c.dropSegment(a, s, g) // another one follows, because newest has not expired
	}
}

func (slidingLog) used(_ *Limit, _ *Arena, s []uint64, _ Instant) int64 { return int64(s[logUnits]) }

func (c slidingLog) wait(l *Limit, a *Arena, s []uint64, now Instant, n int64) time.Duration {
	// over units must expire. n is at most l.Limit, so the log has at least over. There is room when the over-th oldest
	// expires.
	over := int64(s[logUnits]) + n - l.Limit
	return time.Duration(c.unitAt(a, s, l.tickShift(), over)-now.Mono) + l.Window
}

// unitAt is the instant of the i-th oldest unit, counted from 1. It uses no cursor: with a cursor, a refusal would take
// 1.5 times as long.
func (c slidingLog) unitAt(a *Arena, s []uint64, k int, i int64) int64 {
	g, pos := segmentAt(a, c.firstSegment(s)), c.firstCell(s)
	for i > int64(g[1]) {
		i -= int64(g[1])
		g, pos = segmentAt(a, g.next()), 0
	}
	for {
		num, n, cells := g.entry(pos)
		if i <= n {
			return instantOf(s, num, k)
		}
		i -= n
		pos += cells
	}
}

func (slidingLog) resetAfter(l *Limit, _ *Arena, s []uint64, now Instant) time.Duration {
	if s[logUnits] == 0 {
		return 0
	}
	return time.Duration(int64(s[logNewest])-now.Mono) + l.Window
}

// horizon is the longest time that a unit counts after charge: the window, and the tick to which charge rounds up.
func (slidingLog) horizon(l *Limit) time.Duration { return l.Window + 1<<l.tickShift() }

// ensureMemory makes sure that the newest segment has room for what charge may write; n is at least 1. The first
// segment of an empty log has
//
//   - 3 words for limits 1 and 2, and 5 for limits 5 and 6, so that a log of so many single units is one segment,
//   - 4 words otherwise, because most logs are small.
//
// A later segment has about sqrt(2 × words of the log), as a power of two, 4 to MaxBlock. Then the unused cells of the
// oldest and the newest segment take about as much as all headers. Blocks of a power of two fill a page exactly.
func (c slidingLog) ensureMemory(l *Limit, a *Arena, s []uint64, n int64) bool {
	last := c.lastSegment(s)
	if last != 0 {
		if g := segmentAt(a, last); g.end()+cellsFor(n) <= g.capacity() {
			return true
		}
	}
	words := min(max(4, 1<<(bits.Len(uint(2*c.chainWords(s)))/2)), MaxBlock)
	switch {
	case last != 0: // a later segment
	case l.Limit <= 2 && n <= 2: // a copy may read more units than the limit, which can take 3 cells
		words = segmentHeader + 1
	case l.Limit == 5 || l.Limit == 6:
		words = segmentHeader + 3
	}
	ref, ok := newSegment(a, words)
	if !ok {
		return false
	}
	c.addChainWords(s, words)
	if last == 0 {
		c.setChain(s, ref, ref)
		return true
	}
	segmentAt(a, last).setNext(ref)
	c.setChain(s, c.firstSegment(s), ref)
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

// add writes n units at an instant of the grid that is not before newest. (The first instant of a log makes the grid.)
// Units of the newest instant join the newest entry, if it is in the newest segment. That entry grows by at most
// cellsFor of the units that join it, so the room that ensureMemory has made is enough.
func (c slidingLog) add(a *Arena, s []uint64, instant int64, k int, n int64) {
	g := segmentAt(a, c.lastSegment(s))
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

// refund removes the oldest n units, or all if there are fewer.
func (c slidingLog) refund(l *Limit, a *Arena, s []uint64, _ Instant, n int64) int64 {
	n = min(n, int64(s[logUnits]))
	if n == int64(s[logUnits]) {
		c.free(l, a, s)
		return n
	}
	left := n
	g := segmentAt(a, c.firstSegment(s))
	for left >= int64(g[1]) {
		left -= int64(g[1])
		c.dropSegment(a, s, g)
		g = segmentAt(a, c.firstSegment(s))
	}
	g[1] -= uint64(left)
	s[logUnits] -= uint64(left)
	pos := c.firstCell(s)
	for left > 0 {
		_, have, cells := g.entry(pos)
		if left < have {
			g.setUnits(pos, cells, have-left)
			break
		}
		left -= have
		pos += cells
	}
	c.setFirstCell(s, pos)
	return n
}

// convert gives the chain of s to t; the caller must clear s and not free it. If the ticks change, convert rounds each
// entry's instant up to the new grid, in its place. If they do not, the next advance removes what a shorter window does
// not hold. A longer window does not bring back what has expired.
func (c slidingLog) convert(l *Limit, a *Arena, s []uint64, now Instant, to *Limit, t []uint64) {
	copy(t, s)
	k, k2 := l.tickShift(), to.tickShift()
	if k == k2 || t[logUnits] == 0 {
		return
	}
	// Entries that a shorter window does not hold are removed first, because the new grid may not reach back to them.
	c.expire(l, a, t, k, now.Mono-int64(min(l.Window, to.Window)))
	if t[logUnits] == 0 {
		return
	}
	newest := roundUp(int64(t[logNewest]), k2)
	// Longer ticks may have put newest further after now than the new ones would. An entry that is about to expire can
	// then lie before the new grid. It gets earliest.
	earliest := earliestOf(newest, k2)
	pos := c.firstCell(t)
	for ref := c.firstSegment(t); ref != 0; pos = 0 {
		g := segmentAt(a, ref)
		for pos < g.end() {
			num, _, cells := g.entry(pos)
			instant := max(roundUp(instantOf(t, num, k), k2), earliest)
			g.set(pos, tickOf(instant, k2))
			pos += cells
		}
		ref = g.next()
	}
	t[logNewest] = uint64(newest) // last, because instantOf needs the former one
}

// snapshot writes all of a log that is not empty.
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
// than `without`. It writes the age of the newest, the ticks from the first unit to the newest, and for each entry a
// code: ticks<<1 for one unit, or ticks<<1|1 and the units. ticks are those since the entry before.
func (c slidingLog) entries(dst []byte, l *Limit, a *Arena, s []uint64, now Instant, without int64) []byte {
	cur, newest := c.cursor(a, s, l.tickShift()), int64(s[logNewest])
	cur.pass(without)
	dst = appendInt(dst, now.Mono-newest)
	dst = appendUint(dst, (newest-cur.instant)>>cur.k)
	prev, g, pos := tickOf(cur.instant, cur.k), cur.g, cur.pos
	_, skipped, _ := g.entry(pos)
	skipped -= cur.n // units of the first entry that are not written
	// The loop uses no cursor, which works out instants: with it, a snapshot would take 1.5 times as long.
	for {
		for pos < g.end() {
			num, n, cells := g.entry(pos)
			n -= skipped
			skipped = 0
			ticks := int64((num - prev) & tickMask)
			prev, pos = num, pos+cells
			if n == 1 {
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

// extend reads what since wrote of another log, into a copy of that log. It drops the copy's oldest units until the
// copy has only those that the log has besides the n newest, and then adds these n.
//
// That is right if, since the position that the copy's Mark remembers (extend.go), the log has lost only its oldest
// units and units that were charged after that position. takeAt may remove others. GiveBack (hold.go), which calls
// takeAt, therefore makes all former Marks invalid, and AppendSince then sends a snapshot instead.
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

// readEntries reads what entries wrote, and adds it to the end of the log. units is the number of units that follow. An
// empty log takes over the writer's grid. A log with entries keeps its own grid: there, an instant between two of the
// grid becomes the later one, an instant after now becomes now, and an instant before newest becomes newest. (Ages are
// of the time of writing, so units seem younger by the message's travel. Those of a message that travelled faster than
// the one before can seem older than its units.)
//
// The error is ErrNoMemory or ErrSnapshot, which is also the reader's. After an error the log has a part of the units;
// the caller must drop the copy.
func (c slidingLog) readEntries(l *Limit, a *Arena, s []uint64, now Instant, r *reader, units int64) error {
	k, empty := l.tickShift(), s[logUnits] == 0
	age := r.int(2 * int64(MaxWindow)) // any unit that still counts is younger
	if age < -longestTick {
		return ErrSnapshot
	}
	newest := now.Mono - age
	span := r.uint(tickMask)
	for units > 0 && r.err == nil {
		code, n := r.uint(tickMask<<1|1), int64(1)
		if code&1 != 0 {
			n = r.uint(units)
		}
		span -= code >> 1
		units -= n
		if r.err != nil || n == 0 || span < 0 || units < 0 {
			return ErrSnapshot
		}
		if !c.ensureMemory(l, a, s, n) {
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

// join makes u the log that has, from each instant to now, the larger of the numbers of units that s and t have. So u
// has room no sooner than either of them. t is not empty, and u is. join returns false if there is no memory; u then
// has a part of the units.
//
// join passes the instants of both from the oldest on. inS and inT count the units that have not been passed. If
// passing an instant makes the larger of the two smaller by n, u gets n units there. u has the grid of the side with
// the newest entry. If the other side has another grid, its entries are rounded up, and expire late by less than a
// tick. The cursors stay valid, because Alloc moves no block.
func (c slidingLog) join(l *Limit, a *Arena, s, t []uint64, _ Instant, u []uint64) bool {
	if s[logUnits] == 0 || int64(s[logNewest]) < int64(t[logNewest]) {
		s, t = t, s
	}
	k, newest := l.tickShift(), int64(s[logNewest])
	// Longer ticks, of a former window, may have put newest further after now than these would. An entry that is about
	// to expire can then lie before the grid. It gets earliest.
	earliest := earliestOf(newest, k)
	x, y := c.cursor(a, s, k), c.cursor(a, t, k)
	inS, inT := int64(s[logUnits]), int64(t[logUnits])
	for x.n != 0 || y.n != 0 {
		instant, before := min(x.instant, y.instant), max(inS, inT)
		inS -= x.passInstant(instant)
		inT -= y.passInstant(instant)
		n := before - max(inS, inT)
		if n == 0 {
			continue
		}
		if !c.ensureMemory(l, a, u, n) {
			return false
		}
		onGrid := newest - (newest-instant)>>k<<k // not before instant
		c.add(a, u, max(onGrid, earliest), k, n)
	}
	return true
}

// logCursor passes a log's entries from the oldest to the newest.
type logCursor struct {
	a          *Arena
	s          []uint64
	k          int
	before     segment // the one before g; nil: g is the oldest
	g          segment // that the entry is in
	pos, cells int     // of the entry: the cell at which it begins, and how many it has
	n          int64   // units of the entry that have not been passed; 0 after the newest entry
	instant    int64   // of the entry; after the newest one, later than all
}

// cursor returns a cursor that is at the oldest entry.
func (c slidingLog) cursor(a *Arena, s []uint64, k int) logCursor {
	cur := logCursor{a: a, s: s, k: k, instant: math.MaxInt64}
	if s[logUnits] != 0 {
		cur.g, cur.pos = segmentAt(a, c.firstSegment(s)), c.firstCell(s)
		cur.load()
	}
	return cur
}

func (cur *logCursor) next() {
	cur.pos += cur.cells
	cur.load()
}

// load reads the entry that begins at pos, or the first one after it.
func (cur *logCursor) load() {
	for cur.pos == cur.g.end() {
		if cur.g.next() == 0 {
			cur.n, cur.instant = 0, math.MaxInt64
			return
		}
		cur.nextSegment()
	}
	var num uint32
	num, cur.n, cur.cells = cur.g.entry(cur.pos)
	cur.instant = instantOf(cur.s, num, cur.k)
}

// nextSegment goes to the beginning of the next segment, which must exist. It does not read an entry.
func (cur *logCursor) nextSegment() {
	cur.before, cur.g, cur.pos = cur.g, segmentAt(cur.a, cur.g.next()), 0
}

// pass skips the `units` oldest units; the log must have more than `units`.
func (cur *logCursor) pass(units int64) {
	for units >= int64(cur.g[1]) {
		units -= int64(cur.g[1])
		cur.nextSegment()
	}
	for {
		_, n, cells := cur.g.entry(cur.pos)
		if units < n {
			break
		}
		units -= n
		cur.pos += cells
	}
	cur.load()
	cur.n -= units
}

// passInstant passes the entries of an instant, if the cursor is at it, and returns their units.
func (cur *logCursor) passInstant(instant int64) (n int64) {
	for ; cur.n != 0 && cur.instant == instant; cur.next() {
		n += cur.n
	}
	return n
}

// find returns a cursor at the oldest entry that is not before an instant, and how many units are older, which
// AppendHolds (hold.go) tells. ok is false if there is no such entry less than a tick after the instant.
func (c slidingLog) find(a *Arena, s []uint64, k int, instant int64) (cur logCursor, older int64, ok bool) {
	if s[logUnits] == 0 || instant > int64(s[logNewest]) {
		return cur, 0, false
	}
	cur = c.cursor(a, s, k)
	for cur.g.next() != 0 {
		h := segmentAt(a, cur.g.next())
		if h.end() == 0 || instantOf(s, h.get(0), k) >= instant { // the newest one may have no entry
			break
		}
		older += int64(cur.g[1])
		cur.nextSegment()
	}
	for cur.load(); cur.instant < instant; cur.next() {
		older += cur.n
	}
	return cur, older, cur.instant < instant+1<<k
}

// takeAt takes up to n units that were charged at `instant`, and returns how many it took. charge rounded `instant` up
// by less than a tick. So these units are at the instant of the oldest entry not before `instant`. (Entries do not tell
// requests apart. After another rounding, takeAt may take as many units of another request.) If that entry is a tick or
// more after `instant`, takeAt takes nothing: the units have left the log, or were rounded up once more.
func (c slidingLog) takeAt(a *Arena, s []uint64, k int, instant, n int64) (taken int64) {
	cur, _, ok := c.find(a, s, k, instant)
	if !ok {
		return 0
	}
	first := cur.g // where merge begins
	if cur.before != nil {
		first = cur.before
	}
	for target := cur.instant; taken < n && cur.n != 0 && cur.instant == target; {
		m := min(cur.n, n-taken)
		taken += m
		cur.g[1] -= uint64(m)
		s[logUnits] -= uint64(m)
		if m < cur.n {
			cur.g.setUnits(cur.pos, cur.cells, cur.n-m)
			break
		}
		if s[logUnits] == 0 {
			c.free(nil, a, s)
			return taken
		}
		// The later entries of the segment move over this one, so that load reads the next entry, in this segment or
		// another.
		end := cur.g.end() - cur.cells
		for i := cur.pos; i < end; i++ {
			cur.g.set(i, cur.g.get(i+cur.cells))
		}
		cur.g.setEnd(end)
		cur.load()
	}
	c.merge(a, s, first)
	c.dropEmpty(a, s)
	s[logNewest] = uint64(c.unitAt(a, s, k, int64(s[logUnits]))) // unitAt needs the former one, which has the same grid
	return taken
}

// merge moves the entries of each segment after g into the one before it, if they fit behind its end, and frees the
// empty one. The newest segment stays, because the next charge may go there. firstCell stays, even if the oldest
// segment has lost all its entries: those that move there begin at firstCell, which is its end then.
func (c slidingLog) merge(a *Arena, s []uint64, g segment) {
	for g.next() != 0 {
		ref, end := g.next(), g.end()
		h := segmentAt(a, ref)
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
		c.addChainWords(s, -h.words())
		a.Free(ref, h.words())
	}
}

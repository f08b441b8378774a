package algo

import (
	"math"
	"time"
)

// concurrency grants leases: an admitted request has its units until it releases the lease or the lease expires. (A
// counting semaphore whose permits expire, after Gray and Cheriton, "Leases", SOSP 1989.)
//
// Each lease is in a slot, whose number is part of its id, so that a lease is found by its id, and in a binary heap by
// expiry, so that the next to expire is known. An id is 40 bits of the caller's nonce and 24 of slot. A slot without
// nonce is a nameless lease: units that Charge or Fill has added, which only its expiry gives back.
//
// When two states are joined both may have a lease in the same slot. One of the two then moves to another slot. The
// heap has, beside each lease's slot, the home that its id names. A lease that is not at home is found by a search of
// all leases of the state. So a state that has been joined answers a renewal or release of a moved lease, or of one
// that has ended, in time proportional to its leases, until it has been empty.
//
// Words: units in use; number of leases and, above 32 bits, 1 + the first slot of the list of free ones; an instant
// that no lease outlives; whether there may be leases that are not at home; two vectors: the slots (nonce and place in
// the heap, units) and the heap (expiry, home and slot). All are zero when there are no leases.
type concurrency struct{}

const (
	leaseUnits = iota
	leaseCount
	leaseLatest
	leaseMoved
	leaseSlots
	leaseHeap
	leaseWords
)

const (
	slotBits  = 24 // more than MaxLeases needs
	slotMask  = 1<<slotBits - 1
	nonceMask = 1<<(64-slotBits) - 1
)

// leaseID is never 0.
func leaseID(nonce uint64, slot uint32) uint64 {
	return max(nonce&nonceMask, 1)<<slotBits | uint64(slot)
}

// ttl is the life of a lease for which ttl was asked.
func (l *Limit) ttl(ttl time.Duration) time.Duration {
	if ttl <= 0 || l.Limit != Unlimited && ttl > l.Window {
		return l.Window
	}
	return ttl
}

func (concurrency) words(*Limit) int { return leaseWords }

func (concurrency) init(_ *Limit, s []uint64, _ Instant) { clear(s) }

func (concurrency) free(_ *Limit, a *Arena, s []uint64) {
	vector{&s[leaseSlots]}.free(a)
	vector{&s[leaseHeap]}.free(a)
	clear(s)
}

func (concurrency) count(s []uint64) int { return int(uint32(s[leaseCount])) }

// freeSlot is 1 + the first free slot, 0 when there is none.
func (concurrency) freeSlot(s []uint64) uint32 { return uint32(s[leaseCount] >> 32) }

// The table of a lease's slot and of a place in the heap. Both must exist.
func (concurrency) slot(a *Arena, s []uint64, i uint32) []uint64 {
	return vector{&s[leaseSlots]}.at(a, i)
}
func (concurrency) heap(a *Arena, s []uint64, i int) []uint64 {
	return vector{&s[leaseHeap]}.at(a, uint32(i))
}

func (c concurrency) advance(l *Limit, a *Arena, s []uint64, now Instant) {
	if c.count(s) > 0 && int64(s[leaseLatest]) <= now.Mono {
		c.free(l, a, s)
	}
	for c.count(s) > 0 && int64(c.heap(a, s, 0)[0]) <= now.Mono {
		c.remove(a, s, slotOf(c.heap(a, s, 0)))
	}
}

func (concurrency) used(_ *Limit, _ *Arena, s []uint64, _ Instant) int64 { return int64(s[leaseUnits]) }

// wait is the time until the first lease expires. Its units may not suffice, and another lease may be released before.
func (c concurrency) wait(_ *Limit, a *Arena, s []uint64, now Instant, _ int64) time.Duration {
	return time.Duration(int64(c.heap(a, s, 0)[0]) - now.Mono)
}

// resetAfter may be too long when the lease that would have lived longest has been released or renewed for less.
func (c concurrency) resetAfter(_ *Limit, _ *Arena, s []uint64, now Instant) time.Duration {
	if c.count(s) == 0 {
		return 0
	}
	return time.Duration(int64(s[leaseLatest]) - now.Mono)
}

func (c concurrency) ensureMemory(_ *Limit, a *Arena, s []uint64, _ int64) bool {
	if !(vector{&s[leaseHeap]}).ensure(a, uint32(c.count(s))) {
		return false
	}
	if c.freeSlot(s) != 0 {
		return true
	}
	// No existing slot is free, so there are as many as leases. The next chunk of slots is made: behind them, or where
	// it was restored with gaps, further on. (A state restored with more than half of MaxLeases may find none there.)
	slots, from := vector{&s[leaseSlots]}, uint32(c.count(s))
	for from < MaxLeases && slots.has(a, from) {
		from += chunkLen
	}
	if from >= MaxLeases || !slots.ensure(a, from) {
		return false
	}
	for i := min(from+chunkLen, slots.len()); i > from; i-- { // less than a chunk while the only one grows
		c.putFree(a, s, i-1)
	}
	return true
}

// putFree puts a slot on the list of free ones. Having no units tells it from one in use.
func (c concurrency) putFree(a *Arena, s []uint64, slot uint32) {
	e := c.slot(a, s, slot)
	e[0], e[1] = uint64(c.freeSlot(s)), 0
	s[leaseCount] = s[leaseCount]&0xffff_ffff | uint64(slot+1)<<32
}

// charge adds a nameless lease of n units that lives for the Window. The memory must be reserved.
func (c concurrency) charge(l *Limit, a *Arena, s []uint64, now Instant, n int64) {
	slot := c.takeFree(a, s)
	c.insert(a, s, uint64(slot), slot, now.Mono+int64(l.Window), n)
}

// acquire adds a lease of n units and returns its id. The memory must be reserved.
func (c concurrency) acquire(l *Limit, a *Arena, s []uint64, now Instant, n int64, r Request) uint64 {
	slot := c.takeFree(a, s)
	id := leaseID(r.Nonce, slot)
	c.insert(a, s, id, slot, now.Mono+int64(l.ttl(r.TTL)), n)
	return id
}

// takeFree takes a slot off the list of free ones, which has one.
func (c concurrency) takeFree(a *Arena, s []uint64) uint32 {
	slot := c.freeSlot(s) - 1
	s[leaseCount] = s[leaseCount]&0xffff_ffff | c.slot(a, s, slot)[0]<<32
	return slot
}

// insert adds a lease in a slot that exists and is on no list. The heap must have a place.
func (c concurrency) insert(a *Arena, s []uint64, id uint64, slot uint32, expiry, n int64) {
	last := c.count(s)
	s[leaseUnits] += uint64(n)
	s[leaseCount]++
	s[leaseLatest] = uint64(max(int64(s[leaseLatest]), expiry))
	if last == 0 {
		s[leaseLatest] = uint64(expiry)
	}
	home := id & slotMask
	if home != uint64(slot) {
		s[leaseMoved] = 1
	}
	e := c.slot(a, s, slot)
	e[0], e[1] = id&^slotMask, uint64(n)
	c.place(a, s, last, uint64(expiry), home<<slotBits|uint64(slot))
	c.up(a, s, last)
}

// slotOf is the slot of a lease in the heap.
func slotOf(h []uint64) uint32 { return uint32(h[1] & slotMask) }

// idOf is the id of a lease in the heap, of which the nonce is 0 for a nameless one.
func (c concurrency) idOf(a *Arena, s, h []uint64) uint64 {
	return c.slot(a, s, slotOf(h))[0]&^slotMask | h[1]>>slotBits
}

// find returns the slot that a lease is in, false when there is none of this id.
func (c concurrency) find(a *Arena, s []uint64, id uint64) (uint32, bool) {
	if id>>slotBits == 0 {
		return 0, false
	}
	home := uint32(id & slotMask)
	if (vector{&s[leaseSlots]}).has(a, home) {
		if e := c.slot(a, s, home); e[1] != 0 && c.idOf(a, s, c.heap(a, s, int(e[0]&slotMask))) == id {
			return home, true
		}
	}
	if s[leaseMoved] == 0 {
		return 0, false
	}
	for i := range c.count(s) {
		if h := c.heap(a, s, i); c.idOf(a, s, h) == id {
			return slotOf(h), true
		}
	}
	return 0, false
}

func (c concurrency) renew(a *Arena, s []uint64, now Instant, id uint64, ttl time.Duration) bool {
	slot, ok := c.find(a, s, id)
	if ok {
		c.setExpiry(a, s, slot, now.Mono+int64(ttl))
	}
	return ok
}

// setExpiry makes the lease in a slot expire at another instant.
func (c concurrency) setExpiry(a *Arena, s []uint64, slot uint32, expiry int64) {
	at := int(c.slot(a, s, slot)[0] & slotMask)
	c.heap(a, s, at)[0] = uint64(expiry)
	s[leaseLatest] = uint64(max(int64(s[leaseLatest]), expiry))
	c.down(a, s, c.up(a, s, at))
}

func (c concurrency) release(a *Arena, s []uint64, id uint64) bool {
	slot, ok := c.find(a, s, id)
	if ok {
		c.remove(a, s, slot)
	}
	return ok
}

// remove ends the lease in a slot.
func (c concurrency) remove(a *Arena, s []uint64, slot uint32) {
	last := c.count(s) - 1
	if last == 0 {
		c.free(nil, a, s)
		return
	}
	e := c.slot(a, s, slot)
	at := int(e[0] & slotMask)
	s[leaseUnits] -= e[1]
	s[leaseCount]--
	c.putFree(a, s, slot)
	if at != last {
		h := c.heap(a, s, last)
		c.place(a, s, at, h[0], h[1])
		c.down(a, s, c.up(a, s, at))
	}
}

// place puts a lease at a place in the heap. where has its home and slot, as the heap has them.
func (c concurrency) place(a *Arena, s []uint64, at int, expiry, where uint64) {
	h := c.heap(a, s, at)
	h[0], h[1] = expiry, where
	e := c.slot(a, s, slotOf(h))
	e[0] = e[0]&^slotMask | uint64(at)
}

// up moves the lease at a place towards the top until those above expire no later, and returns its place.
func (c concurrency) up(a *Arena, s []uint64, at int) int {
	h := c.heap(a, s, at)
	expiry, where := h[0], h[1]
	for at > 0 {
		parent := c.heap(a, s, (at-1)/2)
		if int64(parent[0]) <= int64(expiry) {
			break
		}
		c.place(a, s, at, parent[0], parent[1])
		at = (at - 1) / 2
	}
	c.place(a, s, at, expiry, where)
	return at
}

// down moves the lease at a place away from the top until those below expire no earlier.
func (c concurrency) down(a *Arena, s []uint64, at int) {
	h := c.heap(a, s, at)
	expiry, where := h[0], h[1]
	for {
		below := 2*at + 1
		if below >= c.count(s) {
			break
		}
		child := c.heap(a, s, below)
		if below+1 < c.count(s) {
			if other := c.heap(a, s, below+1); int64(other[0]) < int64(child[0]) {
				below, child = below+1, other
			}
		}
		if int64(child[0]) >= int64(expiry) {
			break
		}
		c.place(a, s, at, child[0], child[1])
		at = below
	}
	c.place(a, s, at, expiry, where)
}

// refund does nothing: units come back with their lease.
func (concurrency) refund(*Limit, *Arena, []uint64, Instant, int64) int64 { return 0 }

// convert moves everything. A shorter Window is for leases given from now on.
func (concurrency) convert(_ *Limit, _ *Arena, s []uint64, _ Instant, _ *Limit, t []uint64) {
	copy(t, s)
}

func (c concurrency) snapshot(dst []byte, _ *Limit, a *Arena, s []uint64, now Instant) []byte {
	dst = appendUint(dst, int64(c.count(s)))
	dst = appendUint(dst, int64(s[leaseLatest])-now.Mono)
	for i := range c.count(s) {
		h := c.heap(a, s, i)
		e, slot, home := c.slot(a, s, slotOf(h)), int64(slotOf(h)), int64(h[1]>>slotBits)
		if home == slot {
			dst = appendUint(dst, slot<<1)
		} else {
			dst = appendUint(appendUint(dst, slot<<1|1), home)
		}
		dst = appendUint(dst, int64(e[0]>>slotBits))
		dst = appendUint(dst, int64(h[0])-now.Mono)
		dst = appendUint(dst, int64(e[1]))
	}
	return dst
}

// restore puts the leases into the slots they were in, and then all others that exist on the list of free ones.
func (c concurrency) restore(_ *Limit, a *Arena, s []uint64, now Instant, r *reader) error {
	count := int(r.uint(MaxLeases))
	latest := r.uint(int64(MaxWindow))
	if r.err == nil && count == 0 {
		return ErrSnapshot
	}
	for range count {
		slot := r.uint(2*MaxLeases - 1)
		home := slot >> 1
		if slot&1 != 0 {
			home = r.uint(MaxLeases - 1)
		}
		slot >>= 1
		nonce, left, n := r.uint(nonceMask), r.uint(latest), r.uint(MaxLimit)
		switch {
		case r.err != nil:
			return r.err
		case n == 0 || n > MaxLimit-int64(s[leaseUnits]) || nonce == 0 && home != slot:
			return ErrSnapshot
		case !c.ensure(a, s, uint32(slot)):
			return ErrNoMemory
		case c.slot(a, s, uint32(slot))[1] != 0:
			return ErrSnapshot
		}
		c.insert(a, s, uint64(nonce<<slotBits|home), uint32(slot), now.Mono+left, n)
	}
	s[leaseLatest] = uint64(now.Mono + latest)
	c.linkFree(a, s)
	return r.err
}

// ensure makes a slot, and a place in the heap for one more lease, or returns false when memory does not suffice.
func (concurrency) ensure(a *Arena, s []uint64, slot uint32) bool {
	return vector{&s[leaseSlots]}.ensure(a, slot) && vector{&s[leaseHeap]}.ensure(a, uint32(concurrency{}.count(s)))
}

// linkFree puts all slots that exist and have no lease on the list of free ones, which is empty.
func (c concurrency) linkFree(a *Arena, s []uint64) {
	slots := vector{&s[leaseSlots]}
	for i := slots.len(); i > 0; {
		if i%chunkLen == 0 && !slots.has(a, i-1) {
			i -= chunkLen
			continue
		}
		i--
		if c.slot(a, s, i)[1] == 0 {
			c.putFree(a, s, i)
		}
	}
}

// lease is a lease apart from its state.
type lease struct {
	id            uint64
	expiry, units int64
}

// join makes u the union of the leases by their ids: one that both have counts once and expires when the later of the
// two does. Of the units of nameless leases the larger number counts, until the last of both sides' ones expires.
func (c concurrency) join(l *Limit, a *Arena, s, t []uint64, _ Instant, u []uint64) bool {
	var list, moved []lease
	nameless := lease{expiry: math.MinInt64}
	known := make(map[uint64]int) // the place in list, by id
	for _, v := range [][]uint64{s, t} {
		var units int64
		for _, x := range c.leases(a, v) {
			i, ok := known[x.id]
			switch {
			case x.id>>slotBits == 0:
				units += x.units
				nameless.expiry = max(nameless.expiry, x.expiry)
			case ok:
				list[i].expiry = max(list[i].expiry, x.expiry)
			default:
				known[x.id] = len(list)
				list = append(list, x)
			}
		}
		nameless.units = max(nameless.units, units)
	}
	for _, x := range list {
		switch home, n := uint32(x.id&slotMask), c.fits(u, x.units); {
		case n == 0:
		case !c.ensure(a, u, home):
			return false
		case c.slot(a, u, home)[1] != 0:
			moved = append(moved, x)
		default:
			c.insert(a, u, x.id, home, x.expiry, n)
		}
	}
	c.linkFree(a, u)
	for _, x := range append(moved, nameless) {
		n := c.fits(u, x.units)
		if n == 0 {
			continue
		}
		if !c.ensureMemory(l, a, u, n) {
			return false
		}
		slot := c.takeFree(a, u)
		if x.id == 0 {
			x.id = uint64(slot)
		}
		c.insert(a, u, x.id, slot, x.expiry, n)
	}
	return true
}

// leases returns the leases of s.
func (c concurrency) leases(a *Arena, s []uint64) (list []lease) {
	for i := range c.count(s) {
		h := c.heap(a, s, i)
		list = append(list, lease{c.idOf(a, s, h), int64(h[0]), int64(c.slot(a, s, slotOf(h))[1])})
	}
	return list
}

// fits is how many units a state can count in addition to its own: all, up to MaxLimit together.
func (concurrency) fits(s []uint64, units int64) int64 {
	return min(units, MaxLimit-int64(s[leaseUnits]))
}

func (concurrency) horizon(l *Limit) time.Duration { return l.Window }

// vector is an array of pairs of words in the Arena that grows. Up to chunkLen pairs it is one block that doubles. Then
// the root block names chunks of that length, of which some may be missing. The word that it is in names its root (32
// bits) and its length (32), the number of pairs that there could be.
type vector struct{ word *uint64 }

const (
	chunkBits = 9
	chunkLen  = 1 << chunkBits // pairs in a block of MaxBlock words
	branches  = MaxBlock       // chunks under a root
)

func (v vector) root() Ref   { return Ref(*v.word >> 32) }
func (v vector) len() uint32 { return uint32(*v.word) }

func (v vector) set(root Ref, n uint32) { *v.word = uint64(root)<<32 | uint64(n) }

// branch returns the word of the root that names the chunk of pair i, nil if the root is the only chunk.
func (v vector) branch(a *Arena, i uint32) *uint64 {
	if v.len() <= chunkLen {
		return nil
	}
	return &a.Block(v.root(), branches)[i>>chunkBits]
}

// chunk returns the block that holds pair i, which is below len; 0 when it is missing.
func (v vector) chunk(a *Arena, i uint32) Ref {
	if b := v.branch(a, i); b != nil {
		return Ref(*b)
	}
	return v.root()
}

// has reports whether pair i exists.
func (v vector) has(a *Arena, i uint32) bool { return i < v.len() && v.chunk(a, i) != 0 }

// at returns pair i, which must exist.
func (v vector) at(a *Arena, i uint32) []uint64 {
	at := i % chunkLen
	return a.Block(v.chunk(a, i), 2*int(at+1))[2*at:]
}

// ensure makes pair i exist, or returns false when memory does not suffice. New pairs are zero.
func (v vector) ensure(a *Arena, i uint32) bool {
	for i >= v.len() {
		if !v.grow(a) {
			return false
		}
	}
	if b := v.branch(a, i); b != nil && *b == 0 {
		fresh, ok := a.Alloc(2 * chunkLen)
		*b = uint64(fresh)
		return ok
	}
	return true
}

// grow doubles the only block, or makes it the first chunk under a root. It returns false when there is a root already,
// or when memory does not suffice.
func (v vector) grow(a *Arena) bool {
	n := v.len()
	if n == MaxLeases {
		return false
	}
	words := min(max(4, 4*int(n)), MaxBlock)
	r, ok := a.Alloc(words)
	if !ok {
		return false
	}
	switch block := a.Block(r, words); {
	case n == 0:
		v.set(r, 2)
	case n < chunkLen:
		copy(block, a.Block(v.root(), int(2*n)))
		a.Free(v.root(), int(2*n))
		v.set(r, 2*n)
	default:
		block[0] = uint64(v.root())
		v.set(r, MaxLeases)
	}
	return true
}

func (v vector) free(a *Arena) {
	switch n := v.len(); {
	case n > chunkLen:
		for _, chunk := range a.Block(v.root(), branches) {
			if chunk != 0 {
				a.Free(Ref(chunk), 2*chunkLen)
			}
		}
		a.Free(v.root(), branches)
	case n > 0:
		a.Free(v.root(), int(2*n))
	}
	*v.word = 0
}

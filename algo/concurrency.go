package algo

import "time"

// concurrency lends units out: an admitted request gets a lease on them, until it is released or its time is up. (A
// counting semaphore whose permits expire, after Gray and Cheriton, "Leases", SOSP 1989.)
//
// Leases are in slots, whose numbers are part of the ids given out, and in a binary heap by expiry, so that a lease is
// found at once and the next to expire is known. An id is 40 bits of the caller's nonce and 24 of slot.
//
// Words: units lent; leases and, above 32 bits, 1 + the first slot of the list of free ones; no instant at which a lease
// expires is later than this; the first chunk of slots that may not exist; two vectors: the slots (nonce and place in
// the heap, units) and the heap (expiry, slot). All are zero when there are no leases.
type concurrency struct{}

const (
	leaseUnits = iota
	leaseCount
	leaseLatest
	leaseChunk
	leaseSlots
	leaseHeap
	leaseWords
)

const (
	slotBits  = 24 // MaxLeases
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
		c.remove(a, s, uint32(c.heap(a, s, 0)[1]))
	}
}

func (concurrency) room(l *Limit, _ *Arena, s []uint64, _ Instant) int64 {
	return max(l.Limit-int64(s[leaseUnits]), 0)
}

func (concurrency) used(_ *Limit, _ *Arena, s []uint64, _ Instant) int64 { return int64(s[leaseUnits]) }

// wait is until the first lease expires: its units may not suffice, and one may be released before.
func (c concurrency) wait(l *Limit, a *Arena, s []uint64, now Instant, n int64) time.Duration {
	if c.room(l, a, s, now) >= n {
		return 0
	}
	return time.Duration(int64(c.heap(a, s, 0)[0]) - now.Mono)
}

// reset may be too long when the lease that would have lived longest has been released or renewed for less.
func (c concurrency) reset(_ *Limit, _ *Arena, s []uint64, now Instant) time.Duration {
	if c.count(s) == 0 {
		return 0
	}
	return time.Duration(int64(s[leaseLatest]) - now.Mono)
}

func (c concurrency) reserve(_ *Limit, a *Arena, s []uint64, _ int64) bool {
	if !(vector{&s[leaseHeap]}).ensure(a, uint32(c.count(s))) {
		return false
	}
	if c.freeSlot(s) != 0 {
		return true
	}
	// No slot that exists is free: so the first chunk of them that does not.
	slots := vector{&s[leaseSlots]}
	from := uint32(s[leaseChunk])
	if slots.len() >= chunkLen {
		for from < MaxLeases && slots.has(a, from) {
			from += chunkLen
		}
	}
	if from >= MaxLeases || !slots.ensure(a, from) {
		return false
	}
	until := min(from+chunkLen, slots.len()) // less than a chunk while the only one grows
	s[leaseChunk] = uint64(until)
	for i := until; i > from; i-- {
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

// charge lends units to nobody who could give them back. Only acquire is of use.
func (c concurrency) charge(l *Limit, a *Arena, s []uint64, now Instant, n int64) {
	c.acquire(l, a, s, now, n, Request{})
}

// acquire lends n units and returns the lease's id. It wants memory reserved.
func (c concurrency) acquire(l *Limit, a *Arena, s []uint64, now Instant, n int64, r Request) uint64 {
	slot := c.freeSlot(s) - 1
	s[leaseCount] = s[leaseCount]&0xffff_ffff | c.slot(a, s, slot)[0]<<32
	id := leaseID(r.Nonce, slot)
	c.insert(a, s, id, now.Mono+int64(l.ttl(r.TTL)), n)
	return id
}

// insert adds a lease whose slot exists and is on no list, and for which the heap has a place.
func (c concurrency) insert(a *Arena, s []uint64, id uint64, expiry, n int64) {
	slot := uint32(id & slotMask)
	last := c.count(s)
	s[leaseUnits] += uint64(n)
	s[leaseCount]++
	s[leaseLatest] = uint64(max(int64(s[leaseLatest]), expiry))
	if last == 0 {
		s[leaseLatest] = uint64(expiry)
	}
	e := c.slot(a, s, slot)
	e[0], e[1] = id&^slotMask, uint64(n)
	c.place(a, s, last, uint64(expiry), slot)
	c.up(a, s, last)
}

// find returns the entry of a lease, nil when there is none of this id.
func (c concurrency) find(a *Arena, s []uint64, id uint64) []uint64 {
	slot := uint32(id & slotMask)
	if !(vector{&s[leaseSlots]}).has(a, slot) {
		return nil
	}
	if e := c.slot(a, s, slot); e[1] != 0 && e[0]&^slotMask == id&^slotMask {
		return e
	}
	return nil
}

func (c concurrency) renew(a *Arena, s []uint64, now Instant, id uint64, ttl time.Duration) bool {
	e := c.find(a, s, id)
	if e == nil {
		return false
	}
	at := int(e[0] & slotMask)
	expiry := now.Mono + int64(ttl)
	c.heap(a, s, at)[0] = uint64(expiry)
	s[leaseLatest] = uint64(max(int64(s[leaseLatest]), expiry))
	c.down(a, s, c.up(a, s, at))
	return true
}

func (c concurrency) release(a *Arena, s []uint64, id uint64) bool {
	if c.find(a, s, id) == nil {
		return false
	}
	c.remove(a, s, uint32(id&slotMask))
	return true
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
		c.place(a, s, at, h[0], uint32(h[1]))
		c.down(a, s, c.up(a, s, at))
	}
}

// place puts a lease at a place in the heap.
func (c concurrency) place(a *Arena, s []uint64, at int, expiry uint64, slot uint32) {
	h := c.heap(a, s, at)
	h[0], h[1] = expiry, uint64(slot)
	e := c.slot(a, s, slot)
	e[0] = e[0]&^slotMask | uint64(at)
}

// up moves the lease at a place towards the top until those above expire no later, and returns its place.
func (c concurrency) up(a *Arena, s []uint64, at int) int {
	h := c.heap(a, s, at)
	expiry, slot := h[0], uint32(h[1])
	for at > 0 {
		parent := c.heap(a, s, (at-1)/2)
		if int64(parent[0]) <= int64(expiry) {
			break
		}
		c.place(a, s, at, parent[0], uint32(parent[1]))
		at = (at - 1) / 2
	}
	c.place(a, s, at, expiry, slot)
	return at
}

// down moves the lease at a place away from the top until those below expire no earlier.
func (c concurrency) down(a *Arena, s []uint64, at int) {
	h := c.heap(a, s, at)
	expiry, slot := h[0], uint32(h[1])
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
		c.place(a, s, at, child[0], uint32(child[1]))
		at = below
	}
	c.place(a, s, at, expiry, slot)
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
		slot := uint32(h[1])
		e := c.slot(a, s, slot)
		dst = appendUint(dst, int64(slot))
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
	for i := range count {
		slot := uint32(r.uint(MaxLeases - 1))
		nonce, left, n := r.uint(nonceMask), r.uint(latest), r.uint(MaxLimit)
		switch slots := (vector{&s[leaseSlots]}); {
		case r.err != nil:
			return r.err
		case nonce == 0 || n == 0 || n > MaxLimit-int64(s[leaseUnits]):
			return ErrSnapshot
		case !slots.ensure(a, slot) || !(vector{&s[leaseHeap]}).ensure(a, uint32(i)):
			return ErrNoMemory
		case c.slot(a, s, slot)[1] != 0:
			return ErrSnapshot
		}
		c.insert(a, s, uint64(nonce)<<slotBits|uint64(slot), now.Mono+left, n)
	}
	s[leaseLatest] = uint64(now.Mono + latest)
	slots := vector{&s[leaseSlots]}
	if n := slots.len(); n < chunkLen {
		s[leaseChunk] = uint64(n)
	}
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
	return nil
}

// vector is an array of pairs of words in the Arena that grows and of which chunks may be missing. While it is short it
// is one block that doubles; then a tree whose leaves are chunks of that length, one level high or two. The word it is in
// names its root (32 bits) and its length (32), the number of pairs that there could be without another level.
type vector struct{ word *uint64 }

const (
	chunkBits  = 6
	chunkLen   = 1 << chunkBits
	branchBits = 9
	branches   = 1 << branchBits
	oneLevel   = chunkLen * branches // pairs under one level
	twoLevels  = oneLevel * branches // as many as MaxLeases
)

func (v vector) root() Ref   { return Ref(*v.word >> 32) }
func (v vector) len() uint32 { return uint32(*v.word) }

func (v vector) set(root Ref, n uint32) { *v.word = uint64(root)<<32 | uint64(n) }

// chunk returns the block that holds pair i, which is below len; 0 when it is missing.
func (v vector) chunk(a *Arena, i uint32) Ref {
	r := v.root()
	if v.len() > oneLevel {
		r = Ref(a.Block(r, branches)[i>>(chunkBits+branchBits)])
	}
	if v.len() > chunkLen && r != 0 {
		r = Ref(a.Block(r, branches)[i>>chunkBits&(branches-1)])
	}
	return r
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
	if v.len() <= chunkLen {
		return true
	}
	branch := v.root()
	if v.len() > oneLevel {
		top := a.Block(branch, branches)
		branch = Ref(top[i>>(chunkBits+branchBits)])
		if branch == 0 {
			var ok bool
			if branch, ok = a.Alloc(branches); !ok {
				return false
			}
			top[i>>(chunkBits+branchBits)] = uint64(branch)
		}
	}
	leaf := &a.Block(branch, branches)[i>>chunkBits&(branches-1)]
	if *leaf == 0 {
		r, ok := a.Alloc(2 * chunkLen)
		if !ok {
			return false
		}
		*leaf = uint64(r)
	}
	return true
}

// grow doubles the only block, or adds a level above the root.
func (v vector) grow(a *Arena) bool {
	n, words := v.len(), branches
	if n < chunkLen {
		words = max(4, int(4*n))
	}
	r, ok := a.Alloc(words)
	if !ok {
		return false
	}
	switch {
	case n == 0:
		v.set(r, 2)
	case n < chunkLen:
		copy(a.Block(r, words), a.Block(v.root(), int(2*n)))
		a.Free(v.root(), int(2*n))
		v.set(r, 2*n)
	case n == chunkLen:
		a.Block(r, words)[0] = uint64(v.root())
		v.set(r, oneLevel)
	default:
		a.Block(r, words)[0] = uint64(v.root())
		v.set(r, twoLevels)
	}
	return true
}

func (v vector) free(a *Arena) {
	switch n := v.len(); {
	case n == 0:
	case n <= chunkLen:
		a.Free(v.root(), int(2*n))
	case n == oneLevel:
		freeBranch(a, v.root())
	default:
		for _, r := range a.Block(v.root(), branches) {
			if r != 0 {
				freeBranch(a, Ref(r))
			}
		}
		a.Free(v.root(), branches)
	}
	*v.word = 0
}

func freeBranch(a *Arena, branch Ref) {
	for _, r := range a.Block(branch, branches) {
		if r != 0 {
			a.Free(Ref(r), 2*chunkLen)
		}
	}
	a.Free(branch, branches)
}

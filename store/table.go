package store

import "github.com/weirlimit/weir/algo"

// table finds records by hash: linear probing over words of (tag << 32 | ref), 0 for an empty slot. The tag is the
// upper half of the hash, and the home slot is taken from it, so that the table can be rebuilt without looking at the
// records.
type table struct {
	index []uint64 // length 0 or a power of two
	count int
}

func entry(tag uint32, ref algo.Ref) uint64 { return uint64(tag)<<32 | uint64(ref) }

func (t *table) ref(slot uint32) algo.Ref { return algo.Ref(t.index[slot]) }

// reserve makes sure that one more entry fits, at a load of at most 7/8.
func (t *table) reserve(b algo.Budget) bool {
	if (t.count+1)*8 <= len(t.index)*7 {
		return true
	}
	size := max(4, len(t.index)*2)
	if !b.Take((size - len(t.index)) * 8) {
		return false
	}
	t.rebuild(size)
	return true
}

// shrink makes a table smaller that has become sparse. It moves entries, so no walk of the table may be in progress.
func (t *table) shrink(b algo.Budget) {
	size := len(t.index)
	for size > 8 && t.count*8 < size {
		size /= 2
	}
	if size < len(t.index) {
		b.Give((len(t.index) - size) * 8)
		t.rebuild(size)
	}
}

func (t *table) rebuild(size int) {
	old := t.index
	t.index = make([]uint64, size)
	for _, e := range old {
		if e != 0 {
			t.seat(e)
		}
	}
}

func (t *table) seat(e uint64) uint32 {
	mask := uint32(len(t.index) - 1)
	slot := uint32(e>>32) & mask
	for t.index[slot] != 0 {
		slot = (slot + 1) & mask
	}
	t.index[slot] = e
	return slot
}

// put enters a record; reserve has made room for it.
func (t *table) put(tag uint32, ref algo.Ref) uint32 {
	t.count++
	return t.seat(entry(tag, ref))
}

// remove empties a slot and moves back what had been pushed past it, so that no tombstones are needed.
func (t *table) remove(slot uint32, b algo.Budget) {
	mask := uint32(len(t.index) - 1)
	hole := slot
	for next := (hole + 1) & mask; t.index[next] != 0; next = (next + 1) & mask {
		home := uint32(t.index[next]>>32) & mask
		// The entry may move into the hole unless its home lies after the hole, seen from the entry backwards.
		if (next-home)&mask >= (next-hole)&mask {
			t.index[hole] = t.index[next]
			hole = next
		}
	}
	t.index[hole] = 0
	t.count--
	if t.count == 0 {
		b.Give(len(t.index) * 8)
		t.index = nil
	}
}

package store

import (
	"errors"
	"slices"
	"sync"
	"unsafe"

	"github.com/weirlimit/weir/algo"
)

// errNoRoom asks the Store to make room and try again, which a shard cannot do under its own lock.
var errNoRoom = errors.New("store: no room")

// A record in the arena is
//
//	word 0   hash of scope and key
//	word 1   spec number << 32 | length of the key in bytes
//	word 2…  the state, as many words as the spec's limits take
//	then     the key's bytes, padded to whole words
const headWords = 2

// specBytes is what a spec is taken to cost when bytes are counted.
const specBytes = 256

// spec is a rule that at least one record of the shard is kept under.
type spec struct {
	rule  *Rule // nil: free
	words int   // of a state
	refs  int
	place int // in the shard's list of the scope's specs
}

// shard is a part of the store under one lock.
type shard struct {
	store *Store

	mu     sync.Mutex
	arena  *algo.Arena
	parts  []partition
	specs  []spec
	specOf map[string][]uint32 // by scope
	free   []uint32            // unused specs

	scratch algo.State // for peeks at keys without a state
}

// partition is the table of one partition's records: linear probing over words of (tag << 32 | ref), 0 for an empty
// slot. The tag is the upper half of the hash, and the home slot is taken from it, so that the table can be rebuilt
// without looking at the records.
type partition struct {
	index []uint64 // length 0 or a power of two
	count int
	memos memos
}

func entry(tag uint32, ref algo.Ref) uint64 { return uint64(tag)<<32 | uint64(ref) }

func (p *partition) ref(slot uint32) algo.Ref { return algo.Ref(p.index[slot]) }

// record is a view of one record.
type record struct {
	words []uint64
	spec  *spec
	state algo.State
	key   []byte
}

func keyWords(n int) int { return (n + 7) / 8 }

// bytesOf views words as bytes, in memory order: a key is only ever compared with and copied from other such views.
func bytesOf(words []uint64, n int) []byte {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), n)
}

func (sh *shard) record(ref algo.Ref) record {
	head := sh.arena.Block(ref, headWords)
	sp := &sh.specs[head[1]>>32]
	n := int(uint32(head[1]))
	words := sh.arena.Block(ref, headWords+sp.words+keyWords(n))
	return record{
		words: words,
		spec:  sp,
		state: algo.State(words[headWords : headWords+sp.words]),
		key:   bytesOf(words[headWords+sp.words:], n),
	}
}

// find returns the slot of a key's record.
func (sh *shard) find(part *partition, hash uint64, scope, key string) (uint32, bool) {
	if part.count == 0 {
		return 0, false
	}
	mask := uint32(len(part.index) - 1)
	tag := uint32(hash >> 32)
	for slot := tag & mask; part.index[slot] != 0; slot = (slot + 1) & mask {
		if uint32(part.index[slot]>>32) != tag {
			continue
		}
		r := sh.record(part.ref(slot))
		if r.words[0] == hash && string(r.key) == key && r.spec.rule.Scope == scope {
			return slot, true
		}
	}
	return 0, false
}

// insert makes a fresh record and returns its slot.
func (sh *shard) insert(part *partition, k Key, rule *Rule, now algo.Instant) (uint32, error) {
	s := sh.store
	if n := s.keys.Add(1); s.cfg.MaxKeys > 0 && n > s.cfg.MaxKeys {
		s.keys.Add(-1)
		return 0, errNoRoom
	}
	if !part.reserve(&s.budget) {
		s.keys.Add(-1)
		return 0, errNoRoom
	}
	ref, err := sh.place(k, rule)
	if err != nil {
		s.keys.Add(-1)
		return 0, err
	}
	r := sh.record(ref)
	rule.Limits.Init(r.state, now)
	return part.put(uint32(k.Hash>>32), ref), nil
}

// place allocates a record with its head and key.
func (sh *shard) place(k Key, rule *Rule) (algo.Ref, error) {
	number, ok := sh.intern(rule)
	if !ok {
		return 0, errNoRoom
	}
	sp := &sh.specs[number]
	total := headWords + sp.words + keyWords(len(k.Key))
	ref, ok := sh.arena.Alloc(total)
	if !ok {
		sh.unref(number)
		return 0, errNoRoom
	}
	words := sh.arena.Block(ref, total)
	words[0] = k.Hash
	words[1] = uint64(number)<<32 | uint64(len(k.Key))
	copy(bytesOf(words[headWords+sp.words:], len(k.Key)), k.Key)
	return ref, nil
}

// drop removes the record at slot with all that its state holds.
func (sh *shard) drop(part *partition, slot uint32) {
	ref := part.ref(slot)
	r := sh.record(ref)
	r.spec.rule.Limits.Free(sh.arena, r.state)
	sh.discard(ref)
	part.remove(slot, &sh.store.budget)
	sh.store.keys.Add(-1)
}

// discard frees a record's own block.
func (sh *shard) discard(ref algo.Ref) {
	r := sh.record(ref)
	number := uint32(r.words[1] >> 32)
	sh.arena.Free(ref, len(r.words))
	sh.unref(number)
}

// adopt brings the record at slot under the given rule when it is under another one. The table keeps its shape.
func (sh *shard) adopt(part *partition, slot uint32, rule *Rule, now algo.Instant) error {
	old := part.ref(slot)
	r := sh.record(old)
	if r.spec.rule == rule {
		return nil
	}
	if slices.Equal(r.spec.rule.Limits, rule.Limits) {
		r.spec.rule = rule // the same in other words: the next comparison is one of pointers
		return nil
	}
	k := Key{Hash: r.words[0], Key: string(r.key)}
	ref, err := sh.place(k, rule)
	if err != nil {
		return err
	}
	r, fresh := sh.record(old), sh.record(ref) // anew, for place may have moved the specs
	if err := r.spec.rule.Limits.Convert(sh.arena, r.state, now, rule.Limits, fresh.state); err != nil {
		sh.discard(ref)
		return errNoRoom
	}
	sh.discard(old)
	part.index[slot] = entry(uint32(k.Hash>>32), ref)
	return nil
}

// intern returns the number of the rule's spec, counting one more record under it.
func (sh *shard) intern(rule *Rule) (uint32, bool) {
	// So many variants of one scope are searched for an equal one; beyond that an equal one may be kept twice, so that
	// callers who send a new limit each time cannot make every insertion slow.
	const variants = 64
	numbers := sh.specOf[rule.Scope]
	for _, n := range numbers[:min(variants, len(numbers))] {
		if sp := &sh.specs[n]; sp.rule == rule || slices.Equal(sp.rule.Limits, rule.Limits) {
			sp.refs++
			return n, true
		}
	}
	if !sh.store.budget.Take(specBytes) {
		return 0, false
	}
	fresh := spec{rule: rule, words: rule.Limits.Words(), refs: 1, place: len(numbers)}
	var n uint32
	if last := len(sh.free) - 1; last >= 0 {
		n = sh.free[last]
		sh.free = sh.free[:last]
		sh.specs[n] = fresh
	} else {
		n = uint32(len(sh.specs))
		sh.specs = append(sh.specs, fresh)
	}
	sh.specOf[rule.Scope] = append(numbers, n)
	return n, true
}

// unref takes one record off a spec and frees the spec with the last one.
func (sh *shard) unref(n uint32) {
	sp := &sh.specs[n]
	if sp.refs--; sp.refs > 0 {
		return
	}
	scope := sp.rule.Scope
	numbers := sh.specOf[scope]
	last := numbers[len(numbers)-1]
	numbers[sp.place] = last
	sh.specs[last].place = sp.place
	if numbers = numbers[:len(numbers)-1]; len(numbers) > 0 {
		sh.specOf[scope] = numbers
	} else {
		delete(sh.specOf, scope)
	}
	*sp = spec{}
	sh.free = append(sh.free, n)
	sh.store.budget.Give(specBytes)
}

// decide is Store.Decide under the lock.
func (sh *shard) decide(part *partition, k Key, rule *Rule, now algo.Instant, call Call, each []algo.Decision) (algo.Decision, error) {
	if call.RequestID != 0 && call.Cost > 0 {
		if m, ok := part.memos.get(memoKey{k.Hash, call.RequestID}, now.Mono); ok {
			return sh.again(part, k, rule, now, call, m, each)
		}
	}
	slot, found := sh.find(part, k.Hash, rule.Scope, k.Key)
	if !found {
		if call.Cost == 0 {
			return sh.peekNew(rule, now, call, each)
		}
		var err error
		if slot, err = sh.insert(part, k, rule, now); err != nil {
			return algo.Decision{}, err
		}
	} else if err := sh.adopt(part, slot, rule, now); err != nil {
		return algo.Decision{}, err
	}
	r := sh.record(part.ref(slot))
	d, err := rule.Limits.Decide(sh.arena, r.state, now, call.Request, each)
	if !found && (err != nil || d.Granted == 0) && rule.Limits.Idle(sh.arena, r.state, now) {
		sh.drop(part, slot)
	}
	if err != nil {
		return algo.Decision{}, errNoRoom
	}
	if call.RequestID != 0 && d.Granted > 0 {
		m := memo{cost: call.Cost, granted: d.Granted, delay: d.Delay, lease: d.Lease, until: now.Mono + int64(keepFor(rule.Limits))}
		part.memos.put(memoKey{k.Hash, call.RequestID}, m, sh.store.cfg.MaxRequestIDs, &sh.store.budget)
	}
	return d, nil
}

// again answers a repeated request id: the admission that was made, beside the state as it is now.
func (sh *shard) again(part *partition, k Key, rule *Rule, now algo.Instant, call Call, m memo, each []algo.Decision) (algo.Decision, error) {
	if m.cost != call.Cost {
		return algo.Decision{}, ErrRequestID
	}
	peek := Call{Request: algo.Request{TTL: call.TTL}}
	d, err := sh.decide(part, k, rule, now, peek, each)
	if err != nil {
		return algo.Decision{}, err
	}
	d.Allowed, d.Granted, d.RetryAfter, d.Delay, d.Lease = true, m.granted, 0, m.delay, m.lease
	return d, nil
}

// peekNew answers a peek at a key without a state.
func (sh *shard) peekNew(rule *Rule, now algo.Instant, call Call, each []algo.Decision) (algo.Decision, error) {
	if sh.scratch == nil {
		sh.scratch = make(algo.State, algo.MaxBlock)
	}
	state := sh.scratch[:rule.Limits.Words()]
	rule.Limits.Init(state, now)
	return rule.Limits.Decide(sh.arena, state, now, call.Request, each)
}

// reserve makes sure that one more entry fits, at a load of at most 7/8.
func (p *partition) reserve(b *budget) bool {
	if (p.count+1)*8 <= len(p.index)*7 {
		return true
	}
	size := max(4, len(p.index)*2)
	if !b.Take((size - len(p.index)) * 8) {
		return false
	}
	p.rebuild(size)
	return true
}

// shrink makes a table smaller that has become sparse. It moves entries, so nobody may be walking the table.
func (p *partition) shrink(b *budget) {
	size := len(p.index)
	for size > 8 && p.count*8 < size {
		size /= 2
	}
	if size < len(p.index) {
		b.Give((len(p.index) - size) * 8)
		p.rebuild(size)
	}
}

func (p *partition) rebuild(size int) {
	old := p.index
	p.index = make([]uint64, size)
	for _, e := range old {
		if e != 0 {
			p.seat(e)
		}
	}
}

func (p *partition) seat(e uint64) uint32 {
	mask := uint32(len(p.index) - 1)
	slot := uint32(e>>32) & mask
	for p.index[slot] != 0 {
		slot = (slot + 1) & mask
	}
	p.index[slot] = e
	return slot
}

// put enters a record; reserve has made room for it.
func (p *partition) put(tag uint32, ref algo.Ref) uint32 {
	p.count++
	return p.seat(entry(tag, ref))
}

// remove empties a slot and moves back what had been pushed past it, so that no tombstones are needed.
func (p *partition) remove(slot uint32, b *budget) {
	mask := uint32(len(p.index) - 1)
	hole := slot
	for next := (hole + 1) & mask; p.index[next] != 0; next = (next + 1) & mask {
		home := uint32(p.index[next]>>32) & mask
		// The entry may move into the hole unless its home lies after the hole, seen from the entry backwards.
		if (next-home)&mask >= (next-hole)&mask {
			p.index[hole] = p.index[next]
			hole = next
		}
	}
	p.index[hole] = 0
	p.count--
	if p.count == 0 {
		b.Give(len(p.index) * 8)
		p.index = nil
	}
}

package store

import (
	"errors"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
)

// errNoRoom asks the Store to make room and try again, which a shard cannot do under its own lock. It is errShare where
// the share has no room.
var (
	errNoRoom = errors.New("store: no room")
	errShare  = errors.New("store: no room in the share")
)

// A record in the arena is
//
//	word 0   hash of scope and key
//	word 1   spec number << 32 | flags << 16 | length of the key in bytes
//	word 2…  the state, as many words as the spec's limits take
//	then     one word, where the spec's rule has a Ban: the Mono instant at which the key's ban ends, if it has
//	         bannedFlag
//	then     the key's bytes, padded to whole words
const headWords = 2

// maxKey is the longest key in bytes.
const maxKey = 1<<16 - 1

// The flags of a record.
const (
	// Its change is pending for the first follower; shifted by one, for the second; by two, for the third.
	pendingFlag = 1 << 16
	wholeFlag   = 1 << 19 // and its state must be told as a whole, in the same way
	owedFlag    = 1 << 22 // the content's extras knows what is owed on it
	lentFlag    = 1 << 23 // units of it are on loan: the content's extras knows which
	bannedFlag  = 1 << 24 // its key is banned, or was when it was looked at last
	flagMask    = 0xffff << 16
)

// specBytes is what a spec is taken to cost when bytes are counted.
const specBytes = 256

// spec is a rule that at least one record of the shard is kept under.
type spec struct {
	rule  *Rule // nil: free
	words int   // of a state
	bans  int   // words for a ban: 1 or none
	refs  int
	place int // in the shard's list of the key's specs
	// What its records are counted to. They stay while there is a record.
	share, caller *account
}

// specKey is what specs are found by.
type specKey struct{ scope, caller string }

// shard is a part of the store under one lock.
type shard struct {
	mu sync.Mutex
	// What a decision reads fills the rest of the lock's cache line.
	arena      *algo.Arena
	partitions []partition
	specs      []spec

	store  *Store
	budget shardBudget
	specOf map[specKey][]uint32
	free   []uint32 // unused specs

	buffer []byte // of Drain: one state
	chunk  []byte // of Drain: what it has written

	_ [16]byte // to whole cache lines, so that neighbours' callers do not wait for each other
}

// shardBudget is the store's budget as one shard uses it.
type shardBudget struct {
	*budget
	sh *shard
	// taker says what for the arena asks: 1 more than the number of the spec whose state grows, forced, or 0 for
	// anything else.
	taker uint32
}

// forced is the taker of memory that is counted and never refused: a change must not be lost for want of it.
const forced = math.MaxUint32

// Take implements algo.Budget.
func (b *shardBudget) Take(bytes int) bool {
	switch {
	case b.taker == forced:
		b.count(bytes)
		return true
	case b.taker != 0 && !b.sh.mayGrow(b.taker-1, bytes):
		return false
	}
	return b.budget.Take(bytes)
}

// count counts bytes whatever the bound.
func (b *shardBudget) count(bytes int) { b.used.Add(int64(bytes)) }

// forced calls f with memory that is counted and never refused.
func (sh *shard) forced(f func()) {
	sh.budget.taker = forced
	f()
	sh.budget.taker = 0
}

// forcedOn changes a record's state by f in that way.
func (sh *shard) forcedOn(r record, f func()) {
	sh.forced(func() { sh.counted(r, f) })
}

// partition is what a shard keeps of one partition. There are thousands of them, most of which have little besides
// their records: so the rest is behind pointers that are nil while there is nothing to say.
type partition struct {
	content
	role    *role
	pending [slots]atomic.Int32 // what Pending returns; changed under the shard's lock, by setPending
	open    bool
	// followed says that another process follows. Plain decisions look at nothing but these flags of all this.
	followed bool
	saved    bool // the disk follows
	wide     bool // some follower is told of everything, also of what is kept under a durability of None
}

// content is what is known of a partition: the holder's own, or a copy.
type content struct {
	table
	extras *extras // nil: nothing is in it
}

// extras is what a content has besides records.
type extras struct {
	// What every change reads comes first, in one cache line.

	// version counts the changes made while there is a follower. A copy's says how far it has come by its holder's
	// count, and counts what the disk is to be told until the next chunk.
	version uint64
	// owed is what the holder that a copy comes from may have admitted beyond it (escrow). Their records are
	// marked owedFlag. A holder has some left for strict rules until TakeOverStrict.
	owed         map[stateID]owing
	answers      answers
	reservations reservations
	cold         coldness
	coldStrict   coldness
	// lent are the loans of states whose records are marked lentFlag.
	lent map[stateID]*lent
	_    [8]byte // to whole cache lines
}

// role is what a partition has as a holder or follower, besides its content.
type role struct {
	// What every change reads comes first.
	followers [slots]*follower
	// The word of Store.changed that has the partition's bit. It is there once there has been a follower.
	changed   *atomic.Uint64
	bit       uint64
	tell      func() // Config.Changed
	granted   int64  // boot-clock instant until which strict rules are decided
	unguarded bool
	awaited   atomic.Bool // what Awaited returns; changed under the shard's lock
	advances  advances    // told to the backup
	staging   content
	floor     uint64 // no version below it may be given out again
}

// ensureExtras returns the extras, made if need be.
func (c *content) ensureExtras() *extras {
	if c.extras == nil {
		c.extras = &extras{}
	}
	return c.extras
}

func (p *partition) ensureRole() *role {
	if p.role == nil {
		p.role = &role{}
	}
	return p.role
}

// updateFollowed brings followed, saved and wide up to date.
func (p *partition) updateFollowed() {
	p.followed, p.saved, p.wide = false, false, false
	if p.role != nil {
		p.saved = p.role.followers[ownership.Disk] != nil
		for _, f := range p.role.followers[:ownership.Disk] {
			p.followed = p.followed || f != nil
			p.wide = p.wide || f != nil && f.all
		}
	}
}

// record is a view of one record.
type record struct {
	words []uint64 // with head, key and padding
	spec  *spec
	state algo.State
	key   []byte
}

func (r record) hash() uint64 { return r.words[0] }

// number is that of the record's spec.
func (r record) number() uint32 { return uint32(r.words[1] >> 32) }

// id is a copy of what the record's state is.
func (r record) id() stateID { return stateID{r.spec.rule.Scope, string(r.key)} }

// is reports whether the record is of the state.
func (r record) is(of stateID) bool { return string(r.key) == of.key && r.spec.rule.Scope == of.scope }

func (r record) has(flag uint64) bool { return r.words[1]&flag != 0 }
func (r record) set(flag uint64)      { r.words[1] |= flag }
func (r record) clear(flag uint64)    { r.words[1] &^= flag }

func keyWords(n int) int { return (n + 7) / 8 }

// bytesOf views words as bytes, in memory order: a key is only ever compared with and copied from other such views.
func bytesOf(words []uint64, n int) []byte {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), n)
}

func (sh *shard) record(ref algo.Ref) record {
	words := sh.arena.Tail(ref)
	sp := &sh.specs[words[1]>>32]
	n := int(uint16(words[1]))
	stateEnd := headWords + sp.words
	keyAt := stateEnd + sp.bans
	end := keyAt + keyWords(n)
	words = words[:end:end]
	return record{words: words, spec: sp, state: algo.State(words[headWords:stateEnd]), key: bytesOf(words[keyAt:], n)}
}

// find returns the slot of a key's record.
func (sh *shard) find(t *table, hash uint64, scope, key string) (uint32, bool) {
	if t.count == 0 {
		return 0, false
	}
	mask := uint32(len(t.index) - 1)
	tag := uint32(hash >> 32)
	for slot := tag & mask; t.index[slot] != 0; slot = (slot + 1) & mask {
		if uint32(t.index[slot]>>32) != tag {
			continue
		}
		r := sh.record(t.ref(slot))
		if r.words[0] == hash && string(r.key) == key && r.spec.rule.Scope == scope {
			return slot, true
		}
	}
	return 0, false
}

// stateOf returns the state of a key that is kept under the very rule it is asked for by, is not banned and of which
// nothing is on loan, and nil otherwise. It is find without the record around it: what nearly every decision needs, and
// no more. number is that of its spec.
func (sh *shard) stateOf(t *table, k *Key, rule *Rule) (state algo.State, number uint32) {
	if t.count == 0 {
		return nil, 0
	}
	mask := uint32(len(t.index) - 1)
	tag := uint32(k.Hash >> 32)
	for slot := tag & mask; ; slot = (slot + 1) & mask {
		e := t.index[slot]
		if e == 0 {
			return nil, 0
		}
		if uint32(e>>32) != tag {
			continue
		}
		words := sh.arena.Tail(algo.Ref(uint32(e)))
		if words[0] != k.Hash {
			continue
		}
		sp := &sh.specs[words[1]>>32]
		end := headWords + sp.words
		if sp.rule == rule && words[1]&(lentFlag|bannedFlag) == 0 &&
			string(bytesOf(words[end+sp.bans:], int(uint16(words[1])))) == k.Key {
			return algo.State(words[headWords:end:end]), uint32(words[1] >> 32)
		}
	}
}

// ofHash appends the slots of all records of a hash to slots: nearly always one at most.
func (sh *shard) ofHash(t *table, hash uint64, slots []uint32) []uint32 {
	if t.count == 0 {
		return slots
	}
	mask := uint32(len(t.index) - 1)
	tag := uint32(hash >> 32)
	for slot := tag & mask; t.index[slot] != 0; slot = (slot + 1) & mask {
		if uint32(t.index[slot]>>32) == tag && sh.arena.Block(t.ref(slot), headWords)[0] == hash {
			slots = append(slots, slot)
		}
	}
	return slots
}

// dropWhole drops the record at a slot of a copy with its loans, its reservations and what is owed on it.
func (sh *shard) dropWhole(c *content, slot uint32) {
	of := sh.record(c.ref(slot)).id()
	delete(c.extras.owed, of)
	c.extras.reservations.forget(of, &sh.budget)
	c.dropLent(of, &sh.budget)
	sh.drop(&c.table, slot)
}

// insert makes a fresh record, counted to the caller, and returns its slot. own says that it is a new key's and not a
// copy, so that the bounds of shares apply.
func (sh *shard) insert(t *table, k Key, rule *Rule, now algo.Instant, caller string, own bool) (uint32, error) {
	s := sh.store
	maxKeys, maxBytes := s.bounds(own)
	n := s.keys.Add(1)
	full := maxKeys > 0 && n > maxKeys || own && maxBytes > 0 && s.budget.used.Load() >= maxBytes
	if full && sh.budget.taker != forced || !t.reserve(&sh.budget) {
		s.keys.Add(-1)
		return 0, errNoRoom
	}
	ref, err := sh.place(k, rule, caller, own)
	if err != nil {
		s.keys.Add(-1)
		return 0, err
	}
	r := sh.record(ref)
	rule.Limits.Init(r.state, now)
	r.spec.count(1, 0)
	return t.put(uint32(k.Hash>>32), ref), nil
}

// place allocates a record with its head and key, see insert.
func (sh *shard) place(k Key, rule *Rule, caller string, own bool) (algo.Ref, error) {
	number, ok := sh.intern(rule, caller)
	if !ok {
		return 0, errNoRoom
	}
	sp := &sh.specs[number]
	if own && !sh.mayEnter(sp, rule) {
		sh.unref(number)
		return 0, errShare
	}
	keyAt := headWords + sp.words + sp.bans
	total := keyAt + keyWords(len(k.Key))
	used := sh.arena.InUse()
	ref, ok := sh.arena.Alloc(total)
	if !ok {
		sh.unref(number)
		return 0, errNoRoom
	}
	sp.count(0, sh.arena.InUse()-used)
	words := sh.arena.Block(ref, total)
	words[0] = k.Hash
	words[1] = uint64(number)<<32 | uint64(len(k.Key))
	copy(bytesOf(words[keyAt:], len(k.Key)), k.Key)
	return ref, nil
}

// drop removes the record at slot with all that its state holds.
func (sh *shard) drop(t *table, slot uint32) {
	ref := t.ref(slot)
	r := sh.record(ref)
	used := sh.arena.InUse()
	r.spec.rule.Limits.Free(sh.arena, r.state)
	r.spec.count(-1, sh.arena.InUse()-used)
	sh.discard(ref)
	t.remove(slot, &sh.budget)
	sh.store.keys.Add(-1)
}

// discard frees a record's own block.
func (sh *shard) discard(ref algo.Ref) {
	r := sh.record(ref)
	number := r.number()
	used := sh.arena.InUse()
	sh.arena.Free(ref, len(r.words))
	r.spec.count(0, sh.arena.InUse()-used)
	sh.unref(number)
}

// adopt brings the record at a slot of c under the given rule when it is under another one, and reports whether that
// changed anything about it. The table keeps its shape. Reservations lose where their units are if the limits are
// others.
func (sh *shard) adopt(c *content, slot uint32, rule *Rule, now algo.Instant) (changed bool, err error) {
	old := c.ref(slot)
	r := sh.record(old)
	if r.spec.rule == rule {
		return false, nil
	}
	if same(r.spec.rule, rule) {
		r.spec.rule = rule // the same in other words: the next comparison is one of pointers
		return false, nil
	}
	k := Key{Hash: r.hash(), Key: string(r.key)}
	ref, err := sh.place(k, rule, r.spec.caller.label, false)
	if err != nil {
		return false, err
	}
	r, fresh := sh.record(old), sh.record(ref) // anew, for place may have moved the specs
	before := r.spec.rule
	sh.counted(r, func() { err = before.Limits.Convert(sh.arena, r.state, now, rule.Limits, fresh.state) })
	if err != nil {
		sh.discard(ref)
		return false, errNoRoom
	}
	if !sameLimits(before.Limits, rule.Limits) {
		c.lose(r)
	}
	fresh.set(r.words[1] & flagMask)
	switch {
	case rule.Ban == 0:
		fresh.lift()
	case r.has(bannedFlag):
		fresh.ban(r.banEnd())
		fresh.changeBan(before.Ban, now)
	}
	sh.discard(old)
	c.index[slot] = entry(uint32(k.Hash>>32), ref)
	return true, nil
}

// same reports whether two rules of one scope are the same in all that a record's spec stands for.
func same(a, b *Rule) bool {
	return a.Durability == b.Durability && a.Strict == b.Strict && a.Persist == b.Persist && a.Ban == b.Ban &&
		sameLimits(a.Limits, b.Limits)
}

// sameLimits compares limits with their time zones by name: what has come from another process has zones of its own.
func sameLimits(a, b algo.Limits) bool {
	return slices.EqualFunc(a, b, func(l, m algo.Limit) bool {
		if l.Zone != nil && m.Zone != nil && l.Zone.String() == m.Zone.String() {
			l.Zone = m.Zone
		}
		return l == m
	})
}

// variants is how many rules of one scope are searched for an equal one; beyond that an equal one may be kept twice, so
// that callers that send a new limit each time cannot make every insertion slow.
const variants = 64

// intern returns the number of the spec of a rule and a caller, counting one more record under it.
func (sh *shard) intern(rule *Rule, caller string) (uint32, bool) {
	if n, ok := sh.specUnder(specKey{rule.Scope, caller}, rule); ok {
		sh.specs[n].refs++
		return n, true
	}
	share, of := sh.store.shares.take(rule.Scope, caller)
	key := specKey{rule.Scope, of.label}
	if of.label != caller {
		// The caller is one of those beyond maxAccounts.
		if n, ok := sh.specUnder(key, rule); ok {
			sh.store.shares.give(share, of)
			sh.specs[n].refs++
			return n, true
		}
	}
	if !sh.budget.Take(specBytes) {
		sh.store.shares.give(share, of)
		return 0, false
	}
	numbers := sh.specOf[key]
	fresh := spec{rule: rule, words: rule.Limits.Words(), bans: banWords(rule.Ban), refs: 1, place: len(numbers),
		share: share, caller: of}
	var n uint32
	if last := len(sh.free) - 1; last >= 0 {
		n = sh.free[last]
		sh.free = sh.free[:last]
		sh.specs[n] = fresh
	} else {
		n = uint32(len(sh.specs))
		sh.specs = append(sh.specs, fresh)
	}
	sh.specOf[key] = append(numbers, n)
	return n, true
}

// specUnder finds the spec of a rule.
func (sh *shard) specUnder(key specKey, rule *Rule) (uint32, bool) {
	numbers := sh.specOf[key]
	for _, n := range numbers[:min(variants, len(numbers))] {
		if sp := &sh.specs[n]; sp.rule == rule || same(sp.rule, rule) {
			return n, true
		}
	}
	return 0, false
}

// unref takes one record off a spec and frees the spec with the last one.
func (sh *shard) unref(n uint32) {
	sp := &sh.specs[n]
	if sp.refs--; sp.refs > 0 {
		return
	}
	key := specKey{sp.rule.Scope, sp.caller.label}
	numbers := sh.specOf[key]
	last := numbers[len(numbers)-1]
	numbers[sp.place] = last
	sh.specs[last].place = sp.place
	if numbers = numbers[:len(numbers)-1]; len(numbers) > 0 {
		sh.specOf[key] = numbers
	} else {
		delete(sh.specOf, key)
	}
	sh.store.shares.give(sp.share, sp.caller)
	*sp = spec{}
	sh.free = append(sh.free, n)
	sh.store.budget.Give(specBytes)
}

package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/varint"
)

// This file writes what is pending for a follower as chunks. apply.go reads them, and follower.go tracks what is
// pending. The path of one chunk:
//
//	Drain    calls run under the shard's lock, and returns the chunk and its version
//	run      calls changes, and adds itemVersion
//	changes  takes what is pending, in the order that the copy needs, until the chunk is full
//	key      writes the pending records of one hash
//
// A chunk begins with chunkVersion, a byte. Items follow; each begins with a byte for its kind. Numbers are unsigned
// varints unless the kinds say otherwise. A hash and a lease take eight bytes. A string follows its length. An instant
// is written as its age, or as the time that is left, in nanoseconds; the reader adds it to its own present. So things
// expire late at the copy, by the time for which the chunk was under way, and never early.

// chunkVersion is the version of the format.
const chunkVersion = 10

// The kinds of items, and what follows.
const (
	// itemVersion: a version; a copy with this chunk and all earlier ones has everything up to it.
	itemVersion = 1
	// itemCold: for Cold and then for ColdStrict, whether it was called, and if so the age of its instant and its wall
	// time (signed). The copy does to its records what a ColdStrict that it does not know has done to the holder's.
	itemCold = 2
	// itemReset: hash, scope, key. The copy must drop all that it has of the state.
	itemReset = 3
	// itemRequestID: scope, key, id, kind (a byte), cost, granted, delay, excess, over, strict, persist, lease,
	// reservation (16 bytes), time left, caller. The fields of answered (answers.go).
	itemRequestID = 4
	// itemRule: scope, the caller to whose account the records are counted, limits, durability (a byte), strict,
	// persist, ban. Later items name the rule by its index; the first rule of the chunk has index 0.
	itemRule = 5
	// itemKey: index of the rule, hash, key; units that are owed (escrow.go); state; number of its reservations, and id
	// (16 bytes), units, time left, once, release and caller of each, the fields of reservation; if there are any, their
	// holds (algo.Limits.AppendHolds); loans (algo.Loans.Append); the time that is left of its ban, 0 for none.
	itemKey = 6
	// itemGone: hash, number of records that the holder has under it, and scope and key of each. The copy must drop all
	// other records of the hash.
	itemGone = 7
)

// ErrChunk means that bytes are not a chunk.
var ErrChunk = errors.New("store: malformed chunk")

func appendUint(dst []byte, n uint64) []byte { return binary.AppendUvarint(dst, n) }
func appendWord(dst []byte, n uint64) []byte { return binary.LittleEndian.AppendUint64(dst, n) }

func appendBool(dst []byte, b bool) []byte {
	if b {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// Drain takes what is pending for a follower as a chunk of about most bytes, or more if one key alone needs more. The
// chunk is nil if nothing is pending. Once the follower has this chunk and all before it, Confirm must be called with
// version. more reports whether something is still pending.
func (s *Store) Drain(p int, slot ownership.Slot, now algo.Instant,
	most int) (chunk []byte, version uint64, more bool) {
	s.with(p, func(sh *shard, part *partition) {
		f := part.follower(slot)
		if f == nil {
			return
		}
		if slot == ownership.Backup {
			sh.giveBack(part, now)
		}
		d := drain{sh: sh, part: part, f: f, slot: slot, now: now, most: most, out: sh.chunk[:0]}
		d.run()
		switch {
		case cap(d.out) > chunkRoom:
			chunk = d.out
		case len(d.out) > 0:
			chunk, sh.chunk = bytes.Clone(d.out), d.out
		}
		version, more = f.contained, f.left(part.extras) > 0
		part.recount()
	})
	return chunk, version, more
}

// chunkRoom is how many bytes of memory a shard keeps for writing chunks. A larger chunk has its own memory.
const chunkRoom = 16 << 10

// drain is the state of one call of Drain.
type drain struct {
	sh    *shard
	part  *partition
	f     *follower
	slot  ownership.Slot
	now   algo.Instant
	most  int
	out   []byte
	specs []uint32 // of the chunk's rules
	slots [4]uint32
}

// full begins the chunk, if it has not begun, and reports whether it is long enough.
func (d *drain) full() bool {
	if len(d.out) == 0 {
		if guess := min(max(d.most, 64)+1024, 96*d.f.keys.Len()); guess > chunkRoom {
			d.out = make([]byte, 0, guess)
		}
		d.out = append(d.out, chunkVersion)
	}
	return len(d.out) > 1 && len(d.out) >= d.most
}

func (d *drain) run() {
	d.changes()
	if len(d.out) > 0 {
		d.out = append(d.out, itemVersion)
		d.out = appendUint(d.out, d.f.contained)
	}
}

// changes writes what is pending, in the order that the copy needs: losses, resets, the ids of requests that gave units
// back, records, and the ids of all other requests.
func (d *drain) changes() {
	f, a, b := d.f, d.part.extras, &d.sh.budget
	if f.cold {
		d.full()
		d.cold()
		f.cold = false
	}
	for f.resets.Len() > 0 {
		if d.full() {
			return
		}
		e := f.popReset(b)
		d.out = appendWord(append(d.out, itemReset), e.hash)
		d.identity(e.of)
	}
	// A copy that has the id of a charge has the charge, and a copy that has a refund has its id. So if the holder is
	// lost between two chunks, a repeated charge may be charged again, but is never answered without having been
	// charged, and a repeated refund gives back once.
	if !d.requestIDs(&f.refunds, a.answers.end, true) {
		return
	}
	// Twice: first the pass in progress, then what has become pending since the pass began.
	for range 2 {
		for ; f.pass.keys > 0; f.pass.keys-- {
			if d.full() {
				return
			}
			d.key(f.pop(b))
		}
		if !d.requestIDs(&f.answers, f.pass.answers, false) {
			return
		}
		f.contained = f.pass.version
		f.startPass(a)
	}
}

func (d *drain) age(instant int64) uint64 { return uint64(max(d.now.Mono-instant, 0)) }

func (d *drain) cold() {
	a := d.part.extras
	d.out = append(d.out, itemCold)
	for _, c := range [...]coldness{a.cold, a.coldStrict} {
		d.out = appendBool(d.out, c.is)
		if c.is {
			d.out = appendUint(d.out, d.age(c.at.Mono))
			d.out = binary.AppendVarint(d.out, c.at.Wall)
		}
	}
}

// requestIDs writes the request ids from *turn on and before end, either those that gave units back or all others, and
// advances *turn. It returns false if the chunk was full before the end.
func (d *drain) requestIDs(turn *uint64, end uint64, refunds bool) bool {
	for e := range d.part.extras.answers.from(*turn) {
		if e.turn >= end || e.gaveBack() != refunds || d.f.disk && !e.persist {
			continue
		}
		if *turn = e.turn; d.full() {
			return false
		}
		d.requestID(e)
	}
	*turn = end
	return true
}

func (d *drain) requestID(m *remembered) {
	if d.part.extras.answers.by[m.key] != m || m.until <= d.now.Mono {
		return
	}
	d.out = append(d.out, itemRequestID)
	d.identity(m.key.of)
	d.out = append(varint.AppendText(d.out, m.key.id), byte(m.key.kind))
	for _, n := range [...]int64{m.cost, m.granted, int64(m.delay), m.excess} {
		d.out = appendUint(d.out, uint64(n))
	}
	d.out = appendBool(appendBool(appendBool(d.out, m.over), m.strict), m.persist)
	d.out = append(appendWord(d.out, m.lease), m.reservation[:]...)
	d.out = appendUint(d.out, uint64(m.until-d.now.Mono))
	d.out = varint.AppendText(d.out, m.of.account.label)
}

// identity writes the scope and key of a state.
func (d *drain) identity(of stateID) {
	d.out = varint.AppendText(varint.AppendText(d.out, of.scope), of.key)
}

// rule returns the index of a record's rule in the chunk. It writes the rule, unless the rule is among the last 16 that
// the chunk has.
func (d *drain) rule(r record) uint64 {
	number, old := r.number(), max(len(d.specs)-16, 0)
	if i := slices.Index(d.specs[old:], number); i >= 0 {
		return uint64(old + i)
	}
	rule := r.spec.rule
	d.sh.buffer = algo.AppendLimits(d.sh.buffer[:0], rule.Limits)
	d.out = varint.AppendText(varint.AppendText(append(d.out, itemRule), rule.Scope), r.spec.caller.label)
	d.out = append(varint.AppendText(d.out, d.sh.buffer), byte(rule.Durability))
	d.out = appendUint(appendBool(appendBool(d.out, rule.Strict), rule.Persist), uint64(rule.Ban))
	d.specs = append(d.specs, number)
	return uint64(len(d.specs) - 1)
}

// state writes what was charged to a record's state since the mark. It writes the whole state if the record has
// wholeFlag, or is not alone under its hash.
func (d *drain) state(r record, mark uint64, alone bool) {
	if r.has(wholeFlag<<d.slot) || !alone {
		mark = 0
	}
	r.clear((pendingFlag | wholeFlag) << d.slot)
	d.sh.counted(r, func() {
		d.sh.buffer = r.spec.rule.Limits.AppendSince(d.sh.buffer[:0], d.sh.arena, r.state, d.now, mark)
	})
	d.out = varint.AppendText(d.out, d.sh.buffer)
}

// key writes the pending records of a turn's hash. If none is pending, a record of the hash is gone. Then key writes
// which records there are.
func (d *drain) key(t turn) {
	slots := d.sh.ofHash(&d.part.table, t.hash, d.slots[:0])
	told := false
	for _, slot := range slots {
		r := d.sh.record(d.part.ref(slot))
		if !r.has(pendingFlag << d.slot) {
			continue
		}
		told = true
		index := d.rule(r) // which may write the rule
		d.out = appendUint(append(d.out, itemKey), index)
		d.out = varint.AppendText(appendWord(d.out, r.hash()), r.key)
		var owed int64
		if r.has(owedFlag) {
			owed = d.part.extras.owed[stateID{r.spec.rule.Scope, string(r.key)}].units
		}
		if d.slot == ownership.Backup {
			owed += d.part.allow(r, d.now)
		}
		d.out = appendUint(d.out, uint64(owed))
		// Records of one hash share turns, so the mark may be that of another record.
		d.state(r, t.mark, len(slots) == 1)
		d.reservations(r)
		d.loans(r)
		d.out = appendUint(d.out, uint64(r.banLeft(d.now)))
	}
	if told {
		return
	}
	d.out = append(d.out, itemGone)
	d.out = appendWord(d.out, t.hash)
	slots = slices.DeleteFunc(slots, func(slot uint32) bool {
		return !d.f.knows(d.sh.record(d.part.ref(slot)).spec.rule)
	})
	d.out = appendUint(d.out, uint64(len(slots)))
	for _, slot := range slots {
		r := d.sh.record(d.part.ref(slot))
		d.out = varint.AppendText(varint.AppendText(d.out, r.spec.rule.Scope), r.key)
	}
}

// reservations writes a record's reservations.
func (d *drain) reservations(r record) {
	p := d.part.reserved(r)
	if p == nil {
		d.out = append(d.out, 0)
		return
	}
	d.out = appendUint(d.out, uint64(len(p.list)))
	for i := range p.list {
		e := &p.list[i]
		d.out = append(d.out, e.id[:]...)
		d.out = appendUint(d.out, uint64(e.units))
		d.out = appendUint(d.out, uint64(max(e.until-d.now.Mono, 0)))
		d.out = varint.AppendText(appendBool(appendBool(d.out, e.once), e.release), e.caller.label)
	}
	d.sh.buffer = r.spec.rule.Limits.AppendHolds(d.sh.buffer[:0], d.sh.arena, r.state, d.now, p.holds)
	d.out = varint.AppendText(d.out, d.sh.buffer)
}

// loans writes a record's loans.
func (d *drain) loans(r record) {
	d.sh.buffer = d.sh.buffer[:0]
	if l := d.part.loansOf(r); l != nil {
		d.sh.buffer = l.Append(d.sh.buffer, d.now)
	}
	d.out = varint.AppendText(d.out, d.sh.buffer)
}

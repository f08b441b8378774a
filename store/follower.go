package store

import (
	"math/bits"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
)

// This file tracks what the followers of a partition have not been sent yet. The path of one change:
//
//	note     counts the change of a record as a version of the partition, and makes it pending for each follower that
//	         must be told of it. Other note functions do so for answers, resets and losses
//	Changed  returns the partitions that have pending changes
//	Drain    takes pending changes as a chunk (chunk.go)
//	Confirm  notes up to which version the follower has everything. Answers wait for that (wait in gate.go)
//
// Attach adds a follower for which everything is pending; AttachCurrent adds a follower that has everything already.
//
// Words:
//
//	slot     which follower of the partition: ownership.Backup, Target (the receiver of a move) or Disk
//	pending  not taken by Drain yet
//	turn     the place of a pending record in the queue keys
//	mark     the position of a state's log before its first pending change; see decide.go
//	whole    of a record: the follower must be sent all of its state (wholeFlag)
//	pass     what was pending at one instant; Drain sends one pass after another
//	current  of a follower: it has had everything once (Caught), so answers may wait for its confirmation

// slots is how many followers a partition can have.
const slots = int(ownership.Disk) + 1

// follower has what is pending for one follower, and what it has confirmed.
//
// A pending record has pendingFlag, and a turn in the queue keys. The turn names the record by its hash, because
// records move in their table. A turn is stale if its record was dropped and made anew. Its mark then does no harm: a
// new record has wholeFlag, so Drain ignores the mark.
//
// Most changes touch the first cache line only.
type follower struct {
	all     bool // it is also told of records under a durability of None
	disk    bool // it is the disk, which is told of records under a rule with Persist only
	current bool
	cold    bool // the partition's losses (Store.Cold) are pending
	keys    fifo.Queue[turn]
	// pass is what was pending at one instant. When Drain has taken all of it, the follower has been sent everything up
	// to the version of that instant, which contained is then.
	pass struct {
		version uint64
		answers uint64 // the turn of the first answer after the pass
		keys    int    // turns of the pass that are left
	}
	contained uint64 // the follower has been sent everything up to this version
	confirmed uint64 // the follower has everything up to this version
	answers   uint64 // all answers with a turn before this one were sent, except refunds
	refunds   uint64 // all refunds with a turn before this one were sent
	resets    fifo.Queue[reset]
}

// reset says that a state was reset.
type reset struct {
	of   stateID
	hash uint64
}

const resetBytes = 64

// turn is the place of a pending record in the queue of keys.
type turn struct{ hash, mark uint64 }

const (
	turnBytes = 16
	keepTurns = 256 // for how many turns an empty queue keeps memory
)

// push adds a turn. The memory of both queues is counted, and is never refused.
func (f *follower) push(t turn, b *shardBudget) {
	before := f.keys.Cap()
	f.keys.Push(t)
	b.count((f.keys.Cap() - before) * turnBytes)
}

func (f *follower) pop(b *shardBudget) turn {
	before, t := f.keys.Cap(), f.keys.Pop()
	if f.keys.Len() == 0 && f.keys.Cap() > keepTurns {
		f.keys = fifo.Queue[turn]{}
	}
	b.Give((before - f.keys.Cap()) * turnBytes)
	return t
}

func (f *follower) popReset(b *shardBudget) reset {
	e := f.resets.Pop()
	b.Give(resetBytes + e.of.size())
	return e
}

// knows reports whether the follower is told of records under the rule.
func (f *follower) knows(rule *Rule) bool {
	if f.disk {
		return rule.Persist
	}
	return rule.Durability != None || f.all
}

// startPass starts a pass with everything that is pending.
func (f *follower) startPass(a *extras) {
	f.pass.version, f.pass.answers, f.pass.keys = a.version, a.answers.end, f.keys.Len()
}

// tells reports whether a follower may have to be told of changes under the rule. It reads no follower, because under a
// durability of None that would take most of a decision's time.
func (p *partition) tells(rule *Rule) bool {
	return p.followed && (rule.Durability != None || p.wide) || p.saved && rule.Persist
}

// left returns the number of pending items.
func (f *follower) left(a *extras) int {
	n := f.keys.Len() + f.resets.Len()
	if a.answers.pending(min(f.answers, f.refunds)) {
		n++
	}
	if f.cold {
		n++
	}
	return n
}

// recount publishes the number of pending items of each follower.
func (p *partition) recount() {
	if p.role == nil {
		return
	}
	for i, f := range p.role.followers {
		if f != nil {
			p.setPending(ownership.Slot(i), int32(f.left(p.extras)))
		}
	}
}

// markOf returns the mark of a record's state. It is read before a change, and given to note after the change.
func (p *partition) markOf(r record) uint64 {
	if !p.tells(r.spec.rule) {
		return 0
	}
	return r.spec.rule.Limits.Mark(r.state)
}

// note makes a record's change pending for each follower that knows the record. mark is the result of markOf from
// before the change, or 0 if the whole state must be sent. If the record is pending already, note does not use mark.
func (sh *shard) note(part *partition, r record, mark uint64) {
	if !part.followed && !part.saved {
		return
	}
	part.extras.bump()
	if !part.tells(r.spec.rule) {
		return
	}
	for i, f := range part.role.followers {
		if r.has(pendingFlag << i) {
			continue // its turn keeps the mark from before its first change
		}
		if f == nil || !f.knows(r.spec.rule) {
			continue
		}
		r.set(pendingFlag << i)
		if mark == 0 {
			r.set(wholeFlag << i)
		}
		f.push(turn{r.hash(), mark}, &sh.budget)
		part.setPending(ownership.Slot(i), part.pending[i].Load()+1)
	}
}

// untell makes it pending that followers are to forget a record that they were told of under its old rule, and are not
// told of under the present one.
func (sh *shard) untell(part *partition, r record, old *Rule) {
	if !part.tells(old) {
		return
	}
	for slot, f := range part.role.followers {
		if f != nil && f.knows(old) && !f.knows(r.spec.rule) {
			sh.noteGone(part, r, ownership.Slot(slot))
		}
	}
}

// noteGone makes it pending that one follower is to forget a record.
func (sh *shard) noteGone(part *partition, r record, slot ownership.Slot) {
	r.clear((pendingFlag | wholeFlag) << slot)
	part.extras.bump()
	part.follower(slot).push(turn{hash: r.hash()}, &sh.budget)
	part.recount()
}

func (a *extras) bump() {
	if a != nil {
		a.version++
	}
}

// noteReset makes a reset pending.
func (p *partition) noteReset(e reset, b *shardBudget) {
	p.eachFollower(func(f *follower) {
		f.resets.Push(e)
		b.count(resetBytes + e.of.size())
	})
}

// noteCold makes the losses of the partition pending (Cold, ColdStrict).
func (p *partition) noteCold() {
	p.eachFollower(func(f *follower) { f.cold = true })
}

// eachFollower counts a change, and calls do for each follower; do makes the change pending.
func (p *partition) eachFollower(do func(*follower)) {
	if !p.followed && !p.saved {
		return
	}
	p.extras.bump()
	for _, f := range p.role.followers {
		if f != nil {
			do(f)
		}
	}
	p.recount()
}

// Attach adds a follower for which everything is pending, because it has nothing yet. If all is false, it is not told
// of records under a durability of None.
func (s *Store) Attach(p int, slot ownership.Slot, all bool) {
	s.with(p, func(sh *shard, part *partition) {
		f := sh.attach(part, p, slot, all)
		f.cold = true
		f.answers, f.refunds, f.pass.answers = 0, 0, 0
		sh.noteAll(part, slot, f.knows)
	})
}

// AttachCurrent adds a follower that has exactly the partition's content already.
func (s *Store) AttachCurrent(p int, slot ownership.Slot, all bool) {
	s.with(p, func(sh *shard, part *partition) {
		f := sh.attach(part, p, slot, all)
		f.confirmed = f.contained
	})
}

// attach adds a follower for which nothing is pending.
func (sh *shard) attach(part *partition, p int, slot ownership.Slot, all bool) *follower {
	sh.detach(part, slot)
	r := part.ensureRole()
	r.changed, r.bit, r.tell = &sh.store.changed[p/64], 1<<(p%64), sh.store.cfg.Changed
	part.raise()
	a := part.ensureExtras()
	a.version++
	f := &follower{all: all, disk: slot == ownership.Disk, answers: a.answers.end, refunds: a.answers.end}
	f.contained = a.version
	f.startPass(a)
	part.role.followers[slot] = f
	part.updateFollowed()
	part.recount()
	return f
}

// noteAll makes each record under a wanted rule pending as a whole for one follower.
func (sh *shard) noteAll(part *partition, slot ownership.Slot, wanted func(*Rule) bool) {
	f, t := part.role.followers[slot], &part.table
	before := f.keys.Cap()
	f.keys.Grow(t.count) // at once, so that push need not copy the queue again and again
	sh.budget.count((f.keys.Cap() - before) * turnBytes)
	sh.eachRecord(t, func(r record) {
		if !wanted(r.spec.rule) {
			return
		}
		r.set(wholeFlag << slot)
		if !r.has(pendingFlag << slot) {
			r.set(pendingFlag << slot)
			f.push(turn{hash: r.hash()}, &sh.budget)
		}
	})
	part.extras.version++
	part.recount()
}

// Widen sets all of a follower that was attached without it, and makes the records under a durability of None pending.
func (s *Store) Widen(p int, slot ownership.Slot) {
	s.with(p, func(sh *shard, part *partition) {
		if f := part.follower(slot); f != nil && !f.all {
			f.all = true
			part.updateFollowed()
			sh.noteAll(part, slot, func(rule *Rule) bool { return rule.Durability == None })
		}
	})
}

// Caught marks the follower as current: it has had everything once, so answers may wait for its confirmation (gate.go,
// saved.go).
func (s *Store) Caught(p int, slot ownership.Slot) {
	s.with(p, func(_ *shard, part *partition) {
		if f := part.follower(slot); f != nil {
			f.current = true
		}
	})
}

// Detach removes the follower.
func (s *Store) Detach(p int, slot ownership.Slot) {
	s.with(p, func(sh *shard, part *partition) { sh.detach(part, slot) })
}

func (sh *shard) detach(part *partition, slot ownership.Slot) {
	f := part.follower(slot)
	if f == nil {
		return
	}
	if slot == ownership.Backup {
		part.role.advances.free(&sh.budget)
	}
	var room [4]uint32
	for f.keys.Len() > 0 {
		for _, i := range sh.ofHash(&part.table, f.pop(&sh.budget).hash, room[:0]) {
			sh.record(part.ref(i)).clear((pendingFlag | wholeFlag) << slot)
		}
	}
	sh.budget.Give(f.keys.Cap() * turnBytes)
	for f.resets.Len() > 0 {
		f.popReset(&sh.budget)
	}
	part.role.followers[slot] = nil
	part.setPending(slot, 0)
	part.updateFollowed()
	if part.open {
		part.extras.bump() // see Open
	}
}

func (p *partition) follower(slot ownership.Slot) *follower {
	if p.role == nil {
		return nil
	}
	return p.role.followers[slot]
}

// Pending returns the number of items that are pending for a follower.
func (s *Store) Pending(p int, slot ownership.Slot) int {
	_, part := s.at(p)
	return int(part.pending[slot].Load())
}

// setPending publishes the number of items that are pending for a follower. If it was 0, setPending marks the partition
// for Changed.
func (p *partition) setPending(slot ownership.Slot, n int32) {
	if p.pending[slot].Swap(n) > 0 || n == 0 {
		return
	}
	if p.role.changed.Or(p.role.bit)&p.role.bit == 0 && p.role.tell != nil {
		p.role.tell()
	}
}

// Changed calls do with every partition for which Pending has become positive since the last call of Changed. It takes
// no lock. Calls of Changed must not overlap.
func (s *Store) Changed(do func(p int)) {
	for i := range s.changed {
		if s.changed[i].Load() == 0 {
			continue
		}
		for word := s.changed[i].Swap(0); word != 0; word &= word - 1 {
			do(i*64 + bits.TrailingZeros64(word))
		}
	}
}

// Confirm notes that the follower has everything up to a version that Drain has returned.
func (s *Store) Confirm(p int, slot ownership.Slot, version uint64) {
	s.with(p, func(_ *shard, part *partition) {
		if f := part.follower(slot); f != nil {
			f.confirmed = max(f.confirmed, version)
			if len(part.role.advances.by) == 0 {
				part.role.awaited.Store(false)
			}
		}
	})
}

// Awaited reports whether an answer or an allowance (escrow.go) waits for a confirmation. If not, Confirm need not be
// called: a later call covers it. Awaited takes no lock. It is for the goroutine that attaches followers.
func (s *Store) Awaited(p int) bool {
	_, part := s.at(p)
	return part.role != nil && part.role.awaited.Load()
}

// await notes that an answer or an allowance waits for a confirmation.
func (p *partition) await() {
	if !p.role.awaited.Load() {
		p.role.awaited.Store(true)
	}
}

// expireAll ends the answers, reservations and loans of a partition that have expired, and gives back unused
// allowances.
func (sh *shard) expireAll(part *partition, now algo.Instant) {
	if a := part.extras; a != nil {
		a.answers.expire(now.Mono, &sh.budget)
		sh.expireReservations(part, now)
		sh.expireDue(part, now)
		part.recount()
	}
	sh.giveBack(part, now)
}

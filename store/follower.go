package store

import (
	"math/bits"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
)

// The holder of a partition keeps one follower for each process with a copy of it. One mechanism brings copies up to
// date: a change makes something pending (note and the other note functions), Drain (chunk.go) takes what is pending,
// and Attach makes everything pending. Versions count changes: a follower that has confirmed a version has every change
// up to it.

// slots is how many followers a partition's holder can have.
const slots = int(ownership.Disk) + 1

// follower is what a partition's holder knows of a process that has a copy of it.
//
// A pending record has pendingFlag and a turn in the queue keys. A turn names the record by its hash, because records
// move in their table. Its mark says what the follower knows of the state. A turn is stale when its record was dropped
// and made anew. That does no harm: a new record has wholeFlag, so Drain ignores the mark.
//
// Most changes touch the first cache line alone.
type follower struct {
	all     bool // it gets what is kept under a durability of None, too
	disk    bool // it is the disk, and gets what is kept under a rule with Persist
	current bool
	cold    bool // what is lost (see Store.Cold) is to be told
	keys    fifo.Queue[turn]
	// pass is what was pending at one instant. When Drain has taken all of it, the follower has been sent everything up
	// to the version of that instant.
	pass struct {
		version uint64
		answers uint64 // the turn of the first answer that is not of it
		keys    int    // left of it
	}
	contained uint64
	confirmed uint64
	answers   uint64 // the follower knows all answers with a turn before this one, except refunds
	refunds   uint64 // the same of refunds
	events    fifo.Queue[event]
}

// event is what happened to a reservation: it was made, changed or ended. Without an id it is a reset of the state.
type event struct {
	reservationKey
	hash uint64
}

const eventBytes = 64

// turn is the place of a pending record in the queue of keys.
type turn struct{ hash, mark uint64 }

const (
	turnBytes = 16
	keepTurns = 256 // for how many an empty queue keeps room
)

// push adds a turn. The memory of both queues is counted and never refused.
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

func (f *follower) pushEvent(e event, b *shardBudget) {
	f.events.Push(e)
	b.count(eventBytes + e.of.size())
}

func (f *follower) popEvent(b *shardBudget) event {
	e := f.events.Pop()
	b.Give(eventBytes + e.of.size())
	return e
}

// knows reports whether changes of what is kept under the rule are told to the follower.
func (f *follower) knows(rule *Rule) bool {
	if f.disk {
		return rule.Persist
	}
	return rule.Durability != None || f.all
}

// startPass starts a pass with all that is pending.
func (f *follower) startPass(a *extras) {
	f.pass.version, f.pass.answers, f.pass.keys = a.version, a.answers.end, f.keys.Len()
}

// tells reports whether a follower may have to be told of changes under the rule. It reads no follower: under a
// durability of None that would be most of what a decision waits for.
func (p *partition) tells(rule *Rule) bool {
	return p.followed && (rule.Durability != None || p.wide) || p.saved && rule.Persist
}

// left is the number of pending items.
func (f *follower) left(a *extras) int {
	n := f.keys.Len() + f.events.Len()
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

// markOf returns the mark of a record's state, to be read before a change and given to note after it.
func (p *partition) markOf(r record) uint64 {
	if !p.tells(r.spec.rule) {
		return 0
	}
	return r.spec.rule.Limits.Mark(r.state)
}

// note makes a record's change pending for all followers that know the record. mark is the state's Mark from before the
// change, or 0 when the state has to be told as a whole. Where the record is pending already, mark is not used.
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
			continue // with the mark from before its first change; AppendSince sees whether that still helps
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

func (a *extras) bump() {
	if a != nil {
		a.version++
	}
}

// noteEvent makes an event pending.
func (p *partition) noteEvent(e event, b *shardBudget) {
	p.eachFollower(func(f *follower) { f.pushEvent(e, b) })
}

// noteReservation makes it pending what happened to a reservation. The disk is told of those that persist.
func (p *partition) noteReservation(k reservationKey, persist bool, b *shardBudget) {
	p.eachFollower(func(f *follower) {
		if persist || !f.disk {
			f.pushEvent(event{reservationKey: k}, b)
		}
	})
}

// noteCold makes it pending what is lost of the partition, see Cold and ColdStrict.
func (p *partition) noteCold() {
	p.eachFollower(func(f *follower) { f.cold = true })
}

// eachFollower calls do, which makes something pending, for each follower.
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

// Attach gives the partition a follower that has nothing: everything is pending for it. With all false it does not get
// what is kept under a durability of None.
func (s *Store) Attach(p int, slot ownership.Slot, all bool) {
	s.with(p, func(sh *shard, part *partition) {
		f := sh.attach(part, p, slot, all)
		f.cold = true
		f.answers, f.refunds, f.pass.answers = 0, 0, 0
		part.tellReservations(slot, false)
		sh.noteContent(part, slot, f)
	})
}

// noteContent makes all reservations and records pending as a whole for one follower.
func (sh *shard) noteContent(part *partition, slot ownership.Slot, f *follower) {
	part.extras.reservations.each(func(k reservationKey, persist bool) {
		if persist || !f.disk {
			f.pushEvent(event{reservationKey: k}, &sh.budget)
		}
	})
	sh.noteAll(part, slot, func(r record) bool { return f.knows(r.spec.rule) })
}

// AttachCurrent gives it one that has exactly this content already.
func (s *Store) AttachCurrent(p int, slot ownership.Slot, all bool) {
	s.with(p, func(sh *shard, part *partition) {
		f := sh.attach(part, p, slot, all)
		f.confirmed = f.contained
		part.tellReservations(slot, true)
	})
}

// tellReservations notes whether a follower has the states with the units of the reservations in them.
func (p *partition) tellReservations(slot ownership.Slot, told bool) {
	for _, reserved := range p.extras.reservations.by {
		for i := range reserved.list {
			reserved.list[i].told[slot] = told
		}
	}
}

// attach makes a follower for which nothing is pending.
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

// noteAll makes each record for which wanted is true pending as a whole for one follower.
func (sh *shard) noteAll(part *partition, slot ownership.Slot, wanted func(record) bool) {
	f, t := part.role.followers[slot], &part.table
	before := f.keys.Cap()
	f.keys.Grow(t.count) // once: to add turn after turn would copy it again and again
	sh.budget.count((f.keys.Cap() - before) * turnBytes)
	sh.eachRecord(t, func(r record) {
		if !wanted(r) {
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

// Widen makes pending what is kept under a durability of None, for a follower that was attached without it, and sends
// it from then on.
func (s *Store) Widen(p int, slot ownership.Slot) {
	s.with(p, func(sh *shard, part *partition) {
		if f := part.follower(slot); f != nil && !f.all {
			f.all = true
			part.updateFollowed()
			sh.noteAll(part, slot, func(r record) bool { return r.spec.rule.Durability == None })
		}
	})
}

// Caught marks the follower as current: from now on the answers of durable rules wait for it.
func (s *Store) Caught(p int, slot ownership.Slot) {
	s.with(p, func(_ *shard, part *partition) {
		if f := part.follower(slot); f != nil {
			f.current = true
		}
	})
}

// Detach takes the follower away.
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
	for f.events.Len() > 0 {
		f.popEvent(&sh.budget)
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

// Pending is the number of keys and other items with changes that Drain has not taken for a follower.
func (s *Store) Pending(p int, slot ownership.Slot) int {
	_, part := s.at(p)
	return int(part.pending[slot].Load())
}

// setPending publishes how much is pending for a follower.
func (p *partition) setPending(slot ownership.Slot, n int32) {
	if p.pending[slot].Swap(n) > 0 || n == 0 {
		return
	}
	if p.role.changed.Or(p.role.bit)&p.role.bit == 0 && p.role.tell != nil {
		p.role.tell()
	}
}

// Changed calls do with every partition for which Pending has become positive since the last call of Changed. It takes
// no lock. Two calls must not overlap.
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

// Confirm says that the follower has everything up to a version that Drain has named.
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

// Awaited reports whether an answer or an allowance waits for what followers have confirmed. While none does, Confirm
// may be left out: the next call says more. It takes no lock, and is for the goroutine that attaches followers.
func (s *Store) Awaited(p int) bool {
	_, part := s.at(p)
	return part.role != nil && part.role.awaited.Load()
}

// await notes that an answer or an allowance waits for what followers have confirmed.
func (p *partition) await() {
	if !p.role.awaited.Load() {
		p.role.awaited.Store(true)
	}
}

// expireAll ends what has expired in a partition: answers, reservations, loans and allowances.
func (sh *shard) expireAll(part *partition, now algo.Instant) {
	if a := part.extras; a != nil {
		a.answers.expire(now.Mono, &sh.budget)
		sh.expireReservations(part, now)
		sh.expireDue(part, now)
		part.recount()
	}
	sh.giveBack(part, now)
}

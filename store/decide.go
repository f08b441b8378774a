package store

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// This file holds the decision of one call on one key. It runs under the lock of the key's shard.
//
// The path of one call:
//
//  1. Store.DecideTo collects the call's concerns: the work that it needs besides the decision. If it has none, or
//     concernBan alone, DecideTo calls plain. If plain decides, the path ends here.
//  2. Otherwise decide makes a plan. before does the work that comes first and needs no record. Then locate finds the
//     key's record, or makes it, and does the work that needs it. Both may answer the call or fail it, and locate may
//     change its request.
//  3. decide has the rule's limits decide. They charge the state of the record.
//  4. after does the work that follows: it tells followers, remembers the answer, and adds to it.
//  5. The caller of Store.DecideTo waits for the answer's Ticket, if it has one.
//
// So plain, before, locate or after answers a call. A field of Answer must be set in each of them, except where its
// zero value is right. An error in place of an answer comes from decide, before or locate.
//
// Words:
//
//	partition  one of the parts into which the keys are divided, by hash. holder: the process that decides on it
//	record     a key's state and what is kept beside it (shard.go). A value of the type record is invalid once a record
//	           of the shard is made or dropped
//	slot       the place of a record in the partition's table
//	content    the records of a partition and all that belongs to them
//	scope      the policy's name, or a name made from a limit that has no policy. Scope and key identify a record; their
//	           hash only finds it
//	spec       a rule that has records in the shard, with the counts of these records and their bytes
//	follower   a process with a copy of the partition, or this process's disk. backup: the follower that claims the
//	           partition when the holder is lost. It is current once it has had the whole content
//	tell       to bring a follower up to date: note queues a changed record, and some milliseconds later Drain takes it
//	           for the follower (follower.go). Under a durability of None followers are not told, except the receiver of
//	           a move or of a restored copy
//	mark       the position of a state's log before the charge (algo.Limits.Mark): a follower with everything up to it
//	           is sent only the rest
//	strict     of a rule: calls are decided only with the grant of a majority of voters (Store.Lease)
//	persist    of a rule: the disk is told as well
//	guarded    of a rule: it is strict, has persist, or a durability of Escrow or Sync (Rule.Guarded). guard (gate.go)
//	           tests its calls
//	peek       a call with a cost of 0: it charges nothing
//	charged    of a call: Answer.Granted is above 0. A call with Always can be charged and refused
//	pending    of a reservation: neither settled nor expired
//	on loan    of units: a borrower may admit calls from them. They are neither in use nor free (loan.go)
//
// A change of a record, here or elsewhere, must keep these rules:
//
//   - If the partition has pending reservations, content.lower comes before a charge: they then know how many of their
//     units are still there.
//   - The memory that a state takes or gives back is counted to its spec (share.go): between setTaker and endTaker,
//     where the bounds of the spec's share hold, or by counted, where they do not. peekNew needs neither, because it
//     frees all that it takes.
//   - makeState makes a new key's state. It leaves no units in it if the count of an earlier holder is lost (cold.go).
//   - note follows the change. It is given the mark from before the change, or 0 if the whole state must be sent.

// concernSet is a set of concerns. What a new concern needs:
//
//   - A bit, which concernsOf or ownConcerns sets. If only some records have the concern, it has a flag of the record
//     in place of the bit, and stateOf (shard.go) must return nil for these records, so that plain leaves them to
//     decide. Loans have lentFlag. Bans have both: concernBan is set by the rule, and bannedFlag by record.ban on the
//     key's record.
//   - A function that before calls, or locate if it needs the record, if the concern can answer or fail a call or
//     change its request (p.request). Such a function charges nothing if it answers or fails the call. It may end
//     loans, bans and reservations whose time is over. refundCall and extend are exceptions: they answer in before, and
//     do change the state.
//   - A function that after calls, if the concern records what was charged or adds to the answer. It may use p.r only
//     if the call was charged, if p.denied is set, or if p.made is not set: otherwise decide may have dropped the
//     record.
type concernSet uint16

const (
	concernGuard       concernSet = 1 << iota // gate.go, escrow.go: the rule is guarded
	concernTell                               // follower.go: followers are told of records under the rule
	concernID                                 // answers.go: the call has a request id
	concernReservation                        // reservation.go: what the call charges becomes a reservation
	concernReserved                           // reservation.go: the partition has pending reservations
	concernBan                                // ban.go: the rule has a Ban
	concernRefund                             // refund.go: the call has a negative cost and Always
	concernExtension                          // settle.go: the call adds to a reservation
)

// plan is the data of one call in decide. The Call and the Answer are arguments beside it: the compiler would move them
// to the heap if one struct held them together with a state.
type plan struct {
	concerns concernSet
	part     *partition
	k        Key
	rule     *Rule
	now      algo.Instant
	each     []algo.Decision // nil, or gets the decision of each of the rule's limits
	request  algo.Request    // the call's, to which beforeLoan adds the units on loan

	// locate sets these.
	slot   uint32        // of the record, if made is set
	r      record        // the key's record, until decide drops it
	mark   uint64        // 0: the record was made for this call, its state has no log, or no follower is told
	made   bool          // the record was made for this call
	banned time.Duration // what is left of the key's ban; after locate it is 0 unless the call has Always

	denied bool // decide: the limits have counted the refusal, because one of them has CountDenied
}

// has reports whether the call has any of the concerns in c.
func (p *plan) has(c concernSet) bool { return p.concerns&c != 0 }

func (p *plan) id() stateID { return stateID{p.rule.Scope, p.k.Key} }

// concernsOf returns the concerns that every call under a rule has in this partition.
func (part *partition) concernsOf(rule *Rule) (set concernSet) {
	if rule.Guarded() {
		set |= concernGuard
	}
	if part.tells(rule) {
		set |= concernTell
	}
	if part.extras != nil && part.extras.reservations.count > 0 {
		set |= concernReserved
	}
	if rule.Ban > 0 {
		set |= concernBan
	}
	return set
}

// ownConcerns returns the concerns that the call's own fields set.
func (c *Call) ownConcerns() (set concernSet) {
	if c.RequestID != "" {
		set |= concernID
	}
	if c.Reservation != (ReservationID{}) {
		set |= concernReservation
	}
	if c.Cost < 0 && c.Always {
		set |= concernRefund
	}
	if c.Extend {
		set |= concernExtension
	}
	return set
}

// plain decides a request without concerns, or with concernBan alone, on a partition that is open. It returns false,
// and has charged nothing, if decide must decide the request:
//
//   - stateOf returns nil: the key has no record, or one under another Rule, or its record has lentFlag or bannedFlag;
//   - there is no memory for the charge;
//   - the rule has a Ban, and the request is refused (decide begins the ban) or has Always.
//
// A rule with a Ban has no limit with CountDenied (policy sees to that). Otherwise the refusal would be counted twice,
// here and in decide.
func (sh *shard) plain(part *partition, k *Key, rule *Rule, now algo.Instant, r *algo.Request, each []algo.Decision,
	d *algo.Decision) bool {
	if rule.Ban > 0 && r.Always {
		return false // plain would charge an Always request that is refused, and decide would charge it again
	}
	state, number := sh.stateOf(&part.table, k, rule)
	if state == nil {
		return false
	}
	used := sh.setTaker(number)
	err := rule.Limits.DecideTo(sh.arena, state, now, r, each, d)
	sh.endTaker(number, used)
	return err == nil && (d.Allowed || rule.Ban == 0)
}

// decide decides a call that plain has not decided. It collects the concerns itself, because other functions than
// DecideTo call it too, such as refundCall and extend. answer must be zero, but for what plain and guard have written.
// After an error its contents mean nothing.
//
// The only error of the limits is that the state could not grow; noRoom tells whether the store or the share has no
// memory. A record that was made for a call which has charged nothing is dropped, unless the limits have counted the
// refusal and the state differs from a new one. p.denied is then reset, because after must not give a record that was
// dropped to note.
func (sh *shard) decide(part *partition, k *Key, rule *Rule, now algo.Instant, call *Call, each []algo.Decision,
	answer *Answer) error {
	if !part.open {
		return ErrShut
	}
	concerns := part.concernsOf(rule) | call.ownConcerns()
	p := plan{concerns: concerns, part: part, k: *k, rule: rule, now: now, each: each, request: call.Request}
	if answered, err := sh.before(&p, call, answer); answered || err != nil {
		return err
	}
	if answered, err := sh.locate(&p, call, answer); answered || err != nil {
		return err
	}
	d, number := &answer.Decision, p.r.number()
	used := sh.setTaker(number)
	if p.has(concernReserved) {
		part.lower(p.r, now)
	}
	err := rule.Limits.DecideTo(sh.arena, p.r.state, now, &p.request, each, d)
	sh.endTaker(number, used)
	if err != nil {
		err = sh.noRoom(number)
	}
	p.denied = err == nil && !d.Allowed && call.Cost != 0 && !call.Always && rule.Limits.CountsDenied()
	if p.made && (err != nil || d.Granted == 0) {
		if !p.denied || sh.idle(p.r, now) {
			sh.drop(&part.table, p.slot)
			p.denied = false
		}
	}
	if err != nil {
		return err
	}
	sh.after(&p, call, answer)
	return nil
}

// before does the work that comes before the decision and needs no record, in this order:
//
//   - Reservations that have expired end first, because a refund must not give their units back again.
//   - A refund and an extension come before the guard: refundCall calls it, and extend calls decide, which does.
//   - The guard comes before the request id, because a repeated answer, too, needs the grant of a strict rule.
//   - The request id comes before the reservation, because a repetition needs no second reservation. beforeID returns
//     an error if the cost or the reservation differs from the first time. afterID remembers no refusal of a call
//     without Always, so its repetition is decided anew.
func (sh *shard) before(p *plan, call *Call, answer *Answer) (answered bool, err error) {
	if p.has(concernReserved) {
		sh.expireReservationsOn(p.part, &p.k, p.rule, p.now)
	}
	switch {
	case p.has(concernRefund):
		return true, sh.refundCall(p, call, answer)
	case p.has(concernExtension):
		return true, sh.extend(p, call, answer)
	}
	if p.has(concernGuard) {
		if err := p.part.guard(p.rule, call.Boot, answer); err != nil {
			return false, err
		}
	}
	if p.has(concernID) {
		if answered, err := sh.beforeID(p, call, answer); answered || err != nil {
			return answered, err
		}
	}
	if p.has(concernReservation) {
		return false, sh.beforeReservation(p, call)
	}
	return false, nil
}

// locate finds the key's record and converts it to the rule, or makes a new record. A peek at a key without a record
// needs none: locate answers it by peekNew. Then it does the work that a record's flags ask for:
//
//   - beforeLoan puts the units on loan into p.request, so that the limits grant only what is free. It answers a call
//     with Call.Whole that should not be charged before borrowers have returned units.
//   - beforeBan refuses a call on a banned key, unless the call has Always. It needs no concernBan: no record has
//     bannedFlag under a rule without a Ban.
func (sh *shard) locate(p *plan, call *Call, answer *Answer) (answered bool, err error) {
	slot, found := sh.find(&p.part.table, p.k.Hash, p.rule.Scope, p.k.Key)
	if !found {
		if call.Cost == 0 {
			answer.Decision, err = sh.peekNew(p.part, p.rule, p.now, call, p.each)
			return true, err
		}
		if slot, err = sh.enter(p.part, &p.k, p.rule, p.now, call.Caller); err != nil {
			return false, err
		}
		p.slot, p.made, p.r = slot, true, sh.record(p.part.ref(slot))
		return false, nil
	}
	if p.r, err = sh.adopted(p.part, slot, p.rule, p.now); err != nil {
		return false, err
	}
	if p.r.has(lentFlag) && sh.beforeLoan(p, call, answer) {
		return true, nil
	}
	if p.r.has(bannedFlag) && sh.beforeBan(p, call, answer) {
		return true, nil
	}
	p.mark = p.part.markOf(p.r)
	return false, nil
}

// after does the work that follows the decision. Without concernTell, note would only count a version of the partition.
// The order matters: afterGuard's Ticket covers what note, afterID and afterReservation have queued for the followers.
// afterBan comes last, because the ban is one more change: it calls note again, and takes a Ticket that covers the ban.
//
// If an answer has a Ticket, it may be given only when the backup, and under persist the disk, have confirmed the
// change. While no backup is current, no answer waits for one. A call that was charged gets a Ticket from afterGuard:
//
//	durability              which calls
//	None, Async             none
//	Escrow without persist  those with a request id; those that make a reservation, unless it is of an atomic check
//	                        (Call.ReserveOnce); those that take more units than the backup counts as spent in advance
//	                        (escrow.go)
//	Escrow with persist     all
//	Sync                    all
//
// Under Escrow and Sync, these answers get a Ticket as well: a refusal that begins a ban (afterBan), a repeated answer
// (beforeID), and an extension (extend). Other refusals get none, although a counted refusal or a changed rule may have
// changed the state. If such a change is lost, the followers admit as much as if the refused call had never been made.
func (sh *shard) after(p *plan, call *Call, answer *Answer) {
	charged := answer.Granted > 0
	if p.has(concernTell) && (charged || p.denied) {
		sh.note(p.part, p.r, p.mark)
	}
	if p.has(concernID) {
		sh.afterID(p, call, answer)
	}
	if p.has(concernReservation) && charged {
		sh.afterReservation(p, call, answer)
	}
	if p.has(concernGuard) && charged {
		sh.afterGuard(p, call, answer)
	}
	if p.has(concernReserved | concernReservation) {
		answer.Pending = p.part.hasReservations(p.id(), p.now.Mono)
	}
	if p.request.OnLoan > 0 {
		p.afterLoan(call, answer)
	}
	if p.has(concernBan) {
		sh.afterBan(p, call, answer)
	}
}

// peekNew answers a peek at a key without a record, from a state that is not kept.
func (sh *shard) peekNew(part *partition, rule *Rule, now algo.Instant, call *Call,
	each []algo.Decision) (d algo.Decision, err error) {
	state := make(algo.State, rule.Limits.Words())
	if err = sh.makeState(part, rule, state, now); err != nil {
		err = errNoRoom
	} else {
		d, err = rule.Limits.Decide(sh.arena, state, now, call.Request, each) // a peek needs no memory: err is nil
	}
	rule.Limits.Free(sh.arena, state)
	return d, err
}

// enter makes a new key's record.
func (sh *shard) enter(part *partition, k *Key, rule *Rule, now algo.Instant, caller string) (slot uint32, err error) {
	if slot, err = sh.insert(&part.table, *k, rule, now, caller, true); err != nil {
		return 0, err
	}
	r := sh.record(part.ref(slot))
	sh.counted(r, func() { err = sh.makeState(part, rule, r.state, now) })
	if err != nil {
		sh.drop(&part.table, slot)
		return 0, errNoRoom
	}
	return slot, nil
}

// adopted returns the record at a slot, converted to the given rule if it was under another one. If the two differ in
// the limits, Durability, Strict, Persist or Ban (same, shard.go), adopted notes the record. Followers that are told of
// it under the old rule and not under the new one are told to forget it.
func (sh *shard) adopted(part *partition, slot uint32, rule *Rule, now algo.Instant) (record, error) {
	r := sh.record(part.ref(slot))
	if r.spec.rule == rule {
		return r, nil
	}
	old := r.spec.rule
	changed, err := sh.adopt(&part.content, slot, rule, now)
	r = sh.record(part.ref(slot)) // adopt may have made the record anew
	if changed {
		sh.note(part, r, 0)
		sh.untell(part, r, old)
		if rule.Durability == None {
			sh.endAdvance(part, r.hash(), r.id())
		}
	}
	return r, err
}

// existing calls f with the key's record, converted to the given rule, if the key has one. f reports whether it changed
// the state.
func (sh *shard) existing(part *partition, k Key, rule *Rule, now algo.Instant, f func(record) bool) error {
	slot, ok := sh.find(&part.table, k.Hash, rule.Scope, k.Key)
	if !ok {
		return nil
	}
	r, err := sh.adopted(part, slot, rule, now)
	if err != nil {
		return err
	}
	mark, changed := part.markOf(r), false
	sh.counted(r, func() { changed = f(r) })
	if changed {
		sh.note(part, r, mark)
	}
	return nil
}

package store

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// This file decides a call on one key, under the lock of the key's shard.
//
// The path of one call:
//
//  1. Store.DecideTo notes a bit for each concern that the call has. Without one, or with concernBan alone, plain decides a call on a key that
//     has a record under this rule and is neither banned nor on loan. If it can, the path ends here.
//  2. decide makes a plan. before and locate ask the plan's concerns: each may answer the call, fail it, or change its request.
//  3. charge calls algo.Limits.DecideTo, which decides and charges the state of the key's record.
//  4. after tells the plan's concerns what was charged: each records it, or adds to the answer.
//  5. The caller of Store.DecideTo waits for the answer's Ticket, if it has one.
//
// Words:
//
//	plan      one call on its way through these steps; p in functions that have one
//	concern   something that some calls need besides a decision; before, locate and after call its functions. A loan is a concern without a
//	          bit: the record has lentFlag
//	record    one key's state with its head, see shard.go; a view of it is valid until a record is made or dropped
//	spec      a rule under which the shard has records, with the accounts that their keys and bytes count to; records have its number
//	slot      the place of a record in the partition's table
//	scope     the policy's name, or what stands for it; (scope, key) identifies a record, a hash only finds it
//	follower  a process with a copy of the partition, or this process's disk; replication keeps it up to date by Drain. The backup is the
//	          follower that claims the partition when the holder is lost
//	mark      the position of a state's log before the charge (algo.Limits.Mark); a follower that has everything up to it is sent only the rest.
//	          note sends the whole state if mark is 0
//	peek      a call with a cost of 0: it charges nothing
//	pending   of a reservation: it is pending until it is settled or expires
//	guard     what a rule with Rule.Guarded demands: a grant to decide (Store.Lease), or a current backup or disk
//	gate      what Store.Open opens and Store.Shut shuts: calls on a partition are decided only while it is open
//	lease     a unit of a concurrency limit that a caller has taken (lease.go); the lease of Store.Lease is a grant
//	denied    the state has counted a refusal, because of count_denied
//
// Where the concerns cross:
//
//   - A key with units on loan has lentFlag, and so is never decided by plain. Units on loan are neither in use nor
//     free: beforeLoan puts them into request.OnLoan, so that the limits grant what is left beside them. A refusal that
//     depends on them has answer.OnLoan (afterLoan); the limiter then recalls the loans and calls once more. If a call
//     has Call.Whole and returned units could grant it more, beforeLoan refuses it with OnLoan and charges nothing.
//   - beforeBan refuses a call on a banned key, unless the call has Always. afterBan begins a ban when the limits refuse a key that had a
//     record before the call, for want of room. plan.bans says when it begins none, such as while units of the key are on loan.
//   - note queues every changed record; Drain sends it to the followers some milliseconds later. Under a durability of None, another process
//     gets it only when the partition moves.
//   - If the answer has a Ticket, the caller of Store.DecideTo waits until the backup or the disk has confirmed the change.
//   - Under Sync, and under Escrow with Persist, afterGuard gives every grant a Ticket, unless everything has been confirmed.
//   - Under Escrow without Persist, afterGuard gives one to a grant with a request id, to a grant that makes a reservation (but not for an
//     atomic check), and to a grant beyond the escrowed amount: the units that the backup has been told to take for spent (escrow.go).
//   - Under Escrow and Sync, afterBan gives one to a refusal that begins a ban, beforeID to a repeated answer, and extend to an extension.
//   - Other refusals have none, although count_denied or a changed rule may have changed the state. If such a change is lost, the followers
//     admit as much as if the refused call had never been made.
//
// Other files must keep:
//
//   - A before function that answers or fails a call has charged nothing. It may have ended loans and reservations
//     whose time was over. refundCall and extend are exceptions: they answer in before, and do change the state.
//   - content.lower precedes every operation that may charge a state: reservations then know how many of their units
//     are still there.
//   - What a state takes from the arena is counted to the record's spec (share.go): between setTaker and endTaker, where the share's bounds
//     hold, or within counted, where they do not.
//   - A new key's state comes from makeState, which fills it if an earlier holder's count is lost (cold.go).
//   - A change of a record is followed by note, with the mark from before the change, or with 0 if the whole state must be sent.
//   - A rule with a Ban has no limit with CountDenied (policy sees to that): plain would count a refusal, and charge would count it again.
//   - charge may drop the record. An after function uses p.r only after a grant, or if p.denied is set or p.made is not.

// concernSet is a set of concerns.
type concernSet uint16

const (
	concernGuard       concernSet = 1 << iota // gate.go, escrow.go: the rule is Guarded
	concernCopy                               // follower.go: a follower has to be told
	concernID                                 // answers.go: the call has a request id
	concernReservation                        // reservation.go: what the call charges is a reservation
	concernHolds                              // reservation.go: the partition has pending reservations
	concernBan                                // ban.go: the rule has a Ban
	concernRefund                             // refund.go: the call has a negative cost and Always
	concernExtension                          // settle.go: the call adds to a reservation
)

// plan is one call on its way through decide. The Call and the Answer are arguments beside it: the compiler would move
// them to the heap if one struct held them together with a state.
type plan struct {
	concerns concernSet
	part     *partition
	k        Key
	rule     *Rule
	now      algo.Instant
	each     []algo.Decision

	request algo.Request  // the call's, which beforeLoan changes
	slot    uint32        // of the record in the partition's table, if it was made for this call
	r       record        // set by locate, like mark
	mark    uint64        // 0: the state has no log, or no follower is told; note sends the whole state if mark is 0
	made    bool          // the record was made for this call
	denied  bool          // the state has counted a refusal
	banned  time.Duration // what is left of the key's ban
}

func (p *plan) has(c concernSet) bool { return p.concerns&c != 0 }

func (p *plan) id() stateID { return stateID{p.rule.Scope, p.k.Key} }

// concernsOf returns the concerns that every call under a rule has in this partition.
func (part *partition) concernsOf(rule *Rule) (of concernSet) {
	if rule.Guarded() {
		of |= concernGuard
	}
	if part.tells(rule) {
		of |= concernCopy
	}
	if part.extras != nil && part.extras.reservations.count > 0 {
		of |= concernHolds
	}
	if rule.Ban > 0 {
		of |= concernBan
	}
	return of
}

// ownConcerns returns the concerns that the call itself brings.
func (c *Call) ownConcerns() (of concernSet) {
	if c.RequestID != "" {
		of |= concernID
	}
	if c.Reservation != (ReservationID{}) {
		of |= concernReservation
	}
	if c.Cost < 0 && c.Always {
		of |= concernRefund
	}
	if c.Extend {
		of |= concernExtension
	}
	return of
}

// decide is Store.DecideTo under the lock, for a call that plain has not decided. answer must be zero; after an error its contents mean nothing.
func (sh *shard) decide(part *partition, k *Key, rule *Rule, now algo.Instant, call *Call, each []algo.Decision, answer *Answer) error {
	if !part.open {
		return ErrShut
	}
	of := part.concernsOf(rule) | call.ownConcerns()
	p := plan{concerns: of, part: part, k: *k, rule: rule, now: now, each: each, request: call.Request}
	if answered, err := sh.before(&p, call, answer); answered || err != nil {
		return err
	}
	if answered, err := sh.locate(&p, call, answer); answered || err != nil {
		return err
	}
	if err := sh.charge(&p, call, &answer.Decision); err != nil {
		return err
	}
	sh.after(&p, call, answer)
	return nil
}

// plain decides a request that has no concern, or concernBan alone. It returns false, and has charged nothing, if the rest of decide
// must: the key has no record under this very rule, is banned or on loan (stateOf tests all of these, the last two by the record's flags),
// there is no memory, the refusal may begin a ban, or the rule has a Ban and the request has Always.
func (sh *shard) plain(part *partition, k *Key, rule *Rule, now algo.Instant, r *algo.Request, each []algo.Decision, d *algo.Decision) bool {
	if rule.Ban > 0 && r.Always {
		return false // plain would charge an Always request that is refused, and charge would charge it again
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

// before asks the concerns that need no record, in this order:
//
//   - What has expired goes first, because a refund must not give it back again.
//   - A refund and an extension come before the guard: refundCall asks it, and the call of decide in extend does.
//   - The guard comes before the request id, because a repeated answer, too, is given under a grant only.
//   - The request id comes before the reservation, because a repetition needs no room for another reservation.
func (sh *shard) before(p *plan, call *Call, answer *Answer) (answered bool, err error) {
	if p.has(concernHolds) {
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

// locate finds the key's record and brings it under the rule, or makes a new one. Then it asks the concerns that a
// record can have: loans and a ban. A peek at a key without a record is answered from a fresh state, and no record is
// made.
func (sh *shard) locate(p *plan, call *Call, answer *Answer) (answered bool, err error) {
	slot, found := sh.find(&p.part.table, p.k.Hash, p.rule.Scope, p.k.Key)
	if !found {
		if call.Cost == 0 {
			answer.Decision, err = sh.peekNew(p.part, p.rule, p.now, call, p.each)
			answer.Pending = p.part.awaits(p.id(), p.now.Mono)
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

// charge lets the limits decide. It drops a record that was made for the call if the limits fail or grant nothing, unless they have counted
// the refusal and the state is not as good as new. p.r is not valid then, so charge resets p.denied: otherwise after would give p.r to note.
func (sh *shard) charge(p *plan, call *Call, d *algo.Decision) error {
	limits := p.rule.Limits
	number := uint32(p.r.words[1] >> 32)
	used := sh.setTaker(number)
	if p.has(concernHolds) {
		p.part.lower(limits, p.r.state, p.id(), p.now)
	}
	err := limits.DecideTo(sh.arena, p.r.state, p.now, &p.request, p.each, d)
	sh.endTaker(number, used)
	if err != nil {
		err = sh.noRoom(number)
	}
	p.denied = err == nil && !d.Allowed && call.Cost != 0 && !call.Always && limits.CountsDenied()
	if p.made && (err != nil || d.Granted == 0) && (!p.denied || sh.idle(p.r, p.now)) {
		sh.drop(&p.part.table, p.slot)
		p.denied = false
	}
	return err
}

// after tells the concerns what was charged. The order matters: afterGuard's ticket covers what note, afterID and afterReservation have
// queued for the followers. afterBan may make one more change, and raises the ticket itself.
func (sh *shard) after(p *plan, call *Call, answer *Answer) {
	granted := answer.Granted > 0
	if p.has(concernCopy) && (granted || p.denied) {
		sh.note(p.part, p.r, p.mark)
	}
	if p.has(concernID) {
		sh.afterID(p, call, answer)
	}
	if p.has(concernReservation) && granted {
		sh.afterReservation(p, call, answer)
	}
	if p.has(concernGuard) && granted {
		sh.afterGuard(p, call, answer)
	}
	if p.has(concernHolds | concernReservation) {
		answer.Pending = p.part.awaits(p.id(), p.now.Mono)
	}
	if p.request.OnLoan > 0 {
		p.afterLoan(call, answer)
	}
	if p.has(concernBan) {
		sh.afterBan(p, call, answer)
	}
}

// peekNew answers a peek at a key without a record, from a state in scratch memory.
func (sh *shard) peekNew(part *partition, rule *Rule, now algo.Instant, call *Call, each []algo.Decision) (algo.Decision, error) {
	if sh.scratch == nil {
		sh.scratch = make(algo.State, algo.MaxBlock)
	}
	state := sh.scratch[:rule.Limits.Words()]
	if err := sh.makeState(part, rule, state, now); err != nil {
		rule.Limits.Free(sh.arena, state)
		return algo.Decision{}, errNoRoom
	}
	d, err := rule.Limits.Decide(sh.arena, state, now, call.Request, each)
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

// adopted returns the record at a slot, brought under the given rule.
func (sh *shard) adopted(part *partition, slot uint32, rule *Rule, now algo.Instant) (record, error) {
	r := sh.record(part.ref(slot))
	if r.spec.rule == rule {
		return r, nil
	}
	persisted := r.spec.rule.Persist
	changed, err := sh.adopt(&part.content, slot, rule, now)
	if r = sh.record(part.ref(slot)); changed {
		sh.note(part, r, 0)
	}
	if changed && persisted && !rule.Persist {
		sh.unsave(part, r)
	}
	return r, err
}

// existing calls f with the key's record under the given rule, and not at all where there is none. f reports whether it
// changed the state.
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

package store

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// The path of one check, under the lock of its shard:
//
//  1. decide makes the plan: the call, and a bit for each concern that it has.
//  2. plain decides a call without a concern on a known key, and nothing is left to do.
//  3. before and locate ask each concern of the plan: it may answer the call, or change the request.
//  4. charge lets algo.Limits decide, which charges the state of the key's record.
//  5. after tells each concern of the plan what was charged: it records that, or adds to the answer.
//
// Words:
//
//	plan     one call on its way through the five steps
//	concern  one thing that some calls need besides their decision; its file has a before and an after function
//	record   the state of one key with its head, see shard.go; a view of it ends with the next change of the table or the specs
//	mark     where the log of a state stood before the charge, so that a follower is sent only what was added since
//	follower a process that has a copy of the partition, and is told of changes
//
// Other files must keep:
//
//   - An error or an answer of before and locate leaves the state as it was, but for time that has passed, a new rule and
//     loans that have ended.
//   - content.lower comes before each operation that may charge a state, so that reservations know what may be given back.
//   - What a state takes from the arena between begins and ends, or within counted, is counted to the record's spec.
//   - Who changes a record of a followed partition calls note, with the mark from before the change, or 0 for the whole state.

// concerns is a set of concerns.
type concerns uint16

const (
	concernGate        concerns = 1 << iota // gate.go, escrow.go: the rule is strict, or its answers may wait for the backup
	concernCopy                             // follower.go: the partition has a follower
	concernID                               // answers.go: the call has a request id
	concernReservation                      // reservation.go: what the call charges is a reservation
	concernPending                          // reservation.go: reservations are pending in the partition
	concernBan                              // ban.go: the rule has a Ban
	concernRefund                           // refund.go: the cost is negative
	concernExtension                        // settle.go: the call adds to a reservation
)

// plan is one call on its way through decide. The Call and the Answer are not in it, so that they stay on their caller's stack: the
// compiler moves to the heap whatever is in one struct with a state.
type plan struct {
	concerns concerns
	part     *partition
	k        Key
	rule     *Rule
	now      algo.Instant
	each     []algo.Decision

	// request is the call's, with what is on loan of the key.
	request algo.Request
	slot    uint32
	r       record
	mark    uint64
	made    bool          // the record was made for this call
	filled  bool          // and its state filled, see begin
	denied  bool          // the state counts a refusal
	banned  time.Duration // what is left of the key's ban
}

func (p *plan) has(c concerns) bool { return p.concerns&c != 0 }

func (p *plan) id() stateID { return stateID{p.rule.Scope, p.k.Key} }

// concerns returns those of every call on the partition under a rule.
func (p *partition) concerns(rule *Rule) (of concerns) {
	if rule.Guarded() {
		of |= concernGate
	}
	if p.followed {
		of |= concernCopy
	}
	if p.extras != nil && p.extras.reservations.count > 0 {
		of |= concernPending
	}
	if rule.Ban > 0 {
		of |= concernBan
	}
	return of
}

// concerns returns those of one call.
func (c *Call) concerns() (of concerns) {
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

// decide is Store.DecideTo under the lock. answer is zero; it is of no use when there is an error.
func (sh *shard) decide(part *partition, k *Key, rule *Rule, now algo.Instant, call *Call, each []algo.Decision, answer *Answer) error {
	if !part.open {
		return ErrShut
	}
	of := part.concerns(rule) | call.concerns()
	if of&^concernBan == 0 && sh.plain(part, k, rule, now, &call.Request, each, &answer.Decision) {
		return nil
	}
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

// plain decides a request without a concern on a key that is kept under this very rule, is not banned and has no loans. It
// returns false, and has charged nothing, for every other key, for want of memory, and for a refusal that may begin a ban.
func (sh *shard) plain(part *partition, k *Key, rule *Rule, now algo.Instant, r *algo.Request, each []algo.Decision, d *algo.Decision) bool {
	if rule.Ban > 0 && r.Always {
		return false // it may be charged though it is refused
	}
	state, number := sh.stateOf(&part.table, k, rule)
	if state == nil {
		return false
	}
	used := sh.begins(number)
	err := rule.Limits.DecideTo(sh.arena, state, now, r, each, d)
	sh.ends(number, used)
	return err == nil && (d.Allowed || rule.Ban == 0)
}

// before asks the concerns that need no record.
func (sh *shard) before(p *plan, call *Call, answer *Answer) (answered bool, err error) {
	if p.has(concernPending) {
		sh.expireReservationsOn(p.part, &p.k, p.rule, p.now)
	}
	switch {
	case p.has(concernRefund):
		return true, sh.refundCall(p, call, answer)
	case p.has(concernExtension):
		return true, sh.extend(p, call, answer)
	}
	if p.has(concernGate) {
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

// locate finds the key's record, or makes it, and asks the concerns that the record has: its loans and its ban. A peek at a key
// without a record is answered from a fresh state.
func (sh *shard) locate(p *plan, call *Call, answer *Answer) (answered bool, err error) {
	slot, found := sh.find(&p.part.table, p.k.Hash, p.rule.Scope, p.k.Key)
	if !found {
		if call.Cost == 0 {
			answer.Decision, err = sh.peekNew(p.part, p.rule, p.now, call, p.each)
			answer.Pending = p.part.awaits(p.id(), p.now.Mono)
			return true, err
		}
		if slot, p.filled, err = sh.enter(p.part, &p.k, p.rule, p.now, call.Caller); err != nil {
			return false, err
		}
		p.slot, p.made, p.r = slot, true, sh.record(p.part.ref(slot))
		return false, nil
	}
	if p.r, err = sh.adopted(p.part, slot, p.rule, p.now); err != nil {
		return false, err
	}
	// A check of a key on loan sees the units on loan as held. Where they stand in its way the answer has OnLoan, so that the
	// limiter may recall them and ask again.
	if p.r.has(lentFlag) && sh.beforeLoan(p, call, answer) {
		return true, nil
	}
	if p.r.has(bannedFlag) && sh.beforeBan(p, call, answer) {
		return true, nil
	}
	p.mark = sh.markOf(p.part, p.r)
	return false, nil
}

// charge has the limits decide. A record that was made for the call is dropped if nothing was charged to it.
func (sh *shard) charge(p *plan, call *Call, d *algo.Decision) error {
	limits := p.rule.Limits
	number := uint32(p.r.words[1] >> 32)
	used := sh.begins(number)
	if p.has(concernPending) {
		p.part.lower(limits, p.r.state, p.id(), p.now)
	}
	err := limits.DecideTo(sh.arena, p.r.state, p.now, &p.request, p.each, d)
	sh.ends(number, used)
	if err != nil {
		err = sh.noRoom(number)
	}
	p.denied = err == nil && !d.Allowed && call.Cost != 0 && !call.Always && countsDenied(limits)
	if p.made && (err != nil || d.Granted == 0) && (p.filled && !p.denied || sh.idle(p.r, p.now)) {
		sh.drop(&p.part.table, p.slot)
		p.denied = false
	}
	return err
}

// after tells the concerns what was charged. A copy is told here: note makes the record pending for its followers, and Drain sends
// it. A ban begins here, in afterBan.
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
	if p.has(concernGate) && granted {
		sh.afterGate(p, call, answer)
	}
	if p.has(concernPending | concernReservation) {
		answer.Pending = p.part.awaits(p.id(), p.now.Mono)
	}
	if p.request.Held > 0 {
		p.afterLoan(call, answer)
	}
	if p.has(concernBan) {
		sh.afterBan(p, call, answer)
	}
}

// peekNew answers a peek at a key without a state.
func (sh *shard) peekNew(part *partition, rule *Rule, now algo.Instant, call *Call, each []algo.Decision) (algo.Decision, error) {
	if sh.scratch == nil {
		sh.scratch = make(algo.State, algo.MaxBlock)
	}
	state := sh.scratch[:rule.Limits.Words()]
	if _, err := sh.begin(part, rule, state, now); err != nil {
		rule.Limits.Free(sh.arena, state)
		return algo.Decision{}, errNoRoom
	}
	d, err := rule.Limits.Decide(sh.arena, state, now, call.Request, each)
	rule.Limits.Free(sh.arena, state)
	return d, err
}

// enter makes a new key's record.
func (sh *shard) enter(part *partition, k *Key, rule *Rule, now algo.Instant, caller string) (slot uint32, filled bool, err error) {
	if slot, err = sh.insert(&part.table, *k, rule, now, caller, true); err != nil {
		return 0, false, err
	}
	r := sh.record(part.ref(slot))
	sh.counted(r, func() { filled, err = sh.begin(part, rule, r.state, now) })
	if err != nil {
		sh.drop(&part.table, slot)
		return 0, false, errNoRoom
	}
	return slot, filled, nil
}

// countsDenied reports whether a refusal changes a state.
func countsDenied(limits algo.Limits) bool {
	for i := range limits {
		if limits[i].CountDenied {
			return true
		}
	}
	return false
}

// adopted returns the record at a slot, brought under the given rule.
func (sh *shard) adopted(part *partition, slot uint32, rule *Rule, now algo.Instant) (record, error) {
	r := sh.record(part.ref(slot))
	if r.spec.rule == rule {
		return r, nil
	}
	changed, err := sh.adoptState(part, slot, rule, now)
	if r = sh.record(part.ref(slot)); changed {
		sh.note(part, r, 0)
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
	mark, changed := sh.markOf(part, r), false
	sh.counted(r, func() { changed = f(r) })
	if changed {
		sh.note(part, r, mark)
	}
	return nil
}

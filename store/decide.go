package store

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// This file decides a call on one key, under the lock of the key's shard.
//
// The path of one call:
//
//  1. Store.DecideTo collects the call's concerns. If it has none, or concernBan alone, DecideTo calls plain. If plain
//     decides, the path ends here.
//  2. Otherwise decide makes a plan. before and locate call the concerns' before functions: each may answer the call,
//     fail it, or change its request. locate also answers a peek at a key without a record.
//  3. charge calls algo.Limits.DecideTo, which decides and charges the state of the key's record.
//  4. after calls the concerns' after functions: each records what was charged, or adds to the answer.
//  5. The caller of Store.DecideTo waits for the answer's Ticket, if it has one.
//
// So a call ends in plain, before, locate or after. A new field of an answer must be set in each of them.
//
// Words:
//
//	plan      the data of one call in these steps; p in functions
//	concern   work that some calls need besides the decision, with a bit in concernSet. A loan has no bit, but lentFlag
//	          in the record
//	record    one key's state with its head (shard.go); a value of the type record is invalid once a record of the shard
//	          is made or dropped
//	spec      a rule that has records in the shard, with the counts of their keys and bytes; each record has its spec's
//	          number
//	slot      the place of a record in the partition's table
//	scope     the policy's name, or a name made from a limit that has no policy; (scope, key) identifies a record, a
//	          hash only finds it
//	follower  a process with a copy of the partition, or this process's disk; replication keeps it up to date by Drain.
//	          The backup is the follower that claims the partition when the holder is lost
//	mark      the position of a state's log before the charge (algo.Limits.Mark); a follower that has everything up to
//	          it is sent only the rest. note sends the whole state if mark is 0
//	peek      a call with a cost of 0: it charges nothing
//	pending   of a reservation: neither settled nor expired
//	granted   of a call: it was charged at least one unit. A call with Always can be charged and not be allowed
//	guard     the test of a call under a Guarded rule (gate.go). A strict rule is decided only with a grant to decide
//	          (Store.Lease); under other rules an answer is Degraded while there is no current backup or disk
//	gate      part.open: set by Store.Open, cleared by Store.Shut; calls on a partition are decided only while it is set
//	lease     a unit of a concurrency limit that a caller has taken (lease.go); the lease of Store.Lease is the grant to
//	          decide
//	full      of a state: it has no units left
//	denied    the state has counted a refusal, because of count_denied
//
// Loans and bans:
//
//   - A key with units on loan has lentFlag, so plain never decides it. Units on loan are neither in use nor free:
//     beforeLoan puts them into request.OnLoan, so that the limits grant only what is left beside them. A refusal that
//     depends on them has answer.OnLoan (afterLoan): the limiter then recalls the loans and calls once more
//     (limiter/loan.go). A call with Call.Whole wants all that it can get at once: if returned units could grant it
//     more, beforeLoan refuses it with OnLoan and charges nothing.
//   - beforeBan refuses a call on a banned key, unless the call has Always. A ban begins in afterBan, when the limits
//     refuse a key because too few units are left, if the key had a record before the call. plan.bans says when no ban
//     begins, such as while units of the key are on loan.
//
// When followers are told of a change: note queues the changed record, and Drain sends it to the followers some
// milliseconds later. Under a durability of None no follower is told: another process gets the record only when the
// partition moves.
//
// When the caller waits for that: if the answer has a Ticket, the caller of Store.DecideTo waits until the backup or
// the disk has confirmed the change. afterGuard gives Tickets to granted calls:
//
//	none, async              never
//	escrow, without persist  to a call with a request id, to a reservation (but not of an atomic check), and to units
//	                         beyond the escrowed amount, which the backup counts as spent before they are (escrow.go)
//	escrow with persist      always, if a change waits for confirmation
//	sync                     always, if a change waits for confirmation
//
// No caller waits for a backup while there is none that is current.
//
// Under escrow and sync, afterBan gives one to the refusal that begins a ban, beforeID to a repeated answer, and extend
// to an extension. Other refusals have none, although count_denied or a changed rule may have changed the state. If
// such a change is lost, the followers admit as much as if the refused call had never been made.
//
// Other files must keep:
//
//   - A before function that answers or fails a call has charged nothing. It may have ended loans and reservations
//     whose time was over. refundCall and extend are exceptions: they answer in before, and do change the state.
//   - content.lower precedes every operation that may charge a state with pending reservations (concernHolds): they
//     then know how many of their units are still there.
//   - What a state takes from the arena is counted to the record's spec (share.go): between setTaker and endTaker,
//     where the share's bounds hold, or within counted, where they do not.
//   - A new key's state comes from makeState, which makes it full if an earlier holder's count is lost (cold.go).
//   - A change of a record is followed by note, with the mark from before the change, or with 0 if the whole state must
//     be sent. note does nothing if no follower has to be told.
//   - A rule with a Ban has no limit with CountDenied (policy sees to that): plain would count a refusal, and charge
//     would count it again.
//   - charge may drop the record. An after function uses p.r only if the call was granted, if p.denied is set, or if
//     p.made is not set.

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

// plan is the data of one call in decide. The Call and the Answer are arguments beside it: the compiler would move them
// to the heap if one struct held them together with a state.
type plan struct {
	concerns concernSet
	part     *partition
	k        Key
	rule     *Rule
	now      algo.Instant
	each     []algo.Decision // nil, or gets the decision of each of the rule's limits

	request algo.Request  // the call's, which beforeLoan changes
	slot    uint32        // of the record in the partition's table, if it was made for this call
	r       record        // set by locate, like mark
	mark    uint64        // 0: the state has no log, or no follower is told
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

// ownConcerns returns the concerns that the call's own fields set.
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

// decide decides a call that plain has not decided. answer must be zero, but for a Decision that plain has written.
// After an error its contents mean nothing.
func (sh *shard) decide(part *partition, k *Key, rule *Rule, now algo.Instant, call *Call, each []algo.Decision,
	answer *Answer) error {
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

// plain decides a request without concerns, or with concernBan alone, on a partition that is open. It returns false,
// and has charged nothing, if decide must decide it: stateOf finds no record under this very rule without flags (it is
// banned or on loan), there is no memory, or the rule has a Ban and the request is refused or has Always.
func (sh *shard) plain(part *partition, k *Key, rule *Rule, now algo.Instant, r *algo.Request, each []algo.Decision,
	d *algo.Decision) bool {
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

// before calls the before functions of the concerns that need no record, in this order:
//
//   - Reservations that have expired end first, because a refund must not give their units back again.
//   - A refund and an extension come before the guard: refundCall calls it, and extend calls decide, which does.
//   - The guard comes before the request id, because a repeated answer, too, needs the grant to decide.
//   - The request id comes before the reservation, because a repetition needs no second reservation.
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

// locate finds the key's record and converts it to the rule, or makes a new record. Then it calls the before functions
// of what a record can have: loans, and a ban. It answers a peek at a key without a record from a fresh state, and
// makes no record.
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

// charge has the limits decide. If they fail or grant nothing, it drops a record that was made for the call, unless
// they have counted the refusal and the state differs from a new one. p.r is invalid once the record is dropped, so
// charge resets p.denied: otherwise after would give p.r to note.
func (sh *shard) charge(p *plan, call *Call, d *algo.Decision) error {
	limits := p.rule.Limits
	number := uint32(p.r.words[1] >> 32)
	used := sh.setTaker(number)
	if p.has(concernHolds) {
		p.part.lower(p.r, p.now)
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

// after calls the concerns' after functions. The order matters: afterGuard's ticket covers what note, afterID and
// afterReservation have queued for the followers. afterBan may make one more change, and then sets a later ticket
// itself.
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

// peekNew answers a peek at a key without a record, from a state that is not kept.
func (sh *shard) peekNew(part *partition, rule *Rule, now algo.Instant, call *Call,
	each []algo.Decision) (algo.Decision, error) {
	state := make(algo.State, rule.Limits.Words())
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

// adopted returns the record at a slot, converted to the given rule. It notes a state that this has changed.
func (sh *shard) adopted(part *partition, slot uint32, rule *Rule, now algo.Instant) (record, error) {
	r := sh.record(part.ref(slot))
	if r.spec.rule == rule {
		return r, nil
	}
	old := r.spec.rule
	changed, err := sh.adopt(&part.content, slot, rule, now)
	if r = sh.record(part.ref(slot)); changed {
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

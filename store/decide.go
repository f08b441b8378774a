package store

import (
	"math"
	"slices"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
)

// decide is Store.DecideTo under the lock. answer is zero; it is of no use when there is an error.
func (sh *shard) decide(part *partition, k *Key, rule *Rule, now algo.Instant, call *Call, each []algo.Decision, answer *Answer) error {
	if !part.open {
		return ErrShut
	}
	sh.expireReservationsOn(part, k, rule, now)
	switch {
	case call.Cost < 0 && call.Always:
		return sh.refundCall(part, k, rule, now, call, each, answer)
	case call.Extend:
		return sh.extend(part, k, rule, now, call, each, answer)
	}
	guarded := rule.Guarded()
	if !guarded && !part.followed && call.RequestID == "" && call.Reservation == (ReservationID{}) && (rule.Ban == 0 || !call.Always) {
		// Nobody has to be told, and there is nothing to be remembered.
		if state, number := sh.stateOf(&part.table, k, rule); state != nil {
			used := sh.begins(number)
			part.lower(rule.Limits, state, stateID{rule.Scope, k.Key}, now)
			err := rule.Limits.DecideTo(sh.arena, state, now, &call.Request, each, &answer.Decision)
			sh.ends(number, used)
			if err != nil {
				return sh.noRoom()
			}
			if answer.Allowed || rule.Ban == 0 {
				if part.extras != nil {
					answer.Pending = part.awaits(stateID{rule.Scope, k.Key}, now.Mono)
				}
				return nil
			}
			*answer = Answer{} // a refusal, which left no trace, may begin a ban
		}
	}
	if guarded {
		if err := part.guard(rule, call.Boot, answer); err != nil {
			return err
		}
	}
	if call.RequestID != "" && call.Cost > 0 && part.extras != nil {
		if m, ok := part.extras.answers.get(answerKey{stateID{rule.Scope, k.Key}, call.RequestID, answerCharge}, now.Mono); ok {
			return sh.again(part, k, rule, now, call, m, each, answer)
		}
	}
	if call.Reservation != (ReservationID{}) && call.Cost > 0 {
		if err := sh.reservable(part, k, rule, now, call); err != nil {
			return err
		}
	}
	slot, found := sh.find(&part.table, k.Hash, rule.Scope, k.Key)
	var err error
	// mark is the state's before the change, for followers that have it up to here; 0 where they need the whole.
	var mark uint64
	var filled bool
	var banned time.Duration
	var r record
	request := &call.Request
	if found {
		adopted := false
		if r = sh.record(part.ref(slot)); r.spec.rule != rule {
			if adopted, err = sh.adoptState(part, slot, rule, now); err != nil {
				return err
			}
			r = sh.record(part.ref(slot))
		}
		if adopted && part.followed {
			sh.note(part, r, 0)
		}
		if r.has(lentFlag) {
			if loans := sh.expireLoans(part, r, now); loans != nil {
				beside := loans.beside(call.Request, now)
				request = &beside
			}
		}
		if banned = sh.banLeft(r, now); banned > 0 && !call.Always {
			sh.refuseBanned(r, now, banned, request, each, answer)
			return nil
		}
		if call.Whole && request.Held > 0 && call.wantsBack(rule.Limits.Room(sh.arena, r.state, now), request.Held) {
			answer.OnLoan, answer.OnLoanFor = request.Held, request.HeldFor
			return nil
		}
		mark = sh.markOf(part, r)
	} else {
		if call.Cost == 0 {
			answer.Decision, err = sh.peekNew(part, rule, now, call, each)
			answer.Pending = part.awaits(stateID{rule.Scope, k.Key}, now.Mono)
			return err
		}
		if slot, filled, err = sh.enter(part, k, rule, now, call.Caller); err != nil {
			return err
		}
		r = sh.record(part.ref(slot))
	}
	number := uint32(r.words[1] >> 32)
	used := sh.begins(number)
	part.lower(rule.Limits, r.state, stateID{rule.Scope, k.Key}, now)
	err = rule.Limits.DecideTo(sh.arena, r.state, now, request, each, &answer.Decision)
	sh.ends(number, used)
	d := &answer.Decision
	// A refusal that is counted changes the state, too.
	denied := (part.followed || filled) && err == nil && !d.Allowed && call.Cost != 0 && !call.Always && countsDenied(rule.Limits)
	if !found && (err != nil || d.Granted == 0) && (filled && !denied || sh.idle(r, now)) {
		sh.drop(&part.table, slot)
		denied = false
	}
	if err != nil {
		return sh.noRoom()
	}
	if d.Granted > 0 {
		if part.followed {
			sh.note(part, r, mark)
		}
		if call.RequestID != "" || call.Reservation != (ReservationID{}) {
			sh.remember(part, k, rule, r.state, now, call, d)
			answer.Reservation = call.Reservation
		}
		if rule.Durability >= Escrow && !answer.Degraded {
			answer.Ticket = sh.ticket(part, k, rule, now, call, d.Granted)
		}
	} else {
		if denied && part.followed {
			sh.note(part, r, mark)
		}
		if call.Always && call.Cost > 0 && call.RequestID != "" {
			// As much is owed as may be. Repeated when there is room again it would be another charge.
			sh.remember(part, k, rule, nil, now, call, d)
		}
	}
	if part.extras != nil {
		answer.Pending = part.awaits(stateID{rule.Scope, k.Key}, now.Mono)
	}
	if request.Held > 0 && !d.Allowed && !call.Always {
		answer.OnLoan, answer.OnLoanFor = sh.onLoan(rule, request, d)
	}
	switch {
	case banned > 0:
		answer.banned(banned, call.Spent)
	case found && sh.bans(part, k, rule, now, call, request, d):
		r.ban(int64(r.state[0]) + int64(rule.Ban))
		answer.banned(rule.Ban, false)
		answer.Bans = true
		if part.followed {
			sh.note(part, r, 0)
		}
		if rule.Durability >= Escrow && !answer.Degraded {
			// Who has been told of the ban is not to be admitted because its owner was lost.
			answer.Ticket = max(answer.Ticket, sh.wait(part, k.Partition))
		}
	}
	return nil
}

// wantsBack reports whether units on loan, returned, would let a call grant more, or find room for what it charges. A call that is refused
// without them does not need to ask before.
func (c *Call) wantsBack(room, held int64) bool {
	least := c.Cost
	if c.Partial {
		least = 1
	}
	return (c.Partial || c.Always) && c.Cost > 0 && room >= least && c.Cost > room-held
}

// ticket returns the ticket that the answer to a grant needs. An allowance stands for units only: a request id or a reservation that
// the caller has been told of must be in the copy. The reservation of an atomic check is not told to the caller.
func (sh *shard) ticket(part *partition, k *Key, rule *Rule, now algo.Instant, call *Call, units int64) (ticket uint64) {
	if rule.Durability == Escrow {
		ticket = sh.advance(part, *k, rule, now, units)
	}
	if rule.Durability == Sync || call.RequestID != "" || call.Reservation != (ReservationID{}) && !call.ReserveOnce {
		ticket = sh.wait(part, k.Partition)
	}
	return ticket
}

// remember keeps a charge under its request id, and as a reservation.
func (sh *shard) remember(part *partition, k *Key, rule *Rule, state algo.State, now algo.Instant, call *Call, d *algo.Decision) {
	of := stateID{rule.Scope, k.Key}
	if call.RequestID != "" {
		m := answered{cost: call.Cost, granted: d.Granted, over: !d.Allowed, delay: d.Delay, lease: d.Lease, reservation: call.Reservation}
		sh.rememberAnswer(part, of, answerCharge, call.RequestID, call.Caller, rule, now, m)
	}
	if call.Reservation != (ReservationID{}) {
		e := reservation{
			id: call.Reservation, units: d.Granted, until: now.Mono + int64(max(call.ReserveFor, 0)),
			once: call.ReserveOnce, release: rule.ReleaseExpired && !call.ReserveOnce, caller: call.Caller,
		}
		// A charge without room may have charged each limit another number of units.
		exact := d.Allowed || !call.Always || len(rule.Limits) == 1
		held := part.ensureExtras().reservations.put(of, k.Hash, e, rule.Limits.NewHold(state, exact), &sh.budget)
		part.noteReservation(reservationKey{held.of, e.id}, &sh.budget)
	}
}

// rememberAnswer keeps what was answered to a request.
func (sh *shard) rememberAnswer(part *partition, of stateID, kind answerKind, id, caller string, rule *Rule, now algo.Instant, m answered) {
	m.until = now.Mono + int64(keepFor(rule.Limits))
	k := answerKey{stateID{of.scope, strings.Clone(of.key)}, strings.Clone(id), kind}
	part.ensureExtras().answers.put(k, m, caller, now.Mono, sh.store.answerBounds(), &sh.budget)
	if part.followed {
		part.extras.bump()
		part.recount()
	}
}

// again answers a repeated request id: the admission that was made, beside the state as it is now.
func (sh *shard) again(part *partition, k *Key, rule *Rule, now algo.Instant, call *Call, m answered, each []algo.Decision, a *Answer) error {
	if m.cost != call.Cost || !sameUse(m.reservation, call.Reservation) {
		return ErrRequestID
	}
	peek := Call{Request: algo.Request{TTL: call.TTL, Always: call.Always}, Boot: call.Boot}
	if err := sh.decide(part, k, rule, now, &peek, each, a); err != nil {
		return err
	}
	a.Allowed, a.Granted, a.Delay, a.Lease, a.Reservation = !m.over, m.granted, m.delay, m.lease, m.reservation
	if a.Allowed {
		a.RetryAfter, a.Banned = 0, false
	}
	if rule.Durability >= Escrow {
		// The first answer may still be waiting for the backup.
		a.Ticket = sh.wait(part, k.Partition)
	}
	return nil
}

// sameUse reports whether a charge under one reservation id may be a repetition of a charge under another: both are of none, both
// make a reservation, whose id is drawn anew each time, or both add to the same one, of which each addition is a part.
func sameUse(first, now ReservationID) bool {
	none := ReservationID{}
	switch {
	case first == none || now == none:
		return first == now
	case first.part() == 0 || now.part() == 0:
		return first.part() == now.part()
	}
	return first.Whole() == now.Whole()
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

// begin makes a new key's state: fresh, or filled where what was counted before is lost and matters.
func (sh *shard) begin(part *partition, rule *Rule, state algo.State, now algo.Instant) (filled bool, err error) {
	if lost := part.lostOf(rule, now); lost.is {
		rule.Limits.Init(state, lost.at)
		return true, rule.Limits.Fill(sh.arena, state, lost.at)
	}
	rule.Limits.Init(state, now)
	return false, nil
}

// lostOf says since when what was counted before is lost and matters to keys of a rule.
func (p *partition) lostOf(rule *Rule, now algo.Instant) coldness {
	a := p.extras
	if a == nil || !rule.ColdClosed && !rule.Strict {
		return coldness{}
	}
	lost := a.cold
	if !rule.ColdClosed || rule.Strict && a.coldStrict.is && (!lost.is || a.coldStrict.at.Mono > lost.at.Mono) {
		lost = a.coldStrict
		lost.is = lost.is && rule.Strict
	}
	lost.is = lost.is && now.Mono-lost.at.Mono < int64(rule.Limits.Horizon())
	return lost
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

// existing calls f with the key's record under the given rule, and not at all where there is none. f reports whether it
// changed the state.
func (sh *shard) existing(part *partition, k Key, rule *Rule, now algo.Instant, f func(record) bool) error {
	slot, ok := sh.find(&part.table, k.Hash, rule.Scope, k.Key)
	if !ok {
		return nil
	}
	adopted, err := sh.adoptState(part, slot, rule, now)
	if err != nil {
		return err
	}
	r := sh.record(part.ref(slot))
	var mark uint64
	if !adopted && part.unnoted(r) {
		mark = rule.Limits.Mark(r.state)
	}
	var changed bool
	sh.counted(r, func() { changed = f(r) })
	if (changed || adopted) && part.followed {
		sh.note(part, r, mark)
	}
	return nil
}

// Refund gives units back, the oldest first, and returns how many. Under a requestID that is known for the key's refunds it
// gives back nothing and returns what the first one did; the error is ErrRequestID when that was of another number of units.
// The empty id is none. caller is who asks, empty when that is not known. Like everything that only gives back it needs no lease.
func (s *Store) Refund(k Key, rule *Rule, now algo.Instant, units int64, requestID, caller string) (n int64, err error) {
	s.with(k.Partition, func(sh *shard, part *partition) {
		if err = part.shut(); err != nil {
			return
		}
		n, err = sh.refund(part, k, rule, now, units, requestID, caller)
	})
	return n, s.refusedRoom(err, rule, caller)
}

// refund is Refund under the lock, for a partition that is open.
func (sh *shard) refund(part *partition, k Key, rule *Rule, now algo.Instant, units int64, requestID, caller string) (n int64, err error) {
	of := stateID{rule.Scope, k.Key}
	if requestID != "" && part.extras != nil {
		if m, ok := part.extras.answers.get(answerKey{of, requestID, answerRefund}, now.Mono); ok {
			if m.cost != units {
				return 0, ErrRequestID
			}
			return m.granted, nil
		}
	}
	err = sh.existing(part, k, rule, now, func(r record) bool {
		n = rule.Limits.Refund(sh.arena, r.state, now, units)
		return n > 0
	})
	if err == nil && requestID != "" {
		sh.rememberAnswer(part, of, answerRefund, requestID, caller, rule, now, answered{cost: units, granted: n})
	}
	return n, err
}

// refundCall answers a call of a negative cost.
func (sh *shard) refundCall(part *partition, k *Key, rule *Rule, now algo.Instant, call *Call, each []algo.Decision, answer *Answer) error {
	if rule.Guarded() {
		// What is given back needs no lease, but the answer does: nothing is done without it.
		if err := part.guard(rule, call.Boot, answer); err != nil {
			return err
		}
	}
	n, err := sh.refund(part, *k, rule, now, -call.Cost, call.RequestID, call.Caller)
	if err != nil {
		return err
	}
	look := Call{Request: algo.Request{Always: true}, Boot: call.Boot, Spent: true}
	if err := sh.decide(part, k, rule, now, &look, each, answer); err != nil {
		return err
	}
	answer.Allowed, answer.Granted, answer.RetryAfter = true, -n, 0
	return nil
}

// Renew lets a lease live for ttl from now; boot is as in Call.
func (s *Store) Renew(k Key, rule *Rule, now algo.Instant, lease uint64, ttl time.Duration, boot int64) (n Renewal, err error) {
	s.with(k.Partition, func(sh *shard, part *partition) {
		var a Answer
		if err = part.guard(rule, boot, &a); err != nil {
			return
		}
		n.Degraded, n.Until = a.Degraded, a.Until
		err = sh.existing(part, k, rule, now, func(r record) bool {
			n.Left, n.Alive = rule.Limits.Renew(sh.arena, r.state, now, lease, ttl)
			return n.Alive
		})
		if n.Alive && rule.Durability >= Escrow {
			n.Ticket = sh.wait(part, k.Partition)
		}
	})
	return n, s.refusedRoom(err, rule, "")
}

// Release ends a lease and reports whether it was alive.
func (s *Store) Release(k Key, rule *Rule, now algo.Instant, lease uint64) (ok bool, err error) {
	s.with(k.Partition, func(sh *shard, part *partition) {
		if err = part.shut(); err != nil {
			return
		}
		err = sh.existing(part, k, rule, now, func(r record) bool {
			ok = rule.Limits.Release(sh.arena, r.state, now, lease)
			return ok
		})
	})
	return ok, s.refusedRoom(err, rule, "")
}

// extend adds to a pending reservation.
func (sh *shard) extend(part *partition, k *Key, rule *Rule, now algo.Instant, call *Call, each []algo.Decision, answer *Answer) error {
	of := stateID{rule.Scope, k.Key}
	if part.extras == nil {
		return ErrNotPending
	}
	all := &part.extras.reservations
	p, parts := all.parts(reservationKey{of, call.Reservation}, now.Mono)
	if len(parts) == 0 {
		return ErrNotPending
	}
	until := p.list[parts[0]].until
	if call.ReserveFor > 0 {
		until = now.Mono + int64(call.ReserveFor)
	}
	more := *call
	more.Extend, more.ReserveFor = false, time.Duration(until-now.Mono)
	if more.Cost == 0 {
		more.Reservation, more.RequestID, more.Always, more.Spent = ReservationID{}, "", true, true
	} else {
		var last uint32
		for _, i := range parts {
			last = max(last, p.list[i].id.part())
		}
		if last == math.MaxUint32 {
			return ErrKeyReservations
		}
		more.Reservation = call.Reservation.numbered(last + 1)
	}
	if err := sh.decide(part, k, rule, now, &more, each, answer); err != nil {
		return err
	}
	if call.Cost == 0 {
		answer.Allowed, answer.RetryAfter = true, 0
	}
	if answer.Allowed {
		p, parts = all.parts(reservationKey{of, call.Reservation}, now.Mono)
		for _, i := range parts {
			if p.list[i].until != until {
				p.list[i].until = until
				all.first = min(all.first, until)
				part.noteReservation(reservationKey{p.of, p.list[i].id}, &sh.budget)
			}
		}
		answer.Reservation = call.Reservation
		if rule.Durability >= Escrow && !answer.Degraded {
			answer.Ticket = sh.wait(part, k.Partition)
		}
	}
	return nil
}

// Settlement says how a reservation is to end.
type Settlement struct {
	ID   ReservationID
	Keep int64 // units that stay charged
	// Exact refuses to keep more than what was reserved. Without it that is charged whether or not there is room for it.
	Exact bool
	// Bounded refuses to charge more beyond what was reserved than the largest of the limits, and brings the key no further than that
	// beyond a limit.
	Bounded bool
	Whole   bool  // as in Call: of the charge of an excess
	Boot    int64 // as in Call, like Caller
	// Caller is who asks.
	Caller string
}

// Settled is what came of a Settlement.
type Settled struct {
	// Known is unset when there is no such reservation (it has ended or expired): nothing has changed.
	Known    bool
	Returned int64 // units that were given back
	Excess   int64 // units that were charged beyond what was reserved
	Over     bool  // there was no room for all of the excess
	OnLoan   int64 // as in Answer: nothing was done
	// Of the charge of an excess, as in Answer.
	Ticket   uint64
	Degraded bool
	Until    int64
}

// Settle ends a reservation: of what it charged, and what was added to it, some units stay and the rest is given back, what was
// added last first. Of one that was ended by keeping the same number of units it returns the first answer again, for as long as a
// request id is remembered. The error is ErrReserved, and nothing changes, when Keep is more than what it charged and the
// Settlement is Exact; ErrExcess when it is Bounded and that is too much more.
func (s *Store) Settle(k Key, rule *Rule, now algo.Instant, how Settlement) (out Settled, err error) {
	s.with(k.Partition, func(sh *shard, part *partition) {
		if err = part.shut(); err == nil && part.extras != nil {
			out, err = sh.settle(part, k, rule, now, &how)
		}
	})
	return out, s.refusedRoom(err, rule, how.Caller)
}

func (sh *shard) settle(part *partition, k Key, rule *Rule, now algo.Instant, how *Settlement) (out Settled, err error) {
	of := stateID{rule.Scope, k.Key}
	sh.expireReservationsOn(part, &k, rule, now)
	all := &part.extras.reservations
	held, parts := all.parts(reservationKey{of, how.ID}, now.Mono)
	if len(parts) == 0 {
		m, ended := part.extras.answers.get(answerKey{of, string(how.ID[:]), answerSettled}, now.Mono)
		if ended && m.cost == how.Keep {
			out = Settled{Known: true, Returned: m.granted, Excess: m.excess, Over: m.over}
			if (m.excess > 0 || rule.ReleaseExpired && how.Keep > 0) && rule.Durability >= Escrow {
				out.Ticket = sh.wait(part, k.Partition)
			}
		}
		return out, nil
	}
	out.Known = true
	var units int64
	once, release, caller := false, false, held.list[parts[0]].caller
	for _, i := range parts {
		units += held.list[i].units
		once, release = once || held.list[i].once, release || held.list[i].release
	}
	switch {
	case how.Keep < 0, how.Keep > units && how.Exact:
		return out, ErrReserved
	case how.Bounded && how.Keep-units > rule.Limits.Highest():
		return out, ErrExcess
	case how.Keep > units:
		var answer Answer
		charge := algo.Request{Cost: how.Keep - units, Always: true, Bounded: how.Bounded, MaxDebt: rule.Limits.Highest()}
		excess := Call{Request: charge, Boot: how.Boot, Spent: true, Whole: how.Whole, Caller: how.Caller}
		if err := sh.decide(part, &k, rule, now, &excess, nil, &answer); err != nil || answer.OnLoan > 0 {
			return Settled{Known: true, OnLoan: answer.OnLoan}, err
		}
		out.Excess, out.Over = answer.Granted, !answer.Allowed
		out.Degraded, out.Until = answer.Degraded, answer.Until
	}
	back := max(units-how.Keep, 0)
	err = sh.existing(part, k, rule, now, func(r record) bool {
		left := back
		for _, i := range slices.Backward(parts) {
			n := min(left, held.list[i].units)
			left -= n
			out.Returned += rule.Limits.GiveBack(sh.arena, r.state, now, held.holds, i, n, part.toldOf(r, &held.list[i]))
		}
		return out.Returned > 0
	})
	if err != nil {
		return out, err
	}
	for _, i := range slices.Backward(parts) {
		id := held.list[i].id
		all.remove(held, i, &sh.budget)
		part.noteReservation(reservationKey{held.of, id}, &sh.budget)
	}
	if !once {
		sh.rememberAnswer(part, of, answerSettled, string(how.ID[:]), caller, rule, now,
			answered{cost: how.Keep, granted: out.Returned, excess: out.Excess, over: out.Over})
	}
	// A copy that takes over without knowing of the commit would give back what is kept.
	if (out.Excess > 0 || release && how.Keep > 0) && rule.Durability >= Escrow && !out.Degraded {
		out.Ticket = sh.wait(part, k.Partition)
	}
	return out, nil
}

// toldOf reports whether a follower has been told of a record with a reservation's units in it.
func (p *partition) toldOf(r record, e *reservation) bool {
	if p.role == nil {
		return false
	}
	for slot, f := range p.role.followers {
		if f != nil && e.told[slot] && f.knows(r.spec.rule) {
			return true
		}
	}
	return false
}

// Reset makes the key's state as new, and forgets the request ids and reservations charged to it: what they were charged
// is gone. What is on loan stays so.
func (s *Store) Reset(k Key, scope string) (err error) {
	of := stateID{scope, k.Key}
	s.with(k.Partition, func(sh *shard, part *partition) {
		if err = part.shut(); err != nil {
			return
		}
		lent := false
		slot, changed := sh.find(&part.table, k.Hash, scope, k.Key)
		if changed {
			r := sh.record(part.ref(slot))
			if r.has(owedFlag) {
				delete(part.extras.owed, of)
			}
			sh.endAdvance(part, k.Hash, of)
			lent = r.has(lentFlag)
			if !lent {
				sh.drop(&part.table, slot)
			}
		}
		if a := part.extras; a != nil {
			changed = a.answers.forget(of) || changed
			changed = a.reservations.forget(of, &sh.budget) || changed
		}
		if changed {
			part.noteReset(resetKey{k.Hash, stateID{scope, strings.Clone(k.Key)}}, &sh.budget)
		}
		if lent {
			// What is on loan is not known to be spent, and stays held.
			r := sh.record(part.ref(slot))
			r.clear(owedFlag)
			r.lift()
			sh.counted(r, func() {
				newest := algo.Instant{Mono: int64(r.state[0])}
				r.spec.rule.Limits.Free(sh.arena, r.state)
				r.spec.rule.Limits.Init(r.state, newest)
			})
			sh.note(part, r, 0)
		}
	})
	return err
}

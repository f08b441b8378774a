package store

import (
	"math"
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
)

// A reservation ends by Settle: Keep of its units stay charged, the rest is given back. Extensions are reservations
// with an id of their own (ReservationID); Settle ends them together with the first charge, and gives back the units of
// the newest first. What is kept beyond the reserved units is charged first, because that charge may fail and the end
// cannot.

// extend answers a call that adds to a pending reservation.
func (sh *shard) extend(p *plan, call *Call, answer *Answer) error {
	part, now := p.part, p.now
	if part.extras == nil {
		return ErrNotPending
	}
	all, key := &part.extras.reservations, reservationKey{p.id(), call.Reservation}
	reserved, charges := all.charges(key, now.Mono)
	if len(charges) == 0 {
		return ErrNotPending
	}
	until := reserved.list[charges[0]].until
	if call.ReserveFor > 0 {
		until = now.Mono + int64(call.ReserveFor)
	}
	more := *call
	more.Extend, more.ReserveFor = false, time.Duration(until-now.Mono)
	if more.Cost == 0 {
		more.Reservation, more.RequestID, more.Always, more.Spent = ReservationID{}, "", true, true
	} else {
		var last uint32
		for _, i := range charges {
			last = max(last, reserved.list[i].id.extension())
		}
		if last == math.MaxUint32 {
			return ErrKeyReservations
		}
		more.Reservation = call.Reservation.numbered(last + 1)
	}
	if err := sh.decide(part, &p.k, p.rule, now, &more, p.each, answer); err != nil {
		return err
	}
	if call.Cost == 0 {
		answer.Allowed, answer.RetryAfter = true, 0
	}
	if answer.Allowed {
		reserved, charges = all.charges(key, now.Mono)
		for _, i := range charges {
			if reserved.list[i].until != until {
				reserved.list[i].until = until
				all.first = min(all.first, until)
				part.noteReservation(reservationKey{reserved.of, reserved.list[i].id}, p.rule.Persist, &sh.budget)
			}
		}
		answer.Reservation = call.Reservation
		if p.rule.Durability >= Escrow {
			answer.Ticket = sh.wait(part, p.k.Partition, p.rule)
		}
	}
	return nil
}

// Settlement says how a reservation is to end.
type Settlement struct {
	ID   ReservationID
	Keep int64 // units that stay charged
	// Exact refuses to keep more than what was reserved. Without it that is charged whether or not there is room for
	// it.
	Exact bool
	// Bounded refuses to charge more beyond what was reserved than the largest of the limits, and brings the key no
	// further than that beyond a limit.
	Bounded bool
	Whole   bool   // as in Call: of the charge of an excess
	Boot    int64  // as in Call, like Caller
	Caller  string // empty: not known
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

// Settle ends a reservation: of what it charged, and what was added to it, some units stay and the rest is given back,
// what was added last first. Of one that was ended by keeping the same number of units it returns the first answer
// again, for as long as a request id is remembered. The error is ErrReserved, and nothing changes, when Keep is more
// than what it charged and the Settlement is Exact; ErrExcess when it is Bounded and that is too much more.
func (s *Store) Settle(k Key, rule *Rule, now algo.Instant, how Settlement) (out Settled, err error) {
	err = s.ifOpen(k.Partition, func(sh *shard, part *partition) (err error) {
		if part.extras != nil {
			out, err = sh.settle(part, k, rule, now, &how)
		}
		return err
	})
	return out, s.refusedRoom(err, rule, how.Caller)
}

func (sh *shard) settle(part *partition, k Key, rule *Rule, now algo.Instant,
	how *Settlement) (out Settled, err error) {
	of := stateID{rule.Scope, k.Key}
	sh.expireReservationsOn(part, &k, rule, now)
	all := &part.extras.reservations
	reserved, charges := all.charges(reservationKey{of, how.ID}, now.Mono)
	if len(charges) == 0 {
		return sh.settledBefore(part, k, rule, now, how), nil
	}
	out.Known = true
	var units int64
	once, release, caller := false, false, reserved.list[charges[0]].caller.label
	for _, i := range charges {
		units += reserved.list[i].units
		once, release = once || reserved.list[i].once, release || reserved.list[i].release
	}
	if how.Keep < 0 || how.Keep > units && how.Exact {
		return out, ErrReserved
	}
	if how.Keep > units {
		if err := sh.chargeExcess(part, k, rule, now, how, how.Keep-units, &out); err != nil || out.OnLoan > 0 {
			return out, err
		}
	}
	err = sh.existing(part, k, rule, now, func(r record) bool {
		left := max(units-how.Keep, 0)
		for _, i := range slices.Backward(charges) {
			n := min(left, reserved.list[i].units)
			left -= n
			out.Returned += rule.Limits.GiveBack(sh.arena, r.state, now, reserved.holds, i, n,
				part.toldOf(r, &reserved.list[i]))
		}
		return out.Returned > 0
	})
	if err != nil {
		return out, err
	}
	for _, i := range slices.Backward(charges) {
		id := reserved.list[i].id
		all.remove(reserved, i, &sh.budget)
		part.noteReservation(reservationKey{reserved.of, id}, rule.Persist, &sh.budget)
	}
	if !once {
		sh.rememberAnswer(part, of, answerSettled, string(how.ID[:]), caller, rule, now,
			answered{cost: how.Keep, granted: out.Returned, excess: out.Excess, over: out.Over})
	}
	// A copy that takes over without knowing of the commit would give back what is kept.
	if (out.Excess > 0 || release && how.Keep > 0) && rule.Durability >= Escrow {
		out.Ticket = sh.wait(part, k.Partition, rule)
	}
	return out, nil
}

// settledBefore is what came of a Settlement of a reservation that is not pending.
func (sh *shard) settledBefore(part *partition, k Key, rule *Rule, now algo.Instant, how *Settlement) (out Settled) {
	key := answerKey{stateID{rule.Scope, k.Key}, string(how.ID[:]), answerSettled}
	m, ended := part.extras.answers.get(key, now.Mono)
	if !ended || m.cost != how.Keep {
		return out
	}
	out = Settled{Known: true, Returned: m.granted, Excess: m.excess, Over: m.over}
	if (m.excess > 0 || rule.ReleaseExpired && how.Keep > 0) && rule.Durability >= Escrow {
		out.Ticket = sh.wait(part, k.Partition, rule)
	}
	return out
}

// chargeExcess charges units beyond those of a reservation. It charges nothing where loans are to be recalled before.
func (sh *shard) chargeExcess(part *partition, k Key, rule *Rule, now algo.Instant, how *Settlement, units int64,
	out *Settled) error {
	most := rule.Limits.Highest()
	if how.Bounded && units > most {
		return ErrExcess
	}
	var answer Answer
	charge := algo.Request{Cost: units, Always: true, Bounded: how.Bounded, MaxDebt: most}
	call := Call{Request: charge, Boot: how.Boot, Spent: true, Whole: how.Whole, Caller: how.Caller}
	err := sh.decide(part, &k, rule, now, &call, nil, &answer)
	if out.OnLoan = answer.OnLoan; err == nil && out.OnLoan == 0 {
		out.Excess, out.Over = answer.Granted, !answer.Allowed
		out.Degraded, out.Until = answer.Degraded, answer.Until
	}
	return err
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

package store

import (
	"math"
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
)

// This file extends and ends reservations (reservation.go). The path of Settle:
//
//  1. It finds the reservation and its extensions, which are reservations whose ids differ in the number only. If there
//     is none, settledBefore repeats the answer of an earlier Settle.
//  2. If Keep is above the sum of their units, chargeExcess charges the difference. This comes first, because the
//     charge may fail and the end cannot.
//  3. It gives back the units above Keep, those of the newest extension first.
//  4. It drops the reservations and remembers the answer under the reservation's id, unless the reservation is of an
//     atomic check (once).
//
// extend is called by before (decide.go) in place of a decision. It has decide charge the added units as a reservation
// with the next number, and then sets the ttl of all.

// extend answers a call that adds units, time or both to a pending reservation.
func (sh *shard) extend(p *plan, call *Call, answer *Answer) error {
	part, now := p.part, p.now
	if part.extras == nil {
		return ErrNotPending
	}
	all := &part.extras.reservations
	reserved, charges := all.charges(p.id(), p.k.Hash, call.Reservation, now.Mono)
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
		err := sh.existing(part, p.k, p.rule, now, func(record) bool {
			reserved, charges = all.charges(p.id(), p.k.Hash, call.Reservation, now.Mono)
			for _, i := range charges {
				reserved.list[i].until = until
			}
			all.first = min(all.first, until)
			return true
		})
		if err != nil {
			return err
		}
		answer.Reservation = call.Reservation
		if p.rule.Durability >= Escrow {
			answer.Ticket = sh.wait(part, p.k.Partition, p.rule)
		}
	}
	return nil
}

// Settlement says how a reservation ends.
type Settlement struct {
	ID   ReservationID
	Keep int64 // units that stay charged
	// Exact refuses a Keep above what was reserved. Otherwise the excess is charged even if too few units are left.
	Exact bool
	// Bounded refuses an excess above the largest of the limits, and brings the key no further than that beyond a
	// limit.
	Bounded bool
	Whole   bool   // as in Call: of the charge of an excess
	Boot    int64  // as in Call, like Caller
	Caller  string // empty: not known
}

// Settled is the answer to a Settlement.
type Settled struct {
	// Known is false if there is no such reservation (it has ended or expired): nothing was changed.
	Known    bool
	Returned int64 // units that were given back
	Excess   int64 // units that were charged beyond what was reserved
	Over     bool  // the excess exceeds the units that were left
	OnLoan   int64 // as in Answer; if it is above 0, nothing was changed
	// As in Answer; Degraded and Until are those of the charge of an excess.
	Ticket   uint64
	Degraded bool
	Until    int64
}

// Settle ends a reservation and its extensions: Keep of their units stay charged, and the rest is given back, the
// newest first. If the reservation was settled with the same Keep before, Settle returns the first answer again, for as
// long as a request id is remembered. After an error nothing has changed. The error is ErrReserved if Keep is above
// what was reserved and the Settlement is Exact, and ErrExcess if the excess is above what Bounded allows.
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
	reserved, charges := all.charges(of, k.Hash, how.ID, now.Mono)
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
			out.Returned += rule.Limits.GiveBack(sh.arena, r.state, now, reserved.holds, i, n)
		}
		return true
	})
	if err != nil {
		return out, err
	}
	for _, i := range slices.Backward(charges) {
		all.remove(reserved, i, &sh.budget)
	}
	if !once {
		sh.rememberAnswer(part, of, answerSettled, string(how.ID[:]), caller, rule, now,
			answered{cost: how.Keep, granted: out.Returned, excess: out.Excess, over: out.Over})
	}
	// Otherwise a backup that claims the partition without knowing of the commit would give back the units that are
	// kept.
	if (out.Excess > 0 || release && how.Keep > 0) && rule.Durability >= Escrow {
		out.Ticket = sh.wait(part, k.Partition, rule)
	}
	return out, nil
}

// settledBefore returns the remembered answer to a Settlement of a reservation that is not pending.
func (sh *shard) settledBefore(part *partition, k Key, rule *Rule, now algo.Instant, how *Settlement) (out Settled) {
	key := answerKey{stateID{rule.Scope, k.Key}, string(how.ID[:]), answerSettled}
	m, ended := part.extras.answers.get(key, now.Mono)
	if !ended || m.cost != how.Keep {
		return out
	}
	out = Settled{Known: true, Returned: m.granted, Excess: m.excess, Over: m.over}
	if how.Keep > 0 && rule.Durability >= Escrow { // as in settle, if the reservation had release
		out.Ticket = sh.wait(part, k.Partition, rule)
	}
	return out
}

// chargeExcess charges units above those of a reservation. If loans must be recalled first, it sets out.OnLoan and
// charges nothing.
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

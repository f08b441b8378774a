package store

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"strings"

	"github.com/weirlimit/weir/algo"
)

// This file keeps the pending reservations of a partition, and ends those whose ttl is over. The path of a reservation:
//
//	beforeReservation     returns an error if the bounds allow no more reservations
//	afterReservation      adds it to its state's list, with an algo.Hold, which knows where its units are
//	extend                adds an extension, which is a reservation of its own (settle.go)
//	Settle                ends it and its extensions by commit or cancel (settle.go)
//	expireReservationsOf  ends it after its ttl. Its units stay charged, or are given back if it has release
//
// A reservation whose hold was lost (lose) gives nothing back.
//
// Bounds: MaxReservations of the whole store, whose last eighth is for callers with less than a fair part (share.go),
// and MaxKeyReservations of a key.
//
// Other files must keep: lower is called before each operation that may charge a state, and lose when a state is
// dropped, filled, converted or merged.

// ReservationID identifies a reservation of a state. Its first extensionAt bytes are random, because a caller that can
// guess them can end the reservation. The other bytes are the number of the extension, which is 0 in the id that
// callers have: each extension with units is a reservation of its own. The zero value is none.
type ReservationID [16]byte

// extensionAt is the offset of an extension's number in a ReservationID.
const extensionAt = 12

// Whole returns the id of the reservation to which an extension belongs.
func (id ReservationID) Whole() ReservationID { return id.numbered(0) }

func (id ReservationID) numbered(extension uint32) ReservationID {
	binary.BigEndian.PutUint32(id[extensionAt:], extension)
	return id
}

func (id ReservationID) extension() uint32 { return binary.BigEndian.Uint32(id[extensionAt:]) }

// reservationBytes is how many bytes a pending reservation is counted as, besides the texts of its state.
const reservationBytes = 256

// reservationKey is a reservation's id and its state.
type reservationKey struct {
	of stateID
	id ReservationID
}

// reservation is a charge of which units may still be given back.
type reservation struct {
	id    ReservationID
	units int64
	until int64 // Mono instant of the end of its ttl
	once  bool  // the answer to its commit or cancel is not remembered
	// release says that the holder gives the units back at the end of the ttl. Otherwise they stay charged.
	release bool
	persist bool        // its rule has Persist
	caller  *account    // of the caller that made it
	told    [slots]bool // the follower in the slot was sent the state after the charge
}

// reservations has the pending reservations of one partition. The zero value is empty and ready for use.
type reservations struct {
	by    map[stateID]*pending
	count int
	// No reservation expires before this Mono instant.
	first int64
}

// pending has the reservations of one state, in the order of their charges.
type pending struct {
	of    stateID
	hash  uint64
	list  []reservation
	holds algo.Holds // one for each reservation of the list
}

// get returns the reservations of a state, and the index of the reservation with the id, or -1. ok reports whether its
// ttl has not ended at now.
func (r *reservations) get(k reservationKey, now int64) (p *pending, i int, ok bool) {
	if p = r.by[k.of]; p == nil {
		return nil, -1, false
	}
	i = slices.IndexFunc(p.list, func(e reservation) bool { return e.id == k.id })
	return p, i, i >= 0 && now < p.list[i].until
}

// charges returns the indices of a reservation and its extensions, in the order in which they were charged. It returns
// none if the reservation is not pending, or if the id is that of an extension.
func (r *reservations) charges(k reservationKey, now int64) (p *pending, charges []int) {
	p, _, ok := r.get(k, now)
	if !ok || k.id.extension() != 0 {
		return p, nil
	}
	for i := range p.list {
		if p.list[i].id.Whole() == k.id && now < p.list[i].until {
			charges = append(charges, i)
		}
	}
	return p, charges
}

// of returns the reservations of a state, and makes them if there are none. It keeps a copy of the key's text.
func (r *reservations) of(of stateID, hash uint64) *pending {
	if p := r.by[of]; p != nil {
		return p
	}
	if r.by == nil {
		r.by = make(map[stateID]*pending)
	}
	of.key = strings.Clone(of.key)
	p := &pending{of: of, hash: hash}
	r.by[of] = p
	return p
}

// put adds the newest reservation of a state. It does not check the bounds, which beforeReservation has done.
func (r *reservations) put(of stateID, hash uint64, e reservation, caller string, hold algo.Hold,
	b *shardBudget) *pending {
	if p, i, _ := r.get(reservationKey{of, e.id}, 0); i >= 0 {
		r.remove(p, i, b)
	}
	if r.count == 0 || e.until < r.first {
		r.first = e.until
	}
	p := r.of(of, hash)
	p.list, p.holds = append(p.list, e), append(p.holds, hold)
	r.count++
	p.list[len(p.list)-1].caller = b.takeReservation(caller, reservationBytes+of.size())
	return p
}

// lower lowers the holds of a state before an operation that may charge it, see algo.Limits.Lower.
func (c *content) lower(limits algo.Limits, state algo.State, of stateID, now algo.Instant) {
	if c.extras == nil || c.extras.reservations.count == 0 {
		return
	}
	if p := c.extras.reservations.by[of]; p != nil {
		limits.Lower(state, now, p.holds)
	}
}

// lose has the reservations of a record give nothing back, because its state is dropped, filled, converted or merged.
func (c *content) lose(r record) {
	if c.extras == nil || c.extras.reservations.count == 0 {
		return
	}
	if p := c.extras.reservations.by[r.id()]; p != nil {
		p.holds.Lose()
	}
}

// remove drops the i-th reservation of a state. Its units stay charged.
func (r *reservations) remove(p *pending, i int, b *shardBudget) {
	b.giveReservation(p.list[i].caller, reservationBytes+p.of.size())
	p.list = slices.Delete(p.list, i, i+1)
	p.holds = p.holds.Remove(i)
	r.count--
	if len(p.list) == 0 {
		delete(r.by, p.of)
	}
	if r.count == 0 {
		*r = reservations{}
	}
}

// expireReservations ends the reservations of a partition whose ttl is over.
func (sh *shard) expireReservations(part *partition, now algo.Instant) {
	r := &part.extras.reservations
	if r.count == 0 || now.Mono < r.first {
		return
	}
	first := int64(math.MaxInt64)
	for _, p := range ordered(r.by) {
		first = min(first, sh.expireReservationsOf(part, p, now))
	}
	r.first = first
}

// expireReservationsOn ends the reservations on one key whose ttl is over. It is called before each decision on the
// key.
func (sh *shard) expireReservationsOn(part *partition, k *Key, rule *Rule, now algo.Instant) {
	a := part.extras
	if a == nil || a.reservations.count == 0 || now.Mono < a.reservations.first {
		return
	}
	if p := a.reservations.by[stateID{rule.Scope, k.Key}]; p != nil {
		sh.expireReservationsOf(part, p, now)
	}
}

// expireReservationsOf ends the reservations of one state whose ttl is over, and returns when the next one expires. If
// a reservation has release, the holder gives its units back and tells the followers, as after a cancel. A copy keeps a
// reservation with release until the holder says that it has ended, so that it gives the units back if it takes over.
func (sh *shard) expireReservationsOf(part *partition, p *pending, now algo.Instant) (next int64) {
	all := &part.extras.reservations
	next = math.MaxInt64
	for i := len(p.list) - 1; i >= 0; i-- {
		switch e := p.list[i]; {
		case e.until > now.Mono, e.release && !part.open:
			next = min(next, e.until)
		case e.release:
			sh.releaseExpired(part, p, i, now)
			all.remove(p, i, &sh.budget)
			part.noteReservation(reservationKey{p.of, e.id}, e.persist, &sh.budget)
		default:
			all.remove(p, i, &sh.budget)
		}
	}
	return next
}

// releaseExpired gives back the units of the i-th reservation of a state.
func (sh *shard) releaseExpired(part *partition, p *pending, i int, now algo.Instant) {
	slot, ok := sh.find(&part.table, p.hash, p.of.scope, p.of.key)
	if !ok {
		return
	}
	r, e := sh.record(part.ref(slot)), &p.list[i]
	mark := part.markOf(r)
	var n int64
	sh.counted(r, func() {
		n = r.spec.rule.Limits.GiveBack(sh.arena, r.state, now, p.holds, i, e.units, part.toldOf(r, e))
	})
	if n > 0 {
		sh.note(part, r, mark)
	}
}

// forget drops the reservations of one state and reports whether there were any.
func (r *reservations) forget(of stateID, b *shardBudget) bool {
	p := r.by[of]
	if p == nil {
		return false
	}
	for len(p.list) > 0 {
		r.remove(p, len(p.list)-1, b)
	}
	return true
}

// each calls do for every reservation.
func (r *reservations) each(do func(k reservationKey, persist bool)) {
	for of, p := range ordered(r.by) {
		for i := range p.list {
			do(reservationKey{of, p.list[i].id}, p.list[i].persist)
		}
	}
}

func (r *reservations) free(b *shardBudget) {
	for of := range r.by {
		r.forget(of, b)
	}
}

// beforeReservation returns an error if a bound allows no more reservations. The key's bound does not apply to the
// reservations of atomic checks (ReserveOnce), because the node that was asked soon ends them.
func (sh *shard) beforeReservation(p *plan, call *Call) error {
	part, k, rule, now := p.part, p.k, p.rule, p.now
	if call.Cost <= 0 {
		return nil
	}
	most, ofKey := sh.store.cfg.MaxReservations, 0
	if part.extras != nil {
		sh.expireReservations(part, now)
		if reserved := part.extras.reservations.by[stateID{rule.Scope, k.Key}]; reserved != nil {
			ofKey = len(reserved.list)
		}
	}
	n, bytes := int(sh.budget.reservations.Load()), reservationBytes+stateID{rule.Scope, k.Key}.size()
	err := sh.store.shares.mayReserve(call.Caller, int64(n), int64(most), sh.budget.used.Load())
	switch {
	case ofKey >= sh.store.cfg.MaxKeyReservations && !call.ReserveOnce:
		err = ErrKeyReservations
	case err == ErrShareReservations:
		sh.store.shares.refused(rule.Scope, call.Caller)
	case n >= most:
		err = ErrReservations
	case !sh.budget.has(bytes):
		return errNoRoom
	}
	if errors.Is(err, ErrReservations) {
		sh.budget.reservationsRejected.Add(1)
	}
	return err
}

// inFlight reports whether a pending reservation belongs to an atomic check, which may still be cancelled.
func (p *pending) inFlight(now int64) bool {
	return slices.ContainsFunc(p.list, func(e reservation) bool { return e.once && now < e.until })
}

// awaits reports whether the key has pending reservations.
func (p *partition) awaits(of stateID, now int64) bool {
	if p.extras == nil || p.extras.reservations.count == 0 {
		return false
	}
	reserved := p.extras.reservations.by[of]
	return reserved != nil && slices.ContainsFunc(reserved.list, func(e reservation) bool { return now < e.until })
}

// afterReservation makes a reservation of what was charged.
func (sh *shard) afterReservation(p *plan, call *Call, answer *Answer) {
	d := &answer.Decision
	e := reservation{id: call.Reservation, units: d.Granted, once: call.ReserveOnce, persist: p.rule.Persist}
	e.release = (p.rule.ReleaseExpired || call.Release) && !call.ReserveOnce
	e.until = p.now.Mono + int64(max(call.ReserveFor, 0))
	// A charge with Always beyond the limits may have charged each limit another number of units.
	exact := d.Allowed || !call.Always || len(p.rule.Limits) == 1
	hold := p.rule.Limits.NewHold(p.r.state, exact)
	reserved := p.part.ensureExtras().reservations.put(p.id(), p.k.Hash, e, call.Caller, hold, &sh.budget)
	p.part.noteReservation(reservationKey{reserved.of, e.id}, p.rule.Persist, &sh.budget)
	answer.Reservation = call.Reservation
}

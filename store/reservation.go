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
// A reservation whose hold was lost (lose) gives nothing back. A record with reservations is not dropped, but by a
// reset, and they are sent to the followers with it.
//
// Bounds: MaxReservations of the whole store, whose last eighth is for callers with less than a fair part (share.go),
// and MaxKeyReservations of a key.
//
// Other files must keep: lower is called before each operation that may charge a state, and lose when a state is
// filled, converted or merged.

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

// reservation is a charge of which units may still be given back.
type reservation struct {
	id    ReservationID
	units int64
	until int64 // Mono instant of the end of its ttl
	once  bool  // the answer to its commit or cancel is not remembered
	// release says that the holder gives the units back at the end of the ttl. Otherwise they stay charged.
	release bool
	caller  *account // of the caller that made it
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

// charges returns the indices of a reservation and its extensions, in the order in which they were charged. It returns
// none if the reservation is not pending, or if the id is that of an extension.
func (r *reservations) charges(of stateID, hash uint64, id ReservationID, now int64) (p *pending, charges []int) {
	if p = r.by[of]; p == nil || p.hash != hash {
		return nil, nil
	}
	for i := range p.list {
		if p.list[i].id.Whole() == id && now < p.list[i].until {
			charges = append(charges, i)
		}
	}
	return p, charges
}

// put adds the newest reservation of a state. It does not check the bounds, which beforeReservation has done. It keeps a
// copy of the key's text.
func (r *reservations) put(of stateID, hash uint64, e reservation, caller string, hold algo.Hold, b *shardBudget) {
	if p := r.by[of]; p != nil && p.hash != hash {
		r.forget(of, b) // a chunk had the key under a hash that is not its own: only one record has reservations
	}
	if r.count == 0 || e.until < r.first {
		r.first = e.until
	}
	p := r.by[of]
	if p == nil {
		if r.by == nil {
			r.by = make(map[stateID]*pending)
		}
		of.key = strings.Clone(of.key)
		p = &pending{of: of, hash: hash}
		r.by[of] = p
	}
	p.list, p.holds = append(p.list, e), append(p.holds, hold)
	r.count++
	p.list[len(p.list)-1].caller = b.takeReservation(caller, reservationBytes+of.size())
}

// lower lowers the holds of a record before an operation that may charge it, see algo.Limits.Lower.
func (c *content) lower(r record, now algo.Instant) {
	if p := c.reserved(r); p != nil {
		r.spec.rule.Limits.Lower(r.state, now, p.holds)
	}
}

// lose has the reservations of a record give nothing back, because its state is filled, converted or merged.
func (c *content) lose(r record) {
	if p := c.reserved(r); p != nil {
		p.holds.Lose()
	}
}

// reserved returns the reservations of a record; nil if it has none.
func (c *content) reserved(r record) *pending {
	if c.extras == nil || c.extras.reservations.count == 0 {
		return nil
	}
	if p := c.extras.reservations.by[stateID{r.spec.rule.Scope, string(r.key)}]; p != nil && p.hash == r.hash() {
		return p
	}
	return nil
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
		default:
			all.remove(p, i, &sh.budget)
		}
	}
	return next
}

// releaseExpired gives back the units of the i-th reservation of a state, and tells the followers that it has ended.
func (sh *shard) releaseExpired(part *partition, p *pending, i int, now algo.Instant) {
	slot, ok := sh.find(&part.table, p.hash, p.of.scope, p.of.key)
	if !ok {
		return
	}
	r := sh.record(part.ref(slot))
	mark := part.markOf(r)
	sh.counted(r, func() {
		r.spec.rule.Limits.GiveBack(sh.arena, r.state, now, p.holds, i, p.list[i].units)
	})
	sh.note(part, r, mark)
}

// forget drops the reservations of one state.
func (r *reservations) forget(of stateID, b *shardBudget) {
	for p := r.by[of]; p != nil && len(p.list) > 0; {
		r.remove(p, len(p.list)-1, b)
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

// hasReservations reports whether a key has pending reservations.
func (p *partition) hasReservations(of stateID, now int64) bool {
	if p.extras == nil || p.extras.reservations.count == 0 {
		return false
	}
	reserved := p.extras.reservations.by[of]
	return reserved != nil && slices.ContainsFunc(reserved.list, func(e reservation) bool { return now < e.until })
}

// afterReservation makes a reservation of what was charged.
func (sh *shard) afterReservation(p *plan, call *Call, answer *Answer) {
	d := &answer.Decision
	e := reservation{id: call.Reservation, units: d.Granted, once: call.ReserveOnce}
	e.release = (p.rule.ReleaseExpired || call.Release) && !call.ReserveOnce
	e.until = p.now.Mono + int64(max(call.ReserveFor, 0))
	var hold algo.Hold
	// A charge with Always beyond the limits may have charged each limit another number of units.
	if d.Allowed || !call.Always || len(p.rule.Limits) == 1 {
		hold = p.rule.Limits.NewHold(p.r.state)
	}
	p.part.ensureExtras().reservations.put(p.id(), p.k.Hash, e, call.Caller, hold, &sh.budget)
	answer.Reservation = call.Reservation
}

package store

import "github.com/weirlimit/weir/algo"

// reservationBytes is what a pending reservation is taken to cost when bytes are counted.
const reservationBytes = 160

// reservationKey is a reservation's id in its scope.
type reservationKey struct {
	key uint64 // hash of scope and key
	id  uint64
}

// reservation is a charge that may still be given back.
type reservation struct {
	units int64
	until int64 // Mono instant from which on it stays as it is
}

// reservations are those of one partition. The zero value is empty and ready for use.
type reservations struct {
	by    map[reservationKey]reservation
	ofKey map[uint64]int // how many a key has, by hash
	// No reservation expires before this Mono instant.
	first int64
}

func (r *reservations) get(k reservationKey, now int64) (reservation, bool) {
	e, ok := r.by[k]
	return e, ok && now < e.until
}

// put remembers a charge; reservable has made sure that there may be one more.
func (r *reservations) put(k reservationKey, e reservation, b *shardBudget) {
	if r.by == nil {
		*r = reservations{by: make(map[reservationKey]reservation), ofKey: make(map[uint64]int), first: e.until}
	}
	r.first = min(r.first, e.until)
	if _, known := r.by[k]; !known {
		b.count(reservationBytes)
		r.ofKey[k.key]++
	}
	r.by[k] = e
}

func (r *reservations) remove(k reservationKey, b *shardBudget) {
	if _, known := r.by[k]; !known {
		return
	}
	b.Give(reservationBytes)
	delete(r.by, k)
	if r.ofKey[k.key]--; r.ofKey[k.key] == 0 {
		delete(r.ofKey, k.key)
	}
	if len(r.by) == 0 {
		*r = reservations{}
	}
}

// expire forgets those whose time is over.
func (r *reservations) expire(now int64, b *shardBudget) {
	if len(r.by) == 0 || now < r.first {
		return
	}
	first := int64(1<<63 - 1)
	for k, e := range r.by {
		if e.until <= now {
			r.remove(k, b)
		} else {
			first = min(first, e.until)
		}
	}
	r.first = first
}

// forget drops those of one key and reports whether there were any.
func (r *reservations) forget(hash uint64, b *shardBudget) bool {
	if r.ofKey[hash] == 0 {
		return false
	}
	for k := range r.by {
		if k.key == hash {
			r.remove(k, b)
		}
	}
	return true
}

func (r *reservations) free(b *shardBudget) {
	b.Give(reservationBytes * len(r.by))
	*r = reservations{}
}

// reservable says whether the partition has room for one more reservation.
func (sh *shard) reservable(part *partition, now algo.Instant) error {
	pending := 0
	if part.annex != nil {
		part.annex.reservations.expire(now.Mono, &sh.budget)
		pending = len(part.annex.reservations.by)
	}
	if pending >= sh.store.cfg.MaxReservations {
		sh.store.full.Add(1)
		return ErrFull
	}
	if !sh.budget.Take(reservationBytes) {
		return errNoRoom
	}
	sh.budget.Give(reservationBytes)
	return nil
}

// awaits reports whether reservations on the key are pending.
func (p *partition) awaits(hash uint64, now int64) bool {
	if p.annex == nil || p.annex.reservations.ofKey[hash] == 0 {
		return false
	}
	for k, e := range p.annex.reservations.by {
		if k.key == hash && now < e.until {
			return true
		}
	}
	return false
}

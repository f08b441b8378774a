package store

import (
	"slices"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
)

// Escrow lets the holder answer before its backup has confirmed, because it has told the backup before to take so many
// units more for spent than the state shows. A holder that takes over charges them. Every message about a key carries
// the state and that allowance, two chunks; what has been granted since any message that the backup may have as its
// last one must not be more than that message allowed. So the holder keeps for each key that is in use up to which of
// its grants each such message covers: of the last confirmed one and of all that were sent after it.
//
// Changes go out with every drain, like all others. Once half of an allowance is used up the drain is asked for at
// once, so that in the ordinary case no answer waits. What a key has not used for a while is given back: the key
// becomes pending, and its message allows nothing. That is looked for by Drain and by Sweep.
//
// Under a rule with Persist there are no allowances: each answer waits for the disk, which takes longer than the
// backup.

// quietAfter is how long after its last grant a key's allowance is given back.
const quietAfter = time.Second

// advanceBytes is what one is taken to cost when bytes are counted.
const advanceBytes = 192

// owing is what a copy's holder may have granted beyond the copy.
type owing struct {
	hash      uint64 // of the state
	advanced  int64  // by that holder
	inherited int64  // by one before, not charged yet
}

func (o *owing) none() bool { return o.advanced == 0 && o.inherited == 0 }

// advance is what the backup has been told to take for spent on one key.
type advance struct {
	hash    uint64
	granted int64 // ever, since this was made
	last    int64 // Mono instant of the last grant
	// What messages cover, the oldest first: that of the last confirmed one, and of those after it. Where they do not
	// fit the last two are taken for one that covers what both do.
	covers [3]struct {
		version uint64
		granted int64
	}
	n int
}

// advances are those of one partition.
type advances struct {
	by     map[stateID]*advance
	looked int64 // Mono instant at which idle ones were looked for
}

func (a *advances) free(b *shardBudget) {
	for of := range a.by {
		b.Give(advanceBytes + of.size())
	}
	*a = advances{}
}

// settle forgets the messages that a later confirmed one has replaced.
func (a *advance) settle(confirmed uint64) {
	for a.n > 1 && a.covers[1].version <= confirmed {
		copy(a.covers[:], a.covers[1:a.n])
		a.n--
	}
}

// covered is the number of grants, of all, that every message covers that the backup may have as its last.
func (a *advance) covered() int64 {
	least := a.covers[0].granted
	for _, c := range a.covers[1:a.n] {
		least = min(least, c.granted)
	}
	return least
}

// told notes a message that allows so many more.
func (a *advance) told(version uint64, allowed int64) {
	granted := a.granted + allowed
	if a.n == len(a.covers) {
		a.n--
		granted = min(granted, a.covers[a.n].granted)
	}
	a.covers[a.n].version, a.covers[a.n].granted = version, granted
	a.n++
}

// chunkOf is the number of units by which allowances are told: a twentieth of the smallest limit.
func chunkOf(limits algo.Limits) int64 {
	least := algo.MaxLimit
	for i := range limits {
		if l := &limits[i]; l.Limit != algo.Unlimited {
			least = min(least, l.Limit)
			if l.Capacity != 0 {
				least = min(least, l.Capacity)
			}
		}
	}
	return max(1, least/20)
}

// advance counts a grant and returns the ticket that its answer needs.
func (sh *shard) advance(part *partition, k Key, rule *Rule, now algo.Instant, units int64) (ticket uint64) {
	all := &part.role.advances
	of := stateID{rule.Scope, k.Key}
	a := all.by[of]
	if a == nil {
		if all.by == nil {
			all.by = make(map[stateID]*advance)
		}
		part.await()
		// Nothing is covered: what the backup has confirmed so far allowed nothing.
		a = &advance{hash: k.Hash, n: 1}
		of.key = strings.Clone(of.key)
		all.by[of] = a
		sh.budget.count(advanceBytes + of.size())
	}
	a.granted += units
	a.last = now.Mono
	a.settle(part.backup().confirmed)
	switch covered := a.covered(); {
	case a.granted > covered:
		return sh.wait(part, k.Partition, rule)
	case a.granted > a.covers[a.n-1].granted-chunkOf(rule.Limits):
		sh.urge(k.Partition)
	}
	return 0
}

// allow is the allowance that a message about a key carries.
func (part *partition) allow(r record, now algo.Instant) int64 {
	f := part.backup()
	if f == nil {
		return 0
	}
	a := part.role.advances.by[stateID{r.spec.rule.Scope, string(r.key)}]
	if a == nil {
		return 0
	}
	var allowed int64
	if part.open && now.Mono-a.last < int64(quietAfter) && r.spec.rule.Durability == Escrow && !r.spec.rule.Persist {
		allowed = 2 * chunkOf(r.spec.rule.Limits)
	}
	a.settle(f.confirmed)
	a.told(part.extras.version, allowed)
	return allowed
}

// giveBack makes keys pending whose allowance has not been used for a while, and forgets those that have none left.
func (sh *shard) giveBack(part *partition, now algo.Instant) {
	f := part.backup()
	if f == nil || len(part.role.advances.by) == 0 || now.Mono-part.role.advances.looked < int64(quietAfter)/4 {
		return
	}
	all := &part.role.advances
	all.looked = now.Mono
	var quiet []stateID // few of them: to sort all takes longer than everything else that a grant costs
	for of, a := range all.by {
		if now.Mono-a.last >= int64(quietAfter) {
			quiet = append(quiet, of)
		}
	}
	slices.SortFunc(quiet, stateID.compare)
	for _, of := range quiet {
		a := all.by[of]
		a.settle(f.confirmed)
		switch {
		case a.n == 1 && a.covers[0].granted <= a.granted:
			delete(all.by, of)
			sh.budget.Give(advanceBytes + of.size())
		case a.covers[a.n-1].granted <= a.granted:
			// Given back already, or never more than asked for; the confirmation is on its way.
		default:
			if slot, ok := sh.find(&part.table, a.hash, of.scope, of.key); ok {
				r := sh.record(part.ref(slot))
				sh.note(part, r, r.spec.rule.Limits.Mark(r.state))
			}
		}
	}
}

// endAdvance ends the allowance of a state that is gone: the copy forgets it when it is told that the record is. A new
// record begins with none, so that its first answer waits.
func (sh *shard) endAdvance(part *partition, hash uint64, of stateID) {
	if part.role == nil || part.role.advances.by[of] == nil {
		return
	}
	delete(part.role.advances.by, of)
	sh.budget.Give(advanceBytes + of.size())
	if f := part.backup(); f != nil {
		part.extras.bump()
		f.push(turn{hash: hash}, &sh.budget)
		part.recount()
	}
}

// afterGuard gives the answer to a grant the ticket that it needs. An allowance stands for units only: a request id or
// a reservation that the caller has been told of must be in the copy. The reservation of an atomic check is not told to
// the caller.
func (sh *shard) afterGuard(p *plan, call *Call, answer *Answer) {
	if p.rule.Durability < Escrow || answer.Degraded && !p.rule.Persist {
		return
	}
	if p.rule.Durability == Escrow && !p.rule.Persist {
		answer.Ticket = sh.advance(p.part, p.k, p.rule, p.now, answer.Granted)
	}
	if p.rule.Durability == Sync || p.rule.Persist || p.has(concernID) ||
		p.has(concernReservation) && !call.ReserveOnce {
		answer.Ticket = sh.wait(p.part, p.k.Partition, p.rule)
	}
}

package store

import (
	"slices"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
)

// This file has the allowances of escrow: under a durability of Escrow the holder may answer before its backup has
// confirmed the charge. Before that, it has told the backup to count so many units more as spent than the state shows:
// the allowance. A backup that claims the partition charges the allowance. The path of one:
//
//	advance     counts what a call has charged. If the allowance covers the charge, the answer need not wait
//	allow       returns the allowance of a key for a message that Drain writes: two steps (chunkOf), or 0 if the key
//	            is not in use
//	told        notes in covers how many of the key's units that message covers
//	giveBack    makes a key pending that was not charged for quietAfter, or whose partition is shut, so that its next
//	            message allows 0. Drain and the sweep call it
//	endAdvance  ends the allowance of a record that is gone
//
// The backup may have any of several messages as its last one: the last that it has confirmed, and each that was sent
// after it. A charge is covered only if all of these messages cover it.
//
// Changes are sent with each drain. When half of an allowance is used up, advance asks for a drain at once (urge), so
// that usually no answer waits.
//
// Under a rule with Persist there are no allowances: each answer waits for the disk, which takes longer than the
// backup.

// quietAfter is how long after its last charge giveBack gives a key's allowance back.
const quietAfter = time.Second

// advanceBytes is how many bytes an advance is counted as, besides the texts of its state.
const advanceBytes = 192

// owing has the units that holders may have charged beyond a copy's state.
type owing struct {
	hash  uint64 // of the state
	units int64
}

// advance has how many units of one key were charged, and how many of them the messages to the backup cover.
type advance struct {
	hash    uint64
	granted int64 // units charged since the advance was made
	last    int64 // Mono instant of the last charge
	// covers has, for each message that the backup may have as its last, how many of the granted units it covers: for
	// the last confirmed message, and for those after it, the oldest first. If there are too many, the last two share
	// an entry, which has the smaller number of units and the later version.
	covers [3]struct {
		version uint64
		granted int64
	}
	n       int
	allowed int64 // by the last message
}

// advances has the advances of one partition.
type advances struct {
	by     map[stateID]*advance
	looked int64 // Mono instant at which giveBack last looked for idle keys
}

func (a *advances) free(b *shardBudget) {
	for of := range a.by {
		b.Give(advanceBytes + of.size())
	}
	*a = advances{}
}

// settle drops the messages before the last one that is confirmed.
func (a *advance) settle(confirmed uint64) {
	for a.n > 1 && a.covers[1].version <= confirmed {
		copy(a.covers[:], a.covers[1:a.n])
		a.n--
	}
}

// covered returns how many of the granted units are covered by every message that the backup may have as its last.
func (a *advance) covered() int64 {
	least := a.covers[0].granted
	for _, c := range a.covers[1:a.n] {
		least = min(least, c.granted)
	}
	return least
}

// told notes a message that allows so many units beyond those charged so far.
func (a *advance) told(version uint64, allowed int64) {
	granted := a.granted + allowed
	a.allowed = allowed
	if a.n == len(a.covers) {
		a.n--
		granted = min(granted, a.covers[a.n].granted)
	}
	a.covers[a.n].version, a.covers[a.n].granted = version, granted
	a.n++
}

// chunkOf returns the step of allowances in units: a twentieth of the smallest limit, and at least 1. It has nothing to
// do with the chunks of chunk.go.
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

// advance counts units that were charged to a key, and returns the ticket of the answer; 0: the answer need not wait.
func (sh *shard) advance(part *partition, k Key, rule *Rule, now algo.Instant, units int64) (ticket uint64) {
	all := &part.role.advances
	of := stateID{rule.Scope, k.Key}
	a := all.by[of]
	if a == nil {
		if all.by == nil {
			all.by = make(map[stateID]*advance)
		}
		part.await()
		// Nothing is covered, because what the backup has confirmed so far has allowed nothing.
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

// allow returns the allowance that a message about a key carries, and notes the message.
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

// giveBack makes the keys pending that were not charged for quietAfter, and all keys of a partition that is shut, so
// that their next message allows 0. It drops the advances whose last confirmed message allows nothing more.
func (sh *shard) giveBack(part *partition, now algo.Instant) {
	f := part.backup()
	if f == nil || len(part.role.advances.by) == 0 ||
		part.open && now.Mono-part.role.advances.looked < int64(quietAfter)/4 {
		return
	}
	all := &part.role.advances
	all.looked = now.Mono
	var quiet []stateID // only these are sorted, because to sort all keys takes longer than to charge them
	for of, a := range all.by {
		if !part.open || now.Mono-a.last >= int64(quietAfter) {
			quiet = append(quiet, of)
		}
	}
	slices.SortFunc(quiet, stateID.compare)
	for _, of := range quiet {
		a := all.by[of]
		a.settle(f.confirmed)
		switch {
		case a.n == 1 && a.allowed == 0:
			delete(all.by, of)
			sh.budget.Give(advanceBytes + of.size())
		case a.allowed == 0:
			// The confirmation of the last message has not come yet.
		default:
			if slot, ok := sh.find(&part.table, a.hash, of.scope, of.key); ok {
				r := sh.record(part.ref(slot))
				sh.note(part, r, r.spec.rule.Limits.Mark(r.state))
			}
		}
	}
}

// endAdvance ends the allowance of a state that is gone: it makes the hash pending, so that the backup is told that the
// record is gone. A new record begins without an allowance, so that its first answer waits.
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

// afterGuard gives the answer to a charge its ticket. An allowance covers units only. So the backup must have confirmed
// a request id, and a reservation, unless that is of an atomic check, whose caller is not told of it.
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

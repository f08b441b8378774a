package store

import (
	"math"
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
)

// After an unplanned claim two processes may have gone on from the same state, and what both then admitted has to be
// added up one day without counting their common past twice. Ticks have no identity, so the states themselves do not tell.
// Therefore a content knows its lineage, the claims under which it was made, and keeps beside each state, in a table of its
// own for each claim, what was charged under that claim: its delta. A merge is one side's whole states and the other
// side's deltas of the claims that the one side knows nothing, or less, of.
//
// The first claim of a lineage has no table, as a rule: its delta is whatever the tables do not hold. Nor does a key need one that
// was first seen under a claim, or of which everything older has expired: its state is its delta (record.since).
//
// The first claim has a table where it began with nothing, because what an earlier holder counted was lost (Cold): another
// process may turn up with it. Then each state is its delta, but for one that is repaid by and by: that of two processes would
// be repaid twice. Its twin in the table is not repaid.
//
// What a lost holder may have admitted to strict rules ahead of the copy (escrow), or is not known to have (ColdStrict), is charged
// under the claim that follows as well: the content of another claimant may not have it. To other rules it is not: the lost holder may
// turn up, and would have it twice.
//
// Deltas are charges alone. Neither a refund nor what a reservation gives back is taken from them, so that a merge may hold back too much, never too
// little. A concurrency limit has none: leases have identity, and a merge unites
// them.

// element is a claim of a lineage.
type element struct {
	claim ownership.Claim
	// seen is the version, of those that were counted under the claim, up to which the content has what was done under it.
	// Of the last element it is the extras' version and not this.
	seen uint64
	// none is the same of what is kept under a durability of None, of which a copy may have less; everything where it has as much.
	none uint64
	// at is a Mono instant, of the claim or of a merge, after which nothing was charged under any claim before this one.
	at    int64
	delta *table // nil: what was charged under it cannot be told from the rest
	// mixed, of the first element: what was charged under claims that are no longer named is not told from the rest either.
	mixed bool
}

// everything is element.none of a content that leaves nothing out.
const everything = math.MaxUint64

const (
	// maxLineage is how many claims a lineage names. To forget one means to count what was done under it twice, should a
	// content be met that has it.
	maxLineage = 16
	// The tables have deltaShare times as many records as there are keys, and deltaSpare more: beyond that the oldest are given up,
	// which means the same where a content is met that lacks them. Nodes that hear others one way only may claim every few seconds,
	// and charge little in between.
	deltaShare = 3
	deltaSpare = 16
)

// coldness is an instant at which what an earlier holder had counted was given up for lost.
type coldness struct {
	is bool
	at algo.Instant
}

// newestDelta is the table that grants are charged to besides their states; nil when there is none.
func (c *content) newestDelta() *table {
	if c.extras == nil || len(c.extras.lineage) == 0 {
		return nil
	}
	return c.extras.lineage[len(c.extras.lineage)-1].delta
}

// place returns where a claim stands in the lineage; -1 where it does not.
func (c *content) place(claim ownership.Claim) int {
	if c.extras == nil {
		return -1
	}
	return slices.IndexFunc(c.extras.lineage, func(e element) bool { return e.claim == claim })
}

func (c *content) seenAt(i int) uint64 {
	if i == len(c.extras.lineage)-1 {
		return c.extras.version
	}
	return c.extras.lineage[i].seen
}

func (c *content) noneAt(i int) uint64 { return min(c.extras.lineage[i].none, c.seenAt(i)) }

// chargeDelta charges units to the key's delta under the newest claim, if it has one.
func (sh *shard) chargeDelta(part *partition, r record, now algo.Instant, units int64) {
	delta := part.newestDelta()
	if delta == nil {
		return
	}
	newest := len(part.extras.lineage) - 1
	rule := r.spec.rule
	if rule.Limits[0].Algorithm == algo.Concurrency {
		return
	}
	if newest == 0 {
		sh.forced(func() { sh.chargeTwin(part, delta, r, now, units) })
		return
	}
	if r.since() >= newest {
		return
	}
	if now.Mono-part.extras.lineage[newest].at > int64(rule.Limits.Horizon()) {
		// Nothing from before the claim is left in the state.
		r.setSince(newest)
		sh.dropDeltas(&part.content, r.hash(), r.id())
		return
	}
	sh.forced(func() { sh.addDelta(part, delta, r, now, units) })
}

// chargeTwin charges units to what the first claim's table holds of a state to which they have been charged.
func (sh *shard) chargeTwin(part *partition, delta *table, r record, now algo.Instant, units int64) {
	rule := r.spec.rule
	_, found := sh.find(delta, r.hash(), rule.Scope, string(r.key))
	switch {
	case found && now.Mono-part.extras.lineage[0].at <= int64(rule.Limits.Horizon()):
		sh.addDelta(part, delta, r, now, units)
	case found || repaid(rule.Limits):
		sh.twin(part, delta, r, now)
	}
}

// twin makes a state's record in a delta's table the same as the state.
func (sh *shard) twin(part *partition, delta *table, of record, now algo.Instant) {
	rule := of.spec.rule
	k := Key{Hash: of.hash(), Key: string(of.key)}
	slot, found := sh.find(delta, k.Hash, rule.Scope, k.Key)
	var err error
	if !found {
		slot, err = sh.insert(delta, k, rule, now, of.spec.caller.label, false)
	} else {
		_, err = sh.adopt(delta, slot, rule, now)
	}
	if err != nil {
		return // the arena has no numbers for blocks left
	}
	r := sh.record(delta.ref(slot))
	sh.counted(r, func() {
		rule.Limits.Free(sh.arena, r.state)
		rule.Limits.Init(r.state, now)
		err = rule.Limits.Merge(sh.arena, r.state, now, of.state)
	})
	if err == nil {
		sh.note(part, r, 0, true)
	}
}

// stands says whether a state of a content's is all that was charged under the first claim it may have been charged under, so
// that no delta needs to be looked at.
func (sh *shard) stands(c *content, r record) bool {
	a := c.extras
	switch {
	case r.since() > 0:
		return true
	case len(a.lineage) == 0 || a.lineage[0].delta == nil:
		return false
	}
	for i := range a.lineage {
		d := a.lineage[i].delta
		if d == nil || i > 0 && !repaid(r.spec.rule.Limits) {
			continue
		}
		if _, ok := sh.find(d, r.hash(), r.spec.rule.Scope, string(r.key)); ok {
			return false
		}
	}
	return true
}

// repaid says whether units go away little by little, as from a bucket. What such a state holds depends on all that it held
// before, so what was admitted under a claim is told from the rest by a delta alone, which keeps it all (algo.Limits.Hold):
// not by the state having been empty, nor by the delta's being so if it had been repaid.
func repaid(limits algo.Limits) bool {
	for i := range limits {
		if a := limits[i].Algorithm; a == algo.TokenBucket || a == algo.LeakyBucket {
			return true
		}
	}
	return false
}

// slides says whether limits have a sliding counter among them.
func slides(limits algo.Limits) bool {
	return slices.ContainsFunc(limits, func(l algo.Limit) bool { return l.Algorithm == algo.SlidingCounter })
}

// keepsDelta says whether a delta under the rule is needed even where nothing seems to be left in it.
func (p *partition) keepsDelta(rule *Rule, now algo.Instant) bool {
	if p.extras == nil || len(p.extras.lineage) == 0 || !repaid(rule.Limits) {
		return false
	}
	newest := &p.extras.lineage[len(p.extras.lineage)-1]
	return now.Mono-newest.at <= int64(rule.Limits.Horizon())
}

func (sh *shard) addDelta(part *partition, delta *table, of record, now algo.Instant, units int64) {
	rule := of.spec.rule
	k := Key{Hash: of.hash(), Key: string(of.key)}
	slot, found := sh.find(delta, k.Hash, rule.Scope, k.Key)
	if !found {
		var err error
		if slot, err = sh.insert(delta, k, rule, now, of.spec.caller.label, false); err != nil {
			return // the arena has no numbers for blocks left
		}
	} else {
		r := sh.record(delta.ref(slot))
		r.spec.rule.Limits.Hold(r.state, now)
		adopted, err := sh.adopt(delta, slot, rule, now)
		if err != nil {
			return
		}
		if adopted {
			sh.note(part, sh.record(delta.ref(slot)), 0, true)
		}
	}
	r := sh.record(delta.ref(slot))
	var mark uint64
	if found && part.unnoted(r) {
		mark = rule.Limits.Mark(r.state)
	}
	var err error
	sh.counted(r, func() { err = rule.Limits.ChargeApart(sh.arena, r.state, now, of.state, units) })
	if err == nil {
		sh.note(part, r, mark, true)
	}
}

// adoptState is adopt for the content's own state at a slot and for its deltas, so that what was charged under a claim goes on to
// count as the state does, and is told to followers that have been told nothing of it under a durability of None. A state that becomes one that is
// repaid gets a delta where it stood for one.
func (sh *shard) adoptState(part *partition, slot uint32, rule *Rule, now algo.Instant) (changed bool, err error) {
	r := sh.record(part.ref(slot))
	if r.spec.rule == rule {
		return false, nil
	}
	old := r.spec.rule.Limits
	of := r.id()
	changed, err = sh.adopt(&part.table, slot, rule, now)
	if !changed || err != nil || part.extras == nil {
		return changed, err
	}
	r = sh.record(part.ref(slot))
	converted := !sameLimits(old, rule.Limits)
	if converted {
		part.lose(r)
	}
	sh.forced(func() {
		if i := r.since(); converted && i > 0 && i < len(part.extras.lineage) && repaid(rule.Limits) {
			if d := part.extras.lineage[i].delta; d != nil {
				sh.twin(part, d, r, now)
			}
			r.setSince(0)
		}
		for i := range part.extras.lineage {
			d := part.extras.lineage[i].delta
			if d == nil {
				continue
			}
			at, found := sh.find(d, r.hash(), of.scope, of.key)
			if !found || sh.record(d.ref(at)).spec.rule == rule {
				continue
			}
			if held := sh.record(d.ref(at)); converted {
				held.spec.rule.Limits.Hold(held.state, now)
			}
			if _, err := sh.adopt(d, at, rule, now); err == nil { // otherwise the arena has no numbers for blocks left
				sh.note(part, sh.record(d.ref(at)), 0, true)
			}
		}
	})
	return changed, nil
}

// dropDeltas drops a key's deltas under all claims, and reports whether there were any.
func (sh *shard) dropDeltas(c *content, hash uint64, of stateID) bool {
	if c.extras == nil {
		return false
	}
	found := false
	for i := range c.extras.lineage {
		if d := c.extras.lineage[i].delta; d != nil {
			found = sh.dropState(d, hash, of) || found
		}
	}
	return found
}

// prune drops what of the lineage cannot matter any more: claims before one that is older than anything counts, and
// deltas in which nothing is left.
func (sh *shard) prune(part *partition, now algo.Instant) {
	a := part.extras
	if len(a.lineage) == 0 || len(a.lineage) == 1 && a.lineage[0].delta == nil || part.count == 0 {
		return // of keys that are still to come it is not known for how long they count
	}
	horizon := max(sh.horizon(), leastHorizon)
	pruned := false
	for len(a.lineage) > 1 && now.Mono-a.lineage[1].at > horizon {
		sh.forget(&part.content, false)
		pruned = true
	}
	if e := &a.lineage[0]; len(a.lineage) == 1 && e.delta != nil && now.Mono-e.at > horizon {
		sh.giveUp(e)
		pruned = true
	}
	if pruned {
		part.noteHistory()
		part.retrace()
	}
}

// leastHorizon is how long a claim is remembered, whatever the keys that there are: a key that counts for longer may be the next.
const leastHorizon = int64(time.Hour)

// horizon is how long anything counts that is in the shard.
func (sh *shard) horizon() (longest int64) {
	for i := range sh.specs {
		if r := sh.specs[i].rule; r != nil {
			longest = max(longest, int64(r.Limits.Horizon()))
		}
	}
	return longest
}

// matters says whether what was charged under the first claim of a lineage may still count.
func (sh *shard) matters(a *extras, now algo.Instant) bool {
	return now.Mono-a.lineage[1].at <= sh.horizon()
}

// forget takes the first claim off a lineage. mixed says that what was done under it may still count.
func (sh *shard) forget(c *content, mixed bool) {
	a := c.extras
	sh.giveUp(&a.lineage[0])
	a.lineage = append([]element(nil), a.lineage[1:]...)
	sh.giveUp(&a.lineage[0])
	a.lineage[0].mixed = mixed
	sh.shift(&c.table, 1)
}

// shift follows the lineage's losing its first elements.
func (sh *shard) shift(t *table, by int) {
	sh.eachRecord(t, func(r record) {
		if r.has(sinceMask) {
			r.setSince(max(r.since()-by, 0))
		}
	})
}

// giveUp drops an element's table.
func (sh *shard) giveUp(e *element) {
	if e.delta != nil {
		sh.freeTable(e.delta)
		e.delta = nil
	}
}

// thin gives up the oldest tables of a content that has too much in them.
func (sh *shard) thin(c *content) {
	left := deltaShare*c.count + deltaSpare
	for i := len(c.extras.lineage) - 1; i >= 0; i-- {
		e := &c.extras.lineage[i]
		if e.delta == nil {
			continue
		}
		if left -= e.delta.count; left < 0 {
			sh.giveUp(e)
		}
	}
}

// eachRecord calls f for every record of a table, which f must not change.
func (sh *shard) eachRecord(t *table, f func(record)) {
	for _, e := range t.index {
		if e != 0 {
			f(sh.record(algo.Ref(e)))
		}
	}
}

// freeTable drops all records of a table that nobody else knows any more.
func (sh *shard) freeTable(t *table) { sh.freeSome(t, t.count) }

// freeSome drops up to n records.
func (sh *shard) freeSome(t *table, n int) {
	for i := len(t.index) - 1; i >= 0 && n > 0 && t.count > 0; {
		if t.index[i] == 0 {
			i--
			continue
		}
		sh.drop(t, uint32(i))
		n--
	}
}

package store

import (
	"slices"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
)

// Merge adds the staging area to the content: what either side admitted counts once, as far as can be told, and never
// less. The content stays open if it is; everything is pending for the followers. The error is ErrFull when the arena has
// no numbers for blocks left, and the content then holds a part of what was to be added.
//
// The whole states of one side, the base, are kept, and the other side's deltas of those claims are added of which the
// base knows nothing, or less. It is the base that knows more of what both know. When neither can be it, because what the
// other does not know cannot be told from the rest, both whole states are added, and a common past counts twice. Of keys under
// a durability of None a side may know less than of others, for a copy leaves them out: their whole states may be added alone.
func (s *Store) Merge(p int, now algo.Instant) (err error) {
	var old, staged content
	s.with(p, func(sh *shard, part *partition) {
		m := merge{sh: sh, now: now, base: part.content, add: part.duties().staging}
		m.base.ensureExtras()
		m.add.ensureExtras()
		before := part.content.extras
		ownCovers, addCovers := covers(&m.base, &m.add, false), covers(&m.add, &m.base, false)
		swap := addCovers && (!ownCovers || !leads(&m.base, &m.add))
		if swap {
			m.base, m.add = m.add, m.base
		}
		m.whole = !ownCovers && !addCovers
		m.wholeNone = m.whole || !covers(&m.base, &m.add, true)
		sh.forced(m.run)
		err = m.err
		if swap && before != nil {
			// What is said of the partition and not of its records stays the content's own.
			m.base.extras.cold = before.cold
		}
		if other := m.add.extras.coldStrict; other.is && (!m.base.extras.coldStrict.is || other.at.Mono > m.base.extras.coldStrict.at.Mono) {
			m.base.extras.coldStrict = other // what a lost holder admitted is known to neither, or to one of them
		}
		old, staged = part.content, m.add
		part.content, part.role.staging = m.base, content{}
		s.countLent(&staged, false)
		s.countLent(&part.content, part.open)
		part.retrace()
		part.raise()
		part.extras.version++
		part.noteHistory()
		part.noteMerged(sh, &old, swap)
	})
	s.release(p, staged)
	return err
}

// noteMerged makes everything pending as a whole, and what is gone besides.
func (p *partition) noteMerged(sh *shard, old *content, swapped bool) {
	for slot, f := range p.role.followers {
		if f == nil {
			continue
		}
		if swapped {
			// The records that were pending are others now. Those of keys that are left out need no mention.
			for _, e := range old.index {
				if e == 0 {
					continue
				}
				r := sh.record(algo.Ref(e))
				if r.clear((pendingFlag | wholeFlag) << slot); f.knows(r.spec.rule) {
					f.keys.push(turn{hash: r.hash()}, &sh.budget)
				}
			}
		}
		p.extras.reservations.each(func(k reservationKey) {
			f.reservations = append(f.reservations, k)
			sh.budget.count(k.bytes())
		})
		if swapped {
			f.answers = 0
		}
		sh.noteAll(p, ownership.Slot(slot), func(r record) bool { return f.knows(r.spec.rule) })
	}
}

// covers reports whether the base knows everything of the other that cannot be told from the rest; where none is set, of the keys under a
// durability of None as well.
func covers(base, other *content, none bool) bool {
	if len(other.extras.lineage) == 0 {
		return other.count == 0
	}
	for i := range other.extras.lineage {
		if e := &other.extras.lineage[i]; e.delta == nil && lacks(base, other, i, none) {
			return false
		}
	}
	return true
}

// lacks reports whether the base knows nothing, or less, of the other's i-th claim; where none is set, also whether it does of keys under a
// durability of None.
func lacks(base, other *content, i int, none bool) bool {
	e := &other.extras.lineage[i]
	j := base.place(e.claim)
	return j < 0 || e.mixed || base.seenAt(j) < other.seenAt(i) || none && base.noneAt(j) < other.noneAt(i)
}

// leads reports whether of the claims that both know the first one knows at least as much of the first they differ in; where they differ in
// none, whether the other does not have more of keys under a durability of None.
func leads(c, other *content) bool {
	for i := range c.extras.lineage {
		if j := other.place(c.extras.lineage[i].claim); j >= 0 && other.seenAt(j) != c.seenAt(i) {
			return other.seenAt(j) < c.seenAt(i)
		}
	}
	return covers(c, other, true) || !covers(other, c, true)
}

// merge is one Merge in progress.
type merge struct {
	sh        *shard
	now       algo.Instant
	base, add content
	whole     bool // whole states are added
	wholeNone bool // those of keys under a durability of None are
	err       error

	needed     [maxLineage]bool // of add's elements
	neededNone [maxLineage]bool // of add's elements, for keys under a durability of None
	place      [maxLineage]int  // where add's elements come to stand in base's lineage
	recent     int              // from which of base's elements on what was charged under those before may be as recent as the merge
}

func (m *merge) run() {
	base, add := m.base.extras, m.add.extras
	version := max(base.version, add.version)
	for i := range add.lineage {
		m.needed[i] = m.whole || lacks(&m.base, &m.add, i, false)
		m.neededNone[i] = m.whole || lacks(&m.base, &m.add, i, true)
	}
	m.unite()
	// Keys whose whole state was all of their deltas have no other.
	var moved []uint32
	for i, e := range m.add.index {
		if e == 0 {
			continue
		}
		r := m.sh.record(algo.Ref(e))
		r.clear(flagMask &^ (owedFlag | sinceMask | bannedFlag))
		switch {
		case m.whole || r.spec.rule.Limits[0].Algorithm == algo.Concurrency:
			m.addTo(&m.base.table, r, 0)
		case m.moves(r):
			moved = append(moved, uint32(i))
		case m.wholeNone && r.spec.rule.Durability == None:
			m.addTo(&m.base.table, r, 0)
		}
	}
	for i := range add.lineage {
		d := add.lineage[i].delta
		if d == nil || !m.neededNone[i] || m.whole {
			continue
		}
		for _, e := range d.index {
			if e == 0 {
				continue
			}
			r := m.sh.record(algo.Ref(e))
			r.clear(flagMask)
			// Units that a bucket was repaid are in its delta alone, which counts twice then what the state still holds of it.
			if !m.needs(i, r) || m.wholeNone && r.spec.rule.Durability == None && !repaid(r.spec.rule.Limits) {
				continue
			}
			r.spec.rule.Limits.Hold(r.state, m.now)
			if slot, ok := m.sh.find(&m.add.table, r.hash(), r.spec.rule.Scope, string(r.key)); ok {
				state := m.sh.record(m.add.ref(slot))
				if since := state.since(); since > 0 && i <= since || m.moves(state) {
					continue // its whole state is added, which holds this
				}
			}
			m.addTo(&m.base.table, r, 0)
		}
	}
	for _, i := range moved {
		r := m.sh.record(m.add.ref(i))
		at := m.place[r.since()]
		if !m.addTo(&m.base.table, r, at) {
			continue
		}
		// The key was there already, so that its state is more than what has been added, which becomes a delta.
		if d := base.lineage[at].delta; d != nil {
			m.addTo(d, r, 0)
		}
	}
	m.takeTables()
	for i := range base.lineage {
		if i == 0 || i >= m.recent {
			base.lineage[i].at = m.now.Mono
		}
		base.lineage[i].mixed = base.lineage[i].mixed && i == 0
		if e := &base.lineage[i]; e.none == e.seen {
			e.none = everything
		}
	}
	m.sh.thin(&m.base)
	base.version = version
	base.answers.unite(&add.answers, m.now.Mono, m.sh.store.answerBounds(), &m.sh.budget)
	for of, p := range add.reservations.by {
		for _, e := range p.list {
			if known, i, _ := base.reservations.get(reservationKey{of, e.id}, 0); known == nil || i < 0 {
				base.reservations.put(of, e, algo.Hold{}, &m.sh.budget)
			}
		}
	}
	m.uniteLent()
	m.uniteBans()
	m.owe()
}

// needs says whether what was charged to a record of add under its i-th claim is to be added.
func (m *merge) needs(i int, r record) bool {
	return m.needed[i] || m.neededNone[i] && r.spec.rule.Durability == None
}

// moves says whether the whole state of a key of add is added, not what the tables of deltas hold of it.
func (m *merge) moves(r record) bool {
	lineage := m.add.extras.lineage
	return len(lineage) > 0 && m.needs(min(r.since(), len(lineage)-1), r) && m.sh.stands(&m.add, r)
}

// unite makes the base's lineage that of both, as far as there is room: to forget a claim is to count what was done under
// it twice, should it be met again.
func (m *merge) unite() {
	base, add := m.base.extras, m.add.extras
	// Every element's version in its own place: there will be another last one.
	for _, c := range [...]*content{&m.base, &m.add} {
		if n := len(c.extras.lineage); n > 0 {
			c.extras.lineage[n-1].seen = c.extras.version
		}
		for i := range c.extras.lineage {
			c.extras.lineage[i].none = c.noneAt(i)
		}
	}
	fresh := func() (n int) {
		for i := range add.lineage {
			if m.needed[i] && m.base.place(add.lineage[i].claim) < 0 {
				n++
			}
		}
		return n
	}
	for len(base.lineage) > 1 && len(base.lineage)+fresh() > maxLineage {
		m.sh.forget(&m.base, m.sh.matters(base, m.now))
	}
	drop := len(base.lineage) + fresh() - maxLineage
	m.recent = len(base.lineage)
	if m.whole && len(base.lineage) > 0 && (len(add.lineage) == 0 || add.lineage[0].mixed) {
		base.lineage[0].mixed = true
		m.recent = 1
	}
	for i := range add.lineage {
		e := &add.lineage[i]
		at := m.base.place(e.claim)
		if at < 0 && m.needed[i] {
			if drop > 0 {
				drop-- // only where whole states are added, for otherwise not all of add's elements are needed
				base.lineage[0].mixed = true
				m.recent = min(m.recent, 1)
				continue
			}
			at = len(base.lineage)
			entry := element{claim: e.claim, seen: e.seen, none: e.none, at: e.at}
			if e.delta != nil && at > 0 && !m.whole {
				entry.delta = &table{}
			}
			base.lineage = append(base.lineage[:at:at], entry)
		}
		m.place[i] = max(at, 0)
		if m.neededNone[i] {
			m.recent = min(m.recent, m.place[i]+1)
		}
		if at >= 0 && m.neededNone[i] {
			to := &base.lineage[at]
			if m.whole && (to.seen < e.seen || to.none < e.none) {
				m.sh.giveUp(to) // what add knows besides goes into the states alone
			}
			to.seen, to.none = max(to.seen, e.seen), max(to.none, e.none)
		}
	}
}

// takeTables moves the deltas that were added to where the base has their claims now.
func (m *merge) takeTables() {
	base, add := m.base.extras, m.add.extras
	for i := range add.lineage {
		if !m.neededNone[i] || add.lineage[i].delta == nil || m.whole {
			continue
		}
		e, to := &add.lineage[i], &base.lineage[m.place[i]]
		if to.delta == nil {
			continue
		}
		if !m.needed[i] {
			m.sh.eachRecord(e.delta, func(r record) {
				if m.needs(i, r) {
					m.addTo(to.delta, r, 0)
				}
			})
			continue
		}
		if moved := *to.delta; moved.count > 0 {
			m.sh.eachRecord(&moved, func(r record) { m.addTo(e.delta, r, 0) })
		}
		to.delta, e.delta = e.delta, to.delta
	}
}

// addTo adds a state to the key's in a table, and reports whether there was one. A fresh one gets since.
func (m *merge) addTo(t *table, r record, since int) (found bool) {
	rule := r.spec.rule
	k := Key{Hash: r.hash(), Key: string(r.key)}
	slot, found := m.sh.find(t, k.Hash, rule.Scope, k.Key)
	var err error
	if !found {
		if slot, err = m.sh.insert(t, k, rule, m.now, r.spec.caller.label, false); err == nil {
			m.sh.record(t.ref(slot)).setSince(since)
		}
	} else if t == &m.base.table {
		m.explain(m.sh.record(t.ref(slot)))
	}
	if err == nil {
		err = m.join(m.sh.record(t.ref(slot)), r, t == &m.base.table)
	}
	if err != nil {
		m.err = ErrFull
	}
	return found
}

// explain enters in a delta's table what a state stood for itself, before something else is added to it.
func (m *merge) explain(r record) {
	since := r.since()
	if since == 0 && !m.sh.stands(&m.base, r) {
		return
	}
	r.setSince(0)
	if since < len(m.base.extras.lineage) {
		if d := m.base.extras.lineage[since].delta; d != nil {
			m.addTo(d, r, 0)
		}
	}
}

// join adds the state of one record to another's, converted where they are under different limits.
func (m *merge) join(to, r record, whole bool) error {
	limits, old, state := to.spec.rule.Limits, r.spec.rule.Limits, r.state
	m.sh.idle(r, to.state.Latest(m.now)) // what has expired of r is taken off its own share, and is not looked at again
	used := m.sh.arena.InUse()
	defer func() { to.spec.count(0, m.sh.arena.InUse()-used) }()
	if !sameLimits(limits, old) {
		// Convert would use r's own state up, and it may be asked for again.
		twin := make(algo.State, old.Words())
		if _, err := old.Restore(m.sh.arena, twin, m.now, old.Append(nil, m.sh.arena, r.state, m.now)); err != nil {
			return err
		}
		state = make(algo.State, limits.Words())
		if err := old.Convert(m.sh.arena, twin, m.now, limits, state); err != nil {
			return err
		}
		defer limits.Free(m.sh.arena, state)
	}
	if whole {
		m.match(to, r, state)
		m.base.lose(to)
	}
	return limits.Merge(m.sh.arena, to.state, m.now, state)
}

// match gives the sliding counters of a key, on both sides, the windows with which a state of base's goes on that one of r's record is
// merged into: that state itself, or what it comes to under the limits of base's.
func (m *merge) match(to, r record, state algo.State) {
	limits, of := to.spec.rule.Limits, to.id()
	if !limits.Differ(to.state, m.now, state) {
		return
	}
	apart := m.apart(&m.base, to)
	if sameLimits(limits, r.spec.rule.Limits) {
		if slot, ok := m.sh.find(&m.add.table, r.hash(), of.scope, of.key); ok && sameLimits(limits, m.sh.record(m.add.ref(slot)).spec.rule.Limits) {
			state = m.sh.record(m.add.ref(slot)).state
		}
		apart = append(apart, m.apart(&m.add, to)...)
	}
	apart = slices.DeleteFunc(apart, func(d algo.State) bool { return &d[0] == &state[0] })
	limits.Match(to.state, m.now, state, apart)
}

// apart are the deltas that a content has of a record's key under the limits of that record.
func (m *merge) apart(c *content, r record) (states []algo.State) {
	for i := range c.extras.lineage {
		d := c.extras.lineage[i].delta
		if d == nil {
			continue
		}
		if slot, ok := m.sh.find(d, r.hash(), r.spec.rule.Scope, string(r.key)); ok && sameLimits(r.spec.rule.Limits, m.sh.record(d.ref(slot)).spec.rule.Limits) {
			states = append(states, m.sh.record(d.ref(slot)).state)
		}
	}
	return states
}

// owe unites what is owed: both holders' may have been granted.
func (m *merge) owe() {
	base, add := m.base.extras, m.add.extras
	for of, o := range add.owed {
		slot, ok := m.sh.find(&m.base.table, o.hash, of.scope, of.key)
		if !ok {
			continue
		}
		m.sh.record(m.base.ref(slot)).set(owedFlag)
		if base.owed == nil {
			base.owed = make(map[stateID]owing)
		}
		was := base.owed[of]
		base.owed[of] = owing{o.hash, was.advanced + o.advanced, was.inherited + o.inherited}
	}
}

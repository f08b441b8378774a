package store

import (
	"slices"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
)

// Merge makes the content the join of itself and the staging area: of a key that both sides know, at every instant the
// larger of the two counts (see algo.Limits.Join); of a key that one side alone knows, that side's state. Admissions
// have no identity, so how much of what both sides count is the same is not known. The join admits no more than
// either side would, and it is idempotent: to merge what is known already changes nothing.
//
// What has identity is united by it: leases, request ids, reservations, loans, bans. Pending reservations of a key that
// both sides know give nothing back, because it is not known where their units are in the join.
//
// The content stays open if it is; everything is pending for the followers. The error is ErrFull when the arena has no
// numbers for blocks left, and the content is then joined with a part of the staging area.
func (s *Store) Merge(p int, now algo.Instant) (err error) {
	var staged content
	s.with(p, func(sh *shard, part *partition) {
		m := merge{sh: sh, now: now, base: &part.content, add: part.ensureRole().staging}
		part.role.staging = content{}
		m.base.ensureExtras()
		m.add.ensureExtras()
		m.cold()
		sh.forced(m.run)
		err, staged = m.err, m.add
		part.raise()
		part.extras.version++
		part.noteCold()
		for slot, f := range part.role.followers {
			if f != nil {
				sh.noteAll(part, ownership.Slot(slot), f.knows)
			}
		}
	})
	s.release(p, staged)
	return err
}

// merge is one Merge in progress: base becomes the join of itself and add.
type merge struct {
	sh   *shard
	now  algo.Instant
	base *content
	add  content
	err  error
}

func (m *merge) run() {
	m.sh.eachRecord(&m.add.table, func(r record) {
		r.clear(flagMask &^ (owedFlag | lentFlag | bannedFlag))
		if err := m.key(r); err != nil {
			m.err = ErrFull
		}
	})
	m.uniteAnswers()
	m.uniteLent()
	m.owe()
}

// cold fills the strict keys of a side that does not know the later ColdStrict. What a lost holder admitted is known to
// neither side, or to one of them.
func (m *merge) cold() {
	later := m.base.extras.coldStrict.later(m.add.extras.coldStrict)
	for _, c := range [...]*content{m.base, &m.add} {
		if !later.same(c.extras.coldStrict) {
			m.sh.coldStrict(c, later, func(record) {})
		}
	}
}

// key joins a record of add with the base's record of the same key.
func (m *merge) key(r record) error {
	idle := m.sh.idle(r, m.now) // which takes what has expired off r's own share
	if idle && !r.has(owedFlag|lentFlag) && r.banLeft(m.now) == 0 && m.add.reserved(r) == nil {
		return nil
	}
	rule, k := r.spec.rule, Key{Hash: r.hash(), Key: string(r.key)}
	slot, found := m.sh.find(&m.base.table, k.Hash, rule.Scope, k.Key)
	if !found {
		var err error
		if slot, err = m.sh.insert(&m.base.table, k, rule, m.now, r.spec.caller.label, false); err != nil {
			return err
		}
	}
	m.moveReservations(r.id(), found || idle)
	if !idle {
		if err := m.join(m.sh.record(m.base.ref(slot)), r); err != nil {
			return err
		}
	}
	return m.ban(slot, r)
}

// join joins the state of one record with another's, converted first where they are under different limits.
func (m *merge) join(to, r record) (err error) {
	limits, old, state := to.spec.rule.Limits, r.spec.rule.Limits, r.state
	if !sameLimits(limits, old) {
		state = make(algo.State, limits.Words())
		m.sh.counted(r, func() { err = old.Convert(m.sh.arena, r.state, m.now, limits, state) })
		if err != nil {
			return err
		}
		defer m.sh.counted(r, func() { limits.Free(m.sh.arena, state) })
	}
	m.sh.counted(to, func() { err = limits.Join(m.sh.arena, to.state, m.now, state) })
	return err
}

// uniteAnswers unites the request ids. A side without a grant charges ids of strict keys and gives no answer. The join
// of the counts need not hold its charges, and they may have left the window before the merge, while the other side has
// admitted as many. So both sides forget the strict charges that one side alone knows: a repetition is decided anew.
func (m *merge) uniteAnswers() {
	base, add := &m.base.extras.answers, &m.add.extras.answers
	base.forgetUnshared(add)
	add.forgetUnshared(base)
	base.unite(add, m.now.Mono, m.sh.store.answerBounds(), &m.sh.budget)
}

// moveReservations unites the reservations of a key. If the base did not know the key, and something is in use, they
// keep where their units are.
func (m *merge) moveReservations(of stateID, joined bool) {
	base, add := &m.base.extras.reservations, &m.add.extras.reservations
	own, other := base.by[of], add.by[of]
	if own != nil {
		own.holds.Lose()
	}
	if other == nil {
		return
	}
	if joined {
		other.holds.Lose()
	}
	for i, e := range other.list {
		if own == nil || !slices.ContainsFunc(own.list, func(x reservation) bool { return x.id == e.id }) {
			base.put(of, other.hash, e, e.caller.label, other.holds[i], &m.sh.budget)
		}
	}
	other.holds = make(algo.Holds, len(other.list))
}

// owe keeps the larger of what is owed on a key.
func (m *merge) owe() {
	for of, o := range m.add.extras.owed {
		m.sh.owe(m.base, of, owing{o.hash, max(m.base.extras.owed[of].units, o.units)})
	}
}

package store

import (
	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
)

// A copy is received in the staging area, and then replaces the content (Promote) or is joined with it (Merge,
// merge.go). Contents that are replaced are freed a little at a time. A process that takes a partition over without the
// former holder's last word charges what that holder may have admitted beyond the copy (TakeOver, TakeOverStrict).

// freeHold is how many records release drops while it holds a shard's lock.
const freeHold = 256

// Stage empties the staging area.
func (s *Store) Stage(p int) {
	var old content
	s.with(p, func(_ *shard, part *partition) {
		r := part.ensureRole()
		old, r.staging = r.staging, content{}
	})
	s.release(p, old)
}

// Promote makes the staging area the content, in place of what that was. Followers, if there are any, are detached.
func (s *Store) Promote(p int) {
	var old content
	s.with(p, func(sh *shard, part *partition) {
		old = sh.replace(part, part.ensureRole().staging)
		part.role.staging = content{}
	})
	s.release(p, old)
}

// Discard drops the content and the staging area. Followers, if there are any, are detached.
func (s *Store) Discard(p int) {
	var old, staged content
	s.with(p, func(sh *shard, part *partition) {
		old = sh.replace(part, content{})
		staged, part.role.staging = part.role.staging, content{}
	})
	s.release(p, old)
	s.release(p, staged)
}

// replace makes by the content of a partition and returns the former one.
func (sh *shard) replace(part *partition, by content) (old content) {
	role := part.ensureRole()
	part.keepFloor()
	for slot := range role.followers {
		sh.detach(part, ownership.Slot(slot))
	}
	old, part.content = part.content, by
	part.updateFollowed()
	return old
}

// release frees a content that no partition has any more, a little at a time.
func (s *Store) release(p int, c content) {
	sh, _ := s.at(p)
	if c.extras != nil {
		sh.locked(func() {
			for of := range c.extras.lent {
				c.dropLent(of, &sh.budget)
			}
			c.extras.answers.free(&sh.budget)
			c.extras.reservations.free(&sh.budget)
		})
	}
	for c.count > 0 {
		sh.locked(func() { sh.freeSome(&c.table, freeHold) })
	}
}

// TakeOver begins an unplanned claim on the content. It charges at now what the lost holder may have admitted ahead of
// its copy (escrow), except to strict rules: see TakeOverStrict.
func (s *Store) TakeOver(p int, now algo.Instant) {
	s.with(p, func(sh *shard, part *partition) {
		sh.chargeOwed(part, now, false)
		part.raise()
		part.ensureExtras().version++
	})
}

// TakeOverStrict charges to strict rules what the lost holder may have admitted ahead of its copy. The caller must wait
// until that holder's lease has run out.
func (s *Store) TakeOverStrict(p int, now algo.Instant) {
	s.with(p, func(sh *shard, part *partition) { sh.chargeOwed(part, now, true) })
}

// chargeOwed charges what lost holders may have admitted ahead of their copies: to the keys of strict rules, or to all
// others.
func (sh *shard) chargeOwed(part *partition, now algo.Instant, strict bool) {
	if part.extras == nil {
		return
	}
	for of, o := range ordered(part.extras.owed) {
		slot, found := sh.find(&part.table, o.hash, of.scope, of.key)
		if found && sh.record(part.ref(slot)).spec.rule.Strict == strict {
			r := sh.record(part.ref(slot))
			part.lower(r, now)
			// Charge asks for no room, and memory is not refused here: there is no error.
			sh.forcedOn(r, func() { _ = r.spec.rule.Limits.Charge(sh.arena, r.state, now, o.units) })
			r.clear(owedFlag)
			delete(part.extras.owed, of)
			sh.note(part, r, 0)
		}
	}
}

// eachRecord calls f for every record of a table. f must not insert into the table or drop from it.
func (sh *shard) eachRecord(t *table, f func(record)) {
	for _, e := range t.index {
		if e != 0 {
			f(sh.record(algo.Ref(e)))
		}
	}
}

// freeSome drops up to n records of a table that no partition has any more.
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

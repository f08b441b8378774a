package store

import (
	"github.com/weirlimit/weir/algo"
)

// A partition is cold when a holder was lost with what it had counted (Cold, ColdStrict; the ownership protocol calls
// them). A key that begins afterwards may have used up its limit at that instant, so its state begins full: of a rule
// with ColdClosed after Cold, of a strict rule after ColdStrict, which fills the states of known strict keys as well.
// An instant matters to a rule only for as long as its longest window (lostOf).

// Cold says that what an earlier holder counted is lost. From now on a new key of a rule that is ColdClosed starts
// full, as if its limit had been used up at this instant.
func (s *Store) Cold(p int, now algo.Instant) {
	s.with(p, func(_ *shard, part *partition) {
		part.ensureExtras().cold = coldness{true, now}
		part.noteCold()
	})
}

// ColdStrict does the same to all keys of strict rules, known ones included.
func (s *Store) ColdStrict(p int, now algo.Instant) {
	s.with(p, func(sh *shard, part *partition) {
		sh.coldStrict(&part.content, coldness{true, now}, func(r record) { sh.note(part, r, 0) })
		part.noteCold()
	})
}

// coldStrict is the ColdStrict of a content. It calls filled for every record whose state it has filled.
func (sh *shard) coldStrict(c *content, lost coldness, filled func(record)) {
	c.ensureExtras().coldStrict = lost
	sh.forced(func() {
		sh.eachRecord(&c.table, func(r record) {
			if !r.spec.rule.Strict {
				return
			}
			sh.counted(r, func() { _ = r.spec.rule.Limits.Fill(sh.arena, r.state, lost.at) }) // memory is not refused
			c.lose(r)
			if r.has(owedFlag) {
				// There is no room left that the lost holder could have used.
				r.clear(owedFlag)
				delete(c.extras.owed, r.id())
			}
			filled(r)
		})
	})
}

// coldness is the instant of a Cold or ColdStrict, if there was one.
type coldness struct {
	is bool
	at algo.Instant
}

// same reports whether both are one call. Its wall time is the same at all processes that have been told of it.
func (c coldness) same(other coldness) bool { return c.is == other.is && c.at.Wall == other.at.Wall }

// later returns the later of two losses.
func (c coldness) later(other coldness) coldness {
	if other.is && (!c.is || other.at.Mono > c.at.Mono) {
		return other
	}
	return c
}

// makeState makes a new key's state: fresh, or filled where what was counted before is lost and matters.
func (sh *shard) makeState(part *partition, rule *Rule, state algo.State, now algo.Instant) error {
	if lost := part.lostOf(rule, now); lost.is {
		rule.Limits.Init(state, lost.at)
		return rule.Limits.Fill(sh.arena, state, lost.at)
	}
	rule.Limits.Init(state, now)
	return nil
}

// lostOf says since when what was counted before is lost and matters to keys of a rule.
func (p *partition) lostOf(rule *Rule, now algo.Instant) (lost coldness) {
	a := p.extras
	if a != nil && rule.ColdClosed {
		lost = a.cold
	}
	if a != nil && rule.Strict {
		lost = lost.later(a.coldStrict)
	}
	lost.is = lost.is && now.Mono-lost.at.Mono < int64(rule.Limits.Horizon())
	return lost
}

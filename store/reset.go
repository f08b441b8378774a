package store

import (
	"strings"

	"github.com/weirlimit/weir/algo"
)

// A reset drops a key's record with its ban, its request ids, its reservations and its escrow allowance. A record with units on loan stays, with a fresh state: a borrower may still spend them.

// Reset makes the key's state as new, and forgets the request ids and reservations charged to it: what they were
// charged is gone. What is on loan stays so.
func (s *Store) Reset(k Key, scope string) error {
	of := stateID{scope, k.Key}
	return s.ifOpen(k.Partition, func(sh *shard, part *partition) error {
		lent := false
		slot, changed := sh.find(&part.table, k.Hash, scope, k.Key)
		if changed {
			r := sh.record(part.ref(slot))
			if r.has(owedFlag) {
				delete(part.extras.owed, of)
			}
			sh.endAdvance(part, k.Hash, of)
			lent = r.has(lentFlag)
			if !lent {
				sh.drop(&part.table, slot)
			}
		}
		if a := part.extras; a != nil {
			changed = a.answers.forget(of) || changed
			changed = a.reservations.forget(of, &sh.budget) || changed
		}
		if changed {
			part.noteReset(reset{stateID{scope, strings.Clone(k.Key)}, k.Hash}, &sh.budget)
		}
		if lent {
			// What is on loan is not known to be spent, and stays on loan.
			r := sh.record(part.ref(slot))
			r.clear(owedFlag)
			r.lift()
			sh.counted(r, func() {
				newest := algo.Instant{Mono: int64(r.state[0])}
				r.spec.rule.Limits.Free(sh.arena, r.state)
				r.spec.rule.Limits.Init(r.state, newest)
			})
			sh.note(part, r, 0)
		}
		return nil
	})
}

package store

import (
	"strings"

	"github.com/weirlimit/weir/algo"
)

// A reset drops a key's record with its ban, its request ids, its reservations and its escrow allowance. A record with
// units on loan stays, with a fresh state: a borrower may still spend them.

// Reset makes the key's state as new, and forgets the request ids and reservations charged to it: what they were
// charged is gone. What is on loan stays so.
func (s *Store) Reset(k Key, scope string) error {
	of := stateID{scope, k.Key}
	return s.ifOpen(k.Partition, func(sh *shard, part *partition) error {
		slot, found := sh.find(&part.table, k.Hash, scope, k.Key)
		a := part.ensureExtras()
		if !a.answers.forget(of) && !found {
			return nil
		}
		part.noteReset(reset{stateID{scope, strings.Clone(k.Key)}, k.Hash}, &sh.budget)
		if !found {
			return nil
		}
		delete(a.owed, of)
		a.reservations.forget(of, &sh.budget)
		sh.endAdvance(part, k.Hash, of)
		r := sh.record(part.ref(slot))
		if !r.has(lentFlag) {
			sh.drop(&part.table, slot)
			return nil
		}
		// What is on loan is not known to be spent, and stays on loan.
		r.clear(owedFlag)
		r.lift()
		sh.counted(r, func() {
			newest := algo.Instant{Mono: int64(r.state[0])}
			r.spec.rule.Limits.Free(sh.arena, r.state)
			r.spec.rule.Limits.Init(r.state, newest)
		})
		sh.note(part, r, 0)
		return nil
	})
}

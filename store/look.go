package store

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// Look tells how a key stands under each limit of its rule, and when what it has in use can be used again: at most that
// many instants for each limit, see algo.Limits.Returns. banned is how much longer the key is banned. It charges
// nothing and needs no grant, so that under a strict rule it is no promise.
func (s *Store) Look(k Key, rule *Rule, now algo.Instant,
	most int) (each []algo.Decision, returns [][]algo.Return, banned time.Duration, err error) {
	each, returns = make([]algo.Decision, len(rule.Limits)), make([][]algo.Return, len(rule.Limits))
	err = s.ifOpen(k.Partition, func(sh *shard, part *partition) error {
		known := false
		err := sh.existing(part, k, rule, now, func(r record) bool {
			known, banned = true, r.banLeft(now)
			var peek algo.Request
			if l := part.loansOf(r); l != nil {
				peek = l.beside(peek, now)
			}
			_, err := rule.Limits.Decide(sh.arena, r.state, now, peek, each)
			for i := range returns {
				returns[i] = rule.Limits.Returns(sh.arena, r.state, now, i, most)
			}
			return err != nil // a peek needs no memory, and so has no error
		})
		if !known && err == nil {
			_, err = sh.peekNew(part, rule, now, &Call{}, each)
		}
		return err
	})
	return each, returns, banned, s.refusedRoom(err, rule, "")
}

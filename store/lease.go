package store

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// A lease is one unit of a concurrency limit, with an id and a ttl. decide grants it like any other unit; here it is
// renewed and released.

// Renew lets a lease live for ttl from now; boot is as in Call.
func (s *Store) Renew(k Key, rule *Rule, now algo.Instant, lease uint64, ttl time.Duration,
	boot int64) (n Renewal, err error) {
	s.with(k.Partition, func(sh *shard, part *partition) {
		var a Answer
		if err = part.guard(rule, boot, &a); err != nil {
			return
		}
		n.Degraded, n.Until = a.Degraded, a.Until
		err = sh.existing(part, k, rule, now, func(r record) bool {
			n.Left, n.Alive = rule.Limits.Renew(sh.arena, r.state, now, lease, ttl)
			return n.Alive
		})
		if n.Alive && rule.Durability >= Escrow {
			n.Ticket = sh.wait(part, k.Partition, rule)
		}
	})
	return n, s.refusedRoom(err, rule, "")
}

// Release ends a lease and reports whether it was alive.
func (s *Store) Release(k Key, rule *Rule, now algo.Instant, lease uint64) (ok bool, err error) {
	err = s.ifOpen(k.Partition, func(sh *shard, part *partition) error {
		return sh.existing(part, k, rule, now, func(r record) bool {
			ok = rule.Limits.Release(sh.arena, r.state, now, lease)
			return ok
		})
	})
	return ok, s.refusedRoom(err, rule, "")
}

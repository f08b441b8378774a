package store

import "github.com/weirlimit/weir/cluster/ownership"

// This file decides whether a call on a partition may be decided now, and what its answer waits for:
//
//	gate   part.open: Open sets it, Shut clears it, and each call reads it under the shard's lock
//	guard  refuses a call under a strict rule unless there is a grant (Lease), and a current backup or Unguarded. It
//	       marks the answer as Degraded if the backup or the disk that the rule asks for is missing
//	wait   returns the ticket of an answer that the backup or the disk must confirm; 0 if there is nothing to confirm
//
// Versions count the changes of a partition, and a ticket is a version. This process must not use a version twice,
// although the content may come from a process that has counted less far. So raise and keepFloor note in role.floor
// which versions were used.

// Open has calls on the partition decided from now on.
func (s *Store) Open(p int) {
	s.with(p, func(_ *shard, part *partition) {
		part.raise()
		// Changes are not counted while there is no follower. Opening counts one version for all of them, which no
		// follower was told. A content that is shut counts nothing here, because its holder, which is another process,
		// counts its changes.
		part.extras.bump()
		part.open = true
	})
}

// Shut has calls on the partition refused with ErrShut. When it returns, no call is in progress any more.
func (s *Store) Shut(p int) {
	s.with(p, func(_ *shard, part *partition) { part.open = false })
}

// Lease is the grant to decide: strict rules are decided until an instant of the boot clock, and not from then on.
func (s *Store) Lease(p int, until int64) {
	s.with(p, func(_ *shard, part *partition) { part.ensureRole().granted = until })
}

// Unguarded sets whether strict rules may be decided while no backup is current.
func (s *Store) Unguarded(p int, may bool) {
	s.with(p, func(_ *shard, part *partition) { part.ensureRole().unguarded = may })
}

// with calls f under the lock of the partition's shard.
func (s *Store) with(p int, f func(*shard, *partition)) {
	sh, part := s.at(p)
	sh.mu.Lock()
	defer sh.unlock()
	f(sh, part)
}

// ifOpen calls f under the lock of an open partition's shard. The error is f's, or ErrShut.
func (s *Store) ifOpen(p int, f func(*shard, *partition) error) error {
	sh, part := s.at(p)
	sh.mu.Lock()
	defer sh.unlock()
	if !part.open {
		return ErrShut
	}
	return f(sh, part)
}

// locked calls f under the shard's lock.
func (sh *shard) locked(f func()) {
	sh.mu.Lock()
	defer sh.unlock()
	f()
}

// unlock unlocks the shard. It is deferred, so that other calls on the shard go on after a panic. A call that panicked
// may have left its own key's state half changed.
func (sh *shard) unlock() {
	sh.budget.taker = 0
	sh.mu.Unlock()
}

// Version returns a version that is not below any ticket which the partition has given. It never falls.
func (s *Store) Version(p int) (v uint64) {
	s.with(p, func(_ *shard, part *partition) {
		if part.role != nil {
			v = part.role.floor
		}
		if part.extras != nil {
			v = max(v, part.extras.version)
		}
	})
	return v
}

// raise raises the content's version to the highest version of this process, because the content may have come from a
// process that counted less far.
func (p *partition) raise() {
	if p.role == nil {
		return
	}
	a := p.ensureExtras()
	a.version = max(a.version, p.role.floor)
	p.role.floor = a.version
}

// keepFloor notes the content's version as used in this process.
func (p *partition) keepFloor() {
	if p.role != nil && p.extras != nil {
		p.role.floor = max(p.role.floor, p.extras.version)
	}
}

// backup returns the backup, or nil if it is not current.
func (p *partition) backup() *follower {
	if p.role == nil {
		return nil
	}
	if f := p.role.followers[ownership.Backup]; f != nil && f.current {
		return f
	}
	return nil
}

// guard returns an error if a call under the rule must not be decided now. Otherwise it sets the answer's Until and
// Degraded.
func (p *partition) guard(rule *Rule, boot int64, a *Answer) error {
	if !p.open {
		return ErrShut
	}
	if !rule.Guarded() {
		return nil
	}
	guarded := p.backup() != nil
	if rule.Strict {
		if p.role == nil || boot >= p.role.granted || !guarded && !p.role.unguarded {
			return ErrNoGrant
		}
		a.Until = p.role.granted
	}
	a.Degraded = !guarded && (rule.Durability >= Escrow || rule.Strict) || rule.Persist && !p.keeps(rule)
	return nil
}

// wait returns the ticket with which an answer waits for everything that was charged so far, by this call or earlier
// ones: until the current backup has confirmed it, and under a rule with Persist the disk. It returns 0 if there is no
// current backup, or nothing is left to be confirmed.
func (sh *shard) wait(part *partition, p int, rule *Rule) uint64 {
	if rule.Persist && part.saved {
		return sh.waitSaved(part, p)
	}
	f := part.backup()
	if f == nil {
		return 0
	}
	part.await()
	switch {
	case part.pending[ownership.Backup].Load() > 0:
		sh.urge(p)
		return part.extras.version
	case f.confirmed < f.contained:
		return f.contained
	}
	return 0
}

func (sh *shard) urge(p int) {
	if urgent := sh.store.cfg.Urgent; urgent != nil {
		urgent(p)
	}
}

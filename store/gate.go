package store

import "github.com/weirlimit/weir/cluster/ownership"

// Open lets calls on the partition be decided.
func (s *Store) Open(p int) {
	s.with(p, func(_ *shard, part *partition) {
		part.raise()
		// Changes without a follower are not counted one by one: opening makes one version for them, which no follower
		// was told. A content that is shut counts none at all, because its holder, another process, goes on counting
		// for it.
		part.extras.bump()
		part.open = true
	})
}

// Shut ends that: no call is in progress any more when it returns, and the next ones get ErrShut.
func (s *Store) Shut(p int) {
	s.with(p, func(_ *shard, part *partition) { part.open = false })
}

// Lease lets strict rules be decided until the given instant of the boot clock, and not at all from then on.
func (s *Store) Lease(p int, until int64) {
	s.with(p, func(_ *shard, part *partition) { part.ensureRole().granted = until })
}

// Unguarded says whether strict rules may be decided while no backup is current.
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

// locked calls f under the lock.
func (sh *shard) locked(f func()) {
	sh.mu.Lock()
	defer sh.unlock()
	f()
}

// unlock ends what a lock began, by defer also after a panic, so that other calls on the shard go on. A call that
// panicked may have changed its own key by half.
func (sh *shard) unlock() {
	sh.budget.taker = 0
	sh.mu.Unlock()
}

// Version is at least every ticket that has been given for an answer of the partition, and never falls.
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

// raise sees to it that no version is given out twice: the content may have come from a process that counted less far.
func (p *partition) raise() {
	if p.role == nil {
		return
	}
	a := p.ensureExtras()
	a.version = max(a.version, p.role.floor)
	p.role.floor = a.version
}

// keepFloor has the content's version count as given out.
func (p *partition) keepFloor() {
	if p.role != nil && p.extras != nil {
		p.role.floor = max(p.role.floor, p.extras.version)
	}
}

// backup is the follower that answers wait for, nil while it is not current.
func (p *partition) backup() *follower {
	if p.role == nil {
		return nil
	}
	if f := p.role.followers[ownership.Backup]; f != nil && f.current {
		return f
	}
	return nil
}

// guard says whether a call under the rule may be decided now, and fills in what is known of its answer before.
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

// wait makes an answer wait for what has been charged so far, if there is a current backup, and under a rule with
// Persist for the disk. The call need not have changed anything itself. It returns 0 when they have confirmed
// everything.
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

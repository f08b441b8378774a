package store

import "github.com/weirlimit/weir/cluster/ownership"

// The disk follows a content, the holder's own or a copy, like a process with a copy, and is told of what is kept under
// rules with Persist, and of every reset.

// disk is the follower that writes to the disk; nil: there is none.
func (p *partition) disk() *follower { return p.follower(ownership.Disk) }

// keeps reports whether the disk gets what an answer under a rule with Persist admits, as its durability promises:
// while the disk does not have all of the partition yet, answers of Escrow and Sync wait for that.
func (p *partition) keeps(rule *Rule) bool {
	f := p.disk()
	return f != nil && (f.current || rule.Durability >= Escrow)
}

// waitSaved is wait for the backup, if there is a current one, and the disk.
func (sh *shard) waitSaved(part *partition, p int) uint64 {
	version := part.extras.version
	if part.safe() == version {
		return 0
	}
	part.await()
	sh.urge(p)
	return version | ownership.Saved
}

// safe is the version up to which the disk has everything, and the current backup, if there is one.
func (p *partition) safe() uint64 {
	version := p.extras.version
	for slot, f := range p.role.followers {
		switch {
		case f == nil || !f.current && slot != int(ownership.Disk) || slot == int(ownership.Target):
		case !f.current:
			return 0
		case p.pending[slot].Load() > 0 || f.confirmed < f.contained:
			version = min(version, f.confirmed)
		}
	}
	return version
}

// Safe is the version up to which the disk and the current backup, if there is one, have confirmed everything.
func (s *Store) Safe(p int) (version uint64) {
	s.with(p, func(_ *shard, part *partition) {
		if part.saved {
			version = part.safe()
		}
	})
	return version
}

// skipAnswer has the disk pass over the newest answer, whose turn is next if it is remembered, where its rule has no
// Persist and no earlier one is pending: such answers cost the disk nothing.
func (p *partition) skipAnswer(persist bool, next uint64) {
	if f := p.disk(); f != nil && !persist && min(f.answers, f.refunds) >= next {
		f.answers, f.refunds = p.extras.answers.end, p.extras.answers.end
	}
}

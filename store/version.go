package store

// Version is at least every ticket that has been given for an answer of the partition, and never falls.
func (s *Store) Version(p int) (v uint64) {
	s.with(p, func(_ *shard, part *partition) {
		if part.role != nil {
			v = part.role.floor
		}
		if part.annex != nil {
			v = max(v, part.annex.version)
		}
	})
	return v
}

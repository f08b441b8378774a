package algo

// Append appends a snapshot of the whole of s to dst and returns it.
func (ls Limits) Append(dst []byte, a *Arena, s State, now Instant) []byte {
	return ls.AppendSince(dst, a, s, now, 0)
}

// Restore makes s, uninitialised, the state whose snapshot data begins with, and returns what follows it.
func (ls Limits) Restore(a *Arena, s State, now Instant, data []byte) (rest []byte, err error) {
	ls.Init(s, now)
	if len(data) == 0 || data[0] != snapshotVersion {
		return nil, ErrSnapshot
	}
	return ls.Extend(a, s, now, data)
}

// Used is the number of units that limit i has in use, rounded up; 0 when it is unlimited. It exceeds the limit when
// that was lowered on a live state.
func (ls Limits) Used(a *Arena, s State, now Instant, i int) int64 {
	now = s.tick(now)
	var used int64
	ls.walk(a, s, now, func(j int, c counter, t []uint64) {
		if i == j {
			used = c.used(&ls[j], a, t, now)
		}
	})
	return used
}

// BlockWords is the number of words a block really has that was asked for with the given size: what a caller may use
// of it beyond its request.
func BlockWords(words int) int { return int(blockClasses[classFor[words]]) }

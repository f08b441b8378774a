package algo

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

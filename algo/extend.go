package algo

// A copy of a state with a sliding_log is brought up to date with the new entries alone. What makes that possible is
// the position, the last word of such a state: its lowest 32 bits count the units that were charged, for as long as all
// logs of the state are charged the same number. Anything else that adds to a log, or replaces it, begins a new
// generation, in the bits above. Removed units do not move the position, because they are always the oldest. The holder
// keeps a Mark of the position that the copy has, and AppendSince writes what has been charged after the mark.
const generation = 1 << 32

// step is by how much n units move the position: more than fit its lower bits begin a new generation.
func step(n int64) uint64 { return min(uint64(n), generation) }

// newPosition follows old, which may be anything, in a state that begins at now.
func newPosition(old uint64, now Instant) uint64 {
	// The instant is mixed in for a key whose state was dropped and begins anew: a mark of the former state must not
	// fit the new one.
	return (old/generation + 1 + uint64(now.Mono)*0x9e3779b97f4a7c15>>32) * generation
}

// logs is the number of limits that keep a log.
func (ls Limits) logs() (n int) {
	for i := range ls {
		if ls[i].Algorithm == SlidingLog && ls[i].Limit != Unlimited {
			n++
		}
	}
	return n
}

// position is the word for it in s, nil when there is no log.
func (ls Limits) position(s State) *uint64 {
	if ls.logs() == 0 {
		return nil
	}
	return &s[len(s)-1]
}

// Mark is a position in what has been charged to s: AppendSince with it writes what has happened to s from now on. It
// is 0, which stands for nothing that is known, when none of the limits is a sliding_log, and never 0 when one is.
//
// A mark is of this state only. Whatever is done to that, the caller may keep the mark: after what makes it useless
// (Init, Convert, Join, Extend, Fill) AppendSince finds that out.
func (ls Limits) Mark(s State) uint64 {
	if p := ls.position(s); p != nil {
		return *p | oldestMark
	}
	return 0
}

// oldestMark is in every mark, so that none is 0.
const oldestMark = 1 << 63

// The second form of a snapshot begins with 2 and has in place of a log its units, how many of the newest of them
// follow and those, as in a snapshot; of every other limit the snapshot.
const extensionVersion = 2

// AppendSince appends what Extend needs to make a copy of s, which has all that was in s when Mark returned mark, a
// copy of what s is now: of a sliding_log only what has been charged since, of everything else the whole. It writes a
// snapshot of the whole when there is no log, when the mark is 0 or can no longer be used, and when several logs have
// counted different numbers of units since.
//
// Units that have expired or were given back since are not written: the copy learns how many units are left.
func (ls Limits) AppendSince(dst []byte, a *Arena, s State, now Instant, mark uint64) []byte {
	version, charged := byte(snapshotVersion), int64(0)
	if p := ls.position(s); p != nil && mark != 0 {
		position := *p | oldestMark
		if n := position - mark; n < generation && position/generation == mark/generation {
			version, charged = extensionVersion, int64(n)
		}
	}
	now = s.tick(now)
	dst = append(dst, version)
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		tag := byte(ls[i].Algorithm)
		switch {
		case ls[i].idle(c, a, t, now):
			dst = append(dst, tag|idleFlag)
		case version == extensionVersion && ls[i].Algorithm == SlidingLog:
			dst = slidingLog{}.since(append(dst, tag), &ls[i], a, t, now, charged)
		default:
			dst = c.snapshot(append(dst, tag), &ls[i], a, t, now)
		}
	})
	return dst
}

// Extend brings s, the copy of another state, up to what AppendSince wrote of that, and returns what follows it in
// data. The two may have different clocks: ages count from now on, so that each unit expires late by the time that its
// message took, and never early. (The ticks of the copy's log may begin elsewhere. So an entry may expire less than one
// tick before that of the original, which was rounded up, but never before a Window has passed since its admission.) A
// message that takes longer than a later one makes the units of that late as well.
//
// The bytes need not be trusted: they can make a state that no history leads to, but none that a later call could
// stumble over, and they cannot take more memory than some thousand times their length. The error is ErrSnapshot or
// ErrNoMemory; then s is a valid state that holds some of what it did and some of what it should, or nothing.
func (ls Limits) Extend(a *Arena, s State, now Instant, data []byte) (rest []byte, err error) {
	now = s.tick(now)
	r := &reader{data: data}
	version := r.byte()
	if p := ls.position(s); version != extensionVersion {
		ls.Free(a, s)
		ls.Init(s, now)
	} else if p != nil {
		*p += generation
	}
	if version != extensionVersion && version != snapshotVersion {
		return nil, ErrSnapshot
	}
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		if err != nil {
			return
		}
		l := &ls[i]
		switch tag := r.byte(); {
		case version == extensionVersion && tag == byte(SlidingLog) && l.Algorithm == SlidingLog:
			err = slidingLog{}.extend(l, a, t, now, r)
		case tag&^idleFlag != byte(l.Algorithm):
			err = ErrSnapshot
		default:
			c.free(l, a, t)
			c.init(l, t, now)
			if tag&idleFlag != 0 {
				return
			}
			if err = c.restore(l, a, t, now, r); err != nil {
				c.free(l, a, t)
				c.init(l, t, now)
			}
		}
	})
	if err == nil {
		err = r.err
	}
	switch {
	case err == nil:
		return r.data, nil
	case version == snapshotVersion:
		ls.Free(a, s)
		ls.Init(s, now)
	default:
		ls.trim(a, s)
	}
	return nil, err
}

package algo

import "time"

// slidingCounter estimates a sliding window from two fixed ones: the present window's count, plus the previous one's
// weighted by how much of it the sliding window still covers. (As Cloudflare described it in "How we built rate
// limiting capable of scaling to millions of domains", 2017.) It takes the previous window's admissions to be spread
// evenly: a caller that concentrates them can get up to twice the limit through in one Window.
//
// Words: start of the present window, previous count, present count. Windows of a fresh state begin at multiples of
// their length; after a move they begin where they did before, in terms of age, until the state has been empty.
type slidingCounter struct{ inline }

func (slidingCounter) words(*Limit) int { return 3 }

func (slidingCounter) advance(l *Limit, _ *Arena, s []uint64, now Instant) {
	if s[1]|s[2] == 0 {
		return
	}
	switch elapsed := now.Mono - int64(s[0]); {
	case elapsed < int64(l.Window):
	case elapsed < 2*int64(l.Window) && s[2] != 0:
		s[0] += uint64(l.Window)
		s[1], s[2] = s[2], 0
	default:
		clear(s)
	}
}

// covered is the time that the sliding window still covers of the previous one.
func (slidingCounter) covered(l *Limit, s []uint64, now Instant) int64 {
	return int64(l.Window) - (now.Mono - int64(s[0]))
}

func (c slidingCounter) used(l *Limit, _ *Arena, s []uint64, now Instant) int64 {
	if s[1] == 0 {
		return int64(s[2])
	}
	weighted, rest := mul(int64(s[1]), c.covered(l, s, now)).div(int64(l.Window))
	if rest > 0 {
		weighted++
	}
	return weighted + int64(s[2])
}

func (slidingCounter) wait(l *Limit, _ *Arena, s []uint64, now Instant, n int64) time.Duration {
	// n passes once fading·covered ≤ spare·Window. When the present window's own count leaves no room, it has to
	// become the fading one first.
	ends, fading, spare := int64(s[0])+int64(l.Window), int64(s[1]), l.Limit-int64(s[2])-n
	if spare < 0 {
		ends, fading, spare = ends+int64(l.Window), int64(s[2]), l.Limit-n
	}
	covered, _ := mul(spare, int64(l.Window)).div(fading) // less than the window: n does not pass at its start
	return time.Duration(ends - covered - now.Mono)
}

func (slidingCounter) resetAfter(l *Limit, _ *Arena, s []uint64, now Instant) time.Duration {
	switch ends := int64(s[0]) + int64(l.Window); {
	case s[2] != 0:
		return time.Duration(ends+int64(l.Window)) - time.Duration(now.Mono)
	case s[1] != 0:
		return time.Duration(ends - now.Mono)
	}
	return 0
}

func (slidingCounter) charge(l *Limit, _ *Arena, s []uint64, now Instant, n int64) {
	if s[1]|s[2] == 0 {
		s[0] = uint64(floorDiv(now.Mono, int64(l.Window)) * int64(l.Window))
	}
	s[2] += uint64(n)
}

func (slidingCounter) refund(_ *Limit, _ *Arena, s []uint64, _ Instant, n int64) int64 {
	old := min(n, int64(s[1]))
	s[1] -= uint64(old)
	young := min(n-old, int64(s[2]))
	s[2] -= uint64(young)
	return old + young
}

// convert keeps both counts when the window stays, and otherwise what they come to now.
func (c slidingCounter) convert(l *Limit, a *Arena, s []uint64, now Instant, to *Limit, t []uint64) {
	if l.Window == to.Window {
		copy(t, s)
	} else if n := c.used(l, a, s, now); n > 0 {
		c.charge(to, a, t, now, min(n, MaxLimit))
	}
}

func (slidingCounter) snapshot(dst []byte, _ *Limit, _ *Arena, s []uint64, now Instant) []byte {
	dst = appendUint(dst, now.Mono-int64(s[0]))
	dst = appendUint(dst, int64(s[1]))
	return appendUint(dst, int64(s[2]))
}

func (slidingCounter) restore(_ *Limit, _ *Arena, s []uint64, now Instant, r *reader) error {
	s[0] = uint64(now.Mono - r.age())
	s[1] = uint64(r.uint(MaxLimit))
	s[2] = uint64(r.uint(MaxLimit))
	return r.err
}

// join goes on with the windows that began later, and with the larger of the two counts of each window. Both states
// have been brought to now, so their windows begin less than a Window apart: counts that move to later windows only
// count for longer.
func (c slidingCounter) join(l *Limit, a *Arena, s, t []uint64, now Instant, u []uint64) bool {
	copy(u, t)
	if c.used(l, a, s, now) != 0 {
		u[0], u[1], u[2] = uint64(max(int64(s[0]), int64(t[0]))), max(s[1], t[1]), max(s[2], t[2])
	}
	return true
}

// horizon: at the longest, a present window and then a previous one.
func (slidingCounter) horizon(l *Limit) time.Duration { return 2 * l.Window }

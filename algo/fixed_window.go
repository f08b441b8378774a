package algo

import (
	"math"
	"sort"
	"time"
)

// fixedWindow counts admissions in windows that open with the first admission and last for l.Window: the oldest of the
// algorithms, and the cheapest. Across the boundary of two windows up to twice the limit may pass within one Window.
//
// Words: start of the window, count. A count of zero means that no window is open.
type fixedWindow struct{ inline }

func (fixedWindow) words(*Limit) int { return 2 }

func (fixedWindow) init(_ *Limit, s []uint64, _ Instant) { clear(s) }

func (fixedWindow) advance(l *Limit, _ *Arena, s []uint64, now Instant) {
	if s[1] != 0 && now.Mono-int64(s[0]) >= int64(l.Window) {
		clear(s)
	}
}

func (fixedWindow) room(l *Limit, _ *Arena, s []uint64, _ Instant) int64 {
	return max(l.Limit-int64(s[1]), 0)
}

func (fixedWindow) used(_ *Limit, _ *Arena, s []uint64, _ Instant) int64 { return int64(s[1]) }

func (c fixedWindow) wait(l *Limit, a *Arena, s []uint64, now Instant, n int64) time.Duration {
	if c.room(l, a, s, now) >= n {
		return 0
	}
	return c.reset(l, a, s, now)
}

func (fixedWindow) reset(l *Limit, _ *Arena, s []uint64, now Instant) time.Duration {
	if s[1] == 0 {
		return 0
	}
	return l.Window - time.Duration(now.Mono-int64(s[0]))
}

func (fixedWindow) charge(_ *Limit, _ *Arena, s []uint64, now Instant, n int64) {
	if s[1] == 0 {
		s[0] = uint64(now.Mono)
	}
	s[1] += uint64(n)
}

func (c fixedWindow) deny(l *Limit, a *Arena, s []uint64, now Instant, n int64) int64 {
	if n = min(n, c.room(l, a, s, now)); n > 0 {
		c.charge(l, a, s, now, n)
	}
	return n
}

func (fixedWindow) refund(_ *Limit, _ *Arena, s []uint64, _ Instant, n int64) int64 {
	n = min(n, int64(s[1]))
	s[1] -= uint64(n)
	return n
}

// convert keeps the start: a window that becomes shorter may have ended, one that becomes longer goes on.
func (fixedWindow) convert(_ *Limit, _ *Arena, s []uint64, _ Instant, _ *Limit, t []uint64) {
	copy(t, s)
}

func (fixedWindow) snapshot(dst []byte, _ *Limit, _ *Arena, s []uint64, now Instant) []byte {
	dst = appendUint(dst, now.Mono-int64(s[0]))
	return appendUint(dst, int64(s[1]))
}

func (fixedWindow) restore(_ *Limit, _ *Arena, s []uint64, now Instant, r *reader) error {
	s[0] = uint64(now.Mono - r.age())
	s[1] = uint64(r.uint(MaxLimit))
	return r.err
}

// merge goes on with the window that opened later, as if what the other has counted had been in it.
func (fixedWindow) merge(_ *Limit, _ *Arena, s, t []uint64, _ Instant, u []uint64) bool {
	start := int64(t[0])
	if s[1] != 0 {
		start = max(start, int64(s[0]))
	}
	u[0], u[1] = uint64(start), min(s[1]+t[1], uint64(MaxLimit))
	return true
}

func (fixedWindow) horizon(l *Limit) time.Duration { return l.Window }

// calendarWindow counts admissions in the minute, hour, day, week, month or year of the time zone. It is the only
// counter that reads the wall clock. A window once opened stays until the wall clock has passed its end, so that a
// clock that is set back opens no window a second time.
//
// Words: start and end of the window in seconds since 1970 UTC, count. The end is kept so that the calendar is worked
// out once a window only. Start and end are equal in a fresh state.
type calendarWindow struct{ inline }

func (calendarWindow) words(*Limit) int { return 3 }

func (calendarWindow) init(_ *Limit, s []uint64, _ Instant) { clear(s) }

func (calendarWindow) advance(l *Limit, _ *Arena, s []uint64, now Instant) {
	if sec := floorDiv(now.Wall, 1e9); s[0] == s[1] || sec >= int64(s[1]) {
		start, end := calendar(l.Period, l.zone(), sec)
		s[0], s[1], s[2] = uint64(start), uint64(end), 0
	}
}

func (calendarWindow) room(l *Limit, _ *Arena, s []uint64, _ Instant) int64 {
	return max(l.Limit-int64(s[2]), 0)
}

func (calendarWindow) used(_ *Limit, _ *Arena, s []uint64, _ Instant) int64 { return int64(s[2]) }

func (c calendarWindow) wait(l *Limit, a *Arena, s []uint64, now Instant, n int64) time.Duration {
	if c.room(l, a, s, now) >= n {
		return 0
	}
	return c.reset(l, a, s, now)
}

// reset counts from what the wall clock says, even when it says a time before the window.
func (calendarWindow) reset(_ *Limit, _ *Arena, s []uint64, now Instant) time.Duration {
	if s[2] == 0 {
		return 0
	}
	sec := floorDiv(now.Wall, 1e9)
	left := int64(s[1]) - sec
	if left > math.MaxInt64/int64(time.Second) {
		return math.MaxInt64
	}
	return time.Duration(left)*time.Second - time.Duration(now.Wall-sec*1e9)
}

func (calendarWindow) charge(_ *Limit, _ *Arena, s []uint64, _ Instant, n int64) { s[2] += uint64(n) }

func (c calendarWindow) deny(l *Limit, a *Arena, s []uint64, now Instant, n int64) int64 {
	n = min(n, c.room(l, a, s, now))
	s[2] += uint64(n)
	return n
}

func (calendarWindow) refund(_ *Limit, _ *Arena, s []uint64, _ Instant, n int64) int64 {
	n = min(n, int64(s[2]))
	s[2] -= uint64(n)
	return n
}

func (calendarWindow) convert(_ *Limit, _ *Arena, s []uint64, _ Instant, _ *Limit, t []uint64) {
	copy(t, s)
}

// snapshot writes the window's date, not its age: the receiver's wall clock, not this one's, says when it has passed.
func (calendarWindow) snapshot(dst []byte, _ *Limit, _ *Arena, s []uint64, _ Instant) []byte {
	dst = appendInt(dst, int64(s[0]))
	return appendUint(dst, int64(s[2]))
}

func (calendarWindow) restore(l *Limit, _ *Arena, s []uint64, _ Instant, r *reader) error {
	const farthest = math.MaxInt64 / 1_000_000_000 // seconds that a wall clock can show
	start, count := r.int(farthest), r.uint(MaxLimit)
	if r.err != nil || count == 0 {
		return ErrSnapshot
	}
	start, end := calendar(l.Period, l.zone(), start)
	s[0], s[1], s[2] = uint64(start), uint64(end), uint64(count)
	return nil
}

// merge keeps the later window, and both counts when they are of the same.
func (calendarWindow) merge(_ *Limit, _ *Arena, s, t []uint64, _ Instant, u []uint64) bool {
	switch {
	case s[0] == t[0]:
		copy(u, s)
		u[2] = min(s[2]+t[2], uint64(MaxLimit))
	case int64(s[0]) > int64(t[0]):
		copy(u, s)
	default:
		copy(u, t)
	}
	return true
}

// horizon is the length of the longest window, and more than that for as long as the wall clock is set back.
func (calendarWindow) horizon(l *Limit) time.Duration {
	days := time.Duration(366)
	switch l.Period {
	case Minute:
		return time.Minute
	case Hour:
		return time.Hour
	case Day:
		days = 1
	case Week:
		days = 7
	case Month:
		days = 31
	}
	return (days + 1) * 24 * time.Hour // a zone that moves across the date line has a day twice
}

func (l *Limit) zone() *time.Location {
	if l.Zone == nil {
		return time.UTC
	}
	return l.Zone
}

// calendar returns the window that the second sec since 1970 UTC lies in: its first second and the next window's.
//
// The windows of a zone follow each other without gap or overlap whatever its clocks do. Minutes and hours are those
// that the clock shows between two changes of its offset, so that an hour which is repeated is two windows, not one of
// two hours. A longer period begins with the first instant at which the clock shows its first midnight or more: it
// shows none when that is skipped, and two when it is repeated.
func calendar(p Period, zone *time.Location, sec int64) (start, end int64) {
	if p == Minute || p == Hour {
		length := int64(60)
		if p == Hour {
			length = 3600
		}
		offset := offsetAt(zone, sec)
		start = floorDiv(sec+offset, length)*length - offset
		end = nextChange(zone, sec, start+length-1)
		if offsetAt(zone, start) != offset {
			start = nextChange(zone, start, sec)
		}
		return start, end
	}
	t := time.Unix(sec, 0).In(zone)
	year, month, day := t.Date()
	var years, months, days int
	switch p {
	case Day:
		days = 1
	case Week:
		day -= (int(t.Weekday()) + 6) % 7
		days = 7
	case Month:
		day = 1
		months = 1
	case Year:
		month, day = time.January, 1
		years = 1
	}
	date := time.Date(year, month, day, 0, 0, 0, 0, time.UTC)
	for {
		next := date.AddDate(years, months, days)
		start, end = reaches(zone, date), reaches(zone, next)
		if sec < end {
			return start, end
		}
		// The clock went back across the boundary after it had been passed.
		date = next
	}
}

// reaches returns the first second at which a clock in zone shows date, or more if that is skipped. The date is given
// as if it were in UTC.
func reaches(zone *time.Location, date time.Time) int64 {
	// No offset is as much as a day and a half, so that the search begins before.
	for sec := date.Unix() - 36*3600; ; {
		at := max(date.Unix()-offsetAt(zone, sec), sec)
		change := nextChange(zone, sec, at)
		if change > at {
			return at
		}
		sec = change
	}
}

// offsetAt is what a clock in zone is ahead of UTC, in seconds.
func offsetAt(zone *time.Location, sec int64) int64 {
	_, offset := time.Unix(sec, 0).In(zone).Zone()
	return int64(offset)
}

// nextChange returns the first second after from at which zone has another offset, or until+1 if there is none up to and
// including until. It takes it that no zone changes twice in an hour. (Time.ZoneBounds does not serve: on the last day
// of a leap year after its tables' end, 2037, it returns an end that has passed, go1.26.)
func nextChange(zone *time.Location, from, until int64) int64 {
	offset := offsetAt(zone, from)
	for from < until {
		to := min(from+3600, until)
		if offsetAt(zone, to) != offset {
			return from + 1 + int64(sort.Search(int(to-from), func(i int) bool {
				return offsetAt(zone, from+1+int64(i)) != offset
			}))
		}
		from = to
	}
	return until + 1
}

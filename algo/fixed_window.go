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

func (fixedWindow) advance(l *Limit, _ *Arena, s []uint64, now Instant) {
	past := now.Mono - int64(s[0])
	switch {
	case s[1] == 0 || past < int64(l.Window):
	case !l.CarryDebt:
		clear(s)
	default:
		windows := past / int64(l.Window)
		if s[1] = uint64(l.carried(int64(s[1]), windows)); s[1] == 0 {
			clear(s)
		} else {
			s[0] += uint64(windows * int64(l.Window))
		}
	}
}

func (fixedWindow) used(_ *Limit, _ *Arena, s []uint64, _ Instant) int64 { return int64(s[1]) }

func (c fixedWindow) wait(l *Limit, _ *Arena, s []uint64, now Instant, n int64) time.Duration {
	return l.later(c.left(l, s, now), int64(s[1])+n-l.Limit)
}

func (c fixedWindow) resetAfter(l *Limit, _ *Arena, s []uint64, now Instant) time.Duration {
	if s[1] == 0 {
		return 0
	}
	return l.later(c.left(l, s, now), int64(s[1]))
}

// left is the time until the window ends.
func (fixedWindow) left(l *Limit, s []uint64, now Instant) time.Duration {
	return l.Window - time.Duration(now.Mono-int64(s[0]))
}

// carried is what is left of a count after so many windows, each of which takes the Limit off.
func (l *Limit) carried(count, windows int64) int64 {
	if windows > count/l.Limit {
		return 0
	}
	return count - windows*l.Limit
}

// countable is the largest count of a fixed window. Debt that is carried ends within MaxFill, so that its end fits 64
// bits.
func (l *Limit) countable() int64 {
	if l.CarryDebt {
		if most := mul(l.Limit, int64(MaxFill/l.longest())); most.less(u128{lo: uint64(MaxLimit)}) {
			return int64(most.lo)
		}
	}
	return MaxLimit
}

// later is the time until windows, the first of which ends after left, have taken n units or more off a count: one, but
// for debt that is carried over.
func (l *Limit) later(left time.Duration, n int64) time.Duration {
	return left + time.Duration(l.windowsMore(n))*l.Window
}

// windowsMore is how many windows more than the one that is open it takes until n units are off a count.
func (l *Limit) windowsMore(n int64) int64 {
	if !l.CarryDebt || n <= l.Limit {
		return 0
	}
	return (n - 1) / l.Limit
}

func (fixedWindow) charge(l *Limit, _ *Arena, s []uint64, now Instant, n int64) {
	if s[1] == 0 {
		s[0] = uint64(now.Mono)
	}
	s[1] = min(s[1]+uint64(n), uint64(l.countable()))
}

func (fixedWindow) refund(_ *Limit, _ *Arena, s []uint64, _ Instant, n int64) int64 {
	n = min(n, int64(s[1]))
	s[1] -= uint64(n)
	return n
}

// convert keeps the start: a window that becomes shorter may have ended, one that becomes longer goes on.
func (fixedWindow) convert(_ *Limit, _ *Arena, s []uint64, _ Instant, to *Limit, t []uint64) {
	t[0], t[1] = s[0], min(s[1], uint64(to.countable()))
}

func (fixedWindow) snapshot(dst []byte, _ *Limit, _ *Arena, s []uint64, now Instant) []byte {
	dst = appendUint(dst, now.Mono-int64(s[0]))
	return appendUint(dst, int64(s[1]))
}

func (fixedWindow) restore(l *Limit, _ *Arena, s []uint64, now Instant, r *reader) error {
	s[0] = uint64(now.Mono - r.age())
	s[1] = uint64(min(r.uint(MaxLimit), l.countable()))
	return r.err
}

// join goes on with the window that opened later, and the larger count.
func (fixedWindow) join(_ *Limit, _ *Arena, s, t []uint64, _ Instant, u []uint64) bool {
	copy(u, t)
	if s[1] != 0 {
		u[0], u[1] = uint64(max(int64(s[0]), int64(t[0]))), max(s[1], t[1])
	}
	return true
}

func (fixedWindow) horizon(l *Limit) time.Duration { return l.Window }

// calendarWindow counts admissions in the minute, hour, day, week, month or year of the time zone, or in windows of any
// length since 1970. It is the only counter that reads the wall clock. A window once opened stays until the wall clock
// has passed its end, so that a clock that is set back opens no window a second time.
//
// Words: start and end of the window in seconds since 1970 UTC, count. The end is kept so that the calendar is worked
// out once a window only. Start and end are equal in a fresh state.
type calendarWindow struct{ inline }

func (calendarWindow) words(*Limit) int { return 3 }

func (calendarWindow) advance(l *Limit, _ *Arena, s []uint64, now Instant) {
	if sec := floorDiv(now.Wall, 1e9); s[0] == s[1] || sec >= int64(s[1]) {
		start, end := l.windowOf(sec)
		if l.CarryDebt && s[0] != s[1] {
			// Where windows have become shorter since this one opened, its end counts as that of one.
			s[2] = uint64(l.carried(int64(s[2]), 1+l.windowsBetween(int64(s[1]), start)))
		} else {
			s[2] = 0
		}
		s[0], s[1] = uint64(start), uint64(end)
	}
}

func (calendarWindow) used(_ *Limit, _ *Arena, s []uint64, _ Instant) int64 { return int64(s[2]) }

func (c calendarWindow) wait(l *Limit, _ *Arena, s []uint64, now Instant, n int64) time.Duration {
	return c.later(l, s, now, int64(s[2])+n-l.Limit)
}

func (c calendarWindow) resetAfter(l *Limit, _ *Arena, s []uint64, now Instant) time.Duration {
	if s[2] == 0 {
		return 0
	}
	return c.later(l, s, now, int64(s[2]))
}

// later is the time until windows have taken n units or more off the count: until this one ends, but for debt that is
// carried over. It counts from what the wall clock says, even when that is a time before the window.
func (calendarWindow) later(l *Limit, s []uint64, now Instant, n int64) time.Duration {
	end := int64(s[1])
	if more := l.windowsMore(n); more > 0 {
		end = l.windowAfter(end, more)
	}
	sec := floorDiv(now.Wall, 1e9)
	left := end - sec
	if left > math.MaxInt64/int64(time.Second) {
		return math.MaxInt64
	}
	return time.Duration(left)*time.Second - time.Duration(now.Wall-sec*1e9)
}

func (calendarWindow) charge(l *Limit, _ *Arena, s []uint64, _ Instant, n int64) {
	s[2] = min(s[2]+uint64(n), uint64(l.countable()))
}

func (calendarWindow) refund(_ *Limit, _ *Arena, s []uint64, _ Instant, n int64) int64 {
	n = min(n, int64(s[2]))
	s[2] -= uint64(n)
	return n
}

func (calendarWindow) convert(_ *Limit, _ *Arena, s []uint64, _ Instant, to *Limit, t []uint64) {
	copy(t, s)
	t[2] = min(t[2], uint64(to.countable()))
}

// snapshot writes the window's date, not its age: the receiver's wall clock, not this one's, says when it has passed.
func (calendarWindow) snapshot(dst []byte, _ *Limit, _ *Arena, s []uint64, _ Instant) []byte {
	dst = appendInt(dst, int64(s[0]))
	return appendUint(dst, int64(s[2]))
}

func (calendarWindow) restore(l *Limit, _ *Arena, s []uint64, _ Instant, r *reader) error {
	const farthest = math.MaxInt64 / 1_000_000_000 // seconds that a wall clock can show
	start, count := r.int(farthest), r.uint(MaxLimit)
	if r.err != nil {
		return ErrSnapshot
	}
	start, end := l.windowOf(start)
	s[0], s[1], s[2] = uint64(start), uint64(end), uint64(min(count, l.countable()))
	return nil
}

// join keeps the later window. Its count is the larger one, where the other side's is of the same window or what that
// side carries over into it.
func (calendarWindow) join(l *Limit, _ *Arena, s, t []uint64, _ Instant, u []uint64) bool {
	if int64(s[0]) < int64(t[0]) {
		s, t = t, s
	}
	other := t[2]
	if s[0] != t[0] {
		if other = 0; l.CarryDebt && t[0] != t[1] {
			other = uint64(l.carried(int64(t[2]), l.windowsBetween(int64(t[0]), int64(s[0]))))
		}
	}
	u[0], u[1], u[2] = s[0], s[1], max(s[2], other)
	return true
}

// horizon is the length of the longest window, and more than that for as long as the wall clock is set back.
func (calendarWindow) horizon(l *Limit) time.Duration { return l.longest() }

// longest is no less than the longest window of a fixed window.
func (l *Limit) longest() time.Duration {
	days := time.Duration(366)
	switch l.Period {
	case 0, Epoch:
		return l.Window
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

// windowOf returns the first second of the aligned window that the second sec since 1970 UTC lies in, and the next
// one's.
func (l *Limit) windowOf(sec int64) (start, end int64) {
	if l.Period == Epoch {
		length := int64(l.Window / time.Second)
		start = floorDiv(sec, length) * length
		return start, start + length
	}
	return calendar(l.Period, l.zone(), l.anchor(), sec)
}

// windowsBetween counts the windows from the one that the second from lies in, to the one that to lies in, which is no
// earlier. Those of the calendar are a day or longer: they are counted by their dates, also one that a zone has
// skipped.
func (l *Limit) windowsBetween(from, to int64) int64 {
	if l.Period == Epoch {
		// Where windows have become shorter, from counts as the beginning of one.
		return (to - from) / int64(l.Window/time.Second)
	}
	first, _ := datesOf(l.Period, l.zone(), l.anchor(), from)
	last, _ := datesOf(l.Period, l.zone(), l.anchor(), to)
	years, days := int64(last.Year()-first.Year()), (last.Unix()-first.Unix())/86400
	switch l.Period {
	case Year:
		return years
	case Month:
		return 12*years + int64(last.Month()-first.Month())
	case Week:
		return days / 7
	}
	return days
}

// windowAfter is the first second of the window that comes so many after the one that sec lies in.
func (l *Limit) windowAfter(sec, windows int64) int64 {
	if l.Period == Epoch {
		return sec + windows*int64(l.Window/time.Second)
	}
	date, _ := datesOf(l.Period, l.zone(), l.anchor(), sec)
	return reaches(l.zone(), dateAfter(l.Period, l.anchor(), date, int(windows)))
}

// dateAfter is the date on which the window begins that comes n after the one that begins on a date.
func dateAfter(p Period, anchor int, date time.Time, n int) time.Time {
	switch p {
	case Year:
		return date.AddDate(n, 0, 0)
	case Month:
		return monthFrom(date.Year(), date.Month()+time.Month(n), anchor)
	case Week:
		return date.AddDate(0, 0, 7*n)
	}
	return date.AddDate(0, 0, n)
}

// maxAnchor is the last day that a month can have.
const maxAnchor = 31

// anchor is the day on which windows of a month begin.
func (l *Limit) anchor() int { return max(int(l.Anchor), 1) }

// monthFrom is the day of a month on which its window begins: the anchor, or the month's last day where it has no such
// day. As time.Date has it, a month beyond December is one of the next year.
func monthFrom(year int, month time.Month, anchor int) time.Time {
	last := time.Date(year, month+1, 0, 0, 0, 0, 0, time.UTC)
	return last.AddDate(0, 0, min(anchor-last.Day(), 0))
}

// calendar returns the window that the second sec since 1970 UTC lies in: its first second and the next window's.
//
// The windows of a zone follow each other without gap or overlap whatever its clocks do. Minutes and hours are those
// that the clock shows between two changes of its offset, so that an hour which is repeated is two windows, not one of
// two hours. A longer period begins with the first instant at which the clock shows its first midnight or more: it
// shows none when that is skipped, and two when it is repeated. A month begins on the day that anchor names, see
// monthFrom.
func calendar(p Period, zone *time.Location, anchor int, sec int64) (start, end int64) {
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
	date, next := datesOf(p, zone, anchor, sec)
	return reaches(zone, date), reaches(zone, next)
}

// Around returns the first instants of the period of the calendar in UTC that t lies in, and of the next one.
func (p Period) Around(t time.Time) (start, end time.Time) {
	first, next := calendar(p, time.UTC, 1, t.Unix())
	return time.Unix(first, 0).UTC(), time.Unix(next, 0).UTC()
}

// datesOf returns the dates, as if in UTC, on which the window of a day or longer begins that the second sec since 1970
// UTC lies in, and the one after it.
func datesOf(p Period, zone *time.Location, anchor int, sec int64) (date, next time.Time) {
	t := time.Unix(sec, 0).In(zone)
	year, month, day := t.Date()
	switch p {
	case Week:
		day -= (int(t.Weekday()) + 6) % 7
	case Month:
		if day < monthFrom(year, month, anchor).Day() {
			month--
		}
		day = monthFrom(year, month, anchor).Day()
	case Year:
		month, day = time.January, 1
	}
	date = time.Date(year, month, day, 0, 0, 0, 0, time.UTC)
	for {
		next = dateAfter(p, anchor, date, 1)
		if sec < reaches(zone, next) {
			return date, next
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

// nextChange returns the first second after from at which zone has another offset, or until+1 if there is none up to
// and including until. It takes it that no zone changes twice in an hour. (Time.ZoneBounds does not serve: on the last
// day of a leap year after its tables' end, 2037, it returns an end that has passed, go1.26.)
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

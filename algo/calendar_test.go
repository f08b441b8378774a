package algo

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestCalendar is about windows that are not as long as they usually are.
func TestCalendar(t *testing.T) {
	for _, tt := range []struct {
		zone   string
		period Period
		at     string // UTC, as are start and end
		start  string
		end    string
	}{
		{"UTC", Minute, "2024-02-29T12:34:56Z", "2024-02-29T12:34:00Z", "2024-02-29T12:35:00Z"},
		{"UTC", Hour, "2024-02-29T12:34:56Z", "2024-02-29T12:00:00Z", "2024-02-29T13:00:00Z"},
		{"UTC", Day, "2024-02-29T23:59:59Z", "2024-02-29T00:00:00Z", "2024-03-01T00:00:00Z"},
		{"UTC", Week, "2024-03-03T23:59:59Z", "2024-02-26T00:00:00Z", "2024-03-04T00:00:00Z"}, // a Sunday
		{"UTC", Week, "2024-03-04T00:00:00Z", "2024-03-04T00:00:00Z", "2024-03-11T00:00:00Z"}, // a Monday
		{"UTC", Week, "2025-01-01T00:00:00Z", "2024-12-30T00:00:00Z", "2025-01-06T00:00:00Z"},
		{"UTC", Month, "2024-02-10T00:00:00Z", "2024-02-01T00:00:00Z", "2024-03-01T00:00:00Z"},
		{"UTC", Month, "2023-02-28T23:59:59Z", "2023-02-01T00:00:00Z", "2023-03-01T00:00:00Z"},
		{"UTC", Month, "2024-12-31T23:59:59Z", "2024-12-01T00:00:00Z", "2025-01-01T00:00:00Z"},
		{"UTC", Year, "2024-12-31T23:59:59Z", "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"},
		{"UTC", Year, "1969-12-31T23:59:59Z", "1969-01-01T00:00:00Z", "1970-01-01T00:00:00Z"},
		{"UTC", Minute, "1969-12-31T23:59:59Z", "1969-12-31T23:59:00Z", "1970-01-01T00:00:00Z"},
		// 23 and 25 hours.
		{"Europe/Berlin", Day, "2024-03-31T12:00:00Z", "2024-03-30T23:00:00Z", "2024-03-31T22:00:00Z"},
		{"Europe/Berlin", Day, "2024-10-27T12:00:00Z", "2024-10-26T22:00:00Z", "2024-10-27T23:00:00Z"},
		{"Europe/Berlin", Week, "2024-03-31T12:00:00Z", "2024-03-24T23:00:00Z", "2024-03-31T22:00:00Z"},
		{"Europe/Berlin", Month, "2024-10-10T12:00:00Z", "2024-09-30T22:00:00Z", "2024-10-31T23:00:00Z"},
		// An hour that is repeated is two.
		{"Europe/Berlin", Hour, "2024-10-27T00:30:00Z", "2024-10-27T00:00:00Z", "2024-10-27T01:00:00Z"},
		{"Europe/Berlin", Hour, "2024-10-27T01:30:00Z", "2024-10-27T01:00:00Z", "2024-10-27T02:00:00Z"},
		// Half past.
		{"Asia/Kolkata", Hour, "2024-06-01T12:45:00Z", "2024-06-01T12:30:00Z", "2024-06-01T13:30:00Z"},
		{"Asia/Kathmandu", Hour, "2024-06-01T12:20:00Z", "2024-06-01T12:15:00Z", "2024-06-01T13:15:00Z"},
		// A change by half an hour cuts an hour in two: 1:30 comes again at 2:00.
		{"Australia/Lord_Howe", Hour, "2024-04-06T14:59:59Z", "2024-04-06T14:00:00Z", "2024-04-06T15:00:00Z"},
		{"Australia/Lord_Howe", Hour, "2024-04-06T15:10:00Z", "2024-04-06T15:00:00Z", "2024-04-06T15:30:00Z"},
		{"Australia/Lord_Howe", Hour, "2024-04-06T15:30:00Z", "2024-04-06T15:30:00Z", "2024-04-06T16:30:00Z"},
		// No midnight: the clock goes from 23:59:59 to 1:00.
		{"America/Sao_Paulo", Day, "2018-11-04T12:00:00Z", "2018-11-04T03:00:00Z", "2018-11-05T02:00:00Z"},
		{"America/Sao_Paulo", Day, "2018-11-03T12:00:00Z", "2018-11-03T03:00:00Z", "2018-11-04T03:00:00Z"},
		// Two midnights: the clock goes from 0:59:59 to 0:00, and from 23:59:59 to 23:00.
		{"America/Havana", Day, "2024-11-03T12:00:00Z", "2024-11-03T04:00:00Z", "2024-11-04T05:00:00Z"},
		{"America/Sao_Paulo", Day, "2018-02-17T12:00:00Z", "2018-02-17T02:00:00Z", "2018-02-18T03:00:00Z"},
		// The clock goes from 0:00:59 back to 23:01: the new day has begun all the same.
		{"America/St_Johns", Day, "2010-11-07T02:30:30Z", "2010-11-07T02:30:00Z", "2010-11-08T03:30:00Z"},
		{"America/St_Johns", Day, "2010-11-07T03:00:00Z", "2010-11-07T02:30:00Z", "2010-11-08T03:30:00Z"},
		{"America/St_Johns", Day, "2010-11-07T02:29:59Z", "2010-11-06T02:30:00Z", "2010-11-07T02:30:00Z"},
		// The day that Samoa left out.
		{"Pacific/Apia", Day, "2011-12-30T09:59:59Z", "2011-12-29T10:00:00Z", "2011-12-30T10:00:00Z"},
		{"Pacific/Apia", Day, "2011-12-30T10:00:00Z", "2011-12-30T10:00:00Z", "2011-12-31T10:00:00Z"},
		// Where Time.ZoneBounds is wrong.
		{"Europe/Berlin", Hour, "2040-12-31T12:34:56Z", "2040-12-31T12:00:00Z", "2040-12-31T13:00:00Z"},
		{"Europe/Berlin", Year, "2040-12-31T12:34:56Z", "2039-12-31T23:00:00Z", "2040-12-31T23:00:00Z"},
	} {
		parse := func(s string) int64 {
			at := must.Value(time.Parse(time.RFC3339, s))(t)
			return at.Unix()
		}
		start, end := calendar(tt.period, mustZone(t, tt.zone), 1, parse(tt.at))
		expect.True(t, start == parse(tt.start) && end == parse(tt.end),
			"%s %v at %s: %v to %v, want %s to %s", tt.zone, tt.period, tt.at, time.Unix(start,
				0).UTC().Format(time.RFC3339), time.Unix(end, 0).UTC().Format(time.RFC3339), tt.start, tt.end)
	}
}

// TestCalendarTiles asserts that the windows of a zone follow each other without gap or overlap, whatever its clocks
// do.
func TestCalendarTiles(t *testing.T) {
	for _, name := range []string{"UTC", "Europe/Berlin", "America/Havana", "America/Sao_Paulo", "America/St_Johns",
		"Pacific/Apia",
		"Australia/Lord_Howe", "Asia/Kathmandu", "Africa/Casablanca", "Antarctica/Troll", "America/Scoresbysund"} {
		zone := mustZone(t, name)
		periods := []Period{Minute, Hour, Day, Week, Month, Year, Month, Month, Month, Month}
		for i, p := range periods {
			anchor := 1
			if i >= int(Year) {
				anchor = []int{2, 17, 29, 31}[i-int(Year)]
			}
			stride := int64(7 * time.Hour / time.Second)
			if p == Minute || p == Hour {
				stride = 30*60 - 1
			}
			from := time.Date(2009, 12, 1, 0, 0, 0, 0, time.UTC).Unix()
			until := time.Date(2012, 2, 1, 0, 0, 0, 0, time.UTC).Unix()
			start, end := calendar(p, zone, anchor, from)
			for sec := from; sec < until; sec += stride {
				if sec >= end && (p != Minute && p != Hour || sec-end < stride) {
					s, _ := calendar(p, zone, anchor, end)
					must.True(t, s == end, "%s: the %v after the one that ends at %d begins at %d", name, p, end, s)
				}
				s, e := calendar(p, zone, anchor, sec)
				must.True(t, s <= sec && e > sec, "%s: the %v of %d is %d to %d", name, p, sec, s, e)
				must.True(t, sec >= end || s == start && e == end,
					"%s: the %v of %d is %d to %d, not %d to %d", name, p, sec, s, e, start, end)
				start, end = s, e
			}
		}
	}
}

// TestCalendarStepsBack sets the wall clock back across the start of a window: no window opens a second time.
func TestCalendarStepsBack(t *testing.T) {
	ls := Limits{{Algorithm: FixedWindow, Limit: 2, Period: Day, Zone: mustZone(t, "Europe/Berlin")}}
	a, s := NewArena(nil), make(State, ls.Words())
	noon := time.Date(2024, 3, 31, 12, 0, 0, 0, time.UTC)
	ls.Init(s, Instant{Wall: noon.UnixNano()})
	decide := func(mono time.Duration, wall time.Time, allowed bool, retry time.Duration) {
		t.Helper()
		d, err := ls.Decide(a, s, Instant{int64(mono), wall.UnixNano()}, Request{Cost: 1}, nil)
		expect.True(t, err == nil && d.Allowed == allowed && d.RetryAfter == retry, "at %v: %+v, %v", wall, d, err)
	}
	decide(0, noon, true, 0)
	decide(0, noon.Add(-24*time.Hour), true, 0)
	decide(0, noon.Add(-24*time.Hour), false, 34*time.Hour)
	decide(0, noon.Add(10*time.Hour-1), false, 1)
	decide(0, noon.Add(10*time.Hour), true, 0)
	decide(0, noon, true, 0)
	decide(0, noon, false, 34*time.Hour)

	// Neither by a move to a node whose clock is behind.
	data := ls.Append(nil, a, s, Instant{Wall: noon.UnixNano()})
	must.Value(ls.Restore(a, s, Instant{Wall: noon.UnixNano()}, data))(t)
	decide(0, noon, false, 34*time.Hour)

	// Nor is the window before that one: though nothing has been charged since it ended, the state tells of its end
	// until every node's clock has passed it.
	end := noon.Add(34 * time.Hour)
	for _, move := range []func(s State, now Instant) []byte{
		func(s State, now Instant) []byte { return ls.Append(nil, a, s, now) },
		func(s State, now Instant) []byte { return ls.AppendSince(nil, a, s, now, ls.Mark(s)) },
	} {
		ahead := make(State, len(s))
		copy(ahead, s)
		now := Instant{Wall: end.UnixNano()}
		must.True(t, !ls.Idle(a, ahead, now), "idle at the end of a window")
		data := move(ahead, now)
		now.Wall -= int64(2 * time.Second)
		must.Value(ls.Restore(a, s, now, data))(t)
		decide(0, end.Add(-2*time.Second), true, 0)
		decide(0, end, true, 0)
		decide(0, end, false, 24*time.Hour)
		end = end.Add(24 * time.Hour)
	}
	at := (Instant{Wall: end.Add(wallMargin).UnixNano()})
	must.True(t, ls.Idle(a, s, at), "not idle when all clocks have passed the end")
	ls.Init(s, Instant{})
	for range 2 {
		decide(0, end, true, 0)
	}
	decide(0, noon, false, end.Add(24*time.Hour).Sub(noon))

	// A clock that is wrong by centuries does not make a duration overflow.
	decide(0, time.Unix(0, -1<<63), false, 1<<63-1)
}

// TestCalendarAnchor holds months with an anchor to their rule: they begin on that day, and on the month's last where
// it has none.
func TestCalendarAnchor(t *testing.T) {
	for _, tt := range []struct {
		anchor         int8
		zone           string
		at, start, end string
	}{
		{0, "UTC", "2024-02-29T12:00:00Z", "2024-02-01T00:00:00Z", "2024-03-01T00:00:00Z"},
		{1, "UTC", "2024-02-29T12:00:00Z", "2024-02-01T00:00:00Z", "2024-03-01T00:00:00Z"},
		{17, "UTC", "2024-03-16T23:59:59Z", "2024-02-17T00:00:00Z", "2024-03-17T00:00:00Z"},
		{17, "UTC", "2024-03-17T00:00:00Z", "2024-03-17T00:00:00Z", "2024-04-17T00:00:00Z"},
		{17, "UTC", "2025-01-05T00:00:00Z", "2024-12-17T00:00:00Z", "2025-01-17T00:00:00Z"},
		{17, "UTC", "2024-12-31T00:00:00Z", "2024-12-17T00:00:00Z", "2025-01-17T00:00:00Z"},
		{31, "UTC", "2024-02-28T00:00:00Z", "2024-01-31T00:00:00Z", "2024-02-29T00:00:00Z"},
		{31, "UTC", "2024-02-29T00:00:00Z", "2024-02-29T00:00:00Z", "2024-03-31T00:00:00Z"},
		{30, "UTC", "2023-03-01T00:00:00Z", "2023-02-28T00:00:00Z", "2023-03-30T00:00:00Z"},
		{31, "UTC", "2023-04-30T00:00:00Z", "2023-04-30T00:00:00Z", "2023-05-31T00:00:00Z"},
		{17, "Europe/Berlin", "2024-04-16T21:59:59Z", "2024-03-16T23:00:00Z", "2024-04-16T22:00:00Z"},
		{31, "Europe/Berlin", "2024-03-31T12:00:00Z", "2024-03-30T23:00:00Z", "2024-04-29T22:00:00Z"},
	} {
		l := Limit{Algorithm: FixedWindow, Limit: 1, Period: Month, Anchor: tt.anchor}
		if tt.zone != "UTC" {
			l.Zone = mustZone(t, tt.zone)
		}
		must.NoError(t, l.Validate())
		at := must.Value(time.Parse(time.RFC3339, tt.at))(t)
		start, end := l.windowOf(at.Unix())
		s, e := time.Unix(start, 0).UTC().Format(time.RFC3339), time.Unix(end, 0).UTC().Format(time.RFC3339)
		expect.True(t, s == tt.start && e == tt.end,
			"anchor %d at %s %s: %s to %s, want %s to %s", tt.anchor, tt.at, tt.zone, s, e, tt.start, tt.end)
	}
	for _, l := range []Limit{
		{Algorithm: FixedWindow, Limit: 1, Period: Month, Anchor: 32},
		{Algorithm: FixedWindow, Limit: 1, Period: Month, Anchor: -1},
		{Algorithm: FixedWindow, Limit: 1, Period: Year, Anchor: 2},
		{Algorithm: FixedWindow, Limit: 1, Window: time.Hour, Anchor: 2},
	} {
		var wrong *FieldError
		err := l.Validate()
		expect.True(t, errors.As(err, &wrong) && wrong.Field == "anchor", "%+v: %v, want one about anchor", l, err)
	}
}

// TestCalendarNumbers counts windows of the calendar one by one, forwards and backwards, beside what is reckoned from
// their dates.
func TestCalendarNumbers(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 9))
	for _, name := range []string{"UTC", "Europe/Berlin", "America/Sao_Paulo", "Asia/Kathmandu", "America/Havana"} {
		for p := Day; p <= Year; p++ {
			for _, anchor := range []int8{0, 1, 15, 28, 29, 30, 31} {
				if anchor != 0 && p != Month {
					continue
				}
				l := Limit{Algorithm: FixedWindow, Limit: 1, Period: p, Zone: mustZone(t, name), Anchor: anchor,
					CarryDebt: true}
				sec := r.Int64N(4_000_000_000) - 1_000_000_000
				start, end := l.windowOf(sec)
				must.Equal(t, l.windowAfter(sec, 0), start, "%+v: the window of %d begins at", l, sec)
				for k := int64(1); k < 60; k++ {
					must.Equal(t, l.windowAfter(sec, k), end, "%+v: window %d after %d begins at", l, k, sec)
					got := l.windowsBetween(sec, end)
					must.True(t, got == k, "%+v: %d windows from %d to %d, not %d", l, got, sec, end, k)
					_, end = l.windowOf(end)
				}
			}
		}
	}
}

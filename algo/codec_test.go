package algo

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func TestLimitsRoundTrip(t *testing.T) {
	all := append(shapes(t),
		Limit{Algorithm: FixedWindow, Limit: 5, Period: Week, Zone: time.UTC},
		Limit{Algorithm: FixedWindow, Limit: Unlimited, Period: Month,
			Zone: mustZone(t, "America/Argentina/ComodRivadavia")},
		Limit{Algorithm: Concurrency, Limit: MaxLimit, Window: MaxWindow})
	src := seeded(1, 0)
	for i, l := range all {
		ls := Limits{l}
		for l.Algorithm != Concurrency && src.n(2) == 0 && len(ls) < MaxLimits {
			if m := all[src.n(int64(len(all)-1))]; m.Algorithm != Concurrency {
				ls = append(ls, m)
			}
		}
		data := AppendLimits([]byte("prefix"), ls)
		got, rest, err := ParseLimits(append(data, "rest"...)[len("prefix"):], zoneOf)
		must.True(t, err == nil && string(rest) == "rest" && reflect.DeepEqual(got, ls),
			"%d: %+v is read as %+v, %q, %v", i, ls, got, rest, err)
		again := AppendLimits([]byte("prefix"), got)
		must.True(t, bytes.Equal(again, data), "%d: %x and %x", i, data, again)
	}
}

func TestParseLimitsErrors(t *testing.T) {
	good := Limit{Algorithm: FixedWindow, Limit: 5, Window: time.Minute}
	data := AppendLimits(nil, Limits{good, good})
	for i := range data {
		ls, _, err := ParseLimits(data[:i], zoneOf)
		expect.True(t, err != nil && ls == nil, "cut off at %d: %+v, %v", i, ls, err)
	}
	with := func(i int, b byte) []byte {
		data := bytes.Clone(data)
		data[i] = b
		return data
	}
	for _, tt := range []struct {
		name  string
		data  []byte
		field string // "" for ErrLimits
	}{
		{"another version", with(0, 2), ""},
		{"too many", with(1, MaxLimits+1), ""},
		{"none", []byte{limitsVersion, 0}, "limits"},
		{"an unknown flag", with(4, 4), ""},
		{"an unknown algorithm", with(2, 8), "limits[0].algorithm"},
		{"impossible limits", AppendLimits(nil, Limits{good, {Algorithm: FixedWindow, Limit: 5, Window: 1}}),
			"limits[1].window"},
		{"an impossible limit", AppendLimits(nil, Limits{{Algorithm: FixedWindow, Limit: 0, Window: time.Minute}}),
			"limit"},
	} {
		ls, _, err := ParseLimits(tt.data, zoneOf)
		var f *FieldError
		expect.True(t, ls == nil && (tt.field != "" || err == ErrLimits) &&
			(tt.field == "" || errors.As(err, &f) && f.Field == tt.field),
			"%s: %+v, %v; want an error about %q", tt.name, ls, err, tt.field)
	}
}

// zoneOf knows every zone there is.
func zoneOf(name string) *time.Location {
	zone, err := time.LoadLocation(name)
	if err != nil {
		return nil
	}
	return zone
}

func TestParseLimitsZones(t *testing.T) {
	for _, name := range []string{"Europe/Atlantis", "a name that nobody knows, " + strings.Repeat("A", 300)} {
		var asked []string
		data := AppendLimits(nil,
			Limits{{Algorithm: FixedWindow, Limit: 5, Period: Day, Zone: time.FixedZone(name, 3600)}})
		ls, _, err := ParseLimits(data, func(name string) *time.Location {
			asked = append(asked, name)
			return nil
		})
		var unknown *ZoneError
		want := name[:min(len(name), longestZone)]
		expect.True(t, ls == nil && errors.As(err, &unknown) && unknown.Name == want && len(asked) == 1 &&
			asked[0] == want, "%+v, %v; asked for %q", ls, err, asked)
		berlin := zoneOf("Europe/Berlin")
		ls, _, err = ParseLimits(data, func(string) *time.Location { return berlin })
		expect.True(t, err == nil && ls[0].Zone == berlin, "%+v, %v", ls, err)
	}
}

// FuzzParseLimits reads anything as limits; what is accepted is valid and means what its own bytes mean.
func FuzzParseLimits(f *testing.F) {
	for pick := range byte(12) {
		f.Add(AppendLimits(nil, fuzzLimits(f, pick)))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		ls, rest, err := ParseLimits(data, zoneOf)
		if err != nil {
			return
		}
		err = ls.Validate()
		must.True(t, err == nil && bytes.HasSuffix(data, rest), "%+v: %v, rest %x", ls, err, rest)
		again, rest, err := ParseLimits(AppendLimits(nil, ls), zoneOf)
		must.True(t, err == nil && len(rest) == 0 && bytes.Equal(AppendLimits(nil, again), AppendLimits(nil, ls)),
			"%+v is read as %+v, %v", ls, again, err)
		ls.Init(make(State, ls.Words()), Instant{})
	})
}

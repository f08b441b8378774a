package algo

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func mustZone(t testing.TB, name string) *time.Location {
	t.Helper()
	zone := must.Value(time.LoadLocation(name))(t)
	return zone
}

// shapes are limits of every kind, the extreme ones among them.
func shapes(t testing.TB) []Limit {
	berlin := mustZone(t, "Europe/Berlin")
	var shapes []Limit
	windows := []time.Duration{MinWindow, 1_000_003, time.Second, 7 * time.Second / 3, time.Minute, time.Hour,
		24 * time.Hour, MaxWindow}
	limits := []int64{1, 2, 3, 5, 10, 100, 1000, 1 << 40, MaxLimit}
	for i, w := range windows {
		for _, n := range limits {
			for _, denied := range []bool{false, true} {
				shapes = append(shapes,
					Limit{Algorithm: FixedWindow, Limit: n, Window: w, CountDenied: denied},
					Limit{Algorithm: SlidingWindow, Limit: n, Window: w, CountDenied: denied,
						Slots: []int32{0, 1, 2, 7, 100, 3, 0, 64}[i]},
					Limit{Algorithm: SlidingCounter, Limit: n, Window: w, CountDenied: denied},
					Limit{Algorithm: SlidingLog, Limit: n, Window: w, CountDenied: denied, MaxLog: MaxLimit})
			}
			for _, carry := range []bool{false, true} {
				shapes = append(shapes, Limit{Algorithm: FixedWindow, Limit: n, Window: w, CarryDebt: carry,
					MaxDebt: n/2 + 1})
				if w%time.Second == 0 {
					shapes = append(shapes, Limit{Algorithm: FixedWindow, Limit: n, Window: w, Period: Epoch,
						CarryDebt: carry})
				}
			}
			shapes = append(shapes, Limit{Algorithm: SlidingWindow, Limit: n, Window: w, MaxDebt: 3},
				Limit{Algorithm: SlidingLog, Limit: n, Window: w, MaxLog: MaxLimit, MaxDebt: min(2*n, MaxLimit)})
			for _, capacity := range []int64{0, 1, 7, n/3 + 1} {
				for _, a := range []Algorithm{TokenBucket, LeakyBucket} {
					l := Limit{Algorithm: a, Limit: n, Window: w, Capacity: capacity}
					if l.Validate() == nil {
						shapes = append(shapes, l)
					}
				}
			}
		}
	}
	for p := Minute; p <= Year; p++ {
		for _, n := range []int64{1, 10, MaxLimit} {
			shapes = append(shapes, Limit{Algorithm: FixedWindow, Limit: n, Period: p},
				Limit{Algorithm: FixedWindow, Limit: n, Period: p, Zone: berlin, CountDenied: true})
			if p > Hour {
				shapes = append(shapes, Limit{Algorithm: FixedWindow, Limit: n, Period: p, CarryDebt: true},
					Limit{Algorithm: FixedWindow, Limit: n, Period: p, Zone: berlin, CarryDebt: true,
						MaxDebt: min(5*n/2+1, MaxLimit)})
			}
		}
	}
	return append(shapes, Limit{Algorithm: SlidingLog, Limit: Unlimited})
}

// origins are instants at which a history may begin.
var origins = []Instant{
	{},
	{Mono: 12_345_678_901, Wall: 1_700_000_000_123_456_789},
	{Mono: -987_654_321_987, Wall: 1_711_846_799_999_999_999}, // before a DST change in Berlin
	{Mono: int64(MaxFill), Wall: 1_729_989_000_000_000_000},   // the century's upper end
}

func TestAgainstOracle(t *testing.T) {
	steps := 250
	if testing.Short() || underRace {
		steps = 40
	}
	for i, l := range shapes(t) {
		t.Run(fmt.Sprintf("%v/%d", l.Algorithm, i), func(t *testing.T) {
			p := newPlayer(t, seeded(uint64(i), steps), origins[i%len(origins)], l)
			p.play(false)
		})
	}
}

func TestSeveralAgainstOracles(t *testing.T) {
	all := shapes(t)
	r := rand.New(rand.NewPCG(1, 2))
	seeds := uint64(400)
	if testing.Short() || underRace {
		seeds = 60
	}
	for seed := range seeds {
		limits := make(Limits, 2+r.IntN(3))
		for i := range limits {
			limits[i] = all[r.IntN(len(all))]
			if r.IntN(3) > 0 {
				limits[i] = all[r.IntN(len(all)/2)] // more of those with small windows
			}
		}
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			p := newPlayer(t, seeded(seed, 150), origins[seed%uint64(len(origins))], limits...)
			p.play(false)
		})
	}
}

// TestLongLogs has logs of many segments, which the other histories rarely grow.
func TestLongLogs(t *testing.T) {
	for seed := range uint64(12) {
		src := seeded(seed, 1<<30)
		l := Limit{Algorithm: SlidingLog, Limit: 500 + src.n(3000), Window: time.Second, CountDenied: seed%3 == 0}
		p := newPlayer(t, src, origins[seed%uint64(len(origins))], l)
		for range 3 {
			gap := int64(l.Window) / l.Limit
			for range 700 {
				p.now = later(p.now, time.Duration(src.n(3*gap)))
				r := Request{Cost: 1}
				switch src.n(12) {
				case 0:
					r.Cost = 2 + src.n(20)
				case 1:
					r.Cost = 1 + src.n(l.Limit)
					r.Partial = src.n(1) == 0
				case 2:
					if src.n(5) == 0 {
						p.refund(src.n(l.Limit))
					}
				}
				p.check(r)
			}
			p.move(src.n(1 << 50))
			p.now = later(p.now, time.Duration(src.n(int64(l.Window))))
		}
		p.limits.Free(p.arena, p.state)
		p.wantBlocks(0)
	}
}

// TestGuarantees asserts of every algorithm what the documentation promises, from nothing but what was admitted when.
func TestGuarantees(t *testing.T) {
	for i, l := range shapes(t) {
		if l.Limit == Unlimited || l.Period != 0 {
			continue
		}
		steps := 250
		if testing.Short() || underRace {
			steps = 40
		}
		p := newPlayer(t, seeded(uint64(i), steps), origins[0], l)
		p.play(true)
		guarantee(p, l)
	}
}

func guarantee(p *player, l Limit) {
	p.t.Helper()
	w := int64(l.Window)
	for i, first := range p.admitted {
		var n int64
		for _, e := range p.admitted[i:] {
			n += e.n
			t := e.at - first.at
			switch l.Algorithm {
			case SlidingLog, SlidingWindow:
				if t < w && n > l.Limit {
					p.fatalf("%d units within %d ns", n, t)
				}
			case FixedWindow, SlidingCounter:
				if t < w && n > 2*l.Limit {
					p.fatalf("%d units within %d ns", n, t)
				}
			case TokenBucket, LeakyBucket:
				// n ≤ capacity + limit·t/window
				if over := n - p.cap(0); over > 0 && mul(l.Limit, t).less(mul(over, w)) {
					p.fatalf("%d units within %d ns", n, t)
				}
			}
		}
	}
}

func TestNeverAndNegative(t *testing.T) {
	for _, l := range shapes(t) {
		if l.Limit == Unlimited {
			continue
		}
		ls, a := Limits{l}, NewArena(nil)
		s := make(State, ls.Words())
		ls.Init(s, Instant{})
		for _, cost := range []int64{-1, l.holds() + 1, MaxLimit + 1, 1<<63 - 1, -1 << 63} {
			d := must.Value(ls.Decide(a, s, Instant{}, Request{Cost: cost}, nil))(t)
			must.True(t, !d.Allowed && d.Granted == 0 && d.RetryAfter == Never, "%+v: cost %d: %+v", l, cost, d)
		}
		must.Equal(t, ls.Refund(a, s, Instant{}, -5), 0, "%+v: refund of -5 gave back", l)
		ls.Free(a, s)
	}
}

func TestValidate(t *testing.T) {
	for _, tt := range []struct {
		limits Limits
		field  string // "" when valid
	}{
		{nil, "limits"},
		{make(Limits, MaxLimits+1), "limits"},
		{Limits{{}}, "algorithm"},
		{Limits{{Algorithm: 8, Limit: 1, Window: time.Second}}, "algorithm"},
		{Limits{{Algorithm: FixedWindow, Window: time.Second}}, "limit"},
		{Limits{{Algorithm: FixedWindow, Limit: -2, Window: time.Second}}, "limit"},
		{Limits{{Algorithm: FixedWindow, Limit: MaxLimit + 1, Window: time.Second}}, "limit"},
		{Limits{{Algorithm: FixedWindow, Limit: 1}}, "window"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Window: MinWindow - 1}}, "window"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Window: MaxWindow + 1}}, "window"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Window: -time.Second}}, "window"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Window: time.Hour, Period: Day}}, "window"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Period: 8}}, "window"},
		{Limits{{Algorithm: SlidingLog, Limit: 1, Period: Day}}, "align"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Window: time.Hour, Zone: time.UTC}}, "time_zone"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Window: time.Hour, Slots: 3}}, "slots"},
		{Limits{{Algorithm: SlidingWindow, Limit: 1, Window: time.Hour, Slots: MaxSlots + 1}}, "slots"},
		{Limits{{Algorithm: SlidingWindow, Limit: 1, Window: time.Hour, Slots: -1}}, "slots"},
		{Limits{{Algorithm: SlidingLog, Limit: 1, Window: time.Hour, Capacity: 1}}, "capacity"},
		{Limits{{Algorithm: TokenBucket, Limit: 1, Window: time.Hour, Capacity: -1}}, "capacity"},
		{Limits{{Algorithm: TokenBucket, Limit: 1, Window: time.Hour, Capacity: MaxLimit + 1}}, "capacity"},
		{Limits{{Algorithm: LeakyBucket, Limit: 1, Window: MaxWindow, Capacity: 101}}, "capacity"},
		{Limits{{Algorithm: LeakyBucket, Limit: 1, Window: MaxWindow, Capacity: 100}}, ""},
		{Limits{{Algorithm: TokenBucket, Limit: 1, Window: time.Hour, CountDenied: true}}, "count_denied"},
		{Limits{{Algorithm: Concurrency, Limit: 1, Window: time.Hour, CountDenied: true}}, "count_denied"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Window: time.Hour, MaxLog: 1}}, "max_log"},
		{Limits{{Algorithm: SlidingLog, Limit: 1, Window: time.Hour, MaxLog: -1}}, "max_log"},
		{Limits{{Algorithm: SlidingLog, Limit: DefaultMaxLog + 1, Window: time.Hour}}, "limit"},
		{Limits{{Algorithm: SlidingLog, Limit: DefaultMaxLog + 1, Window: time.Hour, MaxLog: DefaultMaxLog + 1}}, ""},
		{Limits{{Algorithm: SlidingLog, Limit: DefaultMaxLog, Window: time.Hour}}, ""},
		{Limits{{Algorithm: FixedWindow, Limit: Unlimited}}, ""},
		{Limits{{Algorithm: FixedWindow, Limit: Unlimited, Window: time.Nanosecond}}, "window"},
		{Limits{{Algorithm: SlidingWindow, Limit: Unlimited, Window: time.Hour, Slots: 3}}, "slots"},
		{Limits{{Algorithm: TokenBucket, Limit: Unlimited, Window: time.Second, Capacity: 3}}, "capacity"},
		{Limits{{Algorithm: LeakyBucket, Limit: Unlimited, Capacity: 3}}, "capacity"},
		{Limits{{Algorithm: SlidingLog, Limit: Unlimited, CountDenied: true}}, "count_denied"},
		{Limits{{Algorithm: SlidingLog, Limit: Unlimited, MaxLog: 3}}, "max_log"},
		{Limits{{Algorithm: TokenBucket, Limit: Unlimited, Window: time.Hour}}, ""},
		{Limits{{Algorithm: FixedWindow, Limit: Unlimited, Period: Month, Zone: time.UTC}}, ""},
		{Limits{{Algorithm: FixedWindow, Limit: 5, Period: Month, Zone: time.UTC, CountDenied: true}}, ""},
		{Limits{{Algorithm: SlidingLog, Limit: 1, Window: time.Hour}, {Algorithm: SlidingLog, Limit: 1}},
			"limits[1].window"},
		{Limits{{Algorithm: SlidingLog, Limit: 1, Window: time.Hour},
			{Algorithm: Concurrency, Limit: 1, Window: time.Hour}}, "limits[1].algorithm"},
		{Limits{{Algorithm: Concurrency, Limit: 1, Window: time.Hour}}, ""},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Period: Epoch, Window: 5 * time.Minute, CarryDebt: true,
			MaxDebt: 1}}, ""},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Period: Epoch}}, "window"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Period: Epoch, Window: 1500 * time.Millisecond}}, "window"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Period: Epoch, Window: time.Second, Zone: time.UTC}}, "time_zone"},
		{Limits{{Algorithm: SlidingLog, Limit: 1, Period: Epoch, Window: time.Second}}, "align"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Period: Day, CarryDebt: true}}, ""},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Period: Month, Anchor: 31, CarryDebt: true}}, ""},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Period: Hour, CarryDebt: true}}, "carry_debt"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Period: Minute, CarryDebt: true}}, "carry_debt"},
		{Limits{{Algorithm: TokenBucket, Limit: 1, Window: time.Hour, CarryDebt: true}}, "carry_debt"},
		{Limits{{Algorithm: FixedWindow, Limit: Unlimited, Window: time.Hour, CarryDebt: true}}, "carry_debt"},
		{Limits{{Algorithm: Concurrency, Limit: 1, Window: time.Hour, MaxDebt: 1}}, "max_debt"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Window: time.Hour, MaxDebt: -1}}, "max_debt"},
		{Limits{{Algorithm: FixedWindow, Limit: 1, Window: time.Hour, MaxDebt: MaxLimit + 1}}, "max_debt"},
		{Limits{{Algorithm: FixedWindow, Limit: Unlimited, Window: time.Hour, MaxDebt: 1}}, "max_debt"},
	} {
		err := tt.limits.Validate()
		if tt.field == "" && err == nil {
			continue
		}
		if f, ok := err.(*FieldError); !ok || f.Field != tt.field || f.Error() != f.Field+": "+f.Message {
			t.Errorf("%+v: %v, want an error about %q", tt.limits, err, tt.field)
		}
	}
}

// TestValidateMessages: what a person reads, in the notation of policies.
func TestValidateMessages(t *testing.T) {
	const day = 24 * time.Hour
	window := func(d time.Duration) Limit { return Limit{Algorithm: FixedWindow, Limit: 1, Window: d} }
	for _, tt := range []struct {
		limit Limit
		want  string
	}{
		{window(0), "window: must be between 1ms and 366d; it is 0s"},
		{window(-time.Second), "window: must be between 1ms and 366d; it is -1s"},
		{window(time.Microsecond), "window: must be between 1ms and 366d; it is 1µs"},
		{window(400 * day), "window: must be between 1ms and 366d; it is 400d"},
		{window(366*day + time.Second), "window: must be between 1ms and 366d; it is 366d1s"},
		{window(366*day + 10*time.Minute), "window: must be between 1ms and 366d; it is 366d10m"},
		{window(366*day + 20*time.Hour), "window: must be between 1ms and 366d; it is 366d20h"},
		{Limit{Algorithm: TokenBucket, Limit: Unlimited, Window: time.Second, Capacity: 3},
			"capacity: is for a limit, and this one is unlimited"},
		{Limit{Algorithm: TokenBucket, Limit: 1, Window: MaxWindow, Capacity: 101},
			"capacity: takes more than 36600 days to fill at this rate"},
	} {
		err := tt.limit.Validate()
		expect.True(t, err != nil && err.Error() == tt.want, "%+v:\n got %v\nwant %s", tt.limit, err, tt.want)
	}
}

func TestNames(t *testing.T) {
	for a := FixedWindow; a <= Concurrency; a++ {
		b, ok := ParseAlgorithm(a.String())
		expect.True(t, ok && b == a, "%v is read as %v", a, b)
	}
	for p := Minute; p <= Year; p++ {
		q, ok := ParsePeriod(p.String())
		expect.True(t, ok && q == p, "%v is read as %v", p, q)
	}
	for _, name := range []string{"", "algorithm(0)", "Fixed_Window"} {
		_, ok := ParseAlgorithm(name)
		expect.True(t, !ok, "%q is an algorithm", name)
		_, ok = ParsePeriod(name)
		expect.True(t, !ok, "%q is a period", name)
	}
	expect.True(t, Algorithm(0).String() == "algorithm(0)" && Period(9).String() == "period(9)",
		"unknown values have no name")
}

package httpapi

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
)

// limitBody is a limit in requests and in GET /v1/policies.
type limitBody struct {
	Algorithm   string `json:"algorithm"`
	Limit       *int64 `json:"limit"`
	Window      string `json:"window,omitempty"`
	TTL         string `json:"ttl,omitempty"`
	Align       string `json:"align,omitempty"`
	TimeZone    string `json:"time_zone,omitempty"`
	Slots       *int32 `json:"slots,omitempty"`
	Capacity    *int64 `json:"capacity,omitempty"`
	CountDenied bool   `json:"count_denied,omitzero"`
	Anchor      *int8  `json:"anchor,omitempty"`
	CarryDebt   bool   `json:"carry_debt,omitzero"`
	MaxDebt     *int64 `json:"max_debt,omitempty"`
}

// The values of align: a fixed window begins with the first admission, or with the calendar's period.
const (
	firstHit = "first_hit"
	calendar = "calendar"
)

// limit converts a limit. Package algo validates its numbers.
func (a *api) limit(b *limitBody) (algo.Limit, *problem) {
	l := algo.Limit{CountDenied: b.CountDenied, CarryDebt: b.CarryDebt}
	var ok bool
	if l.Algorithm, ok = algo.ParseAlgorithm(b.Algorithm); !ok {
		return l, invalid("algorithm", "must be one of fixed_window, sliding_window, sliding_counter, sliding_log, "+
			"token_bucket, leaky_bucket and concurrency")
	}
	if b.Limit == nil {
		return l, invalid("limit",
			fmt.Sprintf("must be given: 1 to %d, or %d for unlimited", algo.MaxLimit, algo.Unlimited))
	}
	l.Limit = *b.Limit
	if p := a.window(&l, b); p != nil {
		return l, p
	}
	p := cmp.Or(optional("slots", b.Slots, &l.Slots, "must not be 0; leave it out for the default"),
		optional("capacity", b.Capacity, &l.Capacity, "must not be 0; leave it out for the default"),
		optional("anchor", b.Anchor, &l.Anchor, "must be a day of the month, 1 to 31; leave it out for the first"),
		optional("max_debt", b.MaxDebt, &l.MaxDebt, "must not be 0; leave it out for the default"))
	if p != nil {
		return l, p
	}
	if wrong := limit.ValidLimit(&l); wrong != nil {
		p := problemOf(wrong)
		p.field = strings.TrimPrefix(p.field, "limit.")
		return l, p
	}
	return l, nil
}

// optional reads a number that may be left out. An explicit 0, which would mean the same, is rejected with the text
// zero.
func optional[N int8 | int32 | int64](field string, given, to *N, zero string) *problem {
	if given == nil {
		return nil
	}
	if *to = *given; *to == 0 {
		return invalid(field, zero)
	}
	return nil
}

// unless0 returns nil, which is left out of JSON, for 0.
func unless0[N int8 | int32 | int64](n *N) *N {
	if *n == 0 {
		return nil
	}
	return n
}

// window reads the fields of a limit's time: window or ttl, align and time_zone.
func (a *api) window(l *algo.Limit, b *limitBody) *problem {
	field, text := "window", b.Window
	if l.Algorithm == algo.Concurrency {
		field, text = "ttl", b.TTL
	}
	switch {
	case l.Algorithm == algo.Concurrency && b.Window != "":
		return invalid("window", "a concurrency limit has a ttl instead: the longest life of a lease")
	case l.Algorithm != algo.Concurrency && b.TTL != "":
		return invalid("ttl", "is for concurrency only; the other algorithms have a window")
	case b.Align != "" && b.Align != firstHit && b.Align != calendar:
		return invalid("align", "must be first_hit or calendar")
	case b.Align != "" && l.Algorithm != algo.FixedWindow:
		return invalid("align", "is for fixed_window only")
	case b.TimeZone != "" && b.Align != calendar:
		return invalid("time_zone", "goes with align: calendar")
	}
	if b.Align == calendar {
		var ok bool
		if l.Period, ok = algo.ParsePeriod(text); !ok {
			return invalid("window", "must be one of minute, hour, day, week, month and year with align: calendar")
		}
		var err error
		if l.Zone, err = a.zone(b.TimeZone); err != nil {
			return invalid("time_zone", err.Error())
		}
		return nil
	}
	if text == "" {
		if l.Limit == algo.Unlimited {
			return nil
		}
		return invalid(field, "must be given, such as 60s or 1d")
	}
	if _, isPeriod := algo.ParsePeriod(text); isPeriod {
		return invalid(field, text+" needs algorithm fixed_window and align: calendar")
	}
	d, err := policy.ParseDuration(text)
	if err != nil {
		return invalid(field, err.Error())
	}
	if d == 0 {
		return invalid(field, "must not be 0") // Validate accepts 0 for a limit that is unlimited
	}
	l.Window = d
	return nil
}

// limitBodyOf is the inverse of limit.
func limitBodyOf(l *algo.Limit) limitBody {
	b := limitBody{
		Algorithm: l.Algorithm.String(), Limit: &l.Limit, CountDenied: l.CountDenied, CarryDebt: l.CarryDebt,
		Slots: unless0(&l.Slots), Capacity: unless0(&l.Capacity), Anchor: unless0(&l.Anchor),
		MaxDebt: unless0(&l.MaxDebt),
	}
	switch {
	case l.Period != 0:
		b.Align, b.Window, b.TimeZone = calendar, l.Period.String(), "UTC"
		if l.Zone != nil {
			b.TimeZone = l.Zone.String()
		}
	case l.Window == 0:
	case l.Algorithm == algo.Concurrency:
		b.TTL = formatDuration(l.Window)
	default:
		b.Window = formatDuration(l.Window)
	}
	return b
}

// formatDuration is Duration.String without trailing zeros: 1m, not 1m0s.
func formatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-len("0s")]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-len("0m")]
	}
	return s
}

// zone returns the time zone with a name; nil for UTC.
func (a *api) zone(name string) (*time.Location, error) {
	if name == "" || name == "UTC" {
		return nil, nil
	}
	return a.zones.Load(name)
}

package httpapi

import (
	_ "embed"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

//go:embed PROBLEMS.md
var problemsPage string

func unmarshal(text string, v any) error { return json.Unmarshal([]byte(text), v) }

func TestRoundUp(t *testing.T) {
	for _, tt := range []struct {
		d    time.Duration
		ms   int64
		secs int64
	}{
		{math.MinInt64, 0, 0},
		{algo.Never, 0, 0},
		{0, 0, 0},
		{1, 1, 1},
		{time.Millisecond - 1, 1, 1},
		{time.Millisecond, 1, 1},
		{time.Millisecond + 1, 2, 1},
		{time.Second, 1000, 1},
		{time.Second + 1, 1001, 2},
		{math.MaxInt64, math.MaxInt64/1_000_000 + 1, math.MaxInt64/1_000_000_000 + 1},
	} {
		if got := roundUp(tt.d, time.Millisecond); got != tt.ms {
			t.Errorf("%v is %d ms, want %d", tt.d, got, tt.ms)
		}
		if got := roundUp(tt.d, time.Second); got != tt.secs {
			t.Errorf("%v is %d s, want %d", tt.d, got, tt.secs)
		}
	}
}

// The same fields for the JSON library, which is what the encoder by hand is held to.
type (
	decisionFields struct {
		Allowed      bool           `json:"allowed"`
		Granted      int64          `json:"granted"`
		Limit        int64          `json:"limit"`
		Remaining    int64          `json:"remaining"`
		RetryAfterMS *int64         `json:"retry_after_ms,omitzero"`
		ResetAfterMS int64          `json:"reset_after_ms"`
		DelayMS      int64          `json:"delay_ms"`
		Policy       string         `json:"policy"`
		Shadow       bool           `json:"shadow"`
		Degraded     bool           `json:"degraded"`
		FailedOpen   bool           `json:"failed_open"`
		FailedClosed bool           `json:"failed_closed"`
		RequestID    string         `json:"request_id,omitempty"`
		LeaseID      string         `json:"lease_id,omitempty"`
		Reservation  string         `json:"reservation_id,omitempty"`
		Limits       []statusFields `json:"limits,omitempty"`
	}
	statusFields struct {
		Limit        int64  `json:"limit"`
		WindowMS     int64  `json:"window_ms,omitzero"`
		Remaining    int64  `json:"remaining"`
		RetryAfterMS *int64 `json:"retry_after_ms,omitzero"`
		ResetAfterMS int64  `json:"reset_after_ms"`
	}
)

func TestDecisionEncoding(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	ms := func(d time.Duration) int64 { return int64(math.Ceil(float64(d) / 1e6)) }
	duration := func() time.Duration { return time.Duration(random.Int64N(5e6)) }
	wait := func() (time.Duration, *int64) {
		if random.IntN(3) == 0 {
			return algo.Never, nil
		}
		d := duration()
		n := ms(d)
		return d, &n
	}
	text := func() string { return []string{"", "a", `"\`, "\x00\n\u2028", "käse", "<&>", "😀"}[random.IntN(7)] }
	for range 2000 {
		d := limit.Decision{
			Allowed: random.IntN(2) == 0, Granted: random.Int64N(9), Limit: random.Int64N(9) - 1, Remaining: random.Int64(),
			ResetAfter: duration(), Delay: duration(), Policy: text(),
			Shadow: random.IntN(2) == 0, Degraded: random.IntN(2) == 0, FailedOpen: random.IntN(2) == 0,
			FailedClosed: random.IntN(2) == 0, RequestID: text(), LeaseID: text(),
			ReservationID: text(),
		}
		f := decisionFields{
			Allowed: d.Allowed, Granted: d.Granted, Limit: d.Limit, Remaining: d.Remaining, ResetAfterMS: ms(d.ResetAfter),
			DelayMS: ms(d.Delay), Policy: d.Policy, Shadow: d.Shadow, Degraded: d.Degraded, FailedOpen: d.FailedOpen,
			FailedClosed: d.FailedClosed, RequestID: d.RequestID, LeaseID: d.LeaseID,
			Reservation: d.ReservationID,
		}
		d.RetryAfter, f.RetryAfterMS = wait()
		if d.Allowed {
			f.RetryAfterMS = new(int64)
		}
		for range random.IntN(4) {
			l := limit.LimitStatus{Limit: random.Int64N(9) - 1, Window: time.Duration(random.Int64N(3)) * time.Second,
				Remaining: random.Int64N(9), ResetAfter: duration()}
			g := statusFields{Limit: l.Limit, WindowMS: ms(l.Window), Remaining: l.Remaining, ResetAfterMS: ms(l.ResetAfter)}
			l.RetryAfter, g.RetryAfterMS = wait()
			d.Limits, f.Limits = append(d.Limits, l), append(f.Limits, g)
		}
		want, err := json.Marshal(&f)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(appendDecision(nil, &d))); diff != "" {
			t.Fatalf("%+v (-library +by hand):\n%s", d, diff)
		}
	}
}

func TestQuotaFields(t *testing.T) {
	several := limit.Decision{Policy: "api", Allowed: true, Limit: 10, Window: time.Second, Remaining: 3, ResetAfter: time.Second,
		Limits: []limit.LimitStatus{
			{Limit: 10, Window: time.Second, Remaining: 3, ResetAfter: time.Second},
			{Limit: algo.Unlimited, Window: time.Minute},
			{Limit: 1000, Window: time.Hour, Remaining: 900, ResetAfter: 59 * time.Minute},
		}}
	severalRefused := several
	severalRefused.Allowed, severalRefused.Remaining, severalRefused.RetryAfter = false, 0, 300*time.Millisecond
	severalRefused.Limits = []limit.LimitStatus{
		{Limit: 10, Window: time.Second, RetryAfter: 300 * time.Millisecond, ResetAfter: time.Second},
		{Limit: 1000, Window: time.Hour, Remaining: 900, ResetAfter: 59 * time.Minute},
	}
	for _, tt := range []struct {
		name     string
		decision limit.Decision
		want     [5]string // RateLimit-Policy, RateLimit, X-RateLimit-Limit, -Remaining, -Reset
	}{
		{"admitted", admitted, [5]string{`"login";q=5;w=60`, `"login";r=4;t=60`, "5", "4", "60"}},
		{"refused", refused, [5]string{`"login";q=5;w=60`, `"login";r=0;t=37`, "5", "0", "37"}},
		{"inline, nothing used", limit.Decision{Policy: "inline", Allowed: true, Limit: 100, Window: time.Minute, Remaining: 100},
			[5]string{`"inline";q=100;w=60`, `"inline";r=100`, "100", "100", "0"}},
		{"calendar", limit.Decision{Policy: "report", Allowed: true, Limit: 100, Remaining: 99, ResetAfter: 3*time.Hour + 1},
			[5]string{`"report";q=100`, `"report";r=99;t=10801`, "100", "99", "10801"}},
		{"short window", limit.Decision{Policy: "p", Allowed: true, Limit: 3, Window: 100 * time.Millisecond, Remaining: 2, ResetAfter: 1},
			[5]string{`"p";q=3;w=1`, `"p";r=2;t=1`, "3", "2", "1"}},
		{"window of a second and a half", limit.Decision{Policy: "p", Allowed: true, Limit: 3, Window: 1500 * time.Millisecond, Remaining: 3},
			[5]string{`"p";q=3;w=2`, `"p";r=3`, "3", "3", "0"}},
		{"never", limit.Decision{Policy: "p", Limit: 3, Window: time.Second, Remaining: 3, RetryAfter: algo.Never},
			[5]string{`"p";q=3;w=1`, `"p";r=3`, "3", "3", "0"}},
		{"blocked", limit.Decision{Policy: "p", RetryAfter: algo.Never}, [5]string{`"p";q=0`, `"p";r=0`, "0", "0", "0"}},
		{"unlimited", limit.Decision{Policy: "p", Allowed: true, Granted: 1, Limit: algo.Unlimited, Remaining: algo.Unlimited}, [5]string{}},
		{"failed open", limit.Decision{Policy: "p", Allowed: true, Limit: 5, FailedOpen: true}, [5]string{}},
		{"failed closed", limit.Decision{Policy: "p", Limit: 5, FailedClosed: true}, [5]string{}},
		{"largest", limit.Decision{Policy: "p", Allowed: true, Limit: algo.MaxLimit, Window: time.Second, Remaining: algo.MaxLimit - 1, ResetAfter: time.Second},
			[5]string{`"p";q=999999999999999;w=1`, `"p";r=999999999999999;t=1`, "9007199254740992", "9007199254740991", "1"}},
		{"several", several, [5]string{`"api";q=10;w=1, "api/3";q=1000;w=3600`, `"api";r=3;t=1, "api/3";r=900;t=3540`, "10", "3", "1"}},
		{"several, refused", severalRefused, [5]string{`"api";q=10;w=1, "api/2";q=1000;w=3600`, `"api";r=0;t=1, "api/2";r=900`, "10", "0", "1"}},
		{"a name that no policy has", limit.Decision{Policy: "a\"b\\c\r\nX: yä", Allowed: true, Limit: 1, Remaining: 1},
			[5]string{`"a\"b\\cX: y";q=1`, `"a\"b\\cX: y";r=1`, "1", "1", "0"}},
	} {
		h := make(http.Header)
		setQuota(h, new(scratch), &tt.decision)
		var got [5]string
		for i, name := range []string{"RateLimit-Policy", "RateLimit", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"} {
			got[i] = strings.Join(h[name], "|")
		}
		if got != tt.want {
			t.Errorf("%s:\n got %q\nwant %q", tt.name, got, tt.want)
		}
	}
}

package quotaheader

import (
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
)

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
		expect.Equal(t, RoundUp(tt.d, time.Millisecond), tt.ms, "milliseconds of %v", tt.d)
		expect.Equal(t, RoundUp(tt.d, time.Second), tt.secs, "seconds of %v", tt.d)
	}
}

func TestQuotaFields(t *testing.T) {
	several := limit.Decision{Policy: "api", Allowed: true, Limit: 10, Window: time.Second, Remaining: 3,
		ResetAfter: time.Second,
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
	banned := severalRefused
	banned.Banned, banned.RetryAfter, banned.ResetAfter = true, 5*time.Minute, 5*time.Minute
	banned.Limits = []limit.LimitStatus{
		{Limit: 10, Window: time.Second, Remaining: 10},
		{Limit: 1000, Window: time.Hour, Remaining: 900, ResetAfter: 59 * time.Minute},
	}
	for _, tt := range []struct {
		name     string
		decision limit.Decision
		want     [5]string // RateLimit-Policy, RateLimit, X-RateLimit-Limit, -Remaining, -Reset
	}{
		{"admitted", limit.Decision{Policy: "login", Allowed: true, Granted: 1, Limit: 5, Window: time.Minute,
			Remaining: 4, ResetAfter: time.Minute}, [5]string{`"login";q=5;w=60`, `"login";r=4;t=60`, "5", "4", "60"}},
		{"refused", limit.Decision{Policy: "login", Limit: 5, Window: time.Minute, RetryAfter: 36*time.Second + 1,
			ResetAfter: time.Minute}, [5]string{`"login";q=5;w=60`, `"login";r=0;t=37`, "5", "0", "37"}},
		{"inline, nothing used", limit.Decision{Policy: "inline", Allowed: true, Limit: 100, Window: time.Minute,
			Remaining: 100},
			[5]string{`"inline";q=100;w=60`, `"inline";r=100`, "100", "100", "0"}},
		{"calendar", limit.Decision{Policy: "report", Allowed: true, Limit: 100, Remaining: 99,
			ResetAfter: 3*time.Hour + 1},
			[5]string{`"report";q=100`, `"report";r=99;t=10801`, "100", "99", "10801"}},
		{"short window", limit.Decision{Policy: "p", Allowed: true, Limit: 3, Window: 100 * time.Millisecond,
			Remaining: 2, ResetAfter: 1},
			[5]string{`"p";q=3;w=1`, `"p";r=2;t=1`, "3", "2", "1"}},
		{"window of a second and a half",
			limit.Decision{Policy: "p", Allowed: true, Limit: 3, Window: 1500 * time.Millisecond, Remaining: 3},
			[5]string{`"p";q=3;w=2`, `"p";r=3`, "3", "3", "0"}},
		{"never", limit.Decision{Policy: "p", Limit: 3, Window: time.Second, Remaining: 3, RetryAfter: algo.Never},
			[5]string{`"p";q=3;w=1`, `"p";r=3`, "3", "3", "0"}},
		{"blocked", limit.Decision{Policy: "p", RetryAfter: algo.Never},
			[5]string{`"p";q=0`, `"p";r=0`, "0", "0", "0"}},
		{"unlimited", limit.Decision{Policy: "p", Allowed: true, Granted: 1, Limit: algo.Unlimited,
			Remaining: algo.Unlimited}, [5]string{}},
		{"failed open", limit.Decision{Policy: "p", Allowed: true, Limit: 5, FailedOpen: true}, [5]string{}},
		{"failed closed", limit.Decision{Policy: "p", Limit: 5, FailedClosed: true}, [5]string{}},
		{"largest", limit.Decision{Policy: "p", Allowed: true, Limit: algo.MaxLimit, Window: time.Second,
			Remaining: algo.MaxLimit - 1, ResetAfter: time.Second},
			[5]string{`"p";q=999999999999999;w=1`, `"p";r=999999999999999;t=1`, "9007199254740992", "9007199254740991",
				"1"}},
		{"several", several, [5]string{`"api";q=10;w=1, "api/3";q=1000;w=3600`, `"api";r=3;t=1, "api/3";r=900;t=3540`,
			"10", "3", "1"}},
		{"several, refused", severalRefused,
			[5]string{`"api";q=10;w=1, "api/2";q=1000;w=3600`, `"api";r=0;t=1, "api/2";r=900`, "10", "0", "1"}},
		{"several, banned", banned,
			[5]string{`"api";q=10;w=1, "api/2";q=1000;w=3600`, `"api";r=0;t=300, "api/2";r=0;t=300`, "10", "0", "300"}},
		{"a name that no policy has", limit.Decision{Policy: "a\"b\\c\r\nX: yä", Allowed: true, Limit: 1, Remaining: 1},
			[5]string{`"a\"b\\cX: y";q=1`, `"a\"b\\cX: y";r=1`, "1", "1", "0"}},
	} {
		h := make(http.Header)
		Set(h, nil, &tt.decision)
		var got [5]string
		for i, name := range []string{"RateLimit-Policy", "RateLimit", "X-RateLimit-Limit", "X-RateLimit-Remaining",
			"X-RateLimit-Reset"} {
			got[i] = strings.Join(h[name], "|")
		}
		expect.True(t, got == tt.want, "%s:\n got %q\nwant %q", tt.name, got, tt.want)
	}
}

func TestRetryAfter(t *testing.T) {
	for want, d := range map[string]limit.Decision{
		"":   {RetryAfter: algo.Never},
		"37": {RetryAfter: 36*time.Second + 1},
		"1":  {FailedClosed: true},
	} {
		h := make(http.Header)
		SetRetryAfter(h, &d)
		expect.Equal(t, h.Get("Retry-After"), want, "%+v", d)
	}
	h := make(http.Header)
	SetRetryAfter(h, &limit.Decision{Allowed: true})
	expect.True(t, len(h) == 0, "admitted: %v", h)
}

package httpapi

import (
	"bytes"
	_ "embed"
	"errors"
	"log/slog"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
)

//go:embed PROBLEMS.md
var problemsPage string

func unmarshal(text string, v any) error { return json.Unmarshal([]byte(text), v) }

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
		Estimated    bool           `json:"retry_after_estimated,omitzero"`
		Banned       bool           `json:"banned,omitzero"`
		NearLimit    bool           `json:"near_limit,omitzero"`
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
			Allowed: random.IntN(2) == 0, Granted: random.Int64N(9), Limit: random.Int64N(9) - 1,
			Remaining:  random.Int64(),
			ResetAfter: duration(), Delay: duration(), Policy: text(),
			Shadow: random.IntN(2) == 0, Degraded: random.IntN(2) == 0, FailedOpen: random.IntN(2) == 0,
			FailedClosed: random.IntN(2) == 0, RequestID: text(), LeaseID: text(),
			ReservationID: text(), NearLimit: random.IntN(2) == 0, Banned: random.IntN(2) == 0,
			RetryAfterEstimated: random.IntN(2) == 0,
		}
		f := decisionFields{
			Allowed: d.Allowed, Granted: d.Granted, Limit: d.Limit, Remaining: d.Remaining,
			ResetAfterMS: ms(d.ResetAfter),
			DelayMS:      ms(d.Delay), Policy: d.Policy, Shadow: d.Shadow, Degraded: d.Degraded,
			FailedOpen:   d.FailedOpen,
			FailedClosed: d.FailedClosed, RequestID: d.RequestID, LeaseID: d.LeaseID,
			Reservation: d.ReservationID, NearLimit: d.NearLimit, Banned: d.Banned, Estimated: d.RetryAfterEstimated,
		}
		d.RetryAfter, f.RetryAfterMS = wait()
		if d.Allowed {
			f.RetryAfterMS = new(int64)
		}
		for range random.IntN(4) {
			l := limit.LimitStatus{Limit: random.Int64N(9) - 1, Window: time.Duration(random.Int64N(3)) * time.Second,
				Remaining: random.Int64N(9), ResetAfter: duration()}
			g := statusFields{Limit: l.Limit, WindowMS: ms(l.Window), Remaining: l.Remaining,
				ResetAfterMS: ms(l.ResetAfter)}
			l.RetryAfter, g.RetryAfterMS = wait()
			d.Limits, f.Limits = append(d.Limits, l), append(f.Limits, g)
		}
		want := must.Value(json.Marshal(&f))(t)
		must.NoDiff(t, cmp.Diff(string(want), string(appendDecision(nil, &d))), "%+v (-library +by hand)", d)
	}
}

// TestRequestIDs: a sane id comes back, a problem always has one, and the log has the same.
func TestRequestIDs(t *testing.T) {
	const good = `{"policy":"login","key":"secret"}`
	for _, test := range []struct {
		given, body string
		kept        bool
		status      int
	}{
		{"", good, false, 200},
		{"abc-1.2:3/4_5+6=", good, true, 200},
		{"abc-1.2:3/4_5+6=", `{"policy":"login"}`, true, 400},
		{"", `{"policy":"login"}`, false, 400},
		{strings.Repeat("x", 128), `{}`, true, 400},
		{strings.Repeat("x", 129), `{}`, false, 400},
		{strings.Repeat("x", 129), good, false, 200},
		{"a b", `{}`, false, 400},
		{"a\tb", `{}`, false, 400},
		{"ä", `{"key":"secret","secret":"secret"}`, false, 400},
		{`"quoted"`, `{}`, false, 400},
	} {
		var told []int
		var log bytes.Buffer
		d := newAPI(t, &scripted.Service{Results: []limit.Result{{Decision: admitted}}}, func(c *Config) {
			c.Problem = func(status int) { told = append(told, status) }
			c.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		})
		header := []string{"Content-Type", "application/json"}
		if test.given != "" {
			header = append(header, "X-Request-ID", test.given)
		}
		resp := d.do("POST", "/v1/check", test.body, header...)
		ids := resp.Header["X-Request-Id"]
		switch {
		case resp.StatusCode != test.status:
			t.Errorf("%q: status %d, want %d", test.given, resp.StatusCode, test.status)
		case test.kept && (len(ids) != 1 || ids[0] != test.given):
			t.Errorf("%q comes back as %q", test.given, ids)
		case !test.kept && test.status == 200 && len(ids) != 0:
			t.Errorf("%q: an admission has the ids %q", test.given, ids)
		case !test.kept && test.status != 200 && (len(ids) != 1 || !sane.MatchString(ids[0])):
			t.Errorf("%q: a problem has the ids %q", test.given, ids)
		}
		logged := log.String()
		if test.status == 200 {
			expect.True(t, logged == "" && len(told) == 0, "told of %v, logged %s", told, logged)
			continue
		}
		expect.True(t, (strings.Contains(logged, "request_id="+ids[0]) ||
			strings.Contains(logged, `request_id="`+ids[0])) && strings.Contains(logged, `endpoint="POST /v1/check"`),
			"%q: logged %s", test.given, logged)
		expect.True(t, len(told) == 1 && told[0] == test.status, "%q: told of problems %v", test.given, told)
	}
}

// TestLogSaysNoKeys: at level info nothing of what callers send is written down, whatever they get wrong, and what they
// get wrong is not written down at all.
func TestLogSaysNoKeys(t *testing.T) {
	service := &scripted.Service{Err: limit.NewError(limit.NotFound, "policy", "there is no policy named secret")}
	d := newAPI(t, service, nil)
	for _, body := range []string{`{"policy":"login","key":"secret"}`, `{"policy":"login","key":""}`,
		`{"secret":"secret"}`, `secret`, `{"key":"secret\xff"}`} {
		resp := d.post("/v1/check", body)
		expect.True(t, resp.StatusCode >= 400, "%s: %d", body, resp.StatusCode)
		d.do("POST", "/v1/secret", body, "Content-Type", "application/json")
		d.do("POST", "/v1/check", body, "Content-Type", "text/secret", "X-Request-Id", "secret")
	}
	expect.Equal(t, d.log.Len(), 0, "logged: %s", d.log)
	service.Err = errors.New("a defect")
	d.do("POST", "/v1/check", `{"policy":"login","key":"secret"}`, "Content-Type", "application/json", "X-Request-Id",
		"my-id")
	got := d.log.String()
	expect.True(t, strings.Contains(got, "request_id=my-id") && strings.Contains(got, "a defect") &&
		!strings.Contains(got, "secret"), "logged: %s", got)
}

// FuzzBody sends any body to every endpoint that takes one: the answer is never a 5xx, and the service is asked if and
// only if it is 200, once.
func FuzzBody(f *testing.F) {
	paths := []string{
		"/v1/check", "/v1/checks", "/v1/acquire", "/v1/renew", "/v1/release", "/v1/reserve", "/v1/commit",
		"/v1/commits", "/v1/extends", "/v1/cancel", "/v1/refund", "/v1/reset",
		"/v1/reserves", "/v1/extend", "/v1/charge",
	}
	for i := range paths {
		for _, body := range []string{
			`{"policy":"login","key":"alice"}`,
			`{"checks":[{"policy":"login","key":"alice"}]}`,
			`{"policy":"login","key":"alice","cost":2,"ttl":"1s","request_id":"r"}`,
			`{"policy":"login","key":"alice","lease_id":"l","ttl":"10s"}`,
			`{"policy":"login","key":"alice","reservation_id":"r","cost":0}`,
			`{"policy":"login","key":"alice","reservation_id":"r","usage":{"input":3,"output":9223372036854775807},"overrun":"error","class":"m"}`,
			`{"reserves":[{"policy":"login","key":"alice","usage":{}},{"policy":"login","key":"alice","cost":9,"ttl":"1s","class":"m"}]}`,
			`{"commits":[{"policy":"login","key":"alice","reservation_id":"r","cost":3},{"policy":"login","key":"alice","reservation_id":"7","cost":0}]}`,
			`{"extends":[{"policy":"login","key":"alice","reservation_id":"r","cost":3,"ttl":"2s"}]}`,
			`{"policy":"login","key":"alice","usage":{"a":1.5}}`,
			`{"policy":"login","key":"alice","cost":1,"usage":{"a":null}}`, `{"reserves":[null]}`,
			`{"namespace":"n","limit":{"algorithm":"concurrency","limit":1,"ttl":"1s"},"key":"k","cost":-1}`,
			`{"policy":"login","key":"alice","cost":0,"partial":true,"request_id":"r"}`,
			`{"limit":{"algorithm":"fixed_window","limit":1,"window":"day","align":"calendar","time_zone":"Europe/Berlin"},"key":"k"}`,
			`{"limit":{"algorithm":"sliding_window","limit":-1,"window":"1d12h","slots":3,"count_denied":true},"key":"k"}`,
			`{"limit":{"algorithm":"token_bucket","limit":1,"window":"0.5d","capacity":9007199254740992},"key":"k"}`,
			`{"checks":[{"policy":"login","key":"alice"},{"policy":"login","key":"bob","cost":2}],"atomic":true}`,
			`{"checks":[{},{"key":"\ud800"}]}`,
			`{"policy":"login","key":"alice","key":"bob"}`, `{"policy":"login","key":"alice"}{}`, `null`,
			`{"\u0000":1}`,
			`{"policy":"login","key":"alice","ttl":"999999999h"}`, `{"ttl":1e400}`, `{"key":null}`, `[]`, ``,
			`{"a":{"a":{"a":`, "{\"key\":\"\xff\"}",
		} {
			f.Add(uint8(i), body)
		}
	}
	f.Fuzz(func(t *testing.T, route uint8, body string) {
		path := paths[int(route)%len(paths)]
		service := &scripted.Service{Results: []limit.Result{{Decision: admitted}}, Decision: admitted,
			Lives: time.Second}
		d := newAPI(t, service, func(c *Config) { c.MaxBody = 64 << 10 })
		resp := d.post(path, body)
		expect.True(t, resp.StatusCode < 500, "%s: %d %s", path, resp.StatusCode, bodyOf(t, resp))
		if asked := len(service.Calls()) == 1; asked != (resp.StatusCode == 200) || len(service.Calls()) > 1 {
			t.Errorf("%s: %d, with the service asked %d times", path, resp.StatusCode, len(service.Calls()))
		}
		for _, c := range service.Calls() {
			expect.True(t, len(c.Checks) <= limit.MaxBatch, "a batch of %d", len(c.Checks))
			for _, check := range c.Checks {
				wantSound(t, check)
			}
		}
	})
}

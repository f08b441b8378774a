package httpapi

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/scripted"
)

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

// TestLogSaysNoKeys: at level info nothing of what callers send is written down, whatever they get wrong, and what they get
// wrong is not written down at all.
func TestLogSaysNoKeys(t *testing.T) {
	service := &scripted.Service{Err: limit.NewError(limit.NotFound, "policy", "there is no policy named secret")}
	d := newAPI(t, service, nil)
	for _, body := range []string{`{"policy":"login","key":"secret"}`, `{"policy":"login","key":""}`, `{"secret":"secret"}`, `secret`, `{"key":"secret\xff"}`} {
		resp := d.post("/v1/check", body)
		expect.True(t, resp.StatusCode >= 400, "%s: %d", body, resp.StatusCode)
		d.do("POST", "/v1/secret", body, "Content-Type", "application/json")
		d.do("POST", "/v1/check", body, "Content-Type", "text/secret", "X-Request-Id", "secret")
	}
	expect.Equal(t, d.log.Len(), 0, "logged: %s", d.log)
	service.Err = errors.New("a defect")
	d.do("POST", "/v1/check", `{"policy":"login","key":"secret"}`, "Content-Type", "application/json", "X-Request-Id", "my-id")
	got := d.log.String()
	expect.True(t, strings.Contains(got, "request_id=my-id") && strings.Contains(got, "a defect") &&
		!strings.Contains(got, "secret"), "logged: %s", got)
}

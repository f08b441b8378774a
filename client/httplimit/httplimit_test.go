package httplimit

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/client/local"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

func open(t *testing.T) *client.Client {
	t.Helper()
	set := must.Value(policy.Parse("test.yaml", []byte(`policies:
  - {name: api, algorithm: sliding_log, limit: 2, window: 1m}
  - {name: queue, algorithm: leaky_bucket, limit: 1, window: 1s, capacity: 3}
`)))(t)
	c := local.New(set)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

var served = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "served") })

func get(h http.Handler, change ...func(*http.Request)) *httptest.ResponseRecorder {
	r := httptest.NewRequest("GET", "/", nil)
	for _, f := range change {
		f(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// field is a header field under its name as it is written.
func field(w *httptest.ResponseRecorder, name string) string {
	return strings.Join(w.Header()[name], "|")
}

func header(name, value string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set(name, value) }
}

func TestHandler(t *testing.T) {
	h := New(Config{Limiter: open(t).Policy("api"), Key: Header("X-Api-Key")}).Handler(served)
	for i, want := range []string{`"api";r=1;t=60`, `"api";r=0;t=60`} {
		w := get(h, header("X-Api-Key", "a"))
		expect.True(t, w.Code == 200 && w.Body.String() == "served" && field(w, "RateLimit") == want &&
			field(w, "RateLimit-Policy") == `"api";q=2;w=60` && field(w, "X-RateLimit-Limit") == "2" &&
			w.Header().Get("Retry-After") == "", "request %d: %d %q %v", i, w.Code, w.Body, w.Header())
	}
	w := get(h, header("X-Api-Key", "a"))
	var problem struct {
		Title, Detail string
		Status        int
	}
	err := json.Unmarshal(w.Body.Bytes(), &problem)
	expect.True(t, err == nil && w.Code == 429 && problem.Status == 429 && problem.Title == "Too many requests" &&
		strings.HasSuffix(problem.Detail, " in 60 s") && w.Header().Get("Content-Type") == "application/problem+json" &&
		w.Header().Get("Retry-After") == "60" && strings.HasPrefix(field(w, "RateLimit"), `"api";r=0;`), "%d %q %v %v",
		w.Code, w.Body, w.Header(), err)
	w = get(h, header("X-Api-Key", "b"))
	expect.Equal(t, w.Code, 200, "another key")
	if w := get(h); w.Code != 400 || !strings.Contains(w.Body.String(), "nothing to limit it by") {
		t.Errorf("no key: %d %s", w.Code, w.Body)
	}
}

// A value that no key can be gets 400 whatever OnError says, and a long one is limited like any other: by all of it.
func TestKeysOfCallers(t *testing.T) {
	log := &testkit.Buffer{}
	m := New(Config{Limiter: open(t).Policy("api"), Key: Header("X-Api-Key"), OnError: client.FailOpen,
		Logger: log.Logger()})
	h := m.Handler(served)
	for _, key := range []string{"", "\xff", strings.Repeat("a", 2000) + "\xff"} {
		w := get(h, header("X-Api-Key", key))
		expect.True(t, w.Code == 400 && field(w, "Weir-Result") == "bad_key", "%.10q: %d %v", key, w.Code, w.Header())
	}
	long := strings.Repeat("é", 600)
	for i := range 100 {
		want := 200
		if i >= 2 {
			want = 429
		}
		w := get(h, header("X-Api-Key", long))
		must.True(t, w.Code == want, "request %d with a long value: %d %s", i, w.Code, w.Body)
	}
	w := get(h, header("X-Api-Key", long+"x"))
	expect.Equal(t, w.Code, 200, "another long value")
	want := (client.Counts{Admitted: 3, Refused: 98, Errors: 3})
	expect.True(t, m.Counts() == want && log.String() == "", "%+v; the log says %q", m.Counts(), log)
}

// TestNeverSilentlyOpen: requests that are served without a decision say so in a header field, are counted, and are
// logged: not in a line for each.
func TestNeverSilentlyOpen(t *testing.T) {
	for name, limiter := range map[string]client.Decider{
		"no node":    answer{Decision: client.Decision{Allowed: true, FailedOpen: true}},
		"no policy":  open(t).Policy("unknown"),
		"an error":   answer{err: client.ErrDenied},
		"a deadline": answer{err: context.DeadlineExceeded}, // of somebody else: the request's has not passed
	} {
		log := &testkit.Buffer{}
		m := New(Config{Limiter: limiter, Logger: log.Logger()})
		for range 100 {
			w := get(m.Handler(served))
			must.True(t, w.Code == 200 && field(w, "Weir-Result") == "failed_open" && field(w, "RateLimit") == "",
				"%s: %d %v", name, w.Code, w.Header())
		}
		c := m.Counts()
		expect.True(t, c.FailedOpen+c.Errors == 100 && c.Admitted == 0 && strings.Count(log.String(), "\n") == 1,
			"%s: %+v; the log says %q", name, c, log)
	}
}

// TestChoose: requests may be skipped, and have policies of their own or none.
func TestChoose(t *testing.T) {
	c := open(t)
	m := New(Config{
		Skip: func(r *http.Request) bool { return r.URL.Path == "/healthz" },
		Choose: func(r *http.Request) client.Decider {
			if r.URL.Path == "/free" {
				return nil
			}
			return c.Policy("api")
		},
	})
	for _, tt := range []struct {
		path  string
		codes []int
	}{{"/a", []int{200, 200, 429}}, {"/healthz", []int{200, 200, 200}}, {"/free", []int{200, 200, 200}}} {
		for i, want := range tt.codes {
			w := get(m.Handler(served), func(r *http.Request) { r.URL.Path = tt.path })
			expect.True(t, w.Code == want && (field(w, "Weir-Result") != "") == (tt.path == "/a"),
				"%s, request %d: %d %v", tt.path, i, w.Code, w.Header())
		}
	}
}

// TestAll: a request that one of several limits refuses takes nothing of the others.
func TestAll(t *testing.T) {
	c := open(t)
	h := New(Config{All: c, Checks: func(r *http.Request) []client.Check {
		if r.URL.Path == "/free" {
			return nil
		}
		return []client.Check{{Policy: "api", Key: r.Header.Get("User")},
			{Policy: "api", Key: r.Header.Get("Team"), Cost: 2}}
	}}).Handler(served)
	as := func(user, team string) *httptest.ResponseRecorder {
		return get(h, header("User", user), header("Team", team))
	}
	w := as("ann", strings.Repeat("t", 3000))
	expect.True(t, w.Code == 200 && field(w, "X-RateLimit-Remaining") == "0", "%d %v", w.Code, w.Header())
	w = as("bob", strings.Repeat("t", 3000))
	expect.True(t, w.Code == 429 && w.Header().Get("Retry-After") == "60" && field(w, "Weir-Result") == "refused",
		"%d %v", w.Code, w.Header())
	d, err := c.Policy("api").Peek(t.Context(), "bob")
	expect.True(t, err == nil && d.Remaining == 2, "bob has %d left: %v", d.Remaining, err)
	w = as("ann", "\xff")
	expect.True(t, w.Code == 400 && strings.Contains(w.Body.String(), "UTF-8"), "%d %s", w.Code, w.Body)
	w = get(h, func(r *http.Request) { r.URL.Path = "/free" })
	expect.True(t, w.Code == 200 && field(w, "Weir-Result") == "", "without checks: %d %v", w.Code, w.Header())
}

func TestCost(t *testing.T) {
	cost := int64(2)
	h := New(Config{Limiter: open(t).Policy("api"), Cost: func(*http.Request) int64 { return cost }}).Handler(served)
	w := get(h)
	expect.True(t, w.Code == 200 && field(w, "X-RateLimit-Remaining") == "0", "%d %v", w.Code, w.Header())
	cost = 3
	w = get(h, func(r *http.Request) { r.RemoteAddr = "192.0.2.77:1" })
	expect.True(t, w.Code == 429 && w.Header().Get("Retry-After") == "" && strings.Contains(w.Body.String(), "never"),
		"a cost above the limit: %d %v %s", w.Code, w.Header(), w.Body)
	cost = -5 // taken for 1: nobody gets units back by a request
	w = get(h, func(r *http.Request) { r.RemoteAddr = "192.0.2.78:1" })
	expect.True(t, field(w, "X-RateLimit-Remaining") == "1", "a negative cost: %v", w.Header())
}

func TestOnError(t *testing.T) {
	log := &testkit.Buffer{}
	c := open(t)
	for _, tt := range []struct {
		limiter client.Decider
		on      client.OnError
		code    int
		logged  string
	}{
		{c.Policy("unknown"), client.FailOpen, 200, "policy"},
		{c.Policy("unknown"), client.FailClosed, 503, "policy"},
		{answer{Decision: client.Decision{FailedClosed: true}}, client.FailOpen, 503, "on_error=closed"},
		{answer{Decision: client.Decision{Allowed: true, FailedOpen: true}}, client.FailClosed, 200, "on_error=open"},
	} {
		before := len(log.String())
		w := get(New(Config{Limiter: tt.limiter, OnError: tt.on, Logger: log.Logger()}).Handler(served))
		expect.True(t, w.Code == tt.code && (w.Header().Get("Retry-After") == "1") == (tt.code == 503),
			"%+v: %d %v", tt, w.Code, w.Header())
		if said := log.String()[before:]; (said != "") != (tt.logged != "") || !strings.Contains(said, tt.logged) {
			t.Errorf("%+v: the log says %q", tt, said)
		}
	}
}

// answer is a Limiter with one answer.
type answer struct {
	client.Decision
	err error
}

func (a answer) AllowN(context.Context, string, int64) (client.Decision, error) {
	return a.Decision, a.err
}

func TestRefusedAnswers(t *testing.T) {
	m := New(Config{Limiter: answer{Decision: client.Decision{RetryAfter: time.Second}}})
	m.Refused = func(w http.ResponseWriter, _ *http.Request, d client.Decision) {
		w.WriteHeader(http.StatusTeapot)
		_, _ = io.WriteString(w, d.RetryAfter.String())
	}
	h := m.Handler(served)
	if w := get(h); w.Code != http.StatusTeapot || w.Body.String() != "1s" || w.Header().Get("Retry-After") != "1" {
		t.Errorf("%d %q %v", w.Code, w.Body, w.Header())
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	h = New(Config{Limiter: answer{err: context.Canceled}}).Handler(served)
	w := get(h, func(r *http.Request) { *r = *r.WithContext(gone) })
	expect.Equal(t, w.Code, http.StatusServiceUnavailable, "a caller whose context has ended: %q", w.Body)
}

func TestDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New(Config{Limiter: answer{Decision: client.Decision{Allowed: true, Delay: time.Minute}}}).Handler(served)
		start := time.Now()
		w := get(h)
		expect.True(t, w.Code == 200 && time.Since(start) == time.Minute, "%d after %v", w.Code, time.Since(start))
		ctx := testkit.Within(t, time.Second)
		w = get(h, func(r *http.Request) { *r = *r.WithContext(ctx) })
		expect.Equal(t, w.Code, http.StatusServiceUnavailable, "a caller who does not wait: %q", w.Body)
	})
}

func TestKeys(t *testing.T) {
	r := httptest.NewRequest("GET", "/", nil)
	r.RemoteAddr = "10.0.0.1:5"
	r.Header.Set("X-Forwarded-For", "2001:db8::1")
	r.SetBasicAuth("ann", "secret")
	for want, key := range map[string]KeyFunc{
		"10.0.0.1":      ClientIP(nil),
		"2001:db8::/64": ClientIP([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}),
		"ann":           FirstOf(Header("X-Nothing"), BasicUser, ClientIP(nil)),
		"":              FirstOf(Header("X-Nothing")),
	} {
		expect.Equal(t, key(r), want)
	}
}

func TestTransport(t *testing.T) {
	server := httptest.NewServer(served)
	defer server.Close()
	c := open(t)
	hc := http.Client{Transport: &Transport{Limiter: c.Policy("api")}}
	for range 2 {
		res := must.Value(hc.Get(server.URL))(t)
		res.Body.Close()
	}
	ctx := testkit.Within(t, time.Second)
	body := &closing{Reader: strings.NewReader("x")}
	r := must.Value(http.NewRequestWithContext(ctx, "POST", server.URL, body))(t)
	_, err := hc.Do(r)
	expect.True(t, errors.Is(err, client.ErrDeadline) && body.closed, "%v, body closed: %v", err, body.closed)
	other := http.Client{Transport: &Transport{Limiter: c.Policy("api"), Key: func(*http.Request) string { return "x" },
		Base: http.DefaultTransport}}
	res := must.Value(other.Get(server.URL))(t)
	res.Body.Close()
}

type closing struct {
	io.Reader
	closed bool
}

func (c *closing) Close() error {
	c.closed = true
	return nil
}

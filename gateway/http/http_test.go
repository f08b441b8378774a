package httpapi

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"
	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
	"github.com/weirlimit/weir/test/testkit"
)

var (
	admitted = limit.Decision{Policy: "login", Allowed: true, Granted: 1, Limit: 5, Window: time.Minute, Remaining: 4,
		ResetAfter: time.Minute}
	refused = limit.Decision{Policy: "login", Limit: 5, Window: time.Minute,
		RetryAfter: 36*time.Second + 400*time.Millisecond + 1, ResetAfter: 58 * time.Second}
)

const (
	admittedJSON = `{"allowed":true,"granted":1,"limit":5,"remaining":4,"retry_after_ms":0,"reset_after_ms":60000,` +
		`"delay_ms":0,"policy":"login","shadow":false,"degraded":false,"failed_open":false,"failed_closed":false}`
	refusedJSON = `{"allowed":false,"granted":0,"limit":5,"remaining":0,"retry_after_ms":36401,"reset_after_ms":58000,` +
		`"delay_ms":0,"policy":"login","shadow":false,"degraded":false,"failed_open":false,"failed_closed":false}`
)

// api is a handler under test, all of whose responses are held to openapi.yaml.
type testedAPI struct {
	t       testing.TB
	service *scripted.Service
	handler http.Handler
	log     *bytes.Buffer
	spec    *spec
}

// foreignRoutes are those of other front ends that openapi.yaml describes.
func foreignRoutes() []Foreign {
	answer := func(text string) func(context.Context, []byte, error) (int, string, []byte) {
		return func(context.Context, []byte, error) (int, string, []byte) {
			return http.StatusOK, "application/json", []byte(text)
		}
	}
	return []Foreign{
		{"POST", "/json", auth.RoleCheck, answer("{}")},
		{"POST", "/v1/GetRateLimits", auth.RoleCheck, answer(`{"responses":[]}`)},
		{"GET", "/v1/HealthCheck", auth.RoleCheck,
			answer(`{"status":"healthy","message":"","peer_count":1,"advertise_address":""}`)},
		{"GET", "/v1/LiveCheck", auth.RoleOpen, answer("{}")},
	}
}

func newAPI(t testing.TB, service *scripted.Service, change func(*Config)) *testedAPI {
	d := &testedAPI{t: t, service: service, log: new(bytes.Buffer), spec: loadSpec(t)}
	cfg := Config{
		Service: service,
		TopKeys: func(context.Context, *weirv1.TopKeysRequest) (*weirv1.TopKeysResponse, error) {
			return &weirv1.TopKeysResponse{}, nil
		},
		Describe:  func(context.Context, *limit.Target) (*limit.KeyState, error) { return &limit.KeyState{}, nil },
		Overrides: new(fakeOverrides),
		Status:    func(context.Context) *weirv1.StatusResponse { return &weirv1.StatusResponse{Node: "weir-0"} },
		Ready:     func() (bool, string) { return true, "" },
		Policies:  func() PolicyListing { return PolicyListing{Hash: "00"} },
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
			io.WriteString(w, "weir_requests_total 0\n")
		}),
		Logger:  slog.New(slog.NewTextHandler(d.log, nil)),
		Foreign: foreignRoutes(),
		Problem: func(int) {}, Buffers: admission.NewBuffers(1<<30, 1000, nil), MaxBody: 4 << 20,
	}
	if change != nil {
		change(&cfg)
	}
	d.handler = New(cfg)
	return d
}

func (d *testedAPI) do(method, path, body string, header ...string) *http.Response {
	d.t.Helper()
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	d.handler.ServeHTTP(w, r)
	resp := w.Result()
	d.spec.check(d.t, r, resp)
	return resp
}

func (d *testedAPI) post(path, body string) *http.Response {
	d.t.Helper()
	return d.do("POST", path, body, "Content-Type", "application/json")
}

func bodyOf(t testing.TB, resp *http.Response) string {
	t.Helper()
	b := must.Value(io.ReadAll(resp.Body))(t)
	resp.Body = io.NopCloser(bytes.NewReader(b))
	return string(b)
}

// spec is openapi.yaml as a judge of responses.
type spec struct {
	doc    *openapi3.T
	router routers.Router
}

var loadOnce = sync.OnceValues(func() (*spec, error) {
	openapi3filter.RegisterBodyDecoder("text/html", openapi3filter.PlainBodyDecoder)
	doc, err := openapi3.NewLoader().LoadFromData([]byte(openAPI))
	if err != nil {
		return nil, err
	}
	if err := doc.Validate(context.Background(), openapi3.EnableExamplesValidation()); err != nil {
		return nil, err
	}
	router, err := gorillamux.NewRouter(doc)
	return &spec{doc, router}, err
})

func loadSpec(t testing.TB) *spec {
	t.Helper()
	s, err := loadOnce()
	must.NoError(t, err, "openapi.yaml")
	return s
}

func (s *spec) check(t testing.TB, r *http.Request, resp *http.Response) {
	t.Helper()
	body := bodyOf(t, resp)
	route, params, err := s.router.FindRoute(r)
	if errors.Is(err, routers.ErrMethodNotAllowed) {
		// The document says what a 405 is like on every path; any of its methods will do to look that up.
		item := s.doc.Paths.Find(r.URL.Path)
		for method, op := range item.Operations() {
			route, err = &routers.Route{Spec: s.doc, Path: r.URL.Path, PathItem: item, Method: method, Operation: op},
				nil
		}
	}
	if err != nil {
		s.checkProblem(t, body) // a path that is not there has no place in the document
		return
	}
	header := make(http.Header)
	for name, values := range resp.Header {
		header[http.CanonicalHeaderKey(name)] = values
	}
	if r.Method == http.MethodHead {
		return
	}
	in := &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{Request: r, PathParams: params, Route: route},
		Status:                 resp.StatusCode,
		Header:                 header,
		Options:                &openapi3filter.Options{IncludeResponseStatus: true},
	}
	if err := openapi3filter.ValidateResponse(context.Background(), in.SetBodyBytes([]byte(body))); err != nil {
		t.Errorf("%s %s: %d does not fit openapi.yaml: %v\n%s", r.Method, r.URL.Path, resp.StatusCode, err, body)
	}
}

func (s *spec) checkProblem(t testing.TB, body string) {
	t.Helper()
	var v any
	if err := unmarshal(body, &v); err != nil {
		t.Errorf("not JSON: %v\n%s", err, body)
	} else if err := s.doc.Components.Schemas["Problem"].Value.VisitJSON(v); err != nil {
		t.Errorf("not a problem document: %v\n%s", err, body)
	}
}

// accepts says whether the document takes the body for a valid request.
func (s *spec) accepts(path, body string) error {
	r := httptest.NewRequest("POST", path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	route, params, err := s.router.FindRoute(r)
	if err != nil {
		return err
	}
	return openapi3filter.ValidateRequest(context.Background(),
		&openapi3filter.RequestValidationInput{Request: r, PathParams: params, Route: route,
			Options: &openapi3filter.Options{AuthenticationFunc: openapi3filter.NoopAuthenticationFunc}})
}

var login = limit.Target{Policy: "login", Key: "alice"}

func oneCheck(c limit.Check) []scripted.Call {
	return []scripted.Call{{Method: "Check", Checks: []limit.Check{c}}}
}

// TestRequests: how what the service answers is worded; test/conformance has what each operation does.
func TestRequests(t *testing.T) {
	leased := admitted
	leased.Policy, leased.LeaseID, leased.RequestID = "jobs", "5f1d", "r-1"
	leasedJSON := strings.Replace(strings.TrimSuffix(admittedJSON, "}"), "login", "jobs", 1) +
		`,"request_id":"r-1","lease_id":"5f1d"}`
	failedOpen := limit.Decision{Policy: "login", Allowed: true, Granted: 1, Limit: 5, Degraded: true, FailedOpen: true}
	failedClosed := limit.Decision{Policy: "login", Limit: 5, RetryAfter: time.Second, Degraded: true,
		FailedClosed: true}
	never := refused
	never.RetryAfter = algo.Never
	shadow := admitted
	shadow.Shadow, shadow.RetryAfter = true, time.Second

	for _, tt := range []struct {
		name, path, body string
		service          *scripted.Service
		status           int
		want             string
		calls            []scripted.Call
		header           map[string]string // those that matter to this case; "" for one that is absent
	}{
		{
			name: "admitted", path: "/v1/check", body: `{"policy":"login","key":"alice","cost":1}`,
			service: &scripted.Service{Results: []limit.Result{{Decision: admitted}}},
			status:  200, want: admittedJSON,
			calls: oneCheck(limit.Check{Target: login, Cost: 1}),
			header: map[string]string{"RateLimit": `"login";r=4;t=60`, "RateLimit-Policy": `"login";q=5;w=60`,
				"Retry-After": ""},
		},
		{
			name: "refused", path: "/v1/check",
			body:    `{"policy":"login","key":"alice","cost":3,"partial":true,"request_id":"r-1"}`,
			service: &scripted.Service{Results: []limit.Result{{Decision: refused}}},
			status:  429, want: refusedJSON,
			calls:  oneCheck(limit.Check{Target: login, Cost: 3, Partial: true, RequestID: "r-1"}),
			header: map[string]string{"RateLimit": `"login";r=0;t=37`, "Retry-After": "37", "X-RateLimit-Reset": "37"},
		},
		{
			name: "never", path: "/v1/check", body: `{"policy":"login","key":"alice","cost":9}`,
			service: &scripted.Service{Results: []limit.Result{{Decision: never}}},
			status:  429, want: strings.Replace(refusedJSON, `"retry_after_ms":36401,`, "", 1),
			calls:  oneCheck(limit.Check{Target: login, Cost: 9}),
			header: map[string]string{"Retry-After": "", "RateLimit": `"login";r=0;t=58`},
		},
		{
			name: "a peek is answered, not refused", path: "/v1/check",
			body:    `{"policy":"login","key":"alice","cost":0}`,
			service: &scripted.Service{Results: []limit.Result{{Decision: refused}}},
			status:  200, want: refusedJSON, calls: oneCheck(limit.Check{Target: login}),
			header: map[string]string{"Retry-After": "", "RateLimit": `"login";r=0;t=37`},
		},
		{
			name: "shadow", path: "/v1/check", body: `{"policy":"login","key":"alice"}`,
			service: &scripted.Service{Results: []limit.Result{{Decision: shadow}}},
			status:  200, want: strings.Replace(admittedJSON, `"shadow":false`, `"shadow":true`, 1),
			calls: oneCheck(limit.Check{Target: login, Cost: 1}), header: map[string]string{"Retry-After": ""},
		},
		{
			name: "failed open", path: "/v1/check", body: `{"policy":"login","key":"alice"}`,
			service: &scripted.Service{Results: []limit.Result{{Decision: failedOpen}}},
			status:  200,
			want: `{"allowed":true,"granted":1,"limit":5,"remaining":0,"retry_after_ms":0,"reset_after_ms":0,"delay_ms":0,` +
				`"policy":"login","shadow":false,"degraded":true,"failed_open":true,"failed_closed":false}`,
			calls:  oneCheck(limit.Check{Target: login, Cost: 1}),
			header: map[string]string{"Retry-After": "", "RateLimit": ""},
		},
		{
			name: "failed closed", path: "/v1/check", body: `{"policy":"login","key":"alice"}`,
			service: &scripted.Service{Results: []limit.Result{{Decision: failedClosed}}},
			status:  503,
			want: `{"allowed":false,"granted":0,"limit":5,"remaining":0,"retry_after_ms":1000,"reset_after_ms":0,"delay_ms":0,` +
				`"policy":"login","shadow":false,"degraded":true,"failed_open":false,"failed_closed":true}`,
			calls:  oneCheck(limit.Check{Target: login, Cost: 1}),
			header: map[string]string{"Retry-After": "1", "RateLimit": ""},
		},
		{
			name: "the error of a check", path: "/v1/check", body: `{"policy":"nope","key":"alice"}`,
			service: &scripted.Service{Results: []limit.Result{{Err: limit.NewError(limit.NotFound,
				"policy", `there is no policy "nope"`).InList("checks", 0)}}},
			status: 404,
			want: `{"type":"` + problemTypes + `not-found","title":"There is no such thing","status":404,` +
				`"detail":"policy: there is no policy \"nope\"","field":"policy"}`,
			calls: oneCheck(limit.Check{Target: limit.Target{Policy: "nope", Key: "alice"}, Cost: 1}),
		},
		{
			name: "batch", path: "/v1/checks",
			body: `{"checks":[{"policy":"login","key":"alice"},{"policy":"login","key":"alice","cost":0},{"policy":"nope","key":"k"}],"atomic":false}`,
			service: &scripted.Service{Results: []limit.Result{{Decision: admitted}, {Decision: refused},
				{Err: limit.NewError(limit.NotFound, "policy", "unknown")}}},
			status: 200,
			want: `{"allowed":false,"decisions":[` + admittedJSON + `,` + refusedJSON + `,{"error":{"type":"` +
				problemTypes +
				`not-found","title":"There is no such thing","status":404,"detail":"checks[2].policy: unknown","field":"checks[2].policy"}}]}`,
			calls: []scripted.Call{{Method: "Check", Checks: []limit.Check{{Target: login, Cost: 1}, {Target: login},
				{Target: limit.Target{Policy: "nope", Key: "k"}, Cost: 1}}}},
			header: map[string]string{"RateLimit": ""},
		},
		{
			name: "acquire", path: "/v1/acquire", body: `{"policy":"jobs","key":"k","ttl":"1d12h","request_id":"r-1"}`,
			service: &scripted.Service{Decision: leased},
			status:  200, want: leasedJSON,
			calls: []scripted.Call{{Method: "Acquire",
				Acquire: limit.Acquire{Target: limit.Target{Policy: "jobs", Key: "k"},
					Cost: 1, TTL: 36 * time.Hour, RequestID: "r-1"}}},
			header: map[string]string{"RateLimit": `"jobs";r=4;t=60`},
		},
		{
			name: "renew", path: "/v1/renew", body: `{"policy":"jobs","key":"k","lease_id":"5f1d","ttl":"30s"}`,
			service: &scripted.Service{Lives: 30*time.Second - 1},
			status:  200, want: `{"expires_in_ms":29999}`,
			calls: []scripted.Call{{Method: "Renew", Target: limit.Target{Policy: "jobs", Key: "k"}, HeldID: "5f1d",
				TTL: 30 * time.Second}},
		},
		{
			name: "atomic, admitted", path: "/v1/checks",
			body: `{"checks":[{"policy":"login","key":"alice"},{"policy":"login","key":"bob"}],"atomic":true}`,
			service: &scripted.Service{All: limit.AllDecision{Allowed: true, Delay: time.Second + 1,
				Decisions: []limit.Decision{admitted, admitted}}},
			status: 200, want: `{"allowed":true,"delay_ms":1001,"decisions":[` + admittedJSON + `,` + admittedJSON +
				`]}`,
			calls: []scripted.Call{{Method: "CheckAll", Checks: []limit.Check{{Target: login, Cost: 1},
				{Target: limit.Target{Policy: "login", Key: "bob"}, Cost: 1}}}},
			header: map[string]string{"RateLimit": ""},
		},
		{
			name: "atomic, an error", path: "/v1/checks",
			body:    `{"checks":[{"policy":"login","key":"alice","cost":0}],"atomic":true}`,
			service: &scripted.Service{Err: limit.NewError(limit.Invalid, "cost", "is 0")},
			status:  400,
			want: `{"type":"` + problemTypes + `invalid","title":"The request is not valid","status":400,` +
				`"detail":"checks[0].cost: is 0","field":"checks[0].cost"}`,
			calls: []scripted.Call{{Method: "CheckAll", Checks: []limit.Check{{Target: login}}}},
		},
		{
			name: "commits", path: "/v1/commits",
			body: `{"commits":[{"policy":"login","key":"alice","reservation_id":"5f1d","cost":3},{"policy":"login","key":"alice","reservation_id":"77","cost":0}]}`,
			service: &scripted.Service{Settlements: []limit.SettledResult{
				{Settled: limit.Settled{Refunded: 2, Excess: 1, Over: true}},
				{Err: limit.NewError(limit.NotFound, "reservation_id", "is not pending here")},
			}},
			status: 200,
			want: `{"results":[{"refunded":2,"excess":1,"over_limit":true},{"error":{"type":"https://github.com/weirlimit/weir/blob/main/gateway/http/PROBLEMS.md#not-found",` +
				`"title":"There is no such thing","status":404,"detail":"commits[1].reservation_id: is not pending here","field":"commits[1].reservation_id"}}]}`,
			calls: []scripted.Call{{Method: "CommitEach", Commits: []limit.Commit{
				{Target: login, ReservationID: "5f1d", Amount: limit.Amount{Cost: 3}},
				{Target: login, ReservationID: "77"},
			}}},
		},
		{
			name: "charge", path: "/v1/charge", body: `{"policy":"login","key":"alice","cost":9,"request_id":"x"}`,
			service: &scripted.Service{Decision: refused},
			status:  200, want: refusedJSON, // it was charged all the same
			calls: []scripted.Call{{Method: "Charge",
				Charge: limit.Charge{Target: login, Amount: limit.Amount{Cost: 9}, RequestID: "x"}}},
		}} {
		t.Run(tt.name, func(t *testing.T) {
			d := newAPI(t, tt.service, nil)
			expect.NoError(t, d.spec.accepts(tt.path, tt.body), "openapi.yaml does not accept the request")
			resp := d.post(tt.path, tt.body)
			wantType := "application/json"
			if tt.status == 400 || tt.status == 404 {
				wantType = "application/problem+json"
			}
			if got := resp.Header.Get("Content-Type"); resp.StatusCode != tt.status || got != wantType {
				t.Errorf("answered %d %s, want %d %s", resp.StatusCode, got, tt.status, wantType)
			}
			expect.NoDiff(t, cmp.Diff(tt.want, bodyOf(t, resp)), "body (-want +got)")
			expect.NoDiff(t, cmp.Diff(tt.calls, tt.service.Calls()), "calls (-want +got)")
			for name, want := range tt.header {
				expect.Equal(t, strings.Join(resp.Header[name], "|"), want, "%s", name)
			}
		})
	}
}

// TestBadRequests: what is wrong with a request is said of a field, in a problem, and the service is not asked.
func TestBadRequests(t *testing.T) {
	words := strings.NewReplacer(`\xff`, "\xff", `\n`, "\n", "LONG", strings.Repeat("k", limit.MaxKey+1), "CLIPPED",
		strings.Repeat("k", 128),
		"UMLAUTS", strings.Repeat("ä", limit.MaxKey/2+1), "HUGE", strings.Repeat("x", 8<<10), "CLASSES", classes(17),
		"MANY", strings.Repeat("{},", 1000))
	testkit.Table(t, "testdata/bad_requests.txt", func(t *testing.T, asked, want string) {
		path, body, _ := strings.Cut(words.Replace(asked), " ")
		expected := strings.SplitN(words.Replace(want), " ", 3)
		status := must.Value(strconv.Atoi(expected[0]))(t)
		var service scripted.Service
		d := newAPI(t, &service, func(c *Config) { c.MaxBody = 8 << 10 })
		wantProblem(t, d.post(path, body), status, strings.TrimPrefix(expected[1], "-"), expected[2])
		expect.True(t, len(service.Calls()) == 0, "the service was asked: %+v", service.Calls())
	})
}

// wantProblem checks that resp is a problem document whose detail begins with the field and contains a phrase.
func wantProblem(t *testing.T, resp *http.Response, status int, field, phrase string) {
	t.Helper()
	var p problemBody
	must.NoError(t, unmarshal(bodyOf(t, resp), &p))
	got := resp.Header.Get("Content-Type")
	expect.True(t, resp.StatusCode == status && p.Status == status && got == "application/problem+json",
		"answered %d %s with status %d, want %d", resp.StatusCode, got, p.Status, status)
	expect.True(t, p.Field == field && (field == "" || strings.HasPrefix(p.Detail, field+": ")) &&
		strings.Contains(p.Detail, phrase),
		"field %q, detail %q; want field %q, detail with %q", p.Field, p.Detail, field, phrase)
	anchor := strings.TrimPrefix(p.Type, problemTypes)
	expect.True(t, strings.Contains(problemsPage, "\n## "+anchor+"\n"+strconv.Itoa(status)+". "),
		"PROBLEMS.md does not explain %q with status %d", anchor, status)
}

func TestMediaType(t *testing.T) {
	const body = `{"policy":"login","key":"alice"}`
	for _, tt := range []struct {
		header []string
		detail string // "" when the request is fine
	}{
		{[]string{"Content-Type", "application/json"}, ""},
		{[]string{"Content-Type", "Application/JSON; charset=UTF-8"}, ""},
		{[]string{"Content-Type", `application/json;charset="utf-8"`}, ""},
		{[]string{"Content-Type", "application/json", "Content-Encoding", "identity"}, ""},
		{nil, "-H 'Content-Type: application/json'"},
		{[]string{"Content-Type", "application/x-www-form-urlencoded"}, "-H 'Content-Type: application/json'"},
		{[]string{"Content-Type", "text/json"}, "application/json"},
		{[]string{"Content-Type", "application/problem+json"}, "application/json"},
		{[]string{"Content-Type", ";"}, "application/json"},
		{[]string{"Content-Type", "application/json; charset=latin1"}, "UTF-8"},
		{[]string{"Content-Type", "application/json", "Content-Type", "text/plain"}, "exactly one"},
		{[]string{"Content-Type", "application/json", "Content-Encoding", "gzip"}, "compressed"},
		{[]string{"Content-Type", "application/json", "Content-Encoding", "identity", "Content-Encoding", "gzip"},
			"compressed"},
		{[]string{"Content-Type", "application/json", "Content-Encoding", "", "Content-Encoding", "br"}, "compressed"},
	} {
		service := &scripted.Service{Results: []limit.Result{{Decision: admitted}}}
		d := newAPI(t, service, nil)
		resp := d.do("POST", "/v1/check", body, tt.header...)
		if tt.detail == "" {
			expect.True(t, resp.StatusCode == 200, "%q: %d %s", tt.header, resp.StatusCode, bodyOf(t, resp))
			continue
		}
		wantProblem(t, resp, 415, "", tt.detail)
		expect.True(t, len(service.Calls()) == 0, "%q: the service was asked", tt.header)
	}
}

func TestServiceErrors(t *testing.T) {
	bodies := map[string]string{
		"/v1/check":   `{"policy":"p","key":"k"}`,
		"/v1/checks":  `{"checks":[{"policy":"p","key":"k"}]}`,
		"/v1/acquire": `{"policy":"p","key":"k"}`,
		"/v1/renew":   `{"policy":"p","key":"k","lease_id":"l"}`,
		"/v1/release": `{"policy":"p","key":"k","lease_id":"l"}`,
		"/v1/reserve": `{"policy":"p","key":"k"}`,
		"/v1/commit":  `{"policy":"p","key":"k","reservation_id":"r","cost":1}`,
		"/v1/commits": `{"commits":[{"policy":"p","key":"k","reservation_id":"r","cost":1}]}`,
		"/v1/extends": `{"extends":[{"policy":"p","key":"k","reservation_id":"r","cost":1}]}`,
		"/v1/cancel":  `{"policy":"p","key":"k","reservation_id":"r"}`,
		"/v1/refund":  `{"policy":"p","key":"k"}`,
		"/v1/reset":   `{"policy":"p","key":"k"}`,
	}
	for _, tt := range []struct {
		err    error
		status int
		field  string
		detail string
		logged bool
	}{
		{limit.NewError(limit.Invalid, "cost", "too much"), 400, "cost", "too much", false},
		{limit.NewError(limit.NotFound, "lease_id", "has ended"), 404, "lease_id", "has ended", false},
		{limit.NewError(limit.TooLarge, "key", "too long"), 413, "key", "too long", false},
		{&limit.Error{Kind: limit.Unavailable, Message: "nobody \xff there"}, 503, "", "nobody \uFFFD there", false},
		{&limit.Error{Message: "no kind"}, 500, "", "log", true},
		{errors.New("secret"), 500, "", "log", true},
		{context.Canceled, 503, "", "ended", false},
		{context.DeadlineExceeded, 503, "", "ended", false},
	} {
		for path, body := range bodies {
			d := newAPI(t, &scripted.Service{Err: tt.err}, nil)
			resp := d.post(path, body)
			field := tt.field
			if field != "" && path == "/v1/checks" {
				field = "checks[0]." + field
			}
			wantProblem(t, resp, tt.status, field, tt.detail)
			expect.True(t, !strings.Contains(bodyOf(t, resp), "secret") &&
				tt.logged == strings.Contains(d.log.String(), "request failed"), "%s: %v: body %s, log %s", path,
				tt.err, bodyOf(t, resp), d.log)
		}
	}

	// The errors of single checks in a batch.
	d := newAPI(t, &scripted.Service{Results: []limit.Result{
		{Err: limit.NewError(limit.NotFound, "policy", "unknown").InList("checks", 0)},
		{Err: &limit.Error{Kind: limit.Unavailable, Message: "nobody \xff there"}},
		{Err: errors.New("secret")},
	}}, nil)
	got := bodyOf(t, d.post("/v1/checks",
		`{"checks":[{"policy":"p","key":"k"},{"policy":"p","key":"k"},{"policy":"p","key":"k"}]}`))
	for _, want := range []string{`"field":"checks[0].policy"`, `"detail":"nobody ` + "\uFFFD" + ` there"}`,
		`"status":500`} {
		expect.True(t, strings.Contains(got, want), "no %s in %s", want, got)
	}
	expect.True(t, !strings.Contains(got, "secret"), "an unknown error's text got out: %s", got)

	// A problem of one element as a whole.
	d = newAPI(t, &scripted.Service{Err: limit.NewError(limit.Unavailable, "", "no").InList("checks", 1)}, nil)
	wantProblem(t, d.post("/v1/checks", bodies["/v1/checks"]), 503, "checks[1]", "no")

	// A batch of one is what /v1/check asks, which its caller need not know.
	d = newAPI(t, &scripted.Service{Err: limit.NewError(limit.Invalid, "limit.window", "no").InList("checks", 0)}, nil)
	wantProblem(t, d.post("/v1/check", bodies["/v1/check"]), 400, "limit.window", "no")
	wantProblem(t, d.post("/v1/checks", bodies["/v1/checks"]), 400, "checks[0].limit.window", "no")
}

func TestNoInline(t *testing.T) {
	var service scripted.Service
	d := newAPI(t, &service, func(c *Config) { c.NoInline = true })
	const limit = `"limit":{"algorithm":"sliding_log","limit":1,"window":"1s"},"key":"k"`
	const detail = "inline limits are turned off on this node (no-inline)"
	wantProblem(t, d.post("/v1/check", `{`+limit+`}`), 400, "limit", detail)
	wantProblem(t, d.post("/v1/checks", `{"checks":[{`+limit+`}]}`), 400, "checks[0].limit", detail)
	wantProblem(t, d.post("/v1/acquire", `{`+limit+`}`), 400, "limit", detail)
	expect.True(t, len(service.Calls()) == 0, "the service was asked")
}

// classes are members of a usage.
func classes(n int) string {
	all := make([]string, n)
	for i := range all {
		all[i] = `"c` + strconv.Itoa(i) + `":1`
	}
	return strings.Join(all, ",")
}

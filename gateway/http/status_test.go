package httpapi

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
	"github.com/weirlimit/weir/test/testkit"
)

func TestRoutesAreTheDocumentedOnes(t *testing.T) {
	s := loadSpec(t)
	a := &api{Config: Config{Service: new(scripted.Service), Overrides: new(fakeOverrides),
		Metrics: http.NotFoundHandler(), Foreign: foreignRoutes()}}
	var routes, documented []string
	for _, rt := range a.routes() {
		routes = append(routes, rt.Method+" "+rt.Path)
	}
	for path, item := range s.doc.Paths.Map() {
		for method := range item.Operations() {
			documented = append(documented, method+" "+path)
		}
	}
	slices.Sort(routes)
	slices.Sort(documented)
	expect.NoDiff(t, cmp.Diff(documented, routes), "-openapi.yaml +routes")
}

func TestGets(t *testing.T) {
	berlin := must.Value(time.LoadLocation("Europe/Berlin"))(t)
	listing := PolicyListing{
		Hash: "9a1c", ReloadError: "policies.yaml:3:5: policies[0].limit: must not be zero",
		Policies: []Policy{
			{Name: "free", OnError: "open"},
			{Name: "login", OnError: "closed", Overrides: 2, Shadow: true, Limits: []algo.Limit{
				{Algorithm: algo.SlidingLog, Limit: 5, Window: time.Minute, CountDenied: true},
				{Algorithm: algo.SlidingWindow, Limit: 5, Window: 90 * time.Minute, Slots: 6},
				{Algorithm: algo.TokenBucket, Limit: 5, Window: 24 * time.Hour, Capacity: 9},
				{Algorithm: algo.FixedWindow, Limit: 5, Period: algo.Month},
				{Algorithm: algo.FixedWindow, Limit: 5, Period: algo.Day, Zone: berlin},
				{Algorithm: algo.Concurrency, Limit: 5, Window: 1500 * time.Millisecond},
			}},
		},
	}
	d := newAPI(t, new(scripted.Service), func(c *Config) {
		c.Policies = func() PolicyListing { return listing }
		c.Status = func(context.Context) *weirv1.StatusResponse {
			return &weirv1.StatusResponse{Members: []*weirv1.Member{{Name: "weir-1", Version: "unknown"}}}
		}
	})
	for _, tt := range []struct{ path, contentType, body string }{
		{"/healthz", "application/json", `{"alive":true}`},
		{"/readyz", "application/json", `{"ready":true}`},
		{"/healthcheck", "application/json", `{"ready":true}`},
		{"/metrics", "text/plain; version=0.0.4; charset=utf-8", "weir_requests_total 0\n"},
		{"/openapi.yaml", "application/yaml", openAPI},
		{"/v1/policies", "application/json",
			`{"hash":"9a1c","reload_error":"policies.yaml:3:5: policies[0].limit: must not be zero","policies":[` +
				`{"name":"free","limits":[],"overrides":0,"shadow":false,"on_error":"open"},` +
				`{"name":"login","limits":[` +
				`{"algorithm":"sliding_log","limit":5,"window":"1m","count_denied":true},` +
				`{"algorithm":"sliding_window","limit":5,"window":"1h30m","slots":6},` +
				`{"algorithm":"token_bucket","limit":5,"window":"24h","capacity":9},` +
				`{"algorithm":"fixed_window","limit":5,"window":"month","align":"calendar","time_zone":"UTC"},` +
				`{"algorithm":"fixed_window","limit":5,"window":"day","align":"calendar","time_zone":"Europe/Berlin"},` +
				`{"algorithm":"concurrency","limit":5,"ttl":"1.5s"}` +
				`],"overrides":2,"shadow":true,"on_error":"closed"}]}`},
		{"/v1/status", "application/json",
			`{"node":"","version":"","ready":false,"partitions":0,"ring":"","members":[{"name":"weir-1","boot":"",` +
				`"state":"","http":"","grpc":"","gossip":"","peer":"","partitions":0,"reachable":false}]}`},
	} {
		resp := d.do("GET", tt.path, "")
		if got := resp.Header.Get("Content-Type"); resp.StatusCode != 200 || got != tt.contentType {
			t.Errorf("%s: %d %s, want 200 %s", tt.path, resp.StatusCode, got, tt.contentType)
		}
		expect.NoDiff(t, cmp.Diff(tt.body, bodyOf(t, resp)), "%s (-want +got)", tt.path)
		resp = d.do("HEAD", tt.path, "")
		expect.Equal(t, resp.StatusCode, 200, "HEAD %s", tt.path)
	}

	index := bodyOf(t, d.do("GET", "/", ""))
	for path := range d.spec.doc.Paths.Map() {
		expect.True(t, strings.Contains(index, " "+path+"\n"), "the index does not list %s", path)
	}
}

// TestStatusIsWhole holds the status to the protocol's messages, so that a field that is added there is not forgotten
// here.
func TestStatusIsWhole(t *testing.T) {
	member := &weirv1.Member{Reachable: true}
	status := &weirv1.StatusResponse{Members: []*weirv1.Member{member}}
	fillFields(status)
	fillFields(member)
	member.Ownership = &weirv1.Ownership{}
	fillFields(member.Ownership)
	member.Ownership.Disk = &weirv1.Disk{}
	fillFields(member.Ownership.Disk)
	d := newAPI(t, new(scripted.Service), func(c *Config) {
		c.Status = func(context.Context) *weirv1.StatusResponse { return status }
	})
	var got map[string]any
	must.NoError(t, unmarshal(bodyOf(t, d.do("GET", "/v1/status", "")), &got))
	wantFields(t, status, got)
	first := got["members"].([]any)[0].(map[string]any)
	wantFields(t, member, first)
	ownership := first["ownership"].(map[string]any)
	wantFields(t, member.Ownership, ownership)
	wantFields(t, member.Ownership.Disk, ownership["disk"].(map[string]any))
}

// fillFields gives every scalar field a value that is not its zero.
func fillFields(m protoreflect.ProtoMessage) {
	r := m.ProtoReflect()
	for i := range r.Descriptor().Fields().Len() {
		switch f := r.Descriptor().Fields().Get(i); f.Kind() {
		case protoreflect.StringKind:
			r.Set(f, protoreflect.ValueOfString("x"))
		case protoreflect.BoolKind:
			r.Set(f, protoreflect.ValueOfBool(true))
		case protoreflect.Uint32Kind:
			r.Set(f, protoreflect.ValueOfUint32(7))
		case protoreflect.Uint64Kind:
			r.Set(f, protoreflect.ValueOfUint64(7))
		case protoreflect.Int64Kind:
			r.Set(f, protoreflect.ValueOfInt64(7_000_000))
		}
	}
}

func wantFields(t *testing.T, m protoreflect.ProtoMessage, got map[string]any) {
	t.Helper()
	fields := m.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		name := string(fields.Get(i).Name())
		if base, ok := strings.CutSuffix(name, "_ns"); ok {
			name = base + "_ms"
		}
		switch v := got[name].(type) {
		case nil:
			t.Errorf("%s is not in the status", name)
		case float64:
			expect.Equal(t, v, 7, "%s", name)
		}
	}
	expect.True(t, len(got) == fields.Len(), "the status has %d fields, the message %d", len(got), fields.Len())
}

func TestNoSuchPlace(t *testing.T) {
	d := newAPI(t, new(scripted.Service), nil)
	for _, path := range []string{"/nope", "/v1", "/v1/", "/v1/check/", "/v1/nothing", "/console",
		"/" + strings.Repeat("x", 1000)} {
		for _, method := range []string{"GET", "POST", "DELETE"} {
			wantProblem(t, d.do(method, path, ""), 404, "", "/openapi.yaml")
		}
	}
	// What the mux would redirect from.
	for _, path := range []string{"//v1/check", "/v1//check", "/v1/./check", "/v1/x/../check", "/v1/check/.", "//",
		"/./", "/..", "/%2e%2e", "/a%2F%2Fb/../v1/check", "//healthz"} {
		for _, method := range []string{"GET", "POST", "CONNECT"} {
			wantProblem(t, d.do(method, path, ""), 404, "", "/openapi.yaml")
		}
	}
	for path, item := range d.spec.doc.Paths.Map() {
		if path == forwardAuthPath { // takes any method
			continue
		}
		var methods []string
		for method := range item.Operations() {
			if methods = append(methods, method); method == "GET" {
				methods = append(methods, "HEAD")
			}
		}
		slices.Sort(methods)
		allow := strings.Join(methods, ", ")
		for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"} {
			if slices.Contains(methods, method) {
				continue
			}
			resp := d.do(method, path, "")
			expect.Equal(t, resp.Header.Get("Allow"), allow, "%s %s: Allow", method, path)
			wantProblem(t, resp, 405, "", "takes "+allow)
		}
	}
	expect.True(t, len(d.service.Calls()) == 0, "the service was asked")
}

// TestLimits: a limit is read as it is sent, and shown so that it may be sent again.
func TestLimits(t *testing.T) {
	testkit.Table(t, "testdata/limits.txt", func(t *testing.T, sent, want string) {
		service := &scripted.Service{Results: []limit.Result{{Decision: admitted}}}
		d := newAPI(t, service, nil)
		body := `{"key":"k","limit":` + sent + `}`
		expect.NoError(t, d.spec.accepts("/v1/check", body), "openapi.yaml does not accept it")
		resp := d.post("/v1/check", body)
		must.Equal(t, resp.StatusCode, 200, bodyOf(t, resp))
		shown := string(must.Value(marshal(service.Calls()[0].Checks[0].Limit))(t))
		expect.Equal(t, shown, strings.Replace(want, "the same", sent, 1))
	})
}

// A browser gets an index with links, the one to the console among them where there is one.
func TestIndexForPeople(t *testing.T) {
	for _, console := range []string{"", "/console"} {
		d := newAPI(t, new(scripted.Service), func(c *Config) { c.Console = console })
		resp := d.do("GET", "/", "", "Accept", "text/html,application/xhtml+xml;q=0.9")
		body := bodyOf(t, resp)
		got := resp.Header.Get("Content-Type")
		expect.True(t, resp.StatusCode == 200 && got == "text/html; charset=utf-8" &&
			resp.Header.Get("Content-Security-Policy") != "", "%d %v", resp.StatusCode, resp.Header)
		expect.True(t, strings.Contains(body, "\nPOST /v1/check\n") &&
			strings.Contains(body, `<a href="/console">`) == (console != ""),
			"with a console at %q:\n%s", console, body)
	}
}

func TestTopKeys(t *testing.T) {
	var asked *weirv1.TopKeysRequest
	d := newAPI(t, new(scripted.Service), func(c *Config) {
		c.TopKeys = func(_ context.Context, r *weirv1.TopKeysRequest) (*weirv1.TopKeysResponse, error) {
			asked = r
			if r.Limit > 256 {
				return nil, limit.NewError(limit.Invalid, "limit", "is above 256")
			}
			return &weirv1.TopKeysResponse{
				Node: "n0", Members: []string{"n0"}, CountedNs: int64(1999 * time.Microsecond),
				PoliciesCountedNs: int64(time.Second),
				Keys: []*weirv1.KeyUse{
					{Policy: "login", Key: "<img onerror=x>", Decisions: 5, DecisionsError: 1, Refused: 2,
						Algorithm: weirv1.Algorithm_ALGORITHM_SLIDING_LOG,
						WindowNs:  int64(time.Minute), Limit: 4, Used: 0},
					{Namespace: "api", Key: "k", Decisions: 1, RefusedError: 3},
				},
				Policies: []*weirv1.PolicyUse{{Policy: "login", Allowed: 1, Refused: 2, Shadowed: 3, FailedOpen: 4,
					FailedClosed: 5, Errors: 6}},
			}, nil
		}
	})
	want := `{"node":"n0","order":"busiest","counted_ms":1,"policies_counted_ms":1000,"keys":[` +
		`{"policy":"login","key":"<img onerror=x>","decisions":5,"decisions_error":1,"refused":2,"refused_error":0,"algorithm":"sliding_log","window_ms":60000,"limit":4,"used":0,"utilization":0},` +
		`{"namespace":"api","key":"k","decisions":1,"decisions_error":0,"refused":0,"refused_error":3}],` +
		`"policies":[{"policy":"login","allowed":1,"refused":2,"shadowed":3,"failed_open":4,"failed_closed":5,"errors":6}],"members":["n0"],"unreachable":[]}`
	resp := d.do("GET", "/v1/keys/top", "")
	diff := cmp.Diff(want, bodyOf(t, resp))
	expect.True(t, diff == "" && resp.StatusCode == 200, "%d %s", resp.StatusCode, diff)
	for query, want := range map[string]*weirv1.TopKeysRequest{
		"":                                {Order: weirv1.KeyOrder_KEY_ORDER_BUSIEST},
		"?order=refused":                  {Order: weirv1.KeyOrder_KEY_ORDER_REFUSED},
		"?policy=p&limit=7&order=fullest": {Order: weirv1.KeyOrder_KEY_ORDER_FULLEST, Limit: 7, Policy: "p"},
		"?order=":                         nil,
		"?order=Busiest":                  nil,
		"?order=busiest&order=busiest":    nil,
		"?limit=0":                        nil,
		"?limit=257":                      nil,
		"?limit=-1":                       nil,
		"?limit=4294967296":               nil,
		"?policy=":                        nil,
		"?sort=busiest":                   nil,
		"?order=%zz":                      nil,
		"?limit=1;order=busiest":          nil,
	} {
		resp := d.do("GET", "/v1/keys/top"+query, "")
		if want == nil {
			expect.True(t, resp.StatusCode == 400, "%s: %d %s", query, resp.StatusCode, bodyOf(t, resp))
			continue
		}
		diff := cmp.Diff(want, asked, protocmp.Transform())
		expect.True(t, diff == "" && resp.StatusCode == 200, "%s: %d %s", query, resp.StatusCode, diff)
	}
}

func TestDescribe(t *testing.T) {
	d := newAPI(t, new(scripted.Service), func(c *Config) {
		c.Describe = func(_ context.Context, t *limit.Target) (*limit.KeyState, error) {
			if t.Policy == "gone" {
				return nil, limit.NewError(limit.NotFound, "policy", "there is no policy named gone")
			}
			return &limit.KeyState{Node: "n1", OnLoan: 7, Limits: []limit.LimitState{
				{Algorithm: algo.SlidingLog, Limit: 5, Remaining: 3, Window: time.Minute,
					Returns: []algo.Return{{Units: 2, After: 1}}},
				{Algorithm: algo.Concurrency, Limit: 5, Remaining: 5, Window: time.Minute},
			}}, nil
		}
	})
	want := `{"node":"n1","on_loan":7,"limits":[{"algorithm":"sliding_log","limit":5,"window_ms":60000,"remaining":3,"returns":[{"units":2,"after_ms":1}]},` +
		`{"algorithm":"concurrency","limit":5,"window_ms":60000,"remaining":5,"returns":[]}]}`
	resp := d.post("/v1/keys/describe", `{"policy":"p","key":"k"}`)
	diff := cmp.Diff(want, bodyOf(t, resp))
	expect.True(t, diff == "" && resp.StatusCode == 200, "%d %s", resp.StatusCode, diff)
	for body, status := range map[string]int{
		`{"policy":"gone","key":"k"}`:       404,
		`{"policy":"p"}`:                    400,
		`{"policy":"p","key":"k","cost":1}`: 400,
		`{}`:                                400,
	} {
		resp := d.post("/v1/keys/describe", body)
		expect.True(t, resp.StatusCode == status, "%s: %d %s, want %d", body, resp.StatusCode, bodyOf(t, resp), status)
	}
}

// fakeOverrides notes what it is asked, and answers with err or with one override.
type fakeOverrides struct {
	asked proto.Message
	err   error
}

var fakeOverride = &weirv1.Override{
	Policy: "login", Key: "a\nb", Settings: `{"limit":500}`, Version: "12@n0", ChangedBy: "ops", ChangedAtUnixMs: 1_000,
	Inactive: "policy: there is none",
}

func (f *fakeOverrides) List(_ context.Context,
	req *weirv1.ListOverridesRequest) (*weirv1.ListOverridesResponse, error) {
	f.asked = req
	return &weirv1.ListOverridesResponse{Overrides: []*weirv1.Override{fakeOverride}, NextPageToken: "t"}, f.err
}

func (f *fakeOverrides) Set(_ context.Context, req *weirv1.SetOverrideRequest) (*weirv1.OverrideChange, error) {
	f.asked = req
	return &weirv1.OverrideChange{
		Override: fakeOverride, Members: []*weirv1.OverrideMember{{Name: "n0", Has: true, Durable: true},
			{Name: "n1", Error: "away"}},
	}, f.err
}

func (f *fakeOverrides) Delete(_ context.Context, req *weirv1.DeleteOverrideRequest) (*weirv1.OverrideChange, error) {
	f.asked = req
	return &weirv1.OverrideChange{Override: &weirv1.Override{Policy: "login", Prefix: "a", Version: "13@n0"},
		Before: fakeOverride}, f.err
}

func TestOverrides(t *testing.T) {
	fake := new(fakeOverrides)
	d := newAPI(t, new(scripted.Service), func(c *Config) { c.Overrides = fake })
	const stored = `{"policy":"login","key":"a\nb","version":"12@n0","inactive":"policy: there is none","settings":{"limit":500},"changed_by":"ops","changed_at":"1970-01-01T00:00:01Z"}`
	for _, c := range []struct {
		method, path, body string
		status             int
		asked              proto.Message
		answer             string
	}{
		{"PUT", "", `{"policy":"login","key":"a","settings":{"limit": 500}}`, 200,
			&weirv1.SetOverrideRequest{Override: &weirv1.Override{Policy: "login", Key: "a",
				Settings: `{"limit": 500}`}},
			`{"override":` + stored +
				`,"members":[{"name":"n0","has":true,"durable":true},{"name":"n1","has":false,"durable":false,"error":"away"}]}`},
		{"DELETE", "?policy=login&prefix=a%0Ab", "", 200,
			&weirv1.DeleteOverrideRequest{Policy: "login", Prefix: "a\nb"},
			`{"override":{"policy":"login","prefix":"a","version":"13@n0","changed_by":"","changed_at":"1970-01-01T00:00:00Z"},"before":` + stored + `,"members":[]}`},
		{"GET", "?policy=login&page_size=7&page_token=x", "", 200,
			&weirv1.ListOverridesRequest{Policy: "login", PageSize: 7, PageToken: "x"},
			`{"overrides":[` + stored + `],"next_page_token":"t"}`},
		{"GET", "", "", 200, &weirv1.ListOverridesRequest{}, ""},
		{"GET", "?policy=", "", 400, nil, ""},
		{"GET", "?page_size=0", "", 400, nil, ""},
		{"GET", "?page_size=-1", "", 400, nil, ""},
		{"GET", "?page_size=4294967296", "", 400, nil, ""},
		{"GET", "?sort=key", "", 400, nil, ""},
		{"GET", "?key=a&key=b", "", 400, nil, ""},
		{"GET", "?key=%zz", "", 400, nil, ""},
		{"DELETE", "?key=a;policy=b", "", 400, nil, ""},
		{"DELETE", "?policy=login&page_size=1", "", 400, nil, ""},
		{"PUT", "", `{"policy":"login","key":"a","settings":{"limit":null}}`, 400, nil, ""},
		{"PUT", "", `{"policy":"login","key":"a","settings":{"limit":1,"limit":2}}`, 400, nil, ""},
		{"PUT", "", `{"policy":"login","key":"a","limit":1}`, 400, nil, ""},
		{"PUT", "", `{"policy":1}`, 400, nil, ""},
		{"PUT", "", `[]`, 400, nil, ""},
		{"PUT", "", ``, 400, nil, ""},
		{"POST", "", `{}`, 405, nil, ""},
	} {
		fake.asked = nil
		resp := d.do(c.method, "/v1/overrides"+c.path, c.body, "Content-Type", "application/json")
		body := bodyOf(t, resp)
		if diff := cmp.Diff(c.asked, fake.asked, protocmp.Transform()); diff != "" || resp.StatusCode != c.status {
			t.Errorf("%s %s %s: %d %s\n%s", c.method, c.path, c.body, resp.StatusCode, body, diff)
		}
		expect.True(t, c.answer == "" || body == c.answer, "%s: %s", c.method, cmp.Diff(c.answer, body))
	}
	fake.err = limit.NewError(limit.NotFound, "policy", "there is none")
	for _, method := range []string{"DELETE", "PUT"} {
		resp := d.do(method, "/v1/overrides", "{}", "Content-Type", "application/json")
		expect.Equal(t, resp.StatusCode, 404, "%s", method)
	}
}

type askerKey struct{}

// TestAuthorize: each route asks for its role, with the open ones nobody is asked; who is denied reaches no handler,
// and the answers are as openapi.yaml has them.
func TestAuthorize(t *testing.T) {
	roles := map[string]auth.Role{
		"POST /v1/check": auth.RoleCheck, "POST /v1/checks": auth.RoleCheck, "POST /v1/acquire": auth.RoleCheck,
		"POST /v1/renew":   auth.RoleCheck,
		"POST /v1/release": auth.RoleCheck, "POST /v1/reserve": auth.RoleCheck, "POST /v1/commit": auth.RoleCheck,
		"POST /v1/cancel":   auth.RoleCheck,
		"POST /v1/reserves": auth.RoleCheck, "POST /v1/extend": auth.RoleCheck, "POST /v1/extends": auth.RoleCheck,
		"POST /v1/commits": auth.RoleCheck, "POST /v1/charge": auth.RoleCharge,
		"POST /v1/refund": auth.RoleRefund, "POST /v1/reset": auth.RoleRefund,
		"GET /v1/forward-auth": auth.RoleCheck,
		"POST /json":           auth.RoleCheck, "POST /v1/GetRateLimits": auth.RoleCheck,
		"GET /v1/HealthCheck": auth.RoleCheck, "GET /v1/LiveCheck": auth.RoleOpen,
		"GET /v1/policies": auth.RoleRead, "GET /v1/status": auth.RoleRead, "GET /metrics": auth.RoleRead,
		"GET /v1/keys/top": auth.RoleKeys, "POST /v1/keys/describe": auth.RoleKeys,
		"GET /v1/overrides": auth.RoleOverrides, "PUT /v1/overrides": auth.RoleOverrides,
		"DELETE /v1/overrides": auth.RoleOverrides,
		"GET /healthz":         auth.RoleOpen, "GET /readyz": auth.RoleOpen, "GET /healthcheck": auth.RoleOpen,
		"GET /openapi.yaml": auth.RoleOpen, "GET /": auth.RoleOpen,
	}
	var asked auth.Role
	denial := &auth.Denial{Reason: auth.NoCredentials, Message: "say who you are"}
	d := newAPI(t, new(scripted.Service), func(c *Config) {
		c.Authorize = func(_ *http.Request, role auth.Role) (context.Context, *auth.Denial) {
			asked = role
			return nil, denial
		}
	})
	for _, rt := range new(api).routesForTest() {
		name := rt.Method + " " + rt.Path
		want, listed := roles[name]
		if !listed {
			t.Errorf("%s is new: say here which role it takes", name)
			continue
		}
		for _, c := range []struct {
			denial    auth.Denial
			status    int
			challenge string
		}{
			{auth.Denial{Reason: auth.NoCredentials, Message: "say who you are"}, 401, `Bearer realm="weir"`},
			{auth.Denial{Reason: auth.BadToken, Message: "nobody's"}, 401,
				`Bearer realm="weir", error="invalid_token"`},
			{auth.Denial{Authenticated: true, Reason: auth.WrongRole, Message: "not yours"}, 403,
				`Bearer realm="weir", error="insufficient_scope"`},
		} {
			asked, *denial = auth.RoleOpen, c.denial
			resp := d.do(rt.Method, rt.Path, "{}", "Content-Type", "application/json")
			expect.Equal(t, asked, want, "%s asks for", name)
			if want == auth.RoleOpen {
				expect.Equal(t, resp.StatusCode, http.StatusOK, "%s", name)
				continue
			}
			expect.True(t, resp.StatusCode == c.status && resp.Header.Get("WWW-Authenticate") == c.challenge &&
				strings.Contains(bodyOf(t, resp), c.denial.Message), "%s: %d %v", name, resp.StatusCode, resp.Header)
		}
	}
	expect.True(t, len(d.service.Calls()) == 0, "the service was asked: %v", d.service.Calls())
}

// TestAuthorizedContext: the service is asked in the context that Authorize returned, and what it denies is a 403.
func TestAuthorizedContext(t *testing.T) {
	service := &contextual{}
	d := newAPI(t, new(scripted.Service), func(c *Config) {
		c.Service = service
		c.Authorize = func(r *http.Request, _ auth.Role) (context.Context, *auth.Denial) {
			return context.WithValue(r.Context(), askerKey{}, "shop"), nil
		}
	})
	resp := d.post("/v1/reset", `{"policy":"login","key":"a"}`)
	expect.True(t, service.asker == "shop" && resp.StatusCode == http.StatusForbidden &&
		strings.Contains(bodyOf(t, resp), `"field":"policy"`), "asked by %v, %d", service.asker, resp.StatusCode)
}

// contextual denies everything, and notes who asks.
type contextual struct {
	limit.Service
	asker any
}

func (c *contextual) Reset(ctx context.Context, _ limit.Target) error {
	c.asker = ctx.Value(askerKey{})
	return &limit.Error{Kind: limit.Denied, Field: "policy", Message: "is not yours"}
}

// routesForTest are the routes, of which no handler is called.
func (a *api) routesForTest() []Route {
	a.Service, a.Overrides, a.Metrics, a.Foreign = new(scripted.Service), new(fakeOverrides), http.NotFoundHandler(),
		foreignRoutes()
	return a.routes()
}

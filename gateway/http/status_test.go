package httpapi

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
	"github.com/weirlimit/weir/test/testkit"
)

func TestRoutesAreTheDocumentedOnes(t *testing.T) {
	s := loadSpec(t)
	a := &api{Config: Config{Service: new(scripted.Service), Overrides: new(fakeOverrides), Metrics: http.NotFoundHandler(), Foreign: foreignRoutes()}}
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
	status := &weirv1.StatusResponse{
		Node: "weir-0", Version: "v0.1.0", Ready: true, Partitions: 1024, Ring: "6f2a",
		Members: []*weirv1.Member{
			{Name: "weir-0", Boot: "3d1f", State: "active", Http: "h:1", Grpc: "h:2", Gossip: "h:3", Peer: "h:4", Partitions: 1000,
				Reachable: true, Version: "v0.1.0", PoliciesHash: "9a1c", Policies: 2, Keys: 9, KeysCopied: 4, StateBytes: 8192, UptimeNs: 1, Loans: &weirv1.Loans{OnLoan: 5, Borrowers: 2, Recalls: 4, Unanswered: 1, Expired: 3},
				Ownership: &weirv1.Ownership{Held: 1, Moving: 2, Awaited: 3, Copies: 4, Degraded: 5, Pending: 6, Granted: 7, HighestTerm: "1.2/00ff", Voter: "voting", Settled: true}},
			{Name: "weir-1", State: "active", Partitions: 24, Version: "unknown"},
		},
	}
	d := newAPI(t, new(scripted.Service), func(c *Config) {
		c.Policies = func() PolicyListing { return listing }
		c.Status = func(context.Context) (*weirv1.StatusResponse, error) { return status, nil }
	})
	for _, tt := range []struct{ path, contentType, body string }{
		{"/healthz", "application/json", `{"alive":true}`},
		{"/readyz", "application/json", `{"ready":true}`},
		{"/healthcheck", "application/json", `{"ready":true}`},
		{"/metrics", "text/plain; version=0.0.4; charset=utf-8", "weir_requests_total 0\n"},
		{"/openapi.yaml", "application/yaml", openAPI},
		{"/v1/policies", "application/json", `{"hash":"9a1c","reload_error":"policies.yaml:3:5: policies[0].limit: must not be zero","policies":[` +
			`{"name":"free","limits":[],"overrides":0,"shadow":false,"on_error":"open"},` +
			`{"name":"login","limits":[` +
			`{"algorithm":"sliding_log","limit":5,"window":"1m","count_denied":true},` +
			`{"algorithm":"sliding_window","limit":5,"window":"1h30m","slots":6},` +
			`{"algorithm":"token_bucket","limit":5,"window":"24h","capacity":9},` +
			`{"algorithm":"fixed_window","limit":5,"window":"month","align":"calendar","time_zone":"UTC"},` +
			`{"algorithm":"fixed_window","limit":5,"window":"day","align":"calendar","time_zone":"Europe/Berlin"},` +
			`{"algorithm":"concurrency","limit":5,"ttl":"1.5s"}` +
			`],"overrides":2,"shadow":true,"on_error":"closed"}]}`},
		{"/v1/status", "application/json", `{"node":"weir-0","version":"v0.1.0","ready":true,"partitions":1024,"ring":"6f2a","members":[` +
			`{"name":"weir-0","boot":"3d1f","state":"active","http":"h:1","grpc":"h:2","gossip":"h:3","peer":"h:4","partitions":1000,` +
			`"reachable":true,"version":"v0.1.0","policies_hash":"9a1c","policies":2,"keys":9,"keys_copied":4,"state_bytes":8192,"uptime_ms":1,"loans":{"on_loan":5,"borrowers":2,"recalls":4,"unanswered":1,"expired":3},` +
			`"ownership":{"held":1,"moving":2,"awaited":3,"copies":4,"degraded":5,"pending":6,"granted":7,"highest_term":"1.2/00ff","voter":"voting","settled":true}},` +
			`{"name":"weir-1","boot":"","state":"active","http":"","grpc":"","gossip":"","peer":"","partitions":24,"reachable":false}]}`},
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

func TestReadiness(t *testing.T) {
	for _, tt := range []struct {
		ready  bool
		detail string
		status int
		body   string
	}{
		{true, "policies not reloaded: x.yaml:1:1", 200, `{"ready":true,"detail":"policies not reloaded: x.yaml:1:1"}`},
		{false, "joining", 503, `{"ready":false,"detail":"joining"}`},
		{false, "", 503, `{"ready":false}`},
	} {
		d := newAPI(t, new(scripted.Service), func(c *Config) { c.Ready = func() (bool, string) { return tt.ready, tt.detail } })
		resp := d.do("GET", "/readyz", "")
		if got := bodyOf(t, resp); resp.StatusCode != tt.status || got != tt.body {
			t.Errorf("%d %s, want %d %s", resp.StatusCode, got, tt.status, tt.body)
		}
	}
}

func TestStatusFails(t *testing.T) {
	d := newAPI(t, new(scripted.Service), func(c *Config) {
		c.Status = func(context.Context) (*weirv1.StatusResponse, error) { return nil, errors.New("shutting down") }
	})
	wantProblem(t, d.do("GET", "/v1/status", ""), 503, "", "shutting down")
	expect.True(t, strings.Contains(d.log.String(), "shutting down"), "log: %s", d.log)
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
		c.Status = func(context.Context) (*weirv1.StatusResponse, error) { return status, nil }
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
	for _, path := range []string{"/nope", "/v1", "/v1/", "/v1/check/", "/v1/nothing", "/console", "/" + strings.Repeat("x", 1000)} {
		for _, method := range []string{"GET", "POST", "DELETE"} {
			wantProblem(t, d.do(method, path, ""), 404, "", "/openapi.yaml")
		}
	}
	// What the mux would redirect from.
	for _, path := range []string{"//v1/check", "/v1//check", "/v1/./check", "/v1/x/../check", "/v1/check/.", "//", "/./", "/..", "/%2e%2e", "/a%2F%2Fb/../v1/check", "//healthz"} {
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
		expect.True(t, strings.Contains(body, "<code>POST /v1/check</code>") &&
			strings.Contains(body, `<a href="/console">`) == (console != ""),
			"with a console at %q:\n%s", console, body)
	}
}

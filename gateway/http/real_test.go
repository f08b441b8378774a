package httpapi

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/go-json-experiment/json"
	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
)

// nobody is an ownership under which no key can be decided.
type nobody struct{}

func (nobody) Route(int) *ownership.Route { return &ownership.Route{Standing: ownership.Elsewhere} }

func (n nobody) Await(context.Context, int, *ownership.Route) *ownership.Route { return n.Route(0) }

func (nobody) AwaitProgress(context.Context, int, uint64, bool) (degraded, ok bool) {
	return false, true
}

// clock is a clock that stands still until it is moved. A Limiter that sweeps reads it from a goroutine of its own.
type clock struct{ now atomic.Int64 }

func (c *clock) read() algo.Instant {
	return algo.Instant{Mono: int64(time.Hour) + c.now.Load(), Wall: 1e18 + c.now.Load()}
}

// newRealAPI is an API in front of a Limiter.
func newRealAPI(t *testing.T, policies string, owners limiter.Ownership) (*testedAPI, *clock) {
	t.Helper()
	set := must.Value(policy.Parse("policies.yaml", []byte(policies)))(t)
	c := new(clock)
	l := limiter.New(limiter.Config{Policies: set, Ownership: owners, Clock: c.read, Timeout: 20 * time.Millisecond})
	t.Cleanup(l.Close)
	return newAPI(t, new(scripted.Service), func(cfg *Config) { cfg.Service = l }), c
}

const examplePolicies = `
policies:
  - {name: login, algorithm: sliding_log, limit: 5, window: 1m}
  - {name: api, algorithm: sliding_log, limits: [10/1s, 1000/1h]}
  - {name: payout, algorithm: sliding_log, limit: 5, window: 1m, on_error: closed}
  - {name: tb, algorithm: token_bucket, limit: 5, window: 10s, capacity: 8}
  - {name: lb, algorithm: leaky_bucket, limit: 5, window: 10s, capacity: 3}
  - {name: odd, algorithm: token_bucket, limit: 3, window: 10s, capacity: 7}
  - {name: plain, algorithm: token_bucket, limit: 5, window: 10s}
`

// TestQuotaOfBuckets: who paces itself by the quota is never faster than the bucket lets through for good.
func TestQuotaOfBuckets(t *testing.T) {
	d, _ := newRealAPI(t, examplePolicies, nil)
	quotaField := "RateLimit-Policy"
	for _, tt := range []struct{ body, want string }{
		{`{"policy":"tb","key":"k"}`, `"tb";q=8;w=16`},
		{`{"policy":"lb","key":"k"}`, `"lb";q=3;w=6`},
		{`{"policy":"odd","key":"k"}`, `"odd";q=7;w=24`},
		{`{"policy":"plain","key":"k"}`, `"plain";q=5;w=10`},
		{`{"limit":{"algorithm":"token_bucket","limit":5,"window":"10s","capacity":8},"key":"k"}`, `"inline";q=8;w=16`},
		{`{"limit":{"algorithm":"token_bucket","limit":1000,"window":"1s","capacity":1},"key":"k"}`,
			`"inline";q=1;w=1`},
	} {
		got := d.post("/v1/check", tt.body).Header[quotaField]
		expect.True(t, slices.Equal(got, []string{tt.want}), "%s: %q, want %q", tt.body, got, tt.want)
	}
}

// TestExamples holds the examples of openapi.yaml to what is really sent.
func TestExamples(t *testing.T) {
	working, clock := newRealAPI(t, examplePolicies, nil)
	cut, _ := newRealAPI(t, examplePolicies, nobody{})
	form := func(d *testedAPI) *http.Response {
		return d.do("POST", "/v1/check", "policy=login", "Content-Type", "application/x-www-form-urlencoded")
	}
	before := func(key string, waits ...time.Duration) {
		for _, wait := range waits {
			working.post("/v1/check", `{"policy":"login","key":"`+key+`"}`)
			clock.now.Add(int64(wait))
		}
	}
	before("refused", 0, 0, 0, 21600*time.Millisecond, 2*time.Second)
	responses := working.spec.doc.Components.Responses
	of := func(component string) *openapi3.Response { return responses[component].Value }
	checks := working.spec.doc.Paths.Find("/v1/checks").Post.Responses.Status(200).Value
	for _, tt := range []struct {
		documented *openapi3.Response
		example    string
		status     int
		got        *http.Response
	}{
		{of("Admitted"), "admitted", 200, working.post("/v1/check", `{"policy":"login","key":"k"}`)},
		{of("Admitted"), "several", 200, working.post("/v1/check", `{"policy":"api","key":"k"}`)},
		{of("Refused"), "refused", 429, working.post("/v1/check", `{"policy":"login","key":"refused"}`)},
		{of("Refused"), "never", 429, working.post("/v1/check", `{"policy":"login","key":"never","cost":6}`)},
		{of("FailedClosed"), "failed", 503, cut.post("/v1/check", `{"policy":"payout","key":"k"}`)},
		{of("Invalid"), "key", 400, working.post("/v1/check", `{"policy":"login"}`)},
		{of("NotFound"), "policy", 404, working.post("/v1/check", `{"policy":"logn","key":"k"}`)},
		{of("TooLarge"), "key", 413,
			working.post("/v1/check", `{"policy":"login","key":"`+strings.Repeat("k", 2000)+`"}`)},
		{of("UnsupportedMediaType"), "curl", 415, form(working)},
		{of("Unavailable"), "owner", 503, cut.post("/v1/reset", `{"policy":"login","key":"k"}`)},
		{checks, "two", 200, working.post("/v1/checks",
			`{"checks":[{"policy":"login","key":"alice"},{"policy":"upload","key":"alice","cost":20}]}`)},
	} {
		want := exampleOf(t, tt.documented, tt.example)
		var got any
		must.NoError(t, unmarshal(bodyOf(t, tt.got), &got))
		expect.Equal(t, tt.got.StatusCode, tt.status, "%s", tt.example)
		expect.NoDiff(t, cmp.Diff(want, got), "%s (-example +sent)", tt.example)
	}

	// The node describes itself elsewhere; what never varies there is held to its source here.
	status := exampleOf(t, working.spec.doc.Paths.Find("/v1/status").Get.Responses.Status(200).Value,
		"one").(map[string]any)
	member := status["members"].([]any)[0].(map[string]any)
	expect.True(t, status["partitions"] == float64(ring.Partitions) &&
		member["partitions"] == float64(ring.Partitions) && len(status["ring"].(string)) == 16 &&
		len(member["boot"].(string)) == 16, "status: %v", status)
}

// exampleOf returns an example of a documented response, as decoding it from JSON would.
func exampleOf(t *testing.T, documented *openapi3.Response, name string) any {
	t.Helper()
	for _, kind := range slices.Sorted(maps.Keys(documented.Content)) {
		if e := documented.Content[kind].Examples[name]; e != nil {
			b := must.Value(json.Marshal(e.Value.Value))(t)
			var v any
			must.NoError(t, unmarshal(string(b), &v))
			return v
		}
	}
	t.Fatalf("openapi.yaml has no example %q there", name)
	return nil
}

// TestBoundsAsDocumented holds the numbers in the texts to those in force.
func TestBoundsAsDocumented(t *testing.T) {
	text := loadSpec(t).doc.Components.Responses["TooLarge"].Value.Description
	for _, want := range []string{"(4194304 bytes)", "1000 checks", "key (1024 bytes)"} {
		expect.True(t, strings.Contains(strings.ReplaceAll(*text, "\n", " "), want), "no %q in %q", want, *text)
	}
	expect.True(t, limit.MaxBatch == 1000 && limit.MaxKey == 1024 &&
		limit.MaxNamespace == 256 && limit.MaxRequestID == 128, "openapi.yaml and PROBLEMS.md tell other bounds")
}

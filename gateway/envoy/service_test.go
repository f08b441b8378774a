package envoy

import (
	"context"
	"errors"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const (
	ok   = ratelimitv3.RateLimitResponse_OK
	over = ratelimitv3.RateLimitResponse_OVER_LIMIT
)

// bench is a Service on a node alone, whose clock the test sets.
type bench struct {
	*Service
	t    testing.TB
	past atomic.Int64      // nanoseconds since start
	hits map[string]uint64 // by name and result
}

// start is 10 s into a minute since the epoch, and not into a day.
var start = time.Unix(1_700_000_050, 0)

func newBench(t testing.TB, config string, change ...func(*ServiceConfig)) *bench {
	t.Helper()
	b := &bench{t: t, hits: make(map[string]uint64)}
	c := parse(t, config)
	set := must.Value(policy.Parse("p",
		[]byte("policies: [{name: shared, limits: [3/1m], algorithm: sliding_log, warn_at: 0.6}, {name: banning, limits: [2/1m], ban: 1h}]")))(t)
	l := limiter.New(limiter.Config{Policies: set, NoInline: true, Clock: func() algo.Instant {
		now := b.now()
		return algo.Instant{Mono: now.Sub(start).Nanoseconds(), Wall: now.UnixNano()}
	}})
	t.Cleanup(l.Close)
	cfg := ServiceConfig{
		Service: l, Config: func() *Config { return c }, Now: b.now,
		Count: func(name, result string, hits uint64) { b.hits[name+" "+result] += hits },
	}
	for _, f := range change {
		f(&cfg)
	}
	b.Service = NewService(cfg)
	return b
}

func (b *bench) now() time.Time { return start.Add(time.Duration(b.past.Load())) }

func (b *bench) ask(hits uint32, descriptors ...*common.RateLimitDescriptor) *ratelimitv3.RateLimitResponse {
	b.t.Helper()
	out := must.Value(b.ShouldRateLimit(context.Background(),
		&ratelimitv3.RateLimitRequest{Domain: "d", HitsAddend: hits, Descriptors: descriptors}))(b.t)
	must.True(b.t, len(out.Statuses) == len(descriptors),
		"%d statuses of %d descriptors", len(out.Statuses), len(descriptors))
	return out
}

func adding(d *common.RateLimitDescriptor, hits uint64, negative bool) *common.RateLimitDescriptor {
	d.HitsAddend, d.IsNegativeHits = wrapperspb.UInt64(hits), negative
	return d
}

func want(t testing.TB, what string, st *ratelimitv3.RateLimitResponse_DescriptorStatus,
	code ratelimitv3.RateLimitResponse_Code, remaining uint32) {
	t.Helper()
	expect.True(t, st.GetCode() == code && st.GetLimitRemaining() == remaining,
		"%s: %v, want %v with %d left", what, st, code, remaining)
}

const limits = `
domain: d
descriptors:
  - key: minute
    rate_limit: {name: per_minute, unit: minute, requests_per_unit: 10}
  - key: zero
    rate_limit: {unit: second, requests_per_unit: 0}
  - key: free
    rate_limit: {unlimited: true}
  - key: shadow
    shadow_mode: true
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: five
    rate_limit: {unit: minute, unit_multiplier: 5, requests_per_unit: 2}
  - key: week
    rate_limit: {unit: week, requests_per_unit: 1}
  - key: log
    rate_limit: {unit: minute, requests_per_unit: 2, algorithm: sliding_log}
  - key: bucket
    rate_limit: {unit: minute, requests_per_unit: 60, capacity: 5, algorithm: token_bucket}
  - key: debt
    rate_limit: {unit: minute, requests_per_unit: 10, carry_debt: true, max_debt: 25}
  - key: shared
    rate_limit: {policy: shared}
  - key: lost
    rate_limit: {policy: lost}
  - key: banning
    rate_limit: {policy: banning}
`

// TestHits. The reference: a descriptor's hits_addend is taken before the request's, in which 0 stands for 1; a
// descriptor's own 0 only looks. What is over the limit is added all the same.
func TestHits(t *testing.T) {
	b := newBench(t, limits)
	d := func() *common.RateLimitDescriptor { return entriesOf("minute", "u") }
	want(t, "0 of the request is 1", b.ask(0, d()).Statuses[0], ok, 9)
	want(t, "of the request", b.ask(3, d()).Statuses[0], ok, 6)
	want(t, "of the descriptor", b.ask(3, adding(d(), 5, false)).Statuses[0], ok, 1)
	want(t, "0 of the descriptor", b.ask(3, adding(d(), 0, false)).Statuses[0], ok, 1)
	want(t, "up to the limit", b.ask(1, d()).Statuses[0], ok, 0)
	// Over means more than the limit: at it, 0 hits pass.
	want(t, "0 hits at the limit", b.ask(1, adding(d(), 0, false)).Statuses[0], ok, 0)
	want(t, "over", b.ask(4, d()).Statuses[0], over, 0)
	want(t, "0 hits over the limit", b.ask(1, adding(d(), 0, false)).Statuses[0], over, 0)
	// 14 were added. Negative hits are always OK, and never bring the count below 0.
	want(t, "negative hits", b.ask(1, adding(d(), 3, true)).Statuses[0], ok, 0)
	want(t, "still over", b.ask(1, adding(d(), 0, false)).Statuses[0], over, 0)
	want(t, "negative hits", b.ask(1, adding(d(), 1, true)).Statuses[0], ok, 0)
	want(t, "at the limit", b.ask(1, adding(d(), 0, false)).Statuses[0], ok, 0)
	want(t, "more than there are", b.ask(1, adding(d(), 1000, true)).Statuses[0], ok, 10)
	// The excess is forgotten when the window turns.
	b.ask(1_000_000, d())
	b.past.Add(int64(50 * time.Second))
	want(t, "the next window", b.ask(1, d()).Statuses[0], ok, 9)
	want(t, "the most that a descriptor can say", b.ask(1, adding(d(), math.MaxUint64, false)).Statuses[0], over, 0)
	want(t, "the least", b.ask(1, adding(d(), math.MaxUint64, true)).Statuses[0], ok, 10)
}

// TestWindows. The reference: windows are aligned to the epoch, and duration_until_reset is what is left of them in
// whole seconds.
func TestWindows(t *testing.T) {
	b := newBench(t, limits)
	st := b.ask(1, entriesOf("minute", "u")).Statuses[0]
	expect.True(t, st.DurationUntilReset.GetSeconds() == 50 && st.DurationUntilReset.GetNanos() == 0,
		"%v", st.DurationUntilReset)
	l := st.CurrentLimit
	expect.True(t, l.Name == "per_minute" && l.RequestsPerUnit == 10 &&
		l.Unit == ratelimitv3.RateLimitResponse_RateLimit_MINUTE && l.UnitMultiplier == nil, "%v", l)
	five := b.ask(2, entriesOf("five", "u")).Statuses[0]
	left := 300 - start.Unix()%300
	expect.True(t, five.DurationUntilReset.GetSeconds() == left && five.CurrentLimit.UnitMultiplier.GetValue() == 5,
		"%v, want %d s", five, left)
	b.past.Store(int64(time.Unix(start.Unix()/300*300+299, 999_999_999).Sub(start)))
	want(t, "in the same five minutes", b.ask(1, entriesOf("five", "u")).Statuses[0], over, 0)
	b.past.Add(int64(time.Nanosecond))
	want(t, "in the next", b.ask(1, entriesOf("five", "u")).Statuses[0], ok, 1)
	// Weeks since the epoch begin on Thursdays.
	b.past.Store(int64(time.Date(2023, 11, 16, 0, 0, 0, 0, time.UTC).Sub(start)))
	week := b.ask(1, entriesOf("week", "u")).Statuses[0]
	want := int64(7 * 24 * 3600)
	expect.Equal(t, week.DurationUntilReset.GetSeconds(), want, "%v", week)
}

// TestUnmatched. The reference: a domain or descriptor that is not configured is OK, with no limit told.
func TestUnmatched(t *testing.T) {
	b := newBench(t, limits)
	out, err := b.ShouldRateLimit(t.Context(), &ratelimitv3.RateLimitRequest{Domain: "other",
		Descriptors: []*common.RateLimitDescriptor{entriesOf("minute", "u")}})
	expect.True(t, err == nil && out.OverallCode == ok && out.Statuses[0].Code == ok &&
		out.Statuses[0].CurrentLimit == nil, "%v, %v", out, err)
	st := b.ask(1, entriesOf("none", "u")).Statuses[0]
	want(t, "no match", st, ok, 0)
	expect.True(t, st.CurrentLimit == nil && st.DurationUntilReset == nil, "%v", st)
	// Unlimited: OK with MaxUint32 left, and no limit told.
	st = b.ask(1, entriesOf("free", "u")).Statuses[0]
	want(t, "unlimited", st, ok, math.MaxUint32)
	expect.True(t, st.CurrentLimit == nil, "%v", st)
}

// TestErrors. The reference: an empty domain and a request without descriptors are errors.
func TestErrors(t *testing.T) {
	b := newBench(t, limits)
	bad := entriesOf("minute", "u")
	bad.Limit = &common.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 1}
	many := make([]*common.RateLimitDescriptor, 1001)
	for _, test := range []struct {
		in   *ratelimitv3.RateLimitRequest
		code codes.Code
		text string
	}{
		{nil, codes.InvalidArgument, "rate limit domain must not be empty"},
		{&ratelimitv3.RateLimitRequest{Descriptors: many[:1]}, codes.InvalidArgument,
			"rate limit domain must not be empty"},
		{&ratelimitv3.RateLimitRequest{Domain: "d"}, codes.InvalidArgument,
			"rate limit descriptor list must not be empty"},
		{&ratelimitv3.RateLimitRequest{Domain: "d", Descriptors: many}, codes.ResourceExhausted,
			"descriptors: more than 1000"},
		{&ratelimitv3.RateLimitRequest{Domain: "d", Descriptors: []*common.RateLimitDescriptor{bad}},
			codes.InvalidArgument, "descriptors[0].limit.unit: is missing"},
		{&ratelimitv3.RateLimitRequest{Domain: "d", Descriptors: []*common.RateLimitDescriptor{entriesOf("lost", "u")}},
			codes.NotFound,
			"descriptors[0].policy: there is no policy named lost"},
		// The descriptor is named by its place in the request, of which the first has no limit.
		{&ratelimitv3.RateLimitRequest{Domain: "d", Descriptors: []*common.RateLimitDescriptor{entriesOf("free", "u"),
			entriesOf("minute", "u"), entriesOf("lost", "u")}},
			codes.NotFound, "descriptors[2].policy: there is no policy named lost"},
	} {
		out, err := b.ShouldRateLimit(t.Context(), test.in)
		expect.True(t, out == nil && status.Code(err) == test.code &&
			strings.Contains(status.Convert(err).Message(), test.text), "%v: %v, want %v with %q", out, err, test.code,
			test.text)
	}
	// A nil descriptor is one without entries.
	out := b.ask(1, nil)
	expect.Equal(t, out.OverallCode, ok, "%v", out)
}

// TestLongValues: a value that is longer than a key may be is limited like any other, and does not switch off the other
// limits.
func TestLongValues(t *testing.T) {
	b := newBench(t, limits)
	token := strings.Repeat("x", 2000)
	for range 10 {
		b.ask(1, entriesOf("minute", token))
	}
	want(t, "a long value over its limit", b.ask(1, entriesOf("minute", token)).Statuses[0], over, 0)
	want(t, "another long value", b.ask(1, entriesOf("minute", token+"y")).Statuses[0], ok, 9)
	b.ask(10, entriesOf("minute", "u"))
	out := b.ask(1, entriesOf("minute", "u"), entriesOf("minute", token+"z"))
	expect.Equal(t, out.OverallCode, over, "a long value beside a limit that is used up: %v", out)
}

// TestOverall. The reference: over any limit is over, and the statuses are in the order of the descriptors. Every
// descriptor is charged, also beside one that is over.
func TestOverall(t *testing.T) {
	b := newBench(t, limits)
	for i, code := range []ratelimitv3.RateLimitResponse_Code{ok, over} {
		out := b.ask(1, entriesOf("none", ""), entriesOf("week", "u"), entriesOf("minute", "u"))
		expect.True(t, out.OverallCode == code && out.Statuses[0].Code == ok && out.Statuses[1].Code == code, "%v", out)
		want(t, "beside", out.Statuses[2], ok, uint32(9-i))
	}
	// A limit of 0 admits nothing; that nothing was sent yet is within it.
	want(t, "0 hits of 0", b.ask(1, adding(entriesOf("zero", "u"), 0, false)).Statuses[0], ok, 0)
	want(t, "1 of 0", b.ask(1, entriesOf("zero", "u")).Statuses[0], over, 0)
	want(t, "0 hits of 0, after 1", b.ask(1, adding(entriesOf("zero", "u"), 0, false)).Statuses[0], over, 0)
	// shadow_mode: decided, charged and counted, and OK.
	b.ask(1, entriesOf("shadow", "u"))
	out := b.ask(1, entriesOf("shadow", "u"))
	expect.Equal(t, out.OverallCode, ok, "%v", out)
	for name, n := range map[string]uint64{
		"d.shadow within_limit": 1, "d.shadow shadow_mode": 1, "d.week within_limit": 1, "d.week over_limit": 1,
		"d.minute within_limit": 2, "d.zero over_limit": 1,
	} {
		expect.Equal(t, b.hits[name], n, "%s", name)
	}
	// The reference's SHADOW_MODE: the overall code is OK, the statuses stay.
	shadow := newBench(t, limits, func(c *ServiceConfig) { c.Shadow = true })
	out = shadow.ask(2, entriesOf("week", "u"))
	expect.True(t, out.OverallCode == ok && out.Statuses[0].Code == over, "%v", out)
}

// TestReplaces. The reference: a limit whose name another one of the request replaces is not looked at, and not
// charged.
func TestReplaces(t *testing.T) {
	b := newBench(t, `
domain: d
descriptors:
  - {key: a, rate_limit: {name: one, unit: minute, requests_per_unit: 1}}
  - {key: b, rate_limit: {replaces: [{name: one}], unit: minute, requests_per_unit: 5}}
`)
	for i := range 3 {
		out := b.ask(1, entriesOf("a", "u"), entriesOf("b", "u"))
		want(t, "the other", out.Statuses[1], ok, uint32(4-i))
		expect.True(t, out.OverallCode == ok && out.Statuses[0].CurrentLimit == nil, "%v", out)
	}
	want(t, "by itself", b.ask(1, entriesOf("a", "u")).Statuses[0], ok, 0)
}

// TestQuota. The reference: quotas are alternatives. Only when all of a request are used up is it over.
func TestQuota(t *testing.T) {
	b := newBench(t, `
domain: d
descriptors:
  - {key: a, quota_mode: true, metadata: {go: {to: a, 429: wait}, n: 1, 7: seven}, rate_limit: {unit: minute, requests_per_unit: 1}}
  - {key: b, quota_mode: true, metadata: {go: {or: b}, n: 2}, rate_limit: {unit: minute, requests_per_unit: 2}}
  - {key: c, rate_limit: {unit: minute, requests_per_unit: 4}}
`, func(c *ServiceConfig) { c.Metadata = true })
	metadata := func(out *ratelimitv3.RateLimitResponse) any {
		return out.DynamicMetadata.GetFields()["metadata"].AsInterface()
	}
	ab := func() *ratelimitv3.RateLimitResponse { return b.ask(1, entriesOf("a", "u"), entriesOf("b", "u")) }
	out := ab()
	m := metadata(out).(map[string]any)
	// Of limits that were not exceeded: structs become one, and of anything else the first stays.
	g := m["go"].(map[string]any)
	expect.True(t, out.OverallCode == ok && g["to"] == "a" && g["or"] == "b" && m["n"] == 1.0 && m["7"] == "seven" &&
		g["429"] == "wait", "%v", m)
	out = ab()
	g = metadata(out).(map[string]any)["go"].(map[string]any)
	expect.True(t, out.OverallCode == ok && out.Statuses[0].Code == over && g["to"] == nil && g["or"] == "b", "%v", out)
	out = ab()
	expect.True(t, out.OverallCode == over && metadata(out) == nil, "%v", out)
	out = b.ask(5, entriesOf("b", "v"), entriesOf("c", "u"))
	expect.Equal(t, out.OverallCode, over, "%v", out)
	f := out.DynamicMetadata.AsMap()
	expect.True(t, f["domain"] == "d" && f["hitsAddend"] == 5.0 &&
		f["descriptors"].([]any)[1].(map[string]any)["entries"].([]any)[0] == "c=u", "%v", f)
}

// TestHeaders. The reference: of the limit with the least left; of what is over, the last.
func TestHeaders(t *testing.T) {
	b := newBench(t, limits, func(c *ServiceConfig) { c.Headers = true })
	headers := func(out *ratelimitv3.RateLimitResponse) string {
		var s []string
		for _, h := range out.ResponseHeadersToAdd {
			s = append(s, h.Key+"="+h.Value)
		}
		return strings.Join(s, " ")
	}
	expect.Equal(t, headers(b.ask(1, entriesOf("minute", "u"), entriesOf("five", "u"))),
		"RateLimit-Limit=2 RateLimit-Remaining=1 RateLimit-Reset=50")
	expect.Equal(t, headers(b.ask(1, entriesOf("free", "u"), entriesOf("none", "u"))), "")
	expect.Equal(t, headers(b.ask(20, entriesOf("minute", "u"))),
		"RateLimit-Limit=10 RateLimit-Remaining=0 RateLimit-Reset=50")
}

// TestNearLimit: of a policy with warn_at, as a header and in the metadata.
func TestNearLimit(t *testing.T) {
	b := newBench(t, limits, func(c *ServiceConfig) { c.Headers, c.Metadata = true, true })
	for hits, want := range []bool{false, true} {
		out := b.ask(1, entriesOf("minute", "u"), entriesOf("shared", "u"))
		header := slices.ContainsFunc(out.ResponseHeadersToAdd,
			func(h *core.HeaderValue) bool { return h.Key == "Weir-Near-Limit" && h.Value == "true" })
		field := out.DynamicMetadata.GetFields()["near_limit"].GetBoolValue()
		expect.True(t, header == want && field == want, "hit %d: %v", hits+1, out)
	}
}

// TestBan: of a policy with ban, begun by the first answer of OVER_LIMIT, which is a refusal also where every hit is
// charged.
func TestBan(t *testing.T) {
	b := newBench(t, limits, func(c *ServiceConfig) { c.Headers, c.Metadata = true, true })
	for hit := range 4 {
		out := b.ask(1, entriesOf("banning", "u"))
		header := slices.ContainsFunc(out.ResponseHeadersToAdd,
			func(h *core.HeaderValue) bool { return h.Key == "Weir-Banned" && h.Value == "true" })
		banned := hit >= 2
		field := out.DynamicMetadata.GetFields()["banned"].GetBoolValue()
		expect.True(t, header == banned && field == banned && (out.OverallCode == over) == banned,
			"hit %d: %v", hit+1, out)
	}
	b.past.Store(int64(59 * time.Minute)) // the window has room for long
	want(t, "still banned", b.ask(1, entriesOf("banning", "u")).Statuses[0], over, 0)
	b.past.Store(int64(2 * time.Hour))
	want(t, "no more", b.ask(1, entriesOf("banning", "u")).Statuses[0], ok, 1)
}

// TestOverrideOfARequest: the request's own limit, of the same state where the window is the same.
func TestOverrideOfARequest(t *testing.T) {
	b := newBench(t, limits)
	b.ask(5, entriesOf("minute", "u"))
	d := entriesOf("minute", "u")
	d.Limit = &common.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: math.MaxUint32,
		Unit: typev3.RateLimitUnit_MINUTE}
	st := b.ask(1, d).Statuses[0]
	want(t, "override", st, ok, math.MaxUint32-6)
	expect.True(t, st.CurrentLimit.RequestsPerUnit == math.MaxUint32 && st.CurrentLimit.Name == "", "%v", st)
	d.Limit.Unit = typev3.RateLimitUnit_MONTH
	st = b.ask(1, d).Statuses[0]
	expect.Equal(t, st.CurrentLimit.Unit, ratelimitv3.RateLimitResponse_RateLimit_MONTH, "%v", st)
	none := &common.RateLimitDescriptor{Limit: &common.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 1,
		Unit: typev3.RateLimitUnit_DAY}}
	want(t, "without entries", b.ask(1, none).Statuses[0], ok, 0)
}

// TestExtensions: what a file may say that the reference does not know.
func TestExtensions(t *testing.T) {
	b := newBench(t, limits)
	b.past.Store(int64(49 * time.Second))
	b.ask(2, entriesOf("log", "u"))
	b.past.Store(int64(51 * time.Second)) // in the next minute
	want(t, "a log remembers", b.ask(1, entriesOf("log", "u")).Statuses[0], over, 0)
	want(t, "a bucket's burst", b.ask(5, entriesOf("bucket", "u")).Statuses[0], ok, 0)
	want(t, "and beyond", b.ask(2, entriesOf("bucket", "u")).Statuses[0], over, 0)
	b.past.Add(int64(2 * time.Second))
	want(t, "repays what it owes", b.ask(1, adding(entriesOf("bucket", "u"), 0, false)).Statuses[0], ok, 0)
	b.ask(1000, entriesOf("debt", "u")) // 35 of 10
	b.past.Add(int64(time.Minute))      // 25
	want(t, "debt", b.ask(1, adding(entriesOf("debt", "u"), 0, false)).Statuses[0], over, 0)
	b.past.Add(int64(2 * time.Minute)) // 5
	want(t, "debt paid", b.ask(1, adding(entriesOf("debt", "u"), 0, false)).Statuses[0], ok, 5)
	// A policy's state, whoever else asks.
	st := b.ask(2, entriesOf("shared", "u")).Statuses[0]
	want(t, "a policy", st, ok, 1)
	expect.True(t, st.CurrentLimit.RequestsPerUnit == 3 &&
		st.CurrentLimit.Unit == ratelimitv3.RateLimitResponse_RateLimit_MINUTE, "%v", st)
	want(t, "a policy", b.ask(2, entriesOf("shared", "u")).Statuses[0], over, 0)
}

// TestCharge: what a refused request uses up.
func TestCharge(t *testing.T) {
	const two = "descriptors: [{key: a, rate_limit: {unit: minute, requests_per_unit: 2}}, {key: b, rate_limit: {unit: minute, requests_per_unit: 9}}, {key: zero, rate_limit: {unit: minute, requests_per_unit: 0}}]\n"
	for _, test := range []struct {
		charge     string
		a, b       uint32 // left after 3 of both were asked for once
		afterwards ratelimitv3.RateLimitResponse_Code
	}{
		{"always", 0, 6, over}, // the reference: #1060, a refused descriptor uses up the others
		{"independent", 2, 6, ok},
		{"all_or_none", 2, 9, ok},
	} {
		t.Run(test.charge, func(t *testing.T) {
			b := newBench(t, "domain: d\ncharge: "+test.charge+"\n"+two)
			out := b.ask(3, entriesOf("a", "u"), entriesOf("b", "u"))
			expect.True(t, out.OverallCode == over && out.Statuses[0].Code == over && out.Statuses[1].Code == ok, "%v",
				out)
			look := b.ask(0, adding(entriesOf("a", "u"), 0, false), adding(entriesOf("b", "u"), 0, false))
			want(t, "a", look.Statuses[0], test.afterwards, test.a)
			want(t, "b", look.Statuses[1], ok, test.b)
			out = b.ask(1, entriesOf("zero", "u"), entriesOf("b", "v"))
			expect.Equal(t, out.OverallCode, over, "%v", out)
			want(t, "zero", out.Statuses[0], over, 0)
			left := out.Statuses[1].LimitRemaining
			expect.True(t, (test.charge != "all_or_none" || left == 9) && (test.charge == "all_or_none" || left == 8),
				"%d left beside a limit of 0", left)
			b.ask(2, entriesOf("a", "w"), entriesOf("b", "w"))
			want(t, "negative", b.ask(0, adding(entriesOf("a", "w"), 1, true)).Statuses[0], ok, 1)
		})
	}
}

// TestChargeOfModes: a limit in shadow_mode or quota_mode that is used up keeps no other limit from being charged, and
// one of 0 in shadow_mode refuses nothing.
func TestChargeOfModes(t *testing.T) {
	for _, charge := range chargeWords {
		b := newBench(t, "domain: d\ncharge: "+charge+`
descriptors:
  - {key: shadow, shadow_mode: true, rate_limit: {unit: minute, requests_per_unit: 0}}
  - {key: a, quota_mode: true, rate_limit: {unit: minute, requests_per_unit: 1}}
  - {key: b, quota_mode: true, rate_limit: {unit: minute, requests_per_unit: 3}}
  - {key: minute, rate_limit: {unit: minute, requests_per_unit: 3}}
`)
		for i := range 4 {
			code := []ratelimitv3.RateLimitResponse_Code{ok, ok, ok, over}[i]
			out := b.ask(1, entriesOf("shadow", "u"), entriesOf("minute", "u"))
			expect.Equal(t, out.OverallCode, code, "%s, request %d beside a shadow: %v", charge, i+1, out)
			out = b.ask(1, entriesOf("a", "u"), entriesOf("b", "u"))
			expect.Equal(t, out.OverallCode, code, "%s, request %d of two quotas: %v", charge, i+1, out)
		}
		expect.Equal(t, b.hits["d.shadow shadow_mode"], 4, "%s: %v", charge, b.hits)
	}
}

// TestJSON. The reference's /json: 200 within, 429 over, 400 for what cannot be read or is an error of the service.
func TestJSON(t *testing.T) {
	b := newBench(t, limits)
	for _, test := range []struct {
		body string
		code int
		want string
	}{
		{`{"domain":"d","descriptors":[{"entries":[{"key":"week","value":"u"}]}]}`, 200, "OK"},
		{`{"domain":"d","descriptors":[{"entries":[{"key":"week","value":"u"}]}]}`, 429, "OVER_LIMIT"},
		{`{"domain":"d","descriptors":[{"entries":[{"key":"minute","value":"u"}],"hits_addend":3}],"hitsAddend":2}`,
			200, "OK"},
		{`{"domain":"","descriptors":[{}]}`, 400, "rate limit domain must not be empty\n"},
		{`{"domain":"d"}`, 400, "rate limit descriptor list must not be empty\n"},
		{`{"domain":"d","descriptors":[{},{"limit":{"requestsPerUnit":1}}]}`, 400,
			"descriptors[1].limit.unit: is missing or unknown\n"},
		{``, 400, "the body is not a RateLimitRequest in JSON: syntax error (line 1:1): unexpected token\n"},
		{`[]`, 400, "the body is not a RateLimitRequest in JSON: syntax error (line 1:1): unexpected token [\n"},
		{`{"domain":7}`, 400, "the body is not a RateLimitRequest in JSON: (line 1:11): invalid value for string field domain: 7\n"},
		{`{"domain":"d","no":1}`, 400,
			"the body is not a RateLimitRequest in JSON: (line 1:15): unknown field \"no\"\n"},
		{`{"domain":"d` + "\xff" + `"}`, 400, "the body cannot be read as UTF-8\n"},
	} {
		code, contentType, answer := b.AnswerJSON(t.Context(), []byte(test.body), nil)
		body := string(answer)
		if code != test.code {
			t.Errorf("%.60s: %d %s", test.body, code, body)
			continue
		}
		if code != 200 && code != 429 {
			expect.Equal(t, body, test.want, "%.60s", test.body)
			continue
		}
		out := new(ratelimitv3.RateLimitResponse)
		err := protojson.Unmarshal([]byte(body), out)
		expect.True(t, err == nil && out.OverallCode.String() == test.want &&
			contentType == "application/json", "%s: %v", body, err)
	}
	for err, want := range map[error]int{new(http.MaxBytesError): http.StatusRequestEntityTooLarge,
		errors.New("gone"): http.StatusBadRequest} {
		code, _, _ := b.AnswerJSON(t.Context(), nil, err)
		expect.Equal(t, code, want, "%v", err)
	}
}

// TestHitsNames: values of requests cannot make ever more names.
func TestHitsNames(t *testing.T) {
	h, long := NewHits(), strings.Repeat("x", maxNameBytes+1)
	h.Count(long, WithinLimit, 1)
	for i := range maxNames + 5 {
		h.Count("d."+strings.Repeat("x", i%7)+"\n"+time.Duration(i).String(), WithinLimit, 1)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	series := testutil.CollectAndCount(h)
	expect.True(t, len(h.names) == maxNames && series == maxNames+1, "%d names, %d counters", len(h.names), series)
	_, kept := h.names[long]
	expect.True(t, !kept, "a name of %d bytes is kept", len(long))
}

// FuzzRequest answers any request in JSON, and never with what the caller wrote in an error or a header.
func FuzzRequest(f *testing.F) {
	f.Add(`{"domain":"d","descriptors":[{"entries":[{"key":"minute","value":"u\n"}],"hitsAddend":18446744073709551615,"isNegativeHits":true}],"hitsAddend":4294967295}`)
	f.Add(`{"domain":"d","descriptors":[{"limit":{"requestsPerUnit":4294967295,"unit":"YEAR"}},{"entries":[]},{"entries":[{}]}]}`)
	f.Add(`{"domain":"d","descriptors":[` + strings.Repeat(`{"entries":[{"key":"log"}]},`, 300) + `{}]}`)
	b := newBench(f, limits, func(c *ServiceConfig) { c.Headers, c.Metadata = true, true })
	f.Fuzz(func(t *testing.T, body string) {
		in := new(ratelimitv3.RateLimitRequest)
		if protojson.Unmarshal([]byte(body), in) != nil {
			return
		}
		out, err := b.ShouldRateLimit(t.Context(), in)
		if err != nil {
			m := status.Convert(err).Message()
			must.True(t, !strings.ContainsAny(m, "\n\r") && status.Code(err) != codes.Internal, "%v", err)
			return
		}
		must.True(t, len(out.Statuses) == len(in.Descriptors) && out.OverallCode != 0, "%v", out)
		for _, h := range out.ResponseHeadersToAdd {
			must.Equal(t, strings.Trim(h.Value, "0123456789"), "", "%v", h)
		}
	})
}

func BenchmarkShouldRateLimit(b *testing.B) {
	s := newBench(b, limits)
	s.cfg.Count = func(string, string, uint64) {}
	in := &ratelimitv3.RateLimitRequest{Domain: "d",
		Descriptors: []*common.RateLimitDescriptor{entriesOf("minute", "user-1234567")}}
	b.ReportAllocs()
	for b.Loop() {
		_, err := s.ShouldRateLimit(b.Context(), in)
		must.NoError(b, err)
	}
}

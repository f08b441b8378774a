package clustertest

import (
	"bytes"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestBadInput sends what is malformed, too large, unknown or contradictory to two nodes, so that half of what gets
// through is forwarded. Each must be refused with a status and a text that name the field, and charge nothing.
func TestBadInput(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 2, "--policies", writeFile(t, "policies.yaml", `
policies:
  - {name: five, algorithm: sliding_log, limit: 5, window: 1h}
  - {name: leases, algorithm: concurrency, limit: 5, ttl: 1m}
`))
	// untouched says that the keys which the bad requests name are as new.
	untouched := func(t *testing.T, what string) {
		t.Helper()
		for _, key := range []string{"alice", "bob"} {
			d := nodes[0].peek("five", key)
			expect.True(t, d.Remaining == 5, "%s: %s has %d of 5 left", what, key, d.Remaining)
		}
	}
	t.Run("http", func(t *testing.T) { testBadHTTP(t, nodes, untouched) })
	t.Run("grpc", func(t *testing.T) { testBadGRPC(t, nodes, untouched) })
	t.Run("still fine", func(t *testing.T) {
		for _, p := range nodes {
			d, err := p.check(`{"policy":"five","key":"alice"}`)
			expect.True(t, err == nil && d.Allowed, "%+v, %v", d, err)
		}
	})
}

func testBadHTTP(t *testing.T, nodes []*process, untouched func(*testing.T, string)) {
	const jsonType = "application/json"
	long := strings.Repeat("k", 1025)
	batch := func(n int) string {
		return `{"checks":[` + strings.TrimSuffix(strings.Repeat(`{"policy":"five","key":"alice"},`, n), ",") + `]}`
	}
	for _, c := range []struct {
		name, path, contentType, body string
		code                          int
		says                          string // somewhere in the problem document
	}{
		{"empty body", "/v1/check", jsonType, "", 400, "the body is empty"},
		{"half an object", "/v1/check", jsonType, `{"policy":"five","key":"alice"`, 400, "not valid JSON"},
		{"not JSON", "/v1/check", jsonType, `policy=five&key=alice`, 400, "not valid JSON"},
		{"an array", "/v1/check", jsonType, `[]`, 400, "the body must be an object"},
		{"more after it", "/v1/check", jsonType, `{"policy":"five","key":"alice"} {}`, 400, ""},
		{"unknown field", "/v1/check", jsonType, `{"policy":"five","key":"alice","colour":"red"}`, 400, "colour: "},
		{"field given twice", "/v1/check", jsonType, `{"policy":"five","key":"alice","key":"bob"}`, 400, "key: "},
		{"null", "/v1/check", jsonType, `{"policy":"five","key":"alice","cost":null}`, 400, "cost: "},
		{"wrong type", "/v1/check", jsonType, `{"policy":"five","key":7}`, 400, "key: must be a string"},
		{"text for a number", "/v1/check", jsonType, `{"policy":"five","key":"alice","cost":"1"}`, 400, "cost: "},
		{"fraction", "/v1/check", jsonType, `{"policy":"five","key":"alice","cost":1.5}`, 400, "cost: "},
		{"beyond 64 bits", "/v1/check", jsonType, `{"policy":"five","key":"alice","cost":99999999999999999999}`, 400, "cost: "},
		{"beyond 2^53", "/v1/check", jsonType, `{"policy":"five","key":"alice","cost":9007199254740993}`, 400, "cost: "},
		{"negative cost", "/v1/check", jsonType, `{"policy":"five","key":"alice","cost":-1}`, 400, "cost: "},
		{"invalid UTF-8", "/v1/check", jsonType, "{\"policy\":\"five\",\"key\":\"al\xffce\"}", 400, ""},
		{"empty key", "/v1/check", jsonType, `{"policy":"five","key":""}`, 400, "key: "},
		{"no key", "/v1/check", jsonType, `{"policy":"five"}`, 400, "key: "},
		{"oversize key", "/v1/check", jsonType, `{"policy":"five","key":"` + long + `"}`, 413, "key: "},
		{"oversize request id", "/v1/check", jsonType, `{"policy":"five","key":"alice","request_id":"` + long + `"}`, 413, "request_id: "},
		{"oversize body", "/v1/check", jsonType, `{"policy":"five","key":"alice","pad":"` + strings.Repeat("x", 5<<20) + `"}`, 413, ""},
		{"no policy", "/v1/check", jsonType, `{"key":"alice"}`, 400, "policy: "},
		{"unknown policy", "/v1/check", jsonType, `{"policy":"none","key":"alice"}`, 404, "policy: "},
		{"policy and limit", "/v1/check", jsonType, `{"policy":"five","limit":{"algorithm":"sliding_log","limit":5,"window":"1h"},"key":"alice"}`, 400, "limit: "},
		{"limit of zero", "/v1/check", jsonType, `{"limit":{"algorithm":"sliding_log","limit":0,"window":"1h"},"key":"alice"}`, 400, "limit.limit: "},
		{"window of zero", "/v1/check", jsonType, `{"limit":{"algorithm":"sliding_log","limit":5,"window":"0s"},"key":"alice"}`, 400, "limit.window: "},
		{"window of ages", "/v1/check", jsonType, `{"limit":{"algorithm":"sliding_log","limit":5,"window":"9999999d"},"key":"alice"}`, 400, "limit.window: "},
		{"unknown algorithm", "/v1/check", jsonType, `{"limit":{"algorithm":"guess","limit":5,"window":"1h"},"key":"alice"}`, 400, "limit.algorithm: "},
		{"a lease by check", "/v1/check", jsonType, `{"policy":"leases","key":"alice"}`, 400, "policy: "},
		{"wrong content type", "/v1/check", "text/plain", `{"policy":"five","key":"alice"}`, 415, ""},
		{"a form", "/v1/check", "application/x-www-form-urlencoded", `{"policy":"five","key":"alice"}`, 415, ""},
		{"wrong path", "/v1/chek", jsonType, `{"policy":"five","key":"alice"}`, 404, "/v1/chek"},
		{"empty batch", "/v1/checks", jsonType, `{"checks":[]}`, 400, "checks: "},
		{"oversize batch", "/v1/checks", jsonType, batch(1001), 413, "checks: "},
		{"one bad of many", "/v1/checks", jsonType, `{"checks":[{"policy":"five","key":"alice"},{"policy":"five","key":"bob","cost":-1}]}`, 400, "checks[1].cost: "},
		{"peek in an atomic batch", "/v1/checks", jsonType, `{"checks":[{"policy":"five","key":"alice","cost":0}],"atomic":true}`, 400, "checks[0].cost: "},
		{"refund of nothing", "/v1/refund", jsonType, `{"policy":"five","key":"alice","cost":0}`, 400, "cost: "},
		{"renewal without lease", "/v1/renew", jsonType, `{"policy":"leases","key":"alice"}`, 400, "lease_id: "},
		{"release of a counter", "/v1/release", jsonType, `{"policy":"five","key":"alice","lease_id":"1-2"}`, 400, ""},
	} {
		for _, p := range nodes {
			code, header, answer, err := p.post(c.path, c.contentType, []byte(c.body))
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
				continue
			}
			if code != c.code || !strings.Contains(string(answer), c.says) || header.Get("Content-Type") != "application/problem+json" {
				t.Errorf("%s: %d %s, want %d and %q: %.300s", c.name, code, header.Get("Content-Type"), c.code, c.says, answer)
			}
		}
		untouched(t, c.name)
	}
	for _, p := range nodes {
		code, _ := p.get("/v1/check")
		expect.True(t, code == http.StatusMethodNotAllowed, "GET of /v1/check: %d, want 405", code)
	}
}

// raw is a codec that sends bytes as they are, as if they were protobuf.
type raw struct{}

func (raw) Name() string                    { return "proto" }
func (raw) Marshal(v any) ([]byte, error)   { return v.([]byte), nil }
func (raw) Unmarshal(b []byte, v any) error { *v.(*[]byte) = b; return nil }

func testBadGRPC(t *testing.T, nodes []*process, untouched func(*testing.T, string)) {
	long := strings.Repeat("k", 1025)
	one := func(check *weirv1.Check) *weirv1.CheckRequest {
		return &weirv1.CheckRequest{Checks: []*weirv1.Check{check}}
	}
	five := func(key string) *weirv1.Target { return &weirv1.Target{Policy: "five", Key: key} }
	inline := func(l *weirv1.Limit) *weirv1.CheckRequest {
		return one(&weirv1.Check{Target: &weirv1.Target{Limit: l, Key: "alice"}})
	}
	const hour = 3600e9
	for _, c := range []struct {
		name string
		in   *weirv1.CheckRequest
		code codes.Code
		says string // at the beginning of the message
	}{
		{"no check", &weirv1.CheckRequest{}, codes.InvalidArgument, "checks"},
		{"no target", one(&weirv1.Check{}), codes.InvalidArgument, "target.key: "},
		{"empty key", one(&weirv1.Check{Target: five("")}), codes.InvalidArgument, "target.key: "},
		{"oversize key", one(&weirv1.Check{Target: five(long)}), codes.ResourceExhausted, "target.key: "},
		{"negative cost", one(&weirv1.Check{Target: five("alice"), Cost: proto.Int64(-1)}), codes.InvalidArgument, "cost"},
		{"beyond 2^53", one(&weirv1.Check{Target: five("alice"), Cost: proto.Int64(1<<53 + 1)}), codes.InvalidArgument, "cost"},
		{"oversize request id", one(&weirv1.Check{Target: five("alice"), RequestId: long}), codes.ResourceExhausted, "request_id"},
		{"no policy", one(&weirv1.Check{Target: &weirv1.Target{Key: "alice"}}), codes.InvalidArgument, "target.policy: "},
		{"unknown policy", one(&weirv1.Check{Target: &weirv1.Target{Policy: "none", Key: "alice"}}), codes.NotFound, "target.policy: "},
		{"a lease by check", one(&weirv1.Check{Target: &weirv1.Target{Policy: "leases", Key: "alice"}}), codes.InvalidArgument, "target.policy: "},
		{"no algorithm", inline(&weirv1.Limit{Limit: 5, WindowNs: hour}), codes.InvalidArgument, "target.limit.algorithm"},
		{"unknown algorithm", inline(&weirv1.Limit{Algorithm: 99, Limit: 5, WindowNs: hour}), codes.InvalidArgument, "target.limit.algorithm"},
		{"limit of zero", inline(&weirv1.Limit{Algorithm: 4, WindowNs: hour}), codes.InvalidArgument, "target.limit.limit"},
		{"negative window", inline(&weirv1.Limit{Algorithm: 4, Limit: 5, WindowNs: -1}), codes.InvalidArgument, "target.limit.window_ns"},
		{"one bad of many", &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: five("alice")}, {Target: five("bob"), Cost: proto.Int64(-1)}}},
			codes.InvalidArgument, "checks[1].cost"},
		{"oversize batch", &weirv1.CheckRequest{Checks: make([]*weirv1.Check, 1001)}, codes.ResourceExhausted, "checks"},
	} {
		for _, p := range nodes {
			_, err := p.dial().Check(t.Context(), c.in)
			if s := grpcstatus.Convert(err); s.Code() != c.code || !strings.HasPrefix(s.Message(), c.says) {
				t.Errorf("%s: %v %q, want %v and %q", c.name, s.Code(), s.Message(), c.code, c.says)
			}
		}
		untouched(t, c.name)
	}

	whole, err := proto.Marshal(one(&weirv1.Check{Target: five("alice")}))
	must.NoError(t, err)
	for _, c := range []struct {
		name string
		in   []byte
		code codes.Code
	}{
		{"cut short", whole[:len(whole)-1], codes.InvalidArgument},
		{"not protobuf", []byte("\xff\xff\xff\xff\xff"), codes.InvalidArgument},
		{"invalid UTF-8", bytes.ReplaceAll(whole, []byte("alice"), []byte("al\xffce")), codes.InvalidArgument},
		{"oversize message", make([]byte, 5<<20), codes.ResourceExhausted},
	} {
		for _, p := range nodes {
			var out []byte
			err := p.connect().Invoke(t.Context(), weirv1.Limiter_Check_FullMethodName, c.in, &out, grpc.ForceCodec(raw{}))
			expect.Equal(t, grpcstatus.Code(err), c.code, "%s: %v", c.name, err)
		}
		untouched(t, c.name)
	}
	err = nodes[0].connect().Invoke(t.Context(), "/weir.v1.Limiter/Chek", []byte(nil), new([]byte), grpc.ForceCodec(raw{}))
	expect.Equal(t, grpcstatus.Code(err), codes.Unimplemented, "unknown method: %v", err)
}

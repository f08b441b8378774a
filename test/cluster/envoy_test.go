package clustertest

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const envoyFile = `
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: year, requests_per_unit: 10}
  - key: exact
    rate_limit: {unit: year, requests_per_unit: 100}
  - key: log
    rate_limit: {policy: sliding_log}
`

// envoyDir is a directory with the file.
func envoyDir(t *testing.T) string { return filepath.Dir(writeFile(t, "edge.yaml", envoyFile)) }

// rateLimiter is the generated client of Envoy's rate limit service.
func rateLimiter(t *testing.T, address string) ratelimitv3.RateLimitServiceClient {
	conn := must.Value(grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	t.Cleanup(func() { conn.Close() })
	return ratelimitv3.NewRateLimitServiceClient(conn)
}

// descriptorsOf returns descriptors of one key, with hits, which may be negative.
func descriptorsOf(key string, hits int, values ...string) (list []*common.RateLimitDescriptor) {
	for _, value := range values {
		list = append(list, &common.RateLimitDescriptor{
			Entries:    []*common.RateLimitDescriptor_Entry{{Key: key, Value: value}},
			HitsAddend: wrapperspb.UInt64(uint64(max(hits, -hits))), IsNegativeHits: hits < 0,
		})
	}
	return list
}

// rateLimit adds hits, negative ones too, to descriptors of one key.
func rateLimit(ctx context.Context, c ratelimitv3.RateLimitServiceClient, key string, hits int, values ...string) (*ratelimitv3.RateLimitResponse, error) {
	in := &ratelimitv3.RateLimitRequest{Domain: "edge", Descriptors: descriptorsOf(key, hits, values...)}
	out, err := c.ShouldRateLimit(ctx, in, grpc.WaitForReady(true))
	if err == nil && len(out.Statuses) != len(values) {
		err = fmt.Errorf("%d statuses of %d descriptors", len(out.Statuses), len(values))
	}
	return out, err
}

// TestEnvoy: go-control-plane's generated client, through a node that owns nothing of what is asked.
func TestEnvoy(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3, "--envoy-config", envoyDir(t), "--policies", writeFile(t, "policies.yaml", exactPolicies), "--no-inline")
	entry := nodes[1]
	own, third := rateLimiter(t, entry.grpc), rateLimiter(t, nodes[2].grpc)
	keys := foreign(t, entry, func(key string) error {
		_, err := rateLimit(t.Context(), own, "user", 0, key)
		return err
	}, 4)
	want := func(c ratelimitv3.RateLimitServiceClient, key string, hits int, code ratelimitv3.RateLimitResponse_Code, left uint32) {
		t.Helper()
		out := must.Value(rateLimit(t.Context(), c, "user", hits, key))(t)
		st := out.Statuses[0]
		expect.True(t, out.OverallCode == code && st.Code == code && st.LimitRemaining == left &&
			st.CurrentLimit.GetRequestsPerUnit() == 10, "%s, %d hits: %v, not %v with %d left", key, hits, out, code,
			left)
	}
	const ok, over = ratelimitv3.RateLimitResponse_OK, ratelimitv3.RateLimitResponse_OVER_LIMIT
	for _, key := range keys {
		for i := range 10 {
			want(own, key, 1, ok, uint32(9-i))
		}
		// What is over the limit is added as well, and known through every node.
		want(own, key, 2, over, 0)
		want(third, key, 0, over, 0)
		want(third, key, -3, ok, 1)
		want(own, key, 0, ok, 1)
		code, _, text, err := nodes[0].post("/json", "application/json", []byte(`{"domain":"edge","descriptors":[{"entries":[{"key":"user","value":"`+key+`"}],"hitsAddend":2}]}`))
		expect.True(t, err == nil && code == http.StatusTooManyRequests && strings.Contains(string(text), "OVER_LIMIT"),
			"as JSON: %d %s, %v", code, text, err)
	}
	// A policy's state is that of its other callers.
	d := must.Value(nodes[0].check(`{"policy":"sliding_log","key":"log=shared","cost":99}`))(t)
	expect.True(t, d.Allowed, "%+v", d)
	out, err := rateLimit(t.Context(), own, "log", 1, "shared")
	expect.True(t, err == nil && out.OverallCode == ok && out.Statuses[0].LimitRemaining == 0,
		"the last of a policy: %v, %v", out, err)
	t.Run("exact", func(t *testing.T) {
		var askers []asker
		for _, p := range nodes {
			c := rateLimiter(t, p.grpc)
			askers = append(askers, func(ctx context.Context, key string) (bool, error) {
				out, err := rateLimit(ctx, c, "exact", 1, key)
				return out.GetOverallCode() == ok, err
			})
		}
		wantEach(t, ask(t, keysNamed("envoy", 3), 300, askers), 100)
	})
}

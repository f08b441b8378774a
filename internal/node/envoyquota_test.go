package node

import (
	"strings"
	"testing"

	quotav3 "github.com/envoyproxy/go-control-plane/envoy/service/rate_limit_quota/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

const quotaFile = `
domain: edge
quota_buckets:
- {bucket: {name: api, tenant: "*"}, policy: tenant, key: "{tenant}"}
`

func quotaStream(t *testing.T, n *Node) quotav3.RateLimitQuotaService_StreamRateLimitQuotasClient {
	t.Helper()
	return must.Value(quotav3.NewRateLimitQuotaServiceClient(dialed(t, n)).StreamRateLimitQuotas(t.Context()))(t)
}

// quotaOf reports a first request of a bucket, and returns the bucket that is assigned.
func quotaOf(t *testing.T, stream quotav3.RateLimitQuotaService_StreamRateLimitQuotasClient, tenant string) *typev3.TokenBucket {
	t.Helper()
	err := stream.Send(&quotav3.RateLimitQuotaUsageReports{Domain: "edge", BucketQuotaUsages: []*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{{
		BucketId: &quotav3.BucketId{Bucket: map[string]string{"name": "api", "tenant": tenant}}, NumRequestsDenied: 1,
	}}})
	must.NoError(t, err)
	in := must.Value(stream.Recv())(t)
	must.True(t, len(in.BucketAction) == 2 &&
		in.BucketAction[0].GetQuotaAssignmentAction().GetRateLimitStrategy().GetBlanketRule() == typev3.RateLimitStrategy_DENY_ALL, "%v", in)
	return in.BucketAction[1].GetQuotaAssignmentAction().GetRateLimitStrategy().GetTokenBucket()
}

// TestEnvoyQuotaCluster: data planes at nodes that do not own the key, and a caller at a third, divide one limit, and what one of them has
// stays held when its stream ends.
func TestEnvoyQuotaCluster(t *testing.T) {
	t.Parallel()
	policies := testkit.WriteFile(t, "policies.yaml", "policies:\n- {name: tenant, algorithm: sliding_log, limit: 300, window: 1h}\n")
	nodes := startCluster(t, "n0 n1 n2", func(_ int, cfg *Config) { cfg.Envoy.Dir, cfg.PolicyFile = envoyDir(t, quotaFile), policies })
	for _, tenant := range []string{"a", "b", "c", "d"} { // of which each node owns some, or none
		var lent int64
		for _, n := range nodes[:2] {
			stream := quotaStream(t, n)
			b := quotaOf(t, stream, tenant)
			must.True(t, b.GetMaxTokens() != 0 && b.GetTokensPerFill().GetValue() == 1 &&
				b.GetFillInterval().GetSeconds() >= 3600, "%v", b)
			lent += int64(b.GetMaxTokens())
			if n == nodes[0] {
				_ = stream.CloseSend()
				_, err := stream.Recv()
				must.True(t, err != nil, "the stream goes on")
			}
		}
		var direct int64
		for {
			got, err := nodes[2].limiter.Check(t.Context(), []limit.Check{{Target: limit.Target{Policy: "tenant", Key: tenant}, Cost: 1}})
			must.True(t, err == nil && got[0].Err == nil, "%v %v", err, got)
			if !got[0].Allowed {
				break
			}
			direct++
		}
		must.Equal(t, direct+lent, 300, "%s: %d were admitted beside %d that are lent", tenant, direct, lent)
	}
}

// TestEnvoyQuotaMisuse: what no data plane sends ends the stream, or is ignored.
func TestEnvoyQuotaMisuse(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "n0")
	cfg.Envoy.Dir = envoyDir(t, "domain: edge\n")
	n := mustStart(t, cfg)
	for name, messages := range map[string][]*quotav3.RateLimitQuotaUsageReports{
		"no domain":      {{}},
		"another domain": {{Domain: "edge"}, {Domain: "core"}},
	} {
		stream := quotaStream(t, n)
		for _, m := range messages {
			must.NoError(t, stream.Send(m))
		}
		_, err := stream.Recv()
		expect.Equal(t, status.Code(err), codes.InvalidArgument, "%s: %v", name, err)
	}
}

// TestEnvoyQuotaFile: a policy that cannot be divided is a mistake with a position.
func TestEnvoyQuotaFile(t *testing.T) {
	t.Parallel()
	policies := testkit.WriteFile(t, "policies.yaml", `
policies:
- {name: leaky, algorithm: leaky_bucket, limit: 10, window: 1s}
- {name: slots, algorithm: concurrency, limit: 10, ttl: 1m}
- {name: counted, limit: 10, window: 1s, algorithm: sliding_log, count_denied: true}
- {name: kept, algorithm: sliding_log, limit: 10, window: 1s, lend: false}
- {name: strict, algorithm: sliding_log, limit: 10, window: 1s, durability: sync, consistency: strict}
`)
	for name, want := range map[string]string{
		"leaky": "leaky_bucket cannot be divided", "slots": "concurrency cannot be divided", "counted": "count_denied", "kept": "lend: false", "strict": "it is strict", "none": "which there is not",
	} {
		cfg := testConfig(t, "n0")
		cfg.PolicyFile, cfg.Voters = policies, []string{"n0"}
		cfg.Envoy.Dir = envoyDir(t, "domain: edge\nquota_buckets:\n- {bucket: {t: \"*\"}, policy: "+name+", key: \"{t}\"}\n")
		n, err := Start(t.Context(), cfg)
		if err == nil {
			n.Stop()
			t.Fatalf("%s: started", name)
		}
		expect.True(t, strings.Contains(err.Error(), "edge.yaml:3:") && strings.Contains(err.Error(), want),
			"%s: %v", name, err)
	}
}

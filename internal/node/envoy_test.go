package node

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

const envoyFile = `
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: year, requests_per_unit: 10}
  - key: login
    rate_limit: {policy: login}
`

// envoyDir is a directory with one file.
func envoyDir(t *testing.T, text string) string {
	t.Helper()
	return filepath.Dir(testkit.WriteFile(t, "edge.yaml", text))
}

func envoyClient(t *testing.T, n *Node) ratelimitv3.RateLimitServiceClient {
	t.Helper()
	return ratelimitv3.NewRateLimitServiceClient(dialed(t, n))
}

// TestEnvoyHealth: callers of envoyproxy/ratelimit ask for the health of the service ratelimit.
func TestEnvoyHealth(t *testing.T) {
	t.Parallel()
	n := mustSettle(t, testConfig(t, "n"))
	health := healthv1.NewHealthClient(dialed(t, n))
	testkit.Eventually(t, "the service ratelimit serves", func() bool {
		got, err := health.Check(t.Context(), &healthv1.HealthCheckRequest{Service: "ratelimit"})
		return err == nil && got.Status == healthv1.HealthCheckResponse_SERVING
	})
}

func envoyRequest(key, value string) *ratelimitv3.RateLimitRequest {
	return &ratelimitv3.RateLimitRequest{Domain: "edge", Descriptors: []*common.RateLimitDescriptor{
		{Entries: []*common.RateLimitDescriptor_Entry{{Key: key, Value: value}}},
	}}
}

// TestEnvoyCluster: the metrics tell of hits, and of members with other files. What is answered is test/cluster's to try.
func TestEnvoyCluster(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, "n0 n1 n2", func(_ int, cfg *Config) {
		cfg.Envoy.Dir, cfg.NoInline = envoyDir(t, envoyFile), true // which is for callers' limits
	})
	entry := nodes[0]
	for range 12 { // of 10
		must.Value(envoyClient(t, entry).ShouldRateLimit(t.Context(), envoyRequest("user", "u")))(t)
	}
	_, page := get(t, entry, "/metrics")
	expect.True(t, strings.Contains(page, `weir_envoy_hits_total{descriptor="edge.user",result="over_limit"} 2`),
		"no hits over the limit in the metrics")

	// Each node sees which others have other files.
	mismatched := func(n *Node, others int) {
		t.Helper()
		testkit.Eventually(t, fmt.Sprintf("%d members with other files", others), func() bool {
			_, page := get(t, n, "/metrics")
			return strings.Contains(page, fmt.Sprintf("\nweir_envoy_mismatched_members %d\n", others))
		})
	}
	mismatched(entry, 0)
	file := filepath.Join(nodes[2].cfg.Envoy.Dir, "edge.yaml")
	must.NoError(t, os.WriteFile(file, []byte(strings.Replace(envoyFile, ": 10}", ": 20}", 1)), 0o600))
	mismatched(entry, 1)
	mismatched(nodes[2], 2)
	must.NoError(t, os.WriteFile(file, []byte(envoyFile), 0o600))
	mismatched(entry, 0)
}

// TestEnvoyReload: a bad file changes nothing, and is reported in the readiness detail, metric and log.
func TestEnvoyReload(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "node")
	cfg.Envoy.Dir = envoyDir(t, envoyFile)
	n := mustSettle(t, cfg)
	left := func(value string) uint32 {
		out := must.Value(envoyClient(t, n).ShouldRateLimit(t.Context(), envoyRequest("user", value)))(t)
		return out.Statuses[0].LimitRemaining
	}
	expect.Equal(t, left("a"), 9, "left")
	bad := filepath.Join(cfg.Envoy.Dir, "other.yaml")
	must.NoError(t, os.WriteFile(bad, []byte("domain: edge\n"), 0o600))
	testkit.Eventually(t, "the mistake", func() bool {
		ready, why := n.Ready()
		return ready && strings.Contains(why, "envoy configuration rejected: "+bad+":1:9: domain: is the domain of ")
	})
	_, page := get(t, n, "/metrics")
	expect.True(t, strings.Contains(page, "weir_envoy_configuration_valid 0"), "no mistake in the metrics")
	expect.Equal(t, left("b"), 9, "left")
	must.NoError(t, os.Remove(bad))
	testkit.Eventually(t, "no mistake", func() bool { _, why := n.Ready(); return why == "" })
	must.NoError(t, os.WriteFile(filepath.Join(cfg.Envoy.Dir, "edge.yaml"),
		[]byte(strings.Replace(envoyFile, ": 10}", ": 20}", 1)), 0o600))
	tries := 0
	testkit.Eventually(t, "the new limit", func() bool { tries++; return left(fmt.Sprint("c", tries)) == 19 })
	expect.Equal(t, left("a"), 18, "left") // live state falls under it, too

	cfg.Envoy.Dir = bad
	_, err := Start(t.Context(), cfg)
	expect.ErrorContains(t, err, "envoy-config: ")
}

// TestEnvoyAccess: the service is for callers with the role check and the namespace of the domain; who gives back needs refund.
func TestEnvoyAccess(t *testing.T) {
	n, shop, all, _ := withAccess(t, func(cfg *Config) { cfg.Envoy.Dir = envoyDir(t, envoyFile) })
	ask := func(token string, r *ratelimitv3.RateLimitRequest) codes.Code {
		_, err := envoyClient(t, n).ShouldRateLimit(bearer(t, token), r)
		return status.Code(err)
	}
	expect.Equal(t, ask("", envoyRequest("user", "a")), codes.Unauthenticated, "without a token")
	expect.Equal(t, ask(shop, envoyRequest("user", "a")), codes.PermissionDenied, "without the namespace")
	expect.Equal(t, ask(all, envoyRequest("user", "a")), codes.OK, "with all rights")
	resp, _ := send(t, n, http.MethodPost, "/json", shop, `{"domain":"edge","descriptors":[{"entries":[{"key":"user","value":"u"}]}]}`)
	expect.Equal(t, resp.StatusCode, http.StatusForbidden, "/json without the namespace")
}

package node

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	quotav3 "github.com/envoyproxy/go-control-plane/envoy/service/rate_limit_quota/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
	"github.com/weirlimit/weir/test/testkit/certstest"
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

// TestEnvoyCluster: the metrics tell of hits, and of members with other files. What is answered is test/cluster's to
// try.
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
func quotaOf(t *testing.T, stream quotav3.RateLimitQuotaService_StreamRateLimitQuotasClient,
	tenant string) *typev3.TokenBucket {
	t.Helper()
	must.NoError(t, stream.Send(&quotav3.RateLimitQuotaUsageReports{Domain: "edge",
		BucketQuotaUsages: []*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{{
			BucketId:          &quotav3.BucketId{Bucket: map[string]string{"name": "api", "tenant": tenant}},
			NumRequestsDenied: 1,
		}}}))
	in := must.Value(stream.Recv())(t)
	must.True(t, len(in.BucketAction) == 2 &&
		in.BucketAction[0].GetQuotaAssignmentAction().GetRateLimitStrategy().GetBlanketRule() == typev3.RateLimitStrategy_DENY_ALL, "%v", in)
	return in.BucketAction[1].GetQuotaAssignmentAction().GetRateLimitStrategy().GetTokenBucket()
}

// TestEnvoyQuotaCluster: data planes at nodes that do not own the key, and a caller at a third, divide one limit, and
// what one of them has stays held when its stream ends.
func TestEnvoyQuotaCluster(t *testing.T) {
	t.Parallel()
	policies := testkit.WriteFile(t, "policies.yaml",
		"policies:\n- {name: tenant, algorithm: sliding_log, limit: 300, window: 1h}\n")
	nodes := startCluster(t, "n0 n1 n2",
		func(_ int, cfg *Config) { cfg.Envoy.Dir, cfg.PolicyFile = envoyDir(t, quotaFile), policies })
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
			got, err := nodes[2].limiter.Check(t.Context(),
				[]limit.Check{{Target: limit.Target{Policy: "tenant", Key: tenant}, Cost: 1}})
			must.True(t, err == nil && got[0].Err == nil, "%v %v", err, got)
			if !got[0].Allowed {
				break
			}
			direct++
		}
		must.Equal(t, direct+lent, 300, "%s: %d were admitted beside %d that are lent", tenant, direct, lent)
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
		"leaky": "leaky_bucket cannot be divided", "slots": "concurrency cannot be divided", "counted": "count_denied",
		"kept": "lend: false", "strict": "it is strict", "none": "which there is not",
	} {
		cfg := testConfig(t, "n0")
		cfg.PolicyFile, cfg.Voters = policies, []string{"n0"}
		cfg.Envoy.Dir = envoyDir(t,
			"domain: edge\nquota_buckets:\n- {bucket: {t: \"*\"}, policy: "+name+", key: \"{t}\"}\n")
		n, err := Start(t.Context(), cfg)
		if err == nil {
			n.Stop()
			t.Fatalf("%s: started", name)
		}
		expect.True(t, strings.Contains(err.Error(), "edge.yaml:3:") && strings.Contains(err.Error(), want),
			"%s: %v", name, err)
	}
}

// TestOwnersAreForTopology: which node decides for a key is told to callers with the role topology, and without an
// access file to everybody. Others could pick keys by it that all lie on one node.
func TestOwnersAreForTopology(t *testing.T) {
	n, shop, all, _ := withAccess(t, nil)
	open := mustStart(t, testConfig(t, "open"))
	for _, c := range []struct {
		who, token string
		at         *Node
		want       bool
	}{{"role check", shop, n, false}, {"all roles", all, n, true}, {"without an access file", "", open, true}} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://node/v1/GetRateLimits", http.NoBody)
		must.NoError(t, err)
		r.RemoteAddr = "127.0.0.1:1"
		if c.token != "" {
			r.Header.Set("Authorization", "Bearer "+c.token)
		}
		ctx, denial := c.at.security.auth.HTTP(r, auth.RoleCheck)
		must.Equal(t, denial, nil, "%s", c.who)
		expect.Equal(t, c.at.owners(ctx) != nil, c.want, "%s: owners are told", c.who)
	}
	expect.True(t, n.owners(t.Context()) == nil, "owners are told to nobody")
}

// TestRESPSecured: over the Redis protocol a certificate or a token will do, as over the others; package
// resp has what is denied.
func TestRESPSecured(t *testing.T) {
	a := certstest.NewAuthority(t, "a")
	n, shop, _, _ := withAccess(t, func(cfg *Config) {
		cfg.Security.useTLS(filesOf(t, a, testLeaf))
		cfg.RESPPort = PortAny
	})
	want := " resp=" + addrOf(n.listeners.resp)
	expect.True(t, strings.HasSuffix(n.ReadyLine(), want), "the ready line is %q", n.ReadyLine())
	ask := func(in string, pairs ...tls.Certificate) (string, error) {
		conn, err := tls.Dial("tcp", addrOf(n.listeners.resp), &tls.Config{RootCAs: a.Pool(), Certificates: pairs})
		if err != nil {
			return "", err
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, in+"QUIT\n"); err != nil {
			return "", err
		}
		out, err := io.ReadAll(conn)
		return string(out), err
	}
	const check = "WEIR.PEEK login a\n"
	for _, c := range []struct {
		name, in, want string
		pairs          []tls.Certificate
	}{
		{"a token", "AUTH " + shop + "\n" + check, "+OK\r\n*", nil},
		{"a certificate", check, "*", []tls.Certificate{a.Pair(certstest.Leaf{DNS: []string{"shop.test"}})}},
		{"a certificate of nobody", check, "-NOAUTH ",
			[]tls.Certificate{a.Pair(certstest.Leaf{DNS: []string{"x.test"}})}},
	} {
		got, err := ask(c.in, c.pairs...)
		expect.True(t, err == nil && strings.HasPrefix(got, c.want), "%s: %q, %v", c.name, got, err)
	}
	got, err := ask(check, a.Pair(certstest.Leaf{DNS: []string{"shop.test"}, Expired: true}))
	expect.True(t, err != nil, "with an expired certificate: %q", got)
	plain := must.Value(net.Dial("tcp", addrOf(n.listeners.resp)))(t)
	defer plain.Close()
	_, _ = io.WriteString(plain, check) // the read tells
	out, _ := io.ReadAll(plain)
	expect.True(t, !strings.Contains(string(out), "allowed"), "in plain text: %q", out)
	for _, reason := range []string{"unknown_identity", "certificate_expired", "plain_text_on_tls_port"} {
		refusedAt(t, n, "resp", reason)
	}
}

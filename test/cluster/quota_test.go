package clustertest

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	quotav3 "github.com/envoyproxy/go-control-plane/envoy/service/rate_limit_quota/v3"

	"github.com/weirlimit/weir/client"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// TestRetryAfterIsEstimated: a data plane has a part of a limit, and cannot be asked for it. Whoever is refused for
// want of that is told so in every format that has a place for it, by the node that decides and by others; not so who
// is refused a key of which nothing is on loan.
func TestRetryAfterIsEstimated(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 2, "--policies",
		testkit.WriteFile(t, "policies.yaml", "policies: [{name: p, algorithm: sliding_log, limit: 100, window: 1h}]"),
		"--envoy-config", filepath.Dir(testkit.WriteFile(t, "edge.yaml", `domain: edge
quota_buckets: [{bucket: {policy: p, key: "*"}, policy: p, key: "{key}", share: 90}]
`)))
	stream, err := quotav3.NewRateLimitQuotaServiceClient(nodes[0].connect()).StreamRateLimitQuotas(t.Context())
	must.NoError(t, err)
	must.NoError(t, stream.Send(&quotav3.RateLimitQuotaUsageReports{Domain: "edge",
		BucketQuotaUsages: []*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{
			{BucketId: &quotav3.BucketId{Bucket: map[string]string{"policy": "p", "key": "lent"}},
				NumRequestsDenied: 50},
		}}))
	out, err := stream.Recv()
	must.True(t, err == nil && len(out.GetBucketAction()) != 0, "%v %v", out, err)
	type answer struct {
		allowed, estimated bool
		after              time.Duration
	}
	type check struct {
		name string
		ask  func(key string) (answer, error)
	}
	var checks []check
	add := func(name string, ask func(key string) (answer, error)) { checks = append(checks, check{name, ask}) }
	for _, p := range nodes {
		c := must.Value(client.Dial(t.Context(), p.grpc, client.WithoutLoans(), client.WithoutMemory(),
			client.WithTimeout(startTimeout)))(t)
		t.Cleanup(func() { _ = c.Close() })
		of := func(d client.Decision) answer { return answer{d.Allowed, d.RetryAfterEstimated, d.RetryAfter} }
		add(p.name+", HTTP", func(key string) (answer, error) {
			var d struct {
				Allowed   bool  `json:"allowed"`
				Estimated bool  `json:"retry_after_estimated"`
				AfterMS   int64 `json:"retry_after_ms"`
			}
			_, _, text, err := p.post("/v1/check", "application/json", fmt.Appendf(nil, `{"policy":"p","key":%q}`, key))
			if err == nil {
				err = json.Unmarshal(text, &d)
			}
			return answer{d.Allowed, d.Estimated, time.Duration(d.AfterMS) * time.Millisecond}, err
		})
		unary := p.dial()
		add(p.name+", gRPC", func(key string) (answer, error) {
			out, err := unary.Check(t.Context(),
				&weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "p", Key: key}}}})
			if err != nil {
				return answer{}, err
			}
			d := out.Results[0].GetDecision()
			return answer{d.GetAllowed(), d.GetRetryAfterEstimated(), time.Duration(d.GetRetryAfterNs())}, nil
		})
		add(p.name+", Go client", func(key string) (answer, error) { // by CheckStream
			d, err := c.Policy("p").Allow(t.Context(), key)
			return of(d), err
		})
		add(p.name+", Go client, batch", func(key string) (answer, error) {
			got, err := c.Check(t.Context(), []client.Check{{Policy: "p", Key: key}, {Policy: "p", Key: "other"}})
			if err != nil {
				return answer{}, err
			}
			return of(got[0].Decision), got[0].Err
		})
		add(p.name+", Go client, all or none", func(key string) (answer, error) {
			got, err := c.All(t.Context(), []client.Check{{Policy: "p", Key: key}, {Policy: "p", Key: "other"}})
			if err != nil {
				return answer{}, err
			}
			return of(got.Decisions[0]), nil
		})
		add(p.name+", Go client, reserve", func(key string) (answer, error) {
			_, d, err := c.Policy("p").Reserve(t.Context(), key)
			return of(d), err
		})
		add(p.name+", weir check", func(key string) (answer, error) {
			code, out, errs := weir(t, "check", key, "--policy", "p", "--addr", p.grpc, "--timeout", "20s", "-o",
				"json")
			var d struct {
				Estimated bool  `json:"retry_after_estimated"`
				AfterMS   int64 `json:"retry_after_ms"`
			}
			if err := json.Unmarshal([]byte(out), &d); err != nil {
				return answer{}, fmt.Errorf("%w: %s%s", err, out, errs)
			}
			return answer{code == 0, d.Estimated, time.Duration(d.AfterMS) * time.Millisecond}, nil
		})
	}
	for _, key := range []string{"lent", "used"} {
		d := must.Value(nodes[0].check(fmt.Sprintf(`{"policy":"p","key":%q,"cost":100,"partial":true}`, key)))(t)
		must.True(t, d.Allowed && d.Granted == 100 == (key == "used"), "%s: %+v", key, d)
		for _, c := range checks {
			got, err := c.ask(key)
			switch {
			case err != nil:
				t.Errorf("%s: %s: %v", key, c.name, err)
			case key == "lent" && (got.allowed || !got.estimated || got.after <= 0 || got.after > 30*time.Second):
				t.Errorf("%s: %+v, want an estimate of at most the time until the loan has ended", c.name, got)
			case key == "used" && (got.allowed || got.estimated || got.after < 30*time.Minute):
				t.Errorf("%s: %+v, want the time until the first units come back", c.name, got)
			}
		}
	}
}

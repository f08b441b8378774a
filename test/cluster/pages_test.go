package clustertest

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// metricsPage is a page of metrics as Prometheus reads it.
type metricsPage map[string]*dto.MetricFamily

func (p *process) metrics() metricsPage {
	p.t.Helper()
	code, text := p.get("/metrics")
	must.True(p.t, code == http.StatusOK, "/metrics: %d %s", code, text)
	parser := expfmt.NewTextParser(model.UTF8Validation)
	page, err := parser.TextToMetricFamilies(strings.NewReader(text))
	must.True(p.t, err == nil, "/metrics: %v\n%s", err, text)
	return page
}

// value is the sum of the series of a metric that have the given labels, written as name, value, name, value.
func (m metricsPage) value(name string, labels ...string) float64 {
	sum := 0.0
	for _, s := range m[name].GetMetric() {
		all := true
		for pair := range slices.Chunk(labels, 2) {
			all = all && slices.ContainsFunc(s.Label,
				func(l *dto.LabelPair) bool { return l.GetName() == pair[0] && l.GetValue() == pair[1] })
		}
		if all {
			sum += s.GetCounter().GetValue() + s.GetGauge().GetValue() + float64(s.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

// TestPages reads what operators and their tools read.
func TestPages(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3, "--policies", testkit.WriteFile(t, "policies.yaml", exactPolicies))
	// Every key up to its limit and 20 beyond, through every node; and something unknown.
	const keys = 10
	for i := range 120 {
		for k := range keys {
			_, err := nodes[(i+k)%3].check(fmt.Sprintf(`{"policy":"sliding_log","key":"key-%d"}`, k))
			must.NoError(t, err)
		}
	}
	for _, p := range nodes {
		code, _, answer, err := p.post("/v1/check", "application/json", []byte(`{"policy":"none","key":"alice"}`))
		expect.True(t, err == nil && code == http.StatusNotFound, "unknown policy: %d, %v: %s", code, err, answer)
	}
	t.Run("metrics", func(t *testing.T) {
		// Of each key there is a copy on another node, or will be in a moment.
		eventually(t, waitTimeout, "every key has a copy", func() bool {
			stored := 0
			for _, m := range nodes[0].status().Members {
				stored += m.Keys
			}
			return stored == 2*keys
		})
		total := map[string]float64{}
		for _, p := range nodes {
			page := p.metrics()
			for _, result := range []string{"allowed", "refused", "failed_open", "failed_closed"} {
				total[result] += page.value("weir_requests_total", "policy", "sliding_log", "result", result)
			}
			total["unknown"] += page.value("weir_requests_total", "policy", "(unknown)", "result", "error")
			total["owned"] += page.value("weir_partitions_owned")
			total["keys"] += page.value("weir_keys")
			total["fullest"] = max(total["fullest"], page.value("weir_window_utilization", "policy", "sliding_log"))
			total["most"] = max(total["most"], page.value("weir_current_window_count", "policy", "sliding_log"))
			total["bytes"] += page.value("weir_state_bytes")
			total["hops"] += page.value("weir_hop_duration_seconds", "answered", "true")
			expect.Equal(t, page.value("weir_members", "state", "active"), 3, "%s: weir_members{state=active}", p.name)
			expect.Equal(t, page.value("weir_policies"), 4, "%s: weir_policies", p.name)
			expect.True(t, page.value("weir_ready") == 1 && page.value("weir_policies_mismatched_members") == 0,
				"%s: weir_ready or weir_policies_mismatched_members is wrong", p.name)
		}
		for name, want := range map[string]float64{
			"allowed": keys * 100, "refused": keys * 20, "failed_open": 0, "failed_closed": 0, "unknown": 3,
			"owned": 4093, "keys": 2 * keys, "fullest": 1, "most": 100,
		} {
			expect.True(t, total[name] == want, "%s: %v over all nodes, want %v", name, total[name], want)
		}
		expect.True(t, total["hops"] != 0 && total["bytes"] != 0,
			"weir_hop_duration_seconds counts %v hops, weir_state_bytes is %v", total["hops"], total["bytes"])
	})
	t.Run("grpc reflection", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
		defer cancel()
		stream := must.Value(reflectionv1.NewServerReflectionClient(nodes[0].connect()).ServerReflectionInfo(ctx))(t)
		ask := &reflectionv1.ServerReflectionRequest_ListServices{}
		must.NoError(t, stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: ask}))
		r := must.Value(stream.Recv())(t)
		var services []string
		for _, s := range r.GetListServicesResponse().GetService() {
			services = append(services, s.GetName())
		}
		expect.True(t, slices.Contains(services, "weir.v1.Limiter") &&
			slices.Contains(services, "grpc.health.v1.Health"), "services: %v", services)
		expect.True(t,
			!slices.ContainsFunc(services, func(s string) bool { return strings.HasPrefix(s, "weir.peer.") }),
			"the protocol between nodes is on the callers' port: %v", services)
	})
}

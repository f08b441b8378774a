package envoyquota

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Metrics count what a Service does, for Prometheus. NewMetrics makes them.
type Metrics struct {
	prometheus.Collector
	streams, buckets                                         prometheus.Gauge
	allowed, denied, unassigned, unmatched, rejected, errors prometheus.Counter
	actions                                                  [abandon + 1]prometheus.Counter
}

// NewMetrics returns Metrics at zero.
func NewMetrics() *Metrics {
	registry := prometheus.NewRegistry()
	auto := promauto.With(registry)
	gauge := func(name, help string) prometheus.Gauge {
		return auto.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	by := func(label, name, help string) *prometheus.CounterVec {
		return auto.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	}
	requests := by("result", "weir_envoy_quota_requests_total",
		"Requests that data planes have reported, by result: allowed, denied; and unassigned, of those allowed, without an assignment.")
	ignored := by("reason", "weir_envoy_quota_ignored_reports_total",
		"Reports of buckets that were not answered, by reason: unmatched, no file describes them; rejected, there are too many buckets.")
	m := &Metrics{
		Collector: registry,
		streams: gauge("weir_envoy_quota_streams",
			"Data planes with a stream of Envoy's rate limit quota service to this node."),
		buckets: gauge("weir_envoy_quota_buckets", "Quota buckets of these data planes."),
		allowed: requests.WithLabelValues("allowed"), denied: requests.WithLabelValues("denied"),
		unassigned: requests.WithLabelValues("unassigned"),
		unmatched:  ignored.WithLabelValues("unmatched"), rejected: ignored.WithLabelValues("rejected"),
		errors: auto.NewCounter(prometheus.CounterOpts{
			Name: "weir_envoy_quota_errors_total",
			Help: "Times that the owner of a bucket's key could not be asked, or denied what was asked.",
		}),
	}
	actions := by("action", "weir_envoy_quota_actions_total",
		"What data planes were told of buckets, by action: assign, deny_all, allow_all, abandon.")
	for v, name := range map[verdict]string{denyAll: "deny_all", allowAll: "allow_all", assign: "assign",
		abandon: "abandon"} {
		m.actions[v] = actions.WithLabelValues(name)
	}
	return m
}

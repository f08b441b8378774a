package envoyquota

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// counts are what a Service has done.
type counts struct {
	streams, buckets                                         atomic.Int64
	allowed, denied, unassigned, unmatched, rejected, errors atomic.Uint64
	actions                                                  [abandon + 1]atomic.Uint64
}

var verdicts = map[verdict]string{denyAll: "deny_all", allowAll: "allow_all", assign: "assign", abandon: "abandon"}

var (
	streamsDesc  = prometheus.NewDesc("weir_envoy_quota_streams", "Data planes with a stream of Envoy's rate limit quota service to this node.", nil, nil)
	bucketsDesc  = prometheus.NewDesc("weir_envoy_quota_buckets", "Quota buckets of these data planes.", nil, nil)
	requestsDesc = prometheus.NewDesc("weir_envoy_quota_requests_total", "Requests that data planes have reported, by result: allowed, denied; and unassigned, of those allowed, without an assignment.", []string{"result"}, nil)
	actionsDesc  = prometheus.NewDesc("weir_envoy_quota_actions_total", "What data planes were told of buckets, by action: assign, deny_all, allow_all, abandon.", []string{"action"}, nil)
	ignoredDesc  = prometheus.NewDesc("weir_envoy_quota_ignored_reports_total", "Reports of buckets that were not answered, by reason: unmatched, no file describes them; rejected, there are too many buckets.", []string{"reason"}, nil)
	errorsDesc   = prometheus.NewDesc("weir_envoy_quota_errors_total", "Times that the owner of a bucket's key could not be asked, or denied what was asked.", nil, nil)
)

// Describe tells which metrics Service.Collect has.
func Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{streamsDesc, bucketsDesc, requestsDesc, actionsDesc, ignoredDesc, errorsDesc} {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (s *Service) Collect(to chan<- prometheus.Metric) {
	c := &s.count
	total := func(d *prometheus.Desc, n uint64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	to <- prometheus.MustNewConstMetric(streamsDesc, prometheus.GaugeValue, float64(c.streams.Load()))
	to <- prometheus.MustNewConstMetric(bucketsDesc, prometheus.GaugeValue, float64(c.buckets.Load()))
	total(requestsDesc, c.allowed.Load(), "allowed")
	total(requestsDesc, c.denied.Load(), "denied")
	total(requestsDesc, c.unassigned.Load(), "unassigned")
	for v, name := range verdicts {
		total(actionsDesc, c.actions[v].Load(), name)
	}
	total(ignoredDesc, c.unmatched.Load(), "unmatched")
	total(ignoredDesc, c.rejected.Load(), "rejected")
	total(errorsDesc, c.errors.Load())
}

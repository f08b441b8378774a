package observe

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Security counts who was denied or rejected and which files were taken, and shows when certificates expire. It is a collector, for
// MetricsConfig.Collectors, and safe for concurrent use.
type Security struct {
	denied   *prometheus.CounterVec
	reloads  *prometheus.CounterVec
	panics   *prometheus.CounterVec
	expiries func() map[string]time.Time
}

var certificateExpiry = prometheus.NewDesc("weir_certificate_expiry_timestamp_seconds",
	"When the first of the certificates that this node presents expires, in seconds since 1970, by use (callers, peers).", []string{"use"}, nil)

// NewSecurity returns a Security. expiries tells when the certificates in force expire, by their use; it is asked at each
// scrape.
func NewSecurity(expiries func() map[string]time.Time) *Security {
	s := &Security{
		denied: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_access_denied_total", Help: "Connections and requests denied or rejected, by listener (http, grpc, resp, peer, gossip) and reason.",
		}, []string{"listener", "reason"}),
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_security_reloads_total",
			Help: "Changes of the files that access depends on, by file (certificates, peer_certificates, access, gossip_keys) and result (taken, rejected).",
		}, []string{"file", "result"}),
		panics: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_panics_total", Help: "Panics of handlers, each of which ended its own request only, by listener (http, grpc, resp, peer), and of work behind answers (background).",
		}, []string{"listener"}),
		expiries: expiries,
	}
	for _, listener := range []string{"http", "grpc", "resp", "peer", "background"} {
		s.panics.WithLabelValues(listener) // shown from the start, as zero
	}
	return s
}

// Panicked counts a panic of a handler, or of work behind an answer.
func (s *Security) Panicked(listener string) { s.panics.WithLabelValues(listener).Inc() }

// Denied counts a connection or a request that was denied or rejected.
func (s *Security) Denied(listener, reason string) { s.denied.WithLabelValues(listener, reason).Inc() }

// Reloaded notes that files changed, and whether they were taken.
func (s *Security) Reloaded(file string, taken bool) {
	result := "rejected"
	if taken {
		result = "taken"
	}
	s.reloads.WithLabelValues(file, result).Inc()
}

// Watching has the counters of a file shown from the start, as zeros.
func (s *Security) Watching(file string) {
	s.reloads.WithLabelValues(file, "taken")
	s.reloads.WithLabelValues(file, "rejected")
}

// Describe implements prometheus.Collector.
func (s *Security) Describe(ch chan<- *prometheus.Desc) {
	s.denied.Describe(ch)
	s.reloads.Describe(ch)
	s.panics.Describe(ch)
	ch <- certificateExpiry
}

// Collect implements prometheus.Collector.
func (s *Security) Collect(ch chan<- prometheus.Metric) {
	s.denied.Collect(ch)
	s.reloads.Collect(ch)
	s.panics.Collect(ch)
	for use, at := range s.expiries() {
		ch <- prometheus.MustNewConstMetric(certificateExpiry, prometheus.GaugeValue, float64(at.Unix()), use)
	}
}

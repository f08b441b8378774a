package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Security counts who was refused and which files were taken, and shows when certificates expire. It is a collector, for
// Config.Collectors, and safe for concurrent use.
type Security struct {
	refused  *prometheus.CounterVec
	reloads  *prometheus.CounterVec
	expiries func() map[string]time.Time
}

var certificateExpiry = prometheus.NewDesc("weir_certificate_expiry_timestamp_seconds",
	"When the first of the certificates that this node presents expires, in seconds since 1970, by use (callers, peers).", []string{"use"}, nil)

// NewSecurity returns a Security. expiries tells when the certificates in force expire, by their use; it is asked at each
// scrape.
func NewSecurity(expiries func() map[string]time.Time) *Security {
	return &Security{
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_access_refused_total", Help: "Connections and requests refused, by door (http, grpc, peer, gossip) and reason.",
		}, []string{"door", "reason"}),
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_security_reloads_total",
			Help: "Changes of the files that access depends on, by file (certificates, peer_certificates, access, gossip_keys) and result (taken, refused).",
		}, []string{"file", "result"}),
		expiries: expiries,
	}
}

// Refused counts a connection or a request that was refused.
func (s *Security) Refused(door, reason string) { s.refused.WithLabelValues(door, reason).Inc() }

// Reloaded notes that files changed, and whether they were taken.
func (s *Security) Reloaded(file string, taken bool) {
	result := "refused"
	if taken {
		result = "taken"
	}
	s.reloads.WithLabelValues(file, result).Inc()
}

// Watching has the counters of a file shown from the start, as zeros.
func (s *Security) Watching(file string) {
	s.reloads.WithLabelValues(file, "taken")
	s.reloads.WithLabelValues(file, "refused")
}

// Describe implements prometheus.Collector.
func (s *Security) Describe(ch chan<- *prometheus.Desc) {
	s.refused.Describe(ch)
	s.reloads.Describe(ch)
	ch <- certificateExpiry
}

// Collect implements prometheus.Collector.
func (s *Security) Collect(ch chan<- prometheus.Metric) {
	s.refused.Collect(ch)
	s.reloads.Collect(ch)
	for use, at := range s.expiries() {
		ch <- prometheus.MustNewConstMetric(certificateExpiry, prometheus.GaugeValue, float64(at.Unix()), use)
	}
}

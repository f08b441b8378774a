package observe

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Security counts denied and rejected connections and requests, and reloads of security files, and shows when
// certificates expire. It is a collector for MetricsConfig.Collectors, and is safe for concurrent use.
type Security struct {
	prometheus.Collector
	denied, reloads, panics *prometheus.CounterVec
}

// NewSecurity returns a Security. Each scrape calls expiries, which returns when the certificates in force expire, by
// use.
func NewSecurity(expiries func() map[string]time.Time) *Security {
	registry := prometheus.NewRegistry()
	s := &Security{
		Collector: registry,
		denied: counted(registry, "weir_access_denied_total", "Connections and requests denied.", "listener",
			"reason"),
		reloads: counted(registry, "weir_security_reloads_total", "Changes of files that access depends on.", "file",
			"result"),
		panics: counted(registry, "weir_panics_total", "Panics of handlers and of work behind answers.", "listener"),
	}
	registry.MustRegister(Reading(func(to Lines) {
		expiry := to.Gauges("weir_certificate_expiry_timestamp_seconds", "When the first of them expires.", "use")
		for use, at := range expiries() {
			expiry(float64(at.Unix()), use)
		}
	}))
	for _, listener := range []string{"http", "grpc", "resp", "peer", "background"} {
		s.panics.WithLabelValues(listener) // shown from the start, as zero
	}
	return s
}

// Panicked counts a panic of a handler, or of work behind an answer.
func (s *Security) Panicked(listener string) { s.panics.WithLabelValues(listener).Inc() }

// Denied counts a connection or a request that was denied or rejected.
func (s *Security) Denied(listener, reason string) { s.denied.WithLabelValues(listener, reason).Inc() }

// Reloaded counts a change of files; taken: they are in force.
func (s *Security) Reloaded(file string, taken bool) {
	s.reloads.WithLabelValues(file, resultOf(taken)).Inc()
}

// Watching has the counters of a file shown as 0 from the start.
func (s *Security) Watching(file string) {
	s.reloads.WithLabelValues(file, "taken")
	s.reloads.WithLabelValues(file, "rejected")
}

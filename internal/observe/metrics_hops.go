package observe

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Hops counts messages to other nodes. It is among MetricsConfig.Collectors, and safe for concurrent use.
type Hops struct {
	prometheus.Collector
	answered, lost hop
}

// hop is what is counted of them.
type hop struct {
	took  prometheus.Observer
	items prometheus.Counter
}

// NewHops returns counters at zero.
func NewHops() *Hops {
	registry := prometheus.NewRegistry()
	forward := promauto.With(registry).NewHistogramVec(prometheus.HistogramOpts{
		Name:    "weir_hop_duration_seconds",
		Help:    "Time from sending a message to another node until its answer, by hop and whether it was answered.",
		Buckets: prometheus.ExponentialBuckets(50e-6, 2, 17), // 50 µs to 3.3 s
	}, []string{"hop", "answered"})
	items := promauto.With(registry).NewCounterVec(prometheus.CounterOpts{
		Name: "weir_forwarded_total",
		Help: "Checks and other operations sent to the node that decides, by whether they were answered. One that is sent again counts again.",
	}, []string{"answered"})
	return &Hops{
		Collector: registry,
		answered:  hop{forward.WithLabelValues("forward", "true"), items.WithLabelValues("true")},
		lost:      hop{forward.WithLabelValues("forward", "false"), items.WithLabelValues("false")},
	}
}

// Forwarded notes how long a message with so many operations to a peer took.
func (h *Hops) Forwarded(took time.Duration, items int, answered bool) {
	of := h.lost
	if answered {
		of = h.answered
	}
	of.took.Observe(took.Seconds())
	of.items.Add(float64(items))
}

package envoy

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// maxNames bounds the names that Hits counts by: values of requests may be in them.
const maxNames = 10_000

// Hits counts hits for Prometheus, by the names of their limits and by what came of them. What comes under new names beyond 10000 is
// counted as "other". It is safe for concurrent use.
type Hits struct {
	vec *prometheus.CounterVec

	mu    sync.RWMutex
	names map[string]struct{}
}

// NewHits returns a Hits.
func NewHits() *Hits {
	return &Hits{
		vec: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_envoy_hits_total",
			Help: "Hits that Envoy's requests added, by the limit (domain and descriptor keys with dots between them) and what came of them: within_limit, over_limit, shadow_mode.",
		}, []string{"descriptor", "result"}),
		names: make(map[string]struct{}),
	}
}

// Count is for ServiceConfig.Count.
func (h *Hits) Count(name, result string, hits uint64) {
	h.mu.RLock()
	_, known := h.names[name]
	h.mu.RUnlock()
	if !known {
		h.mu.Lock()
		if len(h.names) < maxNames {
			h.names[name] = struct{}{}
		} else {
			name = "other"
		}
		h.mu.Unlock()
	}
	h.vec.WithLabelValues(name, result).Add(float64(hits))
}

// Describe implements prometheus.Collector.
func (h *Hits) Describe(to chan<- *prometheus.Desc) { h.vec.Describe(to) }

// Collect implements prometheus.Collector.
func (h *Hits) Collect(to chan<- prometheus.Metric) { h.vec.Collect(to) }

package envoy

import (
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// maxNames and maxNameBytes bound the names that Hits counts by, because names may have values of requests in them.
const maxNames, maxNameBytes = 10_000, 512

// Hits counts hits for Prometheus by limit and result. Longer names, and further ones after the first 10000, are
// counted as "other". It is a collector, and safe for concurrent use.
type Hits struct {
	*prometheus.CounterVec

	mu    sync.Mutex
	names map[string]struct{} // without "other"
}

// NewHits returns a Hits.
func NewHits() *Hits {
	return &Hits{
		CounterVec: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_envoy_hits_total",
			Help: "Hits that Envoy's requests added, by the limit (domain and descriptor keys with dots between them) and what came of them: within_limit, over_limit, shadow_mode.",
		}, []string{"descriptor", "result"}),
		names: make(map[string]struct{}),
	}
}

// Count counts hits; it is for ServiceConfig.Count.
func (h *Hits) Count(name, result string, hits uint64) {
	h.mu.Lock()
	_, known := h.names[name]
	if !known && len(name) <= maxNameBytes && len(h.names) < maxNames {
		h.names[strings.Clone(name)] = struct{}{}
		known = true
	}
	h.mu.Unlock()
	if !known {
		name = "other"
	}
	h.WithLabelValues(name, result).Add(float64(hits))
}

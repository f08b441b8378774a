package envoy

import (
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// maxNames bounds the names that Hits counts by: values of requests may be in them.
const maxNames = 10_000

// Hits counts hits for Prometheus, by the names of their limits and by what came of them. What comes under new names beyond 10000 is
// counted as "other". It is a collector, and safe for concurrent use.
type Hits struct {
	*prometheus.CounterVec

	mu    sync.RWMutex
	names int // without other
	known map[hit]prometheus.Counter
}

// hit is what a counter counts.
type hit struct{ name, result string }

// NewHits returns a Hits.
func NewHits() *Hits {
	return &Hits{
		CounterVec: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_envoy_hits_total",
			Help: "Hits that Envoy's requests added, by the limit (domain and descriptor keys with dots between them) and what came of them: within_limit, over_limit, shadow_mode.",
		}, []string{"descriptor", "result"}),
		known: make(map[hit]prometheus.Counter),
	}
}

// Count is for ServiceConfig.Count.
func (h *Hits) Count(name, result string, hits uint64) {
	h.mu.RLock()
	counter := h.known[hit{name, result}]
	h.mu.RUnlock()
	if counter == nil {
		counter = h.counter(name, result)
	}
	counter.Add(float64(hits))
}

// counter returns the counter of a name that has not come with this result yet.
func (h *Hits) counter(name, result string) prometheus.Counter {
	h.mu.Lock()
	defer h.mu.Unlock()
	if known := h.known[hit{name, result}]; known != nil {
		return known
	}
	fresh := true
	for _, r := range []string{WithinLimit, OverLimit, ShadowMode} {
		fresh = fresh && h.known[hit{name, r}] == nil
	}
	if fresh {
		if h.names >= maxNames {
			return h.WithLabelValues("other", result)
		}
		h.names++
	}
	c := h.WithLabelValues(name, result)
	h.known[hit{strings.Clone(name), result}] = c
	return c
}

package control

import "github.com/prometheus/client_golang/prometheus"

// OverrideMetrics shows a member's overrides, of which inactive tells how many are not in force.
func OverrideMetrics(book *Book, inactive func() int, replicator *Replicator) []prometheus.Collector {
	gauge := func(name, help string, labels prometheus.Labels, value func(BookStats) int) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, func() float64 { return float64(value(book.Stats())) })
	}
	writes := func(result string, count func(BookStats) uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "weir_overrides_writes_total", Help: "Writes of the overrides to the data directory, by result (done, failed).",
			ConstLabels: prometheus.Labels{"result": result},
		}, func() float64 { return float64(count(book.Stats())) })
	}
	const states = "Overrides set while nodes run, by state on this node (active, inactive)."
	return []prometheus.Collector{
		gauge("weir_overrides", states, prometheus.Labels{"state": "active"}, func(s BookStats) int { return max(s.Overrides-inactive(), 0) }),
		gauge("weir_overrides", states, prometheus.Labels{"state": "inactive"}, func(BookStats) int { return inactive() }),
		gauge("weir_overrides_durable", "1 if the data directory has all overrides that are in force, 0 otherwise and without one.", nil, func(s BookStats) int {
			if s.Durable {
				return 1
			}
			return 0
		}),
		gauge("weir_overrides_members_unequal", "Other members whose overrides are not known to be those of this node.", nil, func(BookStats) int { return replicator.Unequal(false) }),
		writes("done", func(s BookStats) uint64 { return s.Writes - s.WritesFailed }),
		writes("failed", func(s BookStats) uint64 { return s.WritesFailed }),
	}
}

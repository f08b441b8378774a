package overrides

import "github.com/prometheus/client_golang/prometheus"

var (
	descOverrides = prometheus.NewDesc("weir_overrides", "Overrides set while nodes run, by state on this node (active, inactive).", []string{"state"}, nil)
	descDurable   = prometheus.NewDesc("weir_overrides_durable", "1 if the data directory has all overrides that are in force, 0 otherwise and without one.", nil, nil)
	descUnequal   = prometheus.NewDesc("weir_overrides_members_unequal", "Other members whose overrides are not known to be those of this node.", nil, nil)
	descWrites    = prometheus.NewDesc("weir_overrides_writes_total", "Writes of the overrides to the data directory, by result (done, failed).", []string{"result"}, nil)
)

// Metrics shows a member's overrides. It is a collector.
type Metrics struct {
	Book     *Book
	Inactive func() int // overrides that are not in force
	Unequal  func() int // see Replicator.Unequal
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descOverrides, descDurable, descUnequal, descWrites} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	st, inactive, durable := m.Book.Stats(), m.Inactive(), 0
	if st.Durable {
		durable = 1
	}
	gauge(descOverrides, max(st.Overrides-inactive, 0), "active")
	gauge(descOverrides, inactive, "inactive")
	gauge(descDurable, durable)
	gauge(descUnequal, m.Unequal())
	out <- prometheus.MustNewConstMetric(descWrites, prometheus.CounterValue, float64(st.Writes-st.WritesFailed), "done")
	out <- prometheus.MustNewConstMetric(descWrites, prometheus.CounterValue, float64(st.WritesFailed), "failed")
}

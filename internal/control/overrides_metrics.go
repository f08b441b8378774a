package control

import "github.com/weirlimit/weir/internal/observe"

// OverrideMetrics returns the metrics of a member's overrides. inactive returns how many of them are not in force.
func OverrideMetrics(book *Book, inactive func() int, replicator *Replicator) observe.Reading {
	return func(to observe.Lines) {
		st, off := book.Stats(), inactive()
		states := to.Gauges("weir_overrides", "Overrides set while nodes run, by state (active, inactive).", "state")
		states(float64(max(st.Overrides-off, 0)), "active")
		states(float64(off), "inactive")
		to.Gauge("weir_overrides_durable", "1 while the data directory has all overrides.", observe.Truth(st.Durable))
		to.Gauge("weir_overrides_members_unequal", "Members with other overrides.", float64(replicator.Unequal(false)))
		writes := to.Counters("weir_overrides_writes_total", "Writes of the overrides to the data directory.", "result")
		writes(st.Writes-st.WritesFailed, "done")
		writes(st.WritesFailed, "failed")
	}
}

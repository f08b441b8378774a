package node

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/fairshare"
)

// callersMemory returns the bytes that connections of callers and streams share; of any number where connections have no bound.
func callersMemory(l *Limits, most int64) *fairshare.Places {
	if l.MaxConnections < 0 {
		most = 0
	}
	return fairshare.New(int(most))
}

// roomCollectors return the metrics of how many connections, calls and streams callers have, and of their memory, beside how much they
// may have.
func (n *Node) roomCollectors() []prometheus.Collector {
	var all []prometheus.Collector
	gauge := func(name, help, label, value string, f func() int) {
		opts := prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: prometheus.Labels{label: value}}
		all = append(all, prometheus.NewGaugeFunc(opts, func() float64 { return float64(f()) }))
	}
	for _, l := range []struct {
		name string
		of   *admission.Listener
	}{{"http", n.listeners.http}, {"grpc", n.listeners.grpc}, {"resp", n.listeners.resp}} {
		if l.of == nil {
			continue
		}
		gauge("weir_connections", "Connections of authenticated callers, by listener.", "listener", l.name, func() int {
			authenticated, _, _ := l.of.Connections()
			return authenticated
		})
		gauge("weir_connections_max", "The most connections of authenticated callers, by listener; 0: any number.", "listener", l.name,
			func() int { return max(n.limits.MaxConnections, 0) })
	}
	for i, g := range []struct{ name, help string }{
		{"weir_callers_bytes", "Memory of callers' connections and streams while they are idle."},
		{"weir_callers_bytes_max", "The most such memory; 0: any."},
	} {
		all = append(all, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: g.name, Help: g.help}, func() float64 {
			taken, most := n.callersMemory.InUse()
			return float64([]int64{taken, most}[i])
		}))
	}
	if n.listeners.grpc == nil {
		return all
	}
	inUse := func(streams bool) int {
		c := n.calls.Load()
		if c == nil {
			return 0
		}
		calls, open := c.InUse()
		if streams {
			return open
		}
		return calls
	}
	const help = "Calls of callers over gRPC that are carried out, by kind (unary, stream)."
	gauge("weir_calls", help, "kind", "unary", func() int { return inUse(false) })
	gauge("weir_calls", help, "kind", "stream", func() int { return inUse(true) })
	gauge("weir_calls_max", "The most unary calls at a time. Streams have weir_callers_bytes_max.", "kind", "unary", func() int { return n.cfg.Memory.MaxCalls })
	return all
}

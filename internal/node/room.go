package node

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirlimit/weir/internal/ingress"
	"github.com/weirlimit/weir/internal/memory"
)

// maxStreams is how many of MaxStreams may be streams, which last, so that calls have the rest.
func maxStreams(m memory.Budget) int { return m.MaxStreams / 4 * 3 }

// roomCollectors return the metrics of how many connections, calls and streams callers have, beside how many they may have.
func (n *Node) roomCollectors() []prometheus.Collector {
	var all []prometheus.Collector
	gauge := func(name, help, label, value string, f func() int) {
		opts := prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: prometheus.Labels{label: value}}
		all = append(all, prometheus.NewGaugeFunc(opts, func() float64 { return float64(f()) }))
	}
	for _, l := range []struct {
		name string
		of   *ingress.Listener
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
	const help, helpMax = "Calls of callers over gRPC that are carried out, by kind (unary, stream).", "The most such calls, by kind."
	gauge("weir_calls", help, "kind", "unary", func() int { return inUse(false) })
	gauge("weir_calls", help, "kind", "stream", func() int { return inUse(true) })
	gauge("weir_calls_max", helpMax, "kind", "unary", func() int { return n.cfg.Memory.MaxStreams })
	gauge("weir_calls_max", helpMax, "kind", "stream", func() int { return maxStreams(n.cfg.Memory) })
	return all
}

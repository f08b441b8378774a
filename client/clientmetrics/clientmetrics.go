// Package clientmetrics exports to Prometheus the counts of a client.Client, and of the middlewares that use it.
//
//	prometheus.MustRegister(clientmetrics.Client(c), clientmetrics.Middleware("api", limits.Counts))
//
// It counts nothing itself: each scrape reads Stats and Counts.
package clientmetrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirlimit/weir/client"
)

// Client returns a collector of a Client's Stats:
//
//	weir_client_decisions_total{result}  decisions: admitted, refused, failed_open, failed_closed, error
//	weir_client_unanswered_total         decisions of the Client's own fail policy, because no node answered
//	weir_client_nodes{state}             nodes: known to the Client (known), ready to be asked (ready)
//	weir_client_settling                 reservations that are settled in the background, because no node has answered
//	weir_client_unsettled_total          reservations that the Client gave up: they end as the policy's on_expiry says
//	weir_client_without_node             1 while the Client's fail policy answers
func Client(c *client.Client) prometheus.Collector {
	return collector(func(ch chan<- prometheus.Metric) {
		s := c.Stats()
		without := 0.0
		if s.WithoutNode {
			without = 1
		}
		sendCounts(ch, clientDecisions, s.Counts)
		send(ch, unanswered, prometheus.CounterValue, float64(s.Unanswered))
		send(ch, nodes, prometheus.GaugeValue, float64(s.Nodes), "known")
		send(ch, nodes, prometheus.GaugeValue, float64(s.Ready), "ready")
		send(ch, settling, prometheus.GaugeValue, float64(s.Settling))
		send(ch, unsettled, prometheus.CounterValue, float64(s.Unsettled))
		send(ch, withoutNode, prometheus.GaugeValue, without)
	})
}

// Middleware returns a collector of the counts of a middleware of httplimit or grpclimit:
//
//	weir_client_middleware_decisions_total{middleware, result}
//
// The name distinguishes several middlewares of one program.
func Middleware(name string, counts func() client.Counts) prometheus.Collector {
	desc := prometheus.NewDesc("weir_client_middleware_decisions_total",
		"Requests that a middleware has limited, by result.",
		[]string{"result"}, prometheus.Labels{"middleware": name})
	return collector(func(ch chan<- prometheus.Metric) { sendCounts(ch, desc, counts()) })
}

var (
	clientDecisions = describe("decisions_total", "Decisions of the client, by result.", "result")
	unanswered      = describe("unanswered_total", "Decisions of the client's fail policy, because no node answered.")
	nodes           = describe("nodes", "Nodes that the client knows, and that it can ask.", "state")
	settling        = describe("settling", "Reservations that the client settles in the background.")
	unsettled       = describe("unsettled_total", "Reservations that no node could be told about in time.")
	withoutNode     = describe("without_node", "1 while the client's fail policy answers.")
)

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("weir_client_"+name, help, labels, nil)
}

func send(ch chan<- prometheus.Metric, desc *prometheus.Desc, kind prometheus.ValueType, value float64,
	labels ...string) {
	ch <- prometheus.MustNewConstMetric(desc, kind, value, labels...)
}

func sendCounts(ch chan<- prometheus.Metric, desc *prometheus.Desc, c client.Counts) {
	send(ch, desc, prometheus.CounterValue, float64(c.Admitted), "admitted")
	send(ch, desc, prometheus.CounterValue, float64(c.Refused), "refused")
	send(ch, desc, prometheus.CounterValue, float64(c.FailedOpen), "failed_open")
	send(ch, desc, prometheus.CounterValue, float64(c.FailedClosed), "failed_closed")
	send(ch, desc, prometheus.CounterValue, float64(c.Errors), "error")
}

// collector sends the metrics of one scrape.
type collector func(chan<- prometheus.Metric)

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) { c(ch) }

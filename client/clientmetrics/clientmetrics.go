// Package clientmetrics exports to Prometheus what a client.Client, and the middlewares that use it, have answered.
//
//	prometheus.MustRegister(clientmetrics.Client(c), clientmetrics.Middleware("api", limits.Counts))
//
// It counts nothing itself: it reads Stats and Counts when it is scraped.
package clientmetrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirlimit/weir/client"
)

// Client returns a collector of a Client's Stats:
//
//	weir_client_decisions_total{result}  decisions: admitted, refused, failed_open, failed_closed, error
//	weir_client_unanswered_total         decisions of the Client's own fail policy, because no node answered
//	weir_client_nodes{state}             nodes that the Client knows (known), and that it can ask (ready)
//	weir_client_settling                 reservations that are settled in the background, because no node has answered
//	weir_client_unsettled_total          reservations that no node could be told about in time, and stay charged in full
//	weir_client_without_node             1 while the Client's fail policy answers
func Client(c *client.Client) prometheus.Collector {
	return collector{[]*prometheus.Desc{clientDecisions, unanswered, nodes, settling, unsettled, withoutNode}, func(ch chan<- prometheus.Metric) {
		s := c.Stats()
		decisions(ch, clientDecisions, s.Counts)
		ch <- prometheus.MustNewConstMetric(unanswered, prometheus.CounterValue, float64(s.Unanswered))
		ch <- prometheus.MustNewConstMetric(nodes, prometheus.GaugeValue, float64(s.Nodes), "known")
		ch <- prometheus.MustNewConstMetric(nodes, prometheus.GaugeValue, float64(s.Ready), "ready")
		ch <- prometheus.MustNewConstMetric(settling, prometheus.GaugeValue, float64(s.Settling))
		ch <- prometheus.MustNewConstMetric(unsettled, prometheus.CounterValue, float64(s.Unsettled))
		without := 0.0
		if s.WithoutNode {
			without = 1
		}
		ch <- prometheus.MustNewConstMetric(withoutNode, prometheus.GaugeValue, without)
	}}
}

// Middleware returns a collector of what a middleware of httplimit or grpclimit counts:
//
//	weir_client_middleware_decisions_total{middleware, result}
//
// The name tells several middlewares of a program apart.
func Middleware(name string, counts func() client.Counts) prometheus.Collector {
	desc := prometheus.NewDesc("weir_client_middleware_decisions_total", "Requests that a middleware has limited, by result.",
		[]string{"result"}, prometheus.Labels{"middleware": name})
	return collector{[]*prometheus.Desc{desc}, func(ch chan<- prometheus.Metric) { decisions(ch, desc, counts()) }}
}

var (
	clientDecisions = prometheus.NewDesc("weir_client_decisions_total", "Decisions of the client, by result.", []string{"result"}, nil)
	unanswered      = prometheus.NewDesc("weir_client_unanswered_total", "Decisions of the client's fail policy, because no node answered.", nil, nil)
	nodes           = prometheus.NewDesc("weir_client_nodes", "Nodes that the client knows, and that it can ask.", []string{"state"}, nil)
	settling        = prometheus.NewDesc("weir_client_settling", "Reservations that the client settles in the background.", nil, nil)
	unsettled       = prometheus.NewDesc("weir_client_unsettled_total", "Reservations that no node could be told about in time.", nil, nil)
	withoutNode     = prometheus.NewDesc("weir_client_without_node", "1 while the client's fail policy answers.", nil, nil)
)

func decisions(ch chan<- prometheus.Metric, desc *prometheus.Desc, c client.Counts) {
	for _, r := range []struct {
		result string
		n      uint64
	}{{"admitted", c.Admitted}, {"refused", c.Refused}, {"failed_open", c.FailedOpen}, {"failed_closed", c.FailedClosed}, {"error", c.Errors}} {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(r.n), r.result)
	}
}

type collector struct {
	descs   []*prometheus.Desc
	collect func(chan<- prometheus.Metric)
}

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) { c.collect(ch) }

package clientmetrics_test

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/client/clientmetrics"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestCollectors: a client that reaches no node shows it, and so does a middleware.
func TestCollectors(t *testing.T) {
	c := must.Value(client.Dial(t.Context(), "unix:/nonexistent", client.WithTimeout(time.Minute)))(t)
	defer c.Close()
	for range 3 {
		d, err := c.Policy("p").Allow(t.Context(), "k")
		must.True(t, err == nil && d.FailedOpen, "%v %v", d, err)
	}
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(clientmetrics.Client(c),
		clientmetrics.Middleware("api", func() client.Counts { return client.Counts{Refused: 7} }))
	const want = `
# HELP weir_client_decisions_total Decisions of the client, by result.
# TYPE weir_client_decisions_total counter
weir_client_decisions_total{result="admitted"} 0
weir_client_decisions_total{result="error"} 0
weir_client_decisions_total{result="failed_closed"} 0
weir_client_decisions_total{result="failed_open"} 3
weir_client_decisions_total{result="refused"} 0
# HELP weir_client_middleware_decisions_total Requests that a middleware has limited, by result.
# TYPE weir_client_middleware_decisions_total counter
weir_client_middleware_decisions_total{middleware="api",result="admitted"} 0
weir_client_middleware_decisions_total{middleware="api",result="error"} 0
weir_client_middleware_decisions_total{middleware="api",result="failed_closed"} 0
weir_client_middleware_decisions_total{middleware="api",result="failed_open"} 0
weir_client_middleware_decisions_total{middleware="api",result="refused"} 7
# HELP weir_client_nodes Nodes that the client knows, and that it can ask.
# TYPE weir_client_nodes gauge
weir_client_nodes{state="known"} 1
weir_client_nodes{state="ready"} 0
# HELP weir_client_settling Reservations that the client settles in the background.
# TYPE weir_client_settling gauge
weir_client_settling 0
# HELP weir_client_unanswered_total Decisions of the client's fail policy, because no node answered.
# TYPE weir_client_unanswered_total counter
weir_client_unanswered_total 3
# HELP weir_client_unsettled_total Reservations that no node could be told about in time.
# TYPE weir_client_unsettled_total counter
weir_client_unsettled_total 0
# HELP weir_client_without_node 1 while the client's fail policy answers.
# TYPE weir_client_without_node gauge
weir_client_without_node 1
`
	expect.NoError(t, testutil.GatherAndCompare(r, strings.NewReader(want)))
}

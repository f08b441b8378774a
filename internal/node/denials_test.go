package node

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/test/expect"
)

// TestPanicsDoNotFillTheLog: of panics in a row the log has one stack a second for each listener; all are counted.
func TestPanicsDoNotFillTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		s := &security{log: log, metrics: observe.NewSecurity(func() map[string]time.Time { return nil })}
		s.denials = newDenials(log, s.metrics)
		n := &Node{log: log, security: s}
		for range 3 {
			for range 100 {
				n.panicked("http")("/v1/check", &panics.Error{Value: "secret", Stack: []byte("frames")})
			}
			n.panicked("grpc")("Check", &panics.Error{Value: "secret", Stack: []byte("frames")})
			time.Sleep(denialInterval)
		}
		got := strings.Count(out.String(), "\n")
		expect.True(t, got == 6 && !strings.Contains(out.String(), "secret"), "%d lines:\n%s", got, &out)
		expect.True(t, strings.Contains(out.String(), "unlogged=99"),
			"the log does not say how many it leaves out:\n%s", &out)
		want := `
# HELP weir_panics_total Panics of handlers and of work behind answers.
# TYPE weir_panics_total counter
weir_panics_total{listener="background"} 0
weir_panics_total{listener="grpc"} 3
weir_panics_total{listener="http"} 300
weir_panics_total{listener="peer"} 0
weir_panics_total{listener="resp"} 0
`
		expect.NoError(t, testutil.CollectAndCompare(s.metrics, strings.NewReader(want), "weir_panics_total"))
	})
}

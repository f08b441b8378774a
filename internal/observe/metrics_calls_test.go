package observe

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/test/expect"
)

// TestCalls: what callers ask is counted and timed, what operators read is not.
func TestCalls(t *testing.T) {
	m := NewMetrics(MetricsConfig{Logger: slog.New(slog.DiscardHandler)})
	calls := 0
	h := m.HTTP(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { calls++ }))
	for _, method := range []string{"POST", "GET", "POST", "HEAD"} {
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(method, "/v1/check", nil))
	}
	for method, err := range map[string]error{
		"/weir.v1.Limiter/Check":               nil,
		"/weir.v1.Limiter/Acquire":             status.Error(codes.NotFound, "policy"),
		"/weir.v1.Limiter/Status":              status.Error(codes.Unavailable, "for operators"),
		"/grpc.health.v1.Health/Check":         status.Error(codes.NotFound, "not of the limiter"),
		"/weir.v1.LimiterOfSomebodyElse/Check": nil,
	} {
		m.GRPC(method, time.Millisecond, err)
	}
	expect.Equal(t, calls, 4, "calls went through")
	m.Streamed(time.Millisecond, codes.OK)
	m.Streamed(time.Millisecond, codes.InvalidArgument)
	m.RESP(time.Millisecond)
	m.RESPFailed("NOAUTH")
	expect.Equal(t, shown(t, m.calls.errors), `weir_call_errors_total{code="400",protocol="http"} 0
weir_call_errors_total{code="InvalidArgument",protocol="grpc"} 0
weir_call_errors_total{code="InvalidArgument",protocol="stream"} 1
weir_call_errors_total{code="NOAUTH",protocol="resp"} 1
weir_call_errors_total{code="NotFound",protocol="grpc"} 1
`)
	for _, count := range []string{`"http"} 2`, `"grpc"} 2`, `"stream"} 2`, `"resp"} 1`} {
		line := "weir_call_duration_seconds_count{protocol=" + count
		expect.True(t, strings.Contains(shown(t, m.calls.durations), line), "no line %s", line)
	}
}

package observe

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// calls has the metrics of callers' calls, by protocol.
type calls struct {
	durations                *prometheus.HistogramVec
	errors                   *prometheus.CounterVec
	http, grpc, stream, resp prometheus.Observer
}

// timed registers a histogram of times from 50 µs to 3.3 s.
func timed(to prometheus.Registerer, name, help string, labels ...string) *prometheus.HistogramVec {
	return promauto.With(to).NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help,
		Buckets: prometheus.ExponentialBuckets(50e-6, 2, 17)}, labels)
}

// counted registers counters.
func counted(to prometheus.Registerer, name, help string, labels ...string) *prometheus.CounterVec {
	return promauto.With(to).NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

func newCalls(to prometheus.Registerer) calls {
	d := calls{
		durations: timed(to, "weir_call_duration_seconds",
			"Time from reading a caller's call until its answer, by protocol (http, grpc, stream, resp).", "protocol"),
		errors: counted(to, "weir_call_errors_total",
			"Calls answered by an error in place of a decision, by protocol and code.", "protocol", "code"),
	}
	of := d.durations.WithLabelValues
	d.http, d.grpc, d.stream, d.resp = of("http"), of("grpc"), of("stream"), of("resp")
	d.errors.WithLabelValues("http", strconv.Itoa(http.StatusBadRequest)) // shown as 0 before the first error
	d.errors.WithLabelValues("grpc", "InvalidArgument")
	return d
}

// Problem counts an error of the HTTP API by status.
func (m *Metrics) Problem(status int) {
	m.calls.errors.WithLabelValues("http", strconv.Itoa(status)).Inc()
}

// fromCaller reports whether a request is a POST or for /v1/forward-auth, whose method is that of the request which a
// gateway asks about. Others are those of operators.
func fromCaller(r *http.Request) bool {
	return r.Method == http.MethodPost || r.URL.Path == "/v1/forward-auth"
}

// HTTP returns a handler that measures the requests of callers.
func (m *Metrics) HTTP(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !fromCaller(r) {
			next.ServeHTTP(w, r)
			return
		}
		began := time.Now()
		next.ServeHTTP(w, r)
		m.calls.http.Observe(time.Since(began).Seconds())
	})
}

// Streamed measures a request of a CheckStream, and counts its error, if any.
func (m *Metrics) Streamed(took time.Duration, failed codes.Code) {
	m.calls.stream.Observe(took.Seconds())
	if failed != codes.OK {
		m.calls.errors.WithLabelValues("stream", failed.String()).Inc()
	}
}

// RESP measures the decision of commands of the Redis protocol that came together.
func (m *Metrics) RESP(took time.Duration) { m.calls.resp.Observe(took.Seconds()) }

// RESPFailed counts a command of the Redis protocol that was answered with an error, by the error's first word.
func (m *Metrics) RESPFailed(code string) { m.calls.errors.WithLabelValues("resp", code).Inc() }

// GRPC measures a unary call and counts its error, if the method is one of callers.
func (m *Metrics) GRPC(method string, took time.Duration, err error) {
	if !strings.HasPrefix(method, "/weir.v1.Limiter/") && !strings.HasPrefix(method, "/envoy.service.ratelimit.v3.") ||
		method == "/weir.v1.Limiter/Status" {
		return
	}
	m.calls.grpc.Observe(took.Seconds())
	if err != nil {
		m.calls.errors.WithLabelValues("grpc", status.Code(err).String()).Inc()
	}
}

// Hops measures messages to other nodes. It is a collector for MetricsConfig.Collectors, and is safe for concurrent
// use.
type Hops struct {
	prometheus.Collector
	answered, lost hop
}

// hop has the metrics of messages with one outcome.
type hop struct {
	took  prometheus.Observer
	items prometheus.Counter
}

// NewHops returns Hops.
func NewHops() *Hops {
	registry := prometheus.NewRegistry()
	forward := timed(registry, "weir_hop_duration_seconds",
		"Time from sending a message to another node until its answer, by hop and whether it was answered.", "hop",
		"answered")
	items := counted(registry, "weir_forwarded_total",
		"Operations sent to the node that decides, by whether they were answered.", "answered")
	return &Hops{
		Collector: registry,
		answered:  hop{forward.WithLabelValues("forward", "true"), items.WithLabelValues("true")},
		lost:      hop{forward.WithLabelValues("forward", "false"), items.WithLabelValues("false")},
	}
}

// Forwarded measures a message with items operations to a peer.
func (h *Hops) Forwarded(took time.Duration, items int, answered bool) {
	of := h.lost
	if answered {
		of = h.answered
	}
	of.took.Observe(took.Seconds())
	of.items.Add(float64(items))
}

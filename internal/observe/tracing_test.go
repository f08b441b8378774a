package observe

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const (
	sampled   = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	unsampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
)

// newTracer returns a Tracer and what it has sent so far.
func newTracer(t *testing.T, sample float64) (*Tracer, func() tracetest.SpanStubs) {
	t.Helper()
	memory := tracetest.NewInMemoryExporter()
	tracer := must.Value(NewTracer(TracingConfig{Sample: sample, CallerRate: 1000, Node: "a", Version: "v",
		Logger: slog.New(slog.DiscardHandler), Exporter: memory}))(t)
	t.Cleanup(func() { expect.NoError(t, tracer.Close(context.WithoutCancel(t.Context()))) })
	return tracer, func() tracetest.SpanStubs {
		t.Helper()
		must.NoError(t, tracer.provider.ForceFlush(t.Context()))
		return memory.GetSpans()
	}
}

// TestWhatIsTraced: callers choose for themselves, chance for the others.
func TestWhatIsTraced(t *testing.T) {
	for _, test := range []struct {
		method, traceparent string
		sample              float64
		traced, child       bool
	}{
		{"POST", sampled, 0, true, true},
		{"POST", unsampled, 1, false, false},
		{"POST", "", 0, false, false},
		{"POST", "", 1, true, false},
		{"POST", "malformed", 0, false, false},
		{"POST", "malformed", 1, true, false},
		{"GET", sampled, 1, false, false},
	} {
		tracer, sent := newTracer(t, test.sample)
		mux := http.NewServeMux()
		inner := false
		mux.HandleFunc("/v1/check", func(w http.ResponseWriter, r *http.Request) {
			inner = trace.SpanContextFromContext(r.Context()).IsSampled()
			w.WriteHeader(http.StatusServiceUnavailable)
		})
		r := httptest.NewRequest(test.method, "/v1/check?key=secret", nil)
		if test.traceparent != "" {
			r.Header.Set("Traceparent", test.traceparent)
		}
		w := httptest.NewRecorder()
		tracer.HTTP(mux).ServeHTTP(w, r)
		expect.True(t, w.Code == http.StatusServiceUnavailable && inner == test.traced,
			"%+v: status %d, traced %t", test, w.Code, inner)

		info := &grpc.UnaryServerInfo{FullMethod: "/weir.v1.Limiter/Check"}
		if test.method == "GET" {
			info.FullMethod = "/weir.v1.Limiter/Status"
		}
		ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("traceparent", test.traceparent))
		_, err := tracer.UnaryInterceptor(ctx, nil, info, func(ctx context.Context, _ any) (any, error) {
			expect.Equal(t, trace.SpanContextFromContext(ctx).IsSampled(), test.traced, "%+v: over gRPC traced", test)
			return nil, nil
		})
		expect.NoError(t, err)

		var names []string
		for _, s := range sent() {
			names = append(names, s.Name)
			expect.True(t, s.Parent.IsValid() == test.child &&
				(!test.child || s.Parent.SpanID().String() == "b7ad6b7169203331"), "%+v: %s has the parent %v", test,
				s.Name, s.Parent)
			for _, a := range s.Attributes {
				expect.True(t, !strings.Contains(a.Value.String(), "secret"), "%s says %s", s.Name, a.Value.String())
			}
		}
		want := []string{"/v1/check", "weir.v1.Limiter/Check"}
		if !test.traced {
			want = nil
		}
		expect.True(t, slices.Equal(names, want), "%+v: spans %q, want %q", test, names, want)
		expect.Equal(t, tracer.calls.Load(), 0, "%+v: calls that are still counted", test)
	}
}

// TestCallersAreBounded: callers have no more calls traced than they may, and take nothing from those traced by chance.
func TestCallersAreBounded(t *testing.T) {
	for _, allowed := range []int{0, 1, 6} {
		tracer, sent := newTracer(t, 1)
		tracer.asked.SetBurst(allowed)
		tracer.asked.SetLimit(1e-9) // so that no further one comes in time
		for range 100 {
			if _, s := tracer.begin(t.Context(), parentOf(t.Context(), sampled), "asked"); s != nil {
				tracer.end(s)
			}
		}
		if _, s := tracer.begin(t.Context(), parentOf(t.Context(), ""), "by chance"); s == nil {
			t.Error("callers used up what is traced by chance")
		} else {
			tracer.end(s)
		}
		expect.Equal(t, len(sent())-1, allowed, "traced")
	}
	for _, bad := range []float64{-1, math.NaN(), math.Inf(1), maxCallerRate + 1} {
		cfg := TracingConfig{Endpoint: "http://localhost:4317", CallerRate: bad}
		err := cfg.Check()
		expect.True(t, err != nil && strings.HasPrefix(err.Error(), "trace-caller-rate: "), "%v: %v", bad, err)
	}
}

// TestUntracedCallAllocatesNothing: a Tracer costs a call that is not traced nothing to speak of.
func TestUntracedCallAllocatesNothing(t *testing.T) {
	if underRace {
		t.Skip("the race detector allocates for itself")
	}
	tracer, _ := newTracer(t, 0)
	h := tracer.HTTP(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	w, r := httptest.NewRecorder(), httptest.NewRequest("POST", "/v1/check", nil)
	expect.Equal(t, testing.AllocsPerRun(100, func() { h.ServeHTTP(w, r) }), 0, "allocations over HTTP")
	ctx, info := t.Context(), &grpc.UnaryServerInfo{FullMethod: "/weir.v1.Limiter/Check"}
	handle := func(context.Context, any) (any, error) { return nil, nil }
	expect.Equal(t, testing.AllocsPerRun(100, func() { _, _ = tracer.UnaryInterceptor(ctx, nil, info, handle) }), 0,
		"allocations over gRPC")
	expect.Equal(t, testing.AllocsPerRun(100, func() { _, _ = tracer.Streamed("stream", "") }), 0,
		"allocations over a stream")
	expect.Equal(t, testing.AllocsPerRun(100, func() { _, _ = tracer.Start(ctx, "decide") }), 0,
		"allocations in the limiter")
}

// TestTracedCallsAreBounded: with too many traced calls in flight the next ones are served all the same.
func TestTracedCallsAreBounded(t *testing.T) {
	tracer, sent := newTracer(t, 1)
	tracer.calls.Store(maxCalls)
	served := false
	h := tracer.HTTP(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served = true }))
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", "/v1/check", nil))
	expect.True(t, served && len(sent()) == 0 && tracer.calls.Load() == maxCalls,
		"served %t, %d spans, %d calls", served, len(sent()), tracer.calls.Load())
	tracer.calls.Store(maxCalls - 1)
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", "/v1/check", nil))
	expect.True(t, len(sent()) == 1, "%d spans", len(sent()))
}

// TestStreamed: checks that come over streams belong to their callers' traces, or to new ones by chance.
func TestStreamed(t *testing.T) {
	tracer, sent := newTracer(t, 0)
	_, caller := tracer.begin(t.Context(), parentOf(t.Context(), sampled), "caller")
	ids := span{caller}.Context()
	for _, parent := range []string{"", "malformed", strings.Repeat("\x00", limiter.TraceContext)} {
		below, end := tracer.Streamed("stream", parent)
		expect.True(t, below == "" && end == nil, "%q is traced", parent)
	}
	below, end := tracer.Streamed("stream", ids)
	decide := tracer.Below(below, "decide")
	decide.End(nil)
	end(grpccodes.NotFound)
	tracer.end(caller)
	expect.Equal(t, tracer.calls.Load(), 0, "calls are still counted")
	spans := sent()
	must.True(t, len(spans) == 3 && spans[0].Parent.SpanID() == spans[1].SpanContext.SpanID() &&
		spans[1].Parent.SpanID() == spans[2].SpanContext.SpanID() &&
		spans[0].Parent.TraceID() == spans[2].SpanContext.TraceID() && !spans[0].Parent.IsRemote() &&
		spans[1].Parent.IsRemote(), "%+v", spans)
	a := spans[1].Attributes
	expect.True(t, len(a) == 1 && a[0].Value.String() == "NotFound" && spans[1].SpanKind == trace.SpanKindServer &&
		spans[0].SpanKind == trace.SpanKindInternal, "%+v", spans[1])
	always, sent := newTracer(t, 1)
	_, end = always.Streamed("stream", "")
	end(grpccodes.OK)
	spans = sent()
	expect.True(t, len(spans) == 1 && !spans[0].Parent.IsValid(), "%+v", spans)
}

// failing is an exporter that fails while told to.
type failing struct {
	*tracetest.InMemoryExporter
	err error
}

func (f *failing) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	if f.err != nil {
		return f.err
	}
	return f.InMemoryExporter.ExportSpans(ctx, spans)
}

// TestFailuresAreLoggedOnce: a collector that is away, or answers with a long text, does not fill the log.
func TestFailuresAreLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	to := &failing{InMemoryExporter: tracetest.NewInMemoryExporter(),
		err: errors.New("away" + strings.Repeat("x", 1<<20))}
	p := &patient{SpanExporter: to, log: slog.New(slog.NewTextHandler(&log, nil))}
	for range 3 {
		expect.NoError(t, p.ExportSpans(t.Context(), nil))
	}
	to.err = nil
	for range 3 {
		expect.NoError(t, p.ExportSpans(t.Context(), nil))
	}
	lines := strings.Count(log.String(), "\n")
	expect.True(t, lines == 2 && strings.Contains(log.String(), "away") && log.Len() < 2048,
		"%d lines of %d bytes:\n%.2048s", lines, log.Len(), log.String())
}

func TestCheck(t *testing.T) {
	for endpoint, good := range map[string]bool{
		"http://127.0.0.1:4317": true, "https://collector:4317": true, "http://[::1]:4317/": true,
		"": false, "collector:4317": false, "http://collector": false, "grpc://collector:4317": false,
		"http://:4317":                    false,
		"http://collector:4317/v1/traces": false, "http://user:secret@collector:4317": false, "http://a b:1": false,
	} {
		cfg := TracingConfig{Endpoint: endpoint, Sample: 0.5}
		if err := cfg.Check(); (err == nil) != good {
			t.Errorf("%q: %v", endpoint, err)
		} else if err != nil && (!strings.Contains(err.Error(), "otlp-endpoint") ||
			strings.Contains(endpoint, "secret") && strings.Contains(err.Error(), "secret")) {
			t.Errorf("%q: %v", endpoint, err)
		}
	}
	for _, share := range []float64{-0.1, 1.1} {
		cfg := TracingConfig{Endpoint: "http://collector:4317", Sample: share}
		expect.ErrorContains(t, cfg.Check(), "trace-sample", "%v", share)
	}
}

// FuzzTraceparent: whatever a header says, its ids are valid or there is no context, and the header that such a context
// makes is read again as the same.
func FuzzTraceparent(f *testing.F) {
	for _, header := range []string{
		"", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
		"00-00000000000000000000000000000000-00f067aa0ba902b7-01",
		"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
		"01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-ff-more",
		"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", "00-", "\xff",
	} {
		f.Add(header)
	}
	f.Fuzz(func(t *testing.T, header string) {
		sc := parentOf(t.Context(), header)
		expect.True(t, sc.HasTraceID() == sc.HasSpanID() && sc.IsValid() == sc.HasTraceID(), "%q: %+v", header, sc)
		if !sc.IsValid() {
			return
		}
		again := parentOf(t.Context(),
			"00-"+sc.TraceID().String()+"-"+sc.SpanID().String()+"-"+sc.TraceFlags().String())
		expect.True(t, again.TraceID() == sc.TraceID() && again.SpanID() == sc.SpanID() &&
			again.IsSampled() == sc.IsSampled(), "%q: %+v, again %+v", header, sc, again)
	})
}

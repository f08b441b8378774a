package observe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limiter"
)

// TracingConfig configures a Tracer.
type TracingConfig struct {
	// Endpoint is the collector's address for OTLP over gRPC: http://HOST:PORT in plain text, https://HOST:PORT with
	// TLS.
	Endpoint string
	// Sample is the share, 0 to 1, of calls without a trace context that are traced.
	Sample float64
	// CallerRate bounds how many calls a second are traced because their callers ask for it, of all callers together;
	// 0: none. As many as a second's may come at once.
	CallerRate float64
	// Node and Version describe this process.
	Node, Version string
	Logger        *slog.Logger
	// Exporter, if set, replaces the exporter to Endpoint.
	Exporter sdktrace.SpanExporter
}

// maxCalls bounds the traced calls in progress. Further calls are not traced.
const maxCalls = 1000

// maxCallerRate is the largest TracingConfig.CallerRate.
const maxCallerRate = 1_000_000

// exportTimeout bounds how long the collector may take for a message.
const exportTimeout = 5 * time.Second

// Tracer makes spans. Its methods are safe for concurrent use.
//
// Spans are made for the call at the node that was asked, for the forward to another node, and for the decision there.
// A span has policy, result, partition and term.
//
// A call is traced if its caller asks for it (W3C Trace Context, with the sampled flag), up to CallerRate, or at random
// (Sample). A call that is not traced costs a look at its headers. The number of calls in progress, of attributes of a
// span, and of spans that wait for the collector is bounded. Beyond the bounds spans are dropped, never calls. The
// Tracer passes no trace state or baggage on.
type Tracer struct {
	sample   float64
	asked    *rate.Limiter // for calls whose callers ask for a trace
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	calls    atomic.Int64
}

var _ limiter.Tracer = (*Tracer)(nil)

// Check returns what is wrong with the endpoint, the share or the rate. Without an endpoint there are no traces, and a
// rate may be given, but no share.
func (c *TracingConfig) Check() error {
	u, err := url.Parse(c.Endpoint) // the error does not have its text, which may hold a password
	switch {
	case c.Endpoint == "" && c.Sample != 0:
		return errors.New("trace-sample: needs a collector: give otlp-endpoint")
	case c.Endpoint != "" && (err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Port() == "" ||
		u.Hostname() == "" || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.User != nil):
		return errors.New("otlp-endpoint: is not http://HOST:PORT or https://HOST:PORT of a collector")
	case !(c.Sample >= 0 && c.Sample <= 1):
		return fmt.Errorf("trace-sample: %v is not a share from 0 to 1", c.Sample)
	case !(c.CallerRate >= 0 && c.CallerRate <= maxCallerRate):
		return fmt.Errorf("trace-caller-rate: %v is not a number of calls a second, 0 to %d", c.CallerRate,
			maxCallerRate)
	}
	return nil
}

// NewTracer returns a Tracer of a configuration that Check accepts. The collector need not be running yet.
func NewTracer(cfg TracingConfig) (*Tracer, error) {
	exporter := cfg.Exporter
	if exporter == nil {
		var err error
		// Without retries: new spans are worth more than old ones.
		exporter, err = otlptracegrpc.New(context.Background(), otlptracegrpc.WithEndpointURL(cfg.Endpoint),
			otlptracegrpc.WithTimeout(exportTimeout),
			otlptracegrpc.WithRetry(otlptracegrpc.RetryConfig{Enabled: false}))
		if err != nil {
			return nil, fmt.Errorf("otlp-endpoint: %w", err)
		}
	}
	about := resource.NewSchemaless(attribute.String("service.name", "weir"),
		attribute.String("service.instance.id", cfg.Node),
		attribute.String("service.version", cfg.Version))
	limits := sdktrace.NewSpanLimits()
	limits.AttributeValueLengthLimit = 256
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(&patient{SpanExporter: exporter, log: cfg.Logger}), // a bounded queue, which drops
		sdktrace.WithSampler(sdktrace.AlwaysSample()),                           // of the calls that begin chose
		sdktrace.WithResource(about), sdktrace.WithRawSpanLimits(limits))
	return &Tracer{
		sample: cfg.Sample, asked: rate.NewLimiter(rate.Limit(cfg.CallerRate), int(math.Ceil(cfg.CallerRate))),
		provider: provider, tracer: provider.Tracer("github.com/weirlimit/weir/internal/observe"),
	}, nil
}

// Close sends the spans that wait, until ctx is done, and ends the Tracer's goroutines.
func (t *Tracer) Close(ctx context.Context) error {
	if err := t.provider.Shutdown(ctx); err != nil {
		return fmt.Errorf("tracing: %w", err)
	}
	return nil
}

// patient is an exporter that logs its first error, and then nothing until it works again. Without it, errors would go
// to a handler that the whole process shares.
type patient struct {
	sdktrace.SpanExporter
	log    *slog.Logger
	failed atomic.Bool
}

// ExportSpans implements sdktrace.SpanExporter.
func (p *patient) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	switch err := p.SpanExporter.ExportSpans(ctx, spans); {
	case err == nil:
		if p.failed.Swap(false) {
			p.log.Info("span export recovered")
		}
	case errors.Is(err, context.Canceled):
	case !p.failed.Swap(true):
		p.log.Warn("spans dropped", "error", fmt.Sprintf("%.1024s", err)) // a collector may answer with megabytes
	}
	return nil
}

// begin begins the span of a call from a caller. It returns a nil span if the call is not traced. parent is the
// caller's context.
func (t *Tracer) begin(ctx context.Context, parent trace.SpanContext, name string) (context.Context, trace.Span) {
	if parent.IsValid() {
		if !parent.IsSampled() || !t.asked.Allow() {
			return ctx, nil
		}
	} else if t.sample <= rand.Float64() {
		return ctx, nil
	}
	if t.calls.Add(1) > maxCalls {
		t.calls.Add(-1)
		return ctx, nil
	}
	return t.tracer.Start(trace.ContextWithRemoteSpanContext(ctx, parent), name,
		trace.WithSpanKind(trace.SpanKindServer))
}

// end ends a span that begin has begun.
func (t *Tracer) end(s trace.Span) {
	s.End()
	t.calls.Add(-1)
}

// Start implements limiter.Tracer.
func (t *Tracer) Start(ctx context.Context, name string) (context.Context, limiter.Span) {
	if !trace.SpanContextFromContext(ctx).IsSampled() {
		return ctx, nil
	}
	ctx, s := t.tracer.Start(ctx, name)
	return ctx, span{s}
}

// Continue implements limiter.Tracer.
func (t *Tracer) Continue(parent, name string) limiter.Span {
	return t.below(sampledContext(parent, true), name, trace.SpanKindServer)
}

// Below implements limiter.Tracer.
func (t *Tracer) Below(parent, name string) limiter.Span {
	return t.below(sampledContext(parent, false), name, trace.SpanKindInternal)
}

func (t *Tracer) below(parent trace.SpanContext, name string, kind trace.SpanKind) limiter.Span {
	if !parent.IsValid() {
		return nil
	}
	ctx := trace.ContextWithSpanContext(context.Background(), parent)
	_, s := t.tracer.Start(ctx, name, trace.WithSpanKind(kind))
	return span{s}
}

// sampledContext returns the span context of a limiter.Span.Context; it is not valid if ids is malformed.
func sampledContext(ids string, remote bool) trace.SpanContext {
	if len(ids) != limiter.TraceContext {
		return trace.SpanContext{}
	}
	cfg := trace.SpanContextConfig{TraceFlags: trace.FlagsSampled, Remote: remote}
	copy(cfg.TraceID[:], ids)
	copy(cfg.SpanID[:], ids[len(cfg.TraceID):])
	return trace.NewSpanContext(cfg)
}

// span is a limiter.Span.
type span struct{ trace.Span }

// Context implements limiter.Span.
func (s span) Context() string {
	c := s.SpanContext()
	trace, own := c.TraceID(), c.SpanID()
	return string(trace[:]) + string(own[:])
}

// Peer implements limiter.Span.
func (s span) Peer(name string) { s.SetAttributes(attribute.String("weir.peer", name)) }

// End implements limiter.Span. If there is one operation, its attributes are the span's; if there are several, each is
// an event.
func (s span) End(ops []limiter.Traced) {
	for i := range ops {
		about := spanAttributes(&ops[i])
		if len(ops) == 1 {
			s.SetAttributes(about...)
		} else {
			s.AddEvent("decided", trace.WithAttributes(about...))
		}
	}
	s.Span.End()
}

func spanAttributes(op *limiter.Traced) []attribute.KeyValue {
	out := []attribute.KeyValue{
		attribute.String("weir.operation", op.Operation), attribute.String("weir.result", op.Result),
		attribute.Int("weir.partition", op.Partition),
	}
	if op.Policy != "" {
		out = append(out, attribute.String("weir.policy", op.Policy))
	}
	if op.Term != "" {
		out = append(out, attribute.String("weir.term", op.Term))
	}
	return out
}

// traceparent is the header with the trace of a call.
const traceparent = "traceparent"

// parentOf parses a traceparent. If it is missing or malformed, the context is not valid.
func parentOf(ctx context.Context, value string) trace.SpanContext {
	if value == "" {
		return trace.SpanContext{}
	}
	ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{traceparent: value})
	return trace.SpanContextFromContext(ctx)
}

// HTTP returns a handler that traces the requests of callers.
func (t *Tracer) HTTP(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, s := r.Context(), trace.Span(nil)
		if fromCaller(r) {
			ctx, s = t.begin(ctx, parentOf(ctx, r.Header.Get("Traceparent")), "HTTP")
		}
		if s == nil {
			next.ServeHTTP(w, r)
			return
		}
		defer t.end(s)
		r = r.WithContext(ctx)
		seen := &statusWriter{ResponseWriter: w, status: http.StatusOK}
		next.ServeHTTP(seen, r)
		if r.Pattern != "" {
			s.SetName(r.Pattern) // not the path, which a caller can choose
		}
		s.SetAttributes(attribute.Int("http.response.status_code", seen.status))
		if seen.status >= http.StatusInternalServerError {
			s.SetStatus(codes.Error, "")
		}
	})
}

// Streamed begins the span of one request of a stream. parent has the ids of the caller's span, in the form of
// limiter.Span.Context; without a parent, the request is traced at random. below is the parent for spans below this
// one. end ends the span with the status of the answer; it is nil if the request is not traced.
func (t *Tracer) Streamed(name, parent string) (below string, end func(grpccodes.Code)) {
	if parent == "" && t.sample == 0 {
		return "", nil
	}
	_, s := t.begin(context.Background(), sampledContext(parent, true), name)
	if s == nil {
		return "", nil
	}
	return span{s}.Context(), func(code grpccodes.Code) {
		s.SetAttributes(attribute.String("rpc.grpc.status_code", code.String()))
		t.end(s)
	}
}

// statusWriter notes the status of a response.
type statusWriter struct {
	http.ResponseWriter
	status int
}

// WriteHeader implements http.ResponseWriter.
func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap lets http.ResponseController find the ResponseWriter.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// UnaryInterceptor traces the calls of callers.
func (t *Tracer) UnaryInterceptor(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handle grpc.UnaryHandler) (any, error) {
	if !strings.HasPrefix(info.FullMethod, "/weir.v1.Limiter/") || info.FullMethod == "/weir.v1.Limiter/Status" {
		return handle(ctx, req)
	}
	parent := ""
	if values := metadata.ValueFromIncomingContext(ctx, traceparent); len(values) == 1 {
		parent = values[0]
	}
	ctx, s := t.begin(ctx, parentOf(ctx, parent), info.FullMethod[1:])
	if s == nil {
		return handle(ctx, req)
	}
	defer t.end(s)
	out, err := handle(ctx, req)
	s.SetAttributes(attribute.String("rpc.grpc.status_code", status.Code(err).String()))
	return out, err
}

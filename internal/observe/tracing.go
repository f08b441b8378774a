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

// TracingConfig says what is traced and where it goes.
type TracingConfig struct {
	// Endpoint is the collector's address for OTLP over gRPC: http://HOST:PORT in plain text, https://HOST:PORT with TLS.
	Endpoint string
	// Sample is the share of calls without a trace context that are traced, 0 to 1. Callers' own choices are followed.
	Sample float64
	// CallerRate is how many calls a second are traced at most because their callers say so, of all callers together; 0 for
	// none, whatever they say. A second's worth of them may come at once.
	CallerRate float64
	// Node and Version describe this process.
	Node, Version string
	Logger        *slog.Logger
	// Exporter takes the place of the one for Endpoint, when not nil.
	Exporter sdktrace.SpanExporter
}

// maxCalls bounds the traced calls in flight. Those on top are not traced.
const maxCalls = 1000

// maxCallerRate is the largest TracingConfig.CallerRate.
const maxCallerRate = 1_000_000

// exportTimeout bounds how long the collector may take for a message.
const exportTimeout = 5 * time.Second

// Tracer makes spans. Its methods are safe for concurrent use.
//
// Spans are of the call at the node that was asked, of the forward to another node, and of the decision there. A span says policy, result,
// partition and term.
//
// A call is traced when its caller says so (W3C Trace Context, with the sampled flag), up to a rate, or by chance. One that is not costs a
// look at its headers. What a trace may hold on to is bounded: by calls in flight, spans of a call, and spans that wait
// for the collector; beyond that spans are dropped, never calls. It passes no trace state or baggage on.
type Tracer struct {
	sample   float64
	asked    *rate.Limiter // for calls whose callers ask for a trace
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	calls    atomic.Int64
}

var _ limiter.Tracer = (*Tracer)(nil)

// Check says what is wrong with the endpoint, the share or the rate.
func (c *TracingConfig) Check() error {
	u, err := url.Parse(c.Endpoint) // whose text is not repeated: it may hold a password
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Port() == "" || u.Hostname() == "" || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.User != nil {
		return errors.New("otlp-endpoint: is not http://HOST:PORT or https://HOST:PORT of a collector")
	}
	return c.CheckRates()
}

// CheckRates says what is wrong with the share or the rate, which may be given without an endpoint.
func (c *TracingConfig) CheckRates() error {
	if !(c.Sample >= 0 && c.Sample <= 1) {
		return fmt.Errorf("trace-sample: %v is not a share from 0 to 1", c.Sample)
	}
	if !(c.CallerRate >= 0 && c.CallerRate <= maxCallerRate) {
		return fmt.Errorf("trace-caller-rate: %v is not a number of calls a second, 0 to %d", c.CallerRate, maxCallerRate)
	}
	return nil
}

// NewTracer returns a Tracer. The collector need not be there yet.
func NewTracer(cfg TracingConfig) (*Tracer, error) {
	exporter := cfg.Exporter
	if exporter == nil {
		if err := cfg.Check(); err != nil {
			return nil, err
		}
		var err error
		// Nothing is sent again: what comes in meanwhile is worth more than what is old.
		exporter, err = otlptracegrpc.New(context.Background(), otlptracegrpc.WithEndpointURL(cfg.Endpoint),
			otlptracegrpc.WithTimeout(exportTimeout),
			otlptracegrpc.WithRetry(otlptracegrpc.RetryConfig{Enabled: false}))
		if err != nil {
			return nil, fmt.Errorf("otlp-endpoint: %w", err)
		}
	}
	about := resource.NewSchemaless(attribute.String("service.name", "weir"), attribute.String("service.instance.id", cfg.Node),
		attribute.String("service.version", cfg.Version))
	limits := sdktrace.NewSpanLimits()
	limits.AttributeValueLengthLimit = 256
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(&patient{SpanExporter: exporter, log: cfg.Logger}), // a bounded queue, which drops
		sdktrace.WithSampler(sdktrace.AlwaysSample()),                           // of what was chosen here
		sdktrace.WithResource(about), sdktrace.WithRawSpanLimits(limits))
	return &Tracer{
		sample: cfg.Sample, asked: rate.NewLimiter(rate.Limit(cfg.CallerRate), int(math.Ceil(cfg.CallerRate))),
		provider: provider, tracer: provider.Tracer("github.com/weirlimit/weir/internal/observe"),
	}, nil
}

// Close sends what is waiting, until ctx is done, and ends the Tracer's goroutines.
func (t *Tracer) Close(ctx context.Context) error {
	if err := t.provider.Shutdown(ctx); err != nil {
		return fmt.Errorf("tracing: %w", err)
	}
	return nil
}

// patient is an exporter whose errors go to the log, once until it works again, and not to a handler that the whole
// process shares.
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
		p.log.Warn("spans dropped", "error", err)
	}
	return nil
}

// begin begins the span of a call from outside, unless it is not to be traced: parent is what the caller said.
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
	return t.tracer.Start(trace.ContextWithRemoteSpanContext(ctx, parent), name, trace.WithSpanKind(trace.SpanKindServer))
}

// end ends the span of a call from outside.
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

// sampledContext is what Span.Context was made of; what cannot be one is not valid.
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

// End implements limiter.Span. What is said of one operation is said of the span, of several each is an event.
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

// traceparent is the header that says which trace a call belongs to.
const traceparent = "traceparent"

// parentOf reads a traceparent. One that is missing or malformed is no context.
func parentOf(ctx context.Context, value string) trace.SpanContext {
	if value == "" {
		return trace.SpanContext{}
	}
	ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{traceparent: value})
	return trace.SpanContextFromContext(ctx)
}

// HTTP returns a handler that traces calls of the API: what is not a POST is for operators.
func (t *Tracer) HTTP(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, s := r.Context(), trace.Span(nil)
		if r.Method == http.MethodPost {
			ctx, s = t.begin(ctx, parentOf(ctx, r.Header.Get("Traceparent")), "POST")
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
			s.SetName(r.Pattern) // not the path, which is the caller's to choose
		}
		s.SetAttributes(attribute.Int("http.response.status_code", seen.status))
		if seen.status >= http.StatusInternalServerError {
			s.SetStatus(codes.Error, "")
		}
	})
}

// Streamed begins the span of one of the checks that come over a stream, of a name: below the caller's, of which parent has the
// ids as limiter.Span.Context does, or by chance where it has none. It returns what hangs below it, and how to end it with the
// status of the answer, which is nil when the check is not traced.
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

// Unwrap is for http.ResponseController.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// UnaryInterceptor traces callers' calls.
func (t *Tracer) UnaryInterceptor(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
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

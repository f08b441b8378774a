package observe

import (
	"context"
	"net/http"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

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
		if r.Method != http.MethodPost {
			next.ServeHTTP(w, r)
			return
		}
		ctx, s := t.begin(r.Context(), parentOf(r.Context(), r.Header.Get("Traceparent")), "POST")
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

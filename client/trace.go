package client

import (
	"context"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/metadata"
)

// traceparent is the header with the trace of a call (W3C Trace Context).
const traceparent = "traceparent"

// traceOf returns the ids of ctx's trace and span, or "" if ctx has none or it is not sampled.
func traceOf(ctx context.Context) string {
	c := trace.SpanContextFromContext(ctx)
	if !c.IsSampled() || !c.IsValid() {
		return ""
	}
	t, s := c.TraceID(), c.SpanID()
	return string(append(t[:], s[:]...))
}

// withTrace adds the trace of ctx to the headers of a unary call, unless they have one.
func withTrace(ctx context.Context) context.Context {
	c := trace.SpanContextFromContext(ctx)
	if !c.IsValid() {
		return ctx
	}
	if md, ok := metadata.FromOutgoingContext(ctx); ok && len(md.Get(traceparent)) > 0 {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, traceparent,
		"00-"+c.TraceID().String()+"-"+c.SpanID().String()+"-"+c.TraceFlags().String())
}

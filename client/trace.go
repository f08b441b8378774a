package client

import (
	"context"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/metadata"
)

// traceparent is where a call says which trace it belongs to, as W3C Trace Context has it.
const traceparent = "traceparent"

// traceOf returns the ids of the trace that ctx belongs to and of the span in it, or nothing where there is none or it is not
// sampled.
func traceOf(ctx context.Context) string {
	c := trace.SpanContextFromContext(ctx)
	if !c.IsSampled() || !c.IsValid() {
		return ""
	}
	t, s := c.TraceID(), c.SpanID()
	return string(append(t[:], s[:]...))
}

// withTrace adds a unary call's trace to its headers, unless they have one.
func withTrace(ctx context.Context) context.Context {
	c := trace.SpanContextFromContext(ctx)
	if !c.IsValid() {
		return ctx
	}
	if md, ok := metadata.FromOutgoingContext(ctx); ok && len(md.Get(traceparent)) > 0 {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, traceparent, "00-"+c.TraceID().String()+"-"+c.SpanID().String()+"-"+c.TraceFlags().String())
}

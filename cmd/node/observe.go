package main

import (
	"context"
	"net/http"
	"time"

	"google.golang.org/grpc"

	"github.com/weirlimit/weir/tracing"
)

// trace starts what sends traces, if anything does.
func (n *node) trace() (*tracing.Tracer, error) {
	if n.cfg.OTLPEndpoint == "" {
		return nil, nil
	}
	return tracing.New(tracing.Config{
		Endpoint: n.cfg.OTLPEndpoint, Sample: n.cfg.TraceSample, Node: n.cfg.Name, Version: version(), Logger: n.log,
	})
}

// goodbyeToCollector is how long a node that stops waits for the collector at most.
const goodbyeToCollector = 500 * time.Millisecond

// closeTracer sends the last spans. It comes after everything that makes some.
func (n *node) closeTracer() {
	if n.tracer == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), goodbyeToCollector)
	defer cancel()
	if err := n.tracer.Close(ctx); err != nil {
		n.log.Warn("the last spans did not reach the collector", "error", err)
	}
}

// observed is the HTTP door with its figures and traces.
func (n *node) observed(door http.Handler) http.Handler {
	if n.tracer != nil {
		door = n.tracer.HTTP(door)
	}
	return n.metrics.HTTP(door)
}

// unaryInterceptors are the same for gRPC.
func (n *node) unaryInterceptors() []grpc.UnaryServerInterceptor {
	chain := []grpc.UnaryServerInterceptor{n.metrics.UnaryInterceptor}
	if n.tracer != nil {
		chain = append(chain, n.tracer.UnaryInterceptor)
	}
	return chain
}

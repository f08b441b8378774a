package node

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	httpapi "github.com/weirlimit/weir/gateway/http"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/internal/panics"
)

// goodbyeToCollector bounds how long a stopping node waits for the collector of traces.
const goodbyeToCollector = 500 * time.Millisecond

// openTracer opens the exporter of traces, if the node has a collector. It is closed after all parts that make spans.
func (n *Node) openTracer() (err error) {
	if n.cfg.OTLPEndpoint == "" {
		return nil
	}
	if n.tracer, err = observe.NewTracer(*n.cfg.traces()); err != nil {
		return err
	}
	n.closing(func(context.Context) {
		ctx, cancel := context.WithTimeout(context.Background(), goodbyeToCollector)
		defer cancel()
		if err := n.tracer.Close(ctx); err != nil {
			n.log.Warn("last spans lost", "error", err)
		}
	})
	return nil
}

// observed returns the HTTP API with metrics and traces.
func (n *Node) observed(api http.Handler) http.Handler {
	if n.tracer != nil {
		api = n.tracer.HTTP(api)
	}
	return n.recovering(n.metrics.HTTP(n.closesConnections(api)))
}

// closesConnections tells an HTTP caller, with an answer, to open another connection: at MaxConnectionAge, and while
// the node stops, so that its next request goes to another node. The server closes idle connections without notice when
// it ends, and a request that is in flight then is lost.
func (n *Node) closesConnections(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, most := admission.FromContext(r.Context()), n.limits.MaxConnectionAge
		if n.readiness.Stopping() || most > 0 && conn != nil && time.Since(conn.Served()) > most {
			w.Header().Set("Connection", "close") // net/http sends a GOAWAY over HTTP/2
		}
		handler.ServeHTTP(w, r)
	})
}

// recovering counts the panics of a handler and ends its connection, because the handler may have written part of an
// answer.
func (n *Node) recovering(handler http.Handler) http.Handler {
	panicked := n.panicked("http")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		panics.Tell(func(p *panics.Error) {
			if p.Value != http.ErrAbortHandler {
				panicked(r.Pattern, p)
			}
			panic(http.ErrAbortHandler) // net/http then ends the connection, or the stream, and logs nothing
		}, func() { handler.ServeHTTP(w, r) })
	})
}

// panicked returns a function that notes the panics of a listener's handlers. It does not log the value, which may hold
// what the caller sent. It logs at most one stack a second for each listener: a stack has kilobytes, and a caller can
// send the request that causes a panic again.
func (n *Node) panicked(listener string) func(method string, p *panics.Error) {
	return func(method string, p *panics.Error) {
		n.security.metrics.Panicked(listener)
		if unlogged, ok := n.security.denials.turn(denialKind{listener, "panic"}); ok {
			n.log.Error("handler panicked", "listener", listener, "method", method, "stack", string(p.Stack),
				"unlogged", unlogged)
		}
	}
}

// traceUnary returns the interceptor that traces unary calls.
func (n *Node) traceUnary() grpc.ServerOption {
	if n.tracer == nil {
		return grpc.EmptyServerOption{}
	}
	return grpc.UnaryInterceptor(n.tracer.UnaryInterceptor)
}

// traceStreamed returns the function that traces a check of a stream, or nil without traces.
func (n *Node) traceStreamed() func(parent string) (below string, end func(codes.Code)) {
	if n.tracer == nil {
		return nil
	}
	return func(parent string) (string, func(codes.Code)) {
		return n.tracer.Streamed("weir.v1.Limiter/CheckStream", parent)
	}
}

// requestIDKey is the metadata key of a call's id, which the log has as well.
const requestIDKey = "x-request-id"

// ended counts a unary call. If the call failed, it gets an id (the caller's, or a new one) and is logged: at debug, as
// the HTTP API does, unless the fault is this node's.
func (n *Node) ended(ctx context.Context, method string, took time.Duration, err error) {
	n.metrics.GRPC(method, took, err)
	if err == nil {
		return
	}
	given := ""
	if values := metadata.ValueFromIncomingContext(ctx, requestIDKey); len(values) == 1 {
		given = values[0]
	}
	id := httpapi.RequestID(given)
	_ = grpc.SetTrailer(ctx, metadata.Pairs(requestIDKey, id)) // fails only if there is no stream
	level, code := slog.LevelDebug, status.Code(err)
	if code == codes.Internal || code == codes.Unknown {
		level = slog.LevelError
	}
	// The error's text is left out, because it repeats what the caller sent.
	n.log.Log(ctx, level, "grpc call failed", "request_id", id, "method", method, "code", code.String())
}

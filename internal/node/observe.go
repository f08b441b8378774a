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

// goodbyeToCollector is how long a node that stops waits for the collector at most.
const goodbyeToCollector = 500 * time.Millisecond

// openTracer opens what sends traces, if the node has a collector. It ends after all that makes spans.
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

// observed is the HTTP API with its figures and traces.
func (n *Node) observed(api http.Handler) http.Handler {
	if n.tracer != nil {
		api = n.tracer.HTTP(api)
	}
	return n.recovering(n.metrics.HTTP(n.closesConnections(api)))
}

// closesConnections asks callers over HTTP to open another connection, with the answer to a request: when theirs has reached
// MaxConnectionAge, and while the node stops, so that their next one is to another node. What is idle when the server ends is closed
// without a word, and a request that is on its way to it at that moment is lost.
func (n *Node) closesConnections(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, most := admission.FromContext(r.Context()), n.limits.MaxConnectionAge
		if n.readiness.Stopping() || most > 0 && conn != nil && time.Since(conn.Served()) > most {
			w.Header().Set("Connection", "close") // of HTTP/2 net/http makes a GOAWAY
		}
		handler.ServeHTTP(w, r)
	})
}

// recovering counts the panics of a handler. Its connection ends: what has been answered is not known.
func (n *Node) recovering(handler http.Handler) http.Handler {
	panicked := n.panicked("http")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		panics.Tell(func(p *panics.Error) {
			if p.Value != http.ErrAbortHandler {
				panicked(r.Pattern, p)
			}
			panic(http.ErrAbortHandler) // which net/http takes for: end the connection, or the stream, without a word
		}, func() { handler.ServeHTTP(w, r) })
	})
}

// panicked returns what notes the panics of a listener's handlers. The value may hold what the caller sent and is not logged. A stack
// has kilobytes, and a caller who has found what makes a handler panic can send it again: so one a second is logged of each listener.
func (n *Node) panicked(listener string) func(method string, p *panics.Error) {
	return func(method string, p *panics.Error) {
		n.security.metrics.Panicked(listener)
		if unlogged, ok := n.security.denials.turn(denialKind{listener, "panic"}); ok {
			n.log.Error("handler panicked", "listener", listener, "method", method, "stack", string(p.Stack), "unlogged", unlogged)
		}
	}
}

// traceUnary has unary calls traced.
func (n *Node) traceUnary() grpc.ServerOption {
	if n.tracer == nil {
		return grpc.EmptyServerOption{}
	}
	return grpc.UnaryInterceptor(n.tracer.UnaryInterceptor)
}

// traceStreamed is the same for each check that comes over a stream; nil without traces.
func (n *Node) traceStreamed() func(parent string) (below string, end func(codes.Code)) {
	if n.tracer == nil {
		return nil
	}
	return func(parent string) (string, func(codes.Code)) {
		return n.tracer.Streamed("weir.v1.Limiter/CheckStream", parent)
	}
}

// requestIDKey carries the name by which the log and the caller call a call.
const requestIDKey = "x-request-id"

// ended counts a unary call. It gives one that ends with an error an id, the caller's own or a fresh one, and logs it: at debug, like
// the HTTP API does, unless the mistake is this node's.
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
	_ = grpc.SetTrailer(ctx, metadata.Pairs(requestIDKey, id)) // fails only where there is no stream to be answered
	level, code := slog.LevelDebug, status.Code(err)
	if code == codes.Internal || code == codes.Unknown {
		level = slog.LevelError
	}
	// Not the error's text, which repeats what the caller sent.
	n.log.Log(ctx, level, "grpc call failed", "request_id", id, "method", method, "code", code.String())
}

// Package grpclimit limits what a gRPC server takes, and shapes what a gRPC client sends, with package client.
//
//	limits := grpclimit.New(grpclimit.Config{Limiter: c.Policy("api")})
//	grpc.NewServer(grpc.UnaryInterceptor(limits.Unary), grpc.StreamInterceptor(limits.Stream))
//
// A refused call ends with RESOURCE_EXHAUSTED and a RetryInfo (google.rpc) that says when it would pass. A stream is limited
// once, when it begins; its messages are not.
package grpclimit

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/client/internal/middleware"
	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/internal/quotaheader"
)

// KeyFunc returns what a call is limited by, in UTF-8. method is like "/package.Service/Method". Empty means that the call has nothing
// of the kind.
type KeyFunc func(ctx context.Context, method string) string

// Config says how calls are limited.
type Config struct {
	// Limiter decides. Required, unless Choose or Checks is set.
	Limiter client.Decider
	// Choose returns what decides about a call, in place of Limiter, such as the policy of its method. Nil from it: the call is not
	// limited.
	Choose func(ctx context.Context, method string) client.Decider
	// Key returns what a call is limited by; nil stands for PeerIP. A call whose key is empty or not UTF-8 ends with INVALID_ARGUMENT
	// whatever OnError says, so that nobody passes by what it leaves out or sends. A value that is too long for a key is limited by its
	// beginning and its SHA-256.
	Key KeyFunc
	// Cost returns the units that a call takes, at least 1; nil stands for 1.
	Cost func(ctx context.Context, method string) int64
	// Checks, with All, returns several checks for a call: all are charged, or the call is refused. They take the place of Limiter,
	// Choose, Key and Cost. A call without checks is not limited.
	Checks func(ctx context.Context, method string) []client.Check
	// All decides Checks: a *client.Client.
	All AllDecider
	// Skip, when set, tells of calls that are not limited, such as those of health checks.
	Skip func(ctx context.Context, method string) bool
	// OnError says what happens when there is no decision: the policy is unknown, the caller is denied, the Client is closed.
	// The zero value, client.FailOpen, carries out the call; client.FailClosed ends it with UNAVAILABLE. That no node can be
	// reached is a decision, by the fail policy of the cluster and the Client.
	OnError client.OnError
	// Logger is told of calls that no node has decided about, in at most one line each 10 seconds. Nil stands for slog.Default().
	Logger *slog.Logger
}

// AllDecider decides several checks together: a *client.Client is one.
type AllDecider = middleware.AllDecider

// Interceptors limit calls. New makes them. They are safe for concurrent use.
type Interceptors struct {
	gate *middleware.Gate[call]
}

// call is what is known of a call when it begins.
type call struct {
	ctx    context.Context
	method string
}

// of returns f as a function of a call; nil for nil.
func of[T any](f func(context.Context, string) T) func(call) T {
	if f == nil {
		return nil
	}
	return func(c call) T { return f(c.ctx, c.method) }
}

// New returns Interceptors. It panics when cfg has nothing that decides.
func New(cfg Config) *Interceptors {
	if cfg.Key == nil {
		cfg.Key = PeerIP
	}
	return &Interceptors{gate: middleware.New("grpclimit", middleware.Config[call]{
		Limiter: cfg.Limiter, Choose: of(cfg.Choose), Key: of(cfg.Key), Cost: of(cfg.Cost), Checks: of(cfg.Checks), All: cfg.All,
		Skip: of(cfg.Skip), OnError: cfg.OnError, Logger: cfg.Logger,
	})}
}

// Unary is the interceptor that carries out the unary calls that are admitted. Trailers say what the limit has decided: weir-result
// (admitted, refused, failed_open, failed_closed or bad_key), ratelimit, ratelimit-policy and x-ratelimit-….
func (i *Interceptors) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	md, err := i.admit(ctx, info.FullMethod)
	_ = grpc.SetTrailer(ctx, md) // fails outside a server's call, where there are no trailers
	if err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

// Stream is Unary for streams.
func (i *Interceptors) Stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	md, err := i.admit(stream.Context(), info.FullMethod)
	stream.SetTrailer(md)
	if err != nil {
		return err
	}
	return handler(srv, stream)
}

// Counts returns what became of calls, but for those that were not limited. Errors are those without a decision or a key.
func (i *Interceptors) Counts() client.Counts { return i.gate.Counts() }

// UnaryServer is New(cfg).Unary.
func UnaryServer(cfg Config) grpc.UnaryServerInterceptor { return New(cfg).Unary }

// StreamServer is New(cfg).Stream.
func StreamServer(cfg Config) grpc.StreamServerInterceptor { return New(cfg).Stream }

// admit returns the trailers of a call, and nil or the status that ends it.
func (i *Interceptors) admit(ctx context.Context, method string) (metadata.MD, error) {
	v, limited := i.gate.Ask(ctx, call{ctx, method})
	switch {
	case !limited:
		return nil, nil
	case v.Gone:
		return nil, status.FromContextError(ctx.Err()).Err()
	case v.BadKey != nil:
		return metadata.Pairs(quotaheader.Result, quotaheader.BadKey), status.Error(codes.InvalidArgument, "what names the caller "+v.BadKey.Message)
	}
	d := &v.Decision
	fields := make(http.Header, 8)
	quotaheader.Set(fields, nil, d)
	md := metadata.Pairs(quotaheader.Result, quotaheader.ResultOf(d))
	for name, values := range fields {
		md.Append(name, values...)
	}
	switch {
	case d.FailedClosed && !d.Allowed:
		return md, refusal(codes.Unavailable, "the rate limit cannot be asked at the moment", time.Second)
	case !d.Allowed && d.RetryAfter == client.Never:
		return md, refusal(codes.ResourceExhausted, "the call can never pass its rate limit", 0)
	case !d.Allowed:
		return md, refusal(codes.ResourceExhausted, "the rate limit is used up", d.RetryAfter)
	case d.Delay > 0:
		select {
		case <-time.After(d.Delay):
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	return md, nil
}

// refusal is a status that says when to try again; 0 for never.
func refusal(code codes.Code, message string, after time.Duration) error {
	st := status.New(code, message)
	if after > 0 {
		if with, err := st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(after)}); err == nil {
			st = with
		}
	}
	return st.Err()
}

// PeerIP limits by the address of the connection; IPv6 callers by their /64.
func PeerIP(ctx context.Context, _ string) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	var r netaddr.Resolver
	return r.Key(p.Addr.String(), nil) // nothing is forwarded here
}

// Metadata limits by the first value of a metadata key. A caller may send any value: use it for what the server has verified.
func Metadata(name string) KeyFunc {
	return func(ctx context.Context, _ string) string {
		md, _ := metadata.FromIncomingContext(ctx)
		if v := md.Get(name); len(v) > 0 {
			return v[0]
		}
		return ""
	}
}

// Method limits by the method alone: all callers together.
func Method(_ context.Context, method string) string { return method }

// UnaryClient returns an interceptor that sends each unary call once the Waiter admits it. key nil limits by the method. When the
// wait fails its error is returned and nothing is sent.
func UnaryClient(l client.Waiter, key KeyFunc) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if err := wait(ctx, l, key, method); err != nil {
			return err
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	}
}

// StreamClient is UnaryClient for streams, each of which waits once, before it begins.
func StreamClient(l client.Waiter, key KeyFunc) grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		if err := wait(ctx, l, key, method); err != nil {
			return nil, err
		}
		return streamer(ctx, desc, cc, method, opts...)
	}
}

func wait(ctx context.Context, l client.Waiter, key KeyFunc, method string) error {
	if key == nil {
		key = Method
	}
	_, err := l.WaitN(ctx, key(ctx, method), 1)
	return err
}

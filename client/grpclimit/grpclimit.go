// Package grpclimit limits what a gRPC server takes, and shapes what a gRPC client sends, with package client.
//
//	grpc.NewServer(grpc.UnaryInterceptor(grpclimit.UnaryServer(grpclimit.Config{Limiter: c.Policy("api")})))
//
// A refused call ends with RESOURCE_EXHAUSTED and a RetryInfo (google.rpc) that says when it would pass. A stream is limited
// once, when it begins; its messages are not.
package grpclimit

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/internal/clientip"
)

// KeyFunc returns what a call is limited by, 1 to 1024 bytes of UTF-8. method is like "/package.Service/Method". Empty means
// that the call has nothing of the kind.
type KeyFunc func(ctx context.Context, method string) string

// Config says how calls are limited.
type Config struct {
	// Limiter decides. Required.
	Limiter client.Decider
	// Key returns what a call is limited by; nil stands for PeerIP. A call whose key is empty ends with INVALID_ARGUMENT, so that
	// nobody passes by leaving something out.
	Key KeyFunc
	// Cost returns the units that a call takes, at least 1; nil stands for 1.
	Cost func(ctx context.Context, method string) int64
	// OnError says what happens when there is no decision: the policy is unknown, the key is not acceptable, the Client is closed.
	// The zero value, client.FailOpen, carries out the call; client.FailClosed ends it with UNAVAILABLE. That no node can be
	// reached is a decision, by the fail policy of the cluster and the Client.
	OnError client.OnError
	// Logger gets errors; nil stands for slog.Default().
	Logger *slog.Logger
}

// UnaryServer returns an interceptor that carries out the unary calls that the Limiter admits. It panics when cfg has no
// Limiter.
func UnaryServer(cfg Config) grpc.UnaryServerInterceptor {
	cfg.fill()
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if err := cfg.admit(ctx, info.FullMethod); err != nil {
			return nil, err
		}
		return handler(ctx, req)
	}
}

// StreamServer is UnaryServer for streams.
func StreamServer(cfg Config) grpc.StreamServerInterceptor {
	cfg.fill()
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		if err := cfg.admit(stream.Context(), info.FullMethod); err != nil {
			return err
		}
		return handler(srv, stream)
	}
}

func (c *Config) fill() {
	if c.Limiter == nil {
		panic("grpclimit: Config.Limiter is nil")
	}
	if c.Key == nil {
		c.Key = PeerIP
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
}

// admit returns nil, or the status that ends a call.
func (c *Config) admit(ctx context.Context, method string) error {
	key := c.Key(ctx, method)
	if key == "" {
		return status.Error(codes.InvalidArgument, "the call has nothing to limit it by: send what names the caller")
	}
	cost := int64(1)
	if c.Cost != nil {
		cost = max(c.Cost(ctx, method), 1)
	}
	d, err := c.Limiter.AllowN(ctx, key, cost)
	switch {
	case err != nil && ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	case err != nil:
		c.Logger.ErrorContext(ctx, "rate limit decision failed", "method", method, "error", err)
		if c.OnError == client.FailClosed {
			return refusal(codes.Unavailable, "the rate limit cannot be asked at the moment", time.Second)
		}
		return nil
	case d.FailedClosed && !d.Allowed:
		return refusal(codes.Unavailable, "the rate limit cannot be asked at the moment", time.Second)
	case !d.Allowed && d.RetryAfter == client.Never:
		return refusal(codes.ResourceExhausted, "the call can never pass its rate limit", 0)
	case !d.Allowed:
		return refusal(codes.ResourceExhausted, "the rate limit is used up", d.RetryAfter)
	case d.Delay > 0:
		select {
		case <-time.After(d.Delay):
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
	return nil
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
	var r clientip.Resolver
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

// Package grpclimit limits the calls that a gRPC server takes, and delays the calls that a gRPC client sends, with
// package client.
//
//	limits := grpclimit.New(grpclimit.Config{Limiter: c.Policy("api")})
//	grpc.NewServer(grpc.UnaryInterceptor(limits.Unary), grpc.StreamInterceptor(limits.Stream))
//
// A refused call ends with RESOURCE_EXHAUSTED and a RetryInfo (google.rpc) with the time after which it would pass. A
// stream is limited once, when it begins; its messages are not.
package grpclimit

import (
	"context"
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
	"github.com/weirlimit/weir/client/middleware"
	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/internal/quotaheader"
)

// Call is a call when it begins.
type Call struct {
	Ctx    context.Context
	Method string // such as "/package.Service/Method"
}

// KeyFunc returns the key that a call is limited by, in UTF-8. Empty: the call has no such key.
type KeyFunc = func(Call) string

// Config configures Interceptors. A nil Key stands for PeerIP.
type Config = middleware.Config[Call]

// Interceptors limit calls. Use New. They are safe for concurrent use.
type Interceptors struct {
	gate *middleware.Gate[Call]
}

// New returns Interceptors. It panics if cfg has no Limiter, Choose or Checks, or Checks without All.
func New(cfg Config) *Interceptors { return &Interceptors{gate: middleware.New(cfg, PeerIP)} }

// Unary is an interceptor that passes on the unary calls that are admitted. It sets trailers: weir-result (admitted,
// refused, failed_open, failed_closed or bad_key), ratelimit, ratelimit-policy and x-ratelimit-….
func (i *Interceptors) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	md, err := i.admit(ctx, info.FullMethod)
	_ = grpc.SetTrailer(ctx, md) // fails outside a server's call, where there are no trailers
	if err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

// Stream is Unary for streams.
func (i *Interceptors) Stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo,
	handler grpc.StreamHandler) error {
	md, err := i.admit(stream.Context(), info.FullMethod)
	stream.SetTrailer(md)
	if err != nil {
		return err
	}
	return handler(srv, stream)
}

// Counts returns the numbers of calls by result, without those that were not limited. Errors are calls without a
// decision or a key.
func (i *Interceptors) Counts() client.Counts { return i.gate.Counts() }

// admit returns the trailers of a call, and the status that ends it, or nil.
func (i *Interceptors) admit(ctx context.Context, method string) (metadata.MD, error) {
	v, limited := i.gate.Ask(ctx, Call{ctx, method})
	switch {
	case !limited:
		return nil, nil
	case v.Gone:
		return nil, status.FromContextError(ctx.Err()).Err()
	case v.BadKey != nil:
		return metadata.Pairs(quotaheader.Result, quotaheader.BadKey),
			status.Error(codes.InvalidArgument, "what names the caller "+v.BadKey.Message)
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
	}
	return md, nil
}

// refusal returns a status with the time after which the call may pass; 0: never.
func refusal(code codes.Code, message string, after time.Duration) error {
	st := status.New(code, message)
	if after > 0 {
		if with, err := st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(after)}); err == nil {
			st = with
		}
	}
	return st.Err()
}

// PeerIP limits by the address of the connection. IPv6 addresses are limited by their /64.
func PeerIP(c Call) string {
	p, ok := peer.FromContext(c.Ctx)
	if !ok {
		return ""
	}
	var r netaddr.Resolver
	return r.Key(p.Addr.String(), nil) // no header says that a call was forwarded
}

// Metadata limits by the first value of a metadata key. A caller may send any value, so use it only for a value that
// the server has verified.
func Metadata(name string) KeyFunc {
	return func(c Call) string {
		md, _ := metadata.FromIncomingContext(c.Ctx)
		if v := md.Get(name); len(v) > 0 {
			return v[0]
		}
		return ""
	}
}

// Method limits by the method alone, all callers together.
func Method(c Call) string { return c.Method }

// UnaryClient returns an interceptor that sends each unary call once the Waiter has admitted it. A nil key limits by
// the method. If the wait fails, the interceptor returns its error and sends nothing.
func UnaryClient(l client.Waiter, key KeyFunc) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker,
		opts ...grpc.CallOption) error {
		if err := wait(ctx, l, key, method); err != nil {
			return err
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	}
}

// StreamClient is UnaryClient for streams. Each waits once, before it begins.
func StreamClient(l client.Waiter, key KeyFunc) grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer,
		opts ...grpc.CallOption) (grpc.ClientStream, error) {
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
	_, err := l.WaitN(ctx, key(Call{ctx, method}), 1)
	return err
}

package ingress

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/weirlimit/weir/internal/recovered"
)

// CallsConfig configures Calls. The zero value of a field turns its check off.
type CallsConfig struct {
	// Authorize authorizes a unary call of a method (its full name) by the incoming context, before anything of the request is
	// read. It returns the context to carry the call out in, or the status to answer with. For streams an interceptor does.
	Authorize func(ctx context.Context, method string) (context.Context, error)
	// FirstMessage is how long the first message of a call may take, from its headers on.
	FirstMessage time.Duration
	// Panicked is called with each panic of a handler, which was recovered. It must not hold secrets of the request's back.
	Panicked func(method string, p *recovered.Error)
}

// Calls checks the calls of a gRPC server before their messages are read: it authorizes them, answers compressed requests
// UNIMPLEMENTED whichever compressors the process has registered (a compressed message of 4 KiB can hold 4 MiB), and ends calls
// whose first message does not come. A handler that panics ends its own call with INTERNAL. It is safe for concurrent use.
//
// Calls are not denied in gRPC's tap handle: grpc-go (1.85) keeps the timer of a call that the tap handle denies, and its headers
// with it, for as long as the caller's grpc-timeout says. A handler that returns before it reads costs no more, and ends the call.
type Calls struct{ cfg CallsConfig }

// NewCalls returns Calls. A server needs its Options, and its unary services registered through Registrar.
func NewCalls(cfg CallsConfig) *Calls { return &Calls{cfg} }

// Options returns the options of the server. They come before other interceptors.
func (c *Calls) Options() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.InTapHandle(tapped), grpc.ChainStreamInterceptor(c.stream)}
}

// call is the context of a call, which can be ended before its request has been read.
type call struct {
	context.Context
	end context.CancelCauseFunc
}

type callKey struct{}

// Err implements context.Context. gRPC answers by it what was being read.
func (c *call) Err() error {
	err := c.Context.Err()
	if err != nil && errors.Is(context.Cause(c.Context), errFirstMessage) {
		return context.DeadlineExceeded
	}
	return err
}

// Value implements context.Context.
func (c *call) Value(key any) any {
	if key == (callKey{}) {
		return c
	}
	return c.Context.Value(key)
}

// tapped gives a call a context that ends its reads: gRPC reads under the context that the tap handle returns.
func tapped(ctx context.Context, _ *tap.Info) (context.Context, error) {
	c := new(call)
	c.Context, c.end = context.WithCancelCause(ctx)
	return c, nil
}

var errFirstMessage = status.Error(codes.DeadlineExceeded, "no message came in time")

// await ends a call whose first message does not come in time, until the returned function is called.
func (c *Calls) await(ctx context.Context) (came func()) {
	call, ok := ctx.Value(callKey{}).(*call)
	if !ok || c.cfg.FirstMessage == 0 {
		return func() {}
	}
	timer := time.AfterFunc(c.cfg.FirstMessage, func() { call.end(errFirstMessage) })
	return func() { timer.Stop() }
}

// outcome is err, or why the call was ended before its first message came.
func outcome(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), errFirstMessage) {
		return errFirstMessage
	}
	return err
}

// uncompressed returns an error for a call whose request is compressed.
func uncompressed(ctx context.Context) error {
	s, ok := grpc.ServerTransportStreamFromContext(ctx).(interface{ RecvCompress() string })
	if ok && s.RecvCompress() != "" && s.RecvCompress() != encoding.Identity {
		return status.Error(codes.Unimplemented, "grpc-encoding: compressed requests are not read; send identity")
	}
	return nil
}

// handled calls a handler. A panic in it is answered INTERNAL.
func (c *Calls) handled(method string, handle func() error) error {
	err := recovered.Call(handle)
	p, ok := errors.AsType[*recovered.Error](err)
	if !ok {
		return err
	}
	if c.cfg.Panicked != nil {
		c.cfg.Panicked(method, p)
	}
	return status.Error(codes.Internal, "the request could not be carried out because of a mistake in the server")
}

// Registrar returns a registrar of services whose unary methods are checked. Streams are checked by the interceptor in Options,
// whoever registers them.
func (c *Calls) Registrar(r grpc.ServiceRegistrar) grpc.ServiceRegistrar { return registrar{c, r} }

type registrar struct {
	calls *Calls
	to    grpc.ServiceRegistrar
}

// RegisterService implements grpc.ServiceRegistrar.
func (r registrar) RegisterService(desc *grpc.ServiceDesc, impl any) {
	checked := *desc
	checked.Methods = make([]grpc.MethodDesc, len(desc.Methods))
	for i, m := range desc.Methods {
		checked.Methods[i] = grpc.MethodDesc{MethodName: m.MethodName, Handler: r.calls.unary("/"+desc.ServiceName+"/"+m.MethodName, m.Handler)}
	}
	r.to.RegisterService(&checked, impl)
}

// unary is the handler of a unary method with the checks before it.
func (c *Calls) unary(method string, handler grpc.MethodHandler) grpc.MethodHandler {
	return func(srv any, ctx context.Context, read func(any) error, i grpc.UnaryServerInterceptor) (out any, err error) {
		err = c.handled(method, func() (err error) {
			if err := uncompressed(ctx); err != nil {
				return err
			}
			if c.cfg.Authorize != nil {
				if ctx, err = c.cfg.Authorize(ctx, method); err != nil {
					return err
				}
			}
			came := c.await(ctx)
			defer came()
			out, err = handler(srv, ctx, func(m any) error {
				err := read(m)
				came()
				return err
			}, i)
			return outcome(ctx, err)
		})
		if err != nil {
			return nil, err
		}
		return out, nil
	}
}

// stream is the interceptor of streams.
func (c *Calls) stream(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	return c.handled(info.FullMethod, func() error {
		ctx := s.Context()
		if err := uncompressed(ctx); err != nil {
			return err
		}
		came := c.await(ctx)
		defer came()
		return outcome(ctx, handle(srv, &awaitedStream{s, came, false}))
	})
}

// awaitedStream is a stream whose first message is awaited.
type awaitedStream struct {
	grpc.ServerStream
	came func()
	read bool // RecvMsg has returned
}

// RecvMsg implements grpc.ServerStream.
func (s *awaitedStream) RecvMsg(m any) error {
	err := s.ServerStream.RecvMsg(m)
	if !s.read {
		s.read = true
		s.came()
	}
	return err
}

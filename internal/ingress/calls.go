package ingress

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/recovered"
)

// CallsConfig configures Calls. The zero value of a field turns its check off.
type CallsConfig struct {
	// Authorize authorizes a unary call of a method (its full name) by the incoming context, before anything of the request is
	// read. It returns the context to carry the call out in, or the status to answer with. For streams an interceptor does.
	Authorize func(ctx context.Context, method string) (context.Context, error)
	// MaxAnonymous bounds the calls on connections that are not authenticated, those of methods that are open to everybody. The
	// oldest of the source with most of them makes room.
	MaxAnonymous int
	// MaxAge is how old a connection may become before the contexts of its streams are done, and EndPatience later their reads fail.
	// The caller should have been asked for another connection before. See keepalive.ServerParameters.MaxConnectionAge.
	MaxAge time.Duration
	// FirstMessage is how long the first message of a call may take, from its headers on.
	FirstMessage time.Duration
	// MaxCalls and MaxStreams are how many unary calls and streams may be carried out at a time, on all connections together. More
	// are answered RESOURCE_EXHAUSTED before anything of them is read.
	MaxCalls, MaxStreams int
	// Caller returns the name of the caller of a context that Authorize, or an interceptor of Options, has returned: no caller has all
	// of MaxCalls or MaxStreams (see fairshare). Empty: not known. Nil: none is.
	Caller func(ctx context.Context) string
	// Panicked is called with each panic of a handler, which was recovered. It must not hold secrets of the request's back.
	Panicked func(method string, p *recovered.Error)
}

// Calls checks the calls of a gRPC server before their messages are read: it authorizes them, answers compressed requests
// UNIMPLEMENTED whichever compressors the process has registered (a compressed message of 4 KiB can hold 4 MiB), and ends calls
// whose first message does not come. A handler that panics ends its own call with INTERNAL. It is safe for concurrent use.
//
// Calls are not denied in gRPC's tap handle: grpc-go (1.85) keeps the timer of a call that the tap handle denies, and its headers
// with it, for as long as the caller's grpc-timeout says. A handler that returns before it reads costs no more, and ends the call.
type Calls struct {
	cfg            CallsConfig
	patience       time.Duration // EndPatience
	anonymous      anonymousCalls
	calls, streams atomic.Int64 // that are being carried out

	ofCallers struct{ calls, streams *fairshare.Places } // those of them whose callers are known
}

// NewCalls returns Calls. A server needs its Options, and its unary services registered through Registrar.
func NewCalls(cfg CallsConfig) *Calls {
	c := &Calls{cfg: cfg, patience: EndPatience}
	c.ofCallers.calls, c.ofCallers.streams = fairshare.New(cfg.MaxCalls), fairshare.New(cfg.MaxStreams)
	return c
}

// Options returns the options of the server. Interceptors that authorize streams are given here, and come after the checks and
// before the bounds of Calls; others come later.
func (c *Calls) Options(authorize ...grpc.StreamServerInterceptor) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.InTapHandle(tapped), grpc.ChainStreamInterceptor(slices.Concat([]grpc.StreamServerInterceptor{c.check}, authorize, []grpc.StreamServerInterceptor{c.bound})...),
	}
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
	if p, ok := peer.FromContext(ctx); ok {
		if conn := Of(p.Addr); !conn.IsAuthenticated() {
			conn.callBegan()
			context.AfterFunc(ctx, conn.callEnded) // gRPC ends it with the call
		}
	}
	c := new(call)
	c.Context, c.end = context.WithCancelCause(ctx)
	return c, nil
}

// What ends a call, beside its end.
var (
	errFirstMessage     = status.Error(codes.DeadlineExceeded, "no message came in time")
	errTooManyAnonymous = status.Error(codes.ResourceExhausted, "too many calls of callers who are not authenticated")
	errAge              = status.Error(codes.Unavailable, "the connection is too old")
	errShare            = status.Error(codes.ResourceExhausted, "this caller has its share of calls and streams at a time already")
	errTooMany          = status.Error(codes.Unavailable, "too many connections")
)

// begin counts a call that is authorized, before its first message has been read, and ends it if that does not come in time. came
// is to be called when it has, done when the call is over.
func (c *Calls) begin(ctx context.Context) (came, done func(), err error) {
	call, ok := ctx.Value(callKey{}).(*call)
	if !ok {
		return nothing, nothing, nil
	}
	var conn *Conn
	if p, ok := peer.FromContext(ctx); ok {
		conn = Of(p.Addr)
	}
	came, leave := nothing, nothing
	if c.cfg.Authorize == nil && !conn.Authenticated("") {
		return nil, nil, errTooMany
	}
	if c.cfg.MaxAnonymous > 0 && !conn.IsAuthenticated() {
		leave = c.anonymous.enter(call, conn.source.prefix, c.cfg.MaxAnonymous)
	}
	if c.cfg.FirstMessage > 0 {
		came = after(c.cfg.FirstMessage, call, errFirstMessage)
	}
	return came, func() { came(); leave() }, nil
}

// EndPatience is how long a stream whose context is done because of its connection's age may go on before its reads fail: longer
// than handlers wait for anything.
const EndPatience = time.Minute + 5*time.Second

// age returns the context of a stream that ends with the age of its connection. gRPC's own would end reads, and with a read that
// fails the stream, before the handler has sent what it has yet to send.
func (c *Calls) age(ctx context.Context) (_ context.Context, stop func()) {
	p, _ := peer.FromContext(ctx)
	call, ok := ctx.Value(callKey{}).(*call)
	if c.cfg.MaxAge == 0 || p == nil || !ok || Of(p.Addr) == nil {
		return ctx, nothing
	}
	left := time.Until(Of(p.Addr).Served().Add(c.cfg.MaxAge))
	ctx, end := context.WithCancelCause(ctx)
	handler := time.AfterFunc(left, func() { end(errAge) })
	reads := after(left+c.patience, call, errAge)
	return ctx, func() {
		handler.Stop()
		reads()
		end(nil)
	}
}

func nothing() {}

// after ends a call after a while, until the returned function is called.
func after(d time.Duration, c *call, why error) (stop func()) {
	timer := time.AfterFunc(d, func() { c.end(why) })
	return func() { timer.Stop() }
}

// outcome is err, or why the call was ended before it was over. Age ends what goes on for ever, in good order: it counts only
// where the handler has an error.
func outcome(ctx context.Context, err error) error {
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errFirstMessage), errors.Is(cause, errTooManyAnonymous), err != nil && errors.Is(cause, errAge):
		return cause
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

// enter counts one more of what there may be so many of at a time; 0 stands for any number. It is given back with Add(-1).
func enter(open *atomic.Int64, most int, what string) error {
	if n := open.Add(1); most == 0 || n <= int64(most) {
		return nil
	}
	open.Add(-1)
	return status.Errorf(codes.ResourceExhausted, "there are %d %s at a time already, as many as this node has memory for", most, what)
}

// share takes one of the places for the caller of ctx, if it has a name and its share is not full. done gives it back.
func (c *Calls) share(ctx context.Context, p *fairshare.Places) (done func(), err error) {
	if c.cfg.Caller == nil {
		return nothing, nil
	}
	who := c.cfg.Caller(ctx)
	if who == "" {
		return nothing, nil
	}
	taken := p.Take(who, 1)
	if taken.N == 0 {
		return nil, errShare
	}
	return func() { p.Give(taken) }, nil
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
		if err := enter(&c.calls, c.cfg.MaxCalls, "calls"); err != nil {
			return nil, err
		}
		defer c.calls.Add(-1)
		err = c.handled(method, func() (err error) {
			if err := uncompressed(ctx); err != nil {
				return err
			}
			if c.cfg.Authorize != nil {
				if ctx, err = c.cfg.Authorize(ctx, method); err != nil {
					return err
				}
			}
			leave, err := c.share(ctx, c.ofCallers.calls)
			if err != nil {
				return err
			}
			defer leave()
			came, done, err := c.begin(ctx)
			if err != nil {
				return err
			}
			defer done()
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

// check is the interceptor of streams that comes before they are authorized.
func (c *Calls) check(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if err := enter(&c.streams, c.cfg.MaxStreams, "streams"); err != nil {
		return err
	}
	defer c.streams.Add(-1)
	return c.handled(info.FullMethod, func() error {
		if err := uncompressed(s.Context()); err != nil {
			return err
		}
		return handle(srv, s)
	})
}

// bound is the interceptor of streams that are authorized.
func (c *Calls) bound(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	leave, err := c.share(s.Context(), c.ofCallers.streams)
	if err != nil {
		return err
	}
	defer leave()
	came, done, err := c.begin(s.Context())
	if err != nil {
		return err
	}
	defer done()
	ctx, stop := c.age(s.Context())
	defer stop()
	return outcome(ctx, handle(srv, &boundStream{s, ctx, came, false}))
}

// boundStream is a stream whose first message is awaited, and which ends with its connection's age.
type boundStream struct {
	grpc.ServerStream
	ctx  context.Context
	came func()
	read bool // RecvMsg has returned
}

// Context implements grpc.ServerStream.
func (s *boundStream) Context() context.Context { return s.ctx }

// RecvMsg implements grpc.ServerStream.
func (s *boundStream) RecvMsg(m any) error {
	err := s.ServerStream.RecvMsg(m)
	if !s.read {
		s.read = true
		s.came()
	}
	return err
}

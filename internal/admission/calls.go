package admission

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/panics"
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
	// MaxCalls is how many unary calls may be carried out at a time, on all connections together. More are answered UNAVAILABLE before
	// anything of them is read.
	MaxCalls int
	// Memory has the bytes of connections and streams (see ListenerConfig), and StreamBytes is what a stream takes of them. One more than
	// fits is answered UNAVAILABLE before anything of it is read. Nil: any number.
	Memory      *fairshare.Places
	StreamBytes int
	// Caller returns the caller of a context that Authorize, or an interceptor of Options, has returned, and whether it is authenticated:
	// its connection counts as such then, and no caller has all of MaxCalls or Memory (see fairshare). An empty name: it is not
	// known which one it is. Nil: all callers are authenticated, and not told apart.
	Caller func(ctx context.Context) (name string, authenticated bool)
	// Ended is called after each handler of a unary call that did not panic, with what Authorize returned, the time that reading and
	// answering took, and the handler's error. Nil: nothing is called.
	Ended func(ctx context.Context, method string, took time.Duration, err error)
	// Panicked is called with each panic of a handler, which was recovered. The panic's value may hold secrets of the request.
	Panicked func(method string, p *panics.Error)
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
	calls, streams room
}

// NewCalls returns Calls. A server needs its Options, and its unary services registered through Registrar.
func NewCalls(cfg CallsConfig) *Calls {
	c := &Calls{cfg: cfg, patience: EndPatience}
	if cfg.Memory == nil {
		cfg.Memory = fairshare.New(0)
	}
	c.calls = room{places: fairshare.New(cfg.MaxCalls), each: 1}
	c.streams = room{places: cfg.Memory, each: cfg.StreamBytes}
	return c
}

// InUse returns how many unary calls and streams are carried out.
func (c *Calls) InUse() (calls, streams int) {
	return int(c.calls.open.Load()), int(c.streams.open.Load())
}

// Options returns the options of the server. Interceptors that authorize streams are given here, and come after the checks and
// before the bounds of Calls; others come later.
func (c *Calls) Options(authorize ...grpc.StreamServerInterceptor) []grpc.ServerOption {
	streams := append(append([]grpc.StreamServerInterceptor{c.check}, authorize...), c.bound)
	return []grpc.ServerOption{grpc.InTapHandle(tapped), grpc.ChainStreamInterceptor(streams...)}
}

// tapped counts a call of an anonymous connection.
func tapped(ctx context.Context, _ *tap.Info) (context.Context, error) {
	if p, ok := peer.FromContext(ctx); ok {
		if conn := ConnOf(p.Addr); !conn.IsAuthenticated() {
			conn.callBegan()
			context.AfterFunc(ctx, conn.callEnded) // gRPC ends it with the call
		}
	}
	return ctx, nil
}

// transportStream is what gRPC's stream of a call has beside the methods of grpc.ServerTransportStream.
type transportStream interface {
	RecvCompress() string
	// WriteStatus ends the call for its caller, whatever its handler waits for: reads and writes fail, the context is done, and another
	// status, such as the handler's, is not sent any more.
	WriteStatus(*status.Status) error
}

// call is a call that is authorized and carried out.
type call struct {
	calls  *Calls
	stream transportStream
	read   func(any) error // of a unary call
	room   *room
	place  fairshare.Taken
	began  bool        // it is counted in the room
	leave  func()      // those that are anonymous; nil: it is not one
	late   *time.Timer // ends the call, whose first message has not come; nil: it has all the time
}

// What ends a call, beside its end.
var (
	noMessage        = status.New(codes.DeadlineExceeded, "no message came in time")
	tooManyAnonymous = status.New(codes.Unavailable, "too many calls of callers who are not authenticated")
	tooOld           = status.New(codes.Unavailable, "the connection is too old")
	errAge           = tooOld.Err()
	errFull          = status.Error(codes.Unavailable, "this node, or the caller, has as many calls as it has memory for")
	errTooMany       = status.Error(codes.Unavailable, "this node has too many connections: max-connections, max-connections-per-source, or its memory")
)

// begin counts a call that is authorized, before its first message has been read, and ends it if that does not come in time.
func (k *call) begin(ctx context.Context) error {
	c := k.calls
	var conn *Conn
	if p, ok := peer.FromContext(ctx); ok {
		conn = ConnOf(p.Addr)
	}
	name, authenticated := "", true
	if c.cfg.Caller != nil {
		name, authenticated = c.cfg.Caller(ctx)
	}
	if authenticated && !conn.Authenticated(name) {
		return errTooMany
	}
	if k.place, k.began = k.room.places.TakeAll(name, k.room.each); !k.began {
		return errFull
	}
	k.room.open.Add(1)
	if c.cfg.MaxAnonymous > 0 && !conn.IsAuthenticated() {
		k.leave = c.anonymous.enter(k, conn.source.prefix, c.cfg.MaxAnonymous)
	}
	if c.cfg.FirstMessage > 0 {
		k.late = time.AfterFunc(c.cfg.FirstMessage, func() { k.end(noMessage) })
	}
	return nil
}

// receive reads the message of a unary call.
func (k *call) receive(m any) error {
	err := k.read(m)
	k.came()
	return err
}

// came notes that the first message has come, or that the call is over.
func (k *call) came() {
	if k.late != nil {
		k.late.Stop()
	}
}

// end ends a call before its handler does.
func (k *call) end(why *status.Status) {
	_ = k.stream.WriteStatus(why) // fails with the connection, and the call with it
}

// done gives back what begin has taken.
func (k *call) done() {
	k.came()
	if k.leave != nil {
		k.leave()
	}
	if k.began {
		k.room.places.Give(k.place)
		k.room.open.Add(-1)
	}
}

// EndPatience is how long a stream whose context is done because of its connection's age may go on before its reads fail: longer
// than handlers wait for anything.
const EndPatience = time.Minute + 5*time.Second

// age returns the context of a stream that ends with the age of its connection. gRPC's own would end reads, and with a read that
// fails the stream, before the handler has sent what it has yet to send.
func (k *call) age(ctx context.Context) (_ context.Context, stop func()) {
	p, _ := peer.FromContext(ctx)
	if k.calls.cfg.MaxAge == 0 || p == nil || ConnOf(p.Addr) == nil {
		return ctx, func() {}
	}
	left := time.Until(ConnOf(p.Addr).Served().Add(k.calls.cfg.MaxAge))
	ctx, end := context.WithCancelCause(ctx)
	handler := time.AfterFunc(left, func() { end(errAge) })
	reads := time.AfterFunc(left+k.calls.patience, func() { k.end(tooOld) })
	return ctx, func() {
		handler.Stop()
		reads.Stop()
		end(nil)
	}
}

// uncompressed returns the stream of a call, or the error for one whose request is compressed.
func uncompressed(ctx context.Context) (transportStream, error) {
	s, ok := grpc.ServerTransportStreamFromContext(ctx).(transportStream)
	if !ok {
		return nil, status.Error(codes.Internal, "calls of this transport cannot be ended")
	}
	if s.RecvCompress() != "" && s.RecvCompress() != encoding.Identity {
		return nil, status.Error(codes.Unimplemented, "grpc-encoding: compressed requests are not read; send identity")
	}
	return s, nil
}

// room is for as many calls, or streams, as may be carried out at a time.
type room struct {
	places *fairshare.Places
	each   int // places that one takes
	open   atomic.Int64
}

// ErrPanicked answers a request of which something has panicked.
var ErrPanicked = status.Error(codes.Internal, "the request could not be carried out because of a mistake in the server")

// answerPanic turns the panic of a handler into INTERNAL. It is to be deferred.
func (c *Calls) answerPanic(method string, err *error) {
	p := panics.From(recover())
	if p == nil {
		return
	}
	if c.cfg.Panicked != nil {
		c.cfg.Panicked(method, p)
	}
	*err = ErrPanicked
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
		m.Handler = r.calls.unary("/"+desc.ServiceName+"/"+m.MethodName, m.Handler)
		checked.Methods[i] = m
	}
	r.to.RegisterService(&checked, impl)
}

// unary is the handler of a unary method with the checks before it.
func (c *Calls) unary(method string, handler grpc.MethodHandler) grpc.MethodHandler {
	return func(srv any, ctx context.Context, read func(any) error, i grpc.UnaryServerInterceptor) (_ any, err error) {
		defer c.answerPanic(method, &err)
		stream, err := uncompressed(ctx)
		if err != nil {
			return nil, err
		}
		if c.cfg.Authorize != nil {
			if ctx, err = c.cfg.Authorize(ctx, method); err != nil {
				return nil, err
			}
		}
		k := &call{calls: c, stream: stream, read: read, room: &c.calls}
		defer k.done()
		if err := k.begin(ctx); err != nil {
			return nil, err
		}
		began := time.Now()
		out, err := handler(srv, ctx, k.receive, i)
		if c.cfg.Ended != nil {
			c.cfg.Ended(ctx, method, time.Since(began), err)
		}
		return out, err
	}
}

// check is the interceptor of streams that comes before they are authorized.
func (c *Calls) check(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) (err error) {
	defer c.answerPanic(info.FullMethod, &err)
	if _, err := uncompressed(s.Context()); err != nil {
		return err
	}
	return handle(srv, s)
}

// bound is the interceptor of streams that are authorized.
func (c *Calls) bound(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	stream, err := uncompressed(s.Context())
	if err != nil {
		return err
	}
	k := &call{calls: c, stream: stream, room: &c.streams}
	defer k.done()
	if err := k.begin(s.Context()); err != nil {
		return err
	}
	ctx, stop := k.age(s.Context())
	defer stop()
	if err = handle(srv, &boundStream{s, ctx, k}); err != nil && errors.Is(context.Cause(ctx), errAge) {
		return errAge
	}
	return err
}

// boundStream is a stream whose first message is awaited, and which ends with its connection's age.
type boundStream struct {
	grpc.ServerStream
	ctx  context.Context
	call *call
}

// Context implements grpc.ServerStream.
func (s *boundStream) Context() context.Context { return s.ctx }

// RecvMsg implements grpc.ServerStream.
func (s *boundStream) RecvMsg(m any) error {
	err := s.ServerStream.RecvMsg(m)
	s.call.came()
	return err
}

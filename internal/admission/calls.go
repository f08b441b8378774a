package admission

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
	"github.com/weirlimit/weir/internal/panics"
)

// CallsConfig configures Calls. A zero field turns its check off.
type CallsConfig struct {
	// Authorize authorizes a unary call by its incoming context and its method (the full name), before its request is
	// read. It returns the context for the handler, or the status to answer. Streams are authorized by an interceptor
	// (see Options).
	Authorize func(ctx context.Context, method string) (context.Context, error)
	// MaxAge is the age of a connection at which the contexts of its streams end. Their reads fail EndPatience later.
	// The server should have asked the caller to open another connection before that. See
	// keepalive.ServerParameters.MaxConnectionAge.
	MaxAge time.Duration
	// Ends ends the contexts of streams as well: a caller that watches health would otherwise keep a server running.
	// Nil: nothing but MaxAge does.
	Ends context.Context
	// FirstMessage bounds the time from a call's headers to its first message.
	FirstMessage time.Duration
	// MaxCalls bounds the unary calls in progress, on all connections together. One more is answered UNAVAILABLE before
	// its request is read.
	MaxCalls int
	// Memory has the bytes of connections and streams (see ListenerConfig). A stream takes StreamBytes of them. A
	// stream that does not fit is answered UNAVAILABLE before anything of it is read. Nil: no bound.
	Memory      *fairshare.Places
	StreamBytes int
	// Caller returns the caller of a context that Authorize or an interceptor of Options has returned, and whether the
	// caller is authenticated. If it is, its connection counts as authenticated. No caller gets all of MaxCalls or
	// Memory (see fairshare); an empty name, of a caller that is not known by name, is not bounded so. Nil: all callers
	// are authenticated, and have no names.
	Caller func(ctx context.Context) (name string, authenticated bool)
	// Ended, if set, is called after each handler of a unary call whose request came, unless the handler panicked. It
	// gets the context that Authorize returned, the time from when the request had come to the handler's return, and
	// the handler's error.
	Ended func(ctx context.Context, method string, took time.Duration, err error)
	// Panicked, if set, is called with each panic of a handler, which was recovered. The panic's value may hold secrets
	// of the request.
	Panicked func(method string, p *panics.Error)
}

// Calls checks the calls of a gRPC server before their messages are read. It is safe for concurrent use.
//
// The path of a call:
//
//	tapped             counts it if its connection is anonymous (Frames uses the count)
//	unary, check       answers UNIMPLEMENTED if the request is compressed
//	Authorize          authorizes it; for streams the interceptors that Options was given do
//	begin              takes its place and memory, and starts the timer for its first message
//	the handler        runs; a panic becomes INTERNAL
//	done               gives back its place and memory, once its answers are written (see answer)
//
// A compressed message of 4 KiB can hold 4 MiB, so requests must not be compressed, whichever compressors the process
// has registered. Calls are not denied in gRPC's tap handle: for a call that it denies, grpc-go (1.85) keeps a timer
// and the headers for as long as the caller's grpc-timeout says. To return from a handler before the first read costs
// no more, and ends the call.
type Calls struct {
	cfg            CallsConfig
	patience       time.Duration // EndPatience
	calls, streams room
}

// NewCalls returns Calls. A server needs its Options, and must register its unary services with its Registrar.
func NewCalls(cfg CallsConfig) *Calls {
	c := &Calls{cfg: cfg, patience: EndPatience}
	if cfg.Memory == nil {
		cfg.Memory = fairshare.New(0)
	}
	c.calls = room{places: fairshare.New(cfg.MaxCalls), each: 1}
	c.streams = room{places: cfg.Memory, each: cfg.StreamBytes}
	return c
}

// InUse returns how many unary calls and streams are in progress.
func (c *Calls) InUse() (calls, streams int) {
	return int(c.calls.open.Load()), int(c.streams.open.Load())
}

// Options returns the options of the server. The interceptors in authorize run after check and before bound; they
// authorize streams. Interceptors that the server adds itself run later.
func (c *Calls) Options(authorize ...grpc.StreamServerInterceptor) []grpc.ServerOption {
	streams := append(append([]grpc.StreamServerInterceptor{c.check}, authorize...), c.bound)
	return []grpc.ServerOption{grpc.InTapHandle(tapped), grpc.ChainStreamInterceptor(streams...)}
}

// tapped counts the call if its connection is anonymous.
func tapped(ctx context.Context, _ *tap.Info) (context.Context, error) {
	if p, ok := peer.FromContext(ctx); ok {
		if conn := ConnOf(p.Addr); !conn.IsAuthenticated() {
			conn.callBegan()
			context.AfterFunc(ctx, conn.callEnded) // gRPC ends ctx with the call
		}
	}
	return ctx, nil
}

// transportStream has the methods of gRPC's stream of a call that grpc.ServerTransportStream lacks.
type transportStream interface {
	RecvCompress() string
	// WriteStatus ends the call for its caller while the handler runs: reads and writes fail, the context is done, and
	// a later status, such as the handler's, is not sent.
	WriteStatus(*status.Status) error
}

// call is an authorized call in progress.
type call struct {
	calls  *Calls
	stream transportStream
	read   func(any) error // only of a unary call
	room   *room
	place  fairshare.Taken
	began  bool         // room counts it
	holds  atomic.Int32 // its handler, and its answers that are not written
	only   answer       // of a unary call
	conn   *Conn
	// buffered is below conn; nil: answers are not counted.
	buffered *conn
	asked    time.Time   // when the request of a unary call had come; zero: it has not
	late     *time.Timer // ends the call if its first message does not come; nil: no bound
}

// The statuses of calls that Calls ends or does not begin.
var (
	noMessage = status.New(codes.DeadlineExceeded, "no message came in time")
	tooOld    = status.New(codes.Unavailable, "the connection is too old")
	errAge    = tooOld.Err()
	errFull   = status.Error(codes.Unavailable,
		"this node, or the caller, has as many calls as it has memory for")
	errTooMany = status.Error(codes.Unavailable,
		"this node has too many connections: max-connections, max-connections-per-source, or its memory")
)

// begin counts an authorized call, before its first message is read, and starts the timer that ends it if this message
// does not come.
func (k *call) begin(ctx context.Context) error {
	c := k.calls
	k.holds.Store(1)
	if p, ok := peer.FromContext(ctx); ok {
		k.conn = ConnOf(p.Addr)
		k.buffered = k.conn.buffered()
	}
	name, authenticated := "", true
	if c.cfg.Caller != nil {
		name, authenticated = c.cfg.Caller(ctx)
	}
	if authenticated && !k.conn.Authenticated(name) {
		return errTooMany
	}
	if k.place, k.began = k.room.places.TakeAll(name, k.room.each); !k.began {
		return errFull
	}
	k.room.open.Add(1)
	if c.cfg.FirstMessage > 0 {
		k.late = time.AfterFunc(c.cfg.FirstMessage, func() { k.end(noMessage) })
	}
	return nil
}

// receive reads the request of a unary call.
func (k *call) receive(m any) error {
	err := k.read(m)
	k.read = nil // it refers to gRPC's buffer of the request, which may be that of the answer next, and would keep it
	if k.came(); err == nil {
		k.asked = time.Now()
	}
	return err
}

// came notes that the first message has come, or that the call is over.
func (k *call) came() {
	if k.late != nil {
		k.late.Stop()
	}
}

// end ends a call before its handler returns.
func (k *call) end(why *status.Status) {
	_ = k.stream.WriteStatus(why) // fails only if the connection has ended, and the call with it
}

// done undoes begin. The answers of anonymous connections, which maxUnread bounds, hold no place: together they could
// otherwise hold all.
func (k *call) done() {
	k.came()
	if !k.conn.IsAuthenticated() {
		k.leave()
	}
	k.letGo()
}

// letGo ends what holds the call's place. The last one gives it back.
func (k *call) letGo() {
	if k.holds.Add(-1) == 0 {
		k.leave()
	}
}

// leave gives the call's place back. A second call does nothing.
func (k *call) leave() {
	if k.began {
		k.began = false
		k.room.places.Give(k.place)
		k.room.open.Add(-1)
	}
}

// EndPatience is the time from the end of a stream's context, because of its connection's age, to the failure of its
// reads. It is longer than any handler waits.
const EndPatience = time.Minute + 5*time.Second

// until returns a context for a stream that ends with CallsConfig.Ends, and at MaxAge of its connection. gRPC's own
// bound, MaxConnectionAgeGrace, closes the connection, so that reads fail before the handler has sent all its answers.
func (k *call) until(ctx context.Context) (_ context.Context, stop func()) {
	ctx, end := context.WithCancelCause(ctx)
	stops := []func() bool{}
	if ends := k.calls.cfg.Ends; ends != nil {
		stops = append(stops, context.AfterFunc(ends, func() { end(nil) }))
	}
	if k.calls.cfg.MaxAge != 0 && k.conn != nil {
		left := time.Until(k.conn.Served().Add(k.calls.cfg.MaxAge))
		stops = append(stops, time.AfterFunc(left, func() { end(errAge) }).Stop,
			time.AfterFunc(left+k.calls.patience, func() { k.end(tooOld) }).Stop)
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
		end(nil)
	}
}

// uncompressed returns the transport's stream of a call, or an error if the request is compressed.
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

// room bounds the unary calls, or the streams, in progress.
type room struct {
	places *fairshare.Places
	each   int // places that one call or stream takes
	open   atomic.Int64
}

// ErrPanicked answers a request whose handler panicked.
var ErrPanicked = status.Error(codes.Internal,
	"the request could not be carried out because of a mistake in the server")

// answerPanic turns the panic of a handler into INTERNAL. The caller must defer it.
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

// Registrar returns a registrar that adds the checks to the unary methods of the services registered with it. The
// interceptors in Options check streams of all services.
func (c *Calls) Registrar(r grpc.ServiceRegistrar) grpc.ServiceRegistrar { return Wrapped{r, c.unary} }

// Wrapped is a registrar that replaces the handlers of the unary methods of the services registered with it. Wrap gets
// a method's full name and its handler.
type Wrapped struct {
	To   grpc.ServiceRegistrar
	Wrap func(method string, handler grpc.MethodHandler) grpc.MethodHandler
}

// RegisterService implements grpc.ServiceRegistrar.
func (r Wrapped) RegisterService(desc *grpc.ServiceDesc, impl any) {
	wrapped := *desc
	wrapped.Methods = slices.Clone(desc.Methods)
	for i, m := range desc.Methods {
		wrapped.Methods[i].Handler = r.Wrap("/"+desc.ServiceName+"/"+m.MethodName, m.Handler)
	}
	r.To.RegisterService(&wrapped, impl)
}

// unary returns the handler of a unary method with the checks before it.
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
		out, err := handler(srv, ctx, k.receive, i)
		if c.cfg.Ended != nil && !k.asked.IsZero() {
			c.cfg.Ended(ctx, method, time.Since(k.asked), err)
		}
		if err != nil {
			return nil, err
		}
		return k.answer(out), nil
	}
}

// check is the first interceptor of streams, before they are authorized.
func (c *Calls) check(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo,
	handle grpc.StreamHandler) (err error) {
	defer c.answerPanic(info.FullMethod, &err)
	if _, err := uncompressed(s.Context()); err != nil {
		return err
	}
	return handle(srv, s)
}

// bound is the interceptor of streams after they were authorized.
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
	ctx, stop := k.until(s.Context())
	defer stop()
	if err = handle(srv, &boundStream{s, ctx, k}); err != nil && errors.Is(context.Cause(ctx), errAge) {
		return errAge
	}
	return err
}

// boundStream notes the first message of a stream, and has the context of until.
type boundStream struct {
	grpc.ServerStream
	ctx  context.Context
	call *call
}

// Context implements grpc.ServerStream.
func (s *boundStream) Context() context.Context { return s.ctx }

// SendMsg implements grpc.ServerStream.
func (s *boundStream) SendMsg(m any) error { return s.ServerStream.SendMsg(s.call.answer(m)) }

// RecvMsg implements grpc.ServerStream.
func (s *boundStream) RecvMsg(m any) error {
	err := s.ServerStream.RecvMsg(m)
	s.call.came()
	return err
}

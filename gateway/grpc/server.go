// Package grpc serves callers over gRPC: the service Limiter of weir.v1. It converts messages to checks, has a
// limiter.BatchService decide them, and converts the decisions to messages, for unary calls and for CheckStream.
//
// It decides nothing. It does not promise that a check without an answer was not carried out, that the answers of a
// stream have the order of its checks, or that a stream stays open whose caller does not read.
package grpc

import (
	"context"
	"errors"
	"math/bits"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// This file has the unary calls. Check reuses its memory: handleCheck takes a call from the pool, decode reads the
// request, check decides it, and the codec returns the call to the pool (Recycle). The methods of operations.go have
// generated handlers, which admitted wraps.

// ServerConfig is what a Server needs. Service, Lender, Status, TopKeys, Topology and Panicked are required.
type ServerConfig struct {
	Service limiter.BatchService
	// Lender lends units to callers.
	Lender limit.Lender
	// Kept is a budget in bytes for the targets that open streams have defined, shared among callers by name; nil: no
	// bound.
	Kept *fairshare.Places
	// Caller returns the name of the authenticated caller, which separates the borrowers of different callers. Required
	// for Kept and Lender.
	Caller func(context.Context) string
	// Status describes the cluster.
	Status func(context.Context) *weirv1.StatusResponse
	// TopKeys returns the most used keys. Its error is a *limit.Error.
	TopKeys func(context.Context, *weirv1.TopKeysRequest) (*weirv1.TopKeysResponse, error)
	// Topology returns the owners of all keys, and a channel that is closed when they may have changed. denied is the
	// error for a caller without the right to know.
	Topology func(context.Context) (now *weirv1.TopologyResponse, changed <-chan struct{}, denied *limit.Error)
	// Ready says whether the node can decide, and returns a channel that is closed when that changes. Nil: it always
	// can.
	Ready func() (ready bool, changed <-chan struct{})
	// Observe, when set, is called for each request of checks in a CheckStream: took is the time until its last answer
	// was sent, failed the code of the error that it got in place of answers, or OK. It must return at once.
	Observe func(took time.Duration, failed codes.Code)
	// Trace, when set, is called for each check of a CheckStream. parent is the trace context that its caller has sent:
	// limiter.TraceContext bytes, or empty. below is the context for the spans of the decision (see
	// limiter.Batch.Traces); end ends the span with the code of the answer, and is nil when the check is not traced.
	Trace func(parent string) (below string, end func(codes.Code))
	// WriteTimeout bounds how long a Send may wait for the caller of a stream to read; after that the stream ends.
	// EndUnread applies it to streams of other services. 0: no bound.
	WriteTimeout time.Duration
	// MaxUnread is about how many bytes of answers may wait for the callers of all CheckStreams to read. Beyond it the
	// stream with the most is ended. Answers that gRPC has taken, at most 64 KiB of a stream, are not counted. 0: no
	// bound.
	MaxUnread int64
	// Requests bounds the bytes that requests take from decoding until they are answered. Small requests are not
	// counted. Nil: no bound.
	Requests *admission.Gate
	// Panicked is called with each panic in a stream. The stream ends with admission.ErrPanicked.
	Panicked func(method string, p *panics.Error)
}

// Server implements weirv1.LimiterServer. Its methods are safe for concurrent use.
type Server struct {
	weirv1.UnimplementedLimiterServer
	svc     limiter.BatchService
	cfg     ServerConfig
	batches sync.Pool // of *limiter.Batch
	calls   sync.Pool // of *call
	rooms   rooms
	// golang.org/x/net/trace keeps the messages of calls for its page, so that call must not be reused
	traced  bool
	readers sync.WaitGroup // handlers of streams
	unread  unread         // of CheckStreams
}

// NewServer returns a Server. Close it when done.
func NewServer(cfg ServerConfig) *Server {
	s := &Server{svc: cfg.Service, cfg: cfg, traced: grpc.EnableTracing,
		unread: unread{of: make(map[*checkStream]int64)}}
	s.batches.New = func() any { return new(limiter.Batch) }
	s.calls.New = func() any {
		c := &call{server: s, admission: callMemory{gate: cfg.Requests}}
		c.request.Admit = c.admit
		return c
	}
	return s
}

// call holds a unary Check while it is carried out, and is reused. It is the message that answers the call. It has no
// room until the request has come, because the request may take long.
type call struct {
	weirv1.CheckResponse
	*room     // nil until the number of checks is known
	server    *Server
	admission callMemory
	request   wire.Lenient
	ctx       context.Context // of the call; set while its request is decoded
	in        *weirv1.CheckRequest
}

// room is the memory for a number of checks and their answers: 59 KB for 100.
type room struct {
	checks  []limit.Check
	results []limit.Result
	answers []decided
	out     []*weirv1.Result
}

// rooms are pools of room by size, a power of two. A call with few checks, which no gate counts, so never holds the
// memory of many.
type rooms [11]sync.Pool // the last one is for 1024 checks

// size is the index of the pool for n checks, n at least 1.
func (*rooms) size(n int) int { return bits.Len(uint(n - 1)) }

// grow takes a room for n checks, 1 to limit.MaxBatch.
func (c *call) grow(n int) {
	size := c.server.rooms.size(n)
	r, ok := c.server.rooms[size].Get().(*room)
	if !ok {
		all := 1 << size
		r = &room{make([]limit.Check, all), make([]limit.Result, all), make([]decided, all),
			make([]*weirv1.Result, all)}
	}
	r.checks, r.results, r.answers, r.out = r.checks[:n], r.results[:n], r.answers[:n], r.out[:n]
	c.room, c.Results = r, r.out
}

// Recycle implements wire.Recycled: it empties the call and its room and returns both to their pools.
func (c *call) Recycle() {
	if c.server.traced {
		return
	}
	if r := c.room; r != nil {
		clear(r.checks)
		clear(r.results)
		clear(r.answers)
		clear(r.out)
		c.server.rooms[c.server.rooms.size(len(r.checks))].Put(r)
	}
	c.in, c.room, c.Results = nil, nil, nil
	c.server.calls.Put(c)
}

// admit waits for room in the gate for a request that has come, and takes a message from the pool to decode it into.
func (c *call) admit(size int) error {
	err := c.admission.enter(c.ctx, size, leastCheck)
	if err == nil {
		c.in = weirv1.CheckRequestFromVTPool()
		c.request.Message = c.in
	}
	return err
}

// decode reads the request of a call.
func (c *call) decode(ctx context.Context, read func(any) error) error {
	c.ctx = ctx
	err := read(&c.request)
	if err == nil {
		err = undecoded(&c.request)
	}
	c.ctx, c.request.Message, c.request.Err = nil, nil, nil
	return err
}

// Close waits for every goroutine of streams. The gRPC server must have been stopped before.
func (s *Server) Close() { s.readers.Wait() }

// Register adds the Server to a gRPC server, which must use wire.ServerCodec.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	wrap := func(method string, handler grpc.MethodHandler) grpc.MethodHandler {
		if method == weirv1.Limiter_Check_FullMethodName {
			return s.handleCheck()
		}
		return admitted(handler, s.cfg.Requests)
	}
	weirv1.RegisterLimiterServer(admission.Wrapped{To: r, Wrap: wrap}, s)
}

// handleCheck returns a handler for Check that reuses memory. The request goes back to its pool as soon as its checks
// are read, because a call may wait long and 1000 checks take 250 KB in this form; the answer when it has been
// marshalled. Interceptors see a *call as request and as answer.
func (s *Server) handleCheck() grpc.MethodHandler {
	info := &grpc.UnaryServerInfo{Server: s, FullMethod: weirv1.Limiter_Check_FullMethodName}
	check := s.check // made once
	return func(_ any, ctx context.Context, dec func(any) error, i grpc.UnaryServerInterceptor) (_ any, err error) {
		c := s.calls.Get().(*call)
		defer func() {
			if c.admission.leave(); err != nil {
				c.Recycle() // after a success the codec does so when it has marshalled c
			}
		}()
		if err := c.decode(ctx, dec); err != nil {
			return nil, err
		}
		c.admission.keep(len(c.in.Checks))
		if i == nil {
			return check(ctx, c)
		}
		return i(ctx, c, info, check)
	}
}

// undecoded returns the status of a message that could not be decoded, and nil for a decoded one.
func undecoded(m *wire.Lenient) error {
	if m.Err == nil {
		return nil
	}
	if bad, ok := errors.AsType[*limit.Error](m.Err); ok {
		return statusOf(bad)
	}
	if _, ok := status.FromError(m.Err); ok { // from Admit
		return m.Err
	}
	return status.Error(codes.InvalidArgument, "malformed message: "+m.Err.Error())
}

// check carries out a *call. It returns the request to its pool when the checks are read.
func (s *Server) check(ctx context.Context, of any) (any, error) {
	c := of.(*call)
	in := c.in
	if err := limit.ValidBatch(len(in.Checks)); err != nil {
		return nil, statusOf(err)
	}
	c.grow(len(in.Checks))
	for i, check := range in.Checks {
		t, err := wire.Target(check.GetTarget())
		if err != nil {
			return nil, statusOf(err.In(i, len(in.Checks)))
		}
		c.checks[i] = limit.Check{Target: t, Cost: wire.Cost(check.Cost), Partial: check.Partial,
			RequestID: check.RequestId}
	}
	atomic := in.Atomic
	// append rounds capacities up. A request with room for more checks than that is left to the garbage collector.
	if c.in = nil; cap(in.Checks) <= 2*limit.MaxBatch {
		in.ReturnToVTPool()
	}
	if atomic {
		return c, s.checkAll(ctx, c)
	}
	if err := s.svc.CheckTo(ctx, c.checks, nil, c.results); err != nil {
		return nil, statusOf(err)
	}
	c.Allowed, c.DelayNs = true, 0
	failed := 0
	for i := range c.results {
		r := &c.results[i]
		c.Allowed = c.Allowed && r.Err == nil && r.Allowed
		if e, ok := errors.AsType[*limit.Error](r.Err); ok {
			failed++
			c.Results[i] = &weirv1.Result{Outcome: &weirv1.Result_Error{Error: wire.ProtoError(wire.Named(e))}}
			continue
		}
		c.Results[i] = c.answers[i].of(&r.Decision)
	}
	if failed == len(c.results) {
		return nil, statusOf(inBatch(c.results[0].Err, 0, failed))
	}
	return c, nil
}

// decided is the memory of a Result with a decision, in one allocation in place of three.
type decided struct {
	result   weirv1.Result
	outcome  weirv1.Result_Decision
	decision weirv1.Decision
	wait     int64
}

func (r *decided) of(d *limit.Decision) *weirv1.Result {
	wire.SetDecision(&r.decision, d, &r.wait)
	r.outcome.Decision = &r.decision
	r.result.Outcome = &r.outcome
	return &r.result
}

// checkAll carries out an atomic call.
func (s *Server) checkAll(ctx context.Context, c *call) error {
	all, err := s.svc.CheckAll(ctx, slices.Clone(c.checks)) // a settlement may outlast the call, which reuses c.checks
	if err != nil {
		return statusOf(err)
	}
	c.Allowed, c.DelayNs = all.Allowed, int64(all.Delay)
	for i := range all.Decisions {
		c.Results[i] = c.answers[i].of(&all.Decisions[i])
	}
	return nil
}

// Status implements weirv1.LimiterServer.
func (s *Server) Status(ctx context.Context, _ *weirv1.StatusRequest) (*weirv1.StatusResponse, error) {
	return s.cfg.Status(ctx), nil
}

// TopKeys implements weirv1.LimiterServer.
func (s *Server) TopKeys(ctx context.Context, r *weirv1.TopKeysRequest) (*weirv1.TopKeysResponse, error) {
	out, err := s.cfg.TopKeys(ctx, r)
	if err != nil {
		return nil, wire.Status(err) // the error has the message's field names already
	}
	return out, nil
}

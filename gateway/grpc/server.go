// Package grpcapi serves callers over gRPC: weir.v1's Limiter. It turns messages into checks, asks a limiter.BatchService, and turns
// decisions into messages, for single calls and for CheckStream.
//
// It decides nothing. What it does not promise: that a check whose answer did not reach the caller was not carried out; that the
// answers of a stream come in the order of the checks; that a caller who does not read keeps its stream.
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

// ServerConfig is what a Server needs. Service, Status, TopKeys and Topology are required.
type ServerConfig struct {
	Service limiter.BatchService
	// Lender lends units to callers; nil: nothing is lent.
	Lender limit.Lender
	// Kept are bytes, which what streams define takes while they are open. Of named callers none has all of them. Nil: any number.
	Kept *fairshare.Places
	// Caller names the authenticated caller, whose borrowers are its own. It is required with Kept or a Lender.
	Caller func(context.Context) string
	// Status describes the cluster.
	Status func(context.Context) *weirv1.StatusResponse
	// TopKeys tells which keys are used most. Its error is a *limit.Error.
	TopKeys func(context.Context, *weirv1.TopKeysRequest) (*weirv1.TopKeysResponse, error)
	// Topology says who owns which keys, and gives a channel that is closed when that may have changed; or an error for a caller that is
	// not to know.
	Topology func(context.Context) (now *weirv1.TopologyResponse, changed <-chan struct{}, denied *limit.Error)
	// Ready says whether the node is ready to decide, and gives a channel that is closed when that changes. Nil: it always is.
	Ready func() (ready bool, changed <-chan struct{})
	// Observe, when set, is told of each request of a CheckStream how long it took until all its answers were sent, and the
	// code of the error that it got in place of answers. It must return at once.
	Observe func(took time.Duration, failed codes.Code)
	// Trace, when set, is told of each check of a CheckStream what its caller says of a trace that it belongs to: the ids of
	// trace and span, limiter.TraceContext bytes, or nothing. It returns what is to hang below (see limiter.Batch.Traces), and
	// how to end the trace's part here with the status of the answer; nil when the check is not traced.
	Trace func(parent string) (below string, end func(codes.Code))
	// WriteTimeout is how long an answer may wait for the caller of a stream to read those before it; then the stream ends. For
	// streams of other services see EndUnread. 0: any time.
	WriteTimeout time.Duration
	// MaxUnread is about how many bytes of answers of all CheckStreams may wait for their callers to read. Beyond it a stream that
	// holds more than its share is ended at once. What gRPC has taken is not counted: 64 KiB a stream at most. 0: any number.
	MaxUnread int64
	// Requests bounds the bytes that requests take from when they are decoded until they are answered; those that take few are
	// not counted. Nil: any number.
	Requests *admission.Gate
	// Panicked is called with each panic of a stream, which ends with admission.ErrPanicked. Required.
	Panicked func(method string, p *panics.Error)
}

// Server answers callers.
type Server struct {
	weirv1.UnimplementedLimiterServer
	svc     limiter.BatchService
	cfg     ServerConfig
	batches sync.Pool // of *limiter.Batch
	calls   sync.Pool // of *call
	rooms   rooms
	traced  bool           // gRPC's traces keep the messages of calls, to write them out when somebody looks at them
	readers sync.WaitGroup // of CheckStream, and handlers of other streams
	unread  unread         // of CheckStreams
}

// NewServer returns a Server. Close it when done.
func NewServer(cfg ServerConfig) *Server {
	s := &Server{svc: cfg.Service, cfg: cfg, traced: grpc.EnableTracing, unread: unread{of: make(map[*checkStream]int64)}}
	s.batches.New = func() any { return new(limiter.Batch) }
	s.calls.New = func() any {
		c := &call{server: s, admission: callMemory{gate: cfg.Requests}}
		c.request.Admit = c.admit
		return c
	}
	return s
}

// call is what a Check takes while it is in flight, used again for the next. It is the message that the call is answered with. While its
// request has not come, as for long it need not, it has no more than this.
type call struct {
	weirv1.CheckResponse
	*room     // nil until it is known for how many checks
	server    *Server
	admission callMemory
	request   wire.Lenient
	ctx       context.Context // of the call, while its request is decoded
	in        *weirv1.CheckRequest
}

// room is what so many checks and their answers take: 59 KB for 100.
type room struct {
	checks  []limit.Check
	results []limit.Result
	answers []decided
	out     []*weirv1.Result
}

// rooms keep rooms by their size: those for a power of two are for as few checks as no smaller one has room for. So few checks, which no
// gate counts, do not keep the room of many.
type rooms [11]sync.Pool // the last for 1024

// size is the power of two for n checks, at least 1.
func (*rooms) size(n int) int { return bits.Len(uint(n - 1)) }

// grow makes room for n checks, at least 1 and at most limit.MaxBatch, and what comes of them.
func (c *call) grow(n int) {
	size := c.server.rooms.size(n)
	r, ok := c.server.rooms[size].Get().(*room)
	if !ok {
		all := 1 << size
		r = &room{make([]limit.Check, all), make([]limit.Result, all), make([]decided, all), make([]*weirv1.Result, all)}
	}
	r.checks, r.results, r.answers, r.out = r.checks[:n], r.results[:n], r.answers[:n], r.out[:n]
	c.room, c.Results = r, r.out
}

// Recycle implements wire.Recycled. Nothing is left in c that would be kept alive.
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

// admit waits for room for a request that has come, and gives it that which one before it had.
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

// Close waits for every goroutine, once the gRPC server that the Server is registered with has been stopped.
func (s *Server) Close() { s.readers.Wait() }

// Register adds the Server to a gRPC server, which must have been made with wire.ServerCodec.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	desc := weirv1.Limiter_ServiceDesc
	desc.Methods = nil
	for _, m := range weirv1.Limiter_ServiceDesc.Methods {
		m.Handler = admitted(m.Handler, s.cfg.Requests)
		if m.MethodName == "Check" {
			m.Handler = s.handleCheck()
		}
		desc.Methods = append(desc.Methods, m)
	}
	r.RegisterService(&desc, s)
}

// handleCheck returns the generated handler, but for the request, which is used again: as soon as it has been read, for a call may
// wait long, and 1000 checks take 250 KB in this form; and the answer, which is used again when it has been sent. Interceptors see
// a *call in place of both.
func (s *Server) handleCheck() grpc.MethodHandler {
	info := &grpc.UnaryServerInfo{Server: s, FullMethod: weirv1.Limiter_Check_FullMethodName}
	check := s.check // made once
	return func(_ any, ctx context.Context, dec func(any) error, i grpc.UnaryServerInterceptor) (_ any, err error) {
		c := s.calls.Get().(*call)
		defer func() {
			if c.admission.leave(); err != nil {
				c.Recycle() // as the codec does when it has marshalled it
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

// undecoded returns the status for a message that could not be decoded, or nil for one that was.
func undecoded(m *wire.Lenient) error {
	if m.Err == nil {
		return nil
	}
	if bad, ok := errors.AsType[*limit.Error](m.Err); ok {
		return statusOf(bad)
	}
	if _, ok := status.FromError(m.Err); ok { // of Admit
		return m.Err
	}
	return status.Error(codes.InvalidArgument, "malformed message: "+m.Err.Error())
}

// check carries out a *call, and puts its request back when it has read it.
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
		c.checks[i] = limit.Check{Target: t, Cost: wire.Cost(check.Cost), Partial: check.Partial, RequestID: check.RequestId}
	}
	atomic := in.Atomic
	// append takes more room than it needs. What holds more checks than a batch may have is not kept.
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

// decided is a Result with a decision, in one piece of memory in place of three.
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
	all, err := s.svc.CheckAll(ctx, slices.Clone(c.checks)) // what is left to settle may outlast the call
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
		return nil, wire.Status(err) // its fields are the message's
	}
	return out, nil
}

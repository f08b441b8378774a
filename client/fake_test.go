package client

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/testkit"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	grpcapi "github.com/weirlimit/weir/gateway/grpc"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// book is a limiter with the policies below, which remembers what it was asked. Nobody can be asked about the policy
// down, and full is answered with a decision that has every field set. Its refusals may not be remembered.
type book struct {
	*limiter.Limiter

	mu        sync.Mutex
	targets   []limit.Target // of every question, in order
	reserved  []limit.Reserve
	extended  []limit.Extend
	committed []limit.Commit
	charges   []limit.Charge
	renewed   int
	stopped   bool
}

const bookPolicies = `policies:
  - {name: five, algorithm: sliding_log, limit: 5, window: 1h, prices: {input: 1, output: 1}}
  - {name: queue, algorithm: leaky_bucket, limit: 6, window: 1m}
  - {name: jobs, algorithm: concurrency, limit: 1, ttl: 30s}
`

func newBook() *book {
	set, err := policy.Parse("book.yaml", []byte(bookPolicies))
	if err != nil {
		panic(err)
	}
	return &book{Limiter: limiter.New(limiter.Config{Policies: set})}
}

func (b *book) stop() {
	b.Close()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stopped = true
}

// asked notes a question about a target, and has f answer it.
func asked[A any](b *book, t limit.Target, note func(), f func() (A, error)) (none A, err error) {
	b.mu.Lock()
	b.targets = append(b.targets, t)
	if note != nil {
		note()
	}
	b.mu.Unlock()
	if t.Policy == "down" {
		return none, &limit.Error{Kind: limit.Unavailable, Message: "the owner cannot be reached"}
	}
	return f()
}

// fullDecision has every field set.
var fullDecision = limit.Decision{
	Policy: "full", Allowed: false, Granted: 2, Limit: 3, Window: 4, Remaining: 5, RetryAfter: 6, ResetAfter: 7,
	Delay:  8,
	Shadow: true, Degraded: true, FailedOpen: true, FailedClosed: true, RetryAfterEstimated: true, Banned: true,
	NearLimit: true,
	Limits: []limit.LimitStatus{
		{Limit: 9, Window: 10, Remaining: 11, RetryAfter: 12, ResetAfter: 13},
		{Limit: algo.Unlimited, RetryAfter: algo.Never},
	},
}

func (b *book) Check(ctx context.Context, checks []limit.Check) ([]limit.Result, error) {
	results := make([]limit.Result, len(checks))
	return results, b.CheckTo(ctx, checks, nil, results)
}

func (b *book) CheckTo(ctx context.Context, checks []limit.Check, _ limit.Denials, results []limit.Result) error {
	for i := range checks {
		results[i].Decision, results[i].Err = asked(b, checks[i].Target, nil, func() (limit.Decision, error) {
			if checks[i].Policy == "full" {
				return fullDecision, nil
			}
			one := make([]limit.Result, 1)
			// also while the node is stopped
			err := b.Limiter.CheckTo(context.WithoutCancel(ctx), checks[i:i+1], nil, one)
			one[0].RememberFor = 0
			return one[0].Decision, cmp.Or(err, one[0].Err)
		})
	}
	return nil
}

// Prepare implements limit.Preparer: it has no handles.
func (b *book) Prepare(*limit.Target, limit.Prepared) limit.Prepared { return nil }

func (b *book) CheckAll(ctx context.Context, checks []limit.Check) (limit.AllDecision, error) {
	last := len(checks) - 1
	return asked(b, checks[last].Target, nil,
		func() (limit.AllDecision, error) { return b.Limiter.CheckAll(ctx, checks) })
}

func (b *book) Reserve(ctx context.Context, r limit.Reserve) (limit.Decision, error) {
	note := func() { b.reserved = append(b.reserved, r) }
	return asked(b, r.Target, note, func() (limit.Decision, error) { return b.Limiter.Reserve(ctx, r) })
}

func (b *book) ReserveAll(ctx context.Context, rs []limit.Reserve) (limit.AllDecision, error) {
	return asked(b, rs[0].Target, nil, func() (limit.AllDecision, error) { return b.Limiter.ReserveAll(ctx, rs) })
}

func (b *book) Extend(ctx context.Context, e limit.Extend) (limit.Decision, error) {
	note := func() { b.extended = append(b.extended, e) }
	return asked(b, e.Target, note, func() (limit.Decision, error) { return b.Limiter.Extend(ctx, e) })
}

func (b *book) Charge(ctx context.Context, c limit.Charge) (limit.Decision, error) {
	note := func() { b.charges = append(b.charges, c) }
	return asked(b, c.Target, note, func() (limit.Decision, error) { return b.Limiter.Charge(ctx, c) })
}

func (b *book) Commit(ctx context.Context, c limit.Commit) (limit.Settled, error) {
	note := func() { b.committed = append(b.committed, c) }
	return asked(b, c.Target, note, func() (limit.Settled, error) { return b.Limiter.Commit(ctx, c) })
}

func (b *book) Acquire(ctx context.Context, a limit.Acquire) (limit.Decision, error) {
	return asked(b, a.Target, nil, func() (limit.Decision, error) { return b.Limiter.Acquire(ctx, a) })
}

func (b *book) Renew(ctx context.Context, t limit.Target, id string, ttl time.Duration) (time.Duration, error) {
	left, err := asked(b, t, nil, func() (time.Duration, error) { return b.Limiter.Renew(ctx, t, id, ttl) })
	b.mu.Lock()
	defer b.mu.Unlock()
	if err == nil {
		b.renewed++
	}
	return left, err
}

func (b *book) Refund(ctx context.Context, t limit.Target, units int64, id string) (int64, error) {
	return asked(b, t, nil, func() (int64, error) { return b.Limiter.Refund(ctx, t, units, id) })
}

func (b *book) Reset(ctx context.Context, t limit.Target) error {
	_, err := asked(b, t, nil, func() (int, error) { return 0, b.Limiter.Reset(ctx, t) })
	return err
}

// node is a node's gRPC service over a book, which counts the checks it is asked and can do worse than answer.
type node struct {
	weirv1.LimiterServer
	svc     limit.Service
	ctx     context.Context // ends when it is stopped
	cancel  context.CancelFunc
	streams streams
	ring    *told[*weirv1.TopologyResponse]
	secret  bool        // does not tell of the ring
	direct  bool        // serves streams without looking into them
	stops   atomic.Bool // ends its streams in order
	// messages counts those that came over streams, which wait for gate if there is one.
	messages atomic.Int64
	gate     atomic.Pointer[chan struct{}]
	// before, if any, is called first in every Check, and may answer in its place with an error.
	before func(context.Context, *weirv1.CheckRequest) error
	asked  atomic.Int64
	ready  *told[bool]
	hung   atomic.Pointer[chan struct{}] // closed when it answers probes again; nil: it does not hang
	probed atomic.Int64                  // probes that have come
}

func newNode(before func(context.Context, *weirv1.CheckRequest) error) *node {
	return nodeOf(newBook(), before)
}

func nodeOf(b *book, before func(context.Context, *weirv1.CheckRequest) error) *node {
	n := nodeOver(b)
	n.before = before
	return n
}

// CheckTo asks the service that the node stands for.
func (n *node) CheckTo(ctx context.Context, checks []limit.Check, _ limit.Denials, results []limit.Result) error {
	got, err := n.svc.Check(ctx, checks)
	copy(results, got)
	return err
}

// Begin and Finish make a node the limiter.BatchService of its streams. What comes before an answer comes before each
// check's, side by side.
func (n *node) Begin(_ context.Context, b *limiter.Batch) (open []int, err *limit.Error) {
	n.messages.Add(1)
	if gate := n.gate.Load(); gate != nil {
		<-*gate
	}
	b.Results = make([]limit.Result, len(b.Checks))
	for i := range b.Checks {
		open = append(open, i)
	}
	return open, nil
}

func (n *node) Finish(ctx context.Context, b *limiter.Batch, open []int) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(n.ctx, cancel)()
	var all sync.WaitGroup
	for _, i := range open {
		all.Go(func() {
			ck := b.Checks[i]
			req := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: ck.Policy, Key: ck.Key},
				RequestId: ck.RequestID}}}
			if err := n.ask(ctx, req); err != nil {
				b.Results[i].Err = n.errorOf(err)
			}
		})
	}
	all.Wait()
	for _, i := range open {
		if b.Results[i].Err != nil {
			continue
		}
		results, err := n.svc.Check(ctx, b.Checks[i:i+1])
		if err != nil {
			results = []limit.Result{{Err: err}}
		}
		b.Results[i] = results[0]
	}
}

// errorOf is the error of a single check. Where there is none like that the stream as a whole fails.
func (n *node) errorOf(err error) *limit.Error {
	out := &limit.Error{}
	switch status.Code(err) {
	case codes.InvalidArgument:
		out.Kind = limit.Invalid
	case codes.NotFound:
		out.Kind = limit.NotFound
	case codes.ResourceExhausted:
		out.Kind = limit.TooLarge
	case codes.Unavailable:
		out.Kind = limit.Unavailable
	default:
		n.streams.end(err)
	}
	out.Field, out.Message = splitField(status.Convert(err).Message())
	return out
}

// pings lets clients look for life as often as a node does: by default gRPC ends connections after some 30 idle
// seconds.
var pings = grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second,
	PermitWithoutStream: true})

// streams are those that a node serves at present.
type streams struct {
	mu  sync.Mutex
	all map[*failing]context.CancelCauseFunc
}

func (s *streams) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, cancel := range s.all {
		cancel(err)
	}
}

// failing is a stream that can be told to end with an error, and answers nothing any more then.
type failing struct {
	weirv1.Limiter_CheckStreamServer
	ctx  context.Context
	node *node
}

func (f *failing) RecvMsg(m any) error {
	err := f.Limiter_CheckStreamServer.RecvMsg(m)
	if f.node.stops.Load() {
		return io.EOF
	}
	in, ok := m.(*wire.Lenient).Message.(*weirv1.CheckStreamRequest)
	if err == nil && ok && len(in.KeyLengths) == 0 && !in.Ready && !in.Topology && in.Borrow == nil {
		f.node.probed.Add(1)
		if hung := f.node.hung.Load(); hung != nil {
			select {
			case <-*hung:
			case <-f.ctx.Done():
			}
		}
	}
	return err
}

func (f *failing) Context() context.Context { return f.ctx }

func (f *failing) Send(out *weirv1.CheckStreamResponse) error {
	if f.ctx.Err() != nil && !out.More {
		return f.ctx.Err()
	}
	return f.Limiter_CheckStreamServer.Send(out)
}

func (n *node) CheckStream(stream weirv1.Limiter_CheckStreamServer) error {
	if n.direct {
		return n.LimiterServer.CheckStream(stream)
	}
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	if n.stops.Load() {
		return nil
	}
	f := &failing{stream, ctx, n}
	n.streams.mu.Lock()
	if n.streams.all == nil {
		n.streams.all = make(map[*failing]context.CancelCauseFunc)
	}
	n.streams.all[f] = cancel
	n.streams.mu.Unlock()
	err := n.LimiterServer.CheckStream(f)
	n.streams.mu.Lock()
	defer n.streams.mu.Unlock()
	delete(n.streams.all, f)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// lendsNothing is the Lender of a node for which its callers have no rights.
type lendsNothing struct{}

func (lendsNothing) Lend(context.Context, []limit.Borrow, []limit.Lent) (func(), error) {
	return nil, &limit.Error{Kind: limit.Denied, Message: "this node lends nothing"}
}

func (lendsNothing) OpenBorrower(uint64, func(limit.Recall)) func() { return func() {} }

func nodeOver(svc limit.Service, lender ...limit.Lender) *node {
	describe := func(context.Context) *weirv1.StatusResponse { return &weirv1.StatusResponse{Node: "fake", Ready: true} }
	n := &node{svc: svc, ready: newTold(true), ring: newTold(&weirv1.TopologyResponse{})}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	cfg := grpcapi.ServerConfig{
		Service: struct {
			limit.Service
			steps
		}{svc, n},
		Lender:   append(lender, lendsNothing{})[0],
		Caller:   func(context.Context) string { return "" },
		Status:   describe,
		Topology: n.topology,
		Ready:    n.ready.now,
	}
	n.LimiterServer = grpcapi.NewServer(cfg)
	return n
}

// told is what a node tells its callers, and goes on to tell when it changes.
type told[T any] struct {
	mu      sync.Mutex
	value   T
	changed chan struct{}
}

func newTold[T any](v T) *told[T] { return &told[T]{value: v, changed: make(chan struct{})} }

func (s *told[T]) now() (T, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.value, s.changed
}

func (s *told[T]) set(v T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.changed)
	s.value, s.changed = v, make(chan struct{})
}

func (n *node) topology(context.Context) (*weirv1.TopologyResponse, <-chan struct{}, *limit.Error) {
	if n.secret {
		return nil, nil, &limit.Error{Kind: limit.Denied, Message: "not for you"}
	}
	now, changed := n.ring.now()
	return now, changed, nil
}

// hold keeps messages that come over streams from being looked at until they are released.
func (n *node) hold() (release func()) {
	gate := make(chan struct{})
	n.gate.Store(&gate)
	return func() {
		n.gate.Store(nil)
		close(gate)
	}
}

// hang keeps the node from answering what comes from now on, until it resumes.
func (n *node) hang() (resume func()) {
	hung := make(chan struct{})
	n.hung.Store(&hung)
	return func() {
		n.hung.Store(nil)
		close(hung)
	}
}

// steps are the methods of a node that a limiter.BatchService has and a Service has not.
type steps interface {
	CheckTo(context.Context, []limit.Check, limit.Denials, []limit.Result) error
	Begin(context.Context, *limiter.Batch) ([]int, *limit.Error)
	Finish(context.Context, *limiter.Batch, []int)
}

// ask does what comes before an answer.
func (n *node) ask(ctx context.Context, req *weirv1.CheckRequest) error {
	if n.hung.Load() != nil {
		n.asked.Add(1)
		<-n.ctx.Done() // its stream stays open, too
		return n.ctx.Err()
	}
	if len(req.Checks) == 0 {
		return nil // of Client.Ready
	}
	n.asked.Add(1)
	if n.before != nil {
		return n.before(ctx, req)
	}
	return nil
}

func (n *node) Check(ctx context.Context, req *weirv1.CheckRequest) (*weirv1.CheckResponse, error) {
	if err := n.ask(ctx, req); err != nil {
		return nil, err
	}
	return n.LimiterServer.Check(ctx, req)
}

// serviceRegistrar is what a service is registered with.
type serviceRegistrar func(desc *grpc.ServiceDesc, server any)

func (r serviceRegistrar) RegisterService(desc *grpc.ServiceDesc, server any) { r(desc, server) }

// register adds the node to a gRPC server. A grpcapi.Server has no method for a Check but its handler, which comes
// after ask then.
func (n *node) register(s grpc.ServiceRegistrar) {
	desc := weirv1.Limiter_ServiceDesc
	if server, ok := n.LimiterServer.(*grpcapi.Server); ok {
		desc.Methods = slices.Clone(desc.Methods)
		server.Register(serviceRegistrar(func(own *grpc.ServiceDesc, _ any) {
			at := slices.IndexFunc(own.Methods, func(m grpc.MethodDesc) bool { return m.MethodName == "Check" })
			check := own.Methods[at].Handler
			desc.Methods[slices.IndexFunc(desc.Methods,
				func(m grpc.MethodDesc) bool { return m.MethodName == "Check" })].Handler =
				func(of any, ctx context.Context, read func(any) error, i grpc.UnaryServerInterceptor) (any, error) {
					return check(of, ctx, func(m any) error {
						if err := read(m); err != nil {
							return err
						}
						return n.ask(ctx, m.(*wire.Lenient).Message.(*weirv1.CheckRequest))
					}, i)
				}
		}))
	}
	s.RegisterService(&desc, n)
}

// serve serves on l, and returns a function that stops it at once, which runs at the end of the test in any case.
func (n *node) serve(t testing.TB, l net.Listener) (stop func()) {
	end := testkit.ServeOn(t, l, n.register, grpc.ForceServerCodecV2(wire.Codec()), pings)
	stop = func() {
		n.cancel()
		end()
		if b, ok := n.svc.(*book); ok {
			b.Close()
		}
	}
	t.Cleanup(stop)
	return stop
}

// serve serves n on a free loopback port.
func serve(t testing.TB, n *node) (addr string, stop func()) {
	t.Helper()
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	return l.Addr().String(), n.serve(t, l)
}

// several serves n nodes.
func several(t testing.TB, n int) (all []*node, addrs []string) {
	t.Helper()
	for range n {
		one := newNode(nil)
		addr, _ := serve(t, one)
		all, addrs = append(all, one), append(addrs, addr)
	}
	return all, addrs
}

// peek asks a question that a node answers.
func peek(t testing.TB, c *Client) {
	t.Helper()
	d, err := c.Policy("five").Peek(t.Context(), "a")
	expect.True(t, err == nil && d.Allowed && !d.FailedOpen, "%+v, %v", d, err)
}

// askAll asks until each of some nodes has been asked.
func askAll(t testing.TB, c *Client, all ...*node) {
	t.Helper()
	testkit.Eventually(t, "all nodes to be asked", func() bool {
		peek(t, c)
		return !slices.ContainsFunc(all, func(n *node) bool { return n.asked.Load() == 0 })
	})
}

// dial returns a Client that is closed at the end of the test, which then fails if goroutines are left over.
func dial(t testing.TB, address string, opts ...Option) *Client {
	t.Helper()
	noLeaks(t)
	quiet := WithLogger(slog.New(slog.DiscardHandler))
	c := must.Value(Dial(t.Context(), address, append([]Option{quiet}, opts...)...))(t)
	t.Cleanup(func() {
		err := c.Close()
		expect.True(t, err == nil || err == ErrClosed, "Close: %v", err)
	})
	return c
}

// noLeaks looks for goroutines of this package and of gRPC's client.
func noLeaks(t testing.TB) {
	t.Helper()
	testkit.NoLeaks(t, "weir/client.(*Lease)", "weir/client.(*Client)", "weir/client.(*loan",
		"transport.(*http2Client)")
}

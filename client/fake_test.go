package client

import (
	"context"
	"fmt"
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
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// book is a limiter.Service that does what the names of its policies say.
//
//	five     admits 5 units of a key, ever
//	full     answers with a decision that has every field set
//	queue    admits with a Delay of 10 s
//	jobs     leases 1 unit of a key, for 30 s; a renewal gives them anew
//	down     nobody can be asked
//	missing  does not exist
//
// Limits sent along admit their Limit units, ever.
type book struct {
	mu      sync.Mutex
	used    map[string]int64
	leases  map[string]string // key → lease
	charged map[string]int64  // key and request id → cost
	targets []limit.Target    // of every question, in order
	ids     []string          // the request ids of every question, in order
	renewed map[string]bool   // leases that were renewed
	// reserved is what was asked for, in order; reservations are settled in that order.
	reserved  []limit.Reserve
	extended  []limit.Extend
	committed []limit.Commit
	charges   []limit.Charge
	stopped   bool
}

func newBook() *book {
	return &book{
		used:    make(map[string]int64),
		leases:  make(map[string]string),
		charged: make(map[string]int64),
		renewed: make(map[string]bool),
	}
}

func (b *book) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stopped = true
}

func (b *book) fail(t limit.Target) error {
	b.targets = append(b.targets, t)
	switch t.Policy {
	case "missing":
		return limit.NewError(limit.NotFound, "policy", `"missing" is not known here`)
	case "down":
		return &limit.Error{Kind: limit.Unavailable, Message: "the owner cannot be reached"}
	}
	if t.Limit != nil && t.Limit.Limit == 0 {
		return limit.NewError(limit.Invalid, "limit.limit", "must not be 0")
	}
	return nil
}

// fullDecision has every field set.
var fullDecision = limit.Decision{
	Policy: "full", Allowed: false, Granted: 2, Limit: 3, Window: 4, Remaining: 5, RetryAfter: 6, ResetAfter: 7, Delay: 8,
	Shadow: true, Degraded: true, FailedOpen: true, FailedClosed: true, RetryAfterEstimated: true, Banned: true, NearLimit: true,
	Limits: []limit.LimitStatus{
		{Limit: 9, Window: 10, Remaining: 11, RetryAfter: 12, ResetAfter: 13},
		{Limit: algo.Unlimited, RetryAfter: algo.Never},
	},
}

func (b *book) Check(_ context.Context, checks []limit.Check) ([]limit.Result, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	results := make([]limit.Result, len(checks))
	for i, ck := range checks {
		b.ids = append(b.ids, ck.RequestID)
		if ck.Policy == "jobs" {
			results[i].Err = limit.NewError(limit.Invalid, "cost", "could not be released")
			continue
		}
		if err := b.fail(ck.Target); err != nil {
			results[i].Err = err
			continue
		}
		results[i].Decision = b.decide(ck)
	}
	return results, nil
}

func (b *book) decide(ck limit.Check) limit.Decision {
	lim, name := int64(5), ck.Policy
	switch {
	case name == "full":
		return fullDecision
	case name == "queue":
		return limit.Decision{Policy: name, Allowed: true, Granted: ck.Cost, Limit: lim, Delay: 10 * time.Second}
	case ck.Limit != nil:
		lim, name = ck.Limit.Limit, "inline"
	}
	state := fmt.Sprintf("%q %q %q", ck.Policy, ck.Namespace, ck.Key)
	d := limit.Decision{Policy: name, Limit: lim, Window: time.Minute}
	left := lim - b.used[state]
	want := max(ck.Cost, 1)
	if ck.Partial {
		want = min(want, max(left, 1))
	}
	cost, repeated := b.charged[state+ck.RequestID]
	switch {
	case repeated && ck.RequestID != "":
		d.Allowed, d.Granted = true, cost
	case want > lim:
		d.RetryAfter = algo.Never
	case want > left:
		d.RetryAfter = 250 * time.Millisecond
	default:
		d.Allowed = true
		if ck.Cost > 0 {
			d.Granted = want
			b.used[state] += want
			b.charged[state+ck.RequestID] = want
		}
	}
	d.Remaining = lim - b.used[state]
	return d
}

// CheckAll charges as it goes, which is well enough for a fake: the first refusal refuses the rest.
func (b *book) CheckAll(_ context.Context, checks []limit.Check) (limit.AllDecision, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := limit.AllDecision{Allowed: true, Decisions: make([]limit.Decision, len(checks))}
	for i, ck := range checks {
		if err := b.fail(ck.Target); err != nil {
			return limit.AllDecision{}, err.(*limit.Error).In(i, len(checks))
		}
		d := b.decide(ck)
		all.Decisions[i] = d
		all.Allowed = all.Allowed && d.Allowed
		all.Delay = max(all.Delay, d.Delay)
	}
	return all, nil
}

func (b *book) Reserve(_ context.Context, r limit.Reserve) (limit.Decision, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.fail(r.Target); err != nil {
		return limit.Decision{}, err
	}
	d := b.decide(limit.Check{Target: r.Target, Cost: r.Cost})
	if d.Allowed {
		d.ReservationID = fmt.Sprintf("reservation of %s for %v", r.Key, r.TTL)
		b.leases[d.ReservationID] = r.Key
		b.reserved = append(b.reserved, r)
	}
	return d, nil
}

// ReserveAll makes one reservation for each, and none where one is refused.
func (b *book) ReserveAll(ctx context.Context, rs []limit.Reserve) (limit.AllDecision, error) {
	all := limit.AllDecision{Allowed: true}
	for _, r := range rs {
		d, err := b.Reserve(ctx, r)
		if err != nil {
			return limit.AllDecision{}, err
		}
		all.Allowed = all.Allowed && d.Allowed
		all.Decisions = append(all.Decisions, d)
	}
	for i := range all.Decisions {
		if d := &all.Decisions[i]; !all.Allowed && d.Allowed {
			if _, err := b.Cancel(ctx, rs[i].Target, d.ReservationID); err != nil {
				return limit.AllDecision{}, err
			}
			d.ReservationID = ""
		}
	}
	return all, nil
}

func (b *book) Extend(_ context.Context, e limit.Extend) (limit.Decision, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ids = append(b.ids, e.RequestID)
	if err := b.fail(e.Target); err != nil {
		return limit.Decision{}, err
	}
	if b.leases[e.ReservationID] != e.Key {
		return limit.Decision{}, limit.NewError(limit.NotFound, "reservation_id", "is not pending")
	}
	d := b.decide(limit.Check{Target: e.Target, Cost: e.Cost})
	if d.Allowed {
		b.reserved[0].Cost += e.Cost
		b.extended = append(b.extended, e)
	}
	return d, nil
}

func (b *book) Charge(_ context.Context, c limit.Charge) (limit.Decision, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ids = append(b.ids, c.RequestID)
	if err := b.fail(c.Target); err != nil {
		return limit.Decision{}, err
	}
	b.charges = append(b.charges, c)
	return limit.Decision{Policy: c.Policy, Granted: c.Cost, Limit: 5}, nil
}

func (b *book) Commit(_ context.Context, c limit.Commit) (limit.Settled, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := c.Target
	if err := b.fail(t); err != nil {
		return limit.Settled{}, err
	}
	if b.leases[c.ReservationID] != t.Key {
		return limit.Settled{}, limit.NewError(limit.NotFound, "reservation_id", "is not pending")
	}
	delete(b.leases, c.ReservationID)
	b.committed = append(b.committed, c)
	state := fmt.Sprintf("%q %q %q", t.Policy, t.Namespace, t.Key)
	back := b.reserved[0].Cost - c.Cost
	b.reserved = b.reserved[1:]
	b.used[state] -= back
	return limit.Settled{Refunded: max(back, 0), Excess: max(-back, 0), Over: b.used[state] > 5}, nil
}

func (b *book) CommitEach(ctx context.Context, cs []limit.Commit) ([]limit.SettledResult, error) {
	results := make([]limit.SettledResult, len(cs))
	for i := range cs {
		results[i].Settled, results[i].Err = b.Commit(ctx, cs[i])
	}
	return results, nil
}

func (b *book) ExtendEach(ctx context.Context, es []limit.Extend) ([]limit.Result, error) {
	results := make([]limit.Result, len(es))
	for i := range es {
		results[i].Decision, results[i].Err = b.Extend(ctx, es[i])
	}
	return results, nil
}

func (b *book) Cancel(ctx context.Context, t limit.Target, id string) (int64, error) {
	got, err := b.Commit(ctx, limit.Commit{Target: t, ReservationID: id})
	return got.Refunded, err
}

func (b *book) Acquire(_ context.Context, a limit.Acquire) (limit.Decision, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ids = append(b.ids, a.RequestID)
	if err := b.fail(a.Target); err != nil {
		return limit.Decision{}, err
	}
	d := limit.Decision{Policy: a.Policy, Limit: 1, Window: 30 * time.Second}
	if b.leases[a.Key] != "" {
		d.RetryAfter = 30 * time.Second
		return d, nil
	}
	d.LeaseID = "lease of " + a.Key
	b.leases[a.Key] = d.LeaseID
	d.Allowed, d.Granted = true, a.Cost
	return d, nil
}

func (b *book) Renew(_ context.Context, t limit.Target, id string, ttl time.Duration) (time.Duration, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.leases[t.Key] != id {
		return 0, limit.NewError(limit.NotFound, "lease_id", "has ended")
	}
	b.renewed[id] = true
	if ttl == 0 {
		ttl = 30 * time.Second
	}
	return ttl, nil
}

func (b *book) Release(_ context.Context, t limit.Target, id string) (bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.leases[t.Key] != id {
		return false, nil
	}
	delete(b.leases, t.Key)
	return true, nil
}

func (b *book) Refund(_ context.Context, t limit.Target, units int64, _ string) (int64, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.fail(t); err != nil {
		return 0, err
	}
	state := fmt.Sprintf("%q %q %q", t.Policy, t.Namespace, t.Key)
	units = min(units, b.used[state])
	b.used[state] -= units
	return units, nil
}

func (b *book) Reset(_ context.Context, t limit.Target) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.fail(t); err != nil {
		return err
	}
	delete(b.used, fmt.Sprintf("%q %q %q", t.Policy, t.Namespace, t.Key))
	return nil
}

// expire ends the lease of key.
func (b *book) expire(key string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.leases, key)
}

// node is a node's gRPC service over a book, which counts the checks it is asked and can do worse than answer.
type node struct {
	weirv1.LimiterServer
	svc     limit.Service
	ctx     context.Context // ends when it is stopped
	cancel  context.CancelFunc
	streams streams
	ring    ringTold
	secret  bool        // does not tell of the ring
	direct  bool        // serves streams without looking into them
	stops   atomic.Bool // ends its streams in order
	// messages counts those that came over streams, which wait for gate if there is one.
	messages atomic.Int64
	gate     atomic.Pointer[chan struct{}]
	// before, if any, is called first in every Check, and may answer in its place with an error.
	before func(context.Context, *weirv1.CheckRequest) error
	asked  atomic.Int64
	ready  *readiness
	hung   atomic.Bool  // answers nothing that begins from now on
	probed atomic.Int64 // times that its status was asked for
}

func newNode(before func(context.Context, *weirv1.CheckRequest) error) *node {
	return nodeOf(newBook(), before)
}

func nodeOf(b *book, before func(context.Context, *weirv1.CheckRequest) error) *node {
	n := nodeOver(b)
	n.before = before
	return n
}

// counted counts the checks that a service is asked.
type counted struct {
	limit.Service
	checks atomic.Int64
}

func (c *counted) Check(ctx context.Context, checks []limit.Check) ([]limit.Result, error) {
	c.checks.Add(int64(len(checks)))
	return c.Service.Check(ctx, checks)
}

// CheckTo asks the service that the node stands for.
func (n *node) CheckTo(ctx context.Context, checks []limit.Check, _ limit.Denials, results []limit.Result) error {
	got, err := n.svc.Check(ctx, checks)
	copy(results, got)
	return err
}

// Begin and Finish make a node the limiter.BatchService of its streams. What comes before an answer comes before each check's, side by
// side.
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
			req := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: ck.Policy, Key: ck.Key}, RequestId: ck.RequestID}}}
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

// pings lets clients look for life as often as a node does: by default gRPC ends connections after some 30 idle seconds.
var pings = grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true})

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

func nodeOver(svc limit.Service, lender ...limit.Lender) *node {
	describe := func(context.Context) *weirv1.StatusResponse { return &weirv1.StatusResponse{Node: "fake", Ready: true} }
	n := &node{svc: svc, ready: newReadiness()}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	cfg := grpcapi.ServerConfig{
		Service: struct {
			limit.Service
			steps
		}{svc, n},
		Status:   describe,
		Topology: n.topology,
		Ready:    n.ready.now,
	}
	for _, l := range lender {
		cfg.Lender = l
	}
	n.LimiterServer = grpcapi.NewServer(cfg)
	n.tell(&weirv1.TopologyResponse{})
	return n
}

// ringTold is what a node says of the ring.
type ringTold struct {
	mu      sync.Mutex
	told    *weirv1.TopologyResponse
	changed chan struct{}
}

func (r *ringTold) now() (*weirv1.TopologyResponse, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.told, r.changed
}

// tell has the node say something else of the ring.
func (n *node) tell(t *weirv1.TopologyResponse) {
	n.ring.mu.Lock()
	defer n.ring.mu.Unlock()
	if n.ring.changed != nil {
		close(n.ring.changed)
	}
	n.ring.told, n.ring.changed = t, make(chan struct{})
}

func (n *node) topology(context.Context) (*weirv1.TopologyResponse, <-chan struct{}, *limit.Error) {
	if n.secret {
		return nil, nil, &limit.Error{Kind: limit.Denied, Message: "not for you"}
	}
	now, changed := n.ring.now()
	return now, changed, nil
}

// readiness is whether a node is ready.
type readiness struct {
	mu      sync.Mutex
	ready   bool
	changed chan struct{}
}

func newReadiness() *readiness { return &readiness{ready: true, changed: make(chan struct{})} }

func (r *readiness) now() (bool, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ready, r.changed
}

func (r *readiness) set(ready bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.changed)
	r.ready, r.changed = ready, make(chan struct{})
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

// steps are the methods of a node that a limiter.BatchService has and a Service has not.
type steps interface {
	CheckTo(context.Context, []limit.Check, limit.Denials, []limit.Result) error
	Begin(context.Context, *limiter.Batch) ([]int, *limit.Error)
	Finish(context.Context, *limiter.Batch, []int)
}

// ask does what comes before an answer.
func (n *node) ask(ctx context.Context, req *weirv1.CheckRequest) error {
	if n.hung.Load() {
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

func (n *node) Status(ctx context.Context, req *weirv1.StatusRequest) (*weirv1.StatusResponse, error) {
	n.probed.Add(1)
	if n.hung.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return n.LimiterServer.Status(ctx, req)
}

// serviceRegistrar is what a service is registered with.
type serviceRegistrar func(desc *grpc.ServiceDesc, server any)

func (r serviceRegistrar) RegisterService(desc *grpc.ServiceDesc, server any) { r(desc, server) }

// register adds the node to a gRPC server. A grpcapi.Server has no method for a Check but its handler, which comes after ask then.
func (n *node) register(s *grpc.Server) {
	desc := weirv1.Limiter_ServiceDesc
	if server, ok := n.LimiterServer.(*grpcapi.Server); ok {
		desc.Methods = slices.Clone(desc.Methods)
		server.Register(serviceRegistrar(func(own *grpc.ServiceDesc, _ any) {
			at := slices.IndexFunc(own.Methods, func(m grpc.MethodDesc) bool { return m.MethodName == "Check" })
			check := own.Methods[at].Handler
			desc.Methods[slices.IndexFunc(desc.Methods, func(m grpc.MethodDesc) bool { return m.MethodName == "Check" })].Handler =
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
	s := grpc.NewServer(grpc.ForceServerCodecV2(wire.Codec()), pings)
	n.register(s)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l)
	}()
	stop = func() {
		n.cancel()
		s.Stop()
		<-done
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
	testkit.NoLeaks(t, "weir/client.(*Lease)", "weir/client.(*Client)", "weir/client.(*loan", "transport.(*http2Client)")
}

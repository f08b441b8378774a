package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// Dial returns a Client of the cluster at address: the host:port of a node's gRPC listener, several of them separated by
// commas, or a target in gRPC's own syntax, such as "dns:///weir:8081" or "unix:/run/weir.sock". A single host name may
// stand for many nodes.
//
// From one of them the Client learns the ring, and asks the node that owns a key about it. Where the nodes do not tell the
// ring, or the owner cannot be reached from here, says that it is not ready, or left a call unanswered a moment ago, the Client
// asks the node with the fewest checks in flight: any node can answer any check. The owners' addresses are those that the
// nodes advertise, with the port of their gRPC listener. The Client keeps a connection, with one stream, to each node that it has asked.
//
// Dial does not wait for a connection, and an address at which there is no node is no error of Dial's: while no node answers the
// fail policy does, from the first check on, and by default that admits everything. The Client logs a warning with the reason then
// (WithLogger), Stats counts it, and every such Decision has FailedOpen or FailedClosed set. A program that would rather not start
// calls Ready first. Credentials that the nodes reject are errors of every call, ErrUnauthenticated and ErrDenied. ctx bounds what Dial
// itself has to wait for, at present nothing. The errors are *Error of kind ErrInvalid, which names the option or "address".
func Dial(ctx context.Context, address string, opts ...Option) (*Client, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	o, err := dialOptions(opts)
	if err != nil {
		return nil, err
	}
	r, err := newRemote(address, o)
	if err != nil {
		return nil, err
	}
	c := newClient(r, r.close, o)
	c.remote, c.loans = r, r.loans
	c.counter, c.observer = new(Counter), o.observer
	return c, nil
}

// remote is the limit.Service of a cluster: it asks the nodes over gRPC, of which an owner of the key comes first. Its errors are *Error,
// or a gRPC status that no node should answer with. Limits sent along must not change while a call uses them.
type remote struct {
	nodes    *nodes
	requests sync.Pool // of *request
	loans    *loans    // nil: none
}

var _ limit.Service = (*remote)(nil)

func newRemote(target string, o options) (*remote, error) {
	a, err := parseAddress(target)
	if err != nil {
		return nil, err
	}
	if err := checkToken(&o, &a); err != nil {
		return nil, err
	}
	if o.tls != nil && o.tls.ServerName != "" {
		a.name = o.tls.ServerName
	}
	ns, err := newNodes(a, dialSettings(&o), o)
	if err != nil {
		return nil, limit.NewError(ErrInvalid, "address", err.Error())
	}
	r := &remote{nodes: ns, requests: sync.Pool{New: func() any { return newRequest() }}, loans: ns.loans}
	if o.loans {
		ns.running.Go(func() { ns.loans.run(ns.ctx) })
	}
	return r, nil
}

// Check implements limit.Service. It asks until ctx ends, or for the client's timeout.
func (r *remote) Check(ctx context.Context, checks []limit.Check) ([]Result, error) {
	results, open := make([]Result, len(checks)), make([]int, len(checks))
	for i := range checks {
		open[i] = i
		if err := valid(&checks[i]); err != nil {
			return nil, in(i, len(checks), err)
		}
		if checks[i].Always {
			return nil, limit.NewError(ErrInvalid, "always", "goes with a charge only").In(i, len(checks))
		}
	}
	r.check(ctx, checks, results, open, r.nodes.timeout)
	return results, ctx.Err()
}

// check asks the owners of the keys, side by side, about the checks at the open places, within a time.
func (r *remote) check(ctx context.Context, cs []limit.Check, rs []Result, open []int, within time.Duration) {
	until := r.nodes.now() + within
	var room [1]*request
	for tries := 1; len(open) > 0; tries++ {
		sent, err := r.sendAll(ctx, cs, open, until, room[:0])
		if err != nil {
			for _, i := range open {
				rs[i] = Result{Err: statusError(err)}
			}
			return
		}
		open = nil
		for _, f := range sent {
			err, unsent := r.await(ctx, f)
			for j, i := range f.places {
				switch {
				case err == nil:
					rs[i] = f.answers[j]
				case unsent && tries < maxTries:
					open = append(open, i)
				default:
					rs[i] = Result{Err: statusError(err)}
				}
			}
			if err == nil && len(f.checks) == 1 {
				f.reset()
				r.requests.Put(f)
			}
		}
	}
}

// route returns the node to ask about a target: the owner of its key, if that is known and well.
func (r *remote) route(ctx context.Context, t *limit.Target, until time.Duration) (*member, error) {
	if m := r.nodes.owners.Load().of(t); m != nil {
		return m, nil
	}
	if m, _, err := r.nodes.choose(); m != nil || err != nil {
		return m, err
	}
	ctx, cancel := context.WithTimeout(ctx, until-r.nodes.now())
	defer cancel()
	return r.nodes.pick(ctx)
}

// sendAll sends the checks at the open places to the nodes that are to be asked, one request to each.
func (r *remote) sendAll(ctx context.Context, cs []limit.Check, open []int, until time.Duration, requests []*request) ([]*request, error) {
	trace := traceOf(ctx)
	for _, i := range open {
		m, err := r.route(ctx, &cs[i].Target, until)
		if err != nil {
			return nil, err
		}
		at := slices.IndexFunc(requests, func(f *request) bool { return f.to == m })
		if at < 0 {
			at = len(requests)
			f := r.requests.Get().(*request)
			f.to, f.until, f.trace = m, until, trace
			requests = append(requests, f)
		}
		f := requests[at]
		f.places, f.checks, f.answers = append(f.places, i), append(f.checks, cs[i]), append(f.answers, Result{})
	}
	for _, f := range requests {
		f.to.out.Add(int64(len(f.checks)))
		f.to.send(f)
	}
	return requests, nil
}

// await waits for a request, and tells the node's breaker. Of an error, unsent says that nothing was carried out, so that
// another node may be asked.
func (r *remote) await(ctx context.Context, f *request) (err error, unsent bool) {
	sent := r.nodes.now()
	f.timer.Reset(f.until - sent)
	select {
	case <-f.done:
	case <-f.timer.C:
		err = status.Error(codes.DeadlineExceeded, "no answer in time")
	case <-ctx.Done():
		err = status.FromContextError(ctx.Err()).Err()
	}
	f.timer.Stop()
	if err != nil && !f.abandon() {
		<-f.done // it has ended meanwhile
		err = nil
	}
	f.to.out.Add(-int64(len(f.checks)))
	o := answered
	if err == nil {
		err, unsent = f.err, f.unsent
	}
	if err != nil {
		o = unknown // what the end of a stream means for a node, its state tells
	}
	f.to.heard(ctx, err, o, r.nodes.now()-sent)
	return err, unsent
}

// at makes calls about what t names: its owner is asked first.
func (r *remote) at(t *limit.Target) weirv1.LimiterClient {
	return weirv1.NewLimiterClient(preferring{r.nodes, func() *member { return r.nodes.owners.Load().of(t) }})
}

// atMost makes calls about n targets: the node that has the fewest of them to ask others about is asked first.
func (r *remote) atMost(n int, at func(i int) *limit.Target) weirv1.LimiterClient {
	return weirv1.NewLimiterClient(preferring{r.nodes, func() *member { return r.nodes.owners.Load().ofMost(n, at) }})
}

// decided is a node's decision, or its error.
func decided(d *weirv1.Decision, err error) (Decision, error) {
	switch {
	case err != nil:
		return Decision{}, statusError(err)
	case d == nil:
		return Decision{}, errors.New("client: a node left a request without a decision")
	}
	return wire.Decision(d), nil
}

// allOf reads the answer to requests that were decided together.
func allOf[M any](n int, allowed bool, delay int64, results []*M, err error, decision func(*M) *weirv1.Decision) (AllDecision, error) {
	odd := false
	decisions, err := eachOf(n, results, err, func(m *M) Decision {
		if decision(m) == nil {
			odd = true
			return Decision{}
		}
		return wire.Decision(decision(m))
	})
	if err == nil && odd {
		err = errors.New("client: a node left a request without a decision")
	}
	if err != nil {
		return AllDecision{}, err
	}
	return AllDecision{Allowed: allowed, Delay: time.Duration(delay), Decisions: decisions}, nil
}

// CheckAll and the methods after it are those of a limit.Service.
func (r *remote) CheckAll(ctx context.Context, checks []limit.Check) (AllDecision, error) {
	req := &weirv1.CheckRequest{Checks: make([]*weirv1.Check, len(checks)), Atomic: true}
	for i := range checks {
		c := &checks[i]
		req.Checks[i] = &weirv1.Check{Target: wire.ProtoTarget(c.Target), Cost: &c.Cost, Partial: c.Partial, RequestId: c.RequestID}
	}
	resp, err := r.atMost(len(checks), func(i int) *limit.Target { return &checks[i].Target }).Check(ctx, req)
	return allOf(len(checks), resp.GetAllowed(), resp.GetDelayNs(), resp.GetResults(), err, (*weirv1.Result).GetDecision)
}

func (r *remote) Acquire(ctx context.Context, a limit.Acquire) (Decision, error) {
	return decided(r.at(&a.Target).Acquire(ctx, &weirv1.AcquireRequest{
		Target: wire.ProtoTarget(a.Target), Cost: &a.Cost, TtlNs: int64(a.TTL), RequestId: a.RequestID,
	}))
}

func (r *remote) Renew(ctx context.Context, t limit.Target, id string, ttl time.Duration) (time.Duration, error) {
	resp, err := r.at(&t).Renew(ctx, &weirv1.RenewRequest{Target: wire.ProtoTarget(t), LeaseId: id, TtlNs: int64(ttl)})
	return time.Duration(resp.GetExpiresInNs()), statusError(err)
}

func (r *remote) Release(ctx context.Context, t limit.Target, id string) (bool, error) {
	resp, err := r.at(&t).Release(ctx, &weirv1.ReleaseRequest{Target: wire.ProtoTarget(t), LeaseId: id})
	return resp.GetReleased(), statusError(err)
}

// costOf is a cost as messages have it: absent beside a usage.
func costOf(a *limit.Amount) *int64 {
	if a.Usage != nil {
		return nil
	}
	return &a.Cost
}

func protoReserve(r *limit.Reserve) *weirv1.ReserveRequest {
	out := &weirv1.ReserveRequest{
		Target: wire.ProtoTarget(r.Target), Cost: costOf(&r.Amount), Usage: r.Usage, Class: r.Class, TtlNs: int64(r.TTL), RequestId: r.RequestID,
	}
	if r.Estimate {
		out.Cost = nil
	}
	return out
}

func (r *remote) Reserve(ctx context.Context, ask limit.Reserve) (Decision, error) {
	return decided(r.at(&ask.Target).Reserve(ctx, protoReserve(&ask)))
}

func (r *remote) ReserveAll(ctx context.Context, asks []limit.Reserve) (AllDecision, error) {
	req := &weirv1.ReserveAllRequest{}
	for i := range asks {
		req.Reserves = append(req.Reserves, protoReserve(&asks[i]))
	}
	resp, err := r.atMost(len(asks), func(i int) *limit.Target { return &asks[i].Target }).ReserveAll(ctx, req)
	all, err := allOf(len(asks), resp.GetAllowed(), resp.GetDelayNs(), resp.GetDecisions(), err, func(d *weirv1.Decision) *weirv1.Decision { return d })
	all.ReservationID = resp.GetReservationId()
	return all, err
}

func protoExtend(e *limit.Extend) *weirv1.ExtendRequest {
	return &weirv1.ExtendRequest{
		Target: wire.ProtoTarget(e.Target), ReservationId: e.ReservationID, Cost: costOf(&e.Amount), Usage: e.Usage, TtlNs: int64(e.TTL), RequestId: e.RequestID,
	}
}

func (r *remote) Extend(ctx context.Context, e limit.Extend) (Decision, error) {
	return decided(r.at(&e.Target).Extend(ctx, protoExtend(&e)))
}

func (r *remote) ExtendEach(ctx context.Context, es []limit.Extend) ([]Result, error) {
	req := &weirv1.ExtendEachRequest{}
	for i := range es {
		req.Extends = append(req.Extends, protoExtend(&es[i]))
	}
	resp, err := r.atMost(len(es), func(i int) *limit.Target { return &es[i].Target }).ExtendEach(ctx, req)
	return eachOf(len(es), resp.GetResults(), err, func(res *weirv1.Result) Result {
		if e := res.GetError(); e != nil {
			return Result{Err: errorOf(e)}
		}
		d, err := decided(res.GetDecision(), nil)
		return Result{Decision: d, Err: err}
	})
}

// eachOf reads the answers to n requests in one call.
func eachOf[M, A any](n int, results []*M, err error, read func(*M) A) ([]A, error) {
	if err != nil {
		return nil, statusError(err)
	}
	if len(results) != n {
		return nil, fmt.Errorf("client: a node answered %d requests with %d results", n, len(results))
	}
	out := make([]A, n)
	for i, res := range results {
		out[i] = read(res)
	}
	return out, nil
}

// errorOf is the error of one request of several.
func errorOf(e *weirv1.Error) error {
	return codeError(codes.Code(e.GetCode()), e.GetField(), e.GetMessage())
}

func (r *remote) Commit(ctx context.Context, c limit.Commit) (Settled, error) {
	got, err := r.at(&c.Target).Commit(ctx, protoCommit(&c))
	return settledOf(got), statusError(err)
}

func (r *remote) Cancel(ctx context.Context, t limit.Target, id string) (int64, error) {
	got, err := r.Commit(ctx, limit.Commit{Target: t, ReservationID: id})
	return got.Refunded, err
}

func protoCommit(c *limit.Commit) *weirv1.CommitRequest {
	return &weirv1.CommitRequest{
		Target: wire.ProtoTarget(c.Target), ReservationId: c.ReservationID, Cost: costOf(&c.Amount), Usage: c.Usage, Class: c.Class,
	}
}

func settledOf(got *weirv1.CommitResponse) Settled {
	return Settled{Refunded: got.GetRefunded(), Excess: got.GetExcess(), Over: got.GetOverLimit()}
}

func (r *remote) CommitEach(ctx context.Context, cs []limit.Commit) ([]SettledResult, error) {
	req := &weirv1.CommitEachRequest{}
	for i := range cs {
		req.Commits = append(req.Commits, protoCommit(&cs[i]))
	}
	resp, err := r.atMost(len(cs), func(i int) *limit.Target { return &cs[i].Target }).CommitEach(ctx, req)
	return eachOf(len(cs), resp.GetResults(), err, func(res *weirv1.CommitResult) SettledResult {
		if e := res.GetError(); e != nil {
			return SettledResult{Err: errorOf(e)}
		}
		return SettledResult{Settled: settledOf(res.GetSettled())}
	})
}

func (r *remote) Charge(ctx context.Context, c limit.Charge) (Decision, error) {
	return decided(r.at(&c.Target).Charge(ctx, &weirv1.ChargeRequest{
		Target: wire.ProtoTarget(c.Target), Cost: costOf(&c.Amount), Usage: c.Usage, RequestId: c.RequestID,
	}))
}

func (r *remote) Refund(ctx context.Context, t limit.Target, units int64, requestID string) (int64, error) {
	resp, err := r.at(&t).Refund(ctx, &weirv1.RefundRequest{Target: wire.ProtoTarget(t), Cost: &units, RequestId: requestID})
	return resp.GetRefunded(), statusError(err)
}

func (r *remote) Reset(ctx context.Context, t limit.Target) error {
	_, err := r.at(&t).Reset(ctx, &weirv1.ResetRequest{Target: wire.ProtoTarget(t)})
	return statusError(err)
}

func (r *remote) ready(ctx context.Context) error {
	api := weirv1.NewLimiterClient(r.nodes.anyNode())
	var last error
	for {
		_, changed, _ := r.nodes.members()
		// No checks are an error, which unlike a mere connection tells that a node of Weir listens there, and that this caller may
		// check. A node that hangs is not to keep the others from telling.
		try, cancel := context.WithTimeout(ctx, r.nodes.timeout)
		_, err := api.Check(try, &weirv1.CheckRequest{})
		cancel()
		if status.Code(err) == codes.InvalidArgument {
			return nil
		}
		err = statusError(err)
		if !errors.Is(err, ErrUnavailable) {
			return err
		}
		if last == nil || ctx.Err() == nil {
			last = err // not that ctx ended, if there is a better reason
		}
		select {
		case <-changed:
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		case <-r.nodes.ctx.Done():
		}
		if ctx.Err() != nil || r.nodes.ctx.Err() != nil {
			return last
		}
	}
}

func (r *remote) close() {
	r.loans.returnAll()
	r.nodes.close()
}

// statusError turns the error of a gRPC call into the client's.
func statusError(err error) error {
	if err == nil {
		return nil
	}
	s, _ := status.FromError(err)
	code, field, message := s.Code(), "", s.Message()
	switch {
	case overloaded(err):
		code = codes.Unavailable
	case code == codes.InvalidArgument, code == codes.NotFound, code == codes.ResourceExhausted:
		field, message = splitField(message)
	}
	return codeError(code, field, message)
}

// overloaded tells whether a node has rejected a call or a stream as a whole, for want of room, before it read anything of it. What is
// too large has the same code, and names its field, or is found out by gRPC.
func overloaded(err error) bool {
	s, _ := status.FromError(err)
	if s.Code() != codes.ResourceExhausted {
		return false
	}
	field, message := splitField(s.Message())
	return field == "" && !strings.HasPrefix(message, "grpc: ")
}

// codeError turns a gRPC code with a message into the client's error. A node that is unwell counts as one that does not answer: a caller
// must not fail because its limiter does. That the caller is denied or not known will not pass by itself, and the fail policy would hide
// it for ever.
func codeError(code codes.Code, field, message string) error {
	kind := wire.Kind(code)
	switch code {
	case codes.DeadlineExceeded, codes.Canceled, codes.Aborted, codes.Internal, codes.Unknown:
		kind = ErrUnavailable
	}
	if kind == 0 {
		return fmt.Errorf("client: %w", status.Error(code, message))
	}
	return limit.NewError(kind, wire.FieldOf(field), message)
}

// splitField parts a message that begins with a field's name, as weir.v1 has them, such as "checks[3].key: is empty".
// Those of gRPC itself begin with "grpc: ".
func splitField(s string) (field, message string) {
	field, message, ok := strings.Cut(s, ": ")
	if !ok || field == "" || field == "grpc" || strings.Trim(field, "abcdefghijklmnopqrstuvwxyz0123456789_.[]") != "" {
		return "", s
	}
	return field, message
}

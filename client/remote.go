package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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
	a, err := parseAddress(address)
	if err != nil {
		return nil, err
	}
	if err := checkToken(&o, &a); err != nil {
		return nil, err
	}
	if o.tls != nil && o.tls.ServerName != "" {
		a.name = o.tls.ServerName
	}
	ns, err := newNodes(a, o)
	if err != nil {
		return nil, invalid("address", "%v", err)
	}
	c := newClient(ns, ns.close, o)
	c.nodes, c.loans, c.now = ns, ns.loans, ns.now
	c.counter, c.observer = new(Counter), o.observer
	return c, nil
}

var _ limit.Service = (*nodes)(nil)

// Check implements limit.Service.
func (ns *nodes) Check(ctx context.Context, checks []limit.Check) ([]Result, error) {
	for i := range checks {
		if err := valid(&checks[i]); err != nil {
			return nil, in(i, len(checks), err)
		}
		if checks[i].Always {
			return nil, invalid("always", "goes with a charge only").In(i, len(checks))
		}
	}
	results := make([]Result, len(checks))
	return results, ns.CheckTo(ctx, checks, nil, results)
}

// CheckTo implements limit.Preparer. It asks the owners of the keys, side by side, until ctx's Deadline, or for the client's timeout.
// Where a node does not carry out a check, it asks another one. Checks that are not valid may not be answered.
func (ns *nodes) CheckTo(ctx context.Context, cs []limit.Check, _ limit.Denials, rs []Result) error {
	var one [1]int
	open := one[:0]
	for i := range cs {
		open = append(open, i)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if _, ok := ctx.Deadline(); !ok {
		ctx = patient(ctx, ns.timeout)
	}
	var room [1]*request
	for tries := 1; len(open) > 0; tries++ {
		sent, err := ns.sendAll(ctx, cs, open, room[:0])
		if err != nil {
			for _, i := range open {
				rs[i] = Result{Err: statusError(err)}
			}
			break
		}
		open = nil
		for _, f := range sent {
			err, unsent := ns.await(ctx, f)
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
				ns.requests.Put(f)
			}
		}
	}
	return nil
}

// sendAll sends the checks at the open places to the nodes that are to be asked, one request to each.
func (ns *nodes) sendAll(ctx context.Context, cs []limit.Check, open []int, requests []*request) ([]*request, error) {
	trace := traceOf(ctx)
	at, _ := ctx.Deadline()
	until := ns.now() + time.Until(at)
	for _, i := range open {
		m := ns.owners.Load().owner(&cs[i].Target)
		if m == nil {
			var err error
			if m, err = ns.pick(ctx); err != nil {
				return nil, err
			}
		}
		at := slices.IndexFunc(requests, func(f *request) bool { return f.to == m })
		if at < 0 {
			at = len(requests)
			f := ns.requests.Get().(*request)
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
func (ns *nodes) await(ctx context.Context, f *request) (err error, unsent bool) {
	sent := ns.now()
	f.timer.Reset(f.until - sent)
	select {
	case <-f.done:
		err, unsent = f.err, f.unsent
	case <-f.timer.C:
		err = status.Error(codes.DeadlineExceeded, "no answer in time")
	case <-ctx.Done():
		err = status.FromContextError(ctx.Err()).Err()
	}
	f.timer.Stop()
	f.to.out.Add(-int64(len(f.checks)))
	o := answered
	if err != nil {
		f.gone.Store(true)
		o = unknown // what the end of a stream means for a node, its state tells
	}
	f.to.heard(ctx, err, o, ns.now()-sent)
	return err, unsent
}

// at makes unary calls about targets: the node that owns the most of them is asked first, and for none any node.
func (ns *nodes) at(targets ...limit.Target) weirv1.LimiterClient {
	return weirv1.NewLimiterClient(preferring{ns, targets})
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

// allOf reads the answer to n requests that were decided together.
func allOf(n int, allowed bool, delay int64, decisions []*weirv1.Decision, err error) (AllDecision, error) {
	all := AllDecision{Allowed: allowed, Delay: time.Duration(delay)}
	if all.Decisions, err = eachOf(n, decisions, err, decided); err != nil {
		return AllDecision{}, err
	}
	return all, nil
}

// eachOf reads the answers to n requests in one call.
func eachOf[M, A any](n int, results []M, err error, read func(M, error) (A, error)) ([]A, error) {
	if err != nil {
		return nil, statusError(err)
	}
	if len(results) != n {
		return nil, fmt.Errorf("client: a node answered %d requests with %d results", n, len(results))
	}
	out := make([]A, n)
	for i := range results {
		if out[i], err = read(results[i], nil); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// CheckAll and the methods after it are those of a limit.Service.
func (ns *nodes) CheckAll(ctx context.Context, checks []limit.Check) (AllDecision, error) {
	req := &weirv1.CheckRequest{Atomic: true}
	var targets []limit.Target
	for i := range checks {
		c := &checks[i]
		targets = append(targets, c.Target)
		req.Checks = append(req.Checks, &weirv1.Check{Target: wire.ProtoTarget(c.Target), Cost: &c.Cost, Partial: c.Partial, RequestId: c.RequestID})
	}
	resp, err := ns.at(targets...).Check(ctx, req)
	var decisions []*weirv1.Decision
	for _, res := range resp.GetResults() {
		decisions = append(decisions, res.GetDecision())
	}
	return allOf(len(checks), resp.GetAllowed(), resp.GetDelayNs(), decisions, err)
}

func (ns *nodes) Acquire(ctx context.Context, a limit.Acquire) (Decision, error) {
	return decided(ns.at(a.Target).Acquire(ctx, &weirv1.AcquireRequest{
		Target: wire.ProtoTarget(a.Target), Cost: &a.Cost, TtlNs: int64(a.TTL), RequestId: a.RequestID,
	}))
}

func (ns *nodes) Renew(ctx context.Context, t limit.Target, id string, ttl time.Duration) (time.Duration, error) {
	resp, err := ns.at(t).Renew(ctx, &weirv1.RenewRequest{Target: wire.ProtoTarget(t), LeaseId: id, TtlNs: int64(ttl)})
	return time.Duration(resp.GetExpiresInNs()), statusError(err)
}

func (ns *nodes) Release(ctx context.Context, t limit.Target, id string) (bool, error) {
	resp, err := ns.at(t).Release(ctx, &weirv1.ReleaseRequest{Target: wire.ProtoTarget(t), LeaseId: id})
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

func (ns *nodes) Reserve(ctx context.Context, ask limit.Reserve) (Decision, error) {
	return decided(ns.at(ask.Target).Reserve(ctx, protoReserve(&ask)))
}

func (ns *nodes) ReserveAll(ctx context.Context, asks []limit.Reserve) (AllDecision, error) {
	req := &weirv1.ReserveAllRequest{}
	var targets []limit.Target
	for i := range asks {
		targets, req.Reserves = append(targets, asks[i].Target), append(req.Reserves, protoReserve(&asks[i]))
	}
	resp, err := ns.at(targets...).ReserveAll(ctx, req)
	all, err := allOf(len(asks), resp.GetAllowed(), resp.GetDelayNs(), resp.GetDecisions(), err)
	all.ReservationID = resp.GetReservationId()
	return all, err
}

func protoExtend(e *limit.Extend) *weirv1.ExtendRequest {
	return &weirv1.ExtendRequest{
		Target: wire.ProtoTarget(e.Target), ReservationId: e.ReservationID, Cost: costOf(&e.Amount), Usage: e.Usage, TtlNs: int64(e.TTL), RequestId: e.RequestID,
	}
}

func (ns *nodes) Extend(ctx context.Context, e limit.Extend) (Decision, error) {
	return decided(ns.at(e.Target).Extend(ctx, protoExtend(&e)))
}

func (ns *nodes) ExtendEach(ctx context.Context, es []limit.Extend) ([]Result, error) {
	req := &weirv1.ExtendEachRequest{}
	var targets []limit.Target
	for i := range es {
		targets, req.Extends = append(targets, es[i].Target), append(req.Extends, protoExtend(&es[i]))
	}
	resp, err := ns.at(targets...).ExtendEach(ctx, req)
	return eachOf(len(es), resp.GetResults(), err, func(res *weirv1.Result, _ error) (a Result, _ error) {
		if a.Err = errorOf(res.GetError()); a.Err == nil {
			a.Decision, a.Err = decided(res.GetDecision(), nil)
		}
		return a, nil
	})
}

// errorOf is the error of one request of several, or nil.
func errorOf(e *weirv1.Error) error {
	if e == nil {
		return nil
	}
	return codeError(codes.Code(e.GetCode()), e.GetField(), e.GetMessage())
}

func (ns *nodes) Commit(ctx context.Context, c limit.Commit) (Settled, error) {
	got, err := ns.at(c.Target).Commit(ctx, protoCommit(&c))
	return settledOf(got), statusError(err)
}

func (ns *nodes) Cancel(ctx context.Context, t limit.Target, id string) (int64, error) {
	got, err := ns.Commit(ctx, limit.Commit{Target: t, ReservationID: id})
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

func (ns *nodes) CommitEach(ctx context.Context, cs []limit.Commit) ([]SettledResult, error) {
	req := &weirv1.CommitEachRequest{}
	var targets []limit.Target
	for i := range cs {
		targets, req.Commits = append(targets, cs[i].Target), append(req.Commits, protoCommit(&cs[i]))
	}
	resp, err := ns.at(targets...).CommitEach(ctx, req)
	return eachOf(len(cs), resp.GetResults(), err, func(res *weirv1.CommitResult, _ error) (SettledResult, error) {
		return SettledResult{Settled: settledOf(res.GetSettled()), Err: errorOf(res.GetError())}, nil
	})
}

func (ns *nodes) Charge(ctx context.Context, c limit.Charge) (Decision, error) {
	return decided(ns.at(c.Target).Charge(ctx, &weirv1.ChargeRequest{
		Target: wire.ProtoTarget(c.Target), Cost: costOf(&c.Amount), Usage: c.Usage, RequestId: c.RequestID,
	}))
}

func (ns *nodes) Refund(ctx context.Context, t limit.Target, units int64, requestID string) (int64, error) {
	resp, err := ns.at(t).Refund(ctx, &weirv1.RefundRequest{Target: wire.ProtoTarget(t), Cost: &units, RequestId: requestID})
	return resp.GetRefunded(), statusError(err)
}

func (ns *nodes) Reset(ctx context.Context, t limit.Target) error {
	_, err := ns.at(t).Reset(ctx, &weirv1.ResetRequest{Target: wire.ProtoTarget(t)})
	return statusError(err)
}

func (ns *nodes) ready(ctx context.Context) error {
	api := ns.at()
	var last error
	for {
		// No checks are an error, which unlike a mere connection tells that a node of Weir listens there, and that this caller may
		// check. A node that hangs is not to keep the others from telling.
		try, cancel := context.WithTimeout(ctx, ns.timeout)
		_, err := api.Check(try, &weirv1.CheckRequest{})
		cancel()
		if status.Code(err) == codes.InvalidArgument {
			return nil
		}
		if err = statusError(err); !unavailable(err) {
			return err
		}
		if last == nil || ctx.Err() == nil {
			last = err // not that ctx ended, if there is a better reason
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
		case <-ns.ctx.Done():
		}
		if ctx.Err() != nil || ns.ctx.Err() != nil {
			return last
		}
	}
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

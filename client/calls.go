package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// This file has the operations of a cluster other than checks. They are unary calls, one for each method of
// limit.Service:
//
//  1. at takes the target of the call, or the first one.
//  2. Invoke makes the call to the node that owns it, or to a node that pick returns (nodes.go), and notes the outcome
//     for that node.
//  3. The method reads the answer (decided, allOf, eachOf).

// preferring makes unary calls about a target, for the generated client of the API.
type preferring struct {
	*nodes
	target *limit.Target // nil: any node is asked
}

// Invoke makes a call to a node and ends it at ctx's Deadline. A context of package client may have a Deadline without
// a timer (deadline), and gRPC ends a call only when its context is done, so Invoke sets the timer.
func (p preferring) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	if at, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, at)
		defer cancel()
	}
	ctx = withTrace(ctx)
	for tries := 1; ; tries++ {
		var m *member
		if p.target != nil {
			m = p.owners.Load().owner(p.target)
		}
		if m == nil {
			var err error
			if m, err = p.pick(ctx); err != nil {
				return err
			}
		}
		var trailer metadata.MD
		var at peer.Peer
		sent, state := p.now(), m.state.Load()
		m.outstanding.Add(1)
		err := m.conn.Invoke(ctx, method, args, reply,
			slices.Concat(opts, []grpc.CallOption{grpc.Trailer(&trailer), grpc.Peer(&at)})...)
		m.outstanding.Add(-1)

		// An error of the node itself comes with a trailer.
		rejected, o := overloaded(err), answered
		silent := rejected || status.Code(err) == codes.Unavailable && len(trailer) == 0
		if silent {
			o = unanswered
		}
		m.heard(ctx, err, o, p.now()-sent)
		// Invoke asks another node if this one did not get the call, because the connection broke after pick, or did
		// not read it, because it is overloaded. Then nothing can be charged twice.
		if silent && (rejected || at.Addr == nil) && state != failed && ctx.Err() == nil && tries < maxTries {
			continue
		}
		return err
	}
}

// NewStream implements grpc.ClientConnInterface. Only members open streams.
func (preferring) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, errors.ErrUnsupported
}

// at returns an API whose unary calls go to the node that owns a target, or to any node if the target is nil.
func (ns *nodes) at(t *limit.Target) weirv1.LimiterClient {
	return weirv1.NewLimiterClient(preferring{ns, t})
}

// decided returns a node's decision, or the client's error for err.
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

// CheckAll and the methods after it implement limit.Service.
func (ns *nodes) CheckAll(ctx context.Context, checks []limit.Check) (AllDecision, error) {
	req := &weirv1.CheckRequest{Atomic: true}
	for i := range checks {
		c := &checks[i]
		req.Checks = append(req.Checks, &weirv1.Check{Target: wire.ProtoTarget(c.Target), Cost: &c.Cost,
			Partial: c.Partial, RequestId: c.RequestID})
	}
	resp, err := ns.at(&checks[0].Target).Check(ctx, req)
	var decisions []*weirv1.Decision
	for _, res := range resp.GetResults() {
		decisions = append(decisions, res.GetDecision())
	}
	return allOf(len(checks), resp.GetAllowed(), resp.GetDelayNs(), decisions, err)
}

func (ns *nodes) Acquire(ctx context.Context, a limit.Acquire) (Decision, error) {
	return decided(ns.at(&a.Target).Acquire(ctx, &weirv1.AcquireRequest{
		Target: wire.ProtoTarget(a.Target), Cost: &a.Cost, TtlNs: int64(a.TTL), RequestId: a.RequestID,
	}))
}

func (ns *nodes) Renew(ctx context.Context, t limit.Target, id string, ttl time.Duration) (time.Duration, error) {
	resp, err := ns.at(&t).Renew(ctx, &weirv1.RenewRequest{Target: wire.ProtoTarget(t), LeaseId: id, TtlNs: int64(ttl)})
	return time.Duration(resp.GetExpiresInNs()), statusError(err)
}

func (ns *nodes) Release(ctx context.Context, t limit.Target, id string) (bool, error) {
	resp, err := ns.at(&t).Release(ctx, &weirv1.ReleaseRequest{Target: wire.ProtoTarget(t), LeaseId: id})
	return resp.GetReleased(), statusError(err)
}

// costOf returns a cost as messages have it: absent beside a usage.
func costOf(a *limit.Amount) *int64 {
	if a.Usage != nil {
		return nil
	}
	return &a.Cost
}

func protoReserve(r *limit.Reserve) *weirv1.ReserveRequest {
	out := &weirv1.ReserveRequest{
		Target: wire.ProtoTarget(r.Target), Cost: costOf(&r.Amount), Usage: r.Usage, Class: r.Class,
		TtlNs: int64(r.TTL), RequestId: r.RequestID,
	}
	if r.Estimate {
		out.Cost = nil
	}
	return out
}

func (ns *nodes) Reserve(ctx context.Context, ask limit.Reserve) (Decision, error) {
	return decided(ns.at(&ask.Target).Reserve(ctx, protoReserve(&ask)))
}

func (ns *nodes) ReserveAll(ctx context.Context, asks []limit.Reserve) (AllDecision, error) {
	req := &weirv1.ReserveAllRequest{}
	for i := range asks {
		req.Reserves = append(req.Reserves, protoReserve(&asks[i]))
	}
	resp, err := ns.at(&asks[0].Target).ReserveAll(ctx, req)
	all, err := allOf(len(asks), resp.GetAllowed(), resp.GetDelayNs(), resp.GetDecisions(), err)
	all.ReservationID = resp.GetReservationId()
	return all, err
}

func protoExtend(e *limit.Extend) *weirv1.ExtendRequest {
	return &weirv1.ExtendRequest{
		Target: wire.ProtoTarget(e.Target), ReservationId: e.ReservationID, Cost: costOf(&e.Amount), Usage: e.Usage,
		TtlNs: int64(e.TTL), RequestId: e.RequestID,
	}
}

func (ns *nodes) Extend(ctx context.Context, e limit.Extend) (Decision, error) {
	return decided(ns.at(&e.Target).Extend(ctx, protoExtend(&e)))
}

func (ns *nodes) ExtendEach(ctx context.Context, es []limit.Extend) ([]Result, error) {
	req := &weirv1.ExtendEachRequest{}
	for i := range es {
		req.Extends = append(req.Extends, protoExtend(&es[i]))
	}
	resp, err := ns.at(&es[0].Target).ExtendEach(ctx, req)
	return eachOf(len(es), resp.GetResults(), err, func(res *weirv1.Result, _ error) (a Result, _ error) {
		if a.Err = errorOf(res.GetError()); a.Err == nil {
			a.Decision, a.Err = decided(res.GetDecision(), nil)
		}
		return a, nil
	})
}

// errorOf returns the error of one request in a call of several, or nil.
func errorOf(e *weirv1.Error) error {
	if e == nil {
		return nil
	}
	return codeError(codes.Code(e.GetCode()), e.GetField(), e.GetMessage())
}

func (ns *nodes) Commit(ctx context.Context, c limit.Commit) (Settled, error) {
	got, err := ns.at(&c.Target).Commit(ctx, protoCommit(&c))
	return settledOf(got), statusError(err)
}

func (ns *nodes) Cancel(ctx context.Context, t limit.Target, id string) (int64, error) {
	got, err := ns.Commit(ctx, limit.Commit{Target: t, ReservationID: id})
	return got.Refunded, err
}

func protoCommit(c *limit.Commit) *weirv1.CommitRequest {
	return &weirv1.CommitRequest{
		Target: wire.ProtoTarget(c.Target), ReservationId: c.ReservationID, Cost: costOf(&c.Amount), Usage: c.Usage,
		Class: c.Class,
	}
}

func settledOf(got *weirv1.CommitResponse) Settled {
	return Settled{Refunded: got.GetRefunded(), Excess: got.GetExcess(), Over: got.GetOverLimit()}
}

func (ns *nodes) CommitEach(ctx context.Context, cs []limit.Commit) ([]SettledResult, error) {
	req := &weirv1.CommitEachRequest{}
	for i := range cs {
		req.Commits = append(req.Commits, protoCommit(&cs[i]))
	}
	resp, err := ns.at(&cs[0].Target).CommitEach(ctx, req)
	return eachOf(len(cs), resp.GetResults(), err, func(res *weirv1.CommitResult, _ error) (SettledResult, error) {
		return SettledResult{Settled: settledOf(res.GetSettled()), Err: errorOf(res.GetError())}, nil
	})
}

func (ns *nodes) Charge(ctx context.Context, c limit.Charge) (Decision, error) {
	return decided(ns.at(&c.Target).Charge(ctx, &weirv1.ChargeRequest{
		Target: wire.ProtoTarget(c.Target), Cost: costOf(&c.Amount), Usage: c.Usage, RequestId: c.RequestID,
	}))
}

func (ns *nodes) Refund(ctx context.Context, t limit.Target, units int64, requestID string) (int64, error) {
	resp, err := ns.at(&t).Refund(ctx,
		&weirv1.RefundRequest{Target: wire.ProtoTarget(t), Cost: &units, RequestId: requestID})
	return resp.GetRefunded(), statusError(err)
}

func (ns *nodes) Reset(ctx context.Context, t limit.Target) error {
	_, err := ns.at(&t).Reset(ctx, &weirv1.ResetRequest{Target: wire.ProtoTarget(t)})
	return statusError(err)
}

// ready waits until a node answers that this caller may check, and returns nil. Otherwise it returns an error that time
// does not end, or, when ctx or the nodes end, why no node has answered.
func (ns *nodes) ready(ctx context.Context) error {
	api := ns.at(nil)
	var last error
	for {
		// For a request without checks, only a node of Weir gives InvalidArgument, and only to a caller that may check.
		// A connection alone would not say that. The timeout keeps a node that hangs from delaying the answers of
		// others.
		try, cancel := context.WithTimeout(ctx, ns.timeout)
		_, err := api.Check(try, &weirv1.CheckRequest{})
		cancel()
		code := status.Code(err)
		if code == codes.InvalidArgument {
			return nil
		}
		if err = statusError(err); !unavailable(err) {
			return err
		}
		if last == nil || code != codes.DeadlineExceeded {
			last = err // a passed deadline is the reason only if no other error has come
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

package grpc

import (
	"context"
	"time"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// operate carries out a request about one target: ask has the Service answer, reply makes a message of the answer.
// Errors become gRPC statuses.
func operate[A, M any](about *weirv1.Target, ask func(limit.Target) (A, error), reply func(A) *M) (*M, error) {
	t, bad := wire.Target(about)
	if bad != nil {
		return nil, statusOf(bad)
	}
	answer, err := ask(t)
	if err != nil {
		return nil, statusOf(err)
	}
	return reply(answer), nil
}

// protoError converts the error of one element of a list.
func protoError(err error) *weirv1.Error { return wire.ProtoError(wire.Named(errorOf(err))) }

func protoDecision(d limit.Decision) *weirv1.Decision { return wire.ProtoDecision(&d) }

// Acquire implements weirv1.LimiterServer.
func (s *Server) Acquire(ctx context.Context, in *weirv1.AcquireRequest) (*weirv1.Decision, error) {
	return operate(in.Target, func(t limit.Target) (limit.Decision, error) {
		return s.svc.Acquire(ctx,
			limit.Acquire{Target: t, Cost: wire.Cost(in.Cost), TTL: time.Duration(in.TtlNs), RequestID: in.RequestId})
	}, protoDecision)
}

// Renew implements weirv1.LimiterServer.
func (s *Server) Renew(ctx context.Context, in *weirv1.RenewRequest) (*weirv1.RenewResponse, error) {
	return operate(in.Target, func(t limit.Target) (time.Duration, error) {
		return s.svc.Renew(ctx, t, in.LeaseId, time.Duration(in.TtlNs))
	}, func(left time.Duration) *weirv1.RenewResponse { return &weirv1.RenewResponse{ExpiresInNs: int64(left)} })
}

// Release implements weirv1.LimiterServer.
func (s *Server) Release(ctx context.Context, in *weirv1.ReleaseRequest) (*weirv1.ReleaseResponse, error) {
	return operate(in.Target, func(t limit.Target) (bool, error) {
		return s.svc.Release(ctx, t, in.LeaseId)
	}, func(released bool) *weirv1.ReleaseResponse { return &weirv1.ReleaseResponse{Released: released} })
}

// Refund implements weirv1.LimiterServer.
func (s *Server) Refund(ctx context.Context, in *weirv1.RefundRequest) (*weirv1.RefundResponse, error) {
	return operate(in.Target, func(t limit.Target) (int64, error) {
		return s.svc.Refund(ctx, t, wire.Cost(in.Cost), in.RequestId)
	}, func(units int64) *weirv1.RefundResponse { return &weirv1.RefundResponse{Refunded: units} })
}

// Reset implements weirv1.LimiterServer.
func (s *Server) Reset(ctx context.Context, in *weirv1.ResetRequest) (*weirv1.ResetResponse, error) {
	return operate(in.Target, func(t limit.Target) (*weirv1.ResetResponse, error) {
		return &weirv1.ResetResponse{}, s.svc.Reset(ctx, t)
	}, func(done *weirv1.ResetResponse) *weirv1.ResetResponse { return done })
}

// amount converts the cost or usage of a request; otherwise is the cost when the request has neither.
func amount(cost *int64, usage map[string]int64, otherwise int64) limit.Amount {
	switch {
	case usage == nil && cost == nil:
		return limit.Amount{Cost: otherwise}
	case cost == nil:
		return limit.Amount{Usage: usage}
	}
	return limit.Amount{Cost: *cost, Usage: usage}
}

func reserveOf(in *weirv1.ReserveRequest, t limit.Target) (limit.Reserve, *limit.Error) {
	return limit.Reserve{
		Target: t, Amount: amount(in.Cost, in.Usage, 1), Estimate: in.Cost == nil && in.Usage == nil, Class: in.Class,
		TTL: time.Duration(in.TtlNs), RequestID: in.RequestId,
	}, nil
}

// Reserve implements weirv1.LimiterServer.
func (s *Server) Reserve(ctx context.Context, in *weirv1.ReserveRequest) (*weirv1.Decision, error) {
	return operate(in.Target, func(t limit.Target) (limit.Decision, error) {
		r, _ := reserveOf(in, t)
		return s.svc.Reserve(ctx, r)
	}, protoDecision)
}

// each carries out a request about a list of targets: read converts an element, ask has the Service answer all of them.
// Errors become gRPC statuses.
func each[M, Q, A any](
	ctx context.Context, list string, in []*M, about func(*M) *weirv1.Target,
	read func(*M, limit.Target) (Q, *limit.Error), ask func(context.Context, []Q) (A, error),
) (answer A, err error) {
	if len(in) > limit.MaxBatch {
		return answer, statusOf(limit.ValidEach(list, len(in)))
	}
	asks := make([]Q, len(in))
	for i, one := range in {
		if one == nil {
			continue // the Service reports the missing fields
		}
		t, bad := wire.Target(about(one))
		if bad == nil {
			asks[i], bad = read(one, t)
		}
		if bad != nil {
			return answer, statusOf(bad.InList(list, i))
		}
	}
	if answer, err = ask(ctx, asks); err != nil {
		err = statusOf(err)
	}
	return answer, err
}

// ReserveAll implements weirv1.LimiterServer.
func (s *Server) ReserveAll(ctx context.Context, in *weirv1.ReserveAllRequest) (*weirv1.ReserveAllResponse, error) {
	all, err := each(ctx, "reserves", in.Reserves, (*weirv1.ReserveRequest).GetTarget, reserveOf, s.svc.ReserveAll)
	if err != nil {
		return nil, err
	}
	out := &weirv1.ReserveAllResponse{Allowed: all.Allowed, ReservationId: all.ReservationID, DelayNs: int64(all.Delay)}
	for i := range all.Decisions {
		out.Decisions = append(out.Decisions, wire.ProtoDecision(&all.Decisions[i]))
	}
	return out, nil
}

func extendOf(in *weirv1.ExtendRequest, t limit.Target) (limit.Extend, *limit.Error) {
	return limit.Extend{
		Target: t, Amount: amount(in.Cost, in.Usage, 0), ReservationID: in.ReservationId, TTL: time.Duration(in.TtlNs),
		RequestID: in.RequestId,
	}, nil
}

// Extend implements weirv1.LimiterServer.
func (s *Server) Extend(ctx context.Context, in *weirv1.ExtendRequest) (*weirv1.Decision, error) {
	return operate(in.Target, func(t limit.Target) (limit.Decision, error) {
		e, _ := extendOf(in, t)
		return s.svc.Extend(ctx, e)
	}, protoDecision)
}

// ExtendEach implements weirv1.LimiterServer.
func (s *Server) ExtendEach(ctx context.Context, in *weirv1.ExtendEachRequest) (*weirv1.ExtendEachResponse, error) {
	results, err := each(ctx, "extends", in.Extends, (*weirv1.ExtendRequest).GetTarget, extendOf, s.svc.ExtendEach)
	if err != nil {
		return nil, err
	}
	out := &weirv1.ExtendEachResponse{Results: make([]*weirv1.Result, len(results))}
	for i := range results {
		if err := results[i].Err; err != nil {
			out.Results[i] = &weirv1.Result{Outcome: &weirv1.Result_Error{Error: protoError(err)}}
		} else {
			out.Results[i] = &weirv1.Result{Outcome: &weirv1.Result_Decision{Decision: wire.ProtoDecision(
				&results[i].Decision)}}
		}
	}
	return out, nil
}

// commitOf converts a commit. A missing cost is an error, because no default is likely to be what the work cost.
func commitOf(in *weirv1.CommitRequest, t limit.Target) (limit.Commit, *limit.Error) {
	switch {
	case in.Cost == nil && in.Usage == nil:
		return limit.Commit{}, limit.NewError(limit.Invalid, "cost",
			"is missing: say what it did cost, or what was used")
	case in.Overrun != weirv1.Overrun_OVERRUN_CHARGE && in.Overrun != weirv1.Overrun_OVERRUN_ERROR:
		return limit.Commit{}, limit.NewError(limit.Invalid, "overrun", "is unknown: OVERRUN_CHARGE or OVERRUN_ERROR")
	}
	return limit.Commit{
		Target: t, Amount: amount(in.Cost, in.Usage, 0), ReservationID: in.ReservationId,
		Exact: in.Overrun == weirv1.Overrun_OVERRUN_ERROR, Class: in.Class,
	}, nil
}

// Commit implements weirv1.LimiterServer.
func (s *Server) Commit(ctx context.Context, in *weirv1.CommitRequest) (*weirv1.CommitResponse, error) {
	return operate(in.Target, func(t limit.Target) (limit.Settled, error) {
		c, bad := commitOf(in, t)
		if bad != nil {
			return limit.Settled{}, bad
		}
		return s.svc.Commit(ctx, c)
	}, protoSettled)
}

func protoSettled(got limit.Settled) *weirv1.CommitResponse {
	return &weirv1.CommitResponse{Refunded: got.Refunded, Excess: got.Excess, OverLimit: got.Over}
}

// CommitEach implements weirv1.LimiterServer.
func (s *Server) CommitEach(ctx context.Context, in *weirv1.CommitEachRequest) (*weirv1.CommitEachResponse, error) {
	results, err := each(ctx, "commits", in.Commits, (*weirv1.CommitRequest).GetTarget, commitOf, s.svc.CommitEach)
	if err != nil {
		return nil, err
	}
	out := &weirv1.CommitEachResponse{Results: make([]*weirv1.CommitResult, len(results))}
	for i := range results {
		if err := results[i].Err; err != nil {
			out.Results[i] = &weirv1.CommitResult{Outcome: &weirv1.CommitResult_Error{Error: protoError(err)}}
		} else {
			out.Results[i] = &weirv1.CommitResult{Outcome: &weirv1.CommitResult_Settled{Settled: protoSettled(
				results[i].Settled)}}
		}
	}
	return out, nil
}

// Cancel implements weirv1.LimiterServer.
func (s *Server) Cancel(ctx context.Context, in *weirv1.CancelRequest) (*weirv1.CancelResponse, error) {
	return operate(in.Target, func(t limit.Target) (int64, error) {
		return s.svc.Cancel(ctx, t, in.ReservationId)
	}, func(units int64) *weirv1.CancelResponse { return &weirv1.CancelResponse{Refunded: units} })
}

// Charge implements weirv1.LimiterServer.
func (s *Server) Charge(ctx context.Context, in *weirv1.ChargeRequest) (*weirv1.Decision, error) {
	return operate(in.Target, func(t limit.Target) (limit.Decision, error) {
		return s.svc.Charge(ctx, limit.Charge{Target: t, Amount: amount(in.Cost, in.Usage, 1), RequestID: in.RequestId})
	}, protoDecision)
}

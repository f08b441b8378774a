package grpcapi

import (
	"context"
	"time"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// amount is a cost as a request gives it, which is otherwise where it gives none.
func amount(cost *int64, usage map[string]int64, otherwise int64) limit.Amount {
	switch {
	case usage == nil && cost == nil:
		return limit.Amount{Cost: otherwise}
	case cost == nil:
		return limit.Amount{Usage: usage}
	}
	return limit.Amount{Cost: *cost, Usage: usage}
}

func reserveOf(in *weirv1.ReserveRequest) (limit.Reserve, *limit.Error) {
	t, bad := wire.Target(in.GetTarget())
	if in == nil {
		return limit.Reserve{}, bad
	}
	return limit.Reserve{
		Target: t, Amount: amount(in.Cost, in.GetUsage(), 1), Estimate: in.Cost == nil && in.GetUsage() == nil, Class: in.GetClass(),
		TTL: time.Duration(in.GetTtlNs()), RequestID: in.GetRequestId(),
	}, bad
}

// Reserve implements weirv1.LimiterServer.
func (s *Server) Reserve(ctx context.Context, in *weirv1.ReserveRequest) (*weirv1.Decision, error) {
	r, bad := reserveOf(in)
	if bad != nil {
		return nil, statusOf(bad)
	}
	d, err := s.svc.Reserve(ctx, r)
	if err != nil {
		return nil, statusOf(err)
	}
	return wire.ProtoDecision(&d), nil
}

// ReserveAll implements weirv1.LimiterServer.
func (s *Server) ReserveAll(ctx context.Context, in *weirv1.ReserveAllRequest) (*weirv1.ReserveAllResponse, error) {
	if len(in.Reserves) > limit.MaxBatch {
		return nil, statusOf(limit.NewError(limit.TooLarge, "reserves", "has more than the 1000 elements that are taken at once"))
	}
	rs := make([]limit.Reserve, len(in.Reserves))
	for i, one := range in.Reserves {
		var bad *limit.Error
		if rs[i], bad = reserveOf(one); bad != nil {
			return nil, statusOf(bad.InList("reserves", i))
		}
	}
	all, err := s.svc.ReserveAll(ctx, rs)
	if err != nil {
		return nil, statusOf(err)
	}
	out := &weirv1.ReserveAllResponse{Allowed: all.Allowed, ReservationId: all.ReservationID, DelayNs: int64(all.Delay)}
	for i := range all.Decisions {
		out.Decisions = append(out.Decisions, wire.ProtoDecision(&all.Decisions[i]))
	}
	return out, nil
}

// Extend implements weirv1.LimiterServer.
func (s *Server) Extend(ctx context.Context, in *weirv1.ExtendRequest) (*weirv1.Decision, error) {
	t, bad := wire.Target(in.Target)
	if bad != nil {
		return nil, statusOf(bad)
	}
	d, err := s.svc.Extend(ctx, limit.Extend{
		Target: t, Amount: amount(in.Cost, in.Usage, 0), ReservationID: in.ReservationId, TTL: time.Duration(in.TtlNs), RequestID: in.RequestId,
	})
	if err != nil {
		return nil, statusOf(err)
	}
	return wire.ProtoDecision(&d), nil
}

// Commit implements weirv1.LimiterServer. A missing cost is an error: what the work did cost is not to be guessed.
func (s *Server) Commit(ctx context.Context, in *weirv1.CommitRequest) (*weirv1.CommitResponse, error) {
	t, bad := wire.Target(in.Target)
	switch {
	case bad != nil:
	case in.Cost == nil && in.Usage == nil:
		bad = limit.NewError(limit.Invalid, "cost", "is missing: say what it did cost, or what was used")
	case in.Overrun != weirv1.Overrun_OVERRUN_CHARGE && in.Overrun != weirv1.Overrun_OVERRUN_ERROR:
		bad = limit.NewError(limit.Invalid, "overrun", "is unknown: OVERRUN_CHARGE or OVERRUN_ERROR")
	}
	if bad != nil {
		return nil, statusOf(bad)
	}
	got, err := s.svc.Commit(ctx, limit.Commit{
		Target: t, Amount: amount(in.Cost, in.Usage, 0), ReservationID: in.ReservationId,
		Exact: in.Overrun == weirv1.Overrun_OVERRUN_ERROR, Class: in.Class,
	})
	if err != nil {
		return nil, statusOf(err)
	}
	return &weirv1.CommitResponse{Refunded: got.Refunded, Excess: got.Excess, OverLimit: got.Over}, nil
}

// Charge implements weirv1.LimiterServer.
func (s *Server) Charge(ctx context.Context, in *weirv1.ChargeRequest) (*weirv1.Decision, error) {
	t, bad := wire.Target(in.Target)
	if bad != nil {
		return nil, statusOf(bad)
	}
	d, err := s.svc.Charge(ctx, limit.Charge{Target: t, Amount: amount(in.Cost, in.Usage, 1), RequestID: in.RequestId})
	if err != nil {
		return nil, statusOf(err)
	}
	return wire.ProtoDecision(&d), nil
}

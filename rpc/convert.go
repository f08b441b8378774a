package rpc

import (
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/timezone"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// cost is 1 where the message leaves it out: a missing cost is never a free peek.
func cost(c *int64) int64 {
	if c == nil {
		return 1
	}
	return *c
}

// target converts the name of a state. The error names the field.
func target(t *weirv1.Target) (limit.Target, *limit.Error) {
	out := limit.Target{Policy: t.GetPolicy(), Namespace: t.GetNamespace(), Key: t.GetKey()}
	if l := t.GetLimit(); l != nil {
		inline, err := inlineLimit(l)
		if err != nil {
			return out, err
		}
		out.Limit = inline
	}
	return out, nil
}

func inlineLimit(l *weirv1.Limit) (*algo.Limit, *limit.Error) {
	if l.Algorithm <= 0 || int(l.Algorithm) > int(algo.Concurrency) {
		return nil, limit.NewError(limit.Invalid, "limit.algorithm", "is missing or unknown")
	}
	if l.Period < 0 || int(l.Period) > int(algo.Epoch) {
		return nil, limit.NewError(limit.Invalid, "limit.period", "is unknown")
	}
	out := &algo.Limit{
		Algorithm: algo.Algorithm(l.Algorithm), Limit: l.Limit, Capacity: l.Capacity, Window: time.Duration(l.WindowNs),
		Slots: l.Slots, Period: algo.Period(l.Period), CountDenied: l.CountDenied,
		CarryDebt: l.CarryDebt, MaxDebt: l.MaxDebt,
	}
	if l.TimeZone != "" {
		zone, err := timeZones.Load(l.TimeZone)
		if err != nil {
			return nil, limit.NewError(limit.Invalid, "limit.time_zone", err.Error())
		}
		out.Zone = zone
	}
	return out, nil
}

// timeZones are those that limits sent along have named.
var timeZones timezone.Cache

func protoTarget(t limit.Target) *weirv1.Target {
	out := &weirv1.Target{Policy: t.Policy, Namespace: t.Namespace, Key: t.Key}
	if l := t.Limit; l != nil {
		out.Limit = &weirv1.Limit{
			Algorithm: weirv1.Algorithm(l.Algorithm), Limit: l.Limit, Capacity: l.Capacity, WindowNs: int64(l.Window),
			Slots: l.Slots, Period: weirv1.Period(l.Period), CountDenied: l.CountDenied,
			CarryDebt: l.CarryDebt, MaxDebt: l.MaxDebt,
		}
		if l.Zone != nil {
			out.Limit.TimeZone = l.Zone.String()
		}
	}
	return out
}

// retryAfter leaves Never out of a message. wait is the room that the message has for a number that may be missing.
func retryAfter(d time.Duration, wait *int64) *int64 {
	if d == algo.Never {
		return nil
	}
	*wait = int64(d)
	return wait
}

func fromRetryAfter(ns *int64) time.Duration {
	if ns == nil {
		return algo.Never
	}
	return time.Duration(*ns)
}

func protoDecision(d *limit.Decision) *weirv1.Decision {
	out := new(weirv1.Decision)
	setDecision(out, d, new(int64))
	return out
}

// setDecision fills in an empty message. It keeps nothing of d; wait is room for retryAfter.
func setDecision(out *weirv1.Decision, d *limit.Decision, wait *int64) {
	out.RetryAfterNs = retryAfter(d.RetryAfter, wait)
	out.Policy, out.Allowed, out.Granted, out.Limit, out.Remaining = d.Policy, d.Allowed, d.Granted, d.Limit, d.Remaining
	out.ResetAfterNs, out.DelayNs, out.WindowNs = int64(d.ResetAfter), int64(d.Delay), int64(d.Window)
	out.LeaseId, out.ReservationId, out.RequestId = d.LeaseID, d.ReservationID, d.RequestID
	out.Shadow, out.Degraded, out.FailedOpen, out.FailedClosed = d.Shadow, d.Degraded, d.FailedOpen, d.FailedClosed
	out.RememberForNs = int64(d.RememberFor)
	out.Limits = protoLimits(d.Limits)
}

func protoLimits(limits []limit.LimitStatus) []*weirv1.LimitStatus {
	if len(limits) == 0 {
		return nil
	}
	room := make([]struct {
		status weirv1.LimitStatus
		wait   int64
	}, len(limits))
	out := make([]*weirv1.LimitStatus, len(limits))
	for i := range limits {
		s, to := &limits[i], &room[i]
		out[i] = &to.status
		out[i].Limit, out[i].WindowNs = s.Limit, int64(s.Window)
		out[i].Remaining, out[i].ResetAfterNs = s.Remaining, int64(s.ResetAfter)
		out[i].RetryAfterNs = retryAfter(s.RetryAfter, &to.wait)
	}
	return out
}

func decision(d *weirv1.Decision) limit.Decision {
	out := limit.Decision{
		Policy: d.Policy, Allowed: d.Allowed, Granted: d.Granted, Limit: d.Limit, Remaining: d.Remaining,
		RetryAfter: fromRetryAfter(d.RetryAfterNs), ResetAfter: time.Duration(d.ResetAfterNs), Delay: time.Duration(d.DelayNs),
		LeaseID: d.LeaseId, ReservationID: d.ReservationId, RequestID: d.RequestId, Window: time.Duration(d.WindowNs),
		Shadow: d.Shadow, Degraded: d.Degraded, FailedOpen: d.FailedOpen, FailedClosed: d.FailedClosed,
		RememberFor: time.Duration(d.RememberForNs),
	}
	for _, s := range d.Limits {
		out.Limits = append(out.Limits, limit.LimitStatus{
			Limit: s.Limit, Window: time.Duration(s.WindowNs), Remaining: s.Remaining,
			RetryAfter: fromRetryAfter(s.RetryAfterNs), ResetAfter: time.Duration(s.ResetAfterNs),
		})
	}
	return out
}

func code(k limit.Kind) codes.Code {
	switch k {
	case limit.Invalid:
		return codes.InvalidArgument
	case limit.NotFound:
		return codes.NotFound
	case limit.TooLarge:
		return codes.ResourceExhausted
	case limit.Unavailable:
		return codes.Unavailable
	case limit.Denied:
		return codes.PermissionDenied
	}
	return codes.Internal
}

// kind is the inverse of code, 0 for the code of no Error.
func kind(c codes.Code) limit.Kind {
	switch c {
	case codes.InvalidArgument:
		return limit.Invalid
	case codes.NotFound:
		return limit.NotFound
	case codes.ResourceExhausted:
		return limit.TooLarge
	case codes.Unavailable:
		return limit.Unavailable
	case codes.PermissionDenied:
		return limit.Denied
	}
	return 0
}

// protoError is an error as nodes tell each other.
func protoError(e *limit.Error) *weirv1.Error {
	return &weirv1.Error{Code: int32(code(e.Kind)), Field: e.Field, Message: e.Message}
}

// callerError is protoError for callers, who know the fields by their names in weir.v1.
func callerError(e *limit.Error, field func(string) string) *weirv1.Error {
	return &weirv1.Error{Code: int32(code(e.Kind)), Field: field(e.Field), Message: e.Message}
}

// statusOf turns an error of the service into a gRPC status, whose message begins with the field's name in weir.v1.
func statusOf(err error) error {
	var e *limit.Error
	if errors.As(err, &e) {
		return status.Error(code(e.Kind), limit.NewError(e.Kind, wire.Field(e.Field), e.Message).Error())
	}
	return status.FromContextError(err).Err()
}

func protoTerm(t ownership.Term) *peerv1.Term {
	if t == (ownership.Term{}) {
		return nil
	}
	return &peerv1.Term{Epoch: t.Epoch, N: t.N}
}

func term(t *peerv1.Term) ownership.Term { return ownership.Term{Epoch: t.GetEpoch(), N: t.GetN()} }

// protoItem converts an operation for a peer. left is what remains of the time the caller gave.
func protoItem(op *limiter.Op, left time.Duration) *peerv1.Item {
	item := &peerv1.Item{
		Hops: uint32(op.Hops), TimeoutNs: uint64(max(left, 0)),
		Caller: op.Caller, Always: op.Always,
	}
	if op.Trace != "" {
		item.Trace = []byte(op.Trace)
	}
	t := protoTarget(op.Target)
	cost := op.Cost // a copy: a message outlives the call that the operation belongs to
	switch op.Kind {
	case limiter.OpCheck:
		item.Operation = &peerv1.Item_Check{Check: &weirv1.Check{Target: t, Cost: &cost, Partial: op.Partial, RequestId: op.RequestID}}
	case limiter.OpAcquire:
		item.Operation = &peerv1.Item_Acquire{Acquire: &weirv1.AcquireRequest{Target: t, Cost: &cost, TtlNs: int64(op.TTL), RequestId: op.RequestID}}
	case limiter.OpRenew:
		item.Operation = &peerv1.Item_Renew{Renew: &weirv1.RenewRequest{Target: t, LeaseId: op.LeaseID, TtlNs: int64(op.TTL)}}
	case limiter.OpRelease:
		item.Operation = &peerv1.Item_Release{Release: &weirv1.ReleaseRequest{Target: t, LeaseId: op.LeaseID}}
	case limiter.OpRefund:
		item.Operation = &peerv1.Item_Refund{Refund: &weirv1.RefundRequest{Target: t, Cost: &cost, RequestId: op.RequestID}}
	case limiter.OpReset:
		item.Operation = &peerv1.Item_Reset_{Reset_: &weirv1.ResetRequest{Target: t}}
	case limiter.OpReserve:
		request := &weirv1.ReserveRequest{Target: t, Cost: &cost, TtlNs: int64(op.TTL), RequestId: op.RequestID}
		item.Operation = &peerv1.Item_Reserve{Reserve: &peerv1.Reserve{Request: request, Id: reservationBytes(op.Reservation), Atomic: op.Atomic}}
	case limiter.OpSettle:
		item.Operation = &peerv1.Item_Settle{Settle: &peerv1.Settle{Target: t, Id: reservationBytes(op.Reservation), Keep: cost}}
	}
	return item
}

// reservationBytes returns the bytes of a reservation's id; none of the zero id.
func reservationBytes(id limiter.ReservationID) []byte {
	if id == (limiter.ReservationID{}) {
		return nil
	}
	return id[:]
}

// reservation is the inverse of reservationBytes. Bytes of any other length are no id.
func reservation(b []byte) (id limiter.ReservationID) {
	if len(b) == len(id) {
		copy(id[:], b)
	}
	return id
}

// operation is the inverse of protoItem; op is the zero Op before. What it cannot make sense of gets an Outcome with an Err.
func operation(op *limiter.Op, item *peerv1.Item) {
	op.Hops, op.Left = int(item.Hops), time.Duration(min(item.TimeoutNs, uint64(maxTimeout)))
	if len(item.Trace) == limiter.TraceContext {
		op.Trace = string(item.Trace)
	}
	var t *weirv1.Target
	switch o := item.Operation.(type) {
	case *peerv1.Item_Check:
		op.Kind, t = limiter.OpCheck, o.Check.GetTarget()
		op.Cost, op.Partial, op.RequestID = cost(o.Check.Cost), o.Check.GetPartial(), o.Check.GetRequestId()
	case *peerv1.Item_Acquire:
		op.Kind, t = limiter.OpAcquire, o.Acquire.GetTarget()
		op.Cost, op.TTL, op.RequestID = cost(o.Acquire.Cost), time.Duration(o.Acquire.GetTtlNs()), o.Acquire.GetRequestId()
	case *peerv1.Item_Renew:
		op.Kind, t = limiter.OpRenew, o.Renew.GetTarget()
		op.LeaseID, op.TTL = o.Renew.GetLeaseId(), time.Duration(o.Renew.GetTtlNs())
	case *peerv1.Item_Release:
		op.Kind, t = limiter.OpRelease, o.Release.GetTarget()
		op.LeaseID = o.Release.GetLeaseId()
	case *peerv1.Item_Refund:
		op.Kind, t = limiter.OpRefund, o.Refund.GetTarget()
		op.Cost, op.RequestID = cost(o.Refund.Cost), o.Refund.GetRequestId()
	case *peerv1.Item_Reset_:
		op.Kind, t = limiter.OpReset, o.Reset_.GetTarget()
	case *peerv1.Item_Reserve:
		r := o.Reserve.GetRequest()
		op.Kind, t = limiter.OpReserve, r.GetTarget()
		op.TTL, op.RequestID = time.Duration(r.GetTtlNs()), r.GetRequestId()
		op.Cost, op.Reservation, op.Atomic = 1, reservation(o.Reserve.GetId()), o.Reserve.GetAtomic()
		if r != nil {
			op.Cost = cost(r.Cost)
		}
	case *peerv1.Item_Settle:
		op.Kind, t = limiter.OpSettle, o.Settle.GetTarget()
		op.Reservation, op.Cost = reservation(o.Settle.GetId()), o.Settle.GetKeep()
	default:
		op.Outcome.Err = &limit.Error{Kind: limit.Invalid, Message: "an operation that this version does not know"}
		return
	}
	op.Always = item.Always
	if op.Target, op.Outcome.Err = target(t); len(item.Caller) > maxCaller {
		op.Outcome.Err = &limit.Error{Kind: limit.TooLarge, Message: "the caller's name is too long"}
		return
	}
	op.Caller = item.Caller
	op.Configured = limit.Reserved(op.Namespace) // its sender has made sure that no caller sent it
}

// protoOutcome converts what came of an operation.
func protoOutcome(op *limiter.Op) *peerv1.ItemReply {
	out := &op.Outcome
	switch {
	case out.Err != nil:
		return &peerv1.ItemReply{Outcome: &peerv1.ItemReply_Error{Error: protoError(out.Err)}}
	case out.NotHolder != nil:
		h := out.NotHolder
		return &peerv1.ItemReply{Outcome: &peerv1.ItemReply_NotHolder{NotHolder: &peerv1.NotHolder{Holder: h.Name, Boot: h.Boot, Term: protoTerm(h.Term)}}}
	case out.Unreachable:
		// Not an Error of any Kind: the node that was asked first answers by on_error.
		e := &weirv1.Error{Code: int32(codes.DeadlineExceeded), Message: "the holder could not be reached from here either"}
		return &peerv1.ItemReply{Outcome: &peerv1.ItemReply_Error{Error: e}}
	}
	switch op.Kind {
	case limiter.OpRenew:
		return &peerv1.ItemReply{LeaseNs: uint64(out.Lease), Outcome: &peerv1.ItemReply_Renewed{Renewed: &weirv1.RenewResponse{ExpiresInNs: int64(out.ExpiresIn)}}}
	case limiter.OpRelease:
		return &peerv1.ItemReply{Outcome: &peerv1.ItemReply_Released{Released: &weirv1.ReleaseResponse{Released: out.Released}}}
	case limiter.OpRefund:
		return &peerv1.ItemReply{Outcome: &peerv1.ItemReply_Refunded{Refunded: &weirv1.RefundResponse{Refunded: out.Refunded}}}
	case limiter.OpReset:
		return &peerv1.ItemReply{Outcome: &peerv1.ItemReply_Reset_{Reset_: &weirv1.ResetResponse{}}}
	case limiter.OpSettle:
		return &peerv1.ItemReply{Outcome: &peerv1.ItemReply_Settled{Settled: &peerv1.Settled{Refunded: out.Refunded}}}
	}
	return &peerv1.ItemReply{LeaseNs: uint64(out.Lease), Outcome: &peerv1.ItemReply_Decision{Decision: protoDecision(&out.Decision)}}
}

// lease is how long an answer may be used, as a peer says it. Leases last for seconds.
func lease(ns uint64) time.Duration { return time.Duration(min(ns, uint64(time.Hour))) }

// setOutcome is the inverse of protoOutcome. A reply that does not fit the operation is none.
func setOutcome(op *limiter.Op, r *peerv1.ItemReply) {
	out := &op.Outcome
	out.Lease = lease(r.GetLeaseNs())
	fits := false
	switch o := r.GetOutcome().(type) {
	case *peerv1.ItemReply_Decision:
		out.Decision = decision(o.Decision)
		fits = op.Kind == limiter.OpCheck || op.Kind == limiter.OpAcquire || op.Kind == limiter.OpReserve
	case *peerv1.ItemReply_Renewed:
		out.ExpiresIn = time.Duration(o.Renewed.ExpiresInNs)
		fits = op.Kind == limiter.OpRenew
	case *peerv1.ItemReply_Released:
		out.Released = o.Released.Released
		fits = op.Kind == limiter.OpRelease
	case *peerv1.ItemReply_Refunded:
		out.Refunded = o.Refunded.Refunded
		fits = op.Kind == limiter.OpRefund
	case *peerv1.ItemReply_Reset_:
		fits = op.Kind == limiter.OpReset
	case *peerv1.ItemReply_Settled:
		out.Refunded = o.Settled.Refunded
		fits = op.Kind == limiter.OpSettle
	case *peerv1.ItemReply_Error:
		k := kind(codes.Code(o.Error.Code))
		out.Err = limit.NewError(k, o.Error.Field, o.Error.Message)
		fits = k != 0
	case *peerv1.ItemReply_NotHolder:
		out.NotHolder = &limiter.Holder{Name: o.NotHolder.Holder, Boot: o.NotHolder.Boot, Term: term(o.NotHolder.Term)}
		fits = true
	}
	if !fits {
		*out = limiter.Outcome{Unreachable: true}
	}
}

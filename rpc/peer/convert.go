package peer

import (
	"time"

	"google.golang.org/grpc/codes"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/rpc/wire"
)

// protoItem converts an operation for a peer. left is what remains of the time the caller gave.
func protoItem(op *limiter.Op, left time.Duration) *peerv1.Item {
	item := &peerv1.Item{
		Hops: uint32(op.Hops), TimeoutNs: uint64(max(left, 0)),
		Caller: op.Caller, Always: op.Always, Spent: op.Spent,
	}
	if op.Trace != "" {
		item.Trace = []byte(op.Trace)
	}
	t := wire.ProtoTarget(op.Target)
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
		item.Operation = &peerv1.Item_Settle{Settle: &peerv1.Settle{Target: t, Id: reservationBytes(op.Reservation), Keep: cost, Exact: op.Exact, Bounded: op.Bounded}}
	case limiter.OpExtend:
		item.Operation = &peerv1.Item_Extend{Extend: &peerv1.Extend{
			Target: t, Id: reservationBytes(op.Reservation), Cost: cost, TtlNs: int64(op.TTL), RequestId: op.RequestID,
		}}
	case limiter.OpBorrow:
		report := op.Loan.Report
		report.Target = op.Target
		item.Operation = &peerv1.Item_Borrow{Borrow: wire.ProtoBorrow(&report)}
	case limiter.OpRecall:
		item.Operation = &peerv1.Item_Recall{Recall: &weirv1.LoanRecall{Number: op.Loan.Recall.Number, Granted: op.Loan.Recall.Granted}}
	case limiter.OpQuota:
		q := op.Quota
		item.Operation = &peerv1.Item_Quota{Quota: &peerv1.Quota{
			Target: t, Borrower: q.ID.Borrower, Number: q.ID.Number,
			Granted: q.Totals.Granted, Spent: q.Totals.Spent, Returned: q.Totals.Returned, Known: q.Known,
			Demand: q.Ask.Demand, AheadNs: int64(q.Ask.Ahead), Share: q.Ask.Share, TermNs: int64(q.Ask.Term), Had: q.Ask.Had,
		}}
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
		op.Cost, op.Partial, op.RequestID = wire.Cost(o.Check.Cost), o.Check.GetPartial(), o.Check.GetRequestId()
	case *peerv1.Item_Acquire:
		op.Kind, t = limiter.OpAcquire, o.Acquire.GetTarget()
		op.Cost, op.TTL, op.RequestID = wire.Cost(o.Acquire.Cost), time.Duration(o.Acquire.GetTtlNs()), o.Acquire.GetRequestId()
	case *peerv1.Item_Renew:
		op.Kind, t = limiter.OpRenew, o.Renew.GetTarget()
		op.LeaseID, op.TTL = o.Renew.GetLeaseId(), time.Duration(o.Renew.GetTtlNs())
	case *peerv1.Item_Release:
		op.Kind, t = limiter.OpRelease, o.Release.GetTarget()
		op.LeaseID = o.Release.GetLeaseId()
	case *peerv1.Item_Refund:
		op.Kind, t = limiter.OpRefund, o.Refund.GetTarget()
		op.Cost, op.RequestID = wire.Cost(o.Refund.Cost), o.Refund.GetRequestId()
	case *peerv1.Item_Reset_:
		op.Kind, t = limiter.OpReset, o.Reset_.GetTarget()
	case *peerv1.Item_Reserve:
		r := o.Reserve.GetRequest()
		op.Kind, t = limiter.OpReserve, r.GetTarget()
		op.TTL, op.RequestID = time.Duration(r.GetTtlNs()), r.GetRequestId()
		op.Cost, op.Reservation, op.Atomic = 1, reservation(o.Reserve.GetId()), o.Reserve.GetAtomic()
		if r != nil {
			op.Cost = wire.Cost(r.Cost)
		}
	case *peerv1.Item_Settle:
		op.Kind, t = limiter.OpSettle, o.Settle.GetTarget()
		op.Reservation, op.Cost = reservation(o.Settle.GetId()), o.Settle.GetKeep()
		op.Exact, op.Bounded = o.Settle.GetExact(), o.Settle.GetBounded()
	case *peerv1.Item_Extend:
		op.Kind, t = limiter.OpExtend, o.Extend.GetTarget()
		op.Reservation, op.Cost = reservation(o.Extend.GetId()), o.Extend.GetCost()
		op.TTL, op.RequestID = time.Duration(o.Extend.GetTtlNs()), o.Extend.GetRequestId()
	case *peerv1.Item_Borrow:
		op.Kind, t = limiter.OpBorrow, o.Borrow.GetTarget()
		op.Loan = new(limiter.LoanCall)
		op.Loan.Report, _ = wire.Borrow(0, o.Borrow) // what is wrong with the target is said below
		op.Loan.Report.Counted = true
	case *peerv1.Item_Recall:
		op.Kind = limiter.OpRecall
		op.Loan = &limiter.LoanCall{Recall: limit.Recall{Number: o.Recall.GetNumber(), Granted: o.Recall.GetGranted()}}
	case *peerv1.Item_Quota:
		q := o.Quota
		op.Kind, t = limiter.OpQuota, q.GetTarget()
		op.Quota = &limiter.QuotaOp{
			ID:     algo.LoanID{Borrower: q.GetBorrower(), Number: q.GetNumber()},
			Totals: algo.Totals{Granted: q.GetGranted(), Spent: q.GetSpent(), Returned: q.GetReturned()}, Known: q.GetKnown(),
			Ask: algo.Quota{Demand: q.GetDemand(), Ahead: time.Duration(q.GetAheadNs()), Share: q.GetShare(), Term: time.Duration(q.GetTermNs()), Had: q.GetHad()},
		}
	default:
		op.Outcome.Err = &limit.Error{Kind: limit.Invalid, Message: "an operation that this version does not know"}
		return
	}
	op.Always, op.Spent = item.Always, item.Spent
	if op.Target, op.Outcome.Err = wire.Target(t); len(item.Caller) > maxCaller {
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
		return &peerv1.ItemReply{Outcome: &peerv1.ItemReply_Error{Error: wire.ProtoError(out.Err)}}
	case out.NotHolder != nil:
		r := out.NotHolder
		return &peerv1.ItemReply{Outcome: &peerv1.ItemReply_NotHolder{NotHolder: &peerv1.NotHolder{Holder: r.Node.Name, Boot: r.Node.Boot, Term: transport.ProtoTerm(r.Term)}}}
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
		settled := &peerv1.Settled{Refunded: out.Refunded, Excess: out.Excess, Over: out.Over}
		return &peerv1.ItemReply{LeaseNs: uint64(out.Lease), Outcome: &peerv1.ItemReply_Settled{Settled: settled}}
	case limiter.OpBorrow:
		return &peerv1.ItemReply{Outcome: &peerv1.ItemReply_Lent{Lent: wire.ProtoLent(op.Loan.Report.ID.Number, &op.Loan.Lent)}}
	case limiter.OpRecall:
		recalled := new(weirv1.LoanReport)
		if op.Loan.Known {
			recalled = wire.ProtoBorrow(&op.Loan.Report)
		}
		return &peerv1.ItemReply{Outcome: &peerv1.ItemReply_Recalled{Recalled: recalled}}
	case limiter.OpQuota:
		q := &op.Quota.Lent
		return &peerv1.ItemReply{Outcome: &peerv1.ItemReply_QuotaLent{QuotaLent: &peerv1.QuotaLent{
			Granted: q.Granted, Rate: q.Rate, Spent: q.Spent, Free: q.Free, Charged: q.Charged,
		}}}
	}
	return &peerv1.ItemReply{LeaseNs: uint64(out.Lease), Outcome: &peerv1.ItemReply_Decision{Decision: wire.ProtoDecision(&out.Decision)}}
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
		out.Decision = wire.Decision(o.Decision)
		fits = op.Kind == limiter.OpCheck || op.Kind == limiter.OpAcquire || op.Kind == limiter.OpReserve || op.Kind == limiter.OpExtend
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
		out.Refunded, out.Excess, out.Over = o.Settled.Refunded, o.Settled.Excess, o.Settled.Over
		fits = op.Kind == limiter.OpSettle
	case *peerv1.ItemReply_Lent:
		if fits = op.Kind == limiter.OpBorrow && o.Lent.GetNumber() == op.Loan.Report.ID.Number; fits {
			op.Loan.Lent = wire.Lent(o.Lent)
		}
	case *peerv1.ItemReply_Recalled:
		if fits = op.Kind == limiter.OpRecall; fits && o.Recalled.GetNumber() == op.Loan.Recall.Number {
			op.Loan.Known = true
			op.Loan.Report, _ = wire.Borrow(0, o.Recalled) // it has no target
		}
	case *peerv1.ItemReply_QuotaLent:
		if fits = op.Kind == limiter.OpQuota; fits {
			q := o.QuotaLent
			op.Quota.Lent = limit.QuotaLent{Granted: q.GetGranted(), Rate: q.GetRate(), Spent: q.GetSpent(), Free: q.GetFree(), Charged: q.GetCharged()}
		}
	case *peerv1.ItemReply_Error:
		k := wire.Kind(codes.Code(o.Error.Code))
		out.Err = limit.NewError(k, o.Error.Field, o.Error.Message)
		fits = k != 0
	case *peerv1.ItemReply_NotHolder:
		out.NotHolder = &ownership.Route{
			Standing: ownership.Elsewhere, Node: ownership.Node{Name: o.NotHolder.Holder, Boot: o.NotHolder.Boot}, Term: transport.Term(o.NotHolder.Term),
		}
		fits = true
	}
	if !fits {
		*out = limiter.Outcome{Unreachable: true}
	}
}

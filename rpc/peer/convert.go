package peer

import (
	"math"
	"slices"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// protoItem converts an operation other than a check. left is what remains of the caller's time.
func protoItem(op *limiter.Op, left time.Duration) *peerv1.Item {
	item := &peerv1.Item{
		Hops: uint32(op.Hops), TimeoutNs: uint64(max(left, 0)), Operation: peerv1.Operation(op.Kind),
		Target: wire.ProtoTarget(op.Target), Cost: op.Cost, Always: op.Always, Spent: op.Spent, RequestId: op.RequestID,
		Caller: op.Caller, Trace: []byte(op.Trace), Bounded: op.Bounded,
	}
	if op.Extra == nil {
		return item
	}
	item.TtlNs, item.LeaseId, item.Atomic, item.Exact = int64(op.TTL), op.LeaseID, op.Atomic, op.Exact
	item.Release = op.Release
	if op.Reservation != (limiter.ReservationID{}) {
		item.Reservation = slices.Clone(op.Reservation[:])
	}
	switch op.Kind {
	case limiter.OpBorrow, limiter.OpQuota:
		item.Loan = wire.ProtoBorrow(&op.Loan.Report)
		item.Loan.Target = nil // the item has it
		if op.Loan.Forwarded || op.Kind == limiter.OpQuota {
			item.Borrower = op.Loan.Report.ID.Borrower
		}
		if op.Kind == limiter.OpQuota {
			ask := &op.Loan.Ask
			item.Quota = &peerv1.Quota{Demand: ask.Demand, AheadNs: int64(ask.Ahead), Share: ask.Share,
				TermNs: int64(ask.Term), Had: ask.Had}
		}
	case limiter.OpRecall:
		item.Recall = &weirv1.LoanRecall{Number: op.Loan.Recall.Number, Granted: op.Loan.Recall.Granted}
	}
	return item
}

// operation is the inverse of protoItem. op must be the zero Op, except for an empty check. An invalid item gives an
// Outcome with an Err.
func operation(op *limiter.Op, item *peerv1.Item) {
	op.Hops, op.Left = hops(item.Hops), time.Duration(min(item.TimeoutNs, uint64(maxTimeout)))
	if len(item.Trace) == limiter.TraceContext {
		op.Trace = string(item.Trace)
	}
	if item.Operation <= peerv1.Operation_OPERATION_CHECK || item.Operation > peerv1.Operation_OPERATION_QUOTA {
		op.Outcome.Err = &limit.Error{Kind: limit.Invalid, Message: "an operation that this version does not know"}
		return
	}
	op.Kind, op.Cost, op.RequestID = limiter.OpKind(item.Operation), item.Cost, item.RequestId
	op.Always, op.Spent, op.Bounded = item.Always, item.Spent, item.Bounded
	op.Extra = extra(op.Kind, item)
	if op.Target, op.Outcome.Err = wire.Target(item.Target); len(item.Caller) > maxCaller {
		op.Outcome.Err = &limit.Error{Kind: limit.TooLarge, Message: "the caller's name is too long"}
		return
	}
	op.Caller = item.Caller
	// the node that the caller asked has rejected reserved namespaces in requests
	op.Configured = limit.Reserved(op.Namespace)
}

// hops limits a number of hops from a peer to what Op.Hops can hold.
func hops(n uint32) uint8 { return uint8(min(n, math.MaxUint8)) }

// extra reads the fields of Extra from an item.
func extra(kind limiter.OpKind, item *peerv1.Item) *limiter.Extra {
	op := &limiter.Extra{TTL: time.Duration(item.TtlNs), LeaseID: item.LeaseId, Atomic: item.Atomic, Exact: item.Exact,
		Release: item.Release}
	if len(item.Reservation) == len(op.Reservation) { // any other length: the zero id
		copy(op.Reservation[:], item.Reservation)
	}
	switch kind {
	case limiter.OpBorrow, limiter.OpQuota:
		op.Loan = new(limiter.LoanCall)
		// the report has no target: operation reads the item's
		op.Loan.Report, _ = wire.Borrow(item.Borrower, item.Loan)
		op.Loan.Forwarded = item.Borrower != 0
		op.Loan.Report.Counted = !op.Loan.Forwarded
		q := item.Quota
		op.Loan.Ask = algo.Quota{Demand: q.GetDemand(), Ahead: time.Duration(q.GetAheadNs()), Share: q.GetShare(),
			Term: time.Duration(q.GetTermNs()), Had: q.GetHad()}
	case limiter.OpRecall:
		op.Loan = &limiter.LoanCall{Recall: limit.Recall{Number: item.Recall.GetNumber(),
			Granted: item.Recall.GetGranted()}}
	}
	return op
}

// protoOutcome converts the outcome of an operation.
func protoOutcome(op *limiter.Op) *peerv1.ItemReply {
	out := &op.Outcome
	switch {
	case out.Err != nil:
		return &peerv1.ItemReply{Error: wire.ProtoError(out.Err)}
	case out.NotHolder != nil:
		r := out.NotHolder
		term := &peerv1.Term{Epoch: r.Term.Epoch, N: r.Term.N}
		return &peerv1.ItemReply{NotHolder: &peerv1.NotHolder{Holder: r.Node.Name, Boot: r.Node.Boot, Term: term}}
	case out.Unreachable:
		// The error has no limit.Kind, so that setOutcome makes Unreachable of it, and the node that the caller asked
		// answers by on_error.
		return &peerv1.ItemReply{Error: &weirv1.Error{Code: int32(codes.DeadlineExceeded),
			Message: "the holder could not be reached from here either"}}
	}
	reply := &peerv1.ItemReply{LeaseNs: uint64(out.Lease), Operation: peerv1.Operation(op.Kind)}
	if op.Extra != nil {
		r := &op.Reply
		reply.ExpiresInNs, reply.Released, reply.Refunded, reply.Excess, reply.Over = int64(r.ExpiresIn), r.Released,
			r.Refunded, r.Excess, r.Over
	}
	switch op.Kind {
	case limiter.OpCheck, limiter.OpAcquire, limiter.OpReserve, limiter.OpExtend:
		reply.Decision = wire.ProtoDecision(op.Decision)
	case limiter.OpBorrow:
		reply.Lent = wire.ProtoLent(op.Loan.Report.ID.Number, &op.Loan.Lent)
	case limiter.OpRecall:
		if op.Loan.Known {
			reply.Recalled = wire.ProtoBorrow(&op.Loan.Report)
		}
	case limiter.OpQuota:
		q := &op.Loan.Quota
		reply.QuotaLent = &peerv1.QuotaLent{Granted: q.Granted, Rate: q.Rate, Spent: q.Spent, Free: q.Free,
			Charged: q.Charged}
	}
	return reply
}

// lease bounds the duration of a lease that a peer says. Real leases last for seconds.
func lease(ns uint64) time.Duration { return time.Duration(min(ns, uint64(time.Hour))) }

// setOutcome is the inverse of protoOutcome. It sets Unreachable when the reply does not fit the operation.
func setOutcome(op *limiter.Op, r *peerv1.ItemReply) {
	fits := false
	switch e, to := r.GetError(), r.GetNotHolder(); {
	case e != nil:
		k := wire.Kind(codes.Code(e.Code))
		op.Outcome.Err, fits = limit.NewError(k, e.Field, e.Message), k != 0
	case to != nil:
		op.Outcome.NotHolder = &ownership.Route{
			Standing: ownership.Elsewhere, Node: ownership.Node{Name: to.Holder, Boot: to.Boot},
			Term: ownership.Term{Epoch: to.Term.GetEpoch(), N: to.Term.GetN()},
		}
		fits = true
	default:
		fits = r.GetOperation() == peerv1.Operation(op.Kind) && setResult(op, r)
	}
	if !fits {
		op.Outcome = limiter.Outcome{Unreachable: true}
	}
}

// setResult reads the result of an operation that was carried out. It returns false when the reply has none that fits
// the operation.
func setResult(op *limiter.Op, r *peerv1.ItemReply) bool {
	op.Outcome.Lease = lease(r.LeaseNs)
	if op.Extra != nil {
		op.Reply = limiter.Reply{ExpiresIn: time.Duration(r.ExpiresInNs), Released: r.Released, Refunded: r.Refunded,
			Excess: r.Excess, Over: r.Over}
	}
	switch op.Kind {
	case limiter.OpCheck, limiter.OpAcquire, limiter.OpReserve, limiter.OpExtend:
		if r.Decision == nil {
			return false
		}
		*op.Decision = wire.Decision(r.Decision)
	case limiter.OpBorrow:
		op.Loan.Lent = wire.Lent(r.Lent)
		return r.Lent != nil && r.Lent.Number == op.Loan.Report.ID.Number
	case limiter.OpRecall:
		if r.Recalled != nil && r.Recalled.Number == op.Loan.Recall.Number {
			op.Loan.Known = true
			op.Loan.Report, _ = wire.Borrow(0, r.Recalled) // the report has no target
		}
	case limiter.OpQuota:
		q := r.QuotaLent
		op.Loan.Quota = limit.QuotaLent{Granted: q.GetGranted(), Rate: q.GetRate(), Spent: q.GetSpent(),
			Free: q.GetFree(), Charged: q.GetCharged()}
		return q != nil
	}
	return true
}

package peer

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/varint"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// The packed form of operations and outcomes: see Batch and Reply in peer.proto.

// Flags of an operation's entry.
const (
	opItem = 1 << iota
	opTarget
	opTimeout
	opCost
	opPartial
	opRequestID
	opHops
	opTrace
	opCaller
	opAlways
	opSpent
	opBounded
	opUnknown // and all above
)

// Flags of an outcome's entry.
const (
	outReply = 1 << iota
	outAllowed
	outQuota
	outRetryAfter
	outResetAfter
	outRememberFor
	outGranted
	outDelay
	outNever
	outShadow
	outDegraded
	outFailedOpen
	outFailedClosed
	outLease
	outLimits
	outNearLimit
	outBanned
	outEstimated
	outUnknown // and all above
)

// packer makes the packed form of one batch.
type packer struct {
	numbers  *wire.Numbers
	sequence uint64

	bytes  []byte
	define []*weirv1.StreamTarget // numbers that are new with this batch
	uses   []*weirv1.StreamTarget // all that this batch names

	// The check before.
	target  *limit.Target
	number  uint32
	timeout uint64
	caller  string
}

// add adds an operation whose caller waits for so long. It reports false when there are no numbers left: they must then be
// given anew, from this batch's first operation on.
func (p *packer) add(op *limiter.Op, left time.Duration) bool {
	if op.Kind != limiter.OpCheck || op.Trace != "" && len(op.Trace) != limiter.TraceContext {
		item := protoItem(op, left)
		n := item.SizeVT()
		p.bytes = binary.AppendUvarint(append(p.bytes, opItem), uint64(n))
		p.bytes = appendMessage(p.bytes, n, item)
		return true
	}
	number := p.number
	if p.target == nil || !wire.SameTarget(p.target, &op.Target) {
		var ok bool
		if number, ok = p.numberOf(&op.Target); !ok {
			return false
		}
		p.target = &op.Target
	}
	timeout := uint64(max(left, 0)+time.Microsecond-1) / uint64(time.Microsecond)
	flags := flagIf(number != p.number, opTarget) | flagIf(timeout != p.timeout, opTimeout) |
		flagIf(op.Cost != 1, opCost) | flagIf(op.Partial, opPartial) | flagIf(op.RequestID != "", opRequestID) |
		flagIf(op.Hops != 1, opHops) | flagIf(op.Trace != "", opTrace) | flagIf(op.Caller != p.caller, opCaller) |
		flagIf(op.Always, opAlways) | flagIf(op.Spent, opSpent) | flagIf(op.Bounded, opBounded)
	p.number, p.timeout, p.caller = number, timeout, op.Caller
	b := binary.AppendUvarint(p.bytes, flags)
	if flags&opCaller != 0 {
		b = varint.AppendText(b, op.Caller)
	}
	if flags&opTarget != 0 {
		b = binary.AppendUvarint(b, uint64(number))
	}
	if flags&opTimeout != 0 {
		b = binary.AppendUvarint(b, timeout)
	}
	if flags&opCost != 0 {
		b = binary.AppendVarint(b, op.Cost)
	}
	if flags&opRequestID != 0 {
		b = varint.AppendText(b, op.RequestID)
	}
	if flags&opHops != 0 {
		b = binary.AppendUvarint(b, uint64(op.Hops))
	}
	b = append(b, op.Trace...)
	p.bytes = varint.AppendText(b, op.Key)
	return true
}

// numberOf returns the number of a target, and defines it if this stream has not yet.
func (p *packer) numberOf(t *limit.Target) (uint32, bool) {
	n, fresh := p.numbers.Of(t)
	if n == nil {
		return 0, false
	}
	if fresh {
		p.define = append(p.define, n.Define)
	}
	if n.Used != p.sequence {
		n.Used = p.sequence
		p.uses = append(p.uses, n.Define)
	}
	return n.Define.Number, true
}

func flagIf(set bool, f uint64) uint64 {
	if set {
		return f
	}
	return 0
}

// appendMessage appends a message that takes n bytes.
func appendMessage(b []byte, n int, m interface {
	MarshalToSizedBufferVT([]byte) (int, error)
}) []byte {
	b = slices.Grow(b, n)
	at := len(b)
	b = b[:at+n]
	_, _ = m.MarshalToSizedBufferVT(b[at:]) // it has no error to return
	return b
}

// numberedTargets are the receiver's side of numbers. A target that this node cannot make sense of is the matter of those who
// name it.
type numberedTargets struct {
	wire.Targets
	bad map[uint32]*limit.Error
}

func (t *numberedTargets) define(d *weirv1.StreamTarget) error {
	if d.Number >= wire.MaxTargets {
		return malformed("define", "number %d is not below %d", d.Number, wire.MaxTargets)
	}
	if err := t.Targets.Define(d); err != nil {
		if t.bad == nil {
			t.bad = make(map[uint32]*limit.Error)
		}
		t.bad[d.Number] = err
	}
	return nil
}

func malformed(field, problem string, args ...any) error {
	return status.Error(codes.InvalidArgument, field+": "+fmt.Sprintf(problem, args...))
}

// received is an operation that has arrived, with what it points to.
type received struct {
	limiter.Op
	check    limit.Check
	decision limit.Decision
}

// link points the operation to its own check and decision. It is to be called anew when the operation has been moved.
func (r *received) link() *limiter.Op {
	r.Op.Check, r.Op.Decision = &r.check, &r.decision
	return &r.Op
}

// unpack appends the operations of a batch to ops. What it cannot make sense of in one of them gets an Outcome with an Err;
// an error of its own says that the batch is none.
func (t *numberedTargets) unpack(b *peerv1.Batch, ops []received) ([]received, error) {
	for _, d := range b.Define {
		if err := t.define(d); err != nil {
			return ops, err
		}
	}
	r := varint.Of(string(b.Operations)) // one copy for all keys: the message's own room is used again
	var number, timeout uint64
	var caller string
	for r.Rest != "" {
		if len(ops) == maxBatch {
			return ops, status.Errorf(codes.ResourceExhausted, "operations: a batch holds at most %d", maxBatch)
		}
		ops = append(ops, received{})
		op := ops[len(ops)-1].link()
		flags := r.Uvarint()
		if flags >= opUnknown || flags&opItem != 0 && flags != opItem {
			return ops, malformed("operations", "item %d has flags %#x", len(ops)-1, flags)
		}
		if flags&opCaller != 0 {
			if caller = r.Text(math.MaxInt); len(caller) > maxCaller {
				return ops, malformed("operations", "item %d names a caller of %d bytes", len(ops)-1, len(caller))
			}
		}
		if flags&opItem != 0 {
			item := new(peerv1.Item)
			if err := item.UnmarshalVT([]byte(r.Text(math.MaxInt))); err != nil || r.Failed() {
				return ops, malformed("operations", "item %d is malformed", len(ops)-1)
			}
			operation(op, item)
			continue
		}
		if flags&opTarget != 0 {
			number = r.Uvarint()
		}
		if flags&opTimeout != 0 {
			timeout = r.Uvarint()
		}
		op.Kind, op.Cost, op.Hops = limiter.OpCheck, 1, 1
		if flags&opCost != 0 {
			op.Cost = r.Varint()
		}
		op.Partial, op.Always, op.Spent = flags&opPartial != 0, flags&opAlways != 0, flags&opSpent != 0
		op.Bounded = flags&opBounded != 0
		if flags&opRequestID != 0 {
			op.RequestID = r.Text(math.MaxInt)
		}
		if flags&opHops != 0 {
			op.Hops = uint8(min(r.Uvarint(), math.MaxUint8))
		}
		if flags&opTrace != 0 {
			op.Trace = r.Take(limiter.TraceContext)
		}
		op.Left = time.Duration(min(timeout, uint64(maxTimeout/time.Microsecond))) * time.Microsecond
		var known bool
		if op.Target, known = t.At(number); !known {
			if op.Outcome.Err = t.bad[uint32(min(number, wire.MaxTargets))]; op.Outcome.Err == nil {
				return ops, malformed("operations", "item %d names target %d, which this stream has not defined", len(ops)-1, number)
			}
		}
		op.Key, op.Caller = r.Text(math.MaxInt), caller
		op.Configured = limit.Reserved(op.Namespace) // its sender has made sure that no caller sent it
		if r.Failed() {
			return ops, malformed("operations", "item %d is cut short", len(ops)-1)
		}
	}
	return ops, nil
}

// maxCaller is the longest name of a caller, in bytes.
const maxCaller = 1<<8 - 1

// quota is what decisions of one policy have in common.
type quota struct {
	limit  int64
	window time.Duration
}

// plain says whether what came of an operation can be told by a packed decision.
func plain(op *limiter.Op) bool {
	d := op.Decision
	return op.Kind == limiter.OpCheck && op.Outcome.Err == nil && op.Outcome.NotHolder == nil && !op.Outcome.Unreachable &&
		d.Policy == op.PolicyName() && d.RequestID == op.RequestID && d.LeaseID == "" && d.ReservationID == ""
}

// appendOutcome appends what came of an operation. q is of the decision before.
func appendOutcome(b []byte, q *quota, op *limiter.Op) []byte {
	if !plain(op) {
		reply := protoOutcome(op)
		n := reply.SizeVT()
		return appendMessage(binary.AppendUvarint(append(b, outReply), uint64(n)), n, reply)
	}
	d := op.Decision
	flags := flagIf(d.Allowed, outAllowed) | flagIf(*q != quota{d.Limit, d.Window}, outQuota) |
		flagIf(d.RetryAfter != 0, outRetryAfter) | flagIf(d.ResetAfter != 0, outResetAfter) |
		flagIf(d.RememberFor != 0, outRememberFor) | flagIf(d.Granted != usualGrant(d.Allowed, op.Cost), outGranted) |
		flagIf(d.Delay != 0, outDelay) | flagIf(d.Shadow, outShadow) | flagIf(d.Degraded, outDegraded) |
		flagIf(d.FailedOpen, outFailedOpen) | flagIf(d.FailedClosed, outFailedClosed) | flagIf(op.Outcome.Lease != 0, outLease) |
		flagIf(len(d.Limits) > 0, outLimits) | flagIf(d.NearLimit, outNearLimit) | flagIf(d.Banned, outBanned) |
		flagIf(d.RetryAfterEstimated, outEstimated)
	if d.RetryAfter == algo.Never {
		flags = flags&^outRetryAfter | outNever
	}
	*q = quota{d.Limit, d.Window}
	b = binary.AppendUvarint(b, flags)
	if flags&outQuota != 0 {
		b = binary.AppendUvarint(binary.AppendVarint(b, d.Limit), uint64(d.Window))
	}
	if flags&outRetryAfter != 0 {
		b = binary.AppendUvarint(b, uint64(d.RetryAfter))
	}
	if flags&outResetAfter != 0 {
		b = binary.AppendUvarint(b, uint64(d.ResetAfter))
	}
	if flags&outRememberFor != 0 {
		b = binary.AppendUvarint(b, uint64(d.RememberFor))
	}
	if flags&outGranted != 0 {
		b = binary.AppendVarint(b, d.Granted)
	}
	if flags&outDelay != 0 {
		b = binary.AppendUvarint(b, uint64(d.Delay))
	}
	if flags&outLease != 0 {
		b = binary.AppendUvarint(b, uint64(op.Outcome.Lease))
	}
	if flags&outLimits != 0 {
		b = binary.AppendUvarint(b, uint64(len(d.Limits)))
		for i := range d.Limits {
			b = appendLimit(b, &d.Limits[i])
		}
	}
	return binary.AppendVarint(b, d.Remaining)
}

// usualGrant is what a check is granted unless it says so.
func usualGrant(allowed bool, cost int64) int64 {
	if allowed {
		return cost
	}
	return 0
}

func appendLimit(b []byte, s *limit.LimitStatus) []byte {
	b = binary.AppendUvarint(binary.AppendVarint(b, s.Limit), uint64(s.Window))
	b = binary.AppendUvarint(binary.AppendVarint(b, s.Remaining), uint64(s.ResetAfter))
	if s.RetryAfter == algo.Never {
		return append(b, 0)
	}
	return binary.AppendUvarint(append(b, 1), uint64(s.RetryAfter))
}

// outcomes reads the outcomes of a packed reply one by one.
type outcomes struct {
	varint.Reader[string]
	quota
}

func duration(r *varint.Reader[string]) time.Duration { return time.Duration(r.Uvarint()) }

// next fills in the Outcome of an operation. One that does not fit it is none. It reports false when there is no further
// outcome, or none that can be read.
func (r *outcomes) next(op *limiter.Op) bool {
	if r.Rest == "" {
		return false
	}
	out, d := &op.Outcome, op.Decision
	*out, *d = limiter.Outcome{}, limit.Decision{}
	flags := r.Uvarint()
	if flags == outReply {
		reply := new(peerv1.ItemReply)
		if reply.UnmarshalVT([]byte(r.Text(math.MaxInt))) != nil || r.Failed() {
			return false
		}
		setOutcome(op, reply)
		return true
	}
	if flags&outReply != 0 || flags >= outUnknown {
		return false
	}
	d.Policy, d.RequestID = op.PolicyName(), op.RequestID
	d.Allowed = flags&outAllowed != 0
	if flags&outQuota != 0 {
		r.limit, r.window = r.Varint(), duration(&r.Reader)
	}
	d.Limit, d.Window = r.limit, r.window
	if flags&outRetryAfter != 0 {
		d.RetryAfter = duration(&r.Reader)
	}
	if flags&outNever != 0 {
		d.RetryAfter = algo.Never
	}
	if flags&outResetAfter != 0 {
		d.ResetAfter = duration(&r.Reader)
	}
	if flags&outRememberFor != 0 {
		d.RememberFor = duration(&r.Reader)
	}
	if d.Granted = usualGrant(d.Allowed, op.Cost); flags&outGranted != 0 {
		d.Granted = r.Varint()
	}
	if flags&outDelay != 0 {
		d.Delay = duration(&r.Reader)
	}
	d.Shadow, d.Degraded = flags&outShadow != 0, flags&outDegraded != 0
	d.FailedOpen, d.FailedClosed = flags&outFailedOpen != 0, flags&outFailedClosed != 0
	d.NearLimit, d.Banned, d.RetryAfterEstimated = flags&outNearLimit != 0, flags&outBanned != 0, flags&outEstimated != 0
	if flags&outLease != 0 {
		out.Lease = lease(r.Uvarint())
	}
	if flags&outLimits != 0 {
		d.Limits = r.limits()
	}
	d.Remaining = r.Varint()
	if op.Kind != limiter.OpCheck {
		*out = limiter.Outcome{Unreachable: true}
	}
	return !r.Failed()
}

// limits reads the limits of a policy that has several. There are no more than there are bytes for.
func (r *outcomes) limits() []limit.LimitStatus {
	n := r.Uvarint()
	const least = 5 // bytes of one
	if n > uint64(len(r.Rest)/least) {
		r.Fail()
	}
	if n == 0 || r.Failed() {
		return nil
	}
	list := make([]limit.LimitStatus, n)
	for i := range list {
		s := &list[i]
		s.Limit, s.Window = r.Varint(), duration(&r.Reader)
		s.Remaining, s.ResetAfter = r.Varint(), duration(&r.Reader)
		switch r.Uvarint() {
		case 0:
			s.RetryAfter = algo.Never
		case 1:
			s.RetryAfter = duration(&r.Reader)
		default:
			r.Fail()
		}
	}
	return list
}

package peer

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// This file has what a Batch and a Reply are made of: checks and decisions in wire's form, with what nodes tell each other besides, and
// messages for all other operations.

// packer makes a Batch.
type packer struct {
	numbers *wire.Numbers
	batch   *peerv1.Batch
	uses    []*weirv1.StreamTarget // all targets that the batch names; Define has those that are new with it
	checks  int                    // of the batch, when it is complete

	target *limit.Target // of the check before
	number uint32
}

// newPacker returns a packer for so many checks, whose keys take so many bytes.
func newPacker(numbers *wire.Numbers, b *peerv1.Batch, checks, keys int) *packer {
	room := new(struct {
		in       weirv1.CheckStreamRequest
		timeouts [1]uint32
		p        packer
	})
	b.Checks = &room.in
	if room.in.TimeoutsMs = room.timeouts[:0]; checks > 0 {
		room.in.Keys, room.in.KeyLengths = make([]byte, 0, keys), make([]uint32, 0, checks)
	}
	room.p = packer{numbers: numbers, batch: b, checks: checks}
	return &room.p
}

// add adds an operation whose caller waits for so long. It reports false when there are no numbers left: they must then be
// given anew, from this batch's first operation on.
func (p *packer) add(op *limiter.Op, left time.Duration) bool {
	if op.Kind != limiter.OpCheck {
		p.batch.Items = append(p.batch.Items, protoItem(op, left))
		return true
	}
	if p.target == nil || !wire.SameTarget(p.target, &op.Target) {
		if !p.name(&op.Target) {
			return false
		}
	}
	b, in := p.batch, p.batch.Checks
	i, n := len(in.KeyLengths), p.checks
	wire.AddCheck(in, i, n, p.number, op.Check)
	wire.AddTrace(in, i, op.Trace)
	wire.Add(&in.TimeoutsMs, i, n, uint32((min(max(left, 0), maxTimeout)+time.Millisecond-1)/time.Millisecond), 0)
	flags := flagIf(op.Always, peerv1.CheckFlag_CHECK_FLAG_ALWAYS) | flagIf(op.Spent, peerv1.CheckFlag_CHECK_FLAG_SPENT) |
		flagIf(op.Bounded, peerv1.CheckFlag_CHECK_FLAG_BOUNDED)
	wire.Add(&b.Flags, i, n, flags, 0)
	wire.Add(&b.Hops, i, n, uint32(op.Hops), 1)
	wire.Add(&b.Callers, i, n, op.Caller, "")
	return true
}

func flagIf(set bool, f peerv1.CheckFlag) uint32 {
	if set {
		return uint32(f)
	}
	return 0
}

// name finds the number of a target for the checks that follow, and defines it if this stream has not yet.
func (p *packer) name(t *limit.Target) bool {
	n, fresh := p.numbers.Of(t)
	if n == nil {
		return false
	}
	if fresh {
		p.batch.Checks.Define = append(p.batch.Checks.Define, n.Define)
	}
	if n.Used != p.batch.Sequence {
		n.Used = p.batch.Sequence
		p.uses = append(p.uses, n.Define)
	}
	p.target, p.number = t, n.Define.Number
	return true
}

// numberedTargets are the receiver's side of numbers. A target that this node cannot make sense of is the matter of the checks that name it.
type numberedTargets struct {
	wire.Targets
	bad map[uint32]*limit.Error
}

func (t *numberedTargets) define(d *weirv1.StreamTarget) error {
	if d.Number >= wire.MaxTargets {
		return malformed("define", "number %d is not below %d", d.Number, wire.MaxTargets)
	}
	delete(t.bad, d.Number)
	if err := t.Targets.Define(d); err != nil {
		if t.bad == nil {
			t.bad = make(map[uint32]*limit.Error)
		}
		t.bad[d.Number] = err
	}
	return nil
}

// named is At, and the zero Target with a number of a bad one.
func (t *numberedTargets) named(number uint64) (limit.Target, bool) {
	target, ok := t.At(number)
	return target, ok || t.bad[uint32(min(number, wire.MaxTargets))] != nil
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

// unpack appends the operations of a batch to ops, beyond whose end all is zero: its checks, then its items. What it cannot make sense of in one of them gets an Outcome
// with an Err; an error of its own says that the batch is none.
func (t *numberedTargets) unpack(b *peerv1.Batch, ops []received) ([]received, error) {
	in := b.Checks
	if in == nil {
		in = new(weirv1.CheckStreamRequest)
	}
	n := len(in.KeyLengths)
	if n+len(b.Items) > maxBatch {
		return ops, status.Errorf(codes.ResourceExhausted, "a batch holds at most %d operations", maxBatch)
	}
	for _, d := range in.Define {
		if err := t.define(d); err != nil {
			return ops, err
		}
	}
	if !wire.Fits(b.Flags, n) || !wire.Fits(b.Hops, n) || !wire.Fits(b.Callers, n) {
		return ops, malformed("flags, hops, callers", "must each have one element for each of the %d checks, one for all, or none", n)
	}
	first := len(ops)
	// Not by append, which would set half a kilobyte of each to zero once more.
	ops = slices.Grow(ops, n+len(b.Items))[:first+n]
	checks := ops[first:]
	if err := wire.ReadChecks(in, t.named, func(i int) *limit.Check { return &checks[i].check }); err != nil {
		return ops, malformed("checks."+err.Field, "%s", err.Message)
	}
	for i := range checks {
		if err := t.readOp(b, i, &checks[i]); err != nil {
			return ops, err
		}
	}
	for _, item := range b.Items {
		ops = append(ops, received{})
		operation(ops[len(ops)-1].link(), item)
	}
	return ops, nil
}

// readOp reads what a check from a node, which is there, says besides.
func (t *numberedTargets) readOp(b *peerv1.Batch, i int, to *received) error {
	op, in := to.link(), b.Checks
	if op.Caller = wire.At(b.Callers, i, ""); len(op.Caller) > maxCaller {
		return malformed("callers", "check %d names a caller of %d bytes", i, len(op.Caller))
	}
	flags := peerv1.CheckFlag(wire.At(b.Flags, i, 0))
	op.Always, op.Spent = flags&peerv1.CheckFlag_CHECK_FLAG_ALWAYS != 0, flags&peerv1.CheckFlag_CHECK_FLAG_SPENT != 0
	op.Bounded = flags&peerv1.CheckFlag_CHECK_FLAG_BOUNDED != 0
	op.Kind, op.Hops = limiter.OpCheck, hops(wire.At(b.Hops, i, 1))
	op.Left = min(time.Duration(wire.At(in.TimeoutsMs, i, 0))*time.Millisecond, maxTimeout)
	if trace := wire.At(in.TraceContexts, i, nil); len(trace) == limiter.TraceContext {
		op.Trace = string(trace)
	}
	op.Configured = limit.Reserved(op.Namespace) // its sender has made sure that no caller sent it
	if op.Policy == "" && op.Limit == nil {
		op.Outcome.Err = t.bad[wire.At(in.Targets, i, 0)]
	}
	return nil
}

// maxCaller is the longest name of a caller, in bytes.
const maxCaller = 1<<8 - 1

// plain says whether what came of a check can be told by a decision in a response's lists.
func plain(op *limiter.Op) bool {
	d := op.Decision
	return op.Outcome.Err == nil && op.Outcome.NotHolder == nil && !op.Outcome.Unreachable &&
		d.Policy == op.PolicyName() && d.RequestID == op.RequestID && d.LeaseID == "" && d.ReservationID == ""
}

// reply makes the Reply to a batch whose operations have their outcomes, in the order of unpack.
func reply(sequence uint64, ops []received) *peerv1.Reply {
	r := &peerv1.Reply{Sequence: sequence, Checks: wire.NewDecisions()}
	n := len(ops)
	for n > 0 && ops[n-1].Kind != limiter.OpCheck {
		n--
	}
	r.Answered = uint32(n)
	for i := range ops[:n] {
		op := &ops[i].Op
		d := op.Decision
		if !plain(op) {
			other := protoOutcome(op)
			other.Check = uint32(i)
			r.Others, d = append(r.Others, other), new(limit.Decision)
		}
		wire.AddDecision(r.Checks, i, n, uint32(i), d)
		wire.Add(&r.LeasesNs, i, n, uint64(op.Outcome.Lease), 0)
	}
	for i := range ops[n:] {
		r.Items = append(r.Items, protoOutcome(&ops[n+i].Op))
	}
	return r
}

// outcomes reads the outcomes of a Reply one by one.
type outcomes struct {
	*peerv1.Reply
	limits        []*weirv1.StreamLimits
	others, items []*peerv1.ItemReply
	check         int // the next one
}

// outcomesOf returns nil when the reply is none to so many checks and other operations.
func outcomesOf(r *peerv1.Reply, checks, items int) *outcomes {
	if r.Checks == nil {
		r.Checks = new(weirv1.CheckStreamResponse)
	}
	if int(r.Answered) != checks || len(r.Items) != items || !wire.DecisionsFit(r.Checks, checks) || !wire.Fits(r.LeasesNs, checks) {
		return nil
	}
	return &outcomes{Reply: r, limits: r.Checks.Limits, others: r.Others, items: r.Items}
}

// next fills in the Outcome of an operation. One that does not fit it is none.
func (r *outcomes) next(op *limiter.Op, isCheck bool) {
	if op.Outcome = (limiter.Outcome{}); !isCheck {
		*op.Decision = limit.Decision{}
		setOutcome(op, r.items[0])
		r.items = r.items[1:]
		return
	}
	i := r.check
	r.check++
	d := op.Decision
	wire.ReadDecision(r.Checks, i, d)
	d.Policy, d.RequestID, d.LeaseID, d.ReservationID, d.Limits = op.PolicyName(), op.RequestID, "", "", nil
	op.Outcome.Lease = lease(wire.At(r.LeasesNs, i, 0))
	if len(r.limits) > 0 && r.limits[0].Check == uint32(i) {
		d.Limits = wire.Limits(r.limits[0].Limits)
		r.limits = r.limits[1:]
	}
	if len(r.others) > 0 && r.others[0].Check == uint32(i) {
		op.Outcome, *d = limiter.Outcome{}, limit.Decision{}
		setOutcome(op, r.others[0])
		r.others = r.others[1:]
	}
}

// ended says whether all that the reply has belonged to an operation.
func (r *outcomes) ended() bool { return len(r.limits) == 0 && len(r.others) == 0 && len(r.items) == 0 }

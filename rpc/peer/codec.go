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

// This file packs operations into a Batch and outcomes into a Reply, and reads both. Checks and decisions have the form
// of wire/checks.go, with lists of the fields that only nodes need (flags, hops, callers, leases). All other operations
// are Items (convert.go).

// packer makes one Batch.
type packer struct {
	numbers *wire.Numbers
	batch   *peerv1.Batch
	checks  int // number of checks in the complete batch

	target *limit.Target // of the last check
	number uint32
}

// newPacker returns a packer for a batch of so many checks. keys is the length of their keys in bytes.
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

// add adds an operation whose caller waits for left. It returns false when there is no number left for its target: the
// batch must then be packed again from its first operation, after numbers.Reset.
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
	flags := flagIf(op.Always, peerv1.CheckFlag_CHECK_FLAG_ALWAYS) | flagIf(op.Spent,
		peerv1.CheckFlag_CHECK_FLAG_SPENT) |
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

// name sets the number for the following checks to that of a target, and defines the number if the stream has not. It
// returns false when there is no number left.
func (p *packer) name(t *limit.Target) bool {
	define, fresh := p.numbers.Of(t)
	if define == nil {
		return false
	}
	if fresh {
		p.batch.Checks.Define = append(p.batch.Checks.Define, define)
	}
	p.target, p.number = t, define.Number
	return true
}

// numberedTargets are the targets that the sender of a stream has defined, by number. Each check that names an invalid
// target fails with the error kept in bad; the other checks of the batch do not.
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

// named returns the target with a number; for a number in bad, the zero Target and true.
func (t *numberedTargets) named(number uint64) (limit.Target, bool) {
	target, ok := t.At(number)
	return target, ok || t.bad[uint32(min(number, wire.MaxTargets))] != nil
}

func malformed(field, problem string, args ...any) error {
	return status.Error(codes.InvalidArgument, field+": "+fmt.Sprintf(problem, args...))
}

// received is an operation that a peer has sent, with its own check and decision.
type received struct {
	limiter.Op
	check    limit.Check
	decision limit.Decision
}

// link points the operation to its own check and decision. It must be called again after the operation has been copied.
func (r *received) link() *limiter.Op {
	r.Op.Check, r.Op.Decision = &r.check, &r.decision
	return &r.Op
}

// unpack appends the operations of a batch to ops: the checks, then the items. The room of ops beyond its length must
// be zero. An operation that is invalid gets an Outcome with an Err. An error says that the batch as a whole is
// malformed.
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
		return ops, malformed("flags, hops, callers",
			"must each have one element for each of the %d checks, one for all, or none", n)
	}
	first := len(ops)
	// append would clear the elements, of half a kilobyte each, a second time.
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

// readOp reads the fields of check i that only nodes send. Its target is read already.
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
	// the node that the caller asked has rejected reserved namespaces in requests
	op.Configured = limit.Reserved(op.Namespace)
	if op.Policy == "" && op.Limit == nil {
		op.Outcome.Err = t.bad[wire.At(in.Targets, i, 0)]
	}
	return nil
}

// maxCaller bounds the name of a caller, in bytes.
const maxCaller = 1<<8 - 1

// plain says whether the lists of a response can express the outcome of a check: a decision whose texts follow from the
// check.
func plain(op *limiter.Op) bool {
	d := op.Decision
	return op.Outcome.Err == nil && op.Outcome.NotHolder == nil && !op.Outcome.Unreachable &&
		d.Policy == op.PolicyName() && d.RequestID == op.RequestID && d.LeaseID == "" && d.ReservationID == ""
}

// reply makes the Reply to a batch. ops are in the order of unpack and have their outcomes.
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

// outcomes reads the outcomes of a Reply one after another.
type outcomes struct {
	*peerv1.Reply
	limits        []*weirv1.StreamLimits
	others, items []*peerv1.ItemReply
	check         int // index of the next check
}

// outcomesOf returns nil when the reply does not fit a batch of so many checks and items.
func outcomesOf(r *peerv1.Reply, checks, items int) *outcomes {
	if r.Checks == nil {
		r.Checks = new(weirv1.CheckStreamResponse)
	}
	if int(r.Answered) != checks || len(r.Items) != items || !wire.DecisionsFit(r.Checks, checks) ||
		!wire.Fits(r.LeasesNs, checks) {
		return nil
	}
	return &outcomes{Reply: r, limits: r.Checks.Limits, others: r.Others, items: r.Items}
}

// next sets the Outcome of the next operation: Unreachable, when the reply does not fit it.
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

// ended says whether every part of the reply has been read.
func (r *outcomes) ended() bool { return len(r.limits) == 0 && len(r.others) == 0 && len(r.items) == 0 }

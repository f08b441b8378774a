package limiter

import (
	"context"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
)

// Tracer makes spans of what is done for callers whose calls are traced. Its methods are safe for concurrent use and return
// at once.
type Tracer interface {
	// Start begins a span below the one that ctx carries, and returns a ctx that carries the new one. The Span is nil when
	// the call that ctx belongs to is not traced.
	Start(ctx context.Context, name string) (context.Context, Span)
	// Continue begins a span below one of another node, of which Span.Context is given; nil when that cannot be one.
	Continue(parent, name string) Span
	// Below is Continue for a span of this node.
	Below(parent, name string) Span
}

// Span is a part of a trace: something that began and ends.
type Span interface {
	// Context is what another node needs to continue the trace: TraceContext bytes.
	Context() string
	// Peer says which node is being asked.
	Peer(name string)
	// End ends the span and says what came of the operations that it is about.
	End(ops []Traced)
}

// TraceContext is the length of what Span.Context returns: the ids of a trace and of a span, as W3C Trace Context has them.
const TraceContext = 16 + 8

// Traced is what a trace says of an operation: never its key.
type Traced struct {
	Operation string // such as "check"
	Policy    string // "inline" for a limit sent along; empty when it is not a policy's name
	Result    string // as weir_requests_total has it; also "unreachable", "not_holder"; "ok" of what is no question
	Partition int
	Term      string // under which this node decides for the partition; empty when it does not
}

const (
	// maxTraced bounds how much of a traced batch is in its trace.
	maxTraced = 16
	// maxTracedReceived bounds it for a message of a peer, which holds operations of several callers.
	maxTracedReceived = 64
)

// endSpan ends the span of a call.
func (l *Limiter) endSpan(span Span, ops []Op) {
	var each []Traced
	for i := range ops[:min(len(ops), maxTraced)] {
		if ops[i].rule != nil {
			each = append(each, l.traced(&ops[i]))
		}
	}
	span.End(each)
}

// endSpans ends the span of a call of operations that are no checks.
func (l *Limiter) endSpans(span Span, ops []*Op) {
	var each []Traced
	for _, op := range ops[:min(len(ops), maxTraced)] {
		each = append(each, l.traced(op))
	}
	span.End(each)
}

// traceForward begins the span of asking a peer, and has it go along with the operations. It returns how to end it.
func (l *Limiter) traceForward(ctx context.Context, to ownership.Node, ops []*Op) (end func()) {
	_, span := l.cfg.Tracer.Start(ctx, "forward")
	if span == nil {
		return l.traceForwardEach(to, ops)
	}
	span.Peer(to.Name)
	for _, op := range ops[:min(len(ops), maxTraced)] {
		op.Trace = span.Context()
	}
	return func() { span.End(nil) }
}

// traceForwardEach is traceForward for operations of several callers, some of which may be traced.
func (l *Limiter) traceForwardEach(to ownership.Node, ops []*Op) (end func()) {
	var spans []continuedSpan
	var below []string // what each span is below
	for _, op := range ops {
		if op.Trace == "" || len(spans) == maxTracedReceived {
			continue
		}
		if span := l.cfg.Tracer.Below(op.Trace, "forward"); span != nil {
			span.Peer(to.Name)
			spans, below = append(spans, continuedSpan{op, span}), append(below, op.Trace)
			op.Trace = span.Context()
		}
	}
	return func() {
		for i, s := range spans {
			s.op.Trace = below[i] // another node may be asked
			s.span.End(nil)
		}
	}
}

// trace begins the spans of those of a batch's checks that are traced. What is done for them hangs below.
func (b *Batch) trace(l *Limiter) {
	if b.Traces == nil || l.cfg.Tracer == nil {
		return
	}
	b.spans = make(map[int]Span)
	for i, parent := range b.Traces {
		if parent == "" {
			continue
		}
		if span := l.cfg.Tracer.Below(parent, "decide"); span != nil {
			b.spans[i], b.ops[i].Trace = span, span.Context()
		}
	}
}

// continued is the spans of operations that a peer sent.
type continued []continuedSpan

type continuedSpan struct {
	op   *Op
	span Span
}

// traceReceived begins the spans of those operations from a peer that are traced there. What they lead to goes below them.
func (l *Limiter) traceReceived(ops []*Op) continued {
	var spans continued
	for _, op := range ops {
		if op.Trace == "" {
			continue
		}
		var span Span
		if len(spans) < maxTracedReceived {
			span = l.cfg.Tracer.Continue(op.Trace, "decide")
		}
		if span == nil {
			op.Trace = ""
			continue
		}
		op.Trace = span.Context()
		spans = append(spans, continuedSpan{op, span})
	}
	return spans
}

// end ends the spans.
func (c continued) end(l *Limiter) {
	for _, s := range c {
		s.span.End([]Traced{l.traced(s.op)})
	}
}

// traced is what a trace says of an operation.
func (l *Limiter) traced(op *Op) Traced {
	t := Traced{Operation: op.Kind.String(), Result: op.result(), Partition: int(op.partition)}
	if name := op.PolicyName(); limit.ValidPolicyName(name) { // an operation that was not accepted may have any
		t.Policy = name
	}
	if r := l.cfg.Ownership.Route(int(op.partition)); r.Standing == ownership.Owned {
		t.Term = r.Term.String()
	}
	return t
}

// operations are the names of operations; those between nodes alone have none.
var operations = [...]string{
	OpCheck: "check", OpAcquire: "acquire", OpRenew: "renew", OpRelease: "release", OpRefund: "refund", OpReset: "reset",
	OpReserve: "reserve", OpSettle: "settle", OpExtend: "extend", OpQuota: "quota",
}

// String is the operation's name.
func (k OpKind) String() string {
	if int(k) < len(operations) && operations[k] != "" {
		return operations[k]
	}
	return "unknown"
}

// result is what came of an operation, in a word.
func (op *Op) result() string {
	out := &op.Outcome
	switch d := op.Decision; {
	case out.Err != nil:
		return "error"
	case out.NotHolder != nil:
		return "not_holder"
	case out.Unreachable:
		return "unreachable"
	case !op.asks():
		return "ok"
	case d.FailedOpen:
		return "failed_open"
	case d.FailedClosed:
		return "failed_closed"
	case d.Shadow:
		return "shadow"
	case d.Allowed:
		return "allowed"
	}
	return "refused"
}

package limiter

import (
	"context"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
)

// This file makes the spans of traced operations: "decide" around a decision on this node, "forward" around the question to another node.
// Op.Trace is the span context that the operation's next span hangs below; it crosses to a peer with the operation, and is empty for an operation
// that is not traced. A trace never has a key.

// Tracer makes spans for calls that are traced. Its methods are safe for concurrent use and return at once.
type Tracer interface {
	// Start begins a span below the one that ctx carries, and returns a ctx that carries the new one. The Span is nil when
	// the call that ctx belongs to is not traced.
	Start(ctx context.Context, name string) (context.Context, Span)
	// Continue begins a span below a span of another node, which has sent parent, its Span.Context. It returns nil if parent is no context.
	Continue(parent, name string) Span
	// Below is Continue for a span of this node.
	Below(parent, name string) Span
}

// Span is a part of a trace, with a beginning and an end.
type Span interface {
	// Context returns the TraceContext bytes that another node needs to continue the trace.
	Context() string
	// Peer names the node that is asked.
	Peer(name string)
	// End ends the span. ops are the results of its operations.
	End(ops []Traced)
}

// TraceContext is the length of what Span.Context returns: the ids of a trace and of a span, as W3C Trace Context has them.
const TraceContext = 16 + 8

// Traced is an operation in a trace, without its key.
type Traced struct {
	Operation string // such as "check"
	Policy    string // "inline" for a limit sent along; empty when it is not a policy's name
	Result    string // as in weir_requests_total; also "unreachable", "not_holder"; "ok" for operations other than checks, acquires and reserves
	Partition int
	Term      string // the term under which this node decides for the partition; empty when another node does
}

const (
	// maxTraced bounds how many checks of a traced batch are in its trace.
	maxTraced = 16
	// maxTracedReceived bounds the traced operations of a peer's message, which has operations of several callers.
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

// endSpans ends the span of a call of other operations than checks.
func (l *Limiter) endSpans(span Span, ops []*Op) {
	var each []Traced
	for _, op := range ops[:min(len(ops), maxTraced)] {
		each = append(each, l.traced(op))
	}
	span.End(each)
}

// traceForward begins the span of a question to a peer, and sets it as the operations' Trace. The caller must call end after the answer.
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
	var below []string // each operation's Trace before its span
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
			s.op.Trace = below[i] // the next question to a node has a span of its own
			s.span.End(nil)
		}
	}
}

// trace begins the span of each traced check of a batch, and sets it as the check's Trace.
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

// continued are the spans of operations that a peer has sent.
type continued []continuedSpan

type continuedSpan struct {
	op   *Op
	span Span
}

// traceReceived begins the span of each operation from a peer that is traced there, and sets it as the operation's Trace.
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

// traced returns an operation as a trace has it.
func (l *Limiter) traced(op *Op) Traced {
	t := Traced{Operation: op.Kind.String(), Result: op.result(), Partition: int(op.partition)}
	if name := op.PolicyName(); limit.ValidPolicyName(name) { // an operation that was rejected may have any text
		t.Policy = name
	}
	if r := l.cfg.Ownership.Route(int(op.partition)); r.Standing == ownership.Owned {
		t.Term = r.Term.String()
	}
	return t
}

// operations are the names of operations. Kinds that only nodes send (OpBorrow, OpRecall) have none.
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

// result is the Result of an operation.
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

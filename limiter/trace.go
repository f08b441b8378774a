package limiter

import (
	"context"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
)

// This file makes the spans of traced operations: "decide" around a decision on this node, "forward" around the
// question to another node. Op.Trace is the span context that the operation's next span hangs below; it crosses to a
// peer with the operation, and is empty for an operation that is not traced. A trace never has a key.

// Tracer makes spans for calls that are traced. Its methods are safe for concurrent use and return at once.
type Tracer interface {
	// Start begins a span below the one that ctx carries, and returns a ctx that carries the new one. The Span is nil
	// when the call that ctx belongs to is not traced.
	Start(ctx context.Context, name string) (context.Context, Span)
	// Continue begins a span below a span of another node, which has sent parent, its Span.Context. It returns nil if
	// parent is no context.
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

// TraceContext is the length of what Span.Context returns: the ids of a trace and of a span, as W3C Trace Context has
// them.
const TraceContext = 16 + 8

// Traced is an operation in a trace, without its key.
type Traced struct {
	Operation string // such as "check"
	Policy    string // "inline" for a limit sent along; empty when it is not a policy's name
	// As in weir_requests_total; also "unreachable", "not_holder"; "ok" for operations other than checks, acquires and
	// reserves.
	Result    string
	Partition int
	Term      string // the term under which this node decides for the partition; empty when another node does
}

const (
	maxTraced = 16 // operations that a span tells of
	maxSpans  = 64 // of a message between nodes, which has operations of several callers
)

// spanOf is a span with the operations that it is about.
type spanOf struct {
	Span
	ops   []*Op
	above string // the operations' Trace without the span
}

type traces []spanOf

// traceCall begins the span of a call, and sets it as the Trace of the first operations. The result is nil if the call
// is not traced.
func (l *Limiter) traceCall(ctx context.Context, ops []*Op) traces {
	if l.cfg.Tracer == nil {
		return nil
	}
	_, span := l.cfg.Tracer.Start(ctx, "decide")
	if span == nil {
		return nil
	}
	ops = ops[:min(len(ops), maxTraced)]
	for _, op := range ops {
		op.Trace = span.Context()
	}
	return traces{{Span: span, ops: ops}}
}

// trace begins spans below the Traces of operations, and sets them as their Trace. Operations beside each other with
// the same Trace share a span. An operation that gets no span is not traced any further.
func (l *Limiter) trace(ops []*Op, begin func(t Tracer, parent, name string) Span, name string) (all traces) {
	if l.cfg.Tracer == nil {
		return nil
	}
	for _, op := range ops {
		if op.Trace == "" {
			continue
		}
		if n := len(all); n == 0 || all[n-1].above != op.Trace {
			if n == maxSpans {
				op.Trace = ""
				continue
			}
			span := begin(l.cfg.Tracer, op.Trace, name)
			if span == nil {
				op.Trace = ""
				continue
			}
			all = append(all, spanOf{Span: span, above: op.Trace})
		}
		s := &all[len(all)-1]
		s.ops = append(s.ops, op)
		op.Trace = s.Context()
	}
	return all
}

// end ends the spans. They tell what came of the first of their operations.
func (s traces) end(l *Limiter) {
	for i := range s {
		of := &s[i]
		var each []Traced
		for _, op := range of.ops[:min(len(of.ops), maxTraced)] {
			each = append(each, l.traced(op))
		}
		of.End(each)
	}
}

// traceForward begins the spans of a question to a peer. The caller must call end after the answer: the next question
// has spans of its own.
func (l *Limiter) traceForward(to ownership.Node, ops []*Op) (end func()) {
	all := l.trace(ops, Tracer.Below, "forward")
	for i := range all {
		all[i].Peer(to.Name)
	}
	return func() {
		for i := range all {
			for _, op := range all[i].ops {
				op.Trace = all[i].above
			}
			all[i].End(nil)
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
	OpCheck: "check", OpAcquire: "acquire", OpRenew: "renew", OpRelease: "release", OpRefund: "refund",
	OpReset:   "reset",
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
	switch {
	case out.Err != nil:
		return "error"
	case out.NotHolder != nil:
		return "not_holder"
	case out.Unreachable:
		return "unreachable"
	case !op.asks():
		return "ok"
	}
	return [...]string{"allowed", "refused", "shadow", "failed_open", "failed_closed"}[resultOf(op.Decision)]
}

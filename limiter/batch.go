package limiter

import (
	"context"
	"math/bits"
	"slices"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// This file has the executor: it takes operations, one or many, through the steps that plan.go lists. run does all of
// them for a call: a batch of checks (CheckTo) or operations of other kinds. Begin and Finish are for streams, which
// answer each check when it has ended. Receive is for operations that a peer has forwarded. An answer may be under a
// lease (Outcome.until), so end comes after the last wait of a call.

// Batch is checks on their way through a Limiter in two steps, so that what this node decides need not wait for what
// others do. It is used by one goroutine at a time, but for Finish of different checks, and may be used again once it
// has been answered, which saves its memory.
type Batch struct {
	// Checks are the questions. Their keys may be parts of larger texts.
	Checks []limit.Check
	Denied limit.Denials
	// Traces are the contexts of spans, by check, that what is done for the checks hangs below (see Span.Context);
	// empty for one that is not traced. Nil: none is.
	Traces []string
	// Results has the answer to each check, once it is there.
	Results []limit.Result

	room  []Op
	ops   []*Op // by check, in room
	open  []int
	spans map[int]Span // of checks that are traced, from Begin on; nil: none is
}

// Reset empties the batch for the next checks. Nothing that was in it is kept alive.
func (b *Batch) Reset() {
	clear(b.Checks)
	clear(b.Results)
	b.Checks, b.Results = b.Checks[:0], b.Results[:0]
	b.Traces = nil
	b.reset()
}

// reset empties what is not the caller's.
func (b *Batch) reset() {
	clear(b.room)
	b.room, b.ops, b.open, b.Denied, b.spans = b.room[:0], b.ops[:0], b.open[:0], nil, nil
}

// fill makes an operation of each check. One that is denied has its error as Outcome.
func (b *Batch) fill() {
	n := len(b.Checks)
	clear(b.room)
	if n > cap(b.room) {
		b.room, b.ops = make([]Op, n), make([]*Op, n)
	}
	b.room, b.ops = b.room[:n], b.ops[:n]
	for i := range b.Checks {
		op := &b.room[i]
		op.Kind, op.Check, op.Decision = OpCheck, &b.Checks[i], &b.Results[i].Decision
		if len(b.Denied) > 0 {
			op.Outcome.Err = b.Denied[i]
		}
		b.ops[i] = op
	}
}

// end ends a check that has its Outcome, and completes its result.
func (b *Batch) end(l *Limiter, i int, end *moment) {
	op := b.ops[i]
	l.end(op, end)
	if b.Results[i].Err = nil; op.Outcome.Err != nil {
		b.Results[i] = limit.Result{Err: op.Outcome.Err}
	}
	if b.spans != nil && b.spans[i] != nil {
		b.spans[i].End([]Traced{l.traced(op)})
	}
}

// CheckTo implements BatchService. Nothing is decided where a check is not acceptable. It takes no memory for checks
// that this node decides by itself under a single limit, and keeps nothing of what it is given.
func (l *Limiter) CheckTo(ctx context.Context, checks []limit.Check, denied limit.Denials,
	results []limit.Result) error {
	if err := limit.ValidBatch(len(checks)); err != nil {
		return err
	}
	if err := l.expired(ctx, len(checks)); err != nil {
		return err
	}
	if len(checks) != 1 || len(denied) > 0 || l.cfg.Tracer != nil {
		return l.checkBatch(ctx, checks, denied, results)
	}
	// The operation of a check alone stays on the stack unless it has to wait: 237 ns, against 305 with room from a
	// pool.
	r := &results[0]
	op := Op{Kind: OpCheck, Check: &checks[0], Decision: &r.Decision}
	if err := l.plan(l.table.Load(), &op); err != nil {
		return err
	}
	now := l.moment()
	if !l.beginOne(&op, &now) {
		waits := op
		l.finish(ctx, []*Op{&waits}, []int{0})
		op = waits
	}
	end := l.ending()
	l.end(&op, &end)
	if r.Err = nil; op.Outcome.Err != nil {
		*r = limit.Result{Err: op.Outcome.Err}
	}
	return nil
}

// checkBatch is CheckTo for several checks, or for a call with a trace.
func (l *Limiter) checkBatch(ctx context.Context, checks []limit.Check, denied limit.Denials,
	results []limit.Result) error {
	pool := &l.batches[bits.Len(uint(len(checks)-1))] // few checks that wait for others do not keep the room of many
	b := pool.Get().(*Batch)
	b.Checks, b.Denied, b.Results = checks, denied, results
	b.fill()
	bad := l.planAll(b.ops)
	var err error
	if bad >= 0 {
		err = b.ops[bad].Outcome.Err.In(bad, len(checks))
	} else {
		spans := l.traceCall(ctx, b.ops)
		l.carryOut(ctx, b.ops)
		end := l.ending()
		for i := range b.ops {
			b.end(l, i, &end)
		}
		spans.end(l)
	}
	b.Checks, b.Results = nil, nil
	b.reset()
	pool.Put(b) // not after a panic: another goroutine may still use it
	return err
}

// run carries out planned operations of a call wherever they are decided, and fills in every Outcome: with a decision
// by on_error where no node could be asked in time.
func (l *Limiter) run(ctx context.Context, ops ...*Op) {
	spans := l.traceCall(ctx, ops)
	l.carryOut(ctx, ops)
	end := l.ending()
	for _, op := range ops {
		l.end(op, &end)
	}
	spans.end(l)
}

// carryOut is run without the end.
func (l *Limiter) carryOut(ctx context.Context, ops []*Op) {
	now := l.moment()
	if open := l.begin(ops, &now, nil); open != nil {
		l.finish(ctx, ops, open)
	}
}

const (
	// Operations for which memory is fetched at a time: what that fills is still there when it is looked at.
	aheadOf  = 32
	aheadMin = 4 // operations below which there is nothing to be gained
)

// begin carries out planned operations as far as this node can do so at once, and appends the places of the others to
// open.
func (l *Limiter) begin(ops []*Op, now *moment, open []int) []int {
	for i, op := range ops {
		if i%aheadOf == 0 && len(ops) >= aheadMin {
			l.ahead(ops[i:min(i+aheadOf, len(ops))])
		}
		if op.Outcome.Err == nil && !l.beginOne(op, now) {
			if open == nil {
				open = make([]int, 0, len(ops)-i)
			}
			open = append(open, i)
		}
	}
	return open
}

// beginOne carries out an operation if that can be done at once, and reports whether it has its Outcome.
func (l *Limiter) beginOne(op *Op, now *moment) bool {
	if op.Kind == OpRecall {
		l.answerRecall(op)
		return true
	}
	r := l.cfg.Ownership.Route(int(op.partition))
	switch {
	case r.Standing == ownership.Owned:
		l.decide(op, now)
		// A peer's report of a loan never waits for another holder: the other reports of its message would wait, too.
		return !op.Outcome.pending() || op.Hops > 0 && op.Kind == OpBorrow && op.Outcome.NotHolder != nil
	case op.Hops == 0:
		return l.before(op, r, now)
	}
	return op.returned(r.Handed())
}

// ahead has the processor fetch what the next decisions of this node will look at.
func (l *Limiter) ahead(ops []*Op) {
	if l.routes != nil {
		for _, op := range ops {
			l.routes.Ahead(int(op.partition))
		}
	}
	here := make([]*Op, 0, aheadOf)
	for _, op := range ops {
		if op.rule != nil && l.cfg.Ownership.Route(int(op.partition)).Standing == ownership.Owned {
			here = append(here, op)
		}
	}
	for step := range store.AheadSteps {
		for _, op := range here {
			l.store.Ahead(step, op.hash, int(op.partition), &op.rule.Rule)
		}
	}
}

// finish has the operations of a call at some places carried out, which begin has left open.
func (l *Limiter) finish(ctx context.Context, ops []*Op, open []int) {
	ctx, cancel := context.WithDeadline(ctx, l.deadline(ctx))
	defer cancel()
	l.wait(ctx, l.takeIn(at(ops, open)))
}

func at(ops []*Op, places []int) []*Op {
	of := make([]*Op, len(places))
	for i, place := range places {
		of[i] = ops[place]
	}
	return of
}

// Begin answers the checks of a batch that this node decides and need not wait for anything, and returns the places of
// the others, for Finish; the slice is the batch's. Unlike those of Check, the checks of a Batch have nothing to do
// with one another: one that is not acceptable gets an error of its own. Begin itself fails when the number of checks
// is not acceptable; nothing was charged then. ctx names the caller, for the services that authorize between a front
// end and the Limiter.
func (l *Limiter) Begin(_ context.Context, b *Batch) (open []int, err *limit.Error) {
	if err := limit.ValidBatch(len(b.Checks)); err != nil {
		return nil, err
	}
	b.Results = slices.Grow(b.Results[:0], len(b.Checks))[:len(b.Checks)]
	b.fill()
	l.planAll(b.ops)
	b.trace(l)
	now := l.moment()
	b.open = l.begin(b.ops, &now, b.open[:0])
	end := l.ending()
	for i, next := 0, b.open; i < len(b.ops); i++ {
		if len(next) > 0 && next[0] == i {
			next = next[1:]
		} else {
			b.end(l, i, &end)
		}
	}
	return b.open, nil
}

// Finish waits for some of the checks that Begin left open, and answers them: by on_error where no node could be asked
// within ctx, or the Limiter's own time for a call. Every check is to be finished, once.
func (l *Limiter) Finish(ctx context.Context, b *Batch, open []int) {
	l.finish(ctx, b.ops, open)
	end := l.ending()
	for _, i := range open {
		b.end(l, i, &end)
	}
}

// Receive carries out operations that a peer sent. What this node does not decide is handed on once, where the
// operation's hops allow, and otherwise answered NotHolder with a hint. When something is to be handed on, or has to
// wait, the rest of the work is returned as a function that waits for it; nil means that every Outcome is there
// already.
func (l *Limiter) Receive(ops []*Op) (rest func(context.Context)) {
	for _, op := range ops {
		op.Hops = max(op.Hops, 1) // whatever the peer says
	}
	l.planAll(ops)
	spans := l.trace(ops, Tracer.Continue, "decide")
	now := l.moment()
	open := l.begin(ops, &now, nil)
	ended := func() {
		end := l.ending()
		for _, op := range ops {
			l.end(op, &end)
		}
		spans.end(l)
	}
	if open == nil {
		ended()
		return nil
	}
	in := l.takeIn(at(ops, open))
	return func(ctx context.Context) {
		l.wait(ctx, in)
		ended()
	}
}

package limiter

import (
	"context"
	"math/bits"
	"slices"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// This file has the executor: it takes operations, one or many, through the steps that plan.go lists. Its entries:
//
//	CheckTo           checks of one call
//	run               operations of one call: of other kinds than checks, or parts of an atomic check
//	Begin and Finish  checks of a stream, each of which is answered when it has ended
//	Receive           operations that a peer has forwarded
//
// Each entry calls begin, which carries out what this node can do at once. Then it calls finish (Receive: takeIn and
// wait) for the rest, and end for all operations. end comes after the last wait of a call, because an answer under a
// lease (Outcome.until) may become invalid during a wait.

// Batch has checks that pass through a Limiter in two steps, Begin and Finish, so that the checks that this node
// decides need not wait for the others. One goroutine at a time uses it, except that Finish may be called for different
// checks at the same time. After all checks have been answered it may be used again, which saves its memory.
type Batch struct {
	// Checks are to be decided. Their keys may be parts of larger texts.
	Checks []limit.Check
	Denied limit.Denials
	// Traces has, for each check, the context of the span above its spans (see Span.Context); it is empty for a check
	// that is not traced. Nil: no check is traced.
	Traces []string
	// Results has the answer to each check, as soon as the check is answered.
	Results []limit.Result

	room  []Op
	ops   []*Op // by check, in room
	open  []int
	spans map[int]Span // of the traced checks, from Begin on; nil: no check is traced
}

// Reset empties the batch for the next checks. It keeps no reference to what was in the batch.
func (b *Batch) Reset() {
	clear(b.Checks)
	clear(b.Results)
	b.Checks, b.Results = b.Checks[:0], b.Results[:0]
	b.Traces = nil
	b.reset()
}

// reset empties the fields that the caller does not set, and Denied.
func (b *Batch) reset() {
	clear(b.room)
	b.room, b.ops, b.open, b.Denied, b.spans = b.room[:0], b.ops[:0], b.open[:0], nil, nil
}

// fill makes an operation of each check. The operation of a denied check has the denial as its Outcome's error.
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

// CheckTo implements BatchService. It decides nothing if one check is not valid. It allocates nothing for checks under
// a single limit that this node decides at once, and keeps no reference to its arguments.
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
	// The operation of a single check stays on the stack unless it has to wait: 237 ns, against 305 with an Op from a
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
	pool := &l.batches[bits.Len(uint(len(checks)-1))] // a small batch that waits must not keep a large one's memory
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
	pool.Put(b) // not after a panic, because another goroutine may still use it
	return err
}

// run carries out planned operations of a call, here or on other nodes, and fills in every Outcome: by on_error if no
// node decides in time.
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
	// aheadOf is for how many operations ahead fetches memory at a time. The processor's cache still has it when they
	// are decided.
	aheadOf  = 32
	aheadMin = 4 // with fewer operations, ahead saves no time
)

// begin carries out the planned operations that this node can carry out at once, and appends the indices of the others
// to open.
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

// beginOne carries out an operation if this node can do so at once, and reports whether it did.
func (l *Limiter) beginOne(op *Op, now *moment) bool {
	if op.Kind == OpRecall {
		l.answerRecall(op)
		return true
	}
	r := l.cfg.Ownership.Route(int(op.partition))
	switch {
	case r.Standing == ownership.Owned:
		l.decide(op, now)
		// A peer's report of a loan does not wait for another holder, because the other reports of its message would
		// wait too.
		return !op.Outcome.pending() || op.Hops > 0 && op.Kind == OpBorrow && op.Outcome.NotHolder != nil
	case op.Hops == 0:
		return l.before(op, r, now)
	}
	return op.sendBack(r.Handed())
}

// ahead has the processor fetch the memory that this node's next decisions read.
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

// finish carries out the operations of a call that begin has left open, by their indices.
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

// Begin answers the checks of a batch that this node can answer at once, and returns the indices of the others, for
// Finish. The slice belongs to the batch. The checks of a Batch are independent: one that is not valid gets its own
// error. If Begin itself returns an error, the number of checks is not valid, and nothing was charged. Begin does not
// use its context, which names the caller to the services that authorize between a front end and the Limiter.
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

// Finish waits for checks that Begin left open, and answers them: by on_error if no node decides within ctx or
// Config.Timeout. Finish must be called once for every open check.
func (l *Limiter) Finish(ctx context.Context, b *Batch, open []int) {
	l.finish(ctx, b.ops, open)
	end := l.ending()
	for _, i := range open {
		b.end(l, i, &end)
	}
}

// Receive carries out operations that a peer has sent. If this node does not hold an operation's partition, it forwards
// the operation once, or answers NotHolder with a hint if Op.Hops does not allow that. If all operations end at once,
// Receive returns nil. Otherwise it returns a function that waits for the others and ends all of them.
func (l *Limiter) Receive(ops []*Op) (rest func(context.Context)) {
	for _, op := range ops {
		op.Hops = max(op.Hops, 1) // also if the peer sends 0
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

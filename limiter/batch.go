package limiter

import (
	"context"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// This file has the executor: it takes one operation or many through the steps that plan.go lists. CheckTo is for calls, Begin and Finish are
// for streams, run is for operations that are no checks.

// Batch is checks on their way through a Limiter in two steps, so that what this node decides need not wait for what others
// do. It is used by one goroutine at a time, but for Finish of different checks, and may be used again once it has been
// answered, which saves its memory.
type Batch struct {
	// Checks are the questions. Their keys may be parts of larger texts.
	Checks []limit.Check
	Denied limit.Denials
	// Traces are the contexts of spans, by check, that what is done for the checks hangs below (see Span.Context); empty for one
	// that is not traced. Nil: none is.
	Traces []string
	// Results has the answer to each check, once it is there.
	Results []limit.Result

	ops   []Op // by check
	open  []int
	spans map[int]Span // of checks that are traced, from Begin on; nil: none is

	// Room for Finish, one place for each of open, and how many places are taken.
	rest  []*Op
	away  []away
	taken atomic.Int32
}

// Reset empties the batch for the next checks. Nothing that was in it is kept alive.
func (b *Batch) Reset() {
	clear(b.Checks)
	clear(b.Results)
	b.Checks, b.Results = b.Checks[:0], b.Results[:0]
	b.Denied, b.Traces = nil, nil
	b.reset()
}

// reset empties what is not the caller's.
func (b *Batch) reset() {
	clear(b.ops)
	clear(b.rest)
	clear(b.away)
	b.ops, b.open, b.rest, b.away, b.spans = b.ops[:0], b.open[:0], b.rest[:0], b.away[:0], nil
}

// grow makes room for the operations.
func (b *Batch) grow() {
	clear(b.ops)
	b.ops = slices.Grow(b.ops[:0], len(b.Checks))[:len(b.Checks)]
}

// growRest makes room for finishing what is open.
func (b *Batch) growRest() {
	n := len(b.open)
	b.rest, b.away = slices.Grow(b.rest[:0], n)[:n], slices.Grow(b.away[:0], n)[:n]
	b.taken.Store(0)
}

// CheckTo implements BatchService. Nothing is decided where a check is not acceptable, and no answer is given before the last is there, for
// the lease that an answer is under may end meanwhile. It takes no memory for checks that this node decides by itself under a single limit,
// and keeps nothing of what it is given.
func (l *Limiter) CheckTo(ctx context.Context, checks []limit.Check, denied limit.Denials, results []limit.Result) error {
	if err := limit.ValidBatch(len(checks)); err != nil {
		return err
	}
	if err := l.expired(ctx, len(checks)); err != nil {
		return err
	}
	var span Span
	if l.cfg.Tracer != nil {
		ctx, span = l.cfg.Tracer.Start(ctx, "decide")
	}
	var one [1]Op
	var first [1]int
	ops, open, b := one[:], first[:0], (*Batch)(nil)
	if len(checks) > 1 {
		b = l.take(checks, results)
		ops, open = b.ops, b.open
	}
	if bad := l.planAll(ops, checks, denied, results); bad >= 0 {
		if span != nil {
			span.End(nil) // nothing was decided
		}
		l.put(b)
		return results[bad].Err.(*limit.Error).In(bad, len(checks))
	}
	now := l.moment()
	if open, ended := l.begin(ops, results, &now, open); len(open) > 0 || !ended {
		if b == nil {
			b = l.take(checks, results) // one is gone when this returns
			b.ops[0] = one[0]
			ops = b.ops
		}
		b.open = append(b.open[:0], open...)
		l.finishAll(ctx, b)
	}
	if span != nil {
		l.endSpan(span, ops)
	}
	l.put(b)
	return nil
}

const (
	aheadOf  = 32 // checks of a batch for which memory is fetched at a time: what that fills is still there when it is looked at
	aheadMin = 4  // of a batch, below which there is nothing to be gained
)

// begin carries out planned checks as far as this node can do so at once, and appends the places of the others to open. ended says that the
// answers to the rest are final: none is under a lease that may end before the others are there, and none needs more to be done.
func (l *Limiter) begin(ops []Op, results []limit.Result, now *moment, open []int) (_ []int, ended bool) {
	ended = true
	for i := range ops {
		if i%aheadOf == 0 && len(ops) >= aheadMin {
			var next [aheadOf]*Op
			n := min(aheadOf, len(ops)-i)
			for at := range n {
				next[at] = &ops[i+at]
			}
			l.ahead(next[:n])
		}
		op := &ops[i]
		if op.rule == nil {
			continue // it has been answered by an error
		}
		if !l.beginOne(op, now) {
			open = append(open, i)
			continue
		}
		if out := &op.Outcome; out.until != 0 || op.Cost < 0 {
			ended = false
		} else if results[i].Err = nil; out.Err != nil {
			results[i] = limit.Result{Err: out.Err}
		}
	}
	return open, ended
}

// beginOne carries out an operation if that can be done at once, and reports whether it has its Outcome.
func (l *Limiter) beginOne(op *Op, now *moment) bool {
	r := l.cfg.Ownership.Route(int(op.partition))
	if r.Standing != ownership.Owned {
		return l.before(op, r, now)
	}
	l.decide(op, now)
	return !op.Outcome.pending()
}

// ahead has the processor fetch what the next decisions will look at.
func (l *Limiter) ahead(ops []*Op) {
	for step := range store.AheadSteps {
		for _, op := range ops {
			if step == 0 && l.routes != nil {
				l.routes.Ahead(int(op.partition))
			}
			l.store.Ahead(step, op.hash, int(op.partition))
		}
	}
}

// finishAll waits for what is open, and then ends all answers.
func (l *Limiter) finishAll(ctx context.Context, b *Batch) {
	b.growRest()
	l.wait(ctx, b, b.open)
	end := l.ending()
	for i := range b.ops {
		b.end(l, i, &end)
	}
}

// batchesOf returns the pool of batches of so many checks: few that wait for others do not keep the room of many.
func (l *Limiter) batchesOf(checks int) *sync.Pool { return &l.batches[bits.Len(uint(checks-1))] }

// take returns a batch of a caller's checks and results, for put.
func (l *Limiter) take(checks []limit.Check, results []limit.Result) *Batch {
	b := l.batchesOf(len(checks)).Get().(*Batch)
	b.Checks, b.Results = checks, results
	b.grow()
	return b
}

// put keeps the room of a batch, if there is one.
func (l *Limiter) put(b *Batch) {
	if b == nil {
		return
	}
	pool := l.batchesOf(len(b.Checks))
	b.Checks, b.Results = nil, nil
	b.reset()
	pool.Put(b)
}

// Begin answers the checks of a batch that this node decides and need not wait for anything, and returns the places of the
// others, for Finish; the slice is the batch's. Unlike those of Check, the checks of a Batch have nothing to do with one
// another: one that is not acceptable gets an error of its own. Begin itself fails when the number of checks is not
// acceptable; nothing was charged then. ctx names the caller, for the services that authorize between a front end and the Limiter.
func (l *Limiter) Begin(_ context.Context, b *Batch) (open []int, err *limit.Error) {
	if err := limit.ValidBatch(len(b.Checks)); err != nil {
		return nil, err
	}
	b.Results = slices.Grow(b.Results[:0], len(b.Checks))[:len(b.Checks)]
	b.grow()
	l.planAll(b.ops, b.Checks, b.Denied, b.Results)
	b.trace(l)
	now := l.moment()
	b.open, _ = l.begin(b.ops, b.Results, &now, b.open[:0])
	end := l.ending()
	for i, next := 0, b.open; i < len(b.ops); i++ {
		if len(next) > 0 && next[0] == i {
			next = next[1:]
		} else if op := &b.ops[i]; op.Outcome.until != 0 || op.rule != nil && op.Cost < 0 || b.spans != nil {
			b.end(l, i, &end)
		}
	}
	b.growRest()
	return b.open, nil
}

// Finish waits for some of the checks that Begin left open, and answers them: by on_error where no node could be asked within
// ctx, or the Limiter's own time for a call. Every check is to be finished, once.
func (l *Limiter) Finish(ctx context.Context, b *Batch, open []int) {
	l.wait(ctx, b, open)
	end := l.ending()
	for _, i := range open {
		b.end(l, i, &end)
	}
}

// wait has operations carried out that are open.
func (l *Limiter) wait(ctx context.Context, b *Batch, open []int) {
	end := int(b.taken.Add(int32(len(open))))
	from := end - len(open)
	rest := b.rest[from:end:end]
	for i, at := range open {
		rest[i] = &b.ops[at]
	}
	l.carry(ctx, rest, b.away[from:end:end])
}

// end ends a check that has its Outcome, and completes its result.
func (b *Batch) end(l *Limiter, i int, end *moment) {
	op := &b.ops[i]
	if op.rule != nil {
		l.conclude(op, end)
		if b.Results[i].Err = nil; op.Outcome.Err != nil {
			b.Results[i] = limit.Result{Err: op.Outcome.Err}
		}
	}
	if span := b.spans[i]; span != nil {
		if err, bad := b.Results[i].Err.(*limit.Error); bad {
			op.Outcome.Err = err
		}
		span.End([]Traced{l.traced(op)})
	}
}

// run carries out planned operations wherever they are decided, and fills in every Outcome: with a decision by
// on_error where no node could be asked in time.
func (l *Limiter) run(ctx context.Context, ops ...*Op) {
	if l.cfg.Tracer != nil {
		var span Span
		if ctx, span = l.cfg.Tracer.Start(ctx, "decide"); span != nil {
			defer func() { l.endSpans(span, ops) }()
		}
	}
	var rest []*Op
	now := l.moment()
	for _, op := range ops {
		if !l.beginOne(op, &now) {
			rest = append(rest, op)
		}
	}
	if len(rest) > 0 {
		l.carry(ctx, rest, make([]away, len(rest)))
	}
	end := l.ending()
	for _, op := range ops {
		l.conclude(op, &end)
	}
}

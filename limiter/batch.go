package limiter

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/weirlimit/weir/limit"
)

// Batch is checks on their way through a Limiter in two steps, so that what this node decides need not wait for what others
// do. It is used by one goroutine at a time, but for Finish of different checks, and may be used again once it has been
// answered, which saves its memory.
type Batch struct {
	// Checks are the questions. Their keys may be parts of larger texts.
	Checks  []limit.Check
	Refused limit.Refused
	// Traces are the contexts of spans, by check, that what is done for the checks hangs below (see Span.Context); empty for one
	// that is not traced. Nil: none is.
	Traces []string
	// Results has the answer to each check, once it is there.
	Results []limit.Result

	late lateOps // of checks that were not answered directly
	open []*Op   // by check; nil for one that was answered directly
	wait []int   // the checks without an answer yet
	// spans are of checks that are traced, from Begin on; nil: none is.
	spans map[int]Span
	// rest is room for Finish, of which so much is taken.
	rest  []*Op
	taken atomic.Int32
}

// Reset empties the batch for the next checks. Nothing that was in it is kept alive.
func (b *Batch) Reset() {
	clear(b.Checks)
	clear(b.Results)
	clear(b.open)
	clear(b.rest)
	b.late.reset()
	b.Checks, b.Results, b.open, b.wait = b.Checks[:0], b.Results[:0], b.open[:0], b.wait[:0]
	b.Refused, b.Traces, b.spans = nil, nil, nil
}

// Begin answers the checks of a batch that this node decides and need not wait for anything, and returns the places of the
// others, for Finish; the slice is the batch's. Unlike those of Check, the checks of a Batch have nothing to do with one
// another: one that is not acceptable gets an error of its own. Begin itself fails when the number of checks is not
// acceptable; nothing was charged then. ctx says who asks, to those who stand between a front end and the Limiter.
func (l *Limiter) Begin(_ context.Context, b *Batch) (open []int, err *limit.Error) {
	if err := limit.ValidBatch(len(b.Checks)); err != nil {
		return nil, err
	}
	n := len(b.Checks)
	b.open = slices.Grow(b.open[:0], n)[:n]
	clear(b.open)
	b.Results = slices.Grow(b.Results[:0], n)[:n]
	b.wait = b.wait[:0]
	b.late.reset()
	t, now, end := l.table.Load(), l.moment(), l.ending()
	for i := range b.Checks {
		c, r := &b.Checks[i], &b.Results[i]
		var s subject
		bad := b.Refused[i]
		if bad == nil {
			bad = l.identify(t, &c.Target, &s)
		}
		if bad == nil {
			bad = validCost(c, OpCheck)
		}
		if bad != nil {
			*r = limit.Result{Err: bad}
			b.traceError(l, i, bad)
			continue
		}
		r.Err = nil
		var op *Op
		var done bool
		if trace := b.trace(l, i); trace != "" {
			// The way of all other operations, which tell more of themselves.
			op = b.late.next(l, b.Checks, i, &s)
			op.Trace = trace
			done = l.begin(t, op, &now)
		} else {
			direct, ticket, err := l.direct(t, c, &s, &now, &r.Decision)
			if direct {
				continue
			}
			op, done = b.late.add(l, b.Checks, i, &s, t, &now, &r.Decision, ticket, err)
		}
		b.open[i] = op
		if !done {
			b.wait = append(b.wait, i)
			continue
		}
		l.conclude(op, &end)
		b.answer(l, i)
	}
	b.rest = slices.Grow(b.rest[:0], len(b.wait))[:len(b.wait)]
	b.taken.Store(0)
	return b.wait, nil
}

// Finish waits for some of the checks that Begin left open, and answers them: by on_error where nobody could be asked within
// ctx, or the Limiter's own time for a call. Every check is to be finished, once.
func (l *Limiter) Finish(ctx context.Context, b *Batch, open []int) {
	end := int(b.taken.Add(int32(len(open))))
	rest := b.rest[end-len(open) : end : end]
	for i, at := range open {
		rest[i] = b.open[at]
	}
	l.wait(ctx, rest)
	ending := l.ending()
	for _, at := range open {
		l.conclude(b.open[at], &ending)
		b.answer(l, at)
	}
}

func (b *Batch) answer(l *Limiter, i int) {
	op := b.open[i]
	out := &op.Outcome
	if span := b.spans[i]; span != nil {
		span.End([]Traced{l.traced(op)})
	}
	b.Results[i] = limit.Result{Decision: out.Decision}
	if out.Err != nil {
		b.Results[i].Err = out.Err
	}
}

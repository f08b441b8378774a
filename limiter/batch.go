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

	ops  []Op
	wait []int // the checks without an answer yet
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
	clear(b.ops)
	clear(b.rest)
	b.Checks, b.Results, b.ops, b.wait = b.Checks[:0], b.Results[:0], b.ops[:0], b.wait[:0]
	b.Refused, b.Traces, b.spans = nil, nil, nil
}

// Begin answers the checks of a batch that this node decides and need not wait for anything, and returns the places of the
// others, for Finish; the slice is the batch's. Unlike those of Check, the checks of a Batch have nothing to do with one
// another: one that is not acceptable gets an error of its own. Begin itself fails when the number of checks is not
// acceptable; nothing was charged then. ctx says who asks, to those who stand between a door and the Limiter.
func (l *Limiter) Begin(_ context.Context, b *Batch) (open []int, err *limit.Error) {
	if err := limit.ValidBatch(len(b.Checks)); err != nil {
		return nil, err
	}
	n := len(b.Checks)
	b.ops = slices.Grow(b.ops[:0], n)[:n]
	b.Results = slices.Grow(b.Results[:0], n)[:n]
	b.wait = b.wait[:0]
	t, now, end := l.table.Load(), l.moment(), l.ending()
	for i := range b.ops {
		op := &b.ops[i]
		*op = Op{Kind: OpCheck, Check: b.Checks[i]}
		if b.Traces != nil {
			b.trace(l, i)
		}
		if op.Outcome.Err = b.Refused[i]; op.Outcome.Err == nil {
			op.Outcome.Err = l.prepare(op)
		}
		if op.Outcome.Err == nil {
			if !l.begin(t, op, &now) {
				b.wait = append(b.wait, i)
				continue
			}
			l.conclude(op, &end)
		}
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
		rest[i] = &b.ops[at]
	}
	l.wait(ctx, rest)
	ending := l.ending()
	for _, at := range open {
		l.conclude(&b.ops[at], &ending)
		b.answer(l, at)
	}
}

func (b *Batch) answer(l *Limiter, i int) {
	out := &b.ops[i].Outcome
	if span := b.spans[i]; span != nil {
		span.End([]Traced{l.traced(&b.ops[i])})
	}
	b.Results[i] = limit.Result{Decision: out.Decision}
	if out.Err != nil {
		b.Results[i].Err = out.Err
	}
}

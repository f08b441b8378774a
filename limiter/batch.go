package limiter

import (
	"context"
	"slices"
)

// Batch is checks on their way through a Limiter in two steps, so that what this node decides need not wait for what others
// do. It is used by one goroutine at a time, and may be used again once it has been answered, which saves its memory.
type Batch struct {
	// Checks are the questions. Their keys may be parts of larger texts.
	Checks []Check
	// Refused are checks, by place, that are answered by an error in place of a decision: those that their caller may not
	// ask. Nil: none.
	Refused map[int]*Error
	// Results has the answer to each check, once it is there.
	Results []Result

	ops  []Op
	wait []int // the checks without an answer yet
	rest []*Op // room for Finish
}

// Reset empties the batch for the next checks. Nothing that was in it is kept alive.
func (b *Batch) Reset() {
	clear(b.Checks)
	clear(b.Results)
	clear(b.ops)
	clear(b.rest[:cap(b.rest)])
	b.Checks, b.Results, b.ops, b.wait = b.Checks[:0], b.Results[:0], b.ops[:0], b.wait[:0]
	b.Refused = nil
}

// Begin answers the checks of a batch that this node decides and need not wait for anything, and returns the places of the
// others, for Finish; the slice is the batch's. Unlike those of Check, the checks of a Batch have nothing to do with one
// another: one that is not acceptable gets an error of its own. Begin itself fails when the number of checks is not
// acceptable; nothing was charged then. ctx says who asks, to those who stand between a door and the Limiter.
func (l *Limiter) Begin(_ context.Context, b *Batch) (open []int, err *Error) {
	if err := ValidBatch(len(b.Checks)); err != nil {
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
		b.answer(i)
	}
	return b.wait, nil
}

// Finish waits for the checks that Begin left open, and answers them: by on_error where nobody could be asked within ctx,
// or the Limiter's own time for a call.
func (l *Limiter) Finish(ctx context.Context, b *Batch) {
	b.rest = b.rest[:0]
	for _, at := range b.wait {
		b.rest = append(b.rest, &b.ops[at])
	}
	l.wait(ctx, b.rest)
	end := l.ending()
	for _, at := range b.wait {
		l.conclude(&b.ops[at], &end)
		b.answer(at)
	}
}

func (b *Batch) answer(i int) {
	out := &b.ops[i].Outcome
	b.Results[i] = Result{Decision: out.Decision}
	if out.Err != nil {
		b.Results[i].Err = out.Err
	}
}

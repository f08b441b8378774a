package limiter

import (
	"context"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

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

	subjects []subject // by check
	open     []*Op     // by check; nil for one that was answered directly
	wait     []int     // the checks without an answer yet
	// spans are of checks that are traced, from Begin on; nil: none is.
	spans map[int]Span
	// rest is room for Finish, of which so much is taken.
	rest  []*Op
	taken atomic.Int32

	// Room for operations, of which each takes half a kilobyte.
	rooms [][]Op
	used  int  // of rooms
	room  []Op // what is left of the last of these
}

// batchRoom is how many operations of a batch room is made for at a time.
const batchRoom = 32

// Reset empties the batch for the next checks. Nothing that was in it is kept alive.
func (b *Batch) Reset() {
	clear(b.Checks)
	clear(b.Results)
	b.Checks, b.Results = b.Checks[:0], b.Results[:0]
	b.Denied, b.Traces = nil, nil
	b.reset()
}

// reset is Reset but for what is the caller's.
func (b *Batch) reset() {
	for _, op := range b.open {
		if op != nil {
			*op = Op{}
		}
	}
	clear(b.subjects)
	clear(b.open)
	clear(b.rest)
	b.subjects, b.open, b.wait, b.rest, b.spans = b.subjects[:0], b.open[:0], b.wait[:0], b.rest[:0], nil
	b.used, b.room = 0, nil
}

// grow makes room for what is worked out of the checks.
func (b *Batch) grow() {
	b.reset()
	b.open = slices.Grow(b.open, len(b.Checks))[:len(b.Checks)]
	b.taken.Store(0)
}

// operation makes an operation of a check.
func (b *Batch) operation(l *Limiter, i int, s *subject) *Op {
	if len(b.room) == 0 {
		if b.used == len(b.rooms) {
			n := batchRoom
			if len(b.Checks) == 1 {
				n = 1 // of many callers who wait, each has a room
			}
			b.rooms = append(b.rooms, make([]Op, n))
		}
		b.room = b.rooms[b.used]
		b.used++
	}
	op := &b.room[0]
	b.room = b.room[1:]
	*op = Op{Kind: OpCheck, Check: b.Checks[i], subject: *s, partition: l.partition(s.hash)}
	b.open[i] = op
	return op
}

// carryOut makes an operation of a check that direct did not answer, or was not asked to, and carries it out as any, as far as that
// can be done at once: still in its turn. ticket and err are what direct has found out; trace is the operation's. It reports whether
// the check is done with, but for conclude and answer.
func (b *Batch) carryOut(l *Limiter, i int, s *subject, trace string, t *table, now *moment, ticket uint64, err error) (done bool) {
	op := b.operation(l, i, s)
	op.Trace = trace
	switch {
	case ticket != 0:
		op.Outcome.Decision, op.Outcome.ticket = b.Results[i].Decision, ticket
	case err != nil:
		l.failed(op.entry, op, err)
		l.countError(op.entry, op)
		done = !op.Outcome.pending()
	default:
		done = l.begin(t, op, now)
	}
	if !done {
		b.wait = append(b.wait, i)
	}
	return done
}

// accept checks everything about a check that can be checked without deciding it, and works out what it is about.
func (l *Limiter) accept(t *table, c *limit.Check, s *subject) *limit.Error {
	if err := l.identify(t, &c.Target, s); err != nil {
		return err
	}
	return validCost(c, OpCheck)
}

// follows works out what a check is about that is acceptable and under the same limit as the one before it, last. It reports false, and
// has done nothing, for others.
func (s *subject) follows(c *limit.Check, last *subject, before *limit.Check) bool {
	if c.Limit != before.Limit || c.Policy != before.Policy || c.Namespace != before.Namespace || c.Configured != before.Configured ||
		last.inline == nil && last.entry == nil || limit.ValidKey(c.Key) != nil || validCost(c, OpCheck) != nil {
		return false
	}
	*s = *last
	if s.inline != nil {
		s.hash = s.inline.hash.Hash(c.Key)
	} else {
		s.hash = s.entry.hash.Hash(c.Key)
	}
	return true
}

// CheckTo implements BatchService: Begin and Finish in one, but that nothing is decided where a check is not acceptable, and no answer
// is given before the last. It takes no memory for a check that this node answers by itself under a single limit, and keeps nothing of
// what it is given.
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
	var single [1]subject
	subjects := single[:]
	var b *Batch
	if len(checks) > 1 {
		b = l.borrow(checks, results)
		b.subjects = slices.Grow(b.subjects, len(checks))[:len(checks)]
		subjects = b.subjects
	}
	t := l.table.Load()
	for i := range checks {
		if denied[i] != nil {
			continue
		}
		if i > 0 && subjects[i].follows(&checks[i], &subjects[i-1], &checks[i-1]) {
			continue
		}
		if err := l.accept(t, &checks[i], &subjects[i]); err != nil {
			if span != nil {
				span.End(nil) // nothing was decided
			}
			l.giveBack(b)
			return err.In(i, len(checks))
		}
	}
	now := l.moment()
	for i := range checks {
		if i%aheadOf == 0 && len(checks) >= aheadMin {
			l.ahead(subjects[i:min(i+aheadOf, len(checks))])
		}
		r := &results[i]
		if r.Err = nil; denied[i] != nil {
			*r = limit.Result{Err: denied[i]}
			continue
		}
		var ticket uint64
		var err error
		if span == nil { // otherwise the way of all operations, which tell more of themselves
			var done bool
			if done, ticket, err = l.direct(t, &checks[i], &subjects[i], &now, &r.Decision); done {
				continue
			}
		}
		if b == nil {
			b = l.borrow(checks, results)
		}
		b.carryOut(l, i, &subjects[i], "", t, &now, ticket, err)
	}
	switch {
	case b != nil && b.used > 0:
		l.finishAll(ctx, b, span)
	case span != nil:
		span.End(nil)
	}
	l.giveBack(b)
	return nil
}

const (
	aheadOf  = 32 // checks of a batch for which memory is fetched at a time: what that fills is still there when it is looked at
	aheadMin = 4  // of a batch, below which there is nothing to be gained
)

// ahead has the processor fetch what the next decisions will look at.
func (l *Limiter) ahead(subjects []subject) {
	for step := range store.AheadSteps {
		for i := range subjects {
			hash := subjects[i].hash
			p := l.partition(hash)
			if step == 0 && l.routes != nil {
				l.routes.Ahead(p)
			}
			l.store.Ahead(step, hash, p)
		}
	}
}

// finishAll is Finish for CheckTo: no answer is final before the last is there, for the lease that it is under may end meanwhile.
func (l *Limiter) finishAll(ctx context.Context, b *Batch, span Span) {
	b.rest = slices.Grow(b.rest, len(b.wait))[:len(b.wait)]
	l.finish(ctx, b, b.wait)
	end := l.ending()
	var ops []*Op
	for i, op := range b.open {
		if op != nil {
			l.conclude(op, &end)
			b.answer(l, i)
			if span != nil {
				ops = append(ops, op)
			}
		}
	}
	if span != nil {
		l.endSpan(span, ops)
	}
}

// batchesOf returns the pool of batches of so many checks: few that wait for others do not keep the room of many.
func (l *Limiter) batchesOf(checks int) *sync.Pool { return &l.batches[bits.Len(uint(checks-1))] }

// borrow returns a batch of somebody else's checks and results, for giveBack.
func (l *Limiter) borrow(checks []limit.Check, results []limit.Result) *Batch {
	b := l.batchesOf(len(checks)).Get().(*Batch)
	b.Checks, b.Results = checks, results
	b.grow()
	return b
}

// giveBack keeps the room of a batch, if there is one.
func (l *Limiter) giveBack(b *Batch) {
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
// acceptable; nothing was charged then. ctx says who asks, to those who stand between a front end and the Limiter.
func (l *Limiter) Begin(_ context.Context, b *Batch) (open []int, err *limit.Error) {
	if err := limit.ValidBatch(len(b.Checks)); err != nil {
		return nil, err
	}
	b.Results = slices.Grow(b.Results[:0], len(b.Checks))[:len(b.Checks)]
	b.grow()
	b.subjects = slices.Grow(b.subjects, len(b.Checks))[:len(b.Checks)]
	t := l.table.Load()
	for i := range b.Checks {
		bad := b.Denied[i]
		if bad == nil && (i == 0 || !b.subjects[i].follows(&b.Checks[i], &b.subjects[i-1], &b.Checks[i-1])) {
			bad = l.accept(t, &b.Checks[i], &b.subjects[i])
		}
		if b.Results[i].Err = nil; bad != nil {
			b.Results[i], b.subjects[i] = limit.Result{Err: bad}, subject{}
		}
	}
	now, end := l.moment(), l.ending()
	for i := range b.Checks {
		if i%aheadOf == 0 && len(b.Checks) >= aheadMin {
			l.ahead(b.subjects[i:min(i+aheadOf, len(b.Checks))])
		}
		c, r, s := &b.Checks[i], &b.Results[i], &b.subjects[i]
		if bad, is := r.Err.(*limit.Error); is {
			b.traceError(l, i, bad)
			continue
		}
		var ticket uint64
		var err error
		trace := b.trace(l, i)
		if trace == "" { // otherwise the way of all operations, which tell more of themselves
			var done bool
			if done, ticket, err = l.direct(t, c, s, &now, &r.Decision); done {
				continue
			}
		}
		if b.carryOut(l, i, s, trace, t, &now, ticket, err) {
			l.conclude(b.open[i], &end)
			b.answer(l, i)
		}
	}
	b.rest = slices.Grow(b.rest, len(b.wait))[:len(b.wait)]
	return b.wait, nil
}

// Finish waits for some of the checks that Begin left open, and answers them: by on_error where nobody could be asked within
// ctx, or the Limiter's own time for a call. Every check is to be finished, once.
func (l *Limiter) Finish(ctx context.Context, b *Batch, open []int) {
	l.finish(ctx, b, open)
	end := l.ending()
	for _, i := range open {
		l.conclude(b.open[i], &end)
		b.answer(l, i)
	}
}

// finish is Finish without the answers.
func (l *Limiter) finish(ctx context.Context, b *Batch, open []int) {
	end := int(b.taken.Add(int32(len(open))))
	rest := b.rest[end-len(open) : end : end]
	for i, at := range open {
		rest[i] = b.open[at]
	}
	l.wait(ctx, rest)
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

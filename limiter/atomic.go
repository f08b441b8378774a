package limiter

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"golang.org/x/sync/errgroup"
)

// This file carries out atomic checks, whose elements are charged all or not at all. The path of one:
//
//	gather       plans the elements, and adds up those on the same state (together)
//	borrowed     answers from this node's loan if all elements are on one key and the loan covers them (borrow.go)
//	run          has each holder reserve its part, all under one id that this node has chosen (batch.go)
//	settleAll    commits all reservations if each was admitted, and otherwise cancels them, also those whose answers
//	             did not come
//	decision     answers the caller
//
// CheckAll does not wait for commits on other nodes: a reservation whose commit is lost stays charged when its ttl
// ends, as if it were committed. CheckAll waits for cancels, so that the units are given back before the caller has the
// answer.
//
// No holder waits for another one, so nothing is locked and there is no deadlock. But two atomic checks at the same
// time may both be refused, although enough units are left for each alone.

// CheckAll implements Service.
func (l *Limiter) CheckAll(ctx context.Context, checks []limit.Check) (limit.AllDecision, error) {
	if err := limit.ValidBatch(len(checks)); err != nil {
		return limit.AllDecision{}, err
	}
	all, bad := l.gather("checks", len(checks), func(i int) (*Op, *limit.Error) {
		op := NewOp(OpReserve, checks[i], Extra{TTL: l.hold(), Atomic: true})
		return op, suitsAtomic(op, checks[0].Always)
	})
	if bad != nil {
		return limit.AllDecision{}, bad
	}
	if len(all.ops) > 1 { // a single operation is not reserved: it is charged or refused, and need not be settled
		all.reserve(newReservationID())
	}
	if err := l.expired(ctx, len(all.ops)); err != nil {
		return limit.AllDecision{}, err
	}
	if len(all.ops) == 1 && l.borrowed(all.ops[0]) {
		return all.decision(true), nil
	}
	l.run(ctx, all.ops...)
	err := all.err()
	allowed := err == nil && all.allowed()
	charged := allowed
	if err == nil && checks[0].Always {
		err = all.unasked()
		charged = err == nil
	}
	l.settleAll(ctx, all.ops, charged)
	if err != nil {
		return limit.AllDecision{}, err
	}
	out := all.decision(charged)
	out.Allowed = allowed
	return out, nil
}

// hold returns the ttl of an atomic check's reservations. It is longer than this node takes to settle them.
func (l *Limiter) hold() time.Duration { return min(2*l.cfg.Timeout+time.Second, limit.MaxReservation) }

// together has the elements of one atomic check, or of one reservation of several targets. Elements on the same state
// share one operation.
type together struct {
	list  string  // the name of the elements in errors
	costs []int64 // of each element
	of    []int   // of each element, its op
	ops   []*Op
	first []int         // of each op, its first element, which an error names
	known map[state]int // index in ops, by state
}

// gather plans n elements, which element returns, and adds up those on the same state. It returns an error for the
// first element that is not valid.
func (l *Limiter) gather(list string, n int, element func(i int) (*Op, *limit.Error)) (*together, *limit.Error) {
	a := &together{list: list, costs: make([]int64, n), of: make([]int, n), known: make(map[state]int)}
	t := l.table.Load()
	for i := range n {
		op, err := element(i)
		a.costs[i] = op.Cost
		if err == nil {
			err = l.plan(t, op)
		}
		if err == nil {
			err = a.add(i, op)
		}
		if err != nil {
			return nil, a.about(err, i)
		}
	}
	return a, nil
}

// add adds the planned operation of element i. If an earlier element is on the same state, add adds the cost to its
// operation.
func (a *together) add(i int, op *Op) *limit.Error {
	at, repeated := a.known[op.state()]
	if !repeated {
		a.known[op.state()], a.of[i] = len(a.ops), len(a.ops)
		a.ops, a.first = append(a.ops, op), append(a.first, i)
		return nil
	}
	sum := a.ops[at]
	a.of[i] = at
	switch {
	case op.rule != sum.rule && op.Limit != nil && *op.Limit != *sum.Limit:
		return invalid("limit", "differs from an earlier element's on the same state, namespace, algorithm, window and shape being the same: send the same limit in both")
	case op.Cost > algo.MaxLimit-sum.Cost:
		return invalid("cost", "and the costs of the earlier elements of the same key add up to more than the largest cost, 9007199254740992 (2^53)")
	}
	sum.Cost += op.Cost
	sum.TTL, sum.Release = max(sum.TTL, op.TTL), sum.Release || op.Release
	return nil
}

// about returns an error of element i as an error of the list. If the list is checks and has one element, the error
// does not name it.
func (a *together) about(err *limit.Error, i int) *limit.Error {
	if a.list == "checks" {
		return err.In(i, len(a.of))
	}
	return err.InList(a.list, i)
}

// reserve has all operations charge under one id, so that they can be settled.
func (a *together) reserve(id ReservationID) {
	for _, op := range a.ops {
		op.Reservation = id
	}
}

// suitsAtomic returns an error if an operation cannot be part of an atomic check. Either all parts have Always, or
// none.
func suitsAtomic(op *Op, always bool) *limit.Error {
	switch {
	case op.Always != always:
		return invalid("always", "must be set in all elements of an atomic check, or in none")
	case op.Partial:
		return invalid("partial", "cannot be set in an atomic check, which is all or nothing")
	case op.Cost == 0:
		return invalid("cost", "is 0: a peek cannot be part of an atomic check")
	case op.RequestID != "":
		// A check that was admitted under a request id is admitted again, but a part of an atomic check may have been
		// cancelled since.
		return invalid("request_id", "cannot be given in an atomic check, which is not remembered")
	}
	return nil
}

// err returns the error of the first operation that has one.
func (a *together) err() error {
	for i, op := range a.ops {
		if err := op.Outcome.Err; err != nil {
			return a.about(err, a.first[i])
		}
	}
	return nil
}

// unasked returns an error if on_error has answered one of the charges.
func (a *together) unasked() error {
	for _, op := range a.ops {
		if d := op.Decision; d.FailedOpen || d.FailedClosed {
			return unavailable(
				"a node that decides for one of these keys cannot be reached, or has no memory left for it; what the others have charged is given back")
		}
	}
	return nil
}

func (a *together) allowed() bool {
	for _, op := range a.ops {
		if !op.Decision.Allowed {
			return false
		}
	}
	return true
}

// decision returns the answer, after all operations have ended.
func (a *together) decision(allowed bool) limit.AllDecision {
	out := limit.AllDecision{Allowed: allowed, Decisions: make([]limit.Decision, len(a.of))}
	for _, op := range a.ops {
		d := op.Decision
		if d.ReservationID != "" && !allowed {
			giveBack(d, d.Granted)
		}
		d.RememberFor = 0
		if !allowed || a.list == "checks" {
			d.ReservationID = "" // CheckAll settles it, or it was cancelled
		}
		out.ReservationID = cmp.Or(out.ReservationID, d.ReservationID) // a key without a limit has none
	}
	for i := range a.of {
		d := &out.Decisions[i]
		*d = *a.ops[a.of[i]].Decision
		if d.Granted = 0; allowed {
			d.Granted = a.costs[i]
			out.Delay = max(out.Delay, d.Delay)
		} else {
			d.Delay = 0
		}
	}
	return out
}

// giveBack adds units that were charged and cancelled to what a Decision says is left.
func giveBack(d *limit.Decision, units int64) {
	again := func(remaining, lim int64) int64 {
		if lim == algo.Unlimited {
			return remaining
		}
		return min(remaining+units, lim)
	}
	d.Remaining = again(d.Remaining, d.Limit)
	for i := range d.Limits {
		s := &d.Limits[i]
		s.Remaining = again(s.Remaining, s.Limit)
	}
}

// settleAll commits (keep) or cancels the reservations of an atomic check. Until ctx ends it waits for the cancels of
// reservations that were answered, and for the commits that this node decides itself. It does not wait for commits on
// other nodes, because they change no answer, nor for cancels of reservations that were not answered.
func (l *Limiter) settleAll(ctx context.Context, ops []*Op, keep bool) {
	var awaited, behind []*Op
	for _, op := range ops {
		d := op.Decision
		reserved := d.ReservationID != ""
		if op.Reservation == (ReservationID{}) || !reserved && (keep || !d.FailedOpen && !d.FailedClosed) {
			continue // nothing to settle
		}
		settle := NewOp(OpSettle, *op.Check, Extra{Reservation: op.Reservation})
		settle.subject, settle.partition, settle.owed = op.subject, op.partition, true
		settle.Always = false
		if !keep {
			settle.Cost = 0
		}
		if reserved && (!keep || l.cfg.Ownership.Route(int(op.partition)).Standing == ownership.Owned) {
			awaited = append(awaited, settle)
		} else {
			// A commit on another node, or a cancel of what may have been charged although no answer came.
			behind = append(behind, settle)
		}
	}
	// The reservations must be settled even if the caller's time is over.
	later := context.WithoutCancel(ctx)
	if len(behind) > 0 {
		l.settling.start(func() { l.run(later, behind...) })
	}
	if len(awaited) == 0 {
		return
	}
	heard := make(chan struct{})
	if l.settling.start(func() {
		defer close(heard)
		l.run(later, awaited...)
	}) {
		select {
		case <-heard:
		case <-ctx.Done():
		}
	}
}

// maxBackground bounds the goroutines that settle after the answer, such as when a holder hangs. What is beyond it is
// not settled: it stays charged.
const maxBackground = 10_000

// background has goroutines that go on after an answer. close waits for them.
type background struct {
	panicked func(*panics.Error) // see Config

	mu      sync.Mutex
	closed  bool
	running errgroup.Group
}

// start runs f in a goroutine, and reports whether it did: not if maxBackground goroutines run, nor after close. A
// panic of f ends f alone.
func (b *background) start(f func()) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.closed && b.running.TryGo(func() error {
		panics.Tell(b.panicked, f)
		return nil
	})
}

// close waits for the goroutines, and has start run no more.
func (b *background) close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	_ = b.running.Wait()
}

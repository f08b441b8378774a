package limiter

import (
	"context"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"golang.org/x/sync/errgroup"
)

// An atomic check is a reservation at the owner of each of its targets, under ids that this node, its coordinator, has
// chosen. If all are admitted the answer is given at once and the reservations are committed behind it: one that hears
// nothing stays charged, which is what a commit says. Otherwise they are cancelled, also where no answer came, and the
// caller is answered once that has been heard where it matters to it. No owner waits for another, so there is nothing
// to be locked and no deadlock; that is why two atomic checks can refuse each other the last unit.

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
	if len(all.ops) > 1 { // one state decides by itself: there is nothing to settle
		all.reserve(newReservationID())
	}
	if err := l.expired(ctx, len(all.ops)); err != nil {
		return limit.AllDecision{}, err
	}
	if l.allBorrowed(all) {
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
	if allowed {
		end := l.ending()
		for _, op := range all.ops {
			if l.cfg.Ownership.Route(int(op.partition)).Standing != ownership.Owned {
				l.borrowing.missed(op, &end)
			}
		}
	}
	out := all.decision(charged)
	out.Allowed = allowed
	return out, nil
}

// hold is for how long an atomic check reserves: longer than this node takes to settle it.
func (l *Limiter) hold() time.Duration { return min(2*l.cfg.Timeout+time.Second, limit.MaxReservation) }

// together is the elements of one atomic check, or of one reservation of several targets. Those that are about the same
// state are one operation.
type together struct {
	list  string  // the name of the elements in errors
	costs []int64 // of each element
	of    []int   // of each element, its op
	ops   []*Op
	first []int         // of each op, the first of its elements, which an error names
	known map[state]int // ops by what they are about
}

// gather plans n elements, which element returns, and sums up those that are about the same state. All that can be
// wrong with one without deciding it is an error here.
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

// add adds the operation of element i, which is planned, to those before it that are about the same state.
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
	sum.TTL = max(sum.TTL, op.TTL)
	return nil
}

// about returns an error of element i as one of the list. A batch of one check is not spoken of as a list.
func (a *together) about(err *limit.Error, i int) *limit.Error {
	if a.list == "checks" {
		return err.In(i, len(a.of))
	}
	return err.InList(a.list, i)
}

// reserve has all operations charge under one id, to be settled later.
func (a *together) reserve(id ReservationID) {
	for _, op := range a.ops {
		op.Reservation = id
	}
}

// suitsAtomic says what an atomic check cannot hold, of which all are charges (Always) or none is.
func suitsAtomic(op *Op, always bool) *limit.Error {
	switch {
	case op.Always != always:
		return invalid("always", "must be set in all elements of an atomic check, or in none")
	case op.Partial:
		return invalid("partial", "cannot be set in an atomic check, which is all or nothing")
	case op.Cost == 0:
		return invalid("cost", "is 0: a peek cannot be part of an atomic check")
	case op.RequestID != "":
		// What was admitted under an id is admitted again, but of an atomic check it may have been cancelled since.
		return invalid("request_id", "cannot be given in an atomic check, which is not remembered")
	}
	return nil
}

// err is the error of the first element that could not be decided.
func (a *together) err() error {
	for i, op := range a.ops {
		if err := op.Outcome.Err; err != nil {
			return a.about(err, a.first[i])
		}
	}
	return nil
}

// unasked is the error of a charge whose owner could not be asked.
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

// decision is the answer, when everything has been heard.
func (a *together) decision(allowed bool) limit.AllDecision {
	out := limit.AllDecision{Allowed: allowed, Decisions: make([]limit.Decision, len(a.of))}
	for _, op := range a.ops {
		d := op.Decision
		if d.ReservationID != "" && !allowed {
			giveBack(d, d.Granted)
		}
		d.RememberFor = 0
		if !allowed || a.list == "checks" {
			d.ReservationID = "" // it is not for the caller to settle, or has been cancelled
		}
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

// giveBack counts units as left again that were charged for a moment.
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

// settleAll settles the reservations of an atomic check: keeping all or nothing. It waits for the nodes that hold what
// is given back, and for no others: a commit changes no answer.
func (l *Limiter) settleAll(ctx context.Context, ops []*Op, keep bool) {
	var awaited, behind []*Op
	for _, op := range ops {
		d := op.Decision
		reserved := d.ReservationID != ""
		if op.Reservation == (ReservationID{}) || !reserved && (keep || !d.FailedOpen && !d.FailedClosed) {
			continue // it has charged nothing
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
			behind = append(behind, settle) // without a holder's answer it may have been charged all the same
		}
	}
	// The caller's time may be over, and what is charged is to be given back all the same.
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

// maxBackground bounds the settling that goes on behind answers, as when an owner hangs. What is past it is not
// settled: it stays charged.
const maxBackground = 10_000

// background is goroutines that are waited for once.
type background struct {
	panicked func(*panics.Error) // see Config

	mu      sync.Mutex
	closed  bool
	running errgroup.Group
}

// start runs f in a goroutine, unless there are too many or it is too late. A panic of f ends f alone.
func (b *background) start(f func()) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.closed && b.running.TryGo(func() error {
		panics.Tell(b.panicked, f)
		return nil
	})
}

// close waits for what was started, and starts nothing more.
func (b *background) close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	_ = b.running.Wait()
}

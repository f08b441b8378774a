package limiter

import (
	"context"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
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
	all, bad := l.together(checks)
	if bad != nil {
		return limit.AllDecision{}, bad
	}
	if err := l.expired(ctx, len(all.ops)); err != nil {
		return limit.AllDecision{}, err
	}
	costs := make([]int64, len(checks))
	for i := range checks {
		costs[i] = checks[i].Cost
	}
	if l.allBorrowed(all) {
		return all.decision(costs, true), nil
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
		for _, op := range all.ops {
			if l.cfg.Ownership.Route(int(op.partition)).Standing != ownership.Owned {
				l.borrowing.missed(op)
			}
		}
	}
	out := all.decision(costs, charged)
	out.Allowed = allowed
	return out, nil
}

// together is the checks of one atomic check, or what one reservation of several targets is made of.
type together struct {
	ops   []*Op // one for each target
	of    []int // of each check, its op
	first []int // of each op, the first of its checks, which an error names
	list  string
	known map[state]int // ops by what they are about
}

// newTogether is for n elements of a list, which errors name.
func newTogether(n int, list string) *together {
	return &together{of: make([]int, n), list: list, known: make(map[state]int)}
}

// add adds the operation of element i, which is prepared, to those before it that are about the same state.
func (a *together) add(i int, op *Op) *limit.Error {
	s := op.state()
	at, repeated := a.known[s]
	if !repeated {
		a.known[s] = len(a.ops)
		a.of[i] = len(a.ops)
		a.ops = append(a.ops, op)
		a.first = append(a.first, i)
		return nil
	}
	sum := a.ops[at]
	a.of[i] = at
	switch {
	case op.rule != sum.rule && op.Limit != nil && *op.Limit != *sum.Limit:
		return limit.NewError(limit.Invalid, "limit", "differs from an earlier element's on the same state, namespace, algorithm, window and shape being the same: send the same limit in both")
	case op.Cost > algo.MaxLimit-sum.Cost:
		return limit.NewError(limit.Invalid, "cost", "and the costs of the earlier elements of the same key add up to more than the largest cost, 9007199254740992 (2^53)")
	}
	sum.Cost += op.Cost
	sum.TTL = max(sum.TTL, op.TTL)
	return nil
}

// together sums up the checks that are about the same state. All that can be wrong with one without knowing its policy
// is an error here.
func (l *Limiter) together(checks []limit.Check) (*together, *limit.Error) {
	all := newTogether(len(checks), "checks")
	hold := min(2*l.cfg.Timeout+time.Second, limit.MaxReservation) // longer than this node takes to settle
	t := l.table.Load()
	for i := range checks {
		op := NewOp(OpReserve, checks[i], Extra{TTL: hold, Atomic: true})
		err := suitsAtomic(op, checks[0].Always)
		if err == nil {
			err = l.plan(t, op)
		}
		if err == nil {
			err = all.add(i, op)
		}
		if err != nil {
			return nil, err.In(i, len(checks))
		}
	}
	if len(all.ops) == 1 {
		return all, nil // one state decides by itself: there is nothing to settle
	}
	for _, op := range all.ops {
		op.Reservation = newReservationID()
	}
	return all, nil
}

// suitsAtomic says what an atomic check cannot hold, of which all are charges (Always) or none is.
func suitsAtomic(op *Op, always bool) *limit.Error {
	switch {
	case op.Always != always:
		return limit.NewError(limit.Invalid, "always", "must be set in all elements of an atomic check, or in none")
	case op.Partial:
		return limit.NewError(limit.Invalid, "partial", "cannot be set in an atomic check, which is all or nothing")
	case op.Cost == 0:
		return limit.NewError(limit.Invalid, "cost", "is 0: a peek cannot be part of an atomic check")
	case op.RequestID != "":
		// What was admitted under an id is admitted again, but of an atomic check it may have been cancelled since.
		return limit.NewError(limit.Invalid, "request_id", "cannot be given in an atomic check, which is not remembered")
	}
	return nil
}

// err is the error of the first check that could not be decided.
func (a *together) err() error {
	for i := range a.ops {
		err := a.ops[i].Outcome.Err
		switch {
		case err == nil:
		case a.list == "checks":
			return err.In(a.first[i], len(a.of))
		default:
			return err.InList(a.list, a.first[i])
		}
	}
	return nil
}

// unasked is the error of a charge whose owner could not be asked.
func (a *together) unasked() error {
	for _, op := range a.ops {
		if d := op.Decision; d.FailedOpen || d.FailedClosed {
			return limit.NewError(limit.Unavailable, "",
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

// decision is the answer, when everything has been heard, to elements of such costs.
func (a *together) decision(costs []int64, allowed bool) limit.AllDecision {
	out := limit.AllDecision{Allowed: allowed, Decisions: make([]limit.Decision, len(costs))}
	for _, op := range a.ops {
		d := op.Decision
		if held := d.ReservationID != ""; held && !allowed {
			giveBack(d, d.Granted)
		}
		d.RememberFor = 0
		if !allowed || a.list == "checks" {
			d.ReservationID = "" // it is not for the caller to settle, or has been cancelled
		}
	}
	for i := range costs {
		d := &out.Decisions[i]
		*d = *a.ops[a.of[i]].Decision
		if d.Granted = 0; allowed {
			d.Granted = costs[i]
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

// settleAll settles the reservations of an atomic check: keeping all or nothing.
func (l *Limiter) settleAll(ctx context.Context, ops []*Op, keep bool) {
	var here, elsewhere, lost []*Op
	for _, op := range ops {
		d := op.Decision
		if op.Reservation == (ReservationID{}) {
			continue
		}
		settle := NewOp(OpSettle, *op.Check, Extra{Reservation: op.Reservation})
		settle.subject, settle.partition, settle.owed = op.subject, op.partition, true
		settle.Always = false
		if !keep {
			settle.Cost = 0
		}
		switch held := d.ReservationID != ""; {
		case held && l.cfg.Ownership.Route(int(op.partition)).Standing == ownership.Owned:
			here = append(here, settle)
		case held:
			elsewhere = append(elsewhere, settle)
		case !keep && (d.FailedOpen || d.FailedClosed):
			lost = append(lost, settle) // it may have been charged without our hearing of it
		}
	}
	// The caller's time may be over, and what is charged is to be given back all the same.
	behind := context.WithoutCancel(ctx)
	if len(here) > 0 {
		l.run(behind, here...)
	}
	if len(lost) > 0 {
		l.settling.start(func() { l.run(behind, lost...) })
	}
	if len(elsewhere) == 0 {
		return
	}
	heard := make(chan struct{})
	started := l.settling.start(func() {
		defer close(heard)
		l.run(behind, elsewhere...)
	})
	if keep || !started {
		return
	}
	select {
	case <-heard:
	case <-ctx.Done():
	}
}

// maxBackground bounds the settling that goes on behind answers, as when an owner hangs. What is past it is not
// settled: it stays charged.
const maxBackground = 10_000

// background is goroutines that are waited for once.
type background struct {
	running  sync.WaitGroup
	panicked func(*panics.Error) // see Config

	mu     sync.Mutex
	count  int
	closed bool
}

// start runs f in a goroutine, unless there are too many or it is too late. A panic of f ends f alone.
func (b *background) start(f func()) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || b.count >= maxBackground {
		return false
	}
	b.count++
	b.running.Go(func() {
		defer func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.count--
		}()
		panics.Tell(b.panicked, f)
	})
	return true
}

// close waits for what was started, and starts nothing more.
func (b *background) close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.running.Wait()
}

package limiter

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/limit"
)

// DefaultMaxInFlight is how many operations wait at a node at most unless Config says otherwise. Measured with a peer that does
// not answer, one that came in a batch takes 1.5 KiB, one that came alone 11 KiB with its goroutine: so 75 to 550 MiB. A node that
// gets 100,000 checks a second and answers them within 10 ms has a thousand waiting.
const DefaultMaxInFlight = 50_000

// load is what a node has taken in and not answered, and what it did not take in. What is decided here at once is not counted:
// it keeps nothing but the processor, and no more of it is there at a time than calls are.
type load struct {
	places *fairshare.Places

	full, late atomic.Uint64 // operations not carried out: for the bound, for their callers' deadlines
}

// take takes in as many of n operations of a caller as there is room for; an empty name stands for several callers. What is
// returned is given back to places.
func (l *load) take(caller string, n int) fairshare.Taken {
	taken := l.places.Take(caller, n)
	l.full.Add(uint64(n - taken.N))
	return taken
}

// LoadStats is a reading of what waits at a node, and of what was turned away.
type LoadStats struct {
	InFlight, MaxInFlight int64
	// Full and Late count operations that were not carried out, ever: because MaxInFlight were waiting, and because their
	// callers' deadlines were over before their turn came.
	Full, Late uint64
}

// Load returns the present reading.
func (l *Limiter) Load() LoadStats {
	taken, most := l.load.places.InUse()
	return LoadStats{InFlight: taken, MaxInFlight: most, Full: l.load.full.Load(), Late: l.load.late.Load()}
}

// admitted are the places of operations that were taken in.
type admitted struct {
	owed  int
	taken fairshare.Taken
}

// done gives places back.
func (l *load) done(a admitted) {
	l.places.Release(a.owed)
	l.places.Give(a.taken)
}

// takeIn takes in operations of one caller that have to wait. on_error answers those that there is no room for, as if no
// node could be asked; it returns the others, for which done is to be called.
func (l *Limiter) takeIn(rest []*Op) (in []*Op, got admitted) {
	owed := 0
	for _, op := range rest {
		if op.owed {
			owed++
		}
	}
	l.load.places.Force(owed)
	taken := l.load.take(rest[0].Caller, len(rest)-owed)
	got = admitted{owed, taken}
	free := taken.N
	if free+owed == len(rest) {
		return rest, got
	}
	in = make([]*Op, 0, free+owed)
	for _, op := range rest {
		switch {
		case op.owed:
			in = append(in, op)
		case free > 0:
			free--
			in = append(in, op)
		default:
			l.turnAway(op)
		}
	}
	return in, got
}

// turnAway answers an operation that this node has no room for. One that was decided here and only waited for a copy to have it
// stays charged.
func (l *Limiter) turnAway(op *Op) {
	if op.stands() {
		op.Outcome.ticket = 0
		op.rule.stats.mine().count(op.Decision)
		return
	}
	done := op.Outcome.ticket != 0
	l.unreachable(op)
	if !op.asks() && op.Outcome.Err != nil && op.Outcome.Err.Kind == limit.Unavailable && !done {
		op.Outcome.Err = limit.NewError(limit.Unavailable, "", "this node has more to do than it takes in; nothing was done")
	}
}

// expired returns the error of a call of n operations whose caller has gone, or has no time left for an answer: deciding it
// would charge units without an answer.
func (l *Limiter) expired(ctx context.Context, n int) error {
	err := over(ctx)
	if err != nil {
		l.load.late.Add(uint64(n))
	}
	return err
}

// over returns why the caller of ctx waits no longer. The deadline is compared with the clock, for a context
// is told of its end by a goroutine, which waits for its turn as the call did.
func over(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if d, ok := ctx.Deadline(); ok && !time.Now().Before(d) {
		return context.DeadlineExceeded
	}
	return nil
}

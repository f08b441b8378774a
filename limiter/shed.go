package limiter

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/limit"
)

// This file bounds the operations that wait: for other nodes, for copies, for a partition that is moving. takeIn gives each a place before it
// waits, and on_error answers those without one (turnAway). Operations that this node decides at once take no place, because they use nothing but
// the processor. expired turns away calls whose deadline is over before anything is charged for them.

// DefaultMaxInFlight is how many operations may wait at a node unless Config says otherwise. Measured with a peer that does not answer, an
// operation from a batch takes 1.5 KiB, one that came alone 11 KiB with its goroutine: 75 to 550 MiB in all. A node that gets 100,000 checks a
// second and answers them within 10 ms has a thousand waiting.
const DefaultMaxInFlight = 50_000

// load counts the operations that wait, and those that were turned away.
type load struct {
	places *fairshare.Places

	full, late atomic.Uint64 // operations turned away: for want of a place, for their callers' deadlines
}

// take takes places for as many of n operations of a caller as there is room for. An empty name stands for several callers. The result must be
// given back to places.
func (l *load) take(caller string, n int) fairshare.Taken {
	taken := l.places.Take(caller, n)
	l.full.Add(uint64(n - taken.N))
	return taken
}

// LoadStats counts the operations that wait at a node, and those that were turned away.
type LoadStats struct {
	InFlight, MaxInFlight int64
	// Full and Late count operations that were turned away since the start: because MaxInFlight were waiting, and because their callers'
	// deadlines were over when the node began them.
	Full, Late uint64
}

// Load returns the present reading.
func (l *Limiter) Load() LoadStats {
	taken, most := l.load.places.InUse()
	return LoadStats{InFlight: taken, MaxInFlight: most, Full: l.load.full.Load(), Late: l.load.late.Load()}
}

// admitted are the places of operations that were taken in. owed counts those that are never turned away: the commits and cancels of an atomic
// check that has been decided (Op.owed).
type admitted struct {
	owed  int
	taken fairshare.Taken
}

// done gives places back.
func (l *load) done(a admitted) {
	l.places.Release(a.owed)
	l.places.Give(a.taken)
}

// takeIn gives places to operations of one caller that have to wait, and returns those that got one; the caller must call done for them. on_error
// answers the others, as if no node could be asked.
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

// turnAway answers an operation that got no place. One that was decided here and would only have waited for its copy stays charged.
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

// expired returns the error of a call of n operations whose caller has gone, or has no time left: to decide it would charge units for an answer
// that nobody reads.
func (l *Limiter) expired(ctx context.Context, n int) error {
	err := over(ctx)
	if err != nil {
		l.load.late.Add(uint64(n))
	}
	return err
}

// over returns why the caller of ctx waits no longer. It compares the deadline with the clock, because a goroutine ends a context, and under
// overload that goroutine waits for the processor like all others.
func over(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if d, ok := ctx.Deadline(); ok && !time.Now().Before(d) {
		return context.DeadlineExceeded
	}
	return nil
}

package limiter

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/limit"
)

// This file bounds the operations that wait: for other nodes, for copies, for a partition that is moving. takeIn gives
// each a place before it waits, and on_error answers those without one (turnAway). Operations that this node decides at
// once take no place, because they use nothing but the processor. expired turns away calls whose deadline is over
// before anything is charged for them.

// DefaultMaxInFlight is how many operations may wait at a node unless Config says otherwise. Measured with a peer that
// does not answer, an operation from a batch takes 1.5 KiB, one that came alone 11 KiB with its goroutine: 75 to 550
// MiB in all. A node that gets 100,000 checks a second and answers them within 10 ms has a thousand waiting.
const DefaultMaxInFlight = 50_000

// load counts the operations that wait, and those that were turned away.
type load struct {
	places *fairshare.Places

	full, late atomic.Uint64 // operations turned away: for want of a place, for their callers' deadlines
}

// take takes places for as many of n operations of a caller as there is room for. An empty name stands for several
// callers. The result must be given back to places.
func (l *load) take(caller string, n int) fairshare.Taken {
	taken := l.places.Take(caller, n)
	l.full.Add(uint64(n - taken.N))
	return taken
}

// LoadStats counts the operations that wait at a node, and those that were turned away.
type LoadStats struct {
	InFlight, MaxInFlight int64
	// Full and Late count operations that were turned away since the start: because MaxInFlight were waiting, and
	// because their callers' deadlines were over when the node began them.
	Full, Late uint64
}

// Load returns the present reading.
func (l *Limiter) Load() LoadStats {
	taken, most := l.load.places.InUse()
	return LoadStats{InFlight: taken, MaxInFlight: most, Full: l.load.full.Load(), Late: l.load.late.Load()}
}

// admitted are operations that were taken in, and their places. owed counts those that are never turned away (Op.owed).
type admitted struct {
	ops   []*Op
	owed  int
	taken []fairshare.Taken
}

// done gives places back.
func (l *load) done(a *admitted) {
	l.places.Release(a.owed)
	for _, t := range a.taken {
		l.places.Give(t)
	}
}

// takeIn gives places to operations that have to wait, for wait, and turns the others away, as if no node could be
// asked. Operations of one caller are beside each other, and get places together. A caller that asks all nodes at once
// is held to its share of a node's places here as well, for what those nodes forward.
func (l *Limiter) takeIn(ops []*Op) *admitted {
	in := &admitted{ops: ops[:0]}
	for len(ops) > 0 {
		n := 1
		for n < len(ops) && ops[n].Caller == ops[0].Caller && ops[n].owed == ops[0].owed {
			n++
		}
		free := n
		if ops[0].owed {
			l.load.places.Force(n)
			in.owed += n
		} else {
			t := l.load.take(ops[0].Caller, n)
			in.taken = append(in.taken, t)
			free = t.N
		}
		for _, op := range ops[free:n] {
			l.turnAway(op)
		}
		in.ops, ops = append(in.ops, ops[:free]...), ops[n:]
	}
	return in
}

// turnAway answers an operation that got no place. One that was decided here and would only have waited for its copy
// stays charged. One of a peer is answered by the node that its caller has asked.
func (l *Limiter) turnAway(op *Op) {
	if op.Hops > 0 {
		op.Outcome = Outcome{Unreachable: true}
		return
	}
	if op.stands() {
		op.Outcome.ticket = 0
		op.rule.stats.mine().count(op.Decision)
		return
	}
	done := op.Outcome.ticket != 0
	l.undecided(op)
	if !op.asks() && op.Outcome.Err != nil && op.Outcome.Err.Kind == limit.Unavailable && !done {
		op.Outcome.Err = unavailable("this node has more to do than it takes in; nothing was done")
	}
}

// expired returns the error of a call of n operations whose caller has gone, or has no time left: to decide it would
// charge units for an answer that nobody reads.
func (l *Limiter) expired(ctx context.Context, n int) error {
	err := over(ctx)
	if err != nil {
		l.load.late.Add(uint64(n))
	}
	return err
}

// over returns why the caller of ctx waits no longer. It compares the deadline with the clock, because a goroutine ends
// a context, and under overload that goroutine waits for the processor like all others.
func over(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if d, ok := ctx.Deadline(); ok && !time.Now().Before(d) {
		return context.DeadlineExceeded
	}
	return nil
}

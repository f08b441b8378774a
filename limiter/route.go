package limiter

import (
	"context"
	"slices"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
)

// This file has operations decided that this node could not answer at once: by their holders, by this node a moment later, or by no node in
// time. carry is for callers' operations, Receive for those that a peer has forwarded.
//
// A node that is asked and is not the holder answers NotHolder with a hint, and has charged nothing. The node that was asked by the caller
// then follows the hint, or asks its own view again. A forwarded operation is forwarded once more by a receiver that knows another holder
// (MaxHops); if that one is not the holder either, the answer is NotHolder.
//
// on_error answers (unreachable) when the caller's time is over, when no answer came, or when the answer's lease has ended: the operation may
// have been charged then, and is not sent again.

// retryPause is how long a node waits before it looks again for the holder of a partition that the node it asked does
// not take itself for: the time in which gossip brings two views together.
const retryPause = 5 * time.Millisecond

// shutPause is the same where this node itself has just stopped being the holder, and is about to say so.
const shutPause = 200 * time.Microsecond

// grantMost is how long a check under a strict rule waits for a grant. A node that has just been handed a partition gets
// one within a round trip or two to the voters, and may need a new backup first; one that is cut off from them gets none,
// and its callers had better know soon.
const grantMost = 200 * time.Millisecond

// carry has those operations carried out, elsewhere or later, that could not be at once. room has a place for each.
func (l *Limiter) carry(ctx context.Context, ops []*Op, room []away) {
	if len(ops) == 0 {
		return
	}
	ops, got := l.takeIn(ops)
	defer l.load.done(got)
	deadline, left := l.deadline(ctx)
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	ask, behind := l.inquire(ops, room)
	if len(behind) == 0 {
		l.forward(ctx, ask)
		return
	}
	// Half of the time is for the answers to other callers' inquiries: these callers may have more time, or wait for an inquiry of this
	// batch. The other half is for asking after all.
	patience, enough := context.WithTimeout(ctx, left/2)
	defer enough()
	l.forward(ctx, slices.Clone(ask)) // it takes out of its slice what is done
	end := l.ending()
	for _, op := range ask {
		l.conclude(op, &end) // which ends the inquiries of this batch, before it waits for those of others
	}
	l.forward(ctx, l.unanswered(patience, behind))
}

// deadline is the instant until which other nodes may be waited for, and how long that is: early enough for an answer by
// on_error to reach the caller within its own deadline.
func (l *Limiter) deadline(ctx context.Context) (at time.Time, left time.Duration) {
	now := time.Now()
	left = l.cfg.Timeout
	if d, ok := ctx.Deadline(); ok {
		caller := d.Sub(now)
		left = min(left, caller-min(caller/5, 20*time.Millisecond))
	}
	return now.Add(left), left
}

// forward has operations decided by their holders, those of different holders side by side, and waits where an answer has
// to wait. A node that says it is not the holder is believed: nothing was done, so asking again elsewhere charges nothing
// twice.
func (l *Limiter) forward(ctx context.Context, ops []*Op) {
	to := l.asks.Get().(*asks)
	for len(ops) > 0 {
		for _, op := range ops {
			if op.Outcome.ticket != 0 {
				to.waiting = append(to.waiting, op)
				continue
			}
			op.forget()
			to.add(l.next(op), op)
		}
		l.askAll(ctx, to)
		to.reset()
		again := ops[:0]
		pause := time.Duration(0)
		for _, op := range ops {
			switch out := &op.Outcome; {
			case out.NotHolder != nil && ctx.Err() == nil:
				if hint := out.NotHolder; hint.Node.Name != "" && op.away.followed.Less(hint.Term) {
					op.away.hint = hint
				}
				again = append(again, op)
				if out.shut {
					pause = max(pause, shutPause)
				} else if !out.parked {
					pause = retryPause
				}
			case out.NotHolder != nil || out.Unreachable:
				l.unreachable(op)
			}
		}
		if ops = again; len(ops) > 0 && pause > 0 {
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
		}
	}
	l.asks.Put(to) // not after a panic, which leaves operations in it
}

// asks are operations grouped by the node to ask, in the order in which they came. Its room is used again.
type asks struct {
	groups  []group
	waiting []*Op // for what they have as an answer
}

// group is what goes one way: to one process together, whenever it became the holder.
type group struct {
	way way
	ops []*Op
}

// way is a Route without its term, of which each operation has its own.
type way struct {
	standing ownership.Standing
	node     ownership.Node
}

// add adds an operation.
func (a *asks) add(w way, op *Op) {
	for i := range a.groups {
		if g := &a.groups[i]; g.way == w {
			g.ops = append(g.ops, op)
			return
		}
	}
	if n := len(a.groups); n < cap(a.groups) {
		a.groups = a.groups[:n+1]
		a.groups[n].way = w
	} else {
		a.groups = append(a.groups, group{way: w})
	}
	g := &a.groups[len(a.groups)-1]
	g.ops = append(g.ops, op)
}

// reset leaves nothing but room.
func (a *asks) reset() {
	for i := range a.groups {
		g := &a.groups[i]
		clear(g.ops)
		g.way, g.ops = way{}, g.ops[:0]
	}
	clear(a.waiting)
	a.groups, a.waiting = a.groups[:0], a.waiting[:0]
}

// askAll has every holder decide its group, and waits for the answers that have to wait, all side by side.
func (l *Limiter) askAll(ctx context.Context, to *asks) {
	var side panics.Group
	for i := range to.groups {
		g := &to.groups[i]
		if i == len(to.groups)-1 && len(to.waiting) == 0 {
			l.ask(ctx, g.way, g.ops)
			break
		}
		side.Go(func() { l.ask(ctx, g.way, g.ops) })
	}
	for _, op := range to.waiting {
		l.await(ctx, op)
	}
	side.Wait()
}

// await waits until an answer may be given.
func (l *Limiter) await(ctx context.Context, op *Op) {
	out, stands := &op.Outcome, op.stands()
	if op.Kind == OpBorrow {
		out.ticket = 0
		l.awaitLent(ctx, &op.Loan.copied)
		return
	}
	degraded, ok := l.cfg.Ownership.AwaitProgress(ctx, int(op.partition), out.ticket, out.until != 0)
	out.ticket = 0
	switch {
	case !ok && !stands:
		*out = Outcome{Unreachable: true} // it is charged, and may be forgotten: as if no answer had come
	case op.Kind == OpQuota && degraded:
		op.Quota.Lent.Granted, op.Quota.Lent.Rate = 0, 0 // no copy knows of it
	case op.asks():
		op.Decision.Degraded = op.Decision.Degraded || degraded
		if op.Cost > 0 {
			op.rule.stats.mine().count(op.Decision)
		}
	}
}

// decideLater decides an operation that has waited, under the policies of now.
func (l *Limiter) decideLater(op *Op, now *moment) {
	op.forget()
	l.replan(op)
	l.decide(op, now)
}

// awaitGrants decides once more what could not be for want of a grant, until that has taken grantMost.
func (l *Limiter) awaitGrants(ctx context.Context, ops []*Op) {
	for waited := time.Duration(0); ; waited += retryPause {
		var rest []*Op
		for _, op := range ops {
			if !op.Outcome.ungranted {
				continue
			}
			if waited >= grantMost || ctx.Err() != nil {
				l.unreachable(op)
			} else {
				rest = append(rest, op)
			}
		}
		if ops = rest; len(ops) == 0 {
			return
		}
		select {
		case <-time.After(retryPause):
		case <-ctx.Done():
		}
		now := l.moment()
		for _, op := range ops {
			l.decideLater(op, &now)
		}
	}
}

// frozenMost is how long a check waits here at most for the end of a hand-over's last instants. Then it is sent on to the
// receiver, which is the first to know.
const frozenMost = 50 * time.Millisecond

// awaitHolder waits for another route than one under which no node decides: of a partition that is being handed over for frozenMost,
// of one that is unclaimed as long as ctx allows.
func (l *Limiter) awaitHolder(ctx context.Context, partition int, r *ownership.Route) *ownership.Route {
	if r.Standing == ownership.Frozen {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, frozenMost)
		defer cancel()
	}
	return l.cfg.Ownership.Await(ctx, partition, r)
}

// decides says whether some node decides by a route.
func decides(r *ownership.Route) bool {
	return r.Standing == ownership.Owned || r.Standing == ownership.Elsewhere
}

// park waits until some node decides for the partitions of operations.
func (l *Limiter) park(ctx context.Context, ops []*Op) {
	var side panics.Group // of different partitions, one may be there long before another
	for _, op := range ops {
		side.Go(func() {
			r := l.cfg.Ownership.Route(int(op.partition))
			switch {
			case decides(r) || *l.awaitHolder(ctx, int(op.partition), r) != *r:
				op.Outcome.NotHolder, op.Outcome.parked = &ownership.Route{}, true
			case ctx.Err() != nil:
				op.Outcome.Unreachable = true
			default:
				l.ask(ctx, way{ownership.Elsewhere, r.Node}, []*Op{op}) // the receiver of the hand-over, under the same term
			}
		})
	}
	side.Wait()
}

// next is where to go next: to the node of a hint, once, otherwise by this node's own view. It notes the highest term that was
// followed, so that an old hint, which leads back to where the operation has been, is not.
func (l *Limiter) next(op *Op) way {
	r, standing := op.away.hint, ownership.Elsewhere
	if op.away.hint = nil; r == nil {
		r = l.cfg.Ownership.Route(int(op.partition))
		standing = r.Standing
	}
	if op.away.followed.Less(r.Term) {
		op.away.followed = r.Term
	}
	return way{standing, r.Node}
}

// ask has operations decided that go one way, be it by this node.
func (l *Limiter) ask(ctx context.Context, w way, ops []*Op) {
	switch {
	case w.standing == ownership.Owned:
		if l.expired(ctx, len(ops)) != nil {
			for _, op := range ops {
				op.Outcome.Unreachable = true // the node that was asked has answered by on_error
			}
			return
		}
		now := l.moment()
		for _, op := range ops {
			l.decideLater(op, &now)
		}
		l.awaitGrants(ctx, ops)
		l.awaitRecalls(ctx, ops)
		for _, op := range ops {
			if op.Outcome.ticket != 0 {
				l.await(ctx, op)
			}
		}
	case w.standing != ownership.Elsewhere:
		l.park(ctx, ops)
	case w.node.Name == "" || l.cfg.Peers == nil:
		for _, op := range ops {
			op.Outcome.Unreachable = true
		}
	default:
		for _, op := range ops {
			op.Hops++
		}
		var sent int64
		if l.cfg.BootClock != nil {
			sent = l.cfg.BootClock()
		}
		if l.cfg.Tracer != nil {
			defer l.traceForward(ctx, w.node, ops)()
		}
		l.cfg.Peers.Forward(ctx, w.node, ops)
		for _, op := range ops {
			op.Hops--
			if out := &op.Outcome; out.Lease > 0 && l.cfg.BootClock != nil {
				// Counted from before the question was sent, so from before the answerer read its clock.
				out.until = sent + int64(limit.Shortened(out.Lease))
			}
		}
	}
}

// unreachable answers an operation whose holder could not be asked in time.
func (l *Limiter) unreachable(op *Op) {
	op.forget()
	l.replan(op)
	op.Outcome.Err = suits(op)
	switch {
	case op.Outcome.Err != nil:
		l.countError(op)
	case op.asks():
		l.fail(op)
	default:
		op.Outcome.Err = limit.NewError(limit.Unavailable, "", "the node that decides for this key cannot be reached; whether the call was carried out is not known")
	}
}

// Receive carries out operations that a peer sent. What this node does not decide is handed on once, where the
// operation's hops allow, and otherwise answered NotHolder with a hint. When something is to be handed on, or has to wait,
// the rest of the work is returned as a function that waits for it; nil means that every Outcome is there already.
func (l *Limiter) Receive(ops []*Op) (rest func(context.Context)) {
	t := l.table.Load()
	now := l.moment()
	var later []*Op
	var spans continued
	if l.cfg.Tracer != nil {
		spans = l.traceReceived(ops)
	}
	var last *Op
	for _, op := range ops {
		if op.Kind == OpRecall {
			l.answerRecall(op)
		} else if op.Outcome.Err = l.planAfter(t, op, last); op.Outcome.Err == nil {
			last = op
		}
	}
	for i, op := range ops {
		if i%aheadOf == 0 && len(ops) >= aheadMin {
			l.ahead(ops[i:min(i+aheadOf, len(ops))])
		}
		if op.Kind == OpRecall || op.Outcome.Err != nil {
			continue
		}
		r := l.cfg.Ownership.Route(int(op.partition)).Handed()
		switch {
		case r.Standing == ownership.Owned:
			l.decide(op, &now)
			if op.Outcome.pending() && !(op.Kind == OpBorrow && op.Outcome.NotHolder != nil) {
				later = append(later, op)
			}
		case op.Kind == OpBorrow || r.Standing == ownership.Elsewhere && (op.Hops >= MaxHops-1 || r.Node.Name == ""):
			// A report is not handed on, as if it were this node's, nor kept waiting: the others of its message would be.
			op.Outcome.NotHolder = r
		default:
			later = append(later, op)
		}
	}
	if later == nil {
		l.limitUse(ops, &now)
		spans.end(l)
		return nil
	}
	in, taken := l.takeInReceived(later)
	return func(ctx context.Context) {
		defer func() { // of a panic, too
			for _, t := range taken {
				l.load.places.Give(t)
			}
		}()
		l.handOn(ctx, in)
		end := l.moment()
		l.limitUse(ops, &end)
		spans.end(l)
	}
}

// takeInReceived takes in operations that a peer sent and that have to wait. Each node holds its callers to their shares of its own
// places; a caller that asks all nodes at once is held to one share here, too. It returns those that there is room for.
func (l *Limiter) takeInReceived(ops []*Op) (in []*Op, taken []fairshare.Taken) {
	in = ops[:0]
	for len(ops) > 0 {
		n := 1 // a message has the operations of one caller side by side
		for n < len(ops) && ops[n].Caller == ops[0].Caller {
			n++
		}
		t := l.load.take(ops[0].Caller, n)
		taken = append(taken, t)
		in = append(in, ops[:t.N]...)
		for _, op := range ops[t.N:n] {
			op.Outcome = Outcome{Unreachable: true}
		}
		ops = ops[n:]
	}
	return in, taken
}

// handOn finishes operations that a peer sent and that could not be decided at once.
func (l *Limiter) handOn(ctx context.Context, ops []*Op) {
	to := l.asks.Get().(*asks)
	var parked panics.Group
	for _, op := range ops {
		if op.Outcome.ticket != 0 {
			to.waiting = append(to.waiting, op)
			continue
		}
		op.forget()
		if r := l.cfg.Ownership.Route(int(op.partition)).Handed(); r.Standing == ownership.Elsewhere && r.Node.Name != "" && op.Hops < MaxHops-1 {
			to.add(way{r.Standing, r.Node}, op)
			continue
		}
		parked.Go(func() {
			ctx, cancel := op.within(ctx)
			defer cancel()
			l.decideSoon(ctx, op)
		})
	}
	l.askAll(ctx, to)
	parked.Wait()
	to.reset()
	l.asks.Put(to) // as in forward
}

// within returns a context that ends with the time for which the sender waits for the operation's answer.
func (op *Op) within(ctx context.Context) (context.Context, context.CancelFunc) {
	if op.Left == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, op.Left)
}

// decideSoon has an operation decided by the holder that a partition is about to have.
func (l *Limiter) decideSoon(ctx context.Context, op *Op) {
	r := l.cfg.Ownership.Route(int(op.partition))
	for range 2 { // frozen first, and then somewhere else
		if !decides(r) {
			r = l.awaitHolder(ctx, int(op.partition), r)
		}
	}
	r = r.Handed()
	if !decides(r) || r.Standing == ownership.Elsewhere && (r.Node.Name == "" || op.Hops >= MaxHops-1) {
		op.Outcome.NotHolder = r
		return
	}
	l.ask(ctx, way{r.Standing, r.Node}, []*Op{op})
}

// limitUse tells a peer how long it may use the answers that depend on a lease.
func (l *Limiter) limitUse(ops []*Op, now *moment) {
	for _, op := range ops {
		if out := &op.Outcome; out.until != 0 {
			if out.Lease = time.Duration(out.until - now.bootTime()); out.Lease <= 0 {
				*out = Outcome{Unreachable: true}
			}
		}
	}
}

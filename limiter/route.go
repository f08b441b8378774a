package limiter

import (
	"context"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
)

// This file has operations decided that this node could not answer at once: by their holders, by this node a moment
// later, or by no node in time. wait is for callers' operations and for those that a peer has forwarded (Op.Hops above
// 0). How a check is forwarded:
//
//	takeIn   gives it a place, or turns it away (shed.go); wait then carries out what was taken in
//	forward  groups operations by the route that each takes, asks along all routes side by side, and asks again where
//	         that charged nothing
//	ask      has one group decided: by this node (decide.go), by another one (Config.Peers), or waits until some node
//	         can (park)
//
// A node that is asked and is not the holder answers NotHolder with a hint, and has charged nothing. The node that was
// asked by the caller then follows the hint, or asks its own view again. A forwarded operation is forwarded once more
// by a receiver that knows another holder (MaxHops); if that one is not the holder either, the answer is NotHolder.
//
// on_error answers (unreachable) when the caller's time is over, when no answer came, or when the answer's lease has
// ended: the operation may have been charged then, and is not sent again. Only the node that the caller has asked does
// so.

// retryPause is how long a node waits before it looks again for the holder of a partition that the node it asked does
// not take itself for: the time in which gossip brings two views together.
const retryPause = 5 * time.Millisecond

// shutPause is the same where this node itself has just stopped being the holder, and is about to say so.
const shutPause = 200 * time.Microsecond

// grantMost is how long a check under a strict rule pauses for a grant. A node that has just been handed a partition
// gets one within a round trip or two to the voters, and may need a new backup first; one that is cut off from them
// gets none, and its callers had better know soon.
const grantMost = 200 * time.Millisecond

// wait has operations carried out, elsewhere or later, that could not be at once and that were taken in. It ends with
// ctx.
func (l *Limiter) wait(ctx context.Context, in *admitted) {
	defer l.load.done(in) // of a panic, too
	room := make([]away, len(in.ops))
	for i, op := range in.ops {
		op.away = &room[i]
	}
	l.forward(ctx, in.ops)
}

// deadline is the instant until which a call may wait for other nodes: early enough for an answer by on_error to reach
// the caller within its own deadline.
func (l *Limiter) deadline(ctx context.Context) time.Time {
	now := time.Now()
	left := l.cfg.Timeout
	if d, ok := ctx.Deadline(); ok {
		caller := d.Sub(now)
		left = min(left, caller-min(caller/5, 20*time.Millisecond))
	}
	return now.Add(left)
}

// forward has operations decided by their holders, those of different holders side by side, and waits where an answer
// has to wait.
func (l *Limiter) forward(ctx context.Context, ops []*Op) {
	for waited := time.Duration(0); len(ops) > 0; {
		to := asks{most: len(ops)}
		for _, op := range ops {
			l.route(&to, op)
		}
		l.askAll(ctx, &to)
		rest, pause := ops[:0], time.Duration(0)
		for _, op := range ops {
			if after, again := l.again(ctx, op, waited); again {
				rest, pause = append(rest, op), max(pause, after)
			}
		}
		if ops = rest; len(ops) > 0 && pause > 0 {
			waited += pause
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
		}
	}
}

// route adds an operation to the group of the route that it takes: the route of a hint, once, otherwise this node's
// own. It notes the highest term that was followed, so that an old hint, which leads back to where the operation has
// been, is not.
func (l *Limiter) route(to *asks, op *Op) {
	if op.Outcome.ticket != 0 {
		to.waiting = append(to.waiting, op)
		return
	}
	op.forget()
	r, standing := op.away.hint, ownership.Elsewhere
	if op.away.hint = nil; r == nil {
		if r = l.cfg.Ownership.Route(int(op.partition)); op.Hops > 0 {
			r = r.Handed()
		}
		standing = r.Standing
	}
	if op.away.followed.Less(r.Term) {
		op.away.followed = r.Term
	}
	if !op.returned(r) {
		to.add(way{standing, r.Node}, op)
	}
}

// returned answers an operation of a peer by NotHolder if this node may not forward it by a route, and reports whether
// it has.
func (op *Op) returned(r *ownership.Route) bool {
	last := op.Hops >= MaxHops-1 || r.Node.Name == ""
	if op.Hops == 0 || op.Kind != OpBorrow && !(last && r.Standing == ownership.Elsewhere) {
		return false
	}
	op.Outcome.NotHolder = r
	return true
}

// again reports whether an operation is to be asked about once more, and after which pause: nothing was done, so that
// charges nothing twice. waited is how long all pauses were so far. Otherwise the operation has its Outcome, by
// on_error where no node has decided it.
func (l *Limiter) again(ctx context.Context, op *Op, waited time.Duration) (pause time.Duration, ok bool) {
	out := &op.Outcome
	hint := out.NotHolder
	switch {
	case hint == nil && !out.ungranted && !out.Unreachable:
		return 0, false
	case ctx.Err() != nil || out.Unreachable:
	case out.parked:
		return 0, true
	case out.shut:
		return shutPause, true
	case out.ungranted && waited < grantMost:
		return retryPause, true
	case hint != nil && op.Hops == 0:
		if hint.Node.Name != "" && op.away.followed.Less(hint.Term) {
			op.away.hint = hint
		}
		return retryPause, true
	}
	if op.Hops == 0 {
		l.unreachable(op)
	} else if hint == nil { // the node that was asked answers by on_error
		*out = Outcome{Unreachable: true}
	}
	return 0, false
}

// asks are operations grouped by the node to ask, in the order in which they came.
type asks struct {
	groups  []group
	waiting []*Op // for what they have as an answer
	most    int   // operations in a group
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
	a.groups = append(a.groups, group{w, append(make([]*Op, 0, a.most), op)})
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
	degraded, ok := l.cfg.Ownership.AwaitProgress(ctx, int(op.partition), out.ticket, op.rule.Strict)
	out.ticket = 0
	switch {
	case op.Kind == OpBorrow:
		if degraded || !ok {
			op.Loan.Lent = op.Loan.without
		}
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

// frozenMost is how long a check waits here at most for the end of a hand-over's last instants. Then it is sent on to
// the receiver, which is the first to know.
const frozenMost = 50 * time.Millisecond

// awaitHolder waits for another route than one under which no node decides: of a partition that is being handed over
// for frozenMost, of one that is unclaimed as long as ctx allows.
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
			case !op.returned(&ownership.Route{Standing: ownership.Elsewhere, Node: r.Node, Term: r.Term}):
				// The receiver of the hand-over, under the same term.
				l.ask(ctx, way{ownership.Elsewhere, r.Node}, []*Op{op})
			}
		})
	}
	side.Wait()
}

// ask has operations decided that go one way, be it by this node.
func (l *Limiter) ask(ctx context.Context, w way, ops []*Op) {
	switch {
	case w.standing == ownership.Owned:
		l.askHere(ctx, ops)
	case w.standing != ownership.Elsewhere:
		l.park(ctx, ops)
	case w.node.Name == "" || l.cfg.Peers == nil:
		for _, op := range ops {
			op.Outcome.Unreachable = true
		}
	default:
		l.askPeer(ctx, w.node, ops)
	}
}

// askHere has operations decided by this node, after a wait.
func (l *Limiter) askHere(ctx context.Context, ops []*Op) {
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
	l.awaitRecalls(ctx, ops)
	for _, op := range ops {
		if op.Outcome.ticket != 0 {
			l.await(ctx, op)
		}
	}
}

// askPeer has operations decided by another node.
func (l *Limiter) askPeer(ctx context.Context, node ownership.Node, ops []*Op) {
	sent, boot := l.clock().Mono, l.cfg.BootClock()
	for _, op := range ops {
		op.Hops++
		op.away.asked, op.away.mark, op.away.sent = true, l.refusals.Mark(op.hash), sent
	}
	if l.cfg.Tracer != nil {
		defer l.traceForward(node, ops)()
	}
	l.cfg.Peers.Forward(ctx, node, ops)
	for _, op := range ops {
		op.Hops--
		if out := &op.Outcome; out.Lease > 0 {
			// Counted from before the question was sent, so from before the answerer read its clock.
			out.until = boot + int64(limit.Shortened(out.Lease))
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
		op.Outcome.Err = unavailable(
			"the node that decides for this key cannot be reached; whether the call was carried out is not known")
	}
}

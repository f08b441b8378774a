package limiter

import (
	"context"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
)

// This file gets the answers to operations that this node could not answer at once. An operation comes from a caller,
// or from a peer that has forwarded it (Op.Hops above 0). The path of one operation:
//
//	takeIn     gives it a place among the waiting operations, or turns it away (shed.go)
//	wait       carries out the operations that have a place, until ctx ends, by forward
//	forward    repeats the next four steps, once a round, until no operation is left
//	route      adds each operation to the group of its way, or to those that wait for tickets
//	ask        has one group decided by this node (askHere) or by another one (askPeer). If no node decides, it waits
//	           for a new route (park)
//	await      waits until the backup or the disk has confirmed a decision of this node that has a ticket
//	again      says whether the operation must be asked about once more, and after which pause
//	undecided  answers an operation that no node has decided
//
// Words:
//
//	route      where a partition's operations are decided, as far as one node knows (ownership.Route). Its standing says
//	           what this node does: Owned: it decides; Elsewhere: another node does; Unclaimed or Frozen: it waits,
//	           because there is no holder, or the partition is being handed over
//	way        the standing and the node of a route, without its term
//	hint       the route in another node's answer NotHolder
//	Handed     of a route to the ring's owner (ownership): the route to the node that was last heard of as the holder.
//	           An operation of a peer takes it, because the ring's owner may have sent the operation here
//	MaxHops    3, the nodes that an operation passes: the caller's node, a receiver, the holder
//
// The states of an operation, by the fields of its Outcome:
//
//	             set by                       means                                     charged    afterwards
//	ticket       decide (decide.go)           the answer needs a confirmation first     yes        await clears it
//	NotHolder    sendBack, Peers, and with    the node that was asked is not the        no         again
//	             shut and parked              holder; the hint may have no node
//	shut         setError (decide.go)         NotHolder: this node's store was shut     no         after shutPause
//	parked       park                         NotHolder: there is a new route           no         again, at once
//	ungranted    setError                     this node has no grant now                no         again, for grantMost
//	onLoan       decide                       units on loan are recalled first          no         awaitRecalls clears
//	Unreachable  ask, await, Peers, end,      no usable answer came in time             perhaps    undecided
//	             giveUp, turnAway (shed.go)
//	Err          any step                     the answer is an error                    perhaps *  none
//	none of these                             the operation is decided                  as decided none
//
// * With an Err of kind Unavailable the operation may be charged, with another one it is not. forget clears all fields
// before an operation is asked about again. again does not test onLoan, because awaitRecalls (loan.go) has it decided
// again until it is clear.
//
// A node that is asked and is not the holder charges nothing, and answers NotHolder with the route that it knows as the
// hint. The node that the caller has asked then follows the hint, or its own route again. A receiver forwards an
// operation of a peer once (MaxHops). If the next node is not the holder either, the answer to the peer is NotHolder.
//
// The node that the caller has asked answers by on_error (undecided) when the caller's time is over, when no answer
// came, when the holder had no grant for grantMost, or when the answer's lease has ended. It does not send the
// operation again, because the holder may have charged it. A receiver to which no node has answered does not use
// on_error: its answer is Unreachable or NotHolder.
//
// Other files must keep: an operation whose Outcome is NotHolder, ungranted or onLoan has charged nothing, so that it
// can be asked about again.

// retryPause is how long a node waits before it asks again, after a node has answered NotHolder or this node has no
// grant. In that time gossip brings the views of two nodes together.
const retryPause = 5 * time.Millisecond

// shutPause is the pause if this node's store was shut for the partition: this node stops being the holder, and its
// route changes in an instant.
const shutPause = 200 * time.Microsecond

// grantMost bounds the pauses of a call before its operations without a grant are given up. The sum has the pauses of
// all rounds, whichever operation they were for. A node that has just received a partition gets a grant within one or
// two round trips to the voters, and may need a new backup first. A node that is cut off from the voters gets none, so
// its callers are answered soon.
const grantMost = 200 * time.Millisecond

// wait carries out operations that have a place and that this node could not answer at once. It ends with ctx. forward
// overwrites in.ops; done does not read it.
func (l *Limiter) wait(ctx context.Context, in *admitted) {
	defer l.load.done(in) // also after a panic
	room := make([]away, len(in.ops))
	for i, op := range in.ops {
		op.away = &room[i]
	}
	l.forward(ctx, in.ops)
}

// deadline returns the instant until which a call may wait for other nodes. It is before the caller's own deadline, so
// that an answer by on_error reaches the caller in time.
func (l *Limiter) deadline(ctx context.Context) time.Time {
	now := time.Now()
	left := l.cfg.Timeout
	if d, ok := ctx.Deadline(); ok {
		caller := d.Sub(now)
		left = min(left, caller-min(caller/5, 20*time.Millisecond))
	}
	return now.Add(left)
}

// forward has operations decided by their holders, and waits for tickets. It overwrites ops.
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
		ops = rest
		if len(ops) > 0 && pause > 0 {
			waited += pause
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
		}
	}
}

// route adds an operation to the group of its way. The way is that of a hint, which is used once, or else that of this
// node's own route. away.followed is the highest term that was followed: again ignores a hint whose term is not above
// it, because that hint leads to a node that was asked before. A hint may name this node itself, if the other node's
// view is old. Peers then answers NotHolder at once, and the next round takes this node's own route.
func (l *Limiter) route(to *asks, op *Op) {
	if op.Outcome.ticket != 0 {
		to.waiting = append(to.waiting, op)
		return
	}
	op.forget()
	r, standing := op.away.hint, ownership.Elsewhere
	op.away.hint = nil
	if r == nil {
		r = l.cfg.Ownership.Route(int(op.partition))
		if op.Hops > 0 {
			r = r.Handed()
		}
		standing = r.Standing
	}
	if op.away.followed.Less(r.Term) {
		op.away.followed = r.Term
	}
	if !op.sendBack(r) {
		to.add(way{standing, r.Node}, op)
	}
}

// sendBack answers an operation of a peer by NotHolder, with r as the hint, if this node may not forward it by r. It
// reports whether it did. This node forwards no report of a loan. It forwards another operation only if r names a node
// and MaxHops allows that.
func (op *Op) sendBack(r *ownership.Route) bool {
	allowed := r.Standing != ownership.Elsewhere || op.Hops < MaxHops-1 && r.Node.Name != ""
	if op.Hops == 0 || op.Kind != OpBorrow && allowed {
		return false
	}
	op.Outcome.NotHolder = r
	return true
}

// again reports whether an operation must be asked about once more, and after which pause. That charges nothing twice,
// because nothing was charged before. waited is the sum of all pauses so far. If again returns false, the operation has
// its Outcome: that of the node that decided it, or that of giveUp.
func (l *Limiter) again(ctx context.Context, op *Op, waited time.Duration) (pause time.Duration, ok bool) {
	out := &op.Outcome
	hint := out.NotHolder
	switch {
	case hint == nil && !out.ungranted && !out.Unreachable: // decided, or an error
		return 0, false
	case ctx.Err() != nil || out.Unreachable:
		l.giveUp(op)
		return 0, false
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
	default: // no grant for grantMost, or NotHolder for an operation of a peer
		l.giveUp(op)
		return 0, false
	}
}

// giveUp ends an operation that is not asked about again. That of a caller is answered by undecided. That of a peer is
// NotHolder if it has a hint, and otherwise Unreachable: the node that the caller has asked answers by on_error.
func (l *Limiter) giveUp(op *Op) {
	if op.Hops == 0 {
		l.undecided(op)
	} else if op.Outcome.NotHolder == nil {
		op.Outcome = Outcome{Unreachable: true}
	}
}

// asks has operations grouped by their ways, in the order in which they came.
type asks struct {
	groups  []group
	waiting []*Op // decided by this node, with a ticket
	most    int   // capacity of a new group
}

// group has the operations of one way. They go to one node in one message, whatever terms their routes have.
type group struct {
	way way
	ops []*Op
}

// way is a route without its term, which differs among the partitions of one holder.
type way struct {
	standing ownership.Standing
	node     ownership.Node
}

func (a *asks) add(w way, op *Op) {
	for i := range a.groups {
		if g := &a.groups[i]; g.way == w {
			g.ops = append(g.ops, op)
			return
		}
	}
	a.groups = append(a.groups, group{w, append(make([]*Op, 0, a.most), op)})
}

// askAll has the groups decided, all side by side. Meanwhile it waits for the operations with tickets, one after the
// other.
func (l *Limiter) askAll(ctx context.Context, to *asks) {
	var side panics.Group
	defer side.Wait() // also after a panic here: the others still write to their operations
	for i := range to.groups {
		g := &to.groups[i]
		if i == len(to.groups)-1 && len(to.waiting) == 0 {
			l.ask(ctx, g.way, g.ops) // this goroutine has nothing else to do
			break
		}
		side.Go(func() { l.ask(ctx, g.way, g.ops) })
	}
	for _, op := range to.waiting {
		l.await(ctx, op)
	}
}

// await waits until the backup or the disk has confirmed the operation's ticket, so that its answer may be given. If
// neither confirms it in time, the operation is charged, but the charge may be lost. Then it is Unreachable, as if no
// answer had come, unless it was refused by a new ban (Op.stands).
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
		*out = Outcome{Unreachable: true}
	case op.Kind == OpQuota && degraded:
		op.Loan.Quota.Granted, op.Loan.Quota.Rate = 0, 0 // the backup does not know of the grant
	case op.asks():
		op.Decision.Degraded = op.Decision.Degraded || degraded
		if op.Cost > 0 {
			op.rule.stats.mine().count(op.Decision)
		}
	}
}

// decideLater decides an operation that has waited, under the policies that are in force now.
func (l *Limiter) decideLater(op *Op, now *moment) {
	op.forget()
	l.replan(op)
	l.decide(op, now)
}

// frozenMost is how long an operation waits for the end of a hand-over. Then this node sends it to the receiver of the
// partition, because the receiver is the first to know that it is the holder.
const frozenMost = 50 * time.Millisecond

// awaitHolder waits until a partition has another route than r, under which no node decides. It waits frozenMost at
// most if the partition is being handed over, and until ctx ends if the partition is unclaimed.
func (l *Limiter) awaitHolder(ctx context.Context, partition int, r *ownership.Route) *ownership.Route {
	if r.Standing == ownership.Frozen {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, frozenMost)
		defer cancel()
	}
	return l.cfg.Ownership.Await(ctx, partition, r)
}

// hasDecider reports whether a node decides for a partition that has this route.
func hasDecider(r *ownership.Route) bool {
	return r.Standing == ownership.Owned || r.Standing == ownership.Elsewhere
}

// park waits until a node decides for the operations' partitions. Then it marks them as parked, so that again has them
// asked about at once. If a hand-over lasts longer than frozenMost, park itself asks the receiver of the partition.
func (l *Limiter) park(ctx context.Context, ops []*Op) {
	var side panics.Group // partitions may get holders at different times
	for _, op := range ops {
		side.Go(func() {
			r := l.cfg.Ownership.Route(int(op.partition))
			switch {
			case hasDecider(r) || *l.awaitHolder(ctx, int(op.partition), r) != *r:
				op.Outcome.NotHolder, op.Outcome.parked = &ownership.Route{}, true
			case ctx.Err() != nil:
				op.Outcome.Unreachable = true
			default: // the partition is still being handed over
				to := ownership.Route{Standing: ownership.Elsewhere, Node: r.Node, Term: r.Term}
				if !op.sendBack(&to) {
					l.ask(ctx, way{ownership.Elsewhere, r.Node}, []*Op{op})
				}
			}
		})
	}
	side.Wait()
}

// ask has the operations of one way decided.
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

// askHere decides operations by this node's own store, after they have waited.
func (l *Limiter) askHere(ctx context.Context, ops []*Op) {
	if err := l.expired(ctx, len(ops)); err != nil {
		for _, op := range ops {
			op.Outcome.Unreachable = true
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
			// The lease counts from before the message was sent, which is before the other node read its clock.
			out.until = boot + int64(limit.Shortened(out.Lease))
		}
	}
}

// undecided answers an operation that no node has decided in time, or whose answer may not be used: by on_error if it
// asks for units, or else by an error. The error says that the call may have been carried out, also where that is
// certainly not so (NotHolder, ungranted).
func (l *Limiter) undecided(op *Op) {
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

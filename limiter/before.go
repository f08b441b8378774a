package limiter

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/limit"
)

// This file has what happens on the node that was asked before another node decides a check, and after: before answers from borrowed
// units and from remembered refusals, inquire chooses one check to ask about a key that was just refused, conclude remembers the answer.
//
// Route.go must call conclude for every operation that inquire has seen, before it waits for another caller's inquiry: a check that others
// wait for ends their waiting there. Two batches can each lead an inquiry that the other one waits for.

// away is what a node keeps of an operation while it asks other nodes for its decision.
type away struct {
	charges  bool   // elsewhere, unless it is refused
	remember bool   // a refusal of it may be remembered
	mark     uint64 // of the refusals' memory, from before it was sent
	sent     int64  // Mono

	// inquiry is of a key that was refused a moment ago: this check leads it, or waits for the answer to the check that does.
	inquiry chan struct{}
	leads   bool

	// hint is the route to ask by next in place of this node's own, if not nil; followed is the highest term under which a node was asked.
	hint     *ownership.Route
	followed ownership.Term
}

// refusalKey is a key under one version of its limits, as far as this node knows them.
type refusalKey struct {
	rule        *rule // a new one with each table of policies
	policy, key string
}

func (op *Op) refusalKey() refusalKey { return refusalKey{op.rule, op.Policy, op.Key} }

// inquiries are the keys that were refused a moment ago and are being asked about again. When a refusal that was remembered
// ends, all callers that want the key would ask at once, and nearly all be refused: so the first one asks, and the others look
// into the memory again when it has its answer. The zero value is ready for use.
type inquiries struct {
	mu    sync.Mutex
	under map[state]inquiry
}

type inquiry struct {
	answered chan struct{}
	until    int64 // the latest Mono instant of the answer, unless the leader has panicked
}

// join returns a channel that is closed when the leader has been answered about the state, within most, and whether the caller leads.
func (q *inquiries) join(s state, now int64, most time.Duration) (answered chan struct{}, leads bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if of, ok := q.under[s]; ok && now < of.until {
		return of.answered, false
	}
	if q.under == nil {
		q.under = make(map[state]inquiry)
	}
	answered = make(chan struct{})
	q.under[s] = inquiry{answered, now + int64(most)}
	return answered, true
}

// end lets those go on that have joined.
func (q *inquiries) end(s state, answered chan struct{}) {
	q.mu.Lock()
	if q.under[s].answered == answered {
		delete(q.under, s)
	}
	q.mu.Unlock()
	close(answered)
}

// isPlain says that a refusal of the check says nothing but that there is no room for it, and charges nothing.
func isPlain(c *limit.Check) bool { return c.Cost > 0 && !c.Partial && !c.Always }

// before answers a check that this node does not decide, if it can: from units that the node has borrowed, whatever the route says, and
// from a refusal that it remembers while another node holds the partition. A request id must be sent to the owner: what was
// admitted under it is admitted again.
func (l *Limiter) before(op *Op, r *ownership.Route, now *moment) (done bool) {
	switch {
	case op.Kind != OpCheck:
		return false
	case l.borrowed(op):
		return true
	case r.Standing != ownership.Elsewhere || !isPlain(op.Check) || op.RequestID != "":
		return false
	}
	_, _, done = l.refused(op, now.Mono)
	return done
}

// inquire notes that other nodes are to be asked for operations, each of which gets one place of room, and returns those to ask at once, and
// those that wait for the inquiry of another caller.
func (l *Limiter) inquire(ops []*Op, room []away) (ask, behind []*Op) {
	now := l.clock().Mono
	ask = ops[:0]
	for i, op := range ops {
		if op.Outcome.ticket != 0 {
			ask = append(ask, op) // it has been decided, and waits for a copy
			continue
		}
		op.away = &room[i]
		if l.cfg.Ownership.Route(int(op.partition)).Standing == ownership.Elsewhere && l.inquireOne(op, now) {
			continue
		}
		if a := op.away; a.inquiry != nil && !a.leads {
			behind = append(behind, op)
		} else {
			ask = append(ask, op)
		}
	}
	return ask, behind
}

// inquireOne is inquire for an operation that another node decides. It reports whether it has answered the operation from memory.
func (l *Limiter) inquireOne(op *Op, now int64) (done bool) {
	a := op.away
	a.charges = op.Cost > 0 && (op.Kind == OpCheck || op.Kind == OpReserve || op.Kind == OpExtend)
	if op.Kind != OpCheck || !isPlain(op.Check) {
		return false
	}
	a.remember, a.sent = true, now
	if op.RequestID != "" {
		a.mark = l.refusals.Mark(op.hash)
		return false
	}
	var ended int64
	switch a.mark, ended, done = l.refused(op, now); {
	case done:
		op.away = nil
	case ended != 0 && now-ended < int64(limit.MaxRemember):
		a.inquiry, a.leads = l.inquiries.join(op.state(), now, 2*l.cfg.Timeout)
	}
	return done
}

// unanswered waits until what other callers have asked is answered, or until ctx is done, and returns the operations that this
// does not answer.
func (l *Limiter) unanswered(ctx context.Context, ops []*Op) (rest []*Op) {
	for _, op := range ops {
		select {
		case <-op.away.inquiry:
		case <-ctx.Done():
		}
	}
	now := l.clock().Mono
	for _, op := range ops {
		mark, _, done := l.refused(op, now)
		if *op.away = (away{charges: true, remember: true, mark: mark, sent: now}); done {
			op.away = nil
		} else {
			rest = append(rest, op)
		}
	}
	return rest
}

// refused answers a check from memory, and reports whether it did; mark and ended are Find's.
func (l *Limiter) refused(op *Op, now int64) (mark uint64, ended int64, ok bool) {
	r, mark, ok := l.refusals.Find(op.hash, op.refusalKey(), op.Cost, now)
	if !ok {
		return mark, r.Until, false
	}
	d := op.Decision
	*d = r.Decision
	d.Age(time.Duration(now - r.Came))
	d.RememberFor = time.Duration(r.Until - now)
	op.rule.stats.countBanned(d)
	op.rule.stats.mine().remembered.Add(1)
	var tightest *algo.Limit
	if op.rule.Limits != nil && !d.Banned { // a ban refuses whatever is in use
		tightest = tightestOf(op.rule.Limits, d)
	}
	l.count(op, tightest)
	return mark, 0, true
}

// conclude does what is left to be done when an operation has its Outcome. end is read only where an answer is under a lease.
func (l *Limiter) conclude(op *Op, end *moment) {
	if op.Outcome.until != 0 && end.bootTime() >= op.Outcome.until {
		l.unreachable(op) // another node may decide by now, and know nothing of this
	}
	a := op.away
	switch {
	case op.givesBack():
		l.refusals.Forget(op.hash) // also after an error: an answer may have been lost
	case a != nil && a.charges:
		l.remember(op)
	}
	if a != nil && a.leads {
		l.inquiries.end(op.state(), a.inquiry)
	}
	op.away = nil
}

// ending is the moment at which a batch is concluded, of which only the boot clock is read, once, and only if an
// answer is under a lease.
func (l *Limiter) ending() moment { return moment{l: l} }

// remember keeps the answer to what was forwarded, if it is a refusal that may be kept.
func (l *Limiter) remember(op *Op) {
	d := op.Decision
	if op.Outcome.Err == nil && op.Kind == OpCheck {
		l.borrowing.missed(op)
	}
	if d.Allowed || d.FailedClosed || op.Always { // it has charged, or may have and its answer was lost
		l.refusals.Admitted(op.hash)
		return
	}
	if !op.away.remember || op.Outcome.Err != nil || d.RememberFor <= 0 {
		return
	}
	kept := *d
	kept.RequestID = ""
	about := op.refusalKey()
	about.policy, about.key = strings.Clone(about.policy), strings.Clone(about.key) // they may be parts of a larger text
	l.refusals.Remember(op.hash, about, op.away.mark, lend.Refusal[limit.Decision]{
		Decision: kept, Cost: op.Cost,
		Came: l.clock().Mono, Until: op.away.sent + int64(limit.Remembered(d.RememberFor)),
	})
}

// rememberFor is how long the answer of this node to a check may be remembered elsewhere.
func rememberFor(d *limit.Decision, c *limit.Check) time.Duration {
	if d.Allowed || !isPlain(c) {
		return 0
	}
	if d.RetryAfter == algo.Never {
		return limit.MaxRemember
	}
	return min(d.RetryAfter, limit.MaxRemember)
}

package limiter

import (
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/limit"
)

// This file has what happens on the node that was asked before another node decides a check, and after: before answers
// from borrowed units and from remembered refusals, end remembers the other node's answer.
//
// A refusal is remembered as the answer to checks of the same cost (internal/lend), counted from the instant at which
// its check was sent (away.sent). What this node sends in between, and what may charge or give back units, makes it
// void (away.mark).

// away is what a node keeps of an operation while it asks other nodes for its decision.
type away struct {
	asked bool   // another node was asked
	mark  uint64 // of the refusals' memory, from before it was asked last
	sent  int64  // the Mono instant of that

	// hint is the route to ask by next in place of this node's own, if not nil; followed is the highest term under
	// which a node was asked.
	hint     *ownership.Route
	followed ownership.Term
}

// refusalKey is a key under one version of its limits, as far as this node knows them.
type refusalKey struct {
	rule *rule // a new one with each table of policies
	state
}

func (op *Op) refusalKey() refusalKey { return refusalKey{op.rule, op.state()} }

// isPlain says that a refusal of the check says nothing but that there is no room for it, and charges nothing.
func isPlain(c *limit.Check) bool { return c.Cost > 0 && !c.Partial && !c.Always }

// before answers a check that this node does not decide, if it can: from units that the node has borrowed, whatever the
// route says, and from a refusal that it remembers while another node holds the partition. A request id must be sent to
// the owner: what was admitted under it is admitted again.
func (l *Limiter) before(op *Op, r *ownership.Route, now *moment) (done bool) {
	switch {
	case op.Kind != OpCheck:
		return false
	case l.borrowed(op):
		return true
	case r.Standing != ownership.Elsewhere || !isPlain(op.Check) || op.RequestID != "":
		return false
	}
	return l.refused(op, now.Mono)
}

// refused answers a check from memory, and reports whether it did.
func (l *Limiter) refused(op *Op, now int64) bool {
	r, ok := l.refusals.Find(op.hash, op.refusalKey(), op.Cost, now)
	if !ok {
		return false
	}
	d := op.Decision
	*d = r.Decision
	d.Age(time.Duration(now - r.Came))
	d.RememberFor = time.Duration(r.Until - now)
	op.rule.stats.countBanned(d)
	op.rule.stats.mine()[resultRemembered].Add(1)
	var tightest *algo.Limit
	if op.rule.Limits != nil && !d.Banned { // a ban refuses whatever is in use
		tightest = tightestOf(op.rule.Limits, d)
	}
	l.count(op, tightest)
	return true
}

// end does what is left to be done when an operation has its Outcome. end is read only for what is under a lease or may
// be lent.
func (l *Limiter) end(op *Op, end *moment) {
	out, a := &op.Outcome, op.away
	if out.until == 0 && a == nil && !op.givesBack() {
		return // as nearly all that this node decides
	}
	op.away = nil
	if out.until != 0 {
		out.Lease = time.Duration(out.until - end.bootTime())
	}
	switch late := out.until != 0 && out.Lease <= 0; {
	case op.Hops > 0: // the node that was asked does what else there is to be done
		if late {
			*out = Outcome{Unreachable: true}
		}
		return
	case late:
		l.unreachable(op) // another node may decide by now, and know nothing of this
	}
	if op.givesBack() {
		l.refusals.Forget(op.hash) // also after an error: an answer may have been lost
	} else if a != nil && a.asked && op.asks() && op.Cost > 0 {
		l.remember(op, a, end)
	}
}

// ending is the moment at which operations end, of which only the boot clock is read, once, and only if one needs it.
func (l *Limiter) ending() moment { return moment{l: l} }

// remember keeps the answer of another node, if it is a refusal that may be kept.
func (l *Limiter) remember(op *Op, a *away, end *moment) {
	d := op.Decision
	if op.Outcome.Err == nil && op.Kind == OpCheck {
		l.borrowing.missed(op, end)
	}
	if d.Allowed || d.FailedClosed || op.Always { // it has charged, or may have and its answer was lost
		l.refusals.Admitted(op.hash)
		return
	}
	if op.Outcome.Err != nil || d.RememberFor <= 0 {
		return
	}
	kept := *d
	kept.RequestID = ""
	l.refusals.Remember(op.hash, refusalKey{op.rule, op.state().own()}, a.mark, lend.Refusal[limit.Decision]{
		Decision: kept, Cost: op.Cost,
		Came: l.clock().Mono, Until: a.sent + int64(limit.Remembered(d.RememberFor)),
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

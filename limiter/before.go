package limiter

import (
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/limit"
)

// This file has what the node that the caller has asked does before and after another node's decision:
//
//	before    answers a check without a message: from borrowed units (borrow.go), or from a refusal that the node
//	          remembers (refused)
//	end       replaces an answer whose lease has ended, and calls remember
//	remember  keeps another node's refusal in l.refusals (internal/lend)
//
// A remembered refusal answers checks of the same cost on the same key. It ends rather too early than too late: its
// RememberFor counts from away.sent, the instant at which its check was sent. Its RetryAfter counts from the arrival of
// the answer. Two things end it earlier: an admitted check on the key, because RetryAfter is too short then (Admitted),
// and an operation that may have given units back (Forget). A refusal whose check was sent before such an operation
// ended is not kept at all (away.mark).

// away is what a node keeps of an operation while it asks another node. wait (route.go) sets it.
type away struct {
	asked bool   // another node was asked
	mark  uint64 // of l.refusals, read before the operation was sent last
	sent  int64  // the Mono instant at which the operation was sent last

	// hint is the route by which to ask next, in place of this node's own; nil: this node's own. followed is the
	// highest term of the routes by which the operation was sent.
	hint     *ownership.Route
	followed ownership.Term
}

// refusalKey is a key under one version of its limits, as this node knows them.
type refusalKey struct {
	rule *rule // a new one with each table of policies
	state
}

func (op *Op) refusalKey() refusalKey { return refusalKey{op.rule, op.state()} }

// isPlain reports whether a refusal of the check charges nothing, and means only that its whole cost does not fit.
func isPlain(c *limit.Check) bool { return c.Cost > 0 && !c.Partial && !c.Always }

// before answers a check that another node decides, if it can. A loan answers whatever the route is. A remembered
// refusal answers only while another node holds the partition. A check with a request id is sent to the holder, because
// the holder may have admitted it under this id before.
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

// refused answers a check by a remembered refusal, and reports whether it did.
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
	if op.rule.Limits != nil && !d.Banned { // a ban refuses the key, and no limit
		tightest = tightestOf(op.rule.Limits, d)
	}
	l.count(op, tightest)
	return true
}

// end completes an operation that has its Outcome. It reads the clock end only for an answer under a lease, and for a
// check whose key may be worth a loan.
func (l *Limiter) end(op *Op, end *moment) {
	out, a := &op.Outcome, op.away
	if out.until == 0 && a == nil && !op.givesBack() {
		return // nearly all operations that this node decides end here
	}
	op.away = nil
	if out.until != 0 {
		out.Lease = time.Duration(out.until - end.bootTime())
	}
	switch late := out.until != 0 && out.Lease <= 0; {
	case op.Hops > 0: // the node that the caller has asked does the rest
		if late {
			*out = Outcome{Unreachable: true}
		}
		return
	case late:
		l.undecided(op) // another node may hold the partition now, without what was charged
	}
	if op.givesBack() {
		l.refusals.Forget(op.hash) // also after an error: units may have been given back
	} else if a != nil && a.asked && op.asks() && op.Cost > 0 {
		l.remember(op, a, end)
	}
}

// ending returns the moment at which operations end. It reads no clock: bootTime reads the boot clock, once, when the
// first operation needs it.
func (l *Limiter) ending() moment { return moment{l: l} }

// remember keeps another node's answer if that is a refusal which may be kept. It counts an admitted check for the
// loans.
func (l *Limiter) remember(op *Op, a *away, end *moment) {
	d := op.Decision
	// A reserve without an id is an atomic check of one key.
	if op.Outcome.Err == nil && (op.Kind == OpCheck || op.Kind == OpReserve && op.Reservation == (ReservationID{})) {
		l.borrowing.missed(op, end)
	}
	if d.Allowed || d.FailedClosed || op.Always { // it has charged, or may have
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

// rememberFor returns how long other nodes may remember this node's refusal of a check; 0: not at all.
func rememberFor(d *limit.Decision, c *limit.Check) time.Duration {
	if d.Allowed || !isPlain(c) {
		return 0
	}
	if d.RetryAfter == algo.Never {
		return limit.MaxRemember
	}
	return min(d.RetryAfter, limit.MaxRemember)
}

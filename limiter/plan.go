package limiter

import (
	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
)

// This file validates an operation before it is decided, and finds the rule that decides it.
//
// The path of one operation, whether it comes alone, in a batch, from a stream or from a peer. batch.go has the
// executor, which takes operations through these steps:
//
//	plan    validates it, hashes its key and finds its rule (this file)
//	before  answers it, if it can, from units that this node has borrowed, or from a refusal that it remembers
//	        (before.go)
//	decide  decides it by this node's own store, if this node is the holder (decide.go)
//	wait    otherwise sends it to the holder, or waits until there is one (route.go)
//	end     ends it: whether its answer may still be used, and what this node remembers of it (before.go)
//
// A check is forwarded (route.go) when another node holds its key's partition: the node that the caller has asked sends
// it to the holder, with the other checks that go there. A receiver that is not the holder sends the check on, once, to
// the holder that it knows. If it knows none, or the check was sent on before (Op.Hops), it answers NotHolder: nothing
// was charged, and the first node asks again.
//
// A check whose key is on loan (loan.go): a borrower of the key admits it from its loan, without a message, if the loan
// has enough units left (borrow.go). Any other node sends it to the holder. The holder admits it if enough units are
// neither in use nor on loan. If they are enough only with those on loan, it asks the borrowers to return what they
// have left, and decides once more, with what was returned within 50 ms.
//
// on_error answers in place of a decision (fail.go), for all operations that ask for units. The node that the caller
// has asked uses it in three cases: no node has decided within the caller's time or Config.Timeout; the deciding node's
// grant had ended when its answer came; this node's queue of waiting operations is full (shed.go). The holder uses it
// if the store has no memory for the key's state, or no place for the reservation of a part of an atomic check. No
// other error leads to it.
//
// Words:
//
//	holder      the node that decides for a partition now (Config.Ownership)
//	table       the policies in force, prepared for decisions (table.go)
//	entry       one policy of the table
//	rule        the limits of one key and how to apply them. Its field missing is set if this node does not know the
//	            policy
//	Target      a key, and a policy's name or an inline limit
//	Configured  of a Target: its Limit comes from the nodes' own files for Envoy
//	Extra       the fields of operations other than checks (op.go)
//	grant       the permission of a majority of voters, for some time, to decide under strict policies
//	lease       a unit of a concurrency limit that a caller has taken; Outcome.Lease is how long an answer given under a
//	            grant may be used
//
// Other files must keep: every operation but OpRecall is planned first, a peer's as well; OpRecall has no Target to
// plan by. decide calls suits, because only the node that decides is sure to know the policy.

// subject is what an operation is about: its key's hash, and the rule of its key in this node's own policies.
type subject struct {
	hash uint64
	rule *rule
}

// plan validates what does not depend on the policy, hashes the key and finds the rule. It makes op.Decision, into
// which the decision goes, if there is none; a Decision that is there is not cleared.
func (l *Limiter) plan(t *table, op *Op) *limit.Error {
	if err := l.identify(t, &op.Target, &op.subject); err != nil {
		return err
	}
	if err := validCost(op.Check, op.Kind); err != nil {
		return err
	}
	op.partition = int32(l.partition(op.hash))
	if op.Decision == nil {
		op.Decision = new(limit.Decision)
	}
	if op.Kind == OpCheck {
		return nil
	}
	if op.Extra == nil {
		op.Extra = new(Extra)
	}
	return op.validExtra()
}

// replan finds the rule anew: the policies may have changed while the operation waited.
func (l *Limiter) replan(op *Op) {
	if op.Limit == nil {
		op.rule = l.table.Load().rule(op.Policy, op.Key)
	}
}

// planAll plans operations under one table. It puts an error into the operation's Outcome; bad is the index of the
// first operation that got one, or -1. planAll leaves each OpRecall, and each operation that had an error before, as it
// is.
func (l *Limiter) planAll(ops []*Op) (bad int) {
	t := l.table.Load()
	var last *Op // the last operation without an error: most are under the same limit as the one before
	bad = -1
	for i, op := range ops {
		switch {
		case op.Outcome.Err != nil || op.Kind == OpRecall:
			continue
		case last != nil && op.planLike(last):
			op.partition = int32(l.partition(op.hash))
		default:
			op.Outcome.Err = l.plan(t, op)
		}
		if op.Outcome.Err == nil {
			last = op
		} else if bad < 0 {
			bad = i
		}
	}
	return bad
}

// planLike plans a valid check with less work than plan, if it has the Policy, Namespace, Configured and the very same
// Limit (the pointer) of last, a planned check without an error: only the key and the cost are left to validate.
// Otherwise it returns false and has done nothing. It does not allocate a Decision, so op must have one. The rule of an
// unknown policy has no hash, so last.rule must not be missing.
func (op *Op) planLike(last *Op) bool {
	c, before := op.Check, last.Check
	if op.Kind != OpCheck || last.Kind != OpCheck || op.Decision == nil || c.Limit != before.Limit ||
		c.Policy != before.Policy || c.Namespace != before.Namespace || c.Configured != before.Configured ||
		last.rule.missing || limit.ValidKey(c.Key) != nil || validCost(c, OpCheck) != nil {
		return false
	}
	op.rule = last.rule
	if e := op.rule.entry; e != nil {
		op.rule = e.rule(c.Key)
	}
	op.hash = op.rule.hash.Hash(c.Key)
	return true
}

// identify validates a Target, and finds its subject.
func (l *Limiter) identify(t *table, target *limit.Target, s *subject) *limit.Error {
	if e := t.by[target.Policy]; e != nil && target.Limit == nil && target.Namespace == "" {
		if err := limit.ValidKey(target.Key); err != nil {
			return err
		}
		s.rule, s.hash = e.rule(target.Key), e.hash.Hash(target.Key)
		return nil
	}
	if err := target.Valid(); err != nil {
		return err
	}
	if target.Limit == nil {
		s.rule, s.hash = t.unknown, ring.Hash(l.cfg.HashKey, target.Policy, target.Key)
		return nil
	}
	if target.Configured != limit.Reserved(target.Namespace) {
		return invalid("namespace",
			"must begin with "+limit.EnvoyNamespace+" for limits of the nodes' configuration, and for no others")
	}
	if l.cfg.NoInline && !target.Configured {
		return invalid("limit", "limits sent along are turned off on this node (no-inline): name a policy")
	}
	rule, err := l.inline.rule(target.Namespace, target.Limit)
	if err != nil {
		return err
	}
	s.rule, s.hash = rule, rule.hash.Hash(target.Key)
	return nil
}

// validCost validates the cost and Always by what the operation's kind allows, and by Check.ValidCost what all kinds
// share.
func validCost(c *limit.Check, kind OpKind) *limit.Error {
	switch {
	case c.Always && kind == OpReserve && c.Cost < 0:
		return invalid("always", "does not go with a negative cost in an atomic check: send a refund")
	case c.Always && kind != OpCheck && kind != OpReserve:
		return invalid("always", "is for checks and for atomic checks only")
	case c.Cost < 0 && kind == OpRefund:
		return invalid("cost", "is negative: a refund says how many units to give back")
	case c.Cost < 0 && kind == OpSettle:
		return invalid("cost", "is negative: it must be at least 0")
	case c.Cost == 0 && (kind == OpAcquire || kind == OpReserve || kind == OpRefund):
		return invalid("cost", "is 0: it must be at least 1 here")
	}
	return c.ValidCost()
}

// validExtra validates the fields of operations other than checks, and fills in defaults. A reservation's id must be
// one that callers have: without the number of an extension (ReservationID.Whole, which has nothing to do with
// store.Call.Whole).
func (op *Op) validExtra() *limit.Error {
	if op.TTL < 0 || (op.TTL != 0 && op.TTL < algo.MinWindow) {
		return invalid("ttl", "is below the shortest one, 1ms")
	}
	switch op.Kind {
	case OpRenew, OpRelease:
		id, ok := parseID(op.LeaseID)
		if !ok {
			return invalid("lease_id", "is not one that acquire gave: 16 hexadecimal digits, not all of them 0")
		}
		op.lease = id
	case OpBorrow, OpQuota:
		if op.Loan == nil {
			return invalid("", "a report of a loan has no loan")
		}
	case OpReserve, OpExtend:
		if op.TTL > limit.MaxReservation {
			return invalid("ttl", "is longer than the longest for a reservation, 1h")
		}
		if op.TTL == 0 && op.Kind == OpReserve {
			op.TTL = limit.DefaultReservation
		}
	}
	if op.Reservation != op.Reservation.Whole() ||
		op.Reservation == (ReservationID{}) && (op.Kind == OpSettle || op.Kind == OpExtend) {
		return invalid("reservation_id", "is not one that reserve gave")
	}
	return nil
}

// suits returns an error if the operation's kind does not suit its key's limit: only a concurrency limit has leases,
// for example. It returns nil if this node does not know the policy.
func suits(op *Op) *limit.Error {
	field := "policy"
	if op.Limit != nil {
		field = "limit"
	}
	unsuited := func(message string) *limit.Error { return invalid(field, message) }
	r := op.rule
	switch {
	case r.missing:
	case !r.concurrency && op.Kind == OpAcquire:
		return unsuited("is not a concurrency limit: check it in place of acquiring")
	case !r.concurrency && (op.Kind == OpRenew || op.Kind == OpRelease):
		return unsuited("is not a concurrency limit: it has no leases")
	case !r.concurrency && op.Kind == OpReserve && op.Atomic && !op.Always && r.Limits.CountsDenied():
		// The store cannot tell a refusal from a charge that was cancelled because another part of the check was
		// refused.
		return unsuited("has count_denied set, and cannot be part of an atomic check")
	case !r.concurrency: // all other kinds suit; the cases below are about concurrency limits
	case op.Kind == OpCheck && (op.Cost > 0 || op.Always):
		return unsuited("is a concurrency limit: acquire a lease in place of a check, which could not be released")
	case op.Kind == OpRefund:
		return unsuited("is a concurrency limit, which has no refund: release the lease")
	case op.Kind == OpReserve && op.Atomic:
		return unsuited("is a concurrency limit, which cannot be part of an atomic check: acquire a lease")
	case op.Kind == OpReserve:
		return unsuited("is a concurrency limit, which has no reservations: acquire a lease")
	case op.Kind == OpSettle || op.Kind == OpExtend:
		return unsuited("is a concurrency limit, which has no reservations: release the lease")
	}
	return nil
}

package limiter

import (
	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
)

// This file validates operations and finds their rules. plan runs first, on every node that an operation reaches. suits
// runs later, where the operation is decided or answered by on_error.
//
// Words:
//
//	operation   an Op (op.go): a check, or one of the other kinds. check, acquire, reserve and extend ask for units
//	partition   one of the parts into which the keys are divided, by hash
//	holder      the node that decides for a partition now (Config.Ownership)
//	first node  the node that the caller has asked. Other nodes get the operation from a peer: the first node, or a node
//	            that sends it on
//	Target      what an operation is about: a key, and a policy's name or an inline limit
//	rule        the limits of one key and how to apply them. rule.missing: this node does not know the policy
//	table       the policies in force, prepared for decisions (table.go). entry: one policy of it
//	Extra       the fields of operations other than checks (op.go)
//	Configured  of a Target: its Limit comes from the nodes' own files for Envoy
//	loan        units of a key that the holder has lent to a borrower, which is another node or a client. The borrower
//	            admits checks from them without asking (loan.go, borrow.go)
//	on_error    the setting of a policy that says how to answer in place of a decision (fail.go)
//	strict      of a policy: the holder decides only under a grant, which is the permission of a majority of the voters
//	            for some time. The voters are fixed nodes that record who is a holder
//	lease       a unit of a concurrency limit that a caller has taken. Outcome.Lease is another thing: for how long an
//	            answer given under a grant may be used
//
// The path of one operation, whether it comes alone, in a batch, from a stream or from a peer. batch.go has the
// executor, which takes operations through these steps:
//
//	plan    validates it, hashes its key and finds its rule (this file)
//	before  on the first node, answers a check, if it can, from units that this node has borrowed, or from a refusal
//	        that it remembers (before.go)
//	decide  decides it by this node's own store, if this node is the holder (decide.go)
//	wait    otherwise sends it to the holder, or waits until there is one (route.go)
//	end     ends every operation, however it was answered: whether the answer may still be used, and what this node
//	        remembers of it (before.go)
//
// Forwarding (route.go): if the first node is not the holder, it sends the operation to the holder, with the others
// that go there. A receiver that is not the holder sends it on, once, to the holder that it knows. If it knows none, or
// the operation was sent on before (Op.Hops), it answers NotHolder: nothing was charged, and the first node asks again.
//
// Checks of a key on loan: a borrower admits a check from its loan if the loan has enough units left. Otherwise it
// sends the check to the holder, as a node without a loan does. The holder admits it if enough units are free, that is,
// neither in use nor on loan. If the free units are too few, but free and loaned units together are enough, the holder
// asks the borrowers to return what they have left, and decides once more, with what was returned within 50 ms.
//
// on_error answers operations that ask for units. The first node uses it if no usable answer has come within the
// shorter of the caller's time and Config.Timeout (route.go, giveUp); if the holder had no grant for grantMost; if the
// grant had ended when the answer came; or if the first node has no place for another waiting operation (shed.go). The
// holder uses it if the store has no memory for the key's state, or no place for the reservation of a part of an atomic
// check. No other error leads to it.
//
// A new field is validated by Target.Valid if it is a Target's, by Check.ValidCost or validCost if it is a Check's, and
// by validExtra if it is an Extra's. What depends on the key's limit goes into suits. identify and planLike have
// shortcuts past Target.Valid: their conditions must name a field of Target that can be invalid or that the rule
// depends on.
//
// Other files must keep: every operation but OpRecall is planned first, a peer's as well; OpRecall has no Target to
// plan by. decide calls suits, because only the node that decides is sure to know the policy.

// subject is what an operation is about: its key's hash, and the rule of its key. The rule is this node's own: from its
// table, or made from an inline limit (l.inline). The node that decides may have other policies.
type subject struct {
	hash uint64
	rule *rule
}

// plan validates what does not depend on the key's limit, hashes the key and finds the rule. It makes op.Decision, into
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

// replan finds the rule of a policy's key again, because the policies may have changed while the operation waited. The
// hash and the partition stay the same: they depend on the policy's name and the key. An inline limit keeps its rule.
func (l *Limiter) replan(op *Op) {
	if op.Limit == nil {
		op.rule = l.table.Load().rule(op.Policy, op.Key)
	}
}

// planAll plans operations, all by the same table. It puts an error into the operation's Outcome; bad is the index of
// the first operation that got one, or -1. planAll leaves each OpRecall, and each operation that had an error before,
// as it is.
func (l *Limiter) planAll(ops []*Op) (bad int) {
	t := l.table.Load()
	var last *Op // the last one planned without an error: most operations have the same limit as the one before them
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

// planLike plans a check with less work than plan, if last, which is planned, was a check of the same limit: the same
// policy, or the very same inline Limit (the pointer) in the same namespace. Then only the key and the cost are left to
// validate. If it returns false, it has done nothing, and plan must plan the check or find its error. It does not
// allocate a Decision, so op must have one. All unknown policies share one rule, without a hash, so last.rule must not
// be missing.
func (op *Op) planLike(last *Op) bool {
	c, prev := op.Check, last.Check
	if op.Kind != OpCheck || last.Kind != OpCheck || op.Decision == nil || c.Limit != prev.Limit ||
		c.Policy != prev.Policy || c.Namespace != prev.Namespace || c.Configured != prev.Configured ||
		last.rule.missing || limit.ValidKey(c.Key) != nil || validCost(c, OpCheck) != nil {
		return false
	}
	op.rule = last.rule
	if e := op.rule.entry; e != nil {
		op.rule = e.rule(c.Key) // the key may have an override
	}
	op.hash = op.rule.hash.Hash(c.Key)
	return true
}

// identify validates a Target, and finds its subject. All nodes must get the same hash, whether they know the policy or
// not: it is that of the scope and the key under the cluster's HashKey. ring.Hash computes it from a policy's name.
// entry.hash and rule.hash are the same scope, kept to save work.
func (l *Limiter) identify(t *table, target *limit.Target, s *subject) *limit.Error {
	if e := t.by[target.Policy]; e != nil && target.Limit == nil && target.Namespace == "" {
		// Of what Target.Valid validates, only the key is left: the name of a known policy is valid.
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
	// Configured matters from here on only: it says where Limit comes from.
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

// validCost validates the cost and Always. It has what differs between the kinds; Check.ValidCost has the rest, and
// validates the request id as well. An OpReserve with Always is a part of an atomic check: limit.Reserve has no Always.
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

// validExtra validates the fields of operations other than checks. It sets the default TTL of a reserve, and parses
// LeaseID. An extend without a TTL keeps the present end of the reservation. A Reservation must be an id that callers
// have: without the number of an extension (ReservationID.Whole, which has nothing to do with store.Call.Whole).
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
	needed := op.Kind == OpSettle || op.Kind == OpExtend
	if op.Reservation != op.Reservation.Whole() || (needed && op.Reservation == (ReservationID{})) {
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
	if r.missing {
		return nil
	}
	if !r.concurrency {
		switch {
		case op.Kind == OpAcquire:
			return unsuited("is not a concurrency limit: check it in place of acquiring")
		case op.Kind == OpRenew || op.Kind == OpRelease:
			return unsuited("is not a concurrency limit: it has no leases")
		case op.Kind == OpReserve && op.Atomic && !op.Always && r.Limits.CountsDenied():
			// The store cannot tell a refusal from a charge that was cancelled because another part of the check was
			// refused.
			return unsuited("has count_denied set, and cannot be part of an atomic check")
		}
		return nil
	}
	switch {
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

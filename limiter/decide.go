package limiter

import (
	"encoding/hex"
	"errors"
	"math/bits"
	"math/rand/v2"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/store"
)

// This file decides operations by this node's own store, and turns the store's answers into the callers' Decisions. The
// path of one operation:
//
//  1. decide checks that the operation's kind suits the limit (suits), and calls the function that carries it out: lend
//     or quota for a loan, answer if the rule has no limits, admit for a check with a cost of 0 or more, change for all
//     others.
//  2. admit calls store.DecideTo. change calls admit for the other operations that ask for units and for a check with a
//     negative cost, and one of renew, Release, Refund, settle and Reset for the rest.
//  3. setError turns an error of the store into the Outcome.
//  4. conclusion turns the store's Answer into the caller's Decision, and counts it.
//  5. If the Outcome is pending, the Decision is not given to the caller yet. route.go waits until the ticket is
//     confirmed, or until the operation can be decided again. It has a table of all states of an Outcome.
//
// Words:
//
//	ticket     the version of the partition that the backup or the disk must confirm before the answer is given
//	ungranted  of an Outcome: this node has no grant now. Nothing was charged
//	onLoan     of an Outcome: units on loan would change the decision. Nothing was charged. awaitRecalls (loan.go) asks
//	           the borrowers to return what they have left, and has the operation decided again with op.recalled set,
//	           which makes a refusal final
//	pending    of an Outcome: it has a ticket, NotHolder, ungranted or onLoan (Outcome.pending)
//	stands     of an operation: this node has refused it by a new ban, which waits for a ticket. on_error must not admit
//	           it (Op.stands)
//	asks       of an operation: it asks for units (Op.asks), and on_error can answer it; givesBack: it may give units
//	           back (Op.givesBack). Some kinds do neither
//	tightest   the limit, of several, whose numbers a Decision has
//	candidate  of a rule: limits that are tried beside it, and whose decisions are counted but not told to callers
//
// A refund, a reset and a check with a negative cost wait for the borrowers first, because a borrower may have spent
// units that it has not reported. A settlement waits for them only if its excess needs units on loan: what it gives
// back was charged for its own reservation.
//
// Other files must keep: plan was called for the operation before decide. A Decision is not used while its Outcome is
// pending, except by Op.stands.

// moment is one reading of the clocks, which a whole batch shares.
type moment struct {
	algo.Instant
	l    *Limiter
	boot int64
}

func (l *Limiter) moment() moment { return moment{Instant: l.clock(), l: l} }

// bootTime returns the boot clock's reading. It reads the clock when first called, because that is a system call, and
// only strict policies and loans need it.
func (m *moment) bootTime() int64 {
	if m.boot == 0 {
		m.boot = m.l.cfg.BootClock()
	}
	return m.boot
}

// decide carries out an operation by this node's own store at the given moment, and counts it. Afterwards the Outcome
// is pending if the answer must not be given yet: it has a ticket, or nothing was charged because the store is shut for
// the partition (NotHolder), this node has no grant (ungranted) or units must be recalled first (onLoan).
func (l *Limiter) decide(op *Op, now *moment) {
	r := op.rule
	if op.Kind != OpCheck || r.concurrency {
		op.Outcome.Err = suits(op)
	}
	switch {
	case op.Outcome.Err != nil:
	case op.Kind == OpBorrow:
		l.lend(op, now)
	case op.Kind == OpQuota:
		l.quota(op, now)
	case r.Limits == nil:
		l.answer(op)
	case op.Kind == OpCheck && op.Cost >= 0:
		l.admit(op, now)
	case op.givesBack() && op.Kind != OpSettle && !op.recalled && l.store.OnLoan(op.storeKey(), r.Scope) > 0:
		op.Outcome.onLoan = true
	default:
		l.change(op, op.storeKey(), now)
	}
	if op.Outcome.Err != nil {
		l.countError(op)
	}
}

// countError counts the error of an operation that asks for units.
func (l *Limiter) countError(op *Op) {
	if op.asks() {
		op.rule.stats.mine()[resultError].Add(1)
	}
}

// change carries out an operation that is not a check with a cost of 0 or more.
func (l *Limiter) change(op *Op, k store.Key, now *moment) {
	r := op.rule
	switch op.Kind {
	case OpCheck, OpAcquire, OpReserve, OpExtend:
		l.admit(op, now)
	case OpRenew:
		l.renew(op, k, now)
	case OpRelease:
		ok, err := l.store.Release(k, &r.Rule, now.Instant, op.lease)
		op.Reply.Released = ok
		l.setError(op, err)
	case OpRefund:
		n, err := l.store.Refund(k, &r.Rule, now.Instant, op.Cost, requestID(op.Check), op.Caller)
		if r.candidate != nil && err == nil {
			_, _ = l.store.Refund(k, r.candidate, now.Instant, op.Cost, requestID(op.Check), op.Caller)
		}
		op.Reply.Refunded = n
		l.setError(op, err)
	case OpSettle:
		l.settle(op, k, now)
	case OpReset:
		l.setError(op, l.store.Reset(k, r.Scope))
		if r.candidate != nil {
			_ = l.store.Reset(k, r.candidate.Scope)
		}
	}
}

func (l *Limiter) renew(op *Op, k store.Key, now *moment) {
	r := op.rule
	if op.Outcome.Err = ttlFits(op); op.Outcome.Err != nil {
		return
	}
	lease, err := l.store.Renew(k, &r.Rule, now.Instant, op.lease, op.TTL, r.boot(now))
	switch {
	case err != nil:
		l.setError(op, err)
	case !lease.Alive:
		op.Outcome.Err = limit.NewError(limit.NotFound, "lease_id", "has ended: acquire anew")
	default:
		op.Reply.ExpiresIn, op.Outcome.ticket, op.Outcome.until = lease.Left, lease.Ticket, lease.Until
	}
}

// answer answers an operation under a rule without limits: the key is unlimited or blocked, or the policy is not known.
func (l *Limiter) answer(op *Op) {
	r := op.rule
	switch {
	case r.missing && (!op.asks() || l.cfg.UnknownPolicy == UnknownError):
		op.Outcome.Err = limit.NewError(limit.NotFound, "policy",
			"there is no policy named "+op.Policy+" on the node that decides for this key")
	case op.asks():
		d := op.Decision
		// units is Unlimited, or 0 for a blocked key.
		*d = limit.Decision{Policy: op.PolicyName(), Allowed: true, Granted: op.Cost, Limit: r.units,
			Remaining: r.units, RequestID: op.RequestID}
		if r.units != algo.Unlimited {
			d.Allowed, d.Granted, d.RetryAfter = false, 0, algo.Never
			if r.shadow {
				shadow(d, op.Cost)
			}
			if op.Kind == OpCheck {
				d.RememberFor = rememberFor(d, op.Check)
			}
		}
		l.count(op, nil)
	case op.Kind == OpRenew:
		op.Outcome.Err = limit.NewError(limit.NotFound, "lease_id",
			"has ended: the key has no limit to hold a lease on")
	case op.Kind == OpSettle:
		op.Outcome.Err = storeError(store.ErrNotPending)
	case op.Kind == OpReset:
		// The key may have a state from an earlier rule with limits, which would count again if that rule came back.
		l.setError(op, l.store.Reset(op.storeKey(), r.Scope))
	}
}

// count counts an operation's decision, unless its cost is 0 or negative. tightest is nil if the decision has no
// limit's numbers.
func (l *Limiter) count(op *Op, tightest *algo.Limit) {
	if op.Cost <= 0 {
		return
	}
	if weight := l.sample.weight(op.rule.stats.mine().count(op.Decision)); weight > 0 {
		l.sample.sampled(weight, op.scope(), op.Key, op.Decision, tightest)
	}
}

// ttlFits returns an error if the ttl that is asked for a lease is longer than the limit's.
func ttlFits(op *Op) *limit.Error {
	if longest := op.rule.Limits[0].Window; op.TTL > longest {
		return invalid("ttl", "is longer than the limit's, "+longest.String())
	}
	return nil
}

// admit decides an operation that asks for units. It also carries out a check with a negative cost, which gives units
// back if it has Always.
func (l *Limiter) admit(op *Op, now *moment) {
	r, c := op.rule, op.Check
	k := op.storeKey()
	call := store.Call{
		Request: requestOf(c), RequestID: requestID(c), Spent: c.Spent, Whole: !op.recalled, Caller: c.Caller,
	}
	if op.Kind != OpCheck {
		if op.Outcome.Err = l.complete(op, &call); op.Outcome.Err != nil {
			return
		}
	}
	var each []algo.Decision
	if len(r.Limits) > 1 {
		each = make([]algo.Decision, len(r.Limits))
	}
	if r.Strict {
		call.Boot = now.bootTime()
	}
	var got store.Answer
	if err := l.store.DecideTo(&k, &r.Rule, now.Instant, &call, each, &got); err != nil {
		l.setError(op, err)
		return
	}
	if got.OnLoan > 0 && !op.recalled {
		op.Outcome.onLoan = true
		return
	}
	if r.candidate != nil && op.Kind == OpCheck {
		l.tryCandidate(r, &k, now.Instant, &call, got.Allowed)
	}
	if got.Ticket != 0 || got.Until != 0 {
		op.Outcome.ticket, op.Outcome.until = got.Ticket, got.Until
	}
	l.conclusion(op, &got, each)
}

func requestOf(c *limit.Check) algo.Request {
	return algo.Request{Cost: c.Cost, Partial: c.Partial, Always: c.Always, Bounded: c.Bounded}
}

// complete adds the fields of operations other than checks to a call.
func (l *Limiter) complete(op *Op, call *store.Call) *limit.Error {
	call.TTL = op.TTL
	switch op.Kind {
	case OpReserve:
		call.Reservation, call.ReserveFor, call.ReserveOnce = op.Reservation, op.TTL, op.Atomic
		call.Release = op.Release
	case OpExtend:
		call.Reservation, call.ReserveFor, call.Extend = op.Reservation, op.TTL, true
	case OpAcquire:
		// It makes the lease's id hard to guess, so that no caller ends another one's lease by mistake. The generator
		// of math/rand/v2 is ChaCha8 with a random seed. No more is needed, because the id gives a caller no rights.
		call.Nonce = rand.Uint64()
		return ttlFits(op)
	}
	return nil
}

// tryCandidate has a rule's candidate carry out a check that the rule has decided, unless the cost is 0. It counts the
// candidate's decision and whether it differs, unless the cost is negative: such a check only gives units back.
func (l *Limiter) tryCandidate(r *rule, k *store.Key, now algo.Instant, call *store.Call, allowed bool) {
	if call.Cost == 0 {
		return
	}
	again := store.Call{Request: call.Request, RequestID: call.RequestID, Spent: call.Spent, Caller: call.Caller}
	var got store.Answer
	// After an error, such as for want of memory for the key, there is nothing to count.
	if l.store.DecideTo(k, r.candidate, now, &again, nil, &got) == nil && call.Cost > 0 {
		r.stats.candidate.count(got.Allowed, allowed)
	}
}

// conclusion turns the store's Answer into the caller's Decision. each has the decisions of the single limits, if the
// rule has several. conclusion also counts bans, peaks and samples, before a ticket is confirmed: they are counted even
// if on_error answers in the end. Only the decision itself is counted by await if there is a ticket.
func (l *Limiter) conclusion(op *Op, got *store.Answer, each []algo.Decision) {
	r, d := op.rule, op.Decision
	tightest := &r.Limits[got.Tightest]
	// Field by field: the compiler would make a literal elsewhere and copy it here, which takes longer than everything
	// else in this function.
	*d = limit.Decision{}
	d.Policy = op.PolicyName()
	d.Allowed, d.Granted, d.Degraded = got.Allowed, got.Granted, got.Degraded
	d.Limit, d.Window, d.Remaining = got.Limit, quotaWindow(tightest), got.Remaining
	d.RetryAfter, d.ResetAfter, d.Delay = got.RetryAfter, resetAfter(tightest, got.ResetAfter), got.Delay
	d.RequestID = op.RequestID
	left, sampled := got.Remaining, tightest
	if got.Banned {
		d.Banned, d.ResetAfter = true, got.ResetAfter // the end of the ban may be after the window
		left, sampled = got.Free, nil                 // the ban refuses the key, and no limit
	}
	if r.warnAt != 0 {
		d.NearLimit = nearLimit(r.warnAt, got.Limit, left)
		for i := range each {
			d.NearLimit = d.NearLimit || nearLimit(r.warnAt, each[i].Limit, each[i].Remaining)
		}
	}
	r.stats.saw(got.Limit, left)
	if !d.Allowed && r.shadow {
		shadow(d, op.Cost) // sets d.Allowed
	}
	if !d.Allowed {
		d.RetryAfterEstimated = got.OnLoan > 0
		if op.rememberable(got) {
			d.RememberFor = rememberFor(d, op.Check)
		}
	}
	if op.Kind != OpCheck {
		d.LeaseID, d.ReservationID = ids(got)
	}
	d.Limits = statusOf(r.Limits, each)
	if got.Bans {
		r.stats.bans.Add(1)
	}
	if op.Cost > 0 {
		r.stats.countBanned(d)
		// The sampler needs a number that grows by one from decision to decision. With a ticket, await counts the
		// decision later, and the ticket serves as the number.
		n := got.Ticket
		if n == 0 {
			n = r.stats.mine().count(d)
		}
		if weight := l.sample.weight(n); weight > 0 {
			l.sample.sampled(weight, r.Scope, op.Key, d, sampled)
		}
	}
}

// rememberable reports whether other nodes may remember that a check was refused. They may not if the check may pass
// earlier or later than RetryAfter says: units of the key's pending reservations (got.Pending) may be given back, units
// on loan may be returned, and a refusal that counts (count_denied) puts off the next pass. None of these moves the end
// of a ban. A check under a rule with a candidate is not remembered either, because the candidate must see each check.
func (op *Op) rememberable(got *store.Answer) bool {
	return op.Kind == OpCheck && op.rule.candidate == nil &&
		(got.Banned || !got.Pending && got.OnLoan == 0 && !op.rule.Limits.CountsDenied())
}

// ids returns the ids of a lease and of a reservation in the callers' form.
func ids(got *store.Answer) (lease, reservation string) {
	if got.Lease != 0 {
		lease = formatID(got.Lease)
	}
	if got.Reservation != (ReservationID{}) {
		whole := got.Reservation.Whole()
		reservation = hex.EncodeToString(whole[:])
	}
	return lease, reservation
}

// statusOf returns the callers' form of the decisions of several limits; nil for none.
func statusOf(limits algo.Limits, each []algo.Decision) []limit.LimitStatus {
	if each == nil {
		return nil
	}
	list := make([]limit.LimitStatus, len(each))
	for i := range each {
		s := &each[i]
		list[i] = limit.LimitStatus{
			Limit: s.Limit, Window: quotaWindow(&limits[i]), Remaining: s.Remaining, RetryAfter: s.RetryAfter,
			ResetAfter: resetAfter(&limits[i], s.ResetAfter),
		}
	}
	return list
}

// nearLimit reports whether at least the given millionths of a limit are in use. It returns false for 0 millionths, and
// if the limit is 0 or unlimited.
func nearLimit(millionths, lim, remaining int64) bool {
	return millionths != 0 && lim > 0 && lim-remaining >= warnUnits(millionths, lim)
}

// warnUnits returns the given millionths of a limit in units, rounded up.
func warnUnits(millionths, lim int64) int64 {
	hi, lo := bits.Mul64(uint64(millionths), uint64(lim))
	units, rest := bits.Div64(hi, lo, policy.WarnAtWhole)
	if rest > 0 {
		units++
	}
	return int64(units)
}

// setError turns an error of the store into the Outcome, and does nothing for a nil error. on_error (fail) answers if
// the store has no memory for the key. If it has no place for a reservation, on_error answers only for a part of an
// atomic check, whose caller has not asked for a reservation; a caller of Reserve gets the error.
func (l *Limiter) setError(op *Op, err error) {
	switch {
	case err == nil:
	case errors.Is(err, store.ErrShut):
		// Nothing was charged: route.go asks the present holder.
		op.Outcome.NotHolder, op.Outcome.shut = &ownership.Route{}, true
	case op.asks() && errors.Is(err, store.ErrNoGrant):
		op.Outcome.ungranted = true
	case op.asks() && errors.Is(err, store.ErrFull) &&
		(!errors.Is(err, store.ErrReservations) || op.Kind != OpCheck && op.Atomic):
		l.fail(op)
	default:
		op.Outcome.Err = storeError(err)
	}
}

// resetAfter returns the time until a state is as new, in the callers' form. A log keeps an entry up to a tick longer
// than its window (32 ns for a minute). Gateways round up to seconds, and callers who saw 61 s for a window of 60 s
// would take it for a fault.
func resetAfter(lim *algo.Limit, d time.Duration) time.Duration {
	if lim.Algorithm == algo.SlidingLog {
		return min(d, lim.Window)
	}
	return d
}

// shadow turns a refusal into the admission that a rule in shadow mode gives.
func shadow(d *limit.Decision, cost int64) {
	d.Allowed, d.Shadow, d.Granted, d.RetryAfter = true, true, cost, 0
}

// quotaWindow returns the time in which as many units as a Decision's Limit come back: the window, or, for a bucket
// with a Capacity, the time in which it fills.
func quotaWindow(lim *algo.Limit) time.Duration {
	if lim.Capacity == 0 || lim.Capacity == lim.Limit || lim.Limit <= 0 {
		return lim.Window
	}
	hi, lo := bits.Mul64(uint64(lim.Capacity), uint64(lim.Window))
	// A valid limit takes less than algo.MaxFill to fill, so the quotient fits.
	q, r := bits.Div64(hi, lo, uint64(lim.Limit))
	if r > 0 {
		q++
	}
	return time.Duration(q)
}

// storeErrors has the callers' errors for the store's errors. storeError takes the first that matches, so an error that
// wraps another one comes before it.
var storeErrors = []struct {
	err            error
	kind           limit.Kind
	field, message string
}{
	{store.ErrNotPending, limit.NotFound, "reservation_id",
		"is not pending here: it was ended in another way before, or its ttl has passed and all that it charged stays charged"},
	{store.ErrReserved, limit.Invalid, "cost",
		"is above what was reserved, and nothing was changed: extend the reservation first, or let the excess be charged"},
	{store.ErrExcess, limit.Invalid, "cost",
		"is above what was reserved by more than the largest limit, and nothing was changed: to charge as much takes the role charge"},
	{store.ErrKeyReservations, limit.Unavailable, "key",
		"has as many pending reservations and extensions as a key may have (max-key-reservations): commit or cancel some"},
	{store.ErrShareReservations, limit.Unavailable, "",
		"the caller has more than its part of the pending reservations of the node that decides for this key (max-reservations): commit or cancel some"},
	{store.ErrReservations, limit.Unavailable, "",
		"the node that decides for this key has as many pending reservations as it may have (max-reservations): commit or cancel some"},
	{store.ErrRequestID, limit.Invalid, "request_id",
		"was used before with another cost, or for another operation: use a fresh one"},
	{store.ErrNoGrant, limit.Unavailable, "",
		"the node that decides for this key may not do so at the moment: it has no grant, or no copy of what it counts"},
}

func storeError(err error) *limit.Error {
	for _, e := range storeErrors {
		if errors.Is(err, e.err) {
			return limit.NewError(e.kind, e.field, e.message)
		}
	}
	return unavailable("the node that decides for this key has no memory left for it")
}

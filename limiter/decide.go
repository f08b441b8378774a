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

// moment is one reading of the clocks, for a whole batch.
type moment struct {
	algo.Instant
	l    *Limiter
	boot int64
}

func (l *Limiter) moment() moment { return moment{Instant: l.clock(), l: l} }

// bootTime is read when it is first needed: it is a system call, and only strict policies need it.
func (m *moment) bootTime() int64 {
	if m.boot == 0 && m.l.cfg.BootClock != nil {
		m.boot = m.l.cfg.BootClock()
	}
	return m.boot
}

// decide carries out an operation on this node's own state at the given moment, and counts it. The Outcome is NotHolder
// when the partition turns out not to be open here, and has a ticket when the answer may not be given yet.
func (l *Limiter) decide(t *table, op *Op, now *moment) {
	e := t.entryOf(op)
	l.carryOut(e, op, now)
	l.countError(e, op)
}

// countError counts the error of a check or an acquire, if that is what came of it.
func (l *Limiter) countError(e *entry, op *Op) {
	if op.Outcome.Err != nil && op.asks() {
		l.statsOf(e, &op.subject).mine().errors.Add(1)
	}
}

// statsOf is where what is done to a subject is counted. e is nil for an inline limit and for a policy that this node does
// not know.
func (l *Limiter) statsOf(e *entry, s *subject) *policyStats {
	switch {
	case e != nil:
		return e.stats
	case s.inline != nil:
		return l.stats.inline
	}
	return l.stats.unknown
}

func (l *Limiter) carryOut(e *entry, op *Op, now *moment) {
	if op.Kind == OpBorrow {
		l.carryLoan(op, now)
		return
	}
	if op.Kind == OpQuota {
		l.quota(e, op, now)
		return
	}
	rule, done := l.resolve(e, op)
	if done {
		return
	}
	k := store.Key{Hash: op.hash, Partition: op.partition, Key: op.Key}
	if op.givesBack() && op.Kind != OpSettle && !op.recalled && l.store.OnLoan(k, rule.Scope) > 0 {
		// A borrower may have spent what it has not reported.
		op.Outcome.onLoan = true
		return
	}
	switch op.Kind {
	case OpCheck, OpAcquire, OpReserve, OpExtend:
		l.admit(e, rule, k, op, now)
	case OpRenew:
		if err := ttlFits(op, rule); err != nil {
			op.Outcome.Err = err
			return
		}
		var boot int64
		if rule.Strict {
			boot = now.bootTime()
		}
		lease, err := l.store.Renew(k, rule, now.Instant, op.lease, op.TTL, boot)
		switch {
		case err != nil:
			l.failed(e, op, err)
		case !lease.Alive:
			op.Outcome.Err = limit.NewError(limit.NotFound, "lease_id", "has ended: acquire anew")
		default:
			op.Outcome.ExpiresIn, op.Outcome.ticket, op.Outcome.until = lease.Left, lease.Ticket, lease.Until
		}
	case OpRelease:
		ok, err := l.store.Release(k, rule, now.Instant, op.lease)
		op.Outcome.Released = ok
		l.failed(e, op, err)
	case OpRefund:
		n, err := l.store.Refund(k, rule, now.Instant, op.Cost, requestID(&op.Check), op.Caller)
		if e != nil && e.candidate != nil && rule == e.owns && err == nil {
			_, _ = l.store.Refund(k, e.candidate, now.Instant, op.Cost, requestID(&op.Check), op.Caller) // which is not to be answered for
		}
		op.Outcome.Refunded = n
		l.failed(e, op, err)
	case OpSettle:
		l.settle(e, rule, k, op, now)
	case OpReset:
		l.failed(e, op, l.store.Reset(k, rule.Scope))
		if e != nil && e.candidate != nil {
			_ = l.store.Reset(k, e.candidate.Scope) // which is not to be answered for
		}
	}
}

// tryCandidate has a policy's candidate decide a check that rule has decided, and counts what it says.
func (l *Limiter) tryCandidate(e *entry, rule *store.Rule, k *store.Key, now algo.Instant, call *store.Call, allowed bool) {
	if e == nil || e.candidate == nil || rule != e.owns || call.Cost == 0 {
		return
	}
	again := store.Call{
		Request:   algo.Request{Cost: call.Cost, Partial: call.Partial, Always: call.Always, Bounded: call.Bounded},
		RequestID: call.RequestID, Spent: call.Spent, Caller: call.Caller,
	}
	var got store.Answer
	if l.store.DecideTo(k, e.candidate, now, &again, nil, &got) == nil && call.Cost > 0 { // otherwise it has no room for the key
		e.stats.candidate.count(got.Allowed, allowed)
	}
}

// resolve finds the rule for an operation, or answers it where no state is involved.
func (l *Limiter) resolve(e *entry, op *Op) (rule *store.Rule, done bool) {
	op.Outcome.Err = suits(e, op)
	switch {
	case op.Outcome.Err != nil:
		return nil, true
	case e == nil && op.inline == nil:
		l.unknown(op)
		return nil, true
	case op.inline == nil:
		r := e.Rule(op.Key)
		return e.rule(r), l.stateless(e, r, op)
	case op.inline.unlimited:
		l.answer(l.stats.inline, op, algo.Unlimited, false)
		return nil, true
	}
	return &op.inline.Rule, false
}

// stateless answers an operation where its policy's rule for the key needs no state, and reports whether it did.
func (l *Limiter) stateless(e *entry, r *policy.Rule, op *Op) bool {
	switch {
	case r.Unlimited:
		l.answer(e.stats, op, algo.Unlimited, e.Shadow)
	case r.Blocked:
		l.answer(e.stats, op, 0, e.Shadow)
	default:
		return false
	}
	if op.Kind == OpReset {
		// The key may have a state from before it had this rule, and would come back to it.
		l.failed(e, op, l.store.Reset(store.Key{Hash: op.hash, Partition: op.partition, Key: op.Key}, op.Policy))
	}
	return true
}

// unknown answers an operation on a policy that does not exist.
func (l *Limiter) unknown(op *Op) {
	switch {
	case op.asks() && l.cfg.UnknownPolicy == UnknownAllow:
		l.answer(l.stats.unknown, op, algo.Unlimited, false)
	case op.asks() && l.cfg.UnknownPolicy == UnknownDeny:
		l.answer(l.stats.unknown, op, 0, false)
	default:
		op.Outcome.Err = limit.NewError(limit.NotFound, "policy", "there is no policy named "+op.Policy+" on the node that decides for this key")
	}
}

// answer answers an operation for a key without a state: one that is unlimited, or blocked (limit 0).
func (l *Limiter) answer(s *policyStats, op *Op, units int64, shadowMode bool) {
	switch op.Kind {
	case OpCheck, OpAcquire, OpReserve, OpExtend:
		d := &op.Outcome.Decision
		*d = limit.Decision{Policy: op.PolicyName(), Allowed: true, Granted: op.Cost, Limit: units, Remaining: units, RequestID: op.RequestID}
		if units != algo.Unlimited {
			d.Allowed, d.Granted, d.RetryAfter = false, 0, algo.Never
			if shadowMode {
				shadow(d, op.Cost)
			}
			if op.Kind == OpCheck {
				d.RememberFor = rememberFor(d, &op.Check)
			}
		}
		if op.Cost > 0 {
			if weight := l.sample.weight(s.mine().count(d)); weight > 0 {
				l.sample.sampled(weight, op.scope(op.Policy), op.Key, d, nil)
			}
		}
	case OpRenew:
		op.Outcome.Err = limit.NewError(limit.NotFound, "lease_id", "has ended: the key has no limit to hold a lease on")
	case OpSettle:
		op.Outcome.Err = notPending()
	}
}

// suits says whether an operation suits the limit it is about, as far as this node knows that.
func suits(e *entry, op *Op) *limit.Error {
	switch {
	case op.inline != nil:
		return fits(op, op.Limit.Algorithm == algo.Concurrency, op.inline.Limits)
	case e != nil && op.Atomic:
		return fits(op, e.Concurrency, e.Rule(op.Key).Limits)
	case e != nil:
		return fits(op, e.Concurrency, nil)
	}
	return nil
}

// fits says whether an operation suits the kind of limit. limits may be nil unless the operation is atomic.
func fits(op *Op, concurrency bool, limits algo.Limits) *limit.Error {
	invalid := func(field, message string) *limit.Error { return limit.NewError(limit.Invalid, field, message) }
	switch op.Kind {
	case OpCheck:
		if concurrency && (op.Cost > 0 || op.Always) {
			return invalid(targetField(op), "is a concurrency limit: acquire a lease in place of a check, which could not be released")
		}
	case OpAcquire:
		if !concurrency {
			return invalid(targetField(op), "is not a concurrency limit: check it in place of acquiring")
		}
	case OpRenew, OpRelease:
		if !concurrency {
			return invalid(targetField(op), "is not a concurrency limit: it has no leases")
		}
	case OpRefund:
		if concurrency {
			return invalid(targetField(op), "is a concurrency limit, which has no refund: release the lease")
		}
	case OpReserve:
		switch {
		case op.Atomic && concurrency:
			return invalid(targetField(op), "is a concurrency limit, which cannot be part of an atomic check: acquire a lease")
		case op.Atomic && !op.Always && countsDenied(limits):
			// What is refused, and what is cancelled because another was, would have to be told apart from then on.
			return invalid(targetField(op), "has count_denied set, and cannot be part of an atomic check")
		case concurrency:
			return invalid(targetField(op), "is a concurrency limit, which has no reservations: acquire a lease")
		}
	case OpSettle, OpExtend:
		if concurrency {
			return invalid(targetField(op), "is a concurrency limit, which has no reservations: release the lease")
		}
	}
	return nil
}

func countsDenied(limits algo.Limits) bool {
	for i := range limits { // a Limit is large to copy
		if limits[i].CountDenied {
			return true
		}
	}
	return false
}

// ttlFits says whether the life asked for a lease is within its limit's.
func ttlFits(op *Op, rule *store.Rule) *limit.Error {
	if longest := rule.Limits[0].Window; op.TTL > longest {
		return limit.NewError(limit.Invalid, "ttl", "is longer than the limit's, "+longest.String())
	}
	return nil
}

// admit decides a check, an acquire or a reserve.
func (l *Limiter) admit(e *entry, rule *store.Rule, k store.Key, op *Op, now *moment) {
	call := store.Call{
		Request:   algo.Request{Cost: op.Cost, Partial: op.Partial, Always: op.Always, Bounded: op.Bounded, TTL: op.TTL},
		RequestID: requestID(&op.Check),
		Spent:     op.Spent,
		Whole:     !op.recalled,
		Caller:    op.Caller,
	}
	switch op.Kind {
	case OpReserve:
		call.Reservation, call.ReserveFor, call.ReserveOnce = op.Reservation, op.TTL, op.Atomic
	case OpExtend:
		call.Reservation, call.ReserveFor, call.Extend = op.Reservation, op.TTL, true
	case OpAcquire:
		if op.Outcome.Err = ttlFits(op, rule); op.Outcome.Err != nil {
			return
		}
		call.Nonce = rand.Uint64() // makes the lease id hard to guess
	}
	var each []algo.Decision
	if len(rule.Limits) > 1 {
		each = make([]algo.Decision, len(rule.Limits))
	}
	if rule.Strict {
		call.Boot = now.bootTime()
	}
	var got store.Answer
	if err := l.store.DecideTo(&k, rule, now.Instant, &call, each, &got); err != nil {
		l.failed(e, op, err)
		return
	}
	if got.OnLoan > 0 && !op.recalled {
		op.Outcome.onLoan = true
		return
	}
	if op.Kind == OpCheck {
		l.tryCandidate(e, rule, &k, now.Instant, &call, got.Allowed)
	}
	op.Outcome.ticket, op.Outcome.until = got.Ticket, got.Until
	d := &op.Outcome.Decision
	l.conclusion(d, e, rule, &op.Check, &op.subject, &got, each, op.Kind == OpCheck)
	if got.Lease != 0 {
		d.LeaseID = formatID(got.Lease)
	}
	d.Limits = statusOf(rule.Limits, each)
	if got.Reservation != (ReservationID{}) {
		whole := got.Reservation.Whole()
		d.ReservationID = hex.EncodeToString(whole[:])
	}
}

// statusOf is what each of several limits says; nil for none.
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

// direct decides a check at once that is like nearly all: under one limit that needs no grant of other nodes, and for
// a key that this node decides for, or whose refusal it remembers. Otherwise it reports false, and has done nothing but to
// find the error that the store answers; or it has a ticket, and the answer in d may not be given before a copy has it.
func (l *Limiter) direct(t *table, c *limit.Check, s *subject, now *moment, d *limit.Decision) (done bool, ticket uint64, err error) {
	rule := simple(c, s)
	if rule == nil {
		return false, 0, nil
	}
	k := store.Key{Hash: s.hash, Partition: l.partition(s.hash), Key: c.Key}
	if r := l.cfg.Ownership.Route(k.Partition); r.Standing != ownership.Owned {
		if l.borrowed(c, s, d) {
			return true, 0, nil
		}
		if r.Standing != ownership.Elsewhere || !isPlain(c) || c.RequestID != "" {
			return false, 0, nil
		}
		_, _, done = l.refused(t, c, s, now.Mono, d)
		return done, 0, nil
	}
	if c.Cost < 0 && l.store.OnLoan(k, rule.Scope) > 0 {
		return false, 0, nil
	}
	call := store.Call{
		Request: algo.Request{Cost: c.Cost, Partial: c.Partial, Always: c.Always, Bounded: c.Bounded}, RequestID: requestID(c), Spent: c.Spent, Whole: true, Caller: c.Caller,
	}
	var got store.Answer
	if err := l.store.DecideTo(&k, rule, now.Instant, &call, nil, &got); err != nil {
		return false, 0, err
	}
	if got.OnLoan > 0 {
		return false, 0, nil // and refused: nothing was charged
	}
	l.tryCandidate(s.entry, rule, &k, now.Instant, &call, got.Allowed)
	l.conclusion(d, s.entry, rule, c, s, &got, nil, true)
	return got.Ticket == 0, got.Ticket, nil
}

// simple returns the rule that a check is decided by, if direct may do it.
func simple(c *limit.Check, s *subject) (rule *store.Rule) {
	switch {
	case s.entry != nil && !s.entry.Concurrency:
		rule = s.entry.rule(s.entry.Rule(c.Key))
	case s.inline != nil && !s.inline.unlimited && c.Limit.Algorithm != algo.Concurrency:
		rule = &s.inline.Rule
	}
	if rule == nil || len(rule.Limits) != 1 || rule.Strict {
		return nil
	}
	return rule
}

// conclusion makes of what the store answered what a caller is told, and counts it. check says that c was asked as a check,
// so that its refusal may be remembered; each is what the limits of a rule with several say.
func (l *Limiter) conclusion(d *limit.Decision, e *entry, rule *store.Rule, c *limit.Check, s *subject, got *store.Answer, each []algo.Decision, check bool) {
	tightest := &rule.Limits[got.Tightest]
	// Field by field: a literal would be made elsewhere and copied here, which takes longer than all the rest.
	*d = limit.Decision{}
	if d.Policy = "inline"; e != nil {
		d.Policy = e.Name
	}
	d.Allowed, d.Granted, d.Degraded = got.Allowed, got.Granted, got.Degraded
	d.Limit, d.Window, d.Remaining = got.Limit, quotaWindow(tightest), got.Remaining
	d.RetryAfter, d.ResetAfter, d.Delay = got.RetryAfter, resetAfter(tightest, got.ResetAfter), got.Delay
	if d.RequestID = c.RequestID; got.Banned {
		d.Banned, d.ResetAfter = true, got.ResetAfter // which is not the limit's alone
	}
	left, sampled := got.Remaining, tightest
	if got.Banned {
		left, sampled = got.Free, nil // what is in use is not what refuses it
	}
	if e != nil && e.WarnAt != 0 {
		d.NearLimit = nearLimit(e.WarnAt, got.Limit, left)
		for i := range each {
			d.NearLimit = d.NearLimit || nearLimit(e.WarnAt, each[i].Limit, each[i].Remaining)
		}
	}
	stats := l.statsOf(e, s)
	stats.saw(got.Limit, left)
	if !d.Allowed && e != nil && e.Shadow {
		shadow(d, c.Cost)
	}
	d.RetryAfterEstimated = !d.Allowed && got.OnLoan > 0
	// What is pending may be given back, and so may what is on loan, and what is denied count: each moves the moment at which the
	// check passes, but not the end of a ban. A candidate is to be asked each time.
	if check && !d.Allowed && (got.Banned || !got.Pending && got.OnLoan == 0 && !countsDenied(rule.Limits)) && (e == nil || e.candidate == nil) {
		d.RememberFor = rememberFor(d, c)
	}
	if got.Bans {
		stats.bans.Add(1)
	}
	if c.Cost > 0 {
		stats.countBanned(d)
		n := got.Ticket
		if n == 0 {
			n = stats.mine().count(d) // otherwise once the answer may be given
		}
		if weight := l.sample.weight(n); weight > 0 {
			l.sample.sampled(weight, rule.Scope, c.Key, d, sampled)
		}
	}
}

// nearLimit says whether so many millionths of a limit are in use: never for 0 of them, nor where nothing is limited.
func nearLimit(millionths, lim, remaining int64) bool {
	return millionths != 0 && lim > 0 && lim-remaining >= warnUnits(millionths, lim)
}

// warnUnits is how many units so many millionths of a limit are, rounded up.
func warnUnits(millionths, lim int64) int64 {
	hi, lo := bits.Mul64(uint64(millionths), uint64(lim))
	units, rest := bits.Div64(hi, lo, policy.WarnAtWhole)
	if rest > 0 {
		units++
	}
	return int64(units)
}

// failed turns an error of the store into an Outcome. A nil error changes nothing.
func (l *Limiter) failed(e *entry, op *Op, err error) {
	switch {
	case err == nil:
	case errors.Is(err, store.ErrShut):
		op.Outcome.NotHolder, op.Outcome.shut = &ownership.Route{}, true // nothing was done, and whoever holds it is to be asked
	case op.asks() && errors.Is(err, store.ErrNoGrant):
		op.Outcome.ungranted = true
	case errors.Is(err, store.ErrNotPending):
		op.Outcome.Err = notPending()
	case errors.Is(err, store.ErrReservations) && !op.Atomic:
		op.Outcome.Err = reservationsError(err)
	case op.asks() && errors.Is(err, store.ErrFull):
		l.fail(e, op)
	default:
		op.Outcome.Err = storeError(err)
	}
}

// resetAfter is the time until a state is as new, as callers are told it: an entry of a log lives up to a tick (32 ns for
// a minute) longer than its window, and nobody wants to read 61 s for it.
func resetAfter(l *algo.Limit, d time.Duration) time.Duration {
	if l.Algorithm == algo.SlidingLog {
		return min(d, l.Window)
	}
	return d
}

// shadow turns a refusal into the admission that a policy in shadow mode gives.
func shadow(d *limit.Decision, cost int64) {
	d.Allowed, d.Shadow, d.Granted, d.RetryAfter = true, true, cost, 0
}

// failedRetry is when a check may come back that was refused because its owner could not be asked.
const failedRetry = time.Second

// fail answers a check or an acquire by on_error, for want of an owner or of memory. e may be nil: an inline limit fails
// open, and so does a policy that this node does not know, unless unknown policies are denied.
func (l *Limiter) fail(e *entry, op *Op) {
	d := limit.Decision{Policy: op.PolicyName(), RequestID: op.RequestID}
	var limits algo.Limits
	closed := false
	switch {
	case e != nil:
		r := e.Rule(op.Key)
		if l.stateless(e, r, op) {
			return // a key that is blocked stays so, and nothing has to be asked for one that is unlimited
		}
		limits = r.Limits
		closed = e.OnError == policy.Closed
	case op.inline != nil:
		if op.inline.unlimited {
			l.answer(l.stats.inline, op, algo.Unlimited, false)
			return
		}
		limits = op.inline.Limits
	default:
		closed = l.cfg.UnknownPolicy == UnknownDeny
	}
	if len(limits) > 0 {
		d.Limit, d.Window = limits[0].Limit, quotaWindow(&limits[0])
		if limits[0].Capacity > 0 {
			d.Limit = limits[0].Capacity
		}
	}
	if e != nil && e.OnError == policy.Share {
		l.failByPart(e, op, limits, &d)
	} else if closed && (e == nil || !e.Shadow) {
		d.FailedClosed = true
		d.RetryAfter = failedRetry
	} else {
		d.FailedOpen, d.Allowed, d.Granted, d.Shadow = true, true, op.Cost, closed
	}
	op.Outcome.Decision = d
	if op.Cost > 0 {
		l.statsOf(e, &op.subject).mine().count(&d)
	}
}

// quotaWindow is the time in which as many units as a Decision's Limit says come back: the window, or, for a bucket with
// a capacity of its own, the time it takes to fill.
func quotaWindow(l *algo.Limit) time.Duration {
	if l.Capacity == 0 || l.Capacity == l.Limit || l.Limit <= 0 {
		return l.Window
	}
	hi, lo := bits.Mul64(uint64(l.Capacity), uint64(l.Window))
	// A valid limit takes less than algo.MaxFill to fill, so the quotient fits.
	q, r := bits.Div64(hi, lo, uint64(l.Limit))
	if r > 0 {
		q++
	}
	return time.Duration(q)
}

// reservationsError says which bound a reservation, or what extends one, has met.
func reservationsError(err error) *limit.Error {
	switch {
	case errors.Is(err, store.ErrKeyReservations):
		return limit.NewError(limit.Unavailable, "key", "has as many pending reservations and extensions as a key may have (max-key-reservations): commit or cancel some")
	case errors.Is(err, store.ErrShareReservations):
		return limit.NewError(limit.Unavailable, "", "the caller has more than its part of the pending reservations of the node that decides for this key (max-reservations): commit or cancel some")
	}
	return limit.NewError(limit.Unavailable, "", "the node that decides for this key has as many pending reservations as it may have (max-reservations): commit or cancel some")
}

func storeError(err error) *limit.Error {
	switch {
	case errors.Is(err, store.ErrRequestID):
		return limit.NewError(limit.Invalid, "request_id", "was used before with another cost, or for another operation: use a fresh one")
	case errors.Is(err, store.ErrReserved):
		return limit.NewError(limit.Invalid, "cost", "is more than was reserved")
	case errors.Is(err, store.ErrNoGrant):
		return limit.NewError(limit.Unavailable, "", "the node that decides for this key may not do so at the moment: it has no grant, or no copy of what it counts")
	}
	return limit.NewError(limit.Unavailable, "", "the node that decides for this key has no memory left for it")
}

// PolicyName is what a decision on the operation calls its policy.
func (op *Op) PolicyName() string {
	if op.Limit != nil {
		return "inline"
	}
	return op.Policy
}

// targetField is the field that says which limit is meant.
func targetField(op *Op) string {
	if op.Limit != nil {
		return "limit"
	}
	return "policy"
}

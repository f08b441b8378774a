package limiter

import (
	"strconv"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
)

// OpKind is what an operation does.
type OpKind uint8

// The operations.
const (
	OpCheck   OpKind = 1
	OpAcquire OpKind = 2
	OpRenew   OpKind = 3
	OpRelease OpKind = 4
	OpRefund  OpKind = 5
	OpReset   OpKind = 6
	OpReserve OpKind = 7
	OpSettle  OpKind = 8
	OpExtend  OpKind = 9
	// Of the loans of nodes: what a borrower reports and wants, and an owner's asking for what is left.
	OpBorrow OpKind = 10
	OpRecall OpKind = 11
	// Of loans that are Quotas.
	OpQuota OpKind = 12
)

// ReservationID names a reservation; the zero value is none.
type ReservationID = store.ReservationID

// Op is one operation on its way to the node that decides, and its Outcome once it has been there.
type Op struct {
	Kind OpKind
	// Target always; Cost for check, acquire, reserve, extend, refund and settle (what it keeps); Partial for check; Always for check,
	// and for reserve as part of an atomic check; Bounded for check with Always, and for settle, see limit.Commit; RequestID for check,
	// acquire, reserve, extend and refund.
	limit.Check
	LeaseID string        // renew, release
	TTL     time.Duration // acquire, renew, reserve, extend
	Hops    int           // how often it has been forwarded; those of loans are, once at most, whatever this says
	Left    time.Duration // of what a peer sent: how long an answer is waited for; 0: not said
	// Reservation is the id that a reserve charges under, that extend adds to, and that settle ends. It is chosen where the call came in, which
	// can therefore settle one whose answer it never got. Zero, of reserve: nobody is going to settle it.
	Reservation ReservationID
	Atomic      bool     // reserve: part of an atomic check
	Exact       bool     // settle: to keep more than was reserved is an error
	Quota       *QuotaOp // quota
	// Trace continues the trace of the call that the operation belongs to: TraceContext bytes, or empty when it is not traced.
	Trace string
	Loan  *LoanCall // borrow and recall; what comes of them as well

	Outcome Outcome

	// What prepare works out.
	subject
	partition int
	lease     uint64

	asked question // of recall
	// recalled says that what is on loan of its key has been called back: a refusal stands now.
	recalled bool
	owed     bool // it sets right what was charged before, and is carried out whatever else there is to do

	// Of forward: whom to ask next in place of the one this node's own view names, if not nil, and the highest term under
	// which somebody was asked.
	hint     *ownership.Route
	followed ownership.Term
}

// requestID is a check's request id as it is remembered: each caller has ids of its own, so that no caller is answered with what
// another one holds. The first byte is the length of the caller's name.
func requestID(c *limit.Check) string {
	if c.RequestID == "" {
		return ""
	}
	return string([]byte{byte(len(c.Caller))}) + c.Caller + c.RequestID
}

// asks says whether the operation asks for something, so that on_error can answer it.
func (op *Op) asks() bool {
	return op.Kind == OpCheck || op.Kind == OpAcquire || op.Kind == OpReserve || op.Kind == OpExtend
}

// givesBack says whether the operation can make a check pass that was refused before.
func (op *Op) givesBack() bool {
	return op.Kind == OpRefund || op.Kind == OpReset || op.Kind == OpSettle || op.Kind == OpCheck && op.Cost < 0
}

// stands says that an operation was refused here, for good, and waits only for a copy to know of the ban that this began: on_error
// must not admit it.
func (op *Op) stands() bool {
	return op.Outcome.ticket != 0 && op.asks() && !op.Always && op.Outcome.Decision.Banned
}

// pending says that an operation that was decided here cannot be answered yet.
func (out *Outcome) pending() bool {
	return out.ticket != 0 || out.NotHolder != nil || out.ungranted || out.onLoan
}

// Outcome is what came of an operation. One of Err, NotHolder and Unreachable is set when nothing was done.
type Outcome struct {
	Decision  limit.Decision // check, acquire, reserve, extend
	ExpiresIn time.Duration  // renew
	Refunded  int64          // refund, settle
	Excess    int64          // settle: charged beyond what was reserved

	Err       *limit.Error
	NotHolder *ownership.Route // the receiver does not decide for the partition, and who does as far as it knows

	// Lease is, of what was decided under a strict policy, how long it may be used from the moment it was asked for: when
	// the decider's lease runs out another node may decide, and know nothing of this. 0: for ever.
	Lease time.Duration

	until  int64  // the same as an instant of this node's boot clock; 0: for ever
	ticket uint64 // the answer waits for this much progress of the partition; 0: for nothing

	// Side by side: there are thousands of operations in large batches, and alone each of these would take eight bytes.
	Unreachable bool // no answer came; whether it was carried out is not known
	Released    bool // release
	Over        bool // settle: there was no room for all of the excess
	parked      bool // with NotHolder: this node waited, and there is a holder now
	shut        bool // with NotHolder: it was this node that turned out not to be the holder
	// ungranted: nothing was done, because this node is the holder and may not decide under a strict rule at the moment.
	ungranted bool
	onLoan    bool // nothing was done: units on loan that it needs, or needs to know of, may come back
}

// subject is what is worked out of a Target before anything is decided.
type subject struct {
	hash   uint64
	inline *inlineRule // of a limit sent along
	entry  *entry      // of a policy, as the table that it was looked up in has it; nil where that does not know it
}

// prepare checks everything about an operation that can be checked without knowing its policy, and hashes its key. An
// operation from a peer goes through the same: nothing that comes over a network is taken on trust.
func (l *Limiter) prepare(op *Op) *limit.Error {
	if err := l.identify(l.table.Load(), &op.Target, &op.subject); err != nil {
		return err
	}
	if err := validCost(&op.Check, op.Kind); err != nil {
		return err
	}
	if op.TTL < 0 || (op.TTL != 0 && op.TTL < algo.MinWindow) {
		return limit.NewError(limit.Invalid, "ttl", "is below the shortest one, 1ms")
	}
	switch op.Kind {
	case OpRenew, OpRelease:
		id, ok := parseID(op.LeaseID)
		if !ok {
			return limit.NewError(limit.Invalid, "lease_id", "is not one that acquire gave: 16 hexadecimal digits, not all of them 0")
		}
		op.lease = id
	case OpReserve, OpExtend:
		if op.TTL > limit.MaxReservation {
			return limit.NewError(limit.Invalid, "ttl", "is longer than the longest for a reservation, 1h")
		}
		if op.TTL == 0 && op.Kind == OpReserve {
			op.TTL = limit.DefaultReservation
		}
	}
	if op.Reservation != op.Reservation.Whole() || op.Reservation == (ReservationID{}) && (op.Kind == OpSettle || op.Kind == OpExtend) {
		return limit.NewError(limit.Invalid, "reservation_id", "is not one that reserve gave")
	}
	if (op.Quota != nil) != (op.Kind == OpQuota) {
		return limit.NewError(limit.Invalid, "quota", "is missing")
	}
	op.partition = l.partition(op.hash)
	return nil
}

// identify checks what names a state, and works out what is known of it.
func (l *Limiter) identify(t *table, target *limit.Target, s *subject) *limit.Error {
	if e := t.by[target.Policy]; e != nil && target.Limit == nil && target.Namespace == "" {
		s.entry, s.hash = e, e.hash.Hash(target.Key)
		return limit.ValidKey(target.Key)
	}
	if err := target.Valid(); err != nil {
		return err
	}
	if target.Limit == nil {
		s.hash = ring.Hash(l.cfg.HashKey, target.Policy, target.Key)
		return nil
	}
	if target.Configured != limit.Reserved(target.Namespace) {
		return limit.NewError(limit.Invalid, "namespace", "is reserved for limits of the nodes' configuration: use one that does not begin with "+limit.EnvoyNamespace)
	}
	if l.cfg.NoInline && !target.Configured {
		return limit.NewError(limit.Invalid, "limit", "limits sent along are turned off on this node (no-inline): name a policy")
	}
	rule, err := l.inline.rule(target.Namespace, target.Limit)
	if err != nil {
		return err
	}
	s.inline, s.hash = rule, rule.hash.Hash(target.Key)
	return nil
}

// validCost checks the cost and the request id of a check, or of another operation that has them.
func validCost(c *limit.Check, kind OpKind) *limit.Error {
	switch {
	case c.Always && kind == OpReserve && c.Cost < 0:
		return limit.NewError(limit.Invalid, "always", "does not go with a negative cost in an atomic check: send a refund")
	case c.Always && kind != OpCheck && kind != OpReserve:
		return limit.NewError(limit.Invalid, "partial", "cannot be set where all is charged always")
	case c.Cost < 0 && kind == OpRefund:
		return limit.NewError(limit.Invalid, "cost", "is negative: a refund says how many units to give back")
	case c.Cost < 0 && kind == OpSettle:
		return limit.NewError(limit.Invalid, "cost", "is negative: it must be at least 0")
	case c.Cost == 0 && (kind == OpAcquire || kind == OpReserve || kind == OpRefund):
		return limit.NewError(limit.Invalid, "cost", "is 0: it must be at least 1 here")
	}
	return c.ValidCost()
}

// state names what an operation is about: the scope, which is a policy's name or of a limit sent along, and the key. Hashes
// may be equal where these are not.
type state struct{ scope, key string }

func (op *Op) state() state { return state{op.scope(op.Policy), op.Key} }

// scope is the scope of the subject of a target with the given policy.
func (s *subject) scope(policy string) string {
	if s.inline != nil {
		return s.inline.Scope // which no policy's name is
	}
	return policy
}

// formatID writes the id of a lease.
func formatID(id uint64) string {
	s := strconv.FormatUint(id, 16)
	return "0000000000000000"[len(s):] + s
}

func parseID(s string) (uint64, bool) {
	if len(s) != 16 {
		return 0, false
	}
	id, err := strconv.ParseUint(s, 16, 64)
	return id, err == nil && id != 0
}

package limiter

import (
	"strconv"
	"strings"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// This file has the operation: what a Limiter carries out, here or on another node, and what came of it.
//
// An operation of an ordinary check takes two cache lines (128 bytes), so that batches of a thousand need no other
// form. It points to the check and to the place of the decision, which belong to its caller. What only other kinds need
// is in an Extra.

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
	OpBorrow  OpKind = 10 // a borrower reports what it has spent of a loan, and asks for units
	OpRecall  OpKind = 11 // an owner asks a borrower for what it has left of a loan
	OpQuota   OpKind = 12 // like OpBorrow, of a loan that is a Quota
)

// ReservationID names a reservation; the zero value is none.
type ReservationID = store.ReservationID

// Op is one operation on its way to the node that decides, and its Outcome once it has been there.
type Op struct {
	// Check has the Target, always; Cost for check, acquire, reserve, extend, refund and settle (what it keeps);
	// Partial for check; Always for check, and for reserve as part of an atomic check; Bounded for check with Always,
	// and for settle, see limit.Commit; RequestID for check, acquire, reserve, extend and refund.
	*limit.Check
	// Decision is where the answer to check, acquire, reserve and extend is written. Nil: the Limiter allocates one.
	Decision *limit.Decision
	// Extra may be nil for a check. Nil for another kind: the Limiter allocates one.
	*Extra
	subject
	away      *away         // only while another node is asked
	Left      time.Duration // of an operation from a peer: how long its sender waits for the answer; 0: not said
	partition int32
	Kind      OpKind
	Hops      uint8 // how often it has been forwarded: 0 on the node that a caller has asked
	recalled  bool  // what is on loan of its key has been called back: a refusal is final now
	owed      bool  // it tells of units that are charged already, and is carried out however many operations wait

	Outcome Outcome
	// Trace continues the trace of the call that the operation belongs to: TraceContext bytes, or empty when it is not
	// traced.
	Trace string
}

// Extra is what operations other than checks say and hear.
type Extra struct {
	LeaseID string        // renew, release
	TTL     time.Duration // acquire, renew, reserve, extend
	// Reservation is the id that a reserve charges under, that extend adds to, and that settle ends. The node that was
	// asked chooses it, so that it can settle a reservation whose answer it never got. Zero, of reserve: the charge is
	// never settled.
	Reservation ReservationID
	Atomic      bool     // reserve: part of an atomic check
	Exact       bool     // settle: to keep more than was reserved is an error
	Quota       *QuotaOp // quota
	Loan        *LoanCall
	Reply       Reply

	lease uint64 // LeaseID as a number
}

// Reply is what came of an operation of a kind that has no decision.
type Reply struct {
	ExpiresIn time.Duration // renew
	Refunded  int64         // refund, settle
	Excess    int64         // settle: charged beyond what was reserved
	Over      bool          // settle: there was no room for all of the excess
	Released  bool          // release
}

// Outcome says whether an operation was carried out. Nothing was done where Err, NotHolder or Unreachable is set.
type Outcome struct {
	Err *limit.Error
	// The receiver does not decide for the partition; the route names the node that does, as far as it knows.
	NotHolder *ownership.Route

	// Lease is, of what was decided under a strict policy, how long it may be used from the moment it was asked for:
	// when the decider's lease runs out another node may decide, and know nothing of this. 0: without end.
	Lease time.Duration

	until  int64  // the end of Lease as an instant of this node's boot clock; 0: without end
	ticket uint64 // the answer waits for this much progress of the partition; 0: it need not wait

	Unreachable bool // no answer came; whether it was carried out is not known
	parked      bool // with NotHolder: this node waited, and there is a holder now
	shut        bool // with NotHolder: this node turned out not to be the holder
	// Nothing was done: this node holds the partition, and has no grant for a strict rule at the moment.
	ungranted bool
	onLoan    bool // nothing was done: units on loan have to be called back first
}

// NewOp returns an operation with a check, a decision and an Extra of its own, in one allocation.
func NewOp(kind OpKind, c limit.Check, x Extra) *Op {
	room := &struct {
		op       Op
		check    limit.Check
		decision limit.Decision
		extra    Extra
	}{check: c, extra: x}
	op := &room.op
	op.Kind, op.Check, op.Decision, op.Extra = kind, &room.check, &room.decision, &room.extra
	return op
}

func invalid(field, message string) *limit.Error {
	return limit.NewError(limit.Invalid, field, message)
}
func unavailable(message string) *limit.Error { return limit.NewError(limit.Unavailable, "", message) }

// err is the operation's error, or nil.
func (op *Op) err() error {
	if op.Outcome.Err != nil {
		return op.Outcome.Err
	}
	return nil
}

// forget makes the operation one that has not been carried out.
func (op *Op) forget() {
	op.Outcome, *op.Decision = Outcome{}, limit.Decision{}
	if op.Extra != nil {
		op.Reply = Reply{}
	}
}

// requestID is a check's request id as it is remembered: each caller has ids of its own, so that no caller is answered
// with what another one holds. The first byte is the length of the caller's name.
func requestID(c *limit.Check) string {
	if c.RequestID == "" {
		return ""
	}
	return string([]byte{byte(len(c.Caller))}) + c.Caller + c.RequestID
}

// asks says whether the operation asks for units, so that on_error can answer it.
func (op *Op) asks() bool {
	return op.Kind == OpCheck || op.Kind == OpAcquire || op.Kind == OpReserve || op.Kind == OpExtend
}

// givesBack says whether the operation can make a check pass that was refused before.
func (op *Op) givesBack() bool {
	return op.Kind == OpRefund || op.Kind == OpReset || op.Kind == OpSettle || op.Kind == OpCheck && op.Cost < 0
}

// stands says that this node has refused an operation by a ban that it began, and waits only for a copy to know of the
// ban: on_error must not admit it.
func (op *Op) stands() bool {
	return op.Outcome.ticket != 0 && op.asks() && !op.Always && op.Decision.Banned
}

// pending says that an operation that was decided here cannot be answered yet.
func (out *Outcome) pending() bool {
	return out.ticket != 0 || out.NotHolder != nil || out.ungranted || out.onLoan
}

// state names what an operation is about: the scope, which is a policy's name or of a limit sent along, and the key.
// Hashes may be equal where these are not.
type state struct{ scope, key string }

func (op *Op) state() state { return state{op.scope(), op.Key} }

// own returns a copy whose texts are not parts of a larger message.
func (s state) own() state { return state{strings.Clone(s.scope), strings.Clone(s.key)} }

func (op *Op) scope() string {
	if op.rule.missing {
		return op.Policy
	}
	return op.rule.Scope
}

// storeKey is the operation's key as the store takes it.
func (op *Op) storeKey() store.Key {
	return store.Key{Hash: op.hash, Partition: int(op.partition), Key: op.Key}
}

// PolicyName is what a decision on the operation calls its policy.
func (op *Op) PolicyName() string {
	if op.Limit != nil {
		return "inline"
	}
	return op.Policy
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

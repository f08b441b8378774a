package limiter

import (
	"strconv"
	"strings"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// This file has Op, an operation that a Limiter carries out, here or on another node, and its Outcome.
//
// An operation of an ordinary check takes two cache lines (128 bytes), so that batches of a thousand need no other
// form. It points to the caller's check, and to the caller's place for the decision. The fields that only other kinds
// need are in an Extra.

// OpKind is what an operation does.
type OpKind uint8

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
	OpRecall  OpKind = 11 // the holder asks a borrower to return what it has left of a loan
	OpQuota   OpKind = 12 // like OpBorrow, of a loan that is a Quota
)

// ReservationID names a reservation; the zero value is none.
type ReservationID = store.ReservationID

// Op is one operation, and its Outcome when it has been carried out.
type Op struct {
	// Check has the Target for every kind but OpRecall. The other fields are for these kinds: Cost for check, acquire,
	// reserve, extend, refund and settle (units to keep); Partial for check; Always for check, and for reserve as part
	// of an atomic check; Bounded for check with Always, and for settle, see limit.Commit; RequestID for check,
	// acquire, reserve, extend and refund.
	*limit.Check
	// Decision gets the answer to check, acquire, reserve and extend. If it is nil, the Limiter allocates one.
	Decision *limit.Decision
	// Extra may be nil for a check. If it is nil for another kind, the Limiter allocates one.
	*Extra
	subject
	away      *away         // only while another node is asked
	Left      time.Duration // of an operation from a peer: how long its sender waits for the answer; 0: unknown
	partition int32
	Kind      OpKind
	Hops      uint8 // how often it has been forwarded: 0 on the node that the caller has asked
	recalled  bool  // the loans of its key have been recalled: a refusal is final now
	owed      bool  // it is about units that were charged or spent before: takeIn never turns it away

	Outcome Outcome
	// Trace is the context of the call's trace, which a receiver continues: TraceContext bytes, or empty if the call is
	// not traced.
	Trace string
}

// Extra has the fields of operations other than checks. The kinds that use a field are named beside it.
type Extra struct {
	LeaseID string        // renew, release
	TTL     time.Duration // acquire, renew, reserve, extend
	// Reservation is the id under which reserve charges, to which extend adds, and which settle ends. The node that the
	// caller has asked chooses it, so that it can settle a reservation whose answer did not come. If it is zero for
	// reserve, the charge is not a reservation and cannot be settled.
	Reservation ReservationID
	Atomic      bool      // reserve: part of an atomic check
	Release     bool      // reserve: gives its units back when its TTL passes
	Exact       bool      // settle: to keep more than was reserved is an error
	Loan        *LoanCall // borrow, recall, quota
	Reply       Reply

	lease uint64 // LeaseID as a number
}

// Reply is the answer to an operation of a kind that has no Decision.
type Reply struct {
	ExpiresIn time.Duration // renew
	Refunded  int64         // refund, settle
	Excess    int64         // settle: charged beyond what was reserved
	Over      bool          // settle: the excess exceeds the units that were left
	Released  bool          // release
}

// Outcome says whether an operation was carried out. If NotHolder, ungranted or onLoan is set, or an Err of another
// kind than Unavailable, nothing was charged. If Unreachable is set, the operation may have been charged. route.go has
// a table of who sets each field, and of what follows.
type Outcome struct {
	Err *limit.Error
	// NotHolder is set if the receiver does not hold the partition. It is the receiver's route, which may name the
	// holder.
	NotHolder *ownership.Route

	// Lease is set for a decision under a strict rule: how long the decision may be used, counted from when it was
	// asked for. When the lease ends another node may decide, without knowing what this decision has charged. 0:
	// without end.
	Lease time.Duration

	until  int64  // the end of Lease as an instant of this node's boot clock; 0: without end
	ticket uint64 // the version that must be confirmed before the answer is given; 0: none

	Unreachable bool // no answer came, or the answer may not be used
	parked      bool // with NotHolder: this node has waited (park), and the partition has a new route
	shut        bool // with NotHolder: this node's store is shut for the partition
	// This node holds the partition, and has no grant for a strict rule now. Nothing was charged.
	ungranted bool
	onLoan    bool // units on loan must be recalled first
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

// err returns the operation's error, or nil.
func (op *Op) err() error {
	if op.Outcome.Err != nil {
		return op.Outcome.Err
	}
	return nil
}

// forget clears everything that carrying out the operation has set.
func (op *Op) forget() {
	op.Outcome, *op.Decision = Outcome{}, limit.Decision{}
	if op.Extra != nil {
		op.Reply = Reply{}
	}
}

// requestID returns a check's request id in the store's form. The caller's name is part of it, so that no caller gets
// the answer to another one's request. The first byte is the length of the name.
func requestID(c *limit.Check) string {
	if c.RequestID == "" {
		return ""
	}
	return string([]byte{byte(len(c.Caller))}) + c.Caller + c.RequestID
}

// asks reports whether the operation asks for units. on_error can answer such an operation.
func (op *Op) asks() bool {
	return op.Kind == OpCheck || op.Kind == OpAcquire || op.Kind == OpReserve || op.Kind == OpExtend
}

// givesBack reports whether the operation may give units back, so that a check passes that was refused before.
func (op *Op) givesBack() bool {
	return op.Kind == OpRefund || op.Kind == OpReset || op.Kind == OpSettle || op.Kind == OpCheck && op.Cost < 0
}

// stands reports whether this node has refused the operation by a new ban, and waits only for the backup or the disk to
// confirm the ban. on_error must not admit such an operation.
func (op *Op) stands() bool {
	return op.Outcome.ticket != 0 && op.asks() && !op.Always && op.Decision.Banned
}

// pending reports whether an operation that this node has decided cannot be answered yet.
func (out *Outcome) pending() bool {
	return out.ticket != 0 || out.NotHolder != nil || out.ungranted || out.onLoan
}

// state identifies the state that an operation is on: its scope, which is a policy's name or a name made from an inline
// limit, and its key. Different states may have the same hash.
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

// storeKey returns the operation's key in the store's form.
func (op *Op) storeKey() store.Key {
	return store.Key{Hash: op.hash, Partition: int(op.partition), Key: op.Key}
}

// PolicyName returns the name of the policy in the operation's Decision.
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

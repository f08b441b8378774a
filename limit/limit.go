package limit

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
)

// Target names the state that a call is about: a policy and a key, or a limit sent along and a key.
type Target struct {
	// Policy is the name of a policy. Empty when Limit is given.
	Policy string
	// Limit is a limit sent inline, in place of a policy. Its state is shared by every call with the same namespace,
	// algorithm, window, shape (slots, period, anchor, time zone) and key, whatever limit and capacity the call gives. MaxLog is
	// ignored.
	Limit *algo.Limit
	// Namespace parts inline limits of different callers; empty stands for "default". Only together with Limit.
	Namespace string
	// Key is what is limited: 1 to MaxKey bytes of UTF-8.
	Key string
	// Configured says that Limit is the operator's, from this node's configuration, and not the caller's: the bounds on inline limits
	// are not for it. Set by a front end, together with a namespace that Reserved reports, and never from what a caller sent.
	Configured bool
	// Caller is the authenticated caller's name, to whose share of a node's memory a new key is counted. Authentication sets it;
	// empty: not known.
	Caller string
}

// Check asks whether units of a key may be admitted.
type Check struct {
	Target
	// Cost is the number of units; 0 peeks. Front ends that let callers leave the cost out put 1 here. Negative only with Always.
	Cost int64
	// Partial grants min(Cost, what is left).
	Partial bool
	// Always charges Cost whether or not there is room for it, as far as the limit's MaxDebt goes, and Allowed tells whether there
	// was: for work that has been done already. A Cost of 0 tells whether more is in use than the limit, and a negative one gives
	// units back, never below zero. Not with Partial, nor for concurrency limits.
	Always bool
	// Spent says, with Always, that the units are spent already, so that the answer refuses nobody: a policy's ban does not apply to
	// it and does not begin with it. Charge sets it; front ends do not.
	Spent bool
	// Bounded, with Always, charges no more than what there is room for. Authorization sets it for callers who may not Charge.
	Bounded bool
	// RequestID makes it safe to repeat the check: a charge under the same id, for the same Caller, is not made twice. Optional, at
	// most MaxRequestID bytes.
	RequestID string
}

// Acquire asks for a lease on a concurrency policy.
type Acquire struct {
	Target
	Cost      int64         // units the lease holds; front ends put 1 when absent
	TTL       time.Duration // at most the policy's window; 0 stands for it
	RequestID string
}

// LimitStatus is one limit of a policy that has several, as part of a Decision.
type LimitStatus struct {
	Limit      int64 // algo.Unlimited when there is none
	Window     time.Duration
	Remaining  int64
	RetryAfter time.Duration // 0 when this limit would let the check pass; algo.Never
	ResetAfter time.Duration
}

// Decision is the answer to a Check, an Acquire or a Reserve. "Over the limit" is a Decision, never an error.
type Decision struct {
	Policy     string // the policy's name; "inline" for a limit sent along
	Allowed    bool
	Granted    int64         // units charged: with Always whatever Allowed says, and negative for what was given back
	Limit      int64         // algo.Unlimited when there is none; 0 for a blocked key
	Window     time.Duration // in which Limit units come back; 0 when there is none (calendar, unlimited)
	Remaining  int64
	RetryAfter time.Duration // 0 when allowed; algo.Never when this request can never pass
	ResetAfter time.Duration // until the state is as new
	Delay      time.Duration // leaky_bucket: wait this long before going ahead
	LeaseID    string        // Acquire: what Renew and Release take; empty when nothing is held
	// ReservationID is what Extend, Commit and Cancel take; only of Reserve and Extend, and empty when nothing is held (refused, unlimited,
	// failed open, shadow).
	ReservationID string
	RequestID     string // as the caller gave it

	// RememberFor is above 0 when the same check, with the same or a larger cost, would be refused for so long, from the
	// moment this one was sent: the caller may remember the refusal until then. See Refusals.
	RememberFor time.Duration

	Shadow       bool // the policy would have refused, but is in shadow mode
	Degraded     bool // decided with less protection than the policy asks for
	FailedOpen   bool // the owner could not be asked; admitted by on_error, or because of shadow mode
	FailedClosed bool // the owner could not be asked; refused by on_error
	// Banned: the policy's ban has refused the key: a check that it would have refused began it. RetryAfter is its end, or later.
	Banned bool
	// RetryAfterEstimated: units of the key are on loan to a borrower that did not return them in time, or that cannot be asked to. RetryAfter is
	// then no longer than until its loan has ended: the check may pass before, when they are returned, or not even then, as what of
	// them is not returned is charged.
	RetryAfterEstimated bool
	// NearLimit: with this decision, at least the policy's warn_at of a limit of its is in use. What is on loan counts as in use.
	NearLimit bool

	// Limits lists every limit of a policy that has several; empty otherwise.
	Limits []LimitStatus
}

// AllDecision is the answer to an atomic check, or to a ReserveAll.
type AllDecision struct {
	// Allowed is set when every check was allowed: all are charged then. Otherwise none is.
	Allowed bool
	Delay   time.Duration // the largest of the Decisions'; 0 when refused
	// ReservationID is, of ReserveAll, what Extend, Commit and Cancel take for each of the targets whose Decision has it, too; empty
	// when nothing is held.
	ReservationID string
	// Decisions has one for each check, in order. When the whole is refused each tells whether that check was refused or
	// would have passed by itself; Granted is 0 in all of them.
	Decisions []Decision
}

// Tightest returns the Decision to show where there is room for one: of an AllDecision that refuses, the one with the longest RetryAfter
// of those that refuse; otherwise the one with the least Remaining. Allowed and Delay are those of the whole.
func (a *AllDecision) Tightest() Decision {
	var out *Decision
	open := false
	for i := range a.Decisions {
		d := &a.Decisions[i]
		open = open || d.FailedOpen
		if d.Allowed && !a.Allowed {
			continue
		}
		if out == nil || a.Allowed && lessLeft(d, out) || !a.Allowed && longer(d.RetryAfter, out.RetryAfter) {
			out = d
		}
	}
	t := Decision{}
	if out != nil {
		t = *out
	}
	t.Allowed, t.Delay, t.FailedOpen = a.Allowed, a.Delay, a.Allowed && open
	return t
}

func lessLeft(a, b *Decision) bool {
	return a.Limit != algo.Unlimited && (b.Limit == algo.Unlimited || a.Remaining < b.Remaining)
}

func longer(a, b time.Duration) bool { return b != algo.Never && (a == algo.Never || a > b) }

// Result is the answer to one Check of a batch: a Decision, or an Error that concerns this check alone.
type Result struct {
	Decision
	Err error // nil or *Error
}

// Service is what every front end calls. All methods are safe for concurrent use and honour ctx; none of them
// fails because another node cannot be reached where the policy's on_error can answer. When ctx is over before a method has
// begun, or leaves no time, it returns context.Canceled or context.DeadlineExceeded, and has done nothing.
type Service interface {
	// Check decides a batch in order of its elements and returns one Result for each. An error means that the batch
	// as a whole is not acceptable and nothing in it was charged; it is an *Error whose Field names the element, as in
	// "checks[3].key". Nothing is kept of the slice.
	Check(ctx context.Context, checks []Check) ([]Result, error)
	// CheckAll decides checks together, on whatever nodes: all are charged, or none is admitted. Repeats of a target are
	// summed into one. Partial, RequestID, a Cost of 0 and limits that are of concurrency or count what they deny are
	// errors. Two such calls may both be refused for the last unit. An error, which names the element like those of Check,
	// means that nothing was admitted. When this node or its caller is lost on the way there may be a charge without an
	// admission, never the reverse.
	//
	// Always is for all of the checks or for none: all are charged then whether or not there is room, unless an owner cannot be asked,
	// which is an *Error of kind Unavailable; what others have charged is given back then, but for units of a policy with several
	// limits that had no room for them all. A negative Cost is an error.
	CheckAll(ctx context.Context, checks []Check) (AllDecision, error)
	// Acquire takes a lease. Errors are *Error.
	Acquire(ctx context.Context, a Acquire) (Decision, error)
	// Renew lets a lease live for ttl from now (0: the policy's window) and returns how long that is. A lease that has
	// ended is an *Error of kind NotFound.
	Renew(ctx context.Context, t Target, leaseID string, ttl time.Duration) (time.Duration, error)
	// Release ends a lease and reports whether it was alive. Releasing again is not an error.
	Release(ctx context.Context, t Target, leaseID string) (bool, error)
	// Reserve charges units until Commit or Cancel says what to keep of them. A reservation that hears nothing within
	// its TTL stays charged. Not for concurrency policies. Errors are *Error.
	Reserve(ctx context.Context, r Reserve) (Decision, error)
	// ReserveAll makes one reservation of several targets, on whatever nodes: all are charged, or none is. Repeats of a target are
	// summed into one. Two such calls may both be refused for the last unit. A RequestID is an error. What is held is extended,
	// committed and cancelled for each target by itself, all under the ReservationID of the answer. An error, which names the
	// element like those of Check ("reserves[3].key"), means that nothing was admitted; what may have been charged all the same,
	// because a node was lost on the way, is cancelled, or stays charged.
	ReserveAll(ctx context.Context, rs []Reserve) (AllDecision, error)
	// Extend adds units to a pending reservation where there is room for them, prolongs it, or both; refused, it does neither. A
	// reservation that is not pending is an *Error of kind NotFound.
	Extend(ctx context.Context, e Extend) (Decision, error)
	// ExtendEach is Extend for 1 to MaxBatch reservations, on whatever nodes. Each has a result of its own, in its place: what is wrong with
	// one has no effect on the others. An error of the whole, which names the element where one is to blame, means that nothing was done.
	ExtendEach(ctx context.Context, es []Extend) ([]Result, error)
	// Commit ends a reservation: of what it charged, the cost stays, the rest is given back, and what the cost exceeds it by is
	// charged as by Charge, unless the Commit is Exact, or Bounded and it is too much. Repeated with the same cost it returns
	// the same again, for as long as a request id is remembered. Otherwise a reservation that is not pending (ended with another
	// cost, its TTL over, unknown) is an *Error of kind NotFound; nothing changes then.
	Commit(ctx context.Context, c Commit) (Settled, error)
	// CommitEach is Commit for 1 to MaxBatch reservations, as ExtendEach is Extend.
	CommitEach(ctx context.Context, cs []Commit) ([]SettledResult, error)
	// Cancel ends a reservation and gives back what it charged: a Commit with cost 0.
	Cancel(ctx context.Context, t Target, reservationID string) (int64, error)
	// Charge adds a cost that has already happened. It never refuses: Allowed says whether there was room, and Granted is the cost,
	// or less where the limit's MaxDebt does not let it go so far beyond. Repeated under the same RequestID it charges nothing and
	// answers alike. Where the key is unlimited or blocked nothing is counted. An owner that cannot be asked is an *Error of kind
	// Unavailable: the charge may have been made, and is safely repeated under its RequestID. Not for concurrency policies.
	Charge(ctx context.Context, c Charge) (Decision, error)
	// Refund gives units back, the oldest first, never below zero, and returns how many were. Repeated under the same
	// requestID, if that is not empty, it gives nothing back and returns the same again.
	Refund(ctx context.Context, t Target, units int64, requestID string) (int64, error)
	// Reset makes a key's state as new.
	Reset(ctx context.Context, t Target) error
}

// Denials are checks of a batch, by place, that are not looked at but answered by an error: those that their caller may not
// ask. Nil: none.
type Denials map[int]*Error

// Kind classes an Error for the front ends, which turn it into their own codes.
type Kind uint8

// The kinds of Error.
const (
	Invalid     Kind = 1 // the request is malformed or contradicts itself (HTTP 400, INVALID_ARGUMENT)
	NotFound    Kind = 2 // unknown policy, lease or reservation (404, NOT_FOUND)
	TooLarge    Kind = 3 // key, batch or body too large (413, RESOURCE_EXHAUSTED)
	Unavailable Kind = 4 // the owner could not be reached, and there is no on_error for such a call (503, UNAVAILABLE)
	Denied      Kind = 5 // the caller may not do this, or not with this policy (403, PERMISSION_DENIED)
	// Unauthenticated: the nodes do not accept the token or certificate, or want one (401, UNAUTHENTICATED). Only a Service that asks other
	// nodes as a client has it.
	Unauthenticated Kind = 6
)

var kindNames = [...]string{"error", "invalid request", "not found", "too large", "unavailable", "denied", "not authenticated"}

// Error names the kind, so that errors.Is finds it in an Error.
func (k Kind) Error() string { return kindNames[k%Kind(len(kindNames))] }

// Error is what a Service's methods return: a problem with one named field of the request.
type Error struct {
	Kind    Kind
	Field   string // as the front ends spell it, such as "key" or "checks[3].limit.window"; empty when none is to blame
	Message string // what is wrong and what would be right

	list  string // see Element
	i     int
	field string // within the element
}

// NewError returns an Error about one field; field is empty when none is to blame.
func NewError(kind Kind, field, message string) *Error {
	return &Error{Kind: kind, Field: field, Message: message}
}

func (e *Error) Error() string {
	if e.Field == "" {
		return e.Message
	}
	return fmt.Sprintf("%s: %s", e.Field, e.Message)
}

// Unwrap returns the kind.
func (e *Error) Unwrap() error { return e.Kind }

// In returns the error as one of element i of a batch of n checks; a batch of one is not spoken of as a batch.
func (e *Error) In(i, n int) *Error {
	if n == 1 {
		return e
	}
	return e.InList("checks", i)
}

// InList returns the error, which is about no list, as one of element i of a list. An empty list leaves it as it is.
func (e *Error) InList(list string, i int) *Error {
	if list == "" {
		return e
	}
	return &Error{Kind: e.Kind, Field: list + "[" + strconv.Itoa(i) + "]." + e.Field, Message: e.Message, list: list, i: i, field: e.Field}
}

// Element returns the list and the place in it that the error is about, as In and InList have set them, and the field within that element. The
// list is empty, and i is 0, where the request is no list.
func (e *Error) Element() (list string, i int, field string) {
	if e.list == "" {
		return "", 0, e.Field
	}
	return e.list, e.i, e.field
}

// GubernatorNamespace begins the names of the namespaces of limits that Gubernator's callers send; see InlineScope.
const GubernatorNamespace = "gubernator/"

// EnvoyNamespace begins the names of the namespaces of limits that Envoy's configuration files describe.
const EnvoyNamespace = "envoy/"

// Reserved reports whether a namespace is for limits of the operator's configuration: callers may not send limits in it.
func Reserved(namespace string) bool { return strings.HasPrefix(namespace, EnvoyNamespace) }

// Bounds on what a request may carry.
const (
	MaxKey       = 1024 // bytes
	MaxBatch     = 1000 // checks
	MaxRequestID = 128  // bytes
	MaxNamespace = 256  // bytes
)

// ValidBatch says what is wrong with a batch of n checks, for a front end that need not even read one of the wrong size.
func ValidBatch(n int) *Error {
	switch {
	case n == 0:
		return NewError(Invalid, "checks", "is empty: send at least one check")
	case n > MaxBatch:
		return NewError(TooLarge, "checks", "has "+strconv.Itoa(n)+" elements, at most "+strconv.Itoa(MaxBatch)+" are taken at once")
	}
	return nil
}

package limit

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
)

// Target names a state: a policy and a key, or an inline limit and a key.
type Target struct {
	// Policy is the name of a policy. Empty when Limit is given.
	Policy string
	// Limit is an inline limit, in place of a policy. Calls with the same namespace, algorithm, window, shape (slots,
	// period, anchor, time zone) and key share a state, whatever their Limit and Capacity. MaxLog is ignored.
	Limit *algo.Limit
	// Namespace separates the inline limits of different callers; empty stands for "default". With Limit only.
	Namespace string
	// Key is what is limited: 1 to MaxKey bytes of UTF-8.
	Key string
	// Configured says that Limit is from this node's configuration and not from the caller, so that the bounds on
	// inline limits do not apply to it. A front end sets it, with a namespace that is Reserved, and never from a
	// caller's input.
	Configured bool
	// Caller is the name of the authenticated caller, to whose share of a node's memory a new key is counted; empty:
	// not known. Authentication sets it.
	Caller string
}

// Check asks whether units of a key may be admitted now.
type Check struct {
	Target
	// Cost is the number of units; 0 peeks. Front ends set 1 when a caller leaves it out. Negative with Always only.
	Cost int64
	// Partial grants as many units as there is room for, at most Cost.
	Partial bool
	// Always charges Cost whether or not there is room, as far as the limit's MaxDebt allows: it is for work that has
	// been done already. Allowed says whether there was room. A Cost of 0 says whether more is in use than the limit. A
	// negative Cost gives units back, never below zero. Not with Partial, and not for concurrency limits.
	Always bool
	// Spent says, with Always, that the units are spent already and the answer refuses nothing. Therefore a policy's
	// ban neither applies nor begins. Charge sets it; front ends do not.
	Spent bool
	// Bounded, with Always, charges no more than there is room for. Authorization sets it for callers without the right
	// to Charge.
	Bounded bool
	// RequestID makes a repeated check safe: the units are charged once for the same id and Caller. At most
	// MaxRequestID bytes; empty: none.
	RequestID string
}

// Acquire asks for a lease on a concurrency policy.
type Acquire struct {
	Target
	Cost      int64         // units that the lease holds; front ends set 1 when a caller leaves it out
	TTL       time.Duration // at most the policy's window; 0: the window
	RequestID string
}

// LimitStatus is the state of one limit of a policy that has several, as part of a Decision.
type LimitStatus struct {
	Limit      int64 // algo.Unlimited when there is none
	Window     time.Duration
	Remaining  int64
	RetryAfter time.Duration // 0 when this limit admits the check; algo.Never when it never will
	ResetAfter time.Duration
}

// Decision is the answer to a Check, an Acquire or a Reserve. A refusal is a Decision, never an error.
type Decision struct {
	Policy     string // the policy's name; "inline" for an inline limit
	Allowed    bool
	Granted    int64         // units charged: with Always whether or not Allowed is set; negative for units given back
	Limit      int64         // algo.Unlimited when there is none; 0 for a blocked key
	Window     time.Duration // the time in which Limit units come back; 0 when there is none (calendar, unlimited)
	Remaining  int64
	RetryAfter time.Duration // 0 when allowed; algo.Never when this request is never admitted
	ResetAfter time.Duration // until nothing is in use
	Delay      time.Duration // leaky_bucket: the caller must wait this long before it proceeds
	LeaseID    string        // of Acquire: the id for Renew and Release; empty when no lease is held
	// ReservationID is the id for Extend, Commit and Cancel. Of Reserve and Extend only; empty when nothing is reserved
	// (refused, unlimited, failed open, shadow).
	ReservationID string
	RequestID     string // the caller's

	// RememberFor, when above 0, is how long the same check with the same or a larger cost would be refused, from the
	// instant at which this check was sent. The caller may answer such checks by this refusal until then: see
	// Remembered.
	RememberFor time.Duration

	Shadow       bool // the policy refuses, but is in shadow mode
	Degraded     bool // decided with less protection than the policy demands
	FailedOpen   bool // the owner could not be asked, and on_error or shadow mode admits
	FailedClosed bool // the owner could not be asked, and on_error refuses
	// Banned: the policy's ban refuses the key, or this check's refusal has begun it. RetryAfter is the end of the ban,
	// or later.
	Banned bool
	// RetryAfterEstimated: a borrower has units of the key on loan that it did not return in time, or that it cannot be
	// asked for. RetryAfter is then at most the time until its loan ends. The check may be admitted before, when the
	// units are returned, or refused even after, when they are not, because they are charged then.
	RetryAfterEstimated bool
	// NearLimit: with this decision, at least the policy's warn_at of one of its limits is in use. Units on loan count
	// as in use.
	NearLimit bool

	// Limits has the state of each limit of a policy that has several; empty otherwise.
	Limits []LimitStatus
}

// AllDecision is the answer to an atomic check, or to a ReserveAll.
type AllDecision struct {
	// Allowed says that every check was admitted, and all are charged. Otherwise none is.
	Allowed bool
	Delay   time.Duration // the longest Delay of Decisions; 0 when refused
	// ReservationID, of ReserveAll, is the id for Extend, Commit and Cancel of each target whose Decision has it; empty
	// when nothing is reserved.
	ReservationID string
	// Decisions has the decision on each check, in order. When the whole is refused, each says whether that check by
	// itself was refused, and Granted is 0 in all.
	Decisions []Decision
}

// Tightest returns the Decision to show where there is room for one: among the refusals of a refused AllDecision the
// one with the longest RetryAfter, otherwise the one with the least Remaining. Its Allowed, Delay and FailedOpen are
// those of the whole.
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

// Result is the answer to one Check of a batch: a Decision, or an error about this check only.
type Result struct {
	Decision
	Err error // nil or *Error
}

// Service is what every front end calls. Its methods are safe for concurrent use and honour ctx. Where the policy's
// on_error can answer, they do not fail because another node cannot be reached. When ctx ends before a method has
// begun, or leaves it no time, the method returns context.Canceled or context.DeadlineExceeded and has done nothing.
type Service interface {
	// Check decides a batch in order, and returns a Result for each element. An error means that the batch as a whole
	// is invalid and nothing was charged; it is an *Error whose Field names the element, such as "checks[3].key". Check
	// keeps no reference to the slice.
	Check(ctx context.Context, checks []Check) ([]Result, error)
	// CheckAll decides checks of keys on any nodes together: all are charged, or none is admitted. Checks of the same
	// target are added up. Partial, RequestID, a Cost of 0, concurrency limits and limits with CountDenied are errors.
	// Two concurrent calls may both be refused for the last unit. An error, which names the element as Check's does,
	// means that nothing was admitted. When this node or its caller is lost during the call, units may be charged
	// without an admission, never the reverse.
	//
	// Always must be set in all checks or in none. With it all are charged whether or not there is room. If an owner
	// cannot be asked, the error is an *Error of kind Unavailable, and the other charges are given back, except units
	// of a policy with several limits not all of which had room. A negative Cost is an error.
	CheckAll(ctx context.Context, checks []Check) (AllDecision, error)
	// Acquire takes a lease. Errors are *Error.
	Acquire(ctx context.Context, a Acquire) (Decision, error)
	// Renew extends a lease to ttl from now (0: the policy's window), and returns that time. A lease that has ended is
	// an *Error of kind NotFound.
	Renew(ctx context.Context, t Target, leaseID string, ttl time.Duration) (time.Duration, error)
	// Release ends a lease and says whether it was held. Releasing it again is not an error.
	Release(ctx context.Context, t Target, leaseID string) (bool, error)
	// Reserve charges units until Commit or Cancel ends the reservation. When its TTL passes first they stay charged,
	// or are given back (on_expiry). Not for concurrency policies. Errors are *Error.
	Reserve(ctx context.Context, r Reserve) (Decision, error)
	// ReserveAll makes one reservation of several targets on any nodes: all are charged, or none is. Reserves of the
	// same target are added up. Two concurrent calls may both be refused for the last unit. A RequestID is an error.
	// Extend, Commit and Cancel apply to one target each, under the answer's ReservationID. An error, which names the
	// element as Check's does ("reserves[3].key"), means that nothing was admitted. Units that were charged all the
	// same, because a node was lost, are cancelled or stay charged.
	ReserveAll(ctx context.Context, rs []Reserve) (AllDecision, error)
	// Extend adds units to a pending reservation, prolongs it, or both. When there is no room for the units it does
	// neither. A reservation that is not pending is an *Error of kind NotFound.
	Extend(ctx context.Context, e Extend) (Decision, error)
	// ExtendEach is Extend for 1 to MaxBatch reservations on any nodes. Each has a result of its own, without effect on
	// the others. An error of the whole, which names the element if one is the cause, means that nothing was done.
	ExtendEach(ctx context.Context, es []Extend) ([]Result, error)
	// Commit ends a reservation. Of the reserved units the cost stays charged and the rest is given back. Units beyond
	// the reservation are charged as by Charge, unless the Commit is Exact or exceeds what Bounded allows. Repeated
	// with the same cost it returns the same answer, for as long as a request id is remembered. For any other
	// reservation that is not pending (ended with another cost, expired, unknown) it returns an *Error of kind NotFound
	// and changes nothing.
	Commit(ctx context.Context, c Commit) (Settled, error)
	// CommitEach is Commit for 1 to MaxBatch reservations, as ExtendEach is Extend.
	CommitEach(ctx context.Context, cs []Commit) ([]SettledResult, error)
	// Cancel ends a reservation and gives back its units: it is a Commit with cost 0. It returns the number of units
	// given back.
	Cancel(ctx context.Context, t Target, reservationID string) (int64, error)
	// Charge adds a cost that has already happened. It never refuses: Allowed says whether there was room, and Granted
	// is the cost, or less where MaxDebt does not allow it. Repeated under the same RequestID it charges nothing and
	// returns the same answer. For an unlimited or blocked key nothing is counted. When the owner cannot be asked the
	// error is an *Error of kind Unavailable: the charge may have been made, and may be repeated under its RequestID.
	// Not for concurrency policies.
	Charge(ctx context.Context, c Charge) (Decision, error)
	// Refund gives units back, the oldest first, never below zero, and returns their number. Repeated under the same
	// requestID, if not empty, it gives nothing back and returns the same number.
	Refund(ctx context.Context, t Target, units int64, requestID string) (int64, error)
	// Reset makes a key's state that of a new key.
	Reset(ctx context.Context, t Target) error
}

// Denials are the errors of checks of a batch that the caller may not make, by index. The Service answers with them,
// and does not decide those checks. Nil: none.
type Denials map[int]*Error

// Kind is the class of an Error. Front ends convert it to their own codes.
type Kind uint8

// The kinds of Error.
const (
	Invalid     Kind = 1 // the request is malformed or contradicts itself (HTTP 400, INVALID_ARGUMENT)
	NotFound    Kind = 2 // unknown policy, lease or reservation (404, NOT_FOUND)
	TooLarge    Kind = 3 // key, batch or body too large (413, RESOURCE_EXHAUSTED)
	Unavailable Kind = 4 // the owner could not be reached, and on_error does not apply to the call (503, UNAVAILABLE)
	Denied      Kind = 5 // the caller lacks the right to this, or to this policy (403, PERMISSION_DENIED)
	// Unauthenticated: the nodes reject the caller's token or certificate, or demand one (401, UNAUTHENTICATED). Only
	// the client of other nodes returns it.
	Unauthenticated Kind = 6
)

var kindNames = [...]string{"error", "invalid request", "not found", "too large", "unavailable", "denied",
	"not authenticated"}

// Error returns the name of the kind. A Kind is an error, so that errors.Is finds it in an Error.
func (k Kind) Error() string { return kindNames[k%Kind(len(kindNames))] }

// Error is an error of a Service's methods, usually about one field of the request.
type Error struct {
	Kind    Kind
	Field   string // as front ends spell it, such as "key" or "checks[3].limit.window"; empty: none
	Message string // what is wrong and what would be right

	list  string // see Element
	i     int
	field string // within the element
}

// NewError returns an Error about a field; empty: about none.
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

// In returns the error as one of element i of a batch of n checks. With n 1 it returns e.
func (e *Error) In(i, n int) *Error {
	if n == 1 {
		return e
	}
	return e.InList("checks", i)
}

// InList returns the error as one of element i of a list. e must have no list. With an empty list it returns e.
func (e *Error) InList(list string, i int) *Error {
	if list == "" {
		return e
	}
	return &Error{Kind: e.Kind, Field: list + "[" + strconv.Itoa(i) + "]." + e.Field, Message: e.Message, list: list,
		i: i, field: e.Field}
}

// Element returns the list and index that In or InList have set, and the field within the element. Without a list it
// returns "", 0 and Field.
func (e *Error) Element() (list string, i int, field string) {
	if e.list == "" {
		return "", 0, e.Field
	}
	return e.list, e.i, e.field
}

// GubernatorNamespace is the prefix of the namespaces of limits from Gubernator's callers; see InlineScope.
const GubernatorNamespace = "gubernator/"

// EnvoyNamespace is the prefix of the namespaces of limits from Envoy's configuration files.
const EnvoyNamespace = "envoy/"

// Reserved says whether a namespace is for limits of the node's configuration. Callers must not send inline limits in
// it.
func Reserved(namespace string) bool { return strings.HasPrefix(namespace, EnvoyNamespace) }

// Bounds of requests.
const (
	MaxKey       = 1024 // bytes
	MaxBatch     = 1000 // checks
	MaxRequestID = 128  // bytes
	MaxNamespace = 256  // bytes
)

// ValidBatch returns what is wrong with a batch of n checks, so that a front end need not read a batch of the wrong
// size.
func ValidBatch(n int) *Error { return validList("checks", n, "send at least one check") }

// validList returns what is wrong with a list of n elements. least is what to do about an empty one.
func validList(list string, n int, least string) *Error {
	switch {
	case n == 0:
		return NewError(Invalid, list, "is empty: "+least)
	case n > MaxBatch:
		return NewError(TooLarge, list,
			"has "+strconv.Itoa(n)+" elements, at most "+strconv.Itoa(MaxBatch)+" are taken at once")
	}
	return nil
}

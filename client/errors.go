package client

import (
	"errors"
	"fmt"

	"github.com/weirlimit/weir/limit"
)

// Kinds of an *Error. errors.Is tells them apart.
const (
	// ErrInvalid: the request is malformed or contradicts itself. Nothing was charged.
	ErrInvalid = limit.Invalid
	// ErrNotFound: the cluster does not know the policy, or the lease or reservation has ended.
	ErrNotFound = limit.NotFound
	// ErrTooLarge: a key, batch or message is above its bound. Nothing was charged.
	ErrTooLarge = limit.TooLarge
	// ErrUnavailable: no node answered, and no fail policy answers the call: Charge, Refund, Reset, Release, Ready and
	// the calls about overrides; Wait, if ctx leaves no time to ask again; Commit and Cancel, if too many reservations
	// are being settled.
	ErrUnavailable = limit.Unavailable
	// ErrUnauthenticated: the nodes do not accept the token or certificate, or require one. No fail policy answers in
	// its place.
	ErrUnauthenticated = limit.Unauthenticated
	// ErrDenied: the caller's roles do not allow the call, or not for this policy. No fail policy answers in its place.
	ErrDenied = limit.Denied
)

// Other errors of Client, Limiter and Lease. A call whose context ends returns the context's error.
var (
	// Wait returns ErrNever for a request that can never pass, such as with a cost above the limit.
	ErrNever = errors.New("client: the request can never pass")
	// Wait returns ErrDeadline, at once, if the request would pass only after ctx's deadline.
	ErrDeadline = errors.New("client: the wait would exceed the context's deadline")
	// ErrClosed is returned by every call of a Client that is closed or being closed.
	ErrClosed = errors.New("client: closed")
)

// Error is a request that failed for a reason of its own. Kind is one of the constants above. Field names the field of
// the request that is wrong, such as "key" or "checks[3].limit.window"; it is empty if no field is wrong.
type Error = limit.Error

// invalid returns the error of a field of a request, or of an option.
func invalid(field, format string, args ...any) *Error {
	return limit.NewError(ErrInvalid, field, fmt.Sprintf(format, args...))
}

// unavailable reports whether err means that no node has answered.
func unavailable(err error) bool { return err != nil && errors.Is(err, ErrUnavailable) }

package client

import (
	"errors"
	"fmt"

	"github.com/weirlimit/weir/limit"
)

// Kinds of an *Error, to be told apart with errors.Is.
const (
	// ErrInvalid is a request that is malformed or contradicts itself. Nothing was charged.
	ErrInvalid = limit.Invalid
	// ErrNotFound is a policy that the cluster does not know, or a lease or reservation that has ended.
	ErrNotFound = limit.NotFound
	// ErrTooLarge is a key, batch or message above its bound. Nothing was charged.
	ErrTooLarge = limit.TooLarge
	// ErrUnavailable means that no node could be asked, where the fail policy has no answer: from Refund, Reset, Release
	// and Ready, and from Wait when ctx leaves no time to ask again.
	ErrUnavailable = limit.Unavailable
	// ErrUnauthenticated means that the nodes do not accept the token or certificate, or want one. No fail policy answers for it.
	ErrUnauthenticated = limit.Unauthenticated
	// ErrDenied means that the caller's roles do not allow the call, or not for this policy. No fail policy answers for it.
	ErrDenied = limit.Denied
)

// Other errors of Client, Limiter and Lease. A call whose context ends returns the context's error.
var (
	// ErrNever is returned by Wait for a request that can never pass, such as a cost above the limit.
	ErrNever = errors.New("client: the request can never pass")
	// ErrDeadline is returned by Wait, at once, when the request would pass only after ctx's deadline.
	ErrDeadline = errors.New("client: the wait would exceed the context's deadline")
	// ErrClosed is returned by every call on a Client that is closed, or is being closed.
	ErrClosed = errors.New("client: closed")
)

// Error is a request that failed for a reason of its own. Its Kind is one of the constants above. Its Field names what is wrong in the
// request, such as "key" or "checks[3].limit.window", and is empty when no field is to blame.
type Error = limit.Error

// invalid is the error of a field of a request, or of an option.
func invalid(field, format string, args ...any) *Error {
	return limit.NewError(ErrInvalid, field, fmt.Sprintf(format, args...))
}

// unavailable says whether an error means that no node has answered.
func unavailable(err error) bool { return err != nil && errors.Is(err, ErrUnavailable) }

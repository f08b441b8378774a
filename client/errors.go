package client

import "errors"

// Errors that the methods of Client, Limiter and Lease return, to be told apart with errors.Is. The first six come as
// an *Error, which names the field to blame. A call whose context ends returns the context's error.
var (
	// ErrInvalid is a request that is malformed or contradicts itself. Nothing was charged.
	ErrInvalid = errors.New("client: invalid request")
	// ErrNotFound is a policy that the cluster does not know, or a lease or reservation that has ended.
	ErrNotFound = errors.New("client: not found")
	// ErrTooLarge is a key, batch or message above its bound. Nothing was charged.
	ErrTooLarge = errors.New("client: too large")
	// ErrUnavailable means that nobody could be asked, where the fail policy has no answer: from Refund, Reset, Release
	// and Ready, and from Wait when ctx leaves no time to ask again.
	ErrUnavailable = errors.New("client: unavailable")
	// ErrUnauthenticated means that the nodes do not accept the token or certificate, or want one. No fail policy answers for it.
	ErrUnauthenticated = errors.New("client: not authenticated")
	// ErrDenied means that the caller's roles do not allow the call, or not for this policy. No fail policy answers for it.
	ErrDenied = errors.New("client: denied")

	// ErrNever is returned by Wait for a request that can never pass, such as a cost above the limit.
	ErrNever = errors.New("client: the request can never pass")
	// ErrDeadline is returned by Wait, at once, when the request would pass only after ctx's deadline.
	ErrDeadline = errors.New("client: the wait would exceed the context's deadline")
	// ErrClosed is returned by every call on a Client that is closed, or is being closed.
	ErrClosed = errors.New("client: closed")
)

// Error is a request that failed for a reason of its own. It wraps one of ErrInvalid, ErrNotFound, ErrTooLarge,
// ErrUnavailable, ErrUnauthenticated and ErrDenied.
type Error struct {
	Kind    error  // the sentinel
	Field   string // of the request, such as "key" or "checks[3].limit.window"; empty when none is to blame
	Message string // what is wrong and what would be right, without the field's name
}

func (e *Error) Error() string {
	if e.Field == "" {
		return "client: " + e.Message
	}
	return "client: " + e.Field + ": " + e.Message
}

// Unwrap returns e.Kind.
func (e *Error) Unwrap() error { return e.Kind }

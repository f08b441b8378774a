// Package recovered turns a panic into an error, so that a goroutine can pass it to the one that answers the request.
//
// It does not repair what the panic left behind: a lock that the function did not release by defer stays locked.
package recovered

import (
	"fmt"
	"runtime/debug"
)

// Error is a panic that was recovered.
type Error struct {
	Value any    // what was passed to panic
	Stack []byte // of the goroutine that panicked
}

func (e *Error) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Call calls f. When f panics it returns an *Error, otherwise what f returns. It does not recover runtime.Goexit.
func Call(f func() error) (err error) {
	defer func() {
		if p := From(recover()); p != nil {
			err = p
		}
	}()
	return f()
}

// From returns the panic whose value recover has returned to a deferred function; nil for nil.
func From(v any) *Error {
	if v == nil {
		return nil
	}
	return &Error{Value: v, Stack: debug.Stack()}
}

// Package panics turns a panic into an error, so that a goroutine can pass it to the goroutine that answers the
// request, or log it.
//
// A lock that the function did not release by defer stays locked.
package panics

import (
	"fmt"
	"runtime/debug"

	"golang.org/x/sync/errgroup"
)

// Error is a panic that was recovered.
type Error struct {
	Value any    // the value that was passed to panic
	Stack []byte // of the goroutine that panicked
}

func (e *Error) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Call calls f. If f panics, Call returns an *Error, otherwise f's error. It does not recover runtime.Goexit.
func Call(f func() error) (err error) {
	defer func() {
		if p := From(recover()); p != nil {
			err = p
		}
	}()
	return f()
}

// Tell calls f. If f panics, Tell calls told with the panic, and returns. If told is nil, the panic is not recovered.
func Tell(told func(*Error), f func()) {
	if told != nil {
		defer func() {
			if p := From(recover()); p != nil {
				told(p)
			}
		}()
	}
	f()
}

// From returns the panic for the value of recover in a deferred function; nil for nil. For a panic that a Group has
// passed on, it returns the original one, with its stack.
func From(v any) *Error {
	if v == nil {
		return nil
	}
	if p, ok := v.(*Error); ok {
		return p
	}
	return &Error{Value: v, Stack: debug.Stack()}
}

// Group runs functions for one request, each in its own goroutine. If some panic, Wait panics with the first such
// *Error, in the goroutine that answers the request: there it ends the request and not the process. The zero value is
// ready for use, and has no limit. One goroutine at a time may call its methods.
type Group struct {
	running errgroup.Group
}

// SetLimit bounds the functions that run at a time; Go waits for room. n below 0: no limit. Call it before Go.
func (g *Group) SetLimit(n int) { g.running.SetLimit(n) }

// Go runs f in a goroutine.
func (g *Group) Go(f func()) {
	g.running.Go(func() error {
		return Call(func() error {
			f()
			return nil
		})
	})
}

// Wait waits until all functions have returned.
func (g *Group) Wait() {
	if p := g.running.Wait(); p != nil {
		panic(p)
	}
}

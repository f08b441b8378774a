// Package panics turns a panic into an error, so that a goroutine can pass it to the one that answers the request, or tell of it.
//
// It does not repair what the panic left behind: a lock that the function did not release by defer stays locked.
package panics

import (
	"fmt"
	"runtime/debug"

	"golang.org/x/sync/errgroup"
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

// Tell calls f. When f panics it calls told with the panic, and returns. With told nil nobody would hear of the panic: it is not recovered.
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

// From returns the panic whose value recover has returned to a deferred function; nil for nil. Of one that a Group has passed on it is the
// first one, with the stack of that.
func From(v any) *Error {
	if v == nil {
		return nil
	}
	if p, ok := v.(*Error); ok {
		return p
	}
	return &Error{Value: v, Stack: debug.Stack()}
}

// Group runs functions, each in a goroutine of its own, for one request. When one panics, Wait panics with the first such *Error in the
// goroutine that answers the request, where it ends that request and not the process. The zero value is ready for use, and has no limit; its
// methods are for one goroutine.
type Group struct {
	running errgroup.Group
}

// SetLimit bounds the functions that run at a time, for which Go waits; n below 0: no limit. It is to be called before Go.
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

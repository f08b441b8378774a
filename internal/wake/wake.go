// Package wake wakes goroutines that wait for something to do.
//
// It does not promise one wake-up for each thing to do: a goroutine that wakes looks at all of them.
package wake

// Signal wakes a goroutine, which receives from it: it holds a token when there may be something to do. It is safe for concurrent use.
type Signal chan struct{}

// New returns a Signal that is not set.
func New() Signal { return make(Signal, 1) }

// Set leaves a token, if there is none.
func (s Signal) Set() {
	select {
	case s <- struct{}{}:
	default:
	}
}

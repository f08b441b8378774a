package fifo

// Signal wakes the goroutine that receives from it. It holds a token when there may be something to do. It is safe for
// concurrent use.
type Signal chan struct{}

// NewSignal returns a Signal that is not set.
func NewSignal() Signal { return make(Signal, 1) }

// Set puts a token into the Signal, if it has none.
func (s Signal) Set() {
	select {
	case s <- struct{}{}:
	default:
	}
}

package fifo

// Signal wakes a goroutine, which receives from it: it holds a token when there may be something to do. It is safe for concurrent use.
type Signal chan struct{}

// NewSignal returns a Signal that is not set.
func NewSignal() Signal { return make(Signal, 1) }

// Set leaves a token, if there is none.
func (s Signal) Set() {
	select {
	case s <- struct{}{}:
	default:
	}
}

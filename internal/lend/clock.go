package lend

import (
	"sync"
	"sync/atomic"
	"time"
)

// stepped is the least lead over the monotonic clock that the wall clock must gain at once for Read to take it for a
// suspension.
const stepped = time.Millisecond

// Clock is a clock that never stands still. It is made of a monotonic clock, which may stand still while the machine is
// suspended (as Go's does on Linux), and the wall clock, which does not: what the wall clock gains on the monotonic one
// counts as time that has passed. So a wall clock that is set forward ends loans early, and one that is set back
// changes nothing. The Clock does not notice a suspension of less than a millisecond, or one during which the wall
// clock is set back as far. It is safe for concurrent use.
type Clock struct {
	ahead, slept atomic.Int64
	mu           sync.Mutex
}

// NewClock returns a Clock whose first reading is mono.
func NewClock(mono, wall int64) *Clock {
	c := new(Clock)
	c.ahead.Store(wall - mono)
	return c
}

// Read returns the Clock's instant for readings of the two clocks; all are in nanoseconds.
func (c *Clock) Read(mono, wall int64) int64 {
	ahead := wall - mono
	if gained := ahead - c.ahead.Load(); gained > int64(stepped) || gained < -int64(stepped) {
		c.mu.Lock()
		defer c.mu.Unlock()
		gained = ahead - c.ahead.Load() // another goroutine may have counted it meanwhile
		if gained > int64(stepped) {
			c.slept.Add(gained)
		}
		if gained > int64(stepped) || gained < -int64(stepped) {
			c.ahead.Store(ahead)
		}
	}
	return mono + c.slept.Load()
}

package lend

import (
	"sync"
	"sync/atomic"
	"time"
)

// stepped is by how much the wall clock must run ahead of the other one at once for that to be taken for a suspension.
const stepped = time.Millisecond

// Clock makes of a monotonic clock, which may stand still while the machine is suspended (as Go's does on Linux), and the wall clock,
// which does not, one that never stands still: what the wall clock gains on the other one counts as time that has passed. Whoever sets
// the wall clock forward thereby ends loans early; one that is set back changes nothing. A suspension of less than a millisecond, or
// during which the wall clock is set back as far, is not noticed. It is safe for concurrent use.
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

// Read makes of readings of the two clocks, in nanoseconds, one of this.
func (c *Clock) Read(mono, wall int64) int64 {
	ahead := wall - mono
	if gained := ahead - c.ahead.Load(); gained > int64(stepped) || gained < -int64(stepped) {
		c.mu.Lock()
		defer c.mu.Unlock()
		gained = ahead - c.ahead.Load() // others may have noticed it meanwhile
		if gained > int64(stepped) {
			c.slept.Add(gained)
		}
		if gained > int64(stepped) || gained < -int64(stepped) {
			c.ahead.Store(ahead)
		}
	}
	return mono + c.slept.Load()
}

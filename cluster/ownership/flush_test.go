package ownership

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
)

// TestIdle: a core is idle once everything is sent and confirmed, and not while it asks or a change is not confirmed.
func TestIdle(t *testing.T) {
	l := newAlone(t)
	idle := func() bool { // within a second
		for range 100 {
			if l.wait(10 * time.Millisecond); l.core.Idle() {
				return true
			}
		}
		return false
	}
	expect.True(t, !idle(), "a core without a view is idle")
	l.see(self, peerX, peerX)
	expect.True(t, !idle(), "a core that asks for a partition is idle")
	l.claims(self, peerX, peerX)
	expect.True(t, !idle(), "a core whose backup has nothing is idle")
	l.wait(time.Second)
	l.acks(peerX)
	expect.True(t, idle(), "a core that has sent everything is not idle")
	l.data.admit(0, 1)
	expect.True(t, !idle(), "a core is idle while a change is not confirmed")
	l.acks(peerX)
	expect.True(t, idle(), "a core is not idle after its change is confirmed")
}

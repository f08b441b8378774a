package ownership

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
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

// TestRest: a core that rests looks at its partitions once a second, and as often as always as soon as anything
// happens.
func TestRest(t *testing.T) {
	l := newAlone(t)
	l.claims(self, peerX, peerX)
	soon := func() bool { return l.core.lookAt <= l.now+lookEvery }
	l.wait(2 * time.Duration(lookEvery))
	expect.True(t, soon(), "a core whose backup does not answer looks at its partitions late")
	l.acks(peerX)
	l.wait(2 * time.Duration(lookEvery))
	must.True(t, !soon(), "a core that rests looks at its partitions soon")

	e := &Entry{Attachment: l.core.parts[0].followers[Backup].attachment}
	l.refuse(peerX, e, Full)
	expect.True(t, soon(), "a core that has lost its backup looks at its partitions late")
	l.wait(time.Duration(fullAgain + lookEvery + 10*int64(time.Millisecond)))
	must.True(t, l.entry(peerX).Begin, "the copy is not begun again")
	l.ack(peerX)
	l.wait(2 * time.Duration(lookEvery))
	must.True(t, !soon(), "a core whose copy is whole again looks at its partitions soon")

	l.admits(1, time.Duration(lookEvery))
	expect.True(t, !soon(), "a core whose change has just been sent looks at its partitions soon")
	l.wait(time.Duration(lookEvery))
	expect.True(t, soon(), "a core whose change is not confirmed looks at its partitions late")
}

package ownership

import (
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestFlushInParts: where very much is pending a flush leaves room for what arrives, and the rest follows before the
// next one begins.
func TestFlushInParts(t *testing.T) {
	const partitions = 8
	l := newAloneWith(t, Config{Partitions: partitions})
	v := View{Settled: true, Members: []Member{{self, true}, {peerX, true}}, Owners: make([]int32, partitions),
		Backups: slices.Repeat([]int32{1}, partitions)}
	l.core.SetView(l.time(), v)
	l.take()
	q := last[*Query](l, peerX)
	infos := make([]Info, partitions)
	for p := range infos {
		infos[p].Partition = p
	}
	l.get(peerX, &QueryReply{ID: q.ID, Infos: infos})
	acks := func() (of []int) { // which chunks end
		for all := l.entries(peerX); len(all) > 0; all = l.entries(peerX) {
			for _, e := range all {
				if !e.More {
					of = append(of, e.Partition)
				}
			}
			l.ack(peerX)
		}
		return of
	}
	for range 20 {
		l.wait(10 * time.Millisecond)
		acks()
	}
	st := l.core.Status(l.time())
	must.True(t, st.Held == partitions && st.Degraded <= 0, "%+v", st)
	for p := range partitions {
		l.data.parts[p].bulky = true // more than flushBytes
		l.data.admit(p, p+1)
	}
	var flushed []int
	l.now = l.core.flushAt
	for range partitions {
		l.core.Tick(l.time())
		l.take()
		got := acks()
		expect.Equal(t, len(got), 1, "partitions are flushed at once")
		flushed = append(flushed, got...)
		l.data.admit(0, 100) // for the next flush
	}
	slices.Sort(flushed)
	expect.True(t, len(slices.Compact(flushed)) == partitions && len(flushed) == partitions,
		"of %d partitions %v were flushed", partitions, flushed)
	l.wait(100 * time.Millisecond)
	got := acks()
	expect.True(t, slices.Equal(got, []int{0}), "the next flush is of %v", got)
}

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

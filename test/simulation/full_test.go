package simulation

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// fullWorld is nodes whose stores hold so many keys each.
func fullWorld(t *testing.T, maxKeys ...int64) (w *world, rule *store.Rule) {
	t.Helper()
	s := calm(1)
	s.hosts, s.partitions, s.maxKeys = len(maxKeys), 60, maxKeys
	limit := algo.Limit{Algorithm: algo.SlidingLog, Limit: 10, Window: 20 * time.Second}
	pol := newPolicy("flood", limit, checker.Async, false, false, 0, s.partitions)
	w = newWorld(s)
	for _, h := range w.hosts {
		w.start(h)
	}
	must.True(t, w.until(30*second, w.quiet), "not settled at the start")
	return w, pol.rule
}

// flood asks about so many new keys where they are decided, some each millisecond, and returns how many found no room.
func (w *world) flood(t *testing.T, rule *store.Rule, name string, keys int) (full int) {
	t.Helper()
	const atOnce = 5
	for i := range keys {
		key := fmt.Sprintf("%s/%d", name, i)
		k := store.Key{Hash: hash(key), Partition: int(hash(key) % uint64(w.partitions)), Key: key}
		p := w.target(k.Partition)
		_, err := p.data.Decide(k, rule, p.clock().Instant, store.Call{Request: algo.Request{Cost: 1}}, nil)
		if errors.Is(err, store.ErrFull) {
			full++
		} else if err != nil {
			t.Fatal(err)
		}
		if i%atOnce == 0 {
			w.run(w.now + millisecond)
		}
		for _, h := range w.hosts {
			if st := h.proc.data.Stats(); st.MaxKeys > 0 && st.Keys > st.MaxKeys {
				t.Fatalf("%s keeps %d keys of %d", h.name, st.Keys, st.MaxKeys)
			}
		}
	}
	return full
}

func (w *world) withoutCopy() (degraded, noRoom int) {
	for _, h := range w.hosts {
		st := h.proc.core.Status(h.clock())
		degraded, noRoom = degraded+st.Degraded, noRoom+st.NoRoom
	}
	return degraded, noRoom
}

// TestFloodLeavesCopies: new keys are refused before they take the room of copies, so that every partition keeps its
// copy: of two nodes, which are equally full.
func TestFloodLeavesCopies(t *testing.T) {
	w, rule := fullWorld(t, 3000, 3000)
	full := w.flood(t, rule, "new", 10_000)
	w.run(w.now + second)
	degraded, _ := w.withoutCopy()
	expect.True(t, degraded <= 0 && full != 0, "%d keys found no room, and %d partitions have no copy", full, degraded)
}

// TestCopiesWithoutRoom: where one node has room for less than the others keep, partitions go on without a copy, and
// say why. No bound is exceeded, copies are not sent again and again, and all have one again once there is room.
func TestCopiesWithoutRoom(t *testing.T) {
	w, rule := fullWorld(t, 6000, 6000, 1500)
	w.flood(t, rule, "new", 10_000)
	w.run(w.now + second)
	degraded, noRoom := w.withoutCopy()
	must.True(t, noRoom != 0 && noRoom == degraded,
		"%d partitions have no copy, %d of them for want of room", degraded, noRoom)
	full := w.hosts[2].proc.data.Stats().Full
	w.run(w.now + 5*second)
	n := w.hosts[2].proc.data.Stats().Full - full
	expect.True(t, n <= 20, "in 5 s %d copies were tried in vain", n)
	began := w.now
	if !w.until(60*second, func() bool { n, _ := w.withoutCopy(); return n == 0 }) {
		degraded, noRoom := w.withoutCopy()
		t.Errorf("60 s after the flood %d partitions have no copy, %d for want of room", degraded, noRoom)
	}
	t.Logf("all have a copy again after %v", time.Duration(w.now-began))
}

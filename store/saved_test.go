package store

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
)

// disked is a store that a disk and a backup follow, and what of both has been sent and not confirmed.
type disked struct {
	*Store
	t       *testing.T
	version [slots]uint64
}

func (d *disked) attach(s ownership.Slot) {
	d.Attach(0, s, false)
	d.drain(s)
	d.Confirm(0, s, d.version[s])
	d.Caught(0, s)
}

func (d *disked) drain(s ownership.Slot) (chunk []byte) {
	chunk, d.version[s], _ = d.Drain(0, s, at(0), 1<<20)
	return chunk
}

// waits confirms to what an answer waits for in turn, and says who that was.
func (d *disked) waits(a Answer) (who string) {
	d.t.Helper()
	for _, s := range []ownership.Slot{ownership.Backup, ownership.Disk} {
		if a.Ticket&ownership.Saved == 0 || d.Safe(0) >= a.Ticket&^ownership.Saved {
			return who
		}
		if d.drain(s); d.Pending(0, s) == 0 {
			d.Confirm(0, s, d.version[s])
		}
		who += map[ownership.Slot]string{ownership.Backup: "backup ", ownership.Disk: "disk "}[s]
	}
	expect.True(d.t, d.Safe(0) >= a.Ticket&^ownership.Saved, "%s have confirmed, and the answer waits", who)
	return who
}

// TestDiskFollows: the disk is told of persistent rules alone, and an answer waits for what its durability says.
func TestDiskFollows(t *testing.T) {
	d := &disked{Store: New(Config{}), t: t}
	plain, none, async, escrow, sync := rule("plain", window(9, time.Minute)), rule("none", window(9, time.Minute)),
		rule("async", window(9, time.Minute)),
		rule("escrow", window(9, time.Minute)), rule("sync", window(9, time.Minute))
	plain.Durability, none.Durability, escrow.Durability, sync.Durability = Sync, None, Escrow, Sync
	for _, r := range []*Rule{none, async, escrow, sync} {
		r.Persist = true
	}
	a := answer(t, d.Store, async, "k", at(0), cost(1))
	expect.True(t, a.Degraded && a.Ticket == 0, "without a disk: %+v", a)
	d.attach(ownership.Disk)
	a = answer(t, d.Store, plain, "k", at(0), cost(1))
	expect.True(t, a.Ticket == 0 && d.Pending(0, ownership.Disk) == 0, "a rule without Persist: %+v, pending %d", a,
		d.Pending(0, ownership.Disk))
	for _, backup := range []bool{false, true} {
		if backup {
			d.attach(ownership.Backup)
		}
		for _, r := range []*Rule{none, async} {
			a = answer(t, d.Store, r, "k", at(0), cost(1))
			expect.True(t, a.Ticket == 0 && !a.Degraded && d.Pending(0, ownership.Disk) == 1, "%s: %+v", r.Scope, a)
			d.drain(ownership.Disk)
			d.Confirm(0, ownership.Disk, d.version[ownership.Disk])
		}
		for _, r := range []*Rule{escrow, sync} {
			a = answer(t, d.Store, r, "k", at(0), cost(1))
			expect.Equal(t, a.Degraded, !backup, "%s", r.Scope)
			want := "backup disk "
			expect.Equal(t, d.waits(a), want, "%s", r.Scope)
		}
	}

	// The disk has lost its copy, and gets a new one: sync waits for all of it, and async says that the disk lacks it.
	d.Attach(0, ownership.Disk, false)
	a = answer(t, d.Store, sync, "k", at(0), cost(1))
	expect.True(t, !a.Degraded && a.Ticket&ownership.Saved != 0 && d.Safe(0) == 0, "%+v", a)
	d.drain(ownership.Disk)
	d.Confirm(0, ownership.Disk, d.version[ownership.Disk])
	expect.True(t, d.Safe(0) == 0 && answer(t, d.Store, async, "k", at(0), cost(1)).Degraded,
		"before the copy is whole")
	d.Caught(0, ownership.Disk)
	expect.True(t, !answer(t, d.Store, async, "k", at(0), cost(1)).Degraded, "degraded")
	d.Detach(0, ownership.Disk)
	expect.True(t, answer(t, d.Store, async, "k", at(0), cost(1)).Degraded, "without a disk")
}

// TestDiskForgets: the disk forgets the keys of a rule that has lost its Persist, and gets those of one that has it.
func TestDiskForgets(t *testing.T) {
	d := &disked{Store: New(Config{}), t: t}
	disk := New(Config{Shut: true})
	with, without := rule("p", window(9, time.Minute)), rule("p", window(9, time.Minute))
	with.Persist = true
	d.attach(ownership.Disk)
	has := func(want ...string) {
		t.Helper()
		if chunk := d.drain(ownership.Disk); len(chunk) > 0 {
			expect.True(t, disk.Apply(0, false, at(0), chunk) == nil, "a bad chunk")
		}
		var keys []string
		for _, line := range contents(disk, at(0)) {
			keys = append(keys, strings.Fields(line)[0])
		}
		slices.Sort(keys)
		expect.Equal(t, strings.Join(keys, " "), strings.Join(want, " "))
	}
	answer(t, d.Store, with, "a", at(0), cost(1))
	answer(t, d.Store, with, "b", at(0), cost(1))
	has("p/a", "p/b")
	answer(t, d.Store, without, "a", at(0), cost(1))
	has("p/b")
	answer(t, d.Store, with, "a", at(0), cost(1))
	answer(t, d.Store, without, "b", at(0), cost(1))
	has("p/a")
}

// TestRestoreMuch: of a restored partition the keys that were over long ago are dropped.
func TestRestoreMuch(t *testing.T) {
	d := &disked{Store: New(Config{}), t: t}
	short, long := rule("short", window(9, time.Second)), rule("long", window(9, time.Hour))
	short.Persist, long.Persist = true, true
	d.attach(ownership.Disk)
	for i := range 1000 {
		r := short
		if i%10 == 0 {
			r = long
		}
		answer(t, d.Store, r, fmt.Sprint("k", i), at(0), cost(1))
	}
	chunk := d.drain(ownership.Disk)
	restored := New(Config{Shut: true})
	expect.NoError(t, restored.Apply(0, false, at(0), chunk))
	restored.DropIdle(0, at(2*time.Second))
	expect.Equal(t, restored.Stats().Keys, int64(100))
	accounted(t, restored)
}

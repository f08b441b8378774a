package simulation

import (
	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/store"
)

// data is what a Core is given of a store: its types in the store's plain ones, and what the simulator wants to know.
type data struct {
	*store.Store
	p      *process
	parts  []content
	urgent []int
	leased []int // whose lease has changed
}

type content struct {
	lease        int64
	leaseChanged bool
	caught       bool // the backup is current
	unguarded    bool // or the voters know that there is none
	caughtAt     int64
	leasedAt     int64 // when the lease began; renewals do not count
	flushed      int64
	drained      []drain
	there        bool  // there is a content, own or a whole copy
	number       int   // of the content: another one does not have what this one counts
	saved        int64 // what was changed up to this instant, by whoever holds the partition, is on the disk
	writing      []drain
}

// drain is what had been changed at an instant.
type drain struct {
	version uint64
	at      int64
}

func newData(p *process) *data {
	d := &data{p: p, parts: make([]content, p.w.partitions)}
	for i := range d.parts {
		d.parts[i].flushed, d.parts[i].saved = -1, -1
	}
	d.Store = store.New(store.Config{
		Partitions: p.w.partitions, MaxReservations: 1000, Copies: true,
		Shut:   true,
		Urgent: func(part int) { d.urgent = append(d.urgent, part) },
	})
	return d
}

func (d *data) Lease(part int, until int64) {
	c := &d.parts[part]
	if c.lease != until {
		c.leaseChanged = true
		d.leased = append(d.leased, part)
	}
	if c.lease <= d.p.clock().Boot {
		c.leasedAt = d.p.w.now
	}
	c.lease = until
	d.Store.Lease(part, until)
}

func (d *data) TakeOver(part int, now algo.Instant) {
	d.parts[part].there = true
	d.Store.TakeOver(part, now)
}

func (d *data) Promote(part int) {
	d.parts[part].there = true
	d.parts[part].number++
	d.Store.Promote(part)
}

func (d *data) Discard(part int) {
	d.parts[part].there = false
	d.parts[part].number++
	d.Store.Discard(part)
}

func (d *data) Attach(part int, s ownership.Slot, all bool) {
	if s == ownership.Backup {
		c := &d.parts[part]
		c.caught, c.flushed, c.drained = false, -1, nil
	}
	d.Store.Attach(part, s, all)
}

func (d *data) AttachCurrent(part int, s ownership.Slot, all bool) {
	if s == ownership.Backup {
		c := &d.parts[part]
		c.caught, c.flushed, c.drained = false, d.p.w.now-1, nil
	}
	d.Store.AttachCurrent(part, s, all)
}

func (d *data) Unguarded(part int, may bool) {
	d.parts[part].unguarded = may
	d.Store.Unguarded(part, may)
}

func (d *data) Caught(part int, s ownership.Slot) {
	if s == ownership.Backup {
		c := &d.parts[part]
		c.caught, c.caughtAt = true, d.p.w.now
	}
	d.Store.Caught(part, s)
}

func (d *data) Detach(part int, s ownership.Slot) {
	if s == ownership.Backup {
		c := &d.parts[part]
		c.caught, c.flushed, c.drained = false, -1, nil
	}
	if s == ownership.Disk {
		d.parts[part].saved, d.parts[part].writing = -1, nil
	}
	d.Store.Detach(part, s)
}

func (d *data) Drain(part int, s ownership.Slot, now algo.Instant, most int) ([]byte, uint64, bool) {
	if c := d.p.w.chunk; c > 0 {
		most = min(most, c)
	}
	chunk, version, more := d.Store.Drain(part, s, now, most)
	if c := &d.parts[part]; s == ownership.Backup && !more {
		c.drained = append(c.drained, drain{version, d.p.w.now})
	} else if s == ownership.Disk && !more {
		c.writing = append(c.writing, drain{version, d.p.w.contained(d.p, part) + 1})
	}
	return chunk, version, more
}

// contained is the instant up to which a process, the holder or its backup, surely has what was changed.
func (w *world) contained(p *process, part int) int64 {
	for _, q := range w.running() {
		switch c := &q.data.parts[part]; {
		case !q.owns(part):
		case q == p:
			return w.now - 1
		case c.caught && c.caughtAt < w.now:
			return c.flushed
		}
	}
	return -1
}

func (d *data) Confirm(part int, s ownership.Slot, version uint64) {
	if c := &d.parts[part]; s == ownership.Backup {
		for len(c.drained) > 0 && c.drained[0].version <= version {
			c.flushed, c.drained = c.drained[0].at-1, c.drained[1:]
		}
	}
	if c := &d.parts[part]; s == ownership.Disk {
		for len(c.writing) > 0 && c.writing[0].version <= version {
			c.saved, c.writing = c.writing[0].at-1, c.writing[1:]
		}
	}
	d.Store.Confirm(part, s, version)
}

package simulation

import (
	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/store"
)

// mutant is a rule that is broken on purpose: in the core, or in what the simulator puts around it.
type mutant struct {
	core ownership.Mutation
	rule mutation
}

type mutation uint8

const (
	mergeByMaximum mutation = 1 + iota // of two sides' contents the fuller is kept, in place of the sum
	escrowAged                         // what is charged for an escrow is dated back, to when it may have been granted
	usePastLease                       // a forwarder takes an answer however late it comes
	forgetTickets                      // an answer is given before the copy has what it says
)

// data is what a Core is given of a store: its types in the store's plain ones, and what the simulator wants to know.
type data struct {
	*store.Store
	p      *process
	parts  []content
	urgent []int
}

type content struct {
	lease        int64
	leaseChanged bool
	caught       bool // the backup is current
	caughtAt     int64
	flushed      int64
	drained      []drain
	staged       [][]byte // for mergeByMaximum
}

// drain is what had been changed at an instant.
type drain struct {
	version uint64
	at      int64
}

func newData(p *process) *data {
	d := &data{p: p, parts: make([]content, p.w.partitions)}
	for i := range d.parts {
		d.parts[i].flushed = -1
	}
	d.Store = store.New(store.Config{
		Partitions: p.w.partitions, MaxRequestIDs: 200, MaxReservations: -1,
		Shut:   p.w.mutant.core != ownership.DecideWithoutToken,
		Urgent: func(part int) { d.urgent = append(d.urgent, part) },
	})
	return d
}

func (d *data) Shut(part int) {
	if d.p.w.mutant.core != ownership.DecideWithoutToken {
		d.Store.Shut(part)
	}
}

func (d *data) Lease(part int, until int64) {
	c := &d.parts[part]
	c.leaseChanged = c.leaseChanged || c.lease != until
	c.lease = until
	d.Store.Lease(part, until)
}

func (d *data) Attach(part int, s ownership.Slot, all bool) {
	if s == ownership.Backup {
		c := &d.parts[part]
		c.caught, c.flushed, c.drained = false, -1, nil
	}
	d.Store.Attach(part, int(s), all)
}

func (d *data) AttachCurrent(part int, s ownership.Slot, all bool) {
	if s == ownership.Backup {
		c := &d.parts[part]
		c.caught, c.flushed, c.drained = false, d.p.w.now-1, nil
	}
	d.Store.AttachCurrent(part, int(s), all)
}

func (d *data) Widen(part int, s ownership.Slot) { d.Store.Widen(part, int(s)) }

func (d *data) Caught(part int, s ownership.Slot) {
	if s == ownership.Backup {
		c := &d.parts[part]
		c.caught, c.caughtAt = true, d.p.w.now
	}
	d.Store.Caught(part, int(s))
}

func (d *data) Detach(part int, s ownership.Slot) {
	if s == ownership.Backup {
		c := &d.parts[part]
		c.caught, c.flushed, c.drained = false, -1, nil
	}
	d.Store.Detach(part, int(s))
}

func (d *data) Pending(part int, s ownership.Slot) int { return d.Store.Pending(part, int(s)) }

func (d *data) Drain(part int, s ownership.Slot, now algo.Instant, most int) ([]byte, uint64, bool) {
	chunk, version, more := d.Store.Drain(part, int(s), now, most)
	if c := &d.parts[part]; s == ownership.Backup && !more {
		c.drained = append(c.drained, drain{version, d.p.w.now})
	}
	return chunk, version, more
}

func (d *data) Confirm(part int, s ownership.Slot, version uint64) {
	if c := &d.parts[part]; s == ownership.Backup {
		for len(c.drained) > 0 && c.drained[0].version <= version {
			c.flushed, c.drained = c.drained[0].at-1, c.drained[1:]
		}
	}
	d.Store.Confirm(part, int(s), version)
}

func (d *data) Stage(part int) {
	d.parts[part].staged = nil
	d.Store.Stage(part)
}

func (d *data) Apply(part int, staged bool, now algo.Instant, chunk []byte) error {
	if staged && d.p.w.mutant.rule == mergeByMaximum {
		d.parts[part].staged = append(d.parts[part].staged, chunk)
	}
	return d.Store.Apply(part, staged, now, chunk)
}

func (d *data) Merge(part int, now algo.Instant) error {
	if d.p.w.mutant.rule != mergeByMaximum {
		return d.Store.Merge(part, now)
	}
	other := store.New(store.Config{Partitions: d.p.w.partitions})
	other.Stage(part)
	for _, chunk := range d.parts[part].staged {
		if err := other.Apply(part, true, now, chunk); err != nil {
			return err
		}
	}
	other.Promote(part)
	if used(other, d.p.w, part, now) > used(d.Store, d.p.w, part, now) {
		d.Store.Promote(part)
	} else {
		d.Store.Stage(part)
	}
	return nil
}

// used is what is used up of a partition's keys. Strict ones do not say.
func used(s *store.Store, w *world, part int, now algo.Instant) (n int64) {
	for _, pol := range w.policies {
		for i := range pol.keys {
			if k := &pol.keys[i]; k.Partition == part && !pol.Strict {
				if a, err := s.Decide(*k, pol.rule, now, store.Call{}, nil); err == nil {
					n += a.Limit - a.Remaining
				}
			}
		}
	}
	return n
}

func (d *data) TakeOver(part int, now algo.Instant, c ownership.Claim) {
	if d.p.w.mutant.rule == escrowAged {
		now.Mono -= d.p.w.policies[0].Window.Nanoseconds()
	}
	d.Store.TakeOver(part, now, store.Claim{Epoch: c.Term.Epoch, N: c.Term.N, Boot: c.Boot})
}

func (d *data) TakeOverStrict(part int, now algo.Instant) {
	if d.p.w.mutant.rule == escrowAged {
		now.Mono -= d.p.w.policies[0].Window.Nanoseconds()
	}
	d.Store.TakeOverStrict(part, now)
}

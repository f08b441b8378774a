package limiter

import (
	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/store"
)

// Data is what this node holds of the partitions, for the ownership core to move about.
func (l *Limiter) Data() ownership.Data { return data{l.store} }

// Version is at least every ticket that the partition's answers wait for.
func (l *Limiter) Version(partition int) uint64 { return l.store.Version(partition) }

// data is a store as the core wants to see it: the store knows nothing of ownership's types.
type data struct{ *store.Store }

func (d data) Attach(p int, s ownership.Slot, all bool)        { d.Store.Attach(p, int(s), all) }
func (d data) AttachCurrent(p int, s ownership.Slot, all bool) { d.Store.AttachCurrent(p, int(s), all) }
func (d data) Widen(p int, s ownership.Slot)                   { d.Store.Widen(p, int(s)) }
func (d data) Caught(p int, s ownership.Slot)                  { d.Store.Caught(p, int(s)) }
func (d data) Detach(p int, s ownership.Slot)                  { d.Store.Detach(p, int(s)) }
func (d data) Pending(p int, s ownership.Slot) int             { return d.Store.Pending(p, int(s)) }

func (d data) Drain(p int, s ownership.Slot, now algo.Instant, most int) (chunk []byte, version uint64, more bool) {
	return d.Store.Drain(p, int(s), now, most)
}

func (d data) Confirm(p int, s ownership.Slot, version uint64) { d.Store.Confirm(p, int(s), version) }

func (d data) TakeOver(p int, now algo.Instant, c ownership.Claim) {
	d.Store.TakeOver(p, now, store.Claim{Epoch: c.Term.Epoch, N: c.Term.N, Boot: c.Boot})
}

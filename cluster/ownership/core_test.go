package ownership

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"slices"

	"github.com/weirlimit/weir/algo"
)

// notebook is a Data whose states are sets of numbered admissions, so that what is lost or comes from nowhere shows by
// itself. Negative numbers stand for what is kept under a durability of None.
type notebook struct {
	parts []page
}

type page struct {
	open, unguarded bool
	broken          bool // Apply fails
	bulky           bool // chunks are large
	full            bool // for want of room
	stuck           bool // Merge fails
	strictCold      bool
	strictTaken     bool
	lease           int64
	content, staged map[int]bool
	cold            bool
	version         uint64
	follower        [3]struct {
		attached, caught bool
		all              bool
		pending          map[int]bool
		confirmed        uint64
	}
}

func newNotebook(partitions int) *notebook {
	n := &notebook{parts: make([]page, partitions)}
	for p := range n.parts {
		n.parts[p].content, n.parts[p].staged = map[int]bool{}, map[int]bool{}
	}
	return n
}

func (n *notebook) admit(p, id int) bool {
	pg := &n.parts[p]
	if !pg.open {
		return false
	}
	pg.content[id] = true
	pg.version++
	for s := range pg.follower {
		if pg.follower[s].attached {
			pg.follower[s].pending[id] = true
		}
	}
	return true
}

func (n *notebook) Open(p int)                 { n.parts[p].open = true }
func (n *notebook) Shut(p int)                 { n.parts[p].open = false }
func (n *notebook) Lease(p int, until int64)   { n.parts[p].lease = until }
func (n *notebook) Unguarded(p int, may bool)  { n.parts[p].unguarded = may }
func (n *notebook) Caught(p int, s Slot)       { n.parts[p].follower[s].caught = true }
func (n *notebook) Pending(p int, s Slot) int  { return len(n.parts[p].follower[s].pending) }
func (n *notebook) Stage(p int)                { n.parts[p].staged = map[int]bool{} }
func (n *notebook) Awaited(int) bool           { return true }
func (n *notebook) Safe(int) uint64            { return 0 }
func (n *notebook) Cold(p int, _ algo.Instant) { n.parts[p].cold = true }

func (n *notebook) Changed(do func(p int)) {
	for p := range n.parts {
		pending := 0
		for s := range n.parts[p].follower {
			pending += len(n.parts[p].follower[s].pending)
		}
		if pending > 0 {
			do(p)
		}
	}
}

func (n *notebook) Attach(p int, s Slot, all bool) {
	f := &n.parts[p].follower[s]
	f.attached, f.caught, f.all, f.pending = true, false, all, maps.Clone(n.parts[p].content)
}

func (n *notebook) AttachCurrent(p int, s Slot, _ bool) {
	n.parts[p].follower[s].attached, n.parts[p].follower[s].pending = true, map[int]bool{}
}

func (n *notebook) Widen(p int, s Slot) {
	f := &n.parts[p].follower[s]
	f.all = true
	for id := range n.parts[p].content {
		if id < 0 {
			f.pending[id] = true
		}
	}
}

func (n *notebook) Detach(p int, s Slot) {
	n.parts[p].follower[s].attached, n.parts[p].follower[s].pending = false, nil
}

func (n *notebook) Drain(p int, s Slot, _ algo.Instant, _ int) ([]byte, uint64, bool) {
	f := &n.parts[p].follower[s]
	ids := slices.Sorted(maps.Keys(f.pending))
	more := len(ids) > 200
	if more {
		ids = ids[:200]
	}
	for _, id := range ids {
		delete(f.pending, id)
	}
	chunk, _ := json.Marshal(ids)
	if n.parts[p].bulky {
		chunk = append(chunk, bytes.Repeat([]byte(" "), 2*pieceBytes)...)
	}
	if more {
		return chunk, f.confirmed, true
	}
	return chunk, n.parts[p].version, false
}

func (n *notebook) Confirm(p int, s Slot, version uint64) {
	n.parts[p].follower[s].confirmed = version
}

func (n *notebook) Apply(p int, staged bool, _ algo.Instant, chunk []byte) error {
	if n.parts[p].open && !staged {
		return errors.New("applied to an open partition")
	}
	if n.parts[p].broken {
		return errors.New("broken")
	}
	if n.parts[p].full {
		return ErrFull
	}
	var ids []int
	if len(chunk) > 0 {
		if err := json.Unmarshal(chunk, &ids); err != nil {
			return err
		}
	}
	to := n.parts[p].content
	if staged {
		to = n.parts[p].staged
	}
	for _, id := range ids {
		to[id] = true
		for s := range n.parts[p].follower {
			if f := &n.parts[p].follower[s]; f.attached && !staged {
				f.pending[id] = true
			}
		}
	}
	return nil
}

func (n *notebook) Promote(p int) {
	n.parts[p].content, n.parts[p].staged = n.parts[p].staged, map[int]bool{}
}

func (n *notebook) Merge(p int, _ algo.Instant) error {
	if n.parts[p].stuck {
		return errors.New("stuck")
	}
	for id := range n.parts[p].staged {
		n.parts[p].content[id] = true
		for s := range n.parts[p].follower {
			if n.parts[p].follower[s].attached {
				n.parts[p].follower[s].pending[id] = true
			}
		}
	}
	n.parts[p].staged = map[int]bool{}
	return nil
}

func (n *notebook) Discard(p int) {
	n.parts[p].content, n.parts[p].staged = map[int]bool{}, map[int]bool{}
}

func (n *notebook) TakeOver(int, algo.Instant) {}
func (n *notebook) ColdStrict(p int, _ algo.Instant) {
	n.parts[p].cold, n.parts[p].strictCold = true, true
}
func (n *notebook) TakeOverStrict(p int, _ algo.Instant) {
	n.parts[p].strictTaken = true
}

package store

import (
	"unsafe"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/prefetch"
)

// AheadSteps is the number of steps of Ahead.
const AheadSteps = 3

// Ahead has the processor fetch what a decision about a key, of such a hash, will look at under a rule, in steps from 0
// on of which each needs what the one before has fetched: for batches, whose keys are each in no cache. Each step is to
// be done for some tens of keys before the next. It changes nothing and does not block: a shard that is in use is left
// out.
func (s *Store) Ahead(step int, hash uint64, partition int, rule *Rule) {
	sh, part := s.at(partition)
	if step == 0 {
		prefetch.Line(unsafe.Pointer(sh))
		prefetch.Line(unsafe.Pointer(part))
		return
	}
	if !sh.mu.TryLock() {
		return
	}
	defer sh.mu.Unlock()
	if part.count == 0 {
		return
	}
	mask, tag := uint32(len(part.index)-1), uint32(hash>>32)
	if step == 1 {
		prefetch.Line(unsafe.Pointer(&part.index[tag&mask]))
		if part.extras != nil {
			prefetch.Line(unsafe.Pointer(&part.extras.reservations.count))
		}
		if part.tells(rule) {
			prefetch.Line(unsafe.Pointer(part.extras))
			prefetch.Line(unsafe.Pointer(part.role))
		}
		return
	}
	if part.tells(rule) {
		prefetch.Line(unsafe.Pointer(part.role.followers[ownership.Backup]))
	}
	for slot := tag & mask; part.index[slot] != 0; slot = (slot + 1) & mask {
		if e := part.index[slot]; uint32(e>>32) == tag {
			words := sh.arena.Tail(algo.Ref(uint32(e)))
			prefetch.Line(unsafe.Pointer(&words[0]))
			prefetch.Line(unsafe.Pointer(&words[min(lineWords, len(words)-1)]))
			return
		}
	}
}

// lineWords are the words of a cache line. A record of a usual key is in two of them.
const lineWords = 8

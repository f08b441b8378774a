package lend

import (
	"sync"
	"sync/atomic"
)

// Refusals remembers refusals, so that a check that is repeated while nothing can have changed is refused without
// asking the owner. A state that refuses n units until retry_after refuses them until then, even if it admits other
// checks meanwhile. It may admit fewer units earlier, so a refusal answers only checks of its own cost. A refusal must
// depend only on the units in use: K must stand for one state under one set of limits. The caller must not pass
// refusals of partial checks, peeks, count_denied and leases, nor of states with a pending reservation.
//
// It holds a fixed number of refusals. When it needs room, it drops the refusal in the same set that ends first.
// Instants are nanoseconds of one monotonic clock. A hash is that of a state, so that Forget finds all K of the state.
// Two states with one hash are answered by their own K, and forgotten together. The methods are safe for concurrent
// use. The zero value is ready for use, and takes memory with the first refusal.
type Refusals[K comparable, D any] struct {
	used   atomic.Bool
	shards [shardCount]shard[K, D]
}

const (
	shardCount = 64 // locks, so that callers do not wait for one another
	sets       = 32 // in each shard
	ways       = 4  // slots of each set; the refusals of one hash are in one set
)

type shard[K comparable, D any] struct {
	kept  atomic.Uint32 // a bit for each set that has a refusal; changed under the lock
	mu    sync.Mutex
	mark  atomic.Uint64 // rises with each Forget; changed under the lock
	slots []slot[K, D]  // nil until the first Remember
}

type slot[K comparable, D any] struct {
	hash uint64
	key  K
	Refusal[D]
}

// Refusal is an owner's answer to a check of Cost. It arrived at the instant Came and holds until the instant Until.
type Refusal[D any] struct {
	Decision    D
	Cost        int64
	Came, Until int64
}

func (r *Refusals[K, D]) shard(hash uint64) *shard[K, D] { return &r.shards[hash%shardCount] }

// set returns the slots for a hash.
func (s *shard[K, D]) set(hash uint64) []slot[K, D] {
	if s.slots == nil {
		return nil
	}
	i := setOf(hash) * ways
	return s.slots[i : i+ways]
}

func setOf(hash uint64) int { return int(hash / shardCount % sets) }

// Find returns the refusal that answers a cost, if one is remembered. It takes no lock if the set has no refusal.
func (r *Refusals[K, D]) Find(hash uint64, k K, cost, now int64) (found Refusal[D], ok bool) {
	s := r.shard(hash)
	if s.kept.Load()&(1<<setOf(hash)) == 0 {
		return found, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	set := s.set(hash)
	for i := range set {
		if e := &set[i]; e.hash == hash && e.Cost == cost && e.key == k && now < e.Until {
			return e.Refusal, true
		}
	}
	return found, false
}

// Mark returns the mark for Remember. The caller must call it before it sends the check to the owner.
func (r *Refusals[K, D]) Mark(hash uint64) uint64 { return r.shard(hash).mark.Load() }

// Remember keeps a refusal. mark is what Mark returned before the check was sent. If Forget was called since, the
// refusal may be older than the change that made it void, and Remember does not keep it.
func (r *Refusals[K, D]) Remember(hash uint64, k K, mark uint64, refusal Refusal[D]) {
	if refusal.Until <= refusal.Came {
		return
	}
	s := r.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mark.Load() != mark {
		return
	}
	if s.slots == nil {
		s.slots = make([]slot[K, D], sets*ways)
	}
	set := s.set(hash)
	at := 0
	for i := range set {
		if set[i].hash == hash && set[i].Cost == refusal.Cost && set[i].key == k {
			at = i
			break
		}
		if set[i].Until < set[at].Until {
			at = i
		}
	}
	set[at] = slot[K, D]{hash, k, refusal}
	s.kept.Or(1 << setOf(hash))
	if !r.used.Load() {
		r.used.Store(true)
	}
}

// Forget forgets all refusals of a hash, and makes Remember drop those whose checks are in progress.
func (r *Refusals[K, D]) Forget(hash uint64) {
	s := r.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mark.Add(1)
	s.forget(hash)
}

// Used reports whether a refusal was ever remembered. If not, the caller need not call Forget.
func (r *Refusals[K, D]) Used() bool { return r.used.Load() }

// Admitted forgets all refusals of a hash after a charge that was or may have been admitted, because a refused check
// then has to wait for longer. It takes no lock if the set has no refusal.
func (r *Refusals[K, D]) Admitted(hash uint64) {
	s := r.shard(hash)
	if s.kept.Load()&(1<<setOf(hash)) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(hash)
}

func (s *shard[K, D]) forget(hash uint64) {
	set, kept := s.set(hash), false
	for i := range set {
		if set[i].hash == hash {
			set[i] = slot[K, D]{}
		}
		kept = kept || set[i].Until != 0
	}
	if !kept {
		s.kept.And(^uint32(1 << setOf(hash)))
	}
}

package lend

import (
	"sync"
	"sync/atomic"
)

// Refusals remembers refusals, so that a check that is repeated while nothing can have changed is refused without asking the owner. A state that
// refuses n units until retry_after refuses them until then, also if it admits other checks meanwhile. It may admit fewer units earlier, so a
// refusal answers checks of its own cost alone. A refusal must depend on nothing but the units in use: K must stand for one state under one set
// of limits, and the caller leaves out partial checks, peeks, count_denied, leases, and states on which a reservation is pending.
//
// It holds a fixed number of refusals; when it needs room it drops one, the first to end of those at the same place. Instants are those of one
// monotonic clock, in nanoseconds. A hash is that of a state, so that Forget finds all K of the state; two states with one hash are answered by their
// own K, and forgotten together. The methods are safe for concurrent use. The zero value is ready for use, and takes memory with the first refusal.
type Refusals[K comparable, D any] struct {
	used   atomic.Bool
	shards [shardCount]shard[K, D]
}

const (
	shardCount = 64 // locks, so that callers do not wait for one another
	sets       = 32 // of each shard
	ways       = 4  // places where the refusal of one hash may be
)

type shard[K comparable, D any] struct {
	kept  atomic.Uint32 // a bit for each set with a refusal; changed under the lock
	mu    sync.Mutex
	mark  atomic.Uint64 // rises when something is forgotten; changed under the lock
	slots []slot[K, D]  // nil until the first is remembered
}

type slot[K comparable, D any] struct {
	hash uint64
	key  K
	Refusal[D]
}

// Refusal is what is remembered: an answer to a cost, from the instant Came at which it arrived until the instant Until.
type Refusal[D any] struct {
	Decision    D
	Cost        int64
	Came, Until int64
}

func (r *Refusals[K, D]) shard(hash uint64) *shard[K, D] { return &r.shards[hash%shardCount] }

// set is where the refusals of a hash may be.
func (s *shard[K, D]) set(hash uint64) []slot[K, D] {
	if s.slots == nil {
		return nil
	}
	i := setOf(hash) * ways
	return s.slots[i : i+ways]
}

func setOf(hash uint64) int { return int(hash / shardCount % sets) }

// Find returns the refusal that answers a cost, if one is remembered. It takes no lock where no refusal can be.
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

// Mark returns what is to be passed to Remember with the answer to a check that is sent to the owner next.
func (r *Refusals[K, D]) Mark(hash uint64) uint64 { return r.shard(hash).mark.Load() }

// Remember keeps a refusal. The mark is Mark's, from before its check was sent: if anything was forgotten since, the refusal may be older than what made it
// void, and is not kept.
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

// Forget forgets every refusal of a hash, and those that are in progress.
func (r *Refusals[K, D]) Forget(hash uint64) {
	s := r.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mark.Add(1)
	s.forget(hash)
}

// Used says whether any refusal has ever been remembered: where none was there is nothing to forget.
func (r *Refusals[K, D]) Used() bool { return r.used.Load() }

// Admitted forgets every refusal of a hash after a charge that was or may have been admitted, because a refused check then has to wait for
// longer. It takes no lock unless there may be such a refusal.
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

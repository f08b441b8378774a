package store

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// stateID is what a state is: a key in its scope. A hash finds one, and is never taken for it.
type stateID struct{ scope, key string }

// size is the number of bytes that the texts take.
func (id stateID) size() int { return len(id.scope) + len(id.key) }

// memoBytes is what a remembered answer is taken to cost when bytes are counted, its share of a map and a queue, besides
// the texts of its key.
const memoBytes = 256

// memoShare is the part of MaxBytes that remembered answers may take beyond each partition's even share of it.
const memoShare = 8

// memoKind says what was answered.
type memoKind uint8

const (
	memoCharge  memoKind = 1
	memoRefund  memoKind = 2
	memoSettled memoKind = 3 // of a reservation, under its own id
	memoKinds            = 4
)

// memoKey is the id of a request about a state.
type memoKey struct {
	of   stateID
	id   string
	kind memoKind
}

func (k *memoKey) bytes() int { return memoBytes + k.of.size() + len(k.id) }

// memo is what was answered to a request.
type memo struct {
	cost, granted int64 // asked for, of a reservation to be kept; granted or given back
	over          bool  // charged though there was no room
	delay         time.Duration
	lease         uint64
	reservation   ReservationID
	until         int64 // Mono instant from which on it is forgotten
}

// memos remembers answers by request id, the newest up to a bound. The zero value is empty and ready for use.
type memos struct {
	gone  uint64     // turns that have left the order since the partition's beginning: followers count them
	order []memoTurn // oldest first
	by    map[memoKey]memo
	bytes int
}

// end is the number of turns that there have ever been.
func (m *memos) end() uint64 { return m.gone + uint64(len(m.order)) }

// memoTurn is a memo's place in the order of forgetting. It is void when the memo is no longer the one it stands for.
type memoTurn struct {
	key   memoKey
	until int64
}

// keepFor says how long an answer is remembered: min(max(window, 1 min), 5 min).
func keepFor(limits algo.Limits) time.Duration {
	longest := time.Minute
	for i := range limits {
		longest = max(longest, limits[i].Window)
	}
	return min(longest, 5*time.Minute)
}

func (m *memos) get(k memoKey, now int64) (memo, bool) {
	e, ok := m.by[k]
	return e, ok && now < e.until
}

// memoBounds are the bounds of what one partition remembers.
type memoBounds struct {
	most  int   // answers; negative: none at all
	even  int   // bytes that a partition may always take; 0: no bound
	share int64 // bytes of all partitions beyond which none takes more than that
}

func (s *Store) memoBounds() memoBounds {
	share := s.cfg.MaxBytes / memoShare
	return memoBounds{most: s.cfg.MaxRequestIDs, share: share, even: int(share) / s.cfg.Partitions}
}

// put remembers an answer, forgetting the oldest ones for the bounds and for want of memory. Where there is no memory at all
// what was answered stands and is not remembered.
func (m *memos) put(k memoKey, e memo, now int64, most memoBounds, b *shardBudget) {
	if most.most < 0 {
		return
	}
	size := k.bytes()
	for len(m.order) > 0 && (len(m.order) >= most.most ||
		most.share > 0 && m.bytes+size > most.even && b.memos.Load()+int64(size) > most.share) {
		m.dropOldest(now, b)
	}
	for !b.Take(size) {
		if len(m.order) == 0 {
			b.memosLost.Add(1)
			return
		}
		m.dropOldest(now, b)
	}
	if m.by == nil {
		m.by = make(map[memoKey]memo)
	}
	m.bytes += size
	b.memos.Add(int64(size))
	m.by[k] = e
	m.order = append(m.order, memoTurn{k, e.until})
}

func (m *memos) dropOldest(now int64, b *shardBudget) {
	t := m.order[0]
	m.order[0] = memoTurn{} // its texts are no longer used
	m.order = m.order[1:]
	m.gone++
	size := t.key.bytes()
	m.bytes -= size
	b.memos.Add(-int64(size))
	b.Give(size)
	if e, ok := m.by[t.key]; ok && e.until == t.until {
		delete(m.by, t.key)
		if now < t.until {
			b.memosLost.Add(1)
		}
	}
	if len(m.order) == 0 {
		*m = memos{gone: m.gone}
	}
}

// expire forgets the answers at the front of the order whose time is over.
func (m *memos) expire(now int64, b *shardBudget) {
	for len(m.order) > 0 && m.order[0].until <= now {
		m.dropOldest(now, b)
	}
}

// forget drops every answer about one state and reports whether there was any.
func (m *memos) forget(of stateID) bool {
	before := len(m.by)
	for k := range m.by {
		if k.of == of {
			delete(m.by, k)
		}
	}
	return len(m.by) < before
}

// free forgets everything.
func (m *memos) free(b *shardBudget) {
	b.memos.Add(-int64(m.bytes))
	b.Give(m.bytes)
	*m = memos{gone: m.end()}
}

// unite adds what another has and this one does not.
func (m *memos) unite(other *memos, now int64, most memoBounds, b *shardBudget) {
	for _, t := range other.order {
		e, ok := other.by[t.key]
		if _, known := m.by[t.key]; ok && !known && e.until == t.until {
			m.put(t.key, e, now, most, b)
		}
	}
}

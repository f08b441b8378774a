package store

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// memoBytes is what a remembered request id is taken to cost when bytes are counted: its share of a map and a queue.
const memoBytes = 128

// memoKey is a request id in its scope.
type memoKey struct {
	key uint64 // hash of scope and key
	id  uint64 // hash of the request id
}

// memo is a charge that was made under a request id.
type memo struct {
	cost, granted int64
	delay         time.Duration
	lease         uint64
	until         int64 // Mono instant from which on it is forgotten
}

// memos remembers charges by request id, the newest up to a bound. The zero value is empty and ready for use.
type memos struct {
	gone  uint64     // turns that have left the order since the partition's beginning: followers count them
	order []memoTurn // oldest first
	by    map[memoKey]memo
}

// end is the number of turns that there have ever been.
func (m *memos) end() uint64 { return m.gone + uint64(len(m.order)) }

// memoTurn is a memo's place in the order of forgetting. It is void when the memo is no longer the one it stands for.
type memoTurn struct {
	key   memoKey
	until int64
}

// keepFor says how long a charge is remembered: min(max(window, 1 min), 5 min).
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

// put remembers a charge, forgetting the oldest ones for the bound on their number and for want of memory. Where there
// is no memory at all the charge stands and is not remembered.
func (m *memos) put(k memoKey, e memo, most int, b *shardBudget) {
	if most < 0 {
		return
	}
	for len(m.order) >= most {
		m.dropOldest(b)
	}
	for !b.Take(memoBytes) {
		if len(m.order) == 0 {
			return
		}
		m.dropOldest(b)
	}
	if m.by == nil {
		m.by = make(map[memoKey]memo)
	}
	m.by[k] = e
	m.order = append(m.order, memoTurn{k, e.until})
}

func (m *memos) dropOldest(b *shardBudget) {
	t := m.order[0]
	m.order = m.order[1:]
	m.gone++
	b.Give(memoBytes)
	if m.by[t.key].until == t.until {
		delete(m.by, t.key)
	}
	if len(m.order) == 0 {
		*m = memos{gone: m.gone}
	}
}

// expire forgets the charges at the front of the order whose time is over.
func (m *memos) expire(now int64, b *shardBudget) {
	for len(m.order) > 0 && m.order[0].until <= now {
		m.dropOldest(b)
	}
}

// forget drops every charge of one key and reports whether there was any.
func (m *memos) forget(hash uint64) bool {
	before := len(m.by)
	for k := range m.by {
		if k.key == hash {
			delete(m.by, k)
		}
	}
	return len(m.by) < before
}

// free forgets everything.
func (m *memos) free(b *shardBudget) {
	b.Give(memoBytes * len(m.order))
	*m = memos{gone: m.end()}
}

// unite adds what another has and this one does not.
func (m *memos) unite(other *memos, most int, b *shardBudget) {
	for _, t := range other.order {
		e, ok := other.by[t.key]
		if _, known := m.by[t.key]; ok && !known && e.until == t.until {
			m.put(t.key, e, most, b)
		}
	}
}

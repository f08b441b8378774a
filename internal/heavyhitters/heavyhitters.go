// Package heavyhitters finds the items of a stream that occurred most often lately, in memory that is bounded however many different
// items there are. It names items by their values and compares them, so that no two items are ever taken for one another.
//
// The counts are those of the Misra-Gries summary as Apache DataSketches has it (D. Anderson et al., "A High-Performance
// Algorithm for Identifying Frequent Items in Data Streams", IMC 2017): of every item the true count lies between the bounds
// given, and these are at most 3.5/counters of the sum of all counts apart (of each generation).
//
// What it does not promise: an order among items whose bounds overlap, or that an item below that error is kept at all. Nothing
// here is safe for concurrent use.
package heavyhitters

import (
	"hash/maphash"
	"iter"
	"maps"

	"github.com/apache/datasketches-go/frequencies"
)

// hasher places items by a hash of this process's own, so that nobody outside can choose items that share a place.
type hasher[K comparable] struct{ seed maphash.Seed }

func (h hasher[K]) Hash(item K) uint64 { return maphash.Comparable(h.seed, item) }

// Window counts what was added since the last few turns.
type Window[K comparable] struct {
	generations []*frequencies.ItemsSketch[K] // [0] is the one that is added to
}

// NewWindow returns an empty window of so many generations, each with so many counters, a power of two from 8, of which it uses three
// quarters at most. The memory for them is taken as items come.
func NewWindow[K comparable](generations, counters int) (*Window[K], error) {
	w := &Window[K]{make([]*frequencies.ItemsSketch[K], generations)}
	for i := range w.generations {
		var err error
		if w.generations[i], err = frequencies.NewFrequencyItemsSketchWithMaxMapSize(counters, hasher[K]{maphash.MakeSeed()}, nil); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// Add counts an item n times in the youngest generation; n below 1 counts nothing. The window keeps the item: keep is called for one that the
// generation does not have yet and returns what to keep in its place, equal to it, such as a copy of what is part of something larger.
func (w *Window[K]) Add(item K, n int64, keep func(K) K) {
	if n < 1 {
		return
	}
	if low, _ := w.generations[0].GetLowerBound(item); low == 0 { // no item has an error
		item = keep(item)
	}
	_ = w.generations[0].UpdateMany(item, n) // fails for negative counts only
}

// Turn begins a new generation, and forgets the oldest and gives its memory back.
func (w *Window[K]) Turn() {
	last := len(w.generations) - 1
	oldest := w.generations[last]
	copy(w.generations[1:], w.generations[:last])
	_ = oldest.Reset() // fails for sizes that are not powers of two only
	w.generations[0] = oldest
}

// Count returns the bounds of an item's count.
func (w *Window[K]) Count(item K) (low, high int64) {
	for _, s := range w.generations {
		l, _ := s.GetLowerBound(item)
		low, high = low+l, high+l+s.GetMaximumError()
	}
	return low, high
}

// Items returns the items that are kept, in no order.
func (w *Window[K]) Items() iter.Seq[K] {
	seen := make(map[K]struct{})
	for _, s := range w.generations {
		rows, _ := s.GetFrequentItemsWithThreshold(0, frequencies.ErrorTypeEnum.NoFalseNegatives)
		for _, r := range rows {
			seen[r.GetItem()] = struct{}{}
		}
	}
	return maps.Keys(seen)
}

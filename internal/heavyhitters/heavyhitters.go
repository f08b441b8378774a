// Package heavyhitters finds the items of a stream that occur most often, in memory that is bounded however many different items
// there are.
//
// A [Sketch] counts since it was made or cleared; a [Window] counts what was added lately, over a number of generations. Both name
// items by their values and compare them, so that no two items are ever taken for one another.
//
// The counts are those of the Misra-Gries summary as Apache DataSketches has it (D. Anderson et al., "A High-Performance
// Algorithm for Identifying Frequent Items in Data Streams", IMC 2017): of every item the true count lies between the bounds
// given, and these are at most 3.5/counters of the sum of all counts apart (of each generation).
//
// What it does not promise: an order among items whose bounds overlap, or that an item below that error is kept at all. Nothing
// here is safe for concurrent use.
package heavyhitters

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"slices"

	"github.com/apache/datasketches-go/frequencies"
)

// MinCounters and MaxCounters bound the number of counters of a sketch.
const (
	MinCounters = 8
	MaxCounters = 1 << 16
)

// Count is an item with the bounds of its count: Low ≤ true count ≤ High.
type Count[K comparable] struct {
	Item      K
	Low, High int64
}

// Sketch counts items. It keeps three quarters of its counters' number of them at most.
type Sketch[K comparable] struct {
	items *frequencies.ItemsSketch[K]
}

// hasher places items by a hash of this process's own, so that nobody outside can choose items that share a place.
type hasher[K comparable] struct{ seed maphash.Seed }

func (h hasher[K]) Hash(item K) uint64 { return maphash.Comparable(h.seed, item) }

// New returns an empty sketch. counters is a power of two from MinCounters to MaxCounters. The memory for them is taken as items
// come.
func New[K comparable](counters int) (*Sketch[K], error) {
	if counters < MinCounters || counters > MaxCounters || counters&(counters-1) != 0 {
		return nil, fmt.Errorf("heavyhitters: %d counters: must be a power of two from %d to %d", counters, MinCounters, MaxCounters)
	}
	items, err := frequencies.NewFrequencyItemsSketchWithMaxMapSize(counters, hasher[K]{maphash.MakeSeed()}, nil)
	if err != nil {
		return nil, fmt.Errorf("heavyhitters: %w", err)
	}
	return &Sketch[K]{items}, nil
}

// Add counts an item n times; n below 1 counts nothing. The sketch keeps the item: keep, when not nil, is called for one that it
// does not have yet and returns what to keep in its place, equal to it, such as a copy of what is part of something larger.
func (s *Sketch[K]) Add(item K, n int64, keep func(K) K) {
	if n < 1 {
		return
	}
	if low, _ := s.items.GetLowerBound(item); low == 0 && keep != nil {
		item = keep(item)
	}
	_ = s.items.UpdateMany(item, n) // fails for negative counts only
}

// Count returns the bounds of an item's count.
func (s *Sketch[K]) Count(item K) (low, high int64) {
	low, _ = s.items.GetLowerBound(item) // no item has an error
	return low, low + s.items.GetMaximumError()
}

// Total returns the sum of all counts, which is exact.
func (s *Sketch[K]) Total() int64 { return s.items.GetStreamLength() }

// Top returns the n items that occurred most, the most frequent first; items of the same count are in no particular order.
func (s *Sketch[K]) Top(n int) []Count[K] {
	rows, _ := s.items.GetFrequentItemsWithThreshold(0, frequencies.ErrorTypeEnum.NoFalseNegatives)
	out := make([]Count[K], 0, min(max(n, 0), len(rows)))
	for _, r := range rows[:cap(out)] {
		out = append(out, Count[K]{r.GetItem(), r.GetLowerBound(), r.GetUpperBound()})
	}
	return out
}

// Clear empties the sketch, and gives its memory back.
func (s *Sketch[K]) Clear() { _ = s.items.Reset() } // fails for sizes that are not powers of two only

// Window counts what was added since the last few turns.
type Window[K comparable] struct {
	generations []*Sketch[K] // [0] is the one that is added to
}

// NewWindow returns an empty window of so many generations, each with a sketch of so many counters; see New.
func NewWindow[K comparable](generations, counters int) (*Window[K], error) {
	if generations < 1 {
		return nil, fmt.Errorf("heavyhitters: %d generations: must be at least 1", generations)
	}
	w := &Window[K]{make([]*Sketch[K], generations)}
	for i := range w.generations {
		var err error
		if w.generations[i], err = New[K](counters); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// Add counts an item in the youngest generation; see Sketch.Add.
func (w *Window[K]) Add(item K, n int64, keep func(K) K) { w.generations[0].Add(item, n, keep) }

// Turn begins a new generation, and forgets the oldest.
func (w *Window[K]) Turn() {
	last := len(w.generations) - 1
	oldest := w.generations[last]
	copy(w.generations[1:], w.generations[:last])
	oldest.Clear()
	w.generations[0] = oldest
}

// Count returns the bounds of an item's count.
func (w *Window[K]) Count(item K) (low, high int64) {
	for _, s := range w.generations {
		l, h := s.Count(item)
		low, high = low+l, high+h
	}
	return low, high
}

// Total returns the sum of all counts, which is exact.
func (w *Window[K]) Total() (n int64) {
	for _, s := range w.generations {
		n += s.Total()
	}
	return n
}

// Top returns the n items that occurred most, by the upper bounds of their counts, the most frequent first.
func (w *Window[K]) Top(n int) []Count[K] {
	seen := make(map[K]struct{})
	var out []Count[K]
	for _, s := range w.generations {
		for _, c := range s.Top(MaxCounters) {
			if _, ok := seen[c.Item]; ok {
				continue
			}
			seen[c.Item] = struct{}{}
			low, high := w.Count(c.Item)
			out = append(out, Count[K]{c.Item, low, high})
		}
	}
	slices.SortStableFunc(out, func(a, b Count[K]) int { return cmp.Compare(b.High, a.High) })
	return out[:min(max(n, 0), len(out))]
}

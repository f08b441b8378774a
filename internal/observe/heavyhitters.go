package observe

import (
	"hash/maphash"
	"iter"
	"maps"

	"github.com/apache/datasketches-go/frequencies"
)

// window counts the keys of the last generations, in memory that is bounded however many different keys there are. It compares keys, so that
// no two are ever taken for one another. [0] is the generation that is added to.
//
// The counts are those of the Misra-Gries summary as Apache DataSketches has it (D. Anderson et al., "A High-Performance
// Algorithm for Identifying Frequent Items in Data Streams", IMC 2017): of every key the true count lies between the bounds
// given, and these are at most 3.5/counters of the sum of all counts apart (of each generation). A key below that error may not be kept.
type window [generations]*frequencies.ItemsSketch[id]

// hasher places keys by a hash of this process's own, so that nobody outside can choose keys that share a place.
type hasher struct{ seed maphash.Seed }

func (h hasher) Hash(k id) uint64 { return maphash.Comparable(h.seed, k) }

// newWindow returns an empty window, which takes memory as keys come.
func newWindow() (w window, err error) {
	for i := range w {
		w[i], err = frequencies.NewFrequencyItemsSketchWithMaxMapSize(counters, hasher{maphash.MakeSeed()}, nil)
		if err != nil {
			return w, err
		}
	}
	return w, nil
}

// add counts a key n times in the youngest generation.
func (w *window) add(k id, n int64) {
	if low, _ := w[0].GetLowerBound(k); low == 0 { // no key has an error
		k = k.clone()
	}
	_ = w[0].UpdateMany(k, n) // fails for negative counts only
}

// turn begins a new generation, and forgets the oldest and gives its memory back.
func (w *window) turn() {
	oldest := w[generations-1]
	copy(w[1:], w[:])
	_ = oldest.Reset() // fails for sizes that are not powers of two only
	w[0] = oldest
}

// count returns the bounds of a key's count.
func (w *window) count(k id) (low, high int64) {
	for _, s := range w {
		l, _ := s.GetLowerBound(k)
		low, high = low+l, high+l+s.GetMaximumError()
	}
	return low, high
}

// keys returns the keys that are kept, in no order.
func (w *window) keys() iter.Seq[id] {
	seen := make(map[id]struct{})
	for _, s := range w {
		rows, _ := s.GetFrequentItemsWithThreshold(0, frequencies.ErrorTypeEnum.NoFalseNegatives)
		for _, r := range rows {
			seen[r.GetItem()] = struct{}{}
		}
	}
	return maps.Keys(seen)
}

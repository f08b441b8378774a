package observe

import (
	"hash/maphash"
	"iter"
	"maps"

	"github.com/apache/datasketches-go/frequencies"
)

// window counts the keys of the last generations in bounded memory, however many different keys there are. It compares
// keys, so it never takes two for one. [0] is the present generation.
//
// The counts are those of the Misra-Gries summary of Apache DataSketches (D. Anderson et al., "A High-Performance
// Algorithm for Identifying Frequent Items in Data Streams", IMC 2017). The true count of every key lies between the
// bounds that count returns. In each generation these differ by at most 3.5/counters of the sum of all counts. A key
// whose count is below that may be missing.
type window [generations]*frequencies.ItemsSketch[id]

// hasher places keys by a hash with a random seed, so that callers cannot choose keys that share a place.
type hasher struct{ seed maphash.Seed }

func (h hasher) Hash(k id) uint64 { return maphash.Comparable(h.seed, k) }

// newWindow returns an empty window. It takes memory as keys come.
func newWindow() (w window, err error) {
	for i := range w {
		w[i], err = frequencies.NewFrequencyItemsSketchWithMaxMapSize(counters, hasher{maphash.MakeSeed()}, nil)
		if err != nil {
			return w, err
		}
	}
	return w, nil
}

// add counts a key n times in the present generation.
func (w *window) add(k id, n int64) {
	if low, _ := w[0].GetLowerBound(k); low == 0 { // GetLowerBound fails for no key
		k = k.clone()
	}
	_ = w[0].UpdateMany(k, n) // fails only for negative counts
}

// turn begins a new generation, and empties the oldest one for it.
func (w *window) turn() {
	oldest := w[generations-1]
	copy(w[1:], w[:])
	_ = oldest.Reset() // fails only for sizes that are not powers of two
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

// keys returns the keys that the window has, in no order.
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

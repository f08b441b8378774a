package observe

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestWindowBounds: whatever comes, every key's true count is within its bounds, these are no further apart than they
// are said to be, and no key above the error is missing.
func TestWindowBounds(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 1))
		w, truth, total := must.Value(newWindow())(t), make(map[id]int64), int64(0)
		zipf := rand.NewZipf(random, 1.05+float64(seed)/20, 1, 50_000)
		for range 20_000 {
			k, n := id{"p", fmt.Sprint("key-", zipf.Uint64())}, 1+random.Int64N(1+int64(seed))
			w.add(k, n)
			truth[k] += n
			total += n
		}
		worst := int64(3.5 / float64(counters) * float64(total))
		kept := make(map[id]bool)
		for k := range w.keys() {
			kept[k] = true
		}
		for k, n := range truth {
			low, high := w.count(k)
			expect.True(t, n >= low && n <= high && high-low <= worst,
				"seed %d: %v was added %d times: bounds %d and %d, at most %d apart", seed, k, n, low, high, worst)
			expect.True(t, n <= worst || kept[k], "seed %d: %v is missing, which was added %d times", seed, k, n)
		}
	}
}

// TestWindowTurns: as long as there is room counts are exact, and each turn forgets the oldest generation.
func TestWindowTurns(t *testing.T) {
	w := must.Value(newWindow())(t)
	for i := range generations {
		w.add(id{"p", "each"}, 1)
		w.add(id{"p", fmt.Sprint(i)}, int64(i+1))
		if i < generations-1 {
			w.turn()
		}
	}
	for gone := range generations {
		low, high := w.count(id{"p", "each"})
		expect.True(t, low == high && low == int64(generations-gone), "after %d turns: %d, %d", gone, low, high)
		expect.Equal(t, len(slices.Collect(w.keys())), 1+generations-gone, "keys after %d turns", gone)
		w.turn()
	}
	expect.Equal(t, len(slices.Collect(w.keys())), 0, "keys after all turns")
}

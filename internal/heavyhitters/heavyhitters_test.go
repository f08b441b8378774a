package heavyhitters

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func newSketch(t *testing.T, counters int) *Window[string] {
	t.Helper()
	return must.Value(NewWindow[string](1, counters))(t)
}

func same(item string) string { return item }

// content is what a window knows, by item.
func content(w *Window[string]) string {
	var b strings.Builder
	for _, item := range slices.Sorted(w.Items()) {
		low, high := w.Count(item)
		fmt.Fprintf(&b, "%s %d %d;", item, low, high)
	}
	return b.String()
}

// Whatever comes, every item's true count is within its bounds, these are no further apart than they are said to be, and no
// item above the error is missing.
func TestBounds(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 1))
		counters := 8 << (seed % 5)
		s, truth, total := newSketch(t, counters), make(map[string]int64), int64(0)
		zipf := rand.NewZipf(random, 1.05+float64(seed)/20, 1, 5000)
		for range 20_000 {
			item, n := fmt.Sprint("key-", zipf.Uint64()), 1+random.Int64N(1+int64(seed))
			s.Add(item, n, same)
			truth[item] += n
			total += n
		}
		worst := int64(3.5 / float64(counters) * float64(total))
		kept := make(map[string]bool)
		for item := range s.Items() {
			kept[item] = true
		}
		for item, n := range truth {
			low, high := s.Count(item)
			expect.True(t, n >= low && n <= high && high-low <= worst,
				"seed %d: %q was added %d times: bounds %d and %d, at most %d apart", seed, item, n, low, high, worst)
			expect.True(t, n <= worst || kept[item], "seed %d: %q is missing, which was added %d times", seed, item, n)
		}
	}
}

// As long as there is room every count is exact.
func TestExactWithRoom(t *testing.T) {
	s := newSketch(t, 64)
	for i := range int64(48) {
		s.Add(fmt.Sprint(i), i+1, same)
	}
	s.Add("none", 0, same)
	s.Add("none", -3, same)
	for i := range int64(48) {
		low, high := s.Count(fmt.Sprint(i))
		expect.True(t, low == i+1 && high == i+1, "%d: %d, %d", i, low, high)
	}
	low, high := s.Count("absent")
	expect.True(t, low == 0 && high == 0, "absent: %d, %d", low, high)
	s.Turn()
	expect.Equal(t, content(s), "", "items after all generations have turned")
}

// keep is called once for an item that is new, and what it returns is what stays.
func TestKeep(t *testing.T) {
	s := newSketch(t, 8)
	request := []byte("a request with alice in it")
	part := unsafe.String(&request[15], 5) // which the sketch must not hold on to
	calls := 0
	keep := func(k string) string { calls++; return strings.Clone(k) }
	s.Add(part, 1, keep)
	s.Add(part, 1, keep)
	copy(request[15:], "xxxxx")
	low, _ := s.Count("alice")
	expect.True(t, low == 2 && calls == 1, "alice counts %d, keep was called %d times", low, calls)
}

func TestWindow(t *testing.T) {
	w := must.Value(NewWindow[string](3, 8))(t)
	w.Add("old", 10, same)
	w.Turn()
	w.Add("both", 4, same)
	w.Turn()
	w.Add("both", 3, same)
	w.Add("new", 5, same)
	expect.Equal(t, content(w), "both 7 7;new 5 5;old 10 10;")
	w.Turn() // forgets the first
	expect.Equal(t, content(w), "both 7 7;new 5 5;")
	w.Turn()
	w.Turn()
	expect.Equal(t, content(w), "")
}

func TestBadSizes(t *testing.T) {
	for _, n := range []int{0, 7, 9, -8} {
		_, err := NewWindow[string](1, n)
		expect.True(t, err != nil, "%d counters are taken", n)
	}
}

func BenchmarkAdd(b *testing.B) {
	s, err := NewWindow[string](1, 1024)
	if err != nil {
		b.Fatal(err)
	}
	names := make([]string, 100_000)
	for i := range names {
		names[i] = fmt.Sprintf("user:%012d", i)
	}
	zipf := rand.NewZipf(rand.New(rand.NewPCG(1, 2)), 1.1, 1, uint64(len(names)-1))
	b.ReportAllocs()
	for b.Loop() {
		s.Add(names[zipf.Uint64()], 1, strings.Clone)
	}
}

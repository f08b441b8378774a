package store

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// heap is the memory in use after a full collection.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// keyLength is that of the keys in the figures of the documentation, such as "user:0000000000017".
const keyLength = 18

func name(i int) string { return fmt.Sprintf("user:%0*d", keyLength-5, i) }

var byAlgorithm = []struct {
	name  string
	limit algo.Limit
	most  float64 // bytes a key with one unit in use, everything included
}{
	{"fixed_window", algo.Limit{Algorithm: algo.FixedWindow, Limit: 100, Window: time.Hour}, 90},
	{"sliding_window", algo.Limit{Algorithm: algo.SlidingWindow, Limit: 100, Window: time.Hour}, 150},
	{"sliding_counter", algo.Limit{Algorithm: algo.SlidingCounter, Limit: 100, Window: time.Hour}, 100},
	{"sliding_log", algo.Limit{Algorithm: algo.SlidingLog, Limit: 100, Window: time.Hour}, 150},
	{"token_bucket", algo.Limit{Algorithm: algo.TokenBucket, Limit: 100, Window: time.Hour}, 90},
	{"leaky_bucket", algo.Limit{Algorithm: algo.LeakyBucket, Limit: 100, Window: time.Hour}, 90},
	{"concurrency", algo.Limit{Algorithm: algo.Concurrency, Limit: 100, Window: time.Hour}, 200},
}

// TestBytesPerKey measures what a key costs, by the runtime's own account, and that the Store's account agrees.
func TestBytesPerKey(t *testing.T) {
	if underRace {
		t.Skip("memory is not what it is under the race detector")
	}
	const keys = 200_000 // with -bench BytesPerKey the figures are of a million
	for _, a := range byAlgorithm {
		t.Run(a.name, func(t *testing.T) {
			before := heap()
			s := fill(t, a.limit, keys)
			got := float64(heap()-before) / keys
			counted := float64(s.Stats().Bytes) / keys
			t.Logf("%.1f bytes a key, %.1f by the store's own count", got, counted)
			expect.True(t, got <= a.most, "%.1f bytes a key, more than %.0f", got, a.most)
			expect.True(t, got <= counted*1.1+1,
				"the store counts %.1f bytes a key of %.1f: its bound would not hold", counted, got)
			runtime.KeepAlive(s)
		})
	}
}

func fill(tb testing.TB, limit algo.Limit, keys int) *Store {
	tb.Helper()
	s := New(Config{Partitions: 4093})
	r := &Rule{Scope: "p", Limits: algo.Limits{limit}}
	for i := range keys {
		call := Call{Request: algo.Request{Cost: 1, Nonce: uint64(i) + 1}}
		must.Value(s.Decide(s.key("p", name(i)), r, algo.Instant{Mono: int64(i)}, call, nil))(tb)
	}
	return s
}

// BenchmarkBytesPerKey prints the bytes a key costs among a million, for the documentation.
func BenchmarkBytesPerKey(b *testing.B) {
	const keys = 1_000_000
	for _, a := range byAlgorithm {
		b.Run(a.name, func(b *testing.B) {
			var perKey float64
			for b.Loop() {
				before := heap()
				s := fill(b, a.limit, keys)
				perKey = float64(heap()-before) / keys
				runtime.KeepAlive(s)
			}
			b.ReportMetric(perKey, "B/key")
			b.ReportMetric(0, "ns/op")
		})
	}
}

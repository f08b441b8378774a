package store

import (
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
)

// BenchmarkNewKeysAtBound is what a flood of new keys costs a store that is full, by how many of its states are idle and can make
// way; every tenth call is about a key that is there, and must be decided.
func BenchmarkNewKeysAtBound(b *testing.B) {
	const keys = 100_000
	keyOf := func(i uint64) Key {
		hash := (i + 1) * 0x9e3779b97f4a7c15
		return Key{Hash: hash, Partition: int(hash >> 40 % 4093), Key: strconv.FormatUint(i, 36)}
	}
	rule := &Rule{Scope: "s", Limits: algo.Limits{{Algorithm: algo.FixedWindow, Limit: 1 << 40, Window: time.Hour}}}
	call := Call{Request: algo.Request{Cost: 1}}
	for _, idle := range []uint64{0, 1000, 10} {
		b.Run(fmt.Sprintf("idle=1of%d", idle), func(b *testing.B) {
			s := New(Config{Partitions: 4093, MaxKeys: keys})
			start := time.Now()
			now := func() algo.Instant {
				d := int64(2*time.Hour + time.Since(start))
				return algo.Instant{Mono: d, Wall: d}
			}
			for i := range uint64(keys) {
				at := now()
				if idle > 0 && i%idle == 0 {
					at = algo.Instant{} // its window is over
				}
				if _, err := s.Decide(keyOf(i), rule, at, call, nil); err != nil {
					b.Fatal(err)
				}
			}
			var next, made, lost atomic.Uint64
			b.SetParallelism(32)
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					i := next.Add(1)
					if i%10 != 0 {
						if _, err := s.Decide(keyOf(keys+i), rule, now(), call, nil); err == nil {
							made.Add(1)
						}
					} else if k := i % keys; idle == 0 || k%idle != 0 {
						if _, err := s.Decide(keyOf(k), rule, now(), call, nil); err != nil {
							lost.Add(1)
						}
					}
				}
			})
			b.ReportMetric(float64(made.Load())/float64(b.N), "made/op")
			if st := s.Stats(); lost.Load() > 0 || st.Keys > keys {
				b.Errorf("%d keys that are there were not decided; %d keys", lost.Load(), st.Keys)
			}
		})
	}
}

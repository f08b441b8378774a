package store

import (
	"fmt"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
)

// BenchmarkReplicate is one decision for one of some thousand keys of one partition, alone and with a follower for
// which everything is drained as often as every 25 ms would be at 100,000 decisions a second. The drains are in the
// figure.
func BenchmarkReplicate(b *testing.B) {
	const keys, flush = 5000, 2500
	for _, a := range []struct {
		name  string
		limit algo.Limit
	}{
		{"token_bucket", algo.Limit{Algorithm: algo.TokenBucket, Limit: 1 << 20, Window: time.Hour}},
		{"sliding_log", algo.Limit{Algorithm: algo.SlidingLog, Limit: 1 << 20, Window: time.Second}},
	} {
		for _, d := range []struct {
			name       string
			durability Durability
			follower   bool
		}{{"alone", Async, false}, {"async", Async, true}, {"escrow", Escrow, true}, {"sync", Sync, true}} {
			// hot: most decisions are for keys that are pending already.
			for _, hot := range []bool{false, true} {
				b.Run(fmt.Sprintf("%s/%s/hot=%v", a.name, d.name, hot), func(b *testing.B) {
					s := New(Config{Urgent: func(int) {}})
					r := rule("p", a.limit).under(d.durability)
					ks := make([]Key, keys)
					for i := range ks {
						ks[i] = s.key("p", name(i))
						if _, err := s.Decide(ks[i], r, at(0), cost(1), nil); err != nil {
							b.Fatal(err)
						}
					}
					if d.follower {
						s.Attach(0, ownership.Backup, true)
						s.Drain(0, ownership.Backup, at(0), 1<<30)
						s.Caught(0, ownership.Backup)
					}
					spread := keys
					if hot {
						spread = 100
					}
					b.ReportAllocs()
					i, bytes := 0, 0
					now := time.Duration(0)
					for b.Loop() {
						now += 10 * time.Microsecond
						if _, err := s.Decide(ks[i*7919%spread], r, at(now), cost(1), nil); err != nil {
							b.Fatal(err)
						}
						if i++; d.follower && i%flush == 0 {
							for more := true; more; {
								var chunk []byte
								var version uint64
								chunk, version, more = s.Drain(0, ownership.Backup, at(now), 64<<10)
								bytes += len(chunk)
								s.Confirm(0, ownership.Backup, version)
							}
						}
					}
					b.ReportMetric(float64(bytes)/float64(b.N), "sent-B/op")
				})
			}
		}
	}
}

package topkeys

import (
	"context"
	"fmt"
	"testing"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
)

// BenchmarkCheck is what recording costs a limiter: one check of a key that it knows, and batches of a hundred.
func BenchmarkCheck(b *testing.B) {
	set, err := policy.Parse("test.yaml", []byte("policies: [{name: p, algorithm: token_bucket, limit: 1000000, window: 1s}]"))
	if err != nil {
		b.Fatal(err)
	}
	for _, batch := range []int{1, 100} {
		for _, recorded := range []bool{false, true} {
			b.Run(fmt.Sprintf("batch=%d/recorded=%t", batch, recorded), func(b *testing.B) {
				cfg := limiter.Config{Policies: set}
				if recorded {
					if cfg.Recorder, err = New(); err != nil {
						b.Fatal(err)
					}
				}
				l := limiter.New(cfg)
				defer l.Close()
				checks := make([]limit.Check, batch)
				for i := range checks {
					checks[i] = limit.Check{Target: limit.Target{Policy: "p", Key: fmt.Sprintf("user:%012d", i)}, Cost: 1}
				}
				ctx, results := context.Background(), make([]limit.Result, batch)
				for b.Loop() {
					if err := l.CheckTo(ctx, checks, nil, results); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*batch), "ns/check")
			})
		}
	}
}

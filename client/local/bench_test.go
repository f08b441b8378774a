package local

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/must"
)

// BenchmarkAllow is one question to a client that decides in this process: of one key, and of any of a million.
func BenchmarkAllow(b *testing.B) {
	set, err := policy.Parse("test.yaml", []byte("policies: [{name: p, algorithm: token_bucket, limit: 1000, window: 1s}]"))
	must.NoError(b, err)
	for _, keys := range []int{1, 1_000_000} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			c := New(set)
			defer func() { _ = c.Close() }()
			l, ctx := c.Policy("p"), b.Context()
			names := make([]string, keys)
			for i := range names {
				names[i] = fmt.Sprintf("user:%012d", i)
				_, err := l.Allow(ctx, names[i])
				must.NoError(b, err)
			}
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				random := rand.New(rand.NewPCG(1, 2))
				for pb.Next() {
					if _, err := l.Allow(ctx, names[random.IntN(keys)]); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}

package local

import (
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

const localPolicies = `
policies:
  - {name: login, algorithm: sliding_log, limit: 5, window: 1m}
`

func open(t *testing.T) *client.Client {
	t.Helper()
	set := must.Value(policy.Parse("test.yaml", []byte(localPolicies)))(t)
	testkit.NoLeaks(t, "weir/limiter.", "weir/client.")
	c := New(set)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// New decides in this process, and Close leaves nothing behind; client's TestConformance has the rest.
func TestDecides(t *testing.T) {
	c := open(t)
	for i := range 6 {
		d := must.Value(c.Policy("login").Allow(t.Context(), "alice"))(t)
		expect.True(t, d.Allowed == (i < 5) && d.Limit == 5, "%d: %+v", i, d)
	}
	bucket := algo.Limit{Algorithm: algo.TokenBucket, Limit: 1, Window: time.Hour}
	d := must.Value(c.Inline("", bucket).Allow(t.Context(), "x"))(t)
	expect.True(t, d.Allowed, "%+v", d)
	expect.NoError(t, c.Close())
}

func TestWithoutPolicies(t *testing.T) {
	c := New(nil)
	defer c.Close()
	_, err := c.Policy("login").Allow(t.Context(), "alice")
	expect.ErrorIs(t, err, client.ErrNotFound)
}

// BenchmarkAllow is one question to a client that decides in this process: of one key, and of any of a million.
func BenchmarkAllow(b *testing.B) {
	set := must.Value(policy.Parse("test.yaml",
		[]byte("policies: [{name: p, algorithm: token_bucket, limit: 1000, window: 1s}]")))(b)
	c := New(set)
	defer func() { _ = c.Close() }()
	l, ctx := c.Policy("p"), b.Context()
	eachKey(b, func(key string) {
		if _, err := l.Allow(ctx, key); err != nil {
			b.Error(err)
		}
	})
}

// BenchmarkRate is the same question to golang.org/x/time/rate, with a limiter for each key in a sharded map.
func BenchmarkRate(b *testing.B) {
	var shards [256]struct {
		sync.Mutex
		limiters map[string]*rate.Limiter
	}
	for i := range shards {
		shards[i].limiters = make(map[string]*rate.Limiter)
	}
	seed := maphash.MakeSeed()
	eachKey(b, func(key string) {
		s := &shards[maphash.String(seed, key)%uint64(len(shards))]
		s.Lock()
		l := s.limiters[key]
		if l == nil {
			l = rate.NewLimiter(1000, 1000)
			s.limiters[key] = l
		}
		s.Unlock()
		l.Allow()
	})
}

// eachKey measures questions about one key, and about any of a million.
func eachKey(b *testing.B, ask func(key string)) {
	for _, keys := range []int{1, 1_000_000} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			names := make([]string, keys)
			for i := range names {
				names[i] = fmt.Sprintf("user:%012d", i)
				ask(names[i])
			}
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				random := rand.New(rand.NewPCG(1, 2))
				for pb.Next() {
					ask(names[random.IntN(keys)])
				}
			})
		})
	}
}

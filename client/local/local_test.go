package local

import (
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"sync"
	"sync/atomic"
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
  - {name: queue, algorithm: leaky_bucket, limit: 100, window: 1s, capacity: 3}
  - {name: jobs, algorithm: concurrency, limit: 1, ttl: 1m}
`

func open(t *testing.T) *client.Client {
	t.Helper()
	set := must.Value(policy.Parse("test.yaml", []byte(localPolicies)))(t)
	testkit.NoLeaks(t, "weir/limiter.", "weir/client.")
	c := New(set)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// New decides by the rules that nodes go by.
func TestDecides(t *testing.T) {
	ctx := t.Context()
	c := open(t)

	var admitted atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 10 {
				d, err := c.Policy("login").Allow(ctx, "alice")
				expect.NoError(t, err)
				admitted.Add(d.Granted)
			}
		})
	}
	wg.Wait()
	expect.Equal(t, admitted.Load(), 5, "admitted")
	d, err := c.Policy("login").Allow(ctx, "alice")
	expect.True(t, err == nil && !d.Allowed && d.RetryAfter > 0 && d.RetryAfter <= time.Minute && d.Limit == 5,
		"%+v, %v", d, err)
	n, err := c.Policy("login").Refund(ctx, "alice", 2)
	expect.True(t, n == 2 && err == nil, "Refund = %d, %v", n, err)
	d, err = c.Policy("login").AllowN(ctx, "alice", 6)
	expect.True(t, err == nil && !d.Allowed && d.RetryAfter == client.Never, "%+v, %v", d, err)
	_, err = c.Policy("login").WaitN(ctx, "alice", 6)
	expect.True(t, errors.Is(err, client.ErrNever), "WaitN of more than the limit: %v", err)

	start := time.Now()
	for range 4 {
		_, err := c.Policy("queue").Wait(ctx, "x")
		expect.NoError(t, err)
	}
	took := time.Since(start)
	expect.True(t, took >= 30*time.Millisecond, "4 took %v at one every 10 ms", took)

	l, d, err := c.Policy("jobs").Acquire(ctx, "x")
	must.True(t, err == nil && l != nil && d.Allowed && d.Window == time.Minute, "%v, %+v, %v", l, d, err)
	if l, _, err := c.Policy("jobs").Acquire(ctx, "x"); l != nil || err != nil {
		t.Errorf("second lease %v, %v", l, err)
	}
	expect.NoError(t, l.Release())

	d, err = c.Inline("", algo.Limit{Algorithm: algo.TokenBucket, Limit: 1, Window: time.Hour}).Allow(ctx, "x")
	expect.True(t, err == nil && d.Allowed, "%+v, %v", d, err)
	_, err = c.Inline("", algo.Limit{Algorithm: algo.TokenBucket, Limit: 1}).Allow(ctx, "x")
	expect.ErrorIs(t, err, client.ErrInvalid, "no window")
	_, err = c.Policy("jobs").Allow(ctx, "x")
	expect.ErrorIs(t, err, client.ErrInvalid, "Allow of a concurrency policy")
	_, err = c.Policy("none").Allow(ctx, "x")
	expect.ErrorIs(t, err, client.ErrNotFound, "unknown policy")
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

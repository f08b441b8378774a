package local

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/testkit"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/policy"
)

const localPolicies = `
policies:
  - {name: login, algorithm: sliding_log, limit: 5, window: 1m}
  - {name: queue, algorithm: leaky_bucket, limit: 100, window: 1s, capacity: 3}
  - {name: jobs, algorithm: concurrency, limit: 1, ttl: 1m}
`

func open(t *testing.T) *client.Client {
	t.Helper()
	set, err := policy.Parse("test.yaml", []byte(localPolicies))
	if err != nil {
		t.Fatal(err)
	}
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
				if err != nil {
					t.Error(err)
				}
				admitted.Add(d.Granted)
			}
		})
	}
	wg.Wait()
	if n := admitted.Load(); n != 5 {
		t.Errorf("%d admitted, want 5", n)
	}
	if d, err := c.Policy("login").Allow(ctx, "alice"); err != nil || d.Allowed || d.RetryAfter <= 0 || d.RetryAfter > time.Minute || d.Limit != 5 {
		t.Errorf("%+v, %v", d, err)
	}
	if n, err := c.Policy("login").Refund(ctx, "alice", 2); n != 2 || err != nil {
		t.Errorf("Refund = %d, %v", n, err)
	}
	if d, err := c.Policy("login").AllowN(ctx, "alice", 6); err != nil || d.Allowed || d.RetryAfter != client.Never {
		t.Errorf("%+v, %v", d, err)
	}
	if _, err := c.Policy("login").WaitN(ctx, "alice", 6); !errors.Is(err, client.ErrNever) {
		t.Errorf("WaitN of more than the limit: %v", err)
	}

	start := time.Now()
	for range 4 {
		if _, err := c.Policy("queue").Wait(ctx, "x"); err != nil {
			t.Error(err)
		}
	}
	if took := time.Since(start); took < 30*time.Millisecond {
		t.Errorf("4 took %v at one every 10 ms", took)
	}

	l, d, err := c.Policy("jobs").Acquire(ctx, "x")
	if err != nil || l == nil || !d.Allowed || d.Window != time.Minute {
		t.Fatalf("%v, %+v, %v", l, d, err)
	}
	if l, _, err := c.Policy("jobs").Acquire(ctx, "x"); l != nil || err != nil {
		t.Errorf("second lease %v, %v", l, err)
	}
	if err := l.Release(); err != nil {
		t.Error(err)
	}

	if d, err := c.Inline("", algo.Limit{Algorithm: algo.TokenBucket, Limit: 1, Window: time.Hour}).Allow(ctx, "x"); err != nil || !d.Allowed {
		t.Errorf("%+v, %v", d, err)
	}
	if _, err := c.Inline("", algo.Limit{Algorithm: algo.TokenBucket, Limit: 1}).Allow(ctx, "x"); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("no window: %v", err)
	}
	if _, err := c.Policy("jobs").Allow(ctx, "x"); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("Allow of a concurrency policy: %v", err)
	}
	if _, err := c.Policy("none").Allow(ctx, "x"); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("unknown policy: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

func TestWithoutPolicies(t *testing.T) {
	c := New(nil)
	defer c.Close()
	if _, err := c.Policy("login").Allow(t.Context(), "alice"); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("got %v", err)
	}
}

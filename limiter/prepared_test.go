package limiter

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// A prepared handle answers and counts as CheckTo does, whatever it is asked; and says nothing, and has done nothing,
// where it does not.
func TestPrepared(t *testing.T) {
	const before = `policies:
  - {name: bucket, algorithm: token_bucket, limit: 5, capacity: 7, window: 1s}
  - {name: queue, algorithm: leaky_bucket, limit: 5, window: 1s}
  - {name: fixed, algorithm: fixed_window, limit: 5, window: 1s}
  - {name: log, algorithm: sliding_log, limit: 5, window: 1s, count_denied: true}
  - {name: slots, algorithm: sliding_window, limit: 5, window: 1s}
  - {name: day, algorithm: fixed_window, limit: 50, align: calendar, window: day}
  - {name: shadow, algorithm: token_bucket, limit: 5, window: 1s, shadow: true}
  - {name: over, algorithm: token_bucket, limit: 5, window: 1s, overrides: [{key: a, unlimited: true}, {key: b, blocked: true}, {prefix: c, limit: 9}]}
  - {name: two, limits: [5/1s, 20/1m]}
  - {name: escrow, algorithm: fixed_window, limit: 5, window: 1s, durability: escrow}
  - {name: leases, algorithm: concurrency, limit: 5, ttl: 1s}
`
	const after = `policies:
  - {name: bucket, algorithm: token_bucket, limit: 3, window: 1s}
  - {name: queue, algorithm: fixed_window, limit: 5, window: 1s}
  - {name: late, algorithm: fixed_window, limit: 5, window: 1s}
`
	var now atomic.Int64
	clock := func() algo.Instant { return algo.Instant{Mono: now.Load(), Wall: now.Load()} }
	brief, full := New(Config{Clock: clock, Policies: policies(t, before)}),
		New(Config{Clock: clock, Policies: policies(t, before)})
	defer brief.Close()
	defer full.Close()
	over, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
	defer cancel()

	targets := []limit.Target{{Policy: "unknown"}, {Policy: "not a name"}, {}, {Policy: "late"}}
	for _, name := range []string{"bucket", "queue", "fixed", "log", "slots", "day", "shadow", "over", "two", "escrow",
		"leases"} {
		targets = append(targets, limit.Target{Policy: name})
	}
	for _, l := range []algo.Limit{
		{Algorithm: algo.TokenBucket, Limit: 4, Window: time.Second},
		{Algorithm: algo.TokenBucket, Limit: algo.Unlimited},
		{Algorithm: algo.Concurrency, Limit: 4, Window: time.Second},
		{Algorithm: algo.TokenBucket},
	} {
		targets = append(targets, limit.Target{Limit: &l, Namespace: "n"})
	}
	handles := make([]limit.Prepared, len(targets))
	keys := []string{"a", "b", "c1", "d", "user:0000000017", "", "\xff"}
	r := rand.New(rand.NewPCG(3, 4))
	briefly := 0
	for step := range 20_000 {
		if step == 10_000 {
			// all states are idle: which of them are brought under the new policies first makes no difference
			now.Add(int64(48 * time.Hour))
			brief.SetPolicies(policies(t, after))
			full.SetPolicies(policies(t, after))
		}
		now.Add(int64(r.IntN(50)) * int64(time.Millisecond))
		i := r.IntN(len(targets))
		c := limit.Check{Target: targets[i], Cost: int64(r.IntN(4) - r.IntN(50)/49)}
		c.Key = keys[r.IntN(len(keys))]
		ctx := t.Context()
		if r.IntN(50) == 0 {
			ctx = over
		}
		want, wantErr := full.Check(ctx, []limit.Check{c})
		var b limit.Brief
		answered := false
		if handles[i] != nil {
			b, answered = handles[i].Check(ctx, c.Key, c.Cost)
		}
		if answered {
			handles[i].Count(b, c.Cost)
			briefly++
			got := limit.Decision{
				Policy: c.Policy, Allowed: b.Allowed, Granted: b.Granted, Limit: b.Limit, Window: b.Window,
				Remaining:  b.Remaining,
				RetryAfter: b.RetryAfter, ResetAfter: b.ResetAfter, Delay: b.Delay, Shadow: b.Shadow,
			}
			if c.Limit != nil {
				got.Policy = "inline"
			}
			must.True(t, wantErr == nil && want[0].Err == nil,
				"step %d: %+v: %+v, want %v, %v", step, c, got, want, wantErr)
			want[0].RememberFor = 0 // which a limit.Brief does not tell
			must.True(t, reflect.DeepEqual(got, want[0].Decision),
				"step %d: %+v:\n%+v, want\n%+v", step, c, got, want[0].Decision)
			continue
		}
		got, err := brief.Check(ctx, []limit.Check{c})
		must.Equal(t, fmt.Sprint(got, err), fmt.Sprint(want, wantErr),
			"step %d: %+v:\n%v, %v, want\n%v, %v", step, c, got, err, want, wantErr)
		handles[i] = brief.Prepare(&c.Target, handles[i])
	}
	expect.True(t, briefly >= 3000, "only %d of the checks were brief ones", briefly)
	byName := func(all []PolicyStats) map[string]PolicyStats {
		m := map[string]PolicyStats{}
		for _, s := range all {
			m[s.Policy] = s
		}
		return m
	}
	got, want := byName(brief.ReadStats()), byName(full.ReadStats())
	expect.True(t, reflect.DeepEqual(got, want), "counted\n%+v, want\n%+v", got, want)
	if got, want := brief.Load(), full.Load(); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

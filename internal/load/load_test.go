package load

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func config(ask Asker) Config {
	return Config{
		Askers: []Asker{ask}, Keys: Keys{Distribution: Uniform, Prefix: "k-", Count: 10}, Concurrency: 4,
		Duration: 10 * time.Second, Count: 50_000_000, Timeout: time.Second, Cost: 1,
	}
}

// TestOpenLoop: checks go out at even distances whatever the answers take, and a stall delays all that were due
// meanwhile.
func TestOpenLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		cfg := config(func(ctx context.Context, _ string) (Answer, error) {
			if at := time.Since(start); at >= 4*time.Second && at < 6*time.Second {
				time.Sleep(6*time.Second - at) // a cluster that stalls
			}
			return Answer{Allowed: true}, nil
		})
		cfg.Rate, cfg.Concurrency, cfg.Timeout = 100, 4, 5*time.Second
		r := must.Value(Run(t.Context(), cfg))(t)
		expect.True(t, r.Checks == 1000 && r.Admitted == 1000 && r.Unsent == 0 && r.Errors == 0, "%+v", r)
		// Of 1000 checks, 200 were due in the stall, the first of them 2 s before its end, at even distances.
		expect.True(t, r.Latency.P50 == 1 && near(r.Latency.P90, time.Second) && near(r.Latency.Max, 2*time.Second) &&
			near(r.Latency.P99, 1900*time.Millisecond), "latencies %+v", r.Latency)
	})
}

// near is equal to three significant digits, which is what the histogram keeps, and one check.
func near(got, want time.Duration) bool {
	return got >= want-want/500-10*time.Millisecond && got <= want+want/500+10*time.Millisecond
}

// TestUnsent: what an open loop cannot send, as all workers wait, is counted and not forgotten.
func TestUnsent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(func(ctx context.Context, _ string) (Answer, error) {
			time.Sleep(time.Second)
			return Answer{}, nil
		})
		cfg.Rate, cfg.Concurrency, cfg.Timeout = 10, 2, 2*time.Second
		r, err := Run(t.Context(), cfg)
		expect.True(t, err == nil && r.Checks+r.Unsent == 100 && r.Refused == r.Checks && r.Checks >= 20 &&
			r.Checks <= 26, "%+v, %v", r, err)
	})
}

// TestClosedLoop: as many checks as there are workers are in flight, for as long or as many as is said.
func TestClosedLoop(t *testing.T) {
	for _, c := range []struct {
		duration     time.Duration
		count, wants int64
	}{{10 * time.Second, 50_000_000, 400}, {10 * time.Second, 99, 99}} {
		synctest.Test(t, func(t *testing.T) {
			var under, most atomic.Int64
			cfg := config(func(context.Context, string) (Answer, error) {
				if n := under.Add(1); n > most.Load() {
					most.Store(n)
				}
				time.Sleep(100 * time.Millisecond)
				under.Add(-1)
				return Answer{FailedClosed: true}, nil
			})
			cfg.Duration, cfg.Count = c.duration, c.count
			r, err := Run(t.Context(), cfg)
			expect.True(t, err == nil && r.Checks == c.wants && r.FailedClosed == c.wants && r.Refused == c.wants &&
				most.Load() == 4, "%+v, %v, %d in flight", r, err, most.Load())
			expect.True(t, near(r.Latency.Min, 100*time.Millisecond) && near(r.Latency.Max, 100*time.Millisecond),
				"latencies %+v", r.Latency)
		})
	}
}

// TestErrorsAndEnd: what gets no decision in time is an error, and the end of a run is none.
func TestErrorsAndEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(func(ctx context.Context, _ string) (Answer, error) {
			<-ctx.Done()
			return Answer{}, ctx.Err()
		})
		cfg.Concurrency = 1
		r, err := Run(t.Context(), cfg)
		expect.True(t, err == nil && r.Errors == 10 && r.Checks == 10 && r.Rate == 0 &&
			strings.Contains(r.FirstError, "deadline") && r.Latency.Max == 0, "%+v, %v", r, err)
		ctx, cancel := context.WithTimeout(t.Context(), 4500*time.Millisecond)
		defer cancel()
		r, err = Run(ctx, cfg)
		expect.True(t, err == nil && r.Errors == 4 && r.Checks == 4, "cut short: %+v, %v", r, err)
	})
}

// TestVerdict: a limiter that keeps its limit is not blamed, one that admits a unit too many is.
func TestVerdict(t *testing.T) {
	for excess := range 2 {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			log := make(map[string][]time.Time)
			cfg := config(func(_ context.Context, key string) (Answer, error) {
				time.Sleep(time.Duration(rand.IntN(5)) * time.Millisecond)
				mu.Lock()
				defer mu.Unlock()
				var kept []time.Time
				for _, at := range log[key] {
					if time.Since(at) < 2*time.Second {
						kept = append(kept, at)
					}
				}
				allowed := len(kept) < 20+excess
				if allowed {
					kept = append(kept, time.Now())
				}
				log[key] = kept
				return Answer{Allowed: allowed}, nil
			})
			cfg.Rate, cfg.Cost, cfg.Bound = 1000, 3, &Bound{Units: 60, Window: 2 * time.Second}
			r, err := Run(t.Context(), cfg)
			expect.True(t, err == nil && r.Verdict.Holds == (excess == 0) && r.Verdict.Most == int64(20+excess)*3 &&
				strings.HasPrefix(r.Verdict.Key, "k-"), "excess %d: %+v, %v", excess, r.Verdict, err)
		})
	}
}

// TestMost compares with the definition: for each moment at which something was sent, count.
func TestMost(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		b := Bound{Window: time.Duration(1 + r.IntN(3000))}
		window := b.Window - b.Window/driftParts
		list := make([]admission, r.IntN(30))
		for i := range list {
			sent := time.Duration(r.IntN(200) * r.IntN(20))
			list[i] = admission{sent: sent, answered: sent + time.Duration(r.IntN(2)*r.IntN(2000))}
		}
		var want int64
		for _, from := range list {
			var n int64
			for _, a := range list {
				if a.sent >= from.sent && a.answered < from.sent+window {
					n++
				}
			}
			want = max(want, n)
		}
		slices.SortFunc(list, func(a, b admission) int { return int(a.sent - b.sent) })
		must.Equal(t, b.most(list), want, "%+v within %v", list, window)
	}
}

// TestKeys: the shares of the keys are those of their distributions, and the same for the same seed.
func TestKeys(t *testing.T) {
	const draws = 100_000
	for _, c := range []struct {
		keys  Keys
		first float64 // share of the first key
	}{
		{Keys{Distribution: Uniform, Count: 10, Seed: 7}, 0.1},
		{Keys{Distribution: Hot, Count: 10, Seed: 7}, 0.9},
		{Keys{Distribution: Hot, Count: 1}, 1},
		{Keys{Distribution: Zipf, Skew: 2, Count: 1000, Seed: 7}, 1 / 1.6439}, // 1 / sum of k^-2
	} {
		p, again := c.keys.picker(), c.keys.picker()
		counts := make([]int, c.keys.Count)
		for n := range uint64(draws) {
			key := p.pick(n)
			counts[key]++
			must.True(t, n%1000 != 0 || again.pick(n) == key,
				"%+v: check %d has another key the second time", c.keys, n)
		}
		if share := float64(counts[0]) / draws; share < c.first-0.01 || share > c.first+0.01 {
			t.Errorf("%+v: the first key has %.3f, want %.3f", c.keys, share, c.first)
		}
	}
}

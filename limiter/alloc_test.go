//go:build !race

package limiter

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
)

// What this node decides by itself takes no memory: admitted or refused, one check or many, of a policy or a limit sent
// along.
func TestNoAllocations(t *testing.T) {
	l := started(t, Config{Policies: policies(t, `policies:
  - {name: bucket, algorithm: token_bucket, limit: 1000, window: 1s}
  - {name: log, algorithm: sliding_log, limit: 5, window: 1h}
  - {name: over, algorithm: fixed_window, limit: 5, window: 1h, overrides: [{prefix: "partner:", limit: 7}]}
  - {name: warned, algorithm: fixed_window, limit: 5, window: 1h, warn_at: 0.8}
  - {name: banned, algorithm: sliding_log, limit: 5, window: 1h, ban: 1h}
`)})
	inline := algo.Limit{Algorithm: algo.LeakyBucket, Limit: 3, Window: time.Minute}
	var batch []limit.Check
	for _, key := range keys[:100] {
		batch = append(batch, named("bucket", key, 1))
	}
	for name, checks := range map[string][]limit.Check{
		"bucket":   {named("bucket", "k", 1)},
		"log":      {named("log", "k", 1)},
		"peek":     {named("log", "peeked", 1), named("log", "peeked", 0)}, // of a state that is there
		"override": {named("over", "partner:k", 1)},
		"inline":   {{Target: limit.Target{Limit: &inline, Key: "k"}, Cost: 1}},
		"warned":   {named("warned", "k", 1)},
		"banned":   {named("banned", "k", 1)},
		"batch":    batch,
	} {
		t.Run(name, func(t *testing.T) {
			results := make([]limit.Result, len(checks))
			decide := func() {
				if err := l.CheckTo(t.Context(), checks, nil, results); err != nil || results[0].Err != nil {
					t.Fatal(err, results[0].Err)
				}
			}
			for range 100 {
				decide() // until the states are there
			}
			// A collection in between empties the pool that batches use.
			n := testing.AllocsPerRun(1000, decide)
			expect.True(t, n <= 0, "%v allocations", n)
		})
	}
}

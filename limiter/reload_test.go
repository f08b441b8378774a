package limiter

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
)

// TestReloadFailsNothing has three nodes take in another policy file every few milliseconds, one after the other, while
// checks go through all of them: whatever a check meets, it is decided by its owner and never answered by on_error.
func TestReloadFailsNothing(t *testing.T) {
	const log = "algorithm: sliding_log, on_error: closed, "
	files := []string{
		"policies: [{name: p, " + log + "limit: 1000, window: 1m}]",
		"policies: [{name: p, " + log + "limit: 10, window: 1m}, {name: q, " + log + "limit: 1, window: 1s}]",
		"policies: [{name: p, algorithm: token_bucket, on_error: closed, limit: 500, window: 1m}]",
		"policies: [{name: p, " + log + "limits: [{limit: 100, window: 1s}, {limit: 2000, window: 1m}]}]",
	}
	inBubble(t, 3, Config{}, func(t *testing.T, c *testCluster) {
		c.setPolicies(files[0])
		var asked atomic.Int64
		var work sync.WaitGroup
		end := time.Now().Add(3 * time.Second)
		for i := range 12 {
			work.Go(func() {
				for n := i; time.Now().Before(end); n++ {
					checks := []limit.Check{{Target: onPolicy("p", fmt.Sprintf("key-%d", n%50)), Cost: 1}}
					answers, err := c.nodes[n%3].Check(t.Context(), checks)
					if err != nil || answers[0].Err != nil || answers[0].Decision.FailedClosed ||
						answers[0].Decision.FailedOpen {
						t.Errorf("after %d checks: %+v, %v", asked.Load(), answers, err)
						return
					}
					asked.Add(1)
					time.Sleep(time.Millisecond)
					c.advance(time.Microsecond)
				}
			})
		}
		for n := 0; time.Now().Before(end); n++ {
			c.nodes[n%3].SetPolicies(policies(t, files[n/3%len(files)]))
			time.Sleep(7 * time.Millisecond)
		}
		work.Wait()
		expect.True(t, asked.Load() >= 10_000, "%d checks are too few to tell anything", asked.Load())
	})
}

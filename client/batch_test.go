package client

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/testkit"
)

const batchPolicies = `policies:
  - {name: hot, algorithm: sliding_log, limit: 100000, window: 1h}
  - {name: many, limits: [{algorithm: sliding_log, limit: 100000, window: 1h}, {algorithm: token_bucket, limit: 150000, window: 1h, capacity: 200000}]}
  - {name: cold, algorithm: sliding_log, limit: 1000000, window: 1h, lend: false}
`

// TestBatchesFromLoans has clients use up keys by batches, with several limits, in part and all or none: each is admitted as often as its limit says, but
// for what TestLoans says is lost without CPU, and nearly all without asking.
func TestBatchesFromLoans(t *testing.T) {
	const most = 100_000
	for _, test := range []struct {
		name string
		keys []limit.Target
		// ask returns how many units of each key were admitted; all is set when there is none left.
		ask func(c *Client, worker int) (units []int64, over bool, err error)
	}{
		{
			"batch", []limit.Target{{Policy: "hot", Key: "a"}, {Policy: "many", Key: "b"}},
			func(c *Client, worker int) ([]int64, bool, error) {
				got, err := c.Check(t.Context(), []Check{
					{Policy: "hot", Key: "a", Cost: 2}, {Policy: "cold", Key: fmt.Sprint(worker)}, {Policy: "many", Key: "b", Cost: 3, Partial: true}, {Policy: "hot", Key: "a"},
				})
				if err != nil {
					return nil, false, err
				}
				for i := range got {
					if d := &got[i]; d.Err != nil || d.FailedOpen || d.FailedClosed || d.Policy == "many" && len(d.Limits) != 2 {
						return nil, false, fmt.Errorf("%+v", d)
					}
				}
				return []int64{got[0].Granted + got[3].Granted, got[2].Granted}, !got[2].Allowed && !got[3].Allowed, nil
			},
		},
		{
			"all or none", []limit.Target{{Policy: "hot", Key: "c"}, {Policy: "many", Key: "d"}},
			func(c *Client, worker int) ([]int64, bool, error) {
				got, err := c.All(t.Context(), []Check{{Policy: "hot", Key: "c", Cost: 2}, {Policy: "many", Key: "d"}, {Policy: "many", Key: "d"}})
				if err != nil {
					return nil, false, err
				}
				for _, d := range got.Decisions {
					if d.FailedOpen || d.FailedClosed || got.Allowed != (d.Granted > 0) {
						return nil, false, fmt.Errorf("%+v", got)
					}
				}
				return []int64{got.Decisions[0].Granted, got.Decisions[1].Granted + got.Decisions[2].Granted}, !got.Allowed, nil
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, first := newCluster(t, 3, batchPolicies)
			second := another(t, c.addrs[1])
			asker := another(t, c.addrs[0], WithoutLoans(), WithoutMemory())
			for _, other := range []*Client{second, asker} {
				reaches(t, other, c.addrs...)
			}
			var units [2]atomic.Int64
			spend := func(c *Client, workers int) {
				var asking sync.WaitGroup
				defer asking.Wait()
				for worker := range workers {
					asking.Go(func() {
						for t.Context().Err() == nil {
							got, over, err := test.ask(c, worker)
							if err != nil {
								t.Error(err)
								return
							}
							for i, n := range got {
								units[i].Add(n)
							}
							if over {
								return
							}
						}
					})
				}
			}
			var both sync.WaitGroup
			both.Go(func() { spend(first, 8) })
			both.Go(func() { spend(second, 8) })
			both.Wait()
			asked := c.decided("hot") + c.decided("many")
			t.Logf("nodes were asked %d times", asked)
			// What was refused in haste, because some borrower was slow to answer, is there when all has been returned.
			// But for what nobody can have: where there is no CPU to spare units are taken after their loan's end, and loans end before they are
			// returned.
			count := func() (n, late, expired int64) {
				late, expired = c.lost(first, second)
				return units[0].Load() + units[1].Load(), late, expired
			}
			n, late, expired := count()
			for until := time.Now().Add(testkit.Patience); n+late < 2*most && !t.Failed() && time.Now().Before(until); n, late, expired = count() {
				spend(asker, 1)
			}
			expect.True(t, n+late+expired >= 2*most, "%d were admitted of %d, %d taken too late, %d at most in loans that have ended", n, 2*most, late, expired)
			for i, of := range test.keys {
				d, err := asker.Policy(of.Policy).Peek(t.Context(), of.Key)
				if n := units[i].Load(); n > most || err != nil || d.Remaining != 0 {
					t.Errorf("%v: %d were admitted of %d; %+v, %v", of, n, most, d, err)
				}
			}
			expect.True(t, asked <= most/4, "nodes were asked %d times", asked)
		})
	}
}

package clustertest

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// traffic is checks of many keys that go on until stop is called. Every answer must be a decision, and come soon.
type traffic struct {
	answered, failedOpen atomic.Int64
	slowest              atomic.Int64 // nanoseconds
	quit                 chan struct{}
	work                 sync.WaitGroup
}

func startTraffic(t *testing.T, nodes []*process) *traffic {
	tr := &traffic{quit: make(chan struct{})}
	for _, p := range nodes {
		for w := range 4 {
			tr.work.Go(func() {
				for i := 0; ; i++ {
					select {
					case <-tr.quit:
						return
					default:
					}
					asked := time.Now()
					d, err := p.check(fmt.Sprintf(`{"policy":"sliding_log","key":"key-%d-%d"}`, w, i%50))
					if err != nil {
						t.Errorf("after %v: %v", time.Since(asked), err)
						return
					}
					tr.answered.Add(1)
					if d.FailedOpen {
						tr.failedOpen.Add(1)
					}
					tr.slowest.Store(max(tr.slowest.Load(), int64(time.Since(asked)))) // nearly: it is only shown and bounded
				}
			})
		}
	}
	return tr
}

// goesOn waits until so many more checks have been answered.
func (tr *traffic) goesOn(t *testing.T, more int64) {
	t.Helper()
	target := tr.answered.Load() + more
	eventually(t, waitTimeout, fmt.Sprintf("%d more checks are answered", more), func() bool {
		return t.Failed() || tr.answered.Load() >= target
	})
}

// stop ends the traffic and fails when an answer took longer than it may on a quiet machine.
func (tr *traffic) stop(t *testing.T, limit time.Duration) {
	t.Helper()
	close(tr.quit)
	tr.work.Wait()
	slowest := time.Duration(tr.slowest.Load())
	t.Logf("%d checks answered, %d of them by on_error, the slowest after %v", tr.answered.Load(), tr.failedOpen.Load(), slowest.Round(time.Millisecond))
	expect.True(t, !*quiet || slowest <= limit, "a check took %v, more than %v", slowest, limit)
}

// ownEverything waits until the given nodes, and no others, are members, and own all partitions between them.
func ownEverything(t *testing.T, nodes []*process) {
	t.Helper()
	for _, p := range nodes {
		took := eventually(t, waitTimeout, p.name+" sees only those that are left", func() bool {
			st := p.status()
			owned := 0
			for _, m := range st.Members {
				owned += m.Partitions
			}
			return len(st.Members) == len(nodes) && owned == 4093
		})
		t.Logf("%s sees only those that are left after %v", p.name, took.Round(time.Millisecond))
	}
}

// TestNodeLeaves: a node is told to end while checks run on the others, which must not notice more than a moment.
func TestNodeLeaves(t *testing.T) {
	nodes := startCluster(t, 3, "--policies", writeFile(t, "policies.yaml", exactPolicies), "--grace", "1m")
	rest := nodes[:2]
	tr := startTraffic(t, rest)
	tr.goesOn(t, 200)
	asked := time.Now()
	nodes[2].terminate()
	t.Logf("%s ended %v after SIGTERM", nodes[2].name, time.Since(asked).Round(time.Millisecond))
	ownEverything(t, rest)
	tr.goesOn(t, 200)
	tr.stop(t, 2*time.Second)
	n := tr.failedOpen.Load()
	expect.True(t, n <= 0, "%d checks were answered by on_error although the node left in good order", n)
}

// TestNodeDies: a node is killed while checks run on the others. Until they know, checks of its keys are answered by
// on_error, within the time that checks may take.
func TestNodeDies(t *testing.T) {
	nodes := startCluster(t, 3, "--policies", writeFile(t, "policies.yaml", exactPolicies), "--timeout", "1s")
	rest := nodes[:2]
	tr := startTraffic(t, rest)
	tr.goesOn(t, 200)
	nodes[2].signal(syscall.SIGKILL)
	nodes[2].exit(stopTimeout)
	ownEverything(t, rest)
	tr.goesOn(t, 200)
	tr.stop(t, 5*time.Second)
	before := tr.failedOpen.Load()
	for i := range 100 {
		for _, p := range rest {
			d, err := p.check(fmt.Sprintf(`{"policy":"sliding_log","key":"after-%d"}`, i))
			must.True(t, err == nil && !d.FailedOpen,
				"after the others know: %+v, %v (%d answered by on_error before)", d, err, before)
		}
	}
}

package clustertest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/client"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// Every limit here is 100. A token bucket's is for a day: a minute's worth would rightly refill while the test runs.
const exactPolicies = `
policies:
  - {name: sliding_log, algorithm: sliding_log, limit: 100, window: 1m}
  - {name: sliding_window, algorithm: sliding_window, limit: 100, window: 1m}
  - {name: fixed_window, algorithm: fixed_window, limit: 100, window: 1m}
  - {name: token_bucket, algorithm: token_bucket, limit: 100, window: 24h}
`

var exactAlgorithms = []string{"sliding_log", "sliding_window", "fixed_window", "token_bucket"}

// An asker is one way to ask about a key. An answer that is not a decision of the key's owner is an error.
type asker func(ctx context.Context, key string) (allowed bool, err error)

var errFailedOpen = errors.New("answered by on_error")

func httpAsker(p *process, target string) asker {
	return func(_ context.Context, key string) (bool, error) {
		d, err := p.check(fmt.Sprintf(`{%s,"key":%q}`, target, key))
		if err == nil && d.FailedOpen {
			err = errFailedOpen
		}
		return d.Allowed, err
	}
}

func grpcAsker(c weirv1.LimiterClient, target *weirv1.Target) asker {
	return func(ctx context.Context, key string) (bool, error) {
		t := &weirv1.Target{Policy: target.Policy, Limit: target.Limit, Key: key}
		r, err := c.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: t}}})
		if err != nil {
			return false, err
		}
		d := r.Results[0].GetDecision()
		if d.FailedOpen {
			return false, errFailedOpen
		}
		return d.Allowed, nil
	}
}

func clientAsker(l *client.Limiter) asker {
	return func(ctx context.Context, key string) (bool, error) {
		d, err := l.Allow(ctx, key)
		if err == nil && d.FailedOpen {
			err = errFailedOpen
		}
		return d.Allowed, err
	}
}

func commandAsker(t *testing.T, p *process, flags ...string) asker {
	return func(_ context.Context, key string) (bool, error) {
		code, out, errs := weir(t, append([]string{"check", key, "--addr", p.grpc, "--timeout", "20s"}, flags...)...)
		if code > 1 || strings.Contains(out, "failed_open") {
			return false, fmt.Errorf("weir check: exit status %d: %s%s", code, out, errs)
		}
		return code == 0, nil
	}
}

// ask sends count checks of each key through the askers in turn, all keys at once, and returns how many were allowed of
// each. It fails when that took so long that a window of a minute may have moved on.
func ask(t *testing.T, keys []string, count int, askers []asker) map[string]int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const workers = 300 // the race detector does not take more than 8128 goroutines
	type job struct {
		key   int
		asker asker
	}
	jobs := make(chan job)
	allowed := make([]atomic.Int64, len(keys))
	var failed atomic.Int64
	var work sync.WaitGroup
	for range workers {
		work.Go(func() {
			for j := range jobs {
				ok, err := j.asker(ctx, keys[j.key])
				switch {
				case err != nil && failed.Add(1) <= 3:
					t.Errorf("%s: %v", keys[j.key], err)
				case ok:
					allowed[j.key].Add(1)
				}
			}
		})
	}
	start := time.Now()
	for i := range count {
		for k := range keys {
			jobs <- job{k, askers[(i+k)%len(askers)]}
		}
	}
	close(jobs)
	work.Wait()
	took := time.Since(start)
	n := failed.Load()
	expect.True(t, n <= 3, "and %d more failures", n-3)
	must.True(t, took <= 50*time.Second,
		"%d checks took %v: this machine is too slow to tell about a window of a minute", len(keys)*count, took)
	t.Logf("%d checks of %d keys in %v", len(keys)*count, len(keys), took.Round(time.Millisecond))
	out := make(map[string]int)
	for k, key := range keys {
		out[key] = int(allowed[k].Load())
	}
	return out
}

func keysNamed(prefix string, n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("%s-%d", prefix, i)
	}
	return keys
}

func wantEach(t *testing.T, got map[string]int, want int) {
	t.Helper()
	for key, n := range got {
		expect.True(t, n == want, "%s: %d checks allowed, want exactly %d", key, n, want)
	}
}

// TestExactOverHTTP is the promise of the README: 300 concurrent checks of a limit of 100, spread over three nodes, are
// 100 admissions and 200 refusals, for 50 keys at once.
func TestExactOverHTTP(t *testing.T) {
	needsTime(t)
	t.Parallel()
	nodes := startCluster(t, 3, "--policies", testkit.WriteFile(t, "policies.yaml", exactPolicies))
	for _, name := range exactAlgorithms {
		t.Run(name, func(t *testing.T) {
			var askers []asker
			for _, p := range nodes {
				askers = append(askers, httpAsker(p, fmt.Sprintf(`"policy":%q`, name)))
			}
			count := 50
			if raceEnabled && name != "sliding_log" {
				count = 15 // a tenth of the speed; the plain build asks in full
			}
			wantEach(t, ask(t, keysNamed("key", count), 300, askers), 100)
		})
	}
}

// TestExactOverAllProtocols mixes HTTP, gRPC, the Go client and the command line on the same keys, by policies and by
// limits sent along.
func TestExactOverAllProtocols(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3, "--policies", testkit.WriteFile(t, "policies.yaml", exactPolicies))
	var grpcs []weirv1.LimiterClient
	var addrs []string
	for _, p := range nodes {
		grpcs = append(grpcs, p.dial())
		addrs = append(addrs, p.grpc)
	}
	c := must.Value(client.Dial(t.Context(), strings.Join(addrs, ","), client.WithTimeout(30*time.Second)))(t)
	t.Cleanup(func() { c.Close() })

	// mixed asks in all ways. The command line, dear as it is, asks about each key once through each node.
	mixed := func(t *testing.T, keys []string, quick, commands []asker) {
		first := ask(t, keys, len(commands), commands)
		wantEach(t, first, len(commands))
		rest := ask(t, keys, 300-len(commands), quick)
		wantEach(t, rest, 100-len(commands))
		for key, n := range ask(t, keys[:1], 1, commands) {
			expect.Equal(t, n, 0, "%s: weir check is allowed beyond the limit", key)
		}
	}
	for _, name := range exactAlgorithms {
		t.Run(name, func(t *testing.T) {
			quick := []asker{clientAsker(c.Policy(name))}
			var commands []asker
			for i, p := range nodes {
				quick = append(quick, httpAsker(p, fmt.Sprintf(`"policy":%q`, name)),
					grpcAsker(grpcs[i], &weirv1.Target{Policy: name}))
				commands = append(commands, commandAsker(t, p, "--policy", name))
			}
			mixed(t, keysNamed("key", 3), quick, commands)
		})
	}
	for _, a := range []algo.Algorithm{algo.SlidingLog, algo.FixedWindow} {
		t.Run("inline "+a.String(), func(t *testing.T) {
			quick := []asker{clientAsker(c.Inline("", algo.Limit{Algorithm: a, Limit: 100, Window: time.Minute}))}
			var commands []asker
			for i, p := range nodes {
				quick = append(quick,
					httpAsker(p, fmt.Sprintf(`"limit":{"algorithm":%q,"limit":100,"window":"60s"}`, a)),
					grpcAsker(grpcs[i], &weirv1.Target{Limit: &weirv1.Limit{
						Algorithm: weirv1.Algorithm(a), Limit: 100, WindowNs: int64(time.Minute),
					}}))
				commands = append(commands, commandAsker(t, p, "--limit", "100/1m", "--algorithm", a.String()))
			}
			mixed(t, keysNamed("key", 3), quick, commands)
		})
	}
}

// traffic is checks of many keys that go on until stop is called. Every answer must be a decision, and come soon.
type traffic struct {
	answered, failedOpen atomic.Int64
	slowest              atomic.Int64 // nanoseconds
	quit                 chan struct{}
	work                 sync.WaitGroup
}

// startTraffic asks each node about keys of a policy, so many checks at a time.
func startTraffic(t *testing.T, nodes []*process, policy string, callers int) *traffic {
	tr := &traffic{quit: make(chan struct{})}
	for _, p := range nodes {
		for w := range callers {
			tr.work.Go(func() {
				for i := 0; ; i++ {
					select {
					case <-tr.quit:
						return
					default:
					}
					asked := time.Now()
					d, err := p.check(fmt.Sprintf(`{"policy":%q,"key":"key-%d-%d"}`, policy, w, i%50))
					if err != nil {
						t.Errorf("after %v: %v", time.Since(asked), err)
						return
					}
					tr.answered.Add(1)
					if d.FailedOpen {
						tr.failedOpen.Add(1)
					}
					// nearly: it is only shown and bounded
					tr.slowest.Store(max(tr.slowest.Load(), int64(time.Since(asked))))
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
	t.Logf("%d checks answered, %d of them by on_error, the slowest after %v", tr.answered.Load(), tr.failedOpen.Load(),
		slowest.Round(time.Millisecond))
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
	nodes := startCluster(t, 3, "--policies", testkit.WriteFile(t, "policies.yaml", exactPolicies), "--grace", "1m")
	rest := nodes[:2]
	tr := startTraffic(t, rest, "sliding_log", 4)
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
	nodes := startCluster(t, 3, "--policies", testkit.WriteFile(t, "policies.yaml", exactPolicies), "--timeout", "1s")
	rest := nodes[:2]
	tr := startTraffic(t, rest, "sliding_log", 4)
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

// TestBansMove: when a node leaves in good order, a banned key stays banned, long after its window has room again and
// whichever node is asked, and what a policy's candidate has counted of a key moves with the key.
func TestBansMove(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3, "--policies", testkit.WriteFile(t, "policies.yaml", `policies:
- {name: banned, algorithm: sliding_log, limit: 1, window: 10ms, ban: 1h}
- {name: tried, algorithm: sliding_log, limit: 1000, window: 1h, candidate: {algorithm: fixed_window, limit: 4, window: 1h}}
`))
	keys := keysNamed("key", 30)
	ask := func(p *process, policy, key string, cost int) decision {
		t.Helper()
		d, err := p.check(fmt.Sprintf(`{"policy":%q,"key":%q,"cost":%d}`, policy, key, cost))
		must.True(t, err == nil && !d.FailedOpen && !d.FailedClosed, "%s: %+v, %v", key, d, err)
		return d
	}
	tried := func(result string) (n float64) {
		for _, p := range nodes {
			n += p.metrics().value("weir_candidate_total", "policy", "tried", "result", result)
		}
		return n
	}
	for i, key := range keys {
		eventually(t, waitTimeout, key+" is banned", func() bool {
			ask(nodes[i%3], "banned", key, 1)
			return ask(nodes[i%3], "banned", key, 1).Banned // the second within a window
		})
		ask(nodes[0], "tried", key, 4)
		ask(nodes[1], "tried", key, 1)
	}
	expect.Equal(t, [2]float64{tried("allowed"), tried("refused")}, [2]float64{30, 30},
		"the candidate allowed and refused")
	nodes[0].terminate()
	nodes = nodes[1:]
	before := tried("refused")
	for i, key := range keys {
		d := ask(nodes[i%2], "banned", key, 1)
		expect.True(t, !d.Allowed && d.Banned && d.RetryAfterMS != nil &&
			*d.RetryAfterMS <= time.Hour.Milliseconds() && *d.RetryAfterMS >= 50*time.Minute.Milliseconds(), "%s: %+v",
			key, d)
		ask(nodes[i%2], "tried", key, 1)
	}
	expect.Equal(t, tried("refused")-before, 30,
		"keys whose limit was used up that the candidate refused after a node has left")
}

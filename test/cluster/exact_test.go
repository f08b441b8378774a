package clustertest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/client"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
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
	t.Parallel()
	nodes := startCluster(t, 3, "--policies", writeFile(t, "policies.yaml", exactPolicies))
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
	nodes := startCluster(t, 3, "--policies", writeFile(t, "policies.yaml", exactPolicies))
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
				quick = append(quick, httpAsker(p, fmt.Sprintf(`"policy":%q`, name)), grpcAsker(grpcs[i], &weirv1.Target{Policy: name}))
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

package clustertest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func limitOf(n int) string {
	return fmt.Sprintf("policies:\n  - {name: login, algorithm: sliding_log, limit: %d, window: 1m}\n", n)
}

// replace puts a file in the place of another in one step, as careful editors do.
func replace(t *testing.T, path, content string) {
	t.Helper()
	next := filepath.Join(filepath.Dir(path), "next")
	must.NoError(t, os.WriteFile(next, []byte(content), 0o600))
	must.NoError(t, os.Rename(next, path))
}

// TestReload edits the policy file of three nodes under traffic: what is right applies within a second, what is wrong
// changes nothing and is reported wherever somebody might look.
func TestReload(t *testing.T) {
	t.Parallel()
	file := writeFile(t, "policies.yaml", limitOf(1000))
	nodes := startCluster(t, 3, "--policies", file)

	stop := make(chan struct{})
	var traffic sync.WaitGroup
	var asked atomic.Int64
	for _, p := range nodes {
		traffic.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := p.check(fmt.Sprintf(`{"policy":"login","key":"traffic-%d"}`, i%100)); err != nil {
					t.Error(err)
					return
				}
				asked.Add(1)
			}
		})
	}
	defer traffic.Wait()
	defer close(stop)

	// inForce says whether every node decides by a limit, whichever owns the key and whichever is asked.
	inForce := func(limit int64) bool {
		for i := range 12 {
			for _, p := range nodes {
				if p.peek("login", fmt.Sprintf("probe-%d", i)).Limit != limit {
					return false
				}
			}
		}
		return true
	}
	applies := func(how string, limit int64) {
		t.Helper()
		before := asked.Load()
		took := eventually(t, waitTimeout, how+" applies", func() bool { return inForce(limit) })
		t.Logf("%s applied everywhere after %v, %d checks meanwhile", how, took.Round(time.Millisecond), asked.Load()-before)
	}
	refused := func(times int) {
		t.Helper()
		for _, p := range nodes {
			p.eventually(waitTimeout, fmt.Sprintf("the log tells of refusal %d", times), func() bool {
				return strings.Count(p.stderr.String(), "policy file rejected") == times
			})
			if page := p.metrics(); page.value("weir_policies_reloads_total", "result", "rejected") != float64(times) {
				t.Errorf("%s: weir_policies_reloads_total{result=rejected} is not %d", p.name, times)
			}
			code, page := p.get("/readyz")
			expect.True(t, code == 200 && strings.Contains(page, "policy file rejected: "+file+":2:50"),
				"%s: /readyz: %d %s", p.name, code, page)
			e := p.status().PoliciesError
			expect.True(t, strings.Contains(e, file+":2:50"), "%s: /v1/status: policies_error is %q", p.name, e)
			_, out, _ := weir(t, "status", "--addr", p.grpc)
			expect.True(t, strings.Contains(out, "policy file rejected: "+file+":2:50"),
				"%s: weir status: %s", p.name, out)
		}
		expect.True(t, inForce(20), "a file with a mistake changed the limit")
	}

	must.True(t, inForce(1000), "the first limit is not in force")
	replace(t, file, limitOf(10))
	applies("a file put in place of the old", 10)
	must.NoError(t, os.WriteFile(file, []byte(limitOf(20)), 0o600))
	applies("a file written over the old", 20)

	replace(t, file, limitOf(-5))
	refused(1)
	for _, p := range nodes {
		p.signal(syscall.SIGHUP) // which says once more what is wrong
	}
	refused(2)

	replace(t, file, limitOf(30))
	applies("a mended file", 30)
	for _, p := range nodes {
		eventually(t, waitTimeout, "nothing is left to report", func() bool {
			_, page := p.get("/readyz")
			return p.status().PoliciesError == "" && !strings.Contains(page, "policy file")
		})
	}
}

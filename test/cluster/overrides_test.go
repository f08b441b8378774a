package clustertest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// TestOverrides sets overrides through nodes of a real cluster: all nodes decide by them, whoever owns the key; a node
// that was killed meanwhile has them when it is ready again; of concurrent changes all nodes end up with the same one;
// and after all nodes were killed they are there again.
func TestOverrides(t *testing.T) {
	t.Parallel()
	file, dirs := testkit.WriteFile(t, "policies.yaml", limitOf(5)), t.TempDir()
	start := func(i int, join ...string) *process {
		return startNode(t, "--name", fmt.Sprintf("n%d", i), "--policies", file, "--data-dir",
			filepath.Join(dirs, fmt.Sprint(i)), "--join", strings.Join(join, ","))
	}
	startAll := func() []*process {
		first := start(0).awaitReady()
		nodes := []*process{first, start(1, first.gossip), start(2, first.gossip)}
		for _, p := range nodes {
			p.awaitReady()
		}
		for _, p := range nodes {
			p.eventually(waitTimeout, "all are members", func() bool { return len(p.status().Members) == 3 })
		}
		return nodes
	}
	nodes := startAll()
	decides := func(p *process, prefix string, limit int64) {
		t.Helper()
		for i := range 8 {
			d := p.peek("login", fmt.Sprint(prefix, i))
			must.Equal(t, d.Limit, limit, "%s decides %s%d by", p.name, prefix, i)
		}
	}

	code, out, errs := weir(t, "override", "set", "--addr", nodes[1].grpc, "--prefix", "login", "vip-", `{"limit":50}`)
	must.True(t, code == 0 && strings.Contains(out, "3 of 3 members have it, 3 on disk"), "%d %s%s", code, out, errs)
	for _, p := range nodes {
		decides(p, "vip-", 50)
		decides(p, "other-", 5)
		expect.Equal(t, p.metrics().value("weir_overrides", "state", "active"), 1, "%s: weir_overrides", p.name)
	}
	code, _, errs = weir(t, "override", "set", "--addr", nodes[1].grpc, "login", "k", `{"limit":"x"}`)
	expect.True(t, code == 2 && strings.Contains(errs, "settings.limit: "), "a bad limit: %d %s", code, errs)

	// One node is killed, and misses a change.
	nodes[2].signal(syscall.SIGKILL)
	<-nodes[2].done
	nodes[0].override("PUT", "", `{"policy":"login","prefix":"vip-","settings":{"limit":60}}`)
	nodes[0].override("PUT", "", `{"policy":"login","key":"gone","settings":{"blocked":true}}`)
	nodes[1].override("DELETE", "?policy=login&key=gone", "")
	nodes[2] = start(2, nodes[0].gossip).awaitReady()
	decides(nodes[2], "vip-", 60)
	code, page := nodes[2].get("/v1/overrides")
	expect.True(t, code == 200 && !strings.Contains(page, "gone"), "%d %s", code, page)

	// All nodes change the same override, and others, at a time.
	var writers sync.WaitGroup
	for _, p := range nodes {
		writers.Go(func() {
			for i := range 10 {
				p.override("PUT", "", fmt.Sprintf(`{"policy":"login","key":"contested-0","settings":{"limit":%d}}`,
					100+i))
				p.override("PUT", "", fmt.Sprintf(`{"policy":"login","key":"%s-%d","settings":{"unlimited":true}}`,
					p.name, i))
			}
		})
	}
	writers.Wait()
	list := func(p *process) string {
		_, page := p.get("/v1/overrides?" + url.Values{"page_size": {"1000"}}.Encode())
		return page
	}
	same := func() bool { return list(nodes[0]) == list(nodes[1]) && list(nodes[0]) == list(nodes[2]) }
	eventually(t, waitTimeout, "all nodes have the same overrides", same)
	before := list(nodes[0])
	expect.Equal(t, strings.Count(before, `"version"`), 1+1+30, "overrides: %s", before)

	// All are killed, and start again. One has lost its directory.
	for _, p := range nodes {
		p.signal(syscall.SIGKILL)
		<-p.done
	}
	must.NoError(t, os.RemoveAll(filepath.Join(dirs, "1")))
	nodes = startAll()
	for _, p := range nodes {
		decides(p, "vip-", 60)
		expect.Equal(t, list(p), before, "what %s has after the restart", p.name)
	}
	for _, p := range nodes {
		p.terminate()
	}
}

// override changes one, and fails the test unless that is done.
func (p *process) override(method, query, body string) {
	p.t.Helper()
	r, err := http.NewRequest(method, "http://"+p.http+"/v1/overrides"+query, bytes.NewReader([]byte(body)))
	if err != nil {
		p.t.Error(err)
		return
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := p.web.Do(r)
	if err != nil {
		p.t.Error(err)
		return
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	expect.True(p.t, err == nil && resp.StatusCode == http.StatusOK && json.Valid(answer),
		"%s %s: %s %s: %d %v: %s", p.name, method, query, body, resp.StatusCode, err, answer)
}

func limitOf(n int) string {
	return fmt.Sprintf("policies:\n  - {name: login, algorithm: sliding_log, limit: %d, window: 1m}\n", n)
}

// TestReload: a policy file with a mistake changes nothing, and is reported when it is read, and again at each SIGHUP.
func TestReload(t *testing.T) {
	t.Parallel()
	file := testkit.WriteFile(t, "policies.yaml", limitOf(20))
	p := startNode(t, "--policies", file).awaitReady()
	must.NoError(t, os.WriteFile(file, []byte(limitOf(-5)), 0o600))
	for times := range 2 {
		p.eventually(waitTimeout, "the log tells of the mistake", func() bool {
			return strings.Count(p.stderr.String(), "policy file rejected") == times+1
		})
		expect.Equal(t, p.metrics().value("weir_policies_reloads_total", "result", "rejected"), float64(times+1))
		p.signal(syscall.SIGHUP)
	}
	_, out, _ := weir(t, "status", "--addr", p.grpc)
	expect.True(t, strings.Contains(out, "policy file rejected: "+file+":2:50"), "weir status: %s", out)
	expect.Equal(t, p.peek("login", "k").Limit, 20, "a file with a mistake changed the limit to")
}

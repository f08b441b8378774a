package clustertest

import (
	"fmt"
	"regexp"
	"strconv"
	"testing"

	"github.com/weirlimit/weir/test/must"
)

// tried returns what a node has counted of a policy's candidate.
func (p *process) tried(result string) int {
	_, page := p.get("/metrics")
	m := regexp.MustCompile(`(?m)^weir_candidate_total\{policy="tried",result="` + result + `"\} (\d+)`).FindStringSubmatch(page)
	if m == nil {
		return 0
	}
	n, _ := strconv.Atoi(m[1]) // digits
	return n
}

// TestCandidateMoves: what a policy's candidate has counted moves with its keys when a node leaves.
func TestCandidateMoves(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3, "--policies", writeFile(t, "policies.yaml",
		"policies: [{name: tried, algorithm: sliding_log, limit: 1000, window: 1h, candidate: {algorithm: fixed_window, limit: 4, window: 1h}}]"))
	keys := keysNamed("tried", 30)
	ask := func(p *process, key string, cost int) {
		t.Helper()
		d, err := p.check(fmt.Sprintf(`{"policy":"tried","key":%q,"cost":%d}`, key, cost))
		must.True(t, err == nil && d.Allowed && !d.FailedOpen, "%s: %+v, %v", key, d, err)
	}
	for _, key := range keys {
		ask(nodes[0], key, 4)
		ask(nodes[1], key, 1)
	}
	sum := func(result string) (n int) {
		for _, p := range nodes {
			n += p.tried(result)
		}
		return n
	}
	if allowed, refused := sum("allowed"), sum("refused"); allowed != 30 || refused != 30 {
		t.Errorf("the candidate allowed %d and refused %d, want 30 each", allowed, refused)
	}
	nodes[0].terminate()
	nodes = nodes[1:]
	before := sum("refused")
	for i, key := range keys {
		ask(nodes[i%2], key, 1)
	}
	if refused := sum("refused") - before; refused != 30 {
		t.Errorf("after a node has left the candidate refused %d of 30 keys whose limit was used up", refused)
	}
}

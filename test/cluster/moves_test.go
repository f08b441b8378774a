package clustertest

import (
	"fmt"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestBansMove: when a node leaves in good order, a banned key stays banned, long after its window has room again and whichever node is
// asked, and what a policy's candidate has counted of a key moves with the key.
func TestBansMove(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3, "--policies", writeFile(t, "policies.yaml", `policies:
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
	expect.Equal(t, [2]float64{tried("allowed"), tried("refused")}, [2]float64{30, 30}, "the candidate allowed and refused")
	nodes[0].terminate()
	nodes = nodes[1:]
	before := tried("refused")
	for i, key := range keys {
		d := ask(nodes[i%2], "banned", key, 1)
		expect.True(t, !d.Allowed && d.Banned && d.RetryAfterMS != nil &&
			*d.RetryAfterMS <= time.Hour.Milliseconds() && *d.RetryAfterMS >= 50*time.Minute.Milliseconds(), "%s: %+v", key, d)
		ask(nodes[i%2], "tried", key, 1)
	}
	expect.Equal(t, tried("refused")-before, 30, "keys whose limit was used up that the candidate refused after a node has left")
}

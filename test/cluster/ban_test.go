package clustertest

import (
	"fmt"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestBansMove: a banned key stays banned while a node leaves in good order, long after its window has room again, and whichever node is
// asked.
func TestBansMove(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3, "--policies", writeFile(t, "policies.yaml",
		"policies: [{name: banned, algorithm: sliding_log, limit: 1, window: 10ms, ban: 1h}]"))
	keys := keysNamed("banned", 30)
	ask := func(p *process, key string) decision {
		t.Helper()
		d, err := p.check(fmt.Sprintf(`{"policy":"banned","key":%q,"cost":1}`, key))
		must.True(t, err == nil && !d.FailedOpen && !d.FailedClosed, "%s: %+v, %v", key, d, err)
		return d
	}
	for i, key := range keys {
		for until := time.Now().Add(10 * time.Second); !ask(nodes[i%3], key).Banned; { // two within a window
			must.True(t, !time.Now().After(until), "%s is not banned", key)
		}
	}
	nodes[0].terminate()
	for i, key := range keys {
		d := ask(nodes[1+i%2], key)
		expect.True(t, !d.Allowed && d.Banned && d.RetryAfterMS != nil &&
			*d.RetryAfterMS <= time.Hour.Milliseconds() && *d.RetryAfterMS >= 50*time.Minute.Milliseconds(),
			"%s: %+v", key, d)
	}
}

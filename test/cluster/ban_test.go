package clustertest

import (
	"fmt"
	"testing"
	"time"
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
		if err != nil || d.FailedOpen || d.FailedClosed {
			t.Fatalf("%s: %+v, %v", key, d, err)
		}
		return d
	}
	for i, key := range keys {
		for until := time.Now().Add(10 * time.Second); !ask(nodes[i%3], key).Banned; { // two within a window
			if time.Now().After(until) {
				t.Fatalf("%s is not banned", key)
			}
		}
	}
	nodes[0].terminate()
	for i, key := range keys {
		d := ask(nodes[1+i%2], key)
		if d.Allowed || !d.Banned || d.RetryAfterMS == nil || *d.RetryAfterMS > time.Hour.Milliseconds() || *d.RetryAfterMS < 50*time.Minute.Milliseconds() {
			t.Errorf("%s: %+v", key, d)
		}
	}
}

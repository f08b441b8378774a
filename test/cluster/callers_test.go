package clustertest

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// debianPython is Debian's own, which sees Debian's packages; another one may come first in PATH.
const debianPython = "/usr/bin/python3"

// TestCallersInPython runs the Python programs of docs/callers.md against a node with the policy of that page: two checks of a key are
// admitted, and the third is refused and told to wait for less than a minute.
func TestCallersInPython(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command(debianPython, "-c", "import redis").CombinedOutput(); err != nil {
		t.Skipf("needs Debian's python3 and python3-redis: %v %s", err, out)
	}
	page := must.Value(os.ReadFile("../../docs/callers.md"))(t)
	programs := regexp.MustCompile("(?s)```python\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	must.True(t, len(programs) == 2, "docs/callers.md has %d Python programs, want 2", len(programs))
	policies := testkit.WriteFile(t, "policies.yaml", "policies:\n  - {name: login, algorithm: sliding_log, limit: 2, window: 1m}\n")
	n := startNode(t, "--policies="+policies, "--resp-port=0").awaitReady()
	ports := strings.NewReplacer("localhost:8080", n.http, "port=6380", "port="+n.resp[strings.LastIndex(n.resp, ":")+1:])
	for _, program := range programs {
		for _, want := range []string{`^\(True, 0\.0\)\n$`, `^\(True, 0\.0\)\n$`, `^\(False, [1-5]?[0-9]\.[0-9]+\)\n$`} {
			out, err := exec.Command(debianPython, "-c", ports.Replace(program[1])).CombinedOutput()
			expect.True(t, err == nil && regexp.MustCompile(want).Match(out),
				"%v: %s, want %s, of\n%s", err, out, want, program[1])
		}
	}
}

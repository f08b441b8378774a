package clustertest

import (
	"context"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

var (
	curlLine = regexp.MustCompile(`(?m)^ +(curl .*)$`)
	loopback = regexp.MustCompile(`127\.0\.0\.1:\d+`)
)

// TestDev does what the README says: start a cluster with one command, paste the line it prints, stop it with Ctrl-C. No process of its
// group is left then; its ports are not looked at, which other processes may have got.
func TestDev(t *testing.T) {
	p := launch(t, "dev")
	var curl []string
	p.eventually(startTimeout, "a line to paste", func() bool {
		curl = curlLine.FindStringSubmatch(p.stdout.String())
		return curl != nil && strings.Contains(p.stdout.String(), "Ctrl-C")
	})
	addrs := loopback.FindAllString(p.stdout.String(), -1)
	expect.True(t, len(addrs) >= 6, "addresses of three nodes are not there:\n%s", &p.stdout)
	t.Run("curl", func(t *testing.T) {
		if _, err := exec.LookPath("curl"); err != nil {
			t.Skip("curl is not installed: the line that weir dev prints is not tried")
		}
		ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
		defer cancel()
		out, err := exec.CommandContext(ctx, "bash", "-c", curl[1]).Output()
		expect.True(t, err == nil && strings.HasPrefix(string(out), "HTTP/1.1 200 OK") &&
			strings.Contains(string(out), `"allowed":true`), "%s: %v\n%s", curl[1], err, out)
	})
	p.signal(os.Interrupt)
	code := p.exit(stopTimeout)
	expect.True(t, code == 0, "exit status %d after SIGINT, want 0", code)
	expect.ErrorIs(t, syscall.Kill(-p.cmd.Process.Pid, 0), syscall.ESRCH, "a process is left behind")
}

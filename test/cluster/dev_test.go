package clustertest

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

var (
	curlLine = regexp.MustCompile(`(?m)^ +(curl .*)$`)
	loopback = regexp.MustCompile(`127\.0\.0\.1:\d+`)
)

// TestDev does what the README says: start a cluster with one command, paste the line it prints, stop it with Ctrl-C. It runs by itself: the
// ports that must be free in the end are any, which connections of other tests could get.
func TestDev(t *testing.T) {
	p := launch(t, "dev")
	var curl []string
	p.eventually(startTimeout, "a line to paste", func() bool {
		curl = curlLine.FindStringSubmatch(p.stdout.String())
		return curl != nil && strings.Contains(p.stdout.String(), "Ctrl-C")
	})
	addrs := loopback.FindAllString(p.stdout.String(), -1)
	if len(addrs) < 6 {
		t.Errorf("addresses of three nodes are not there:\n%s", &p.stdout)
	}
	t.Run("curl", func(t *testing.T) {
		if _, err := exec.LookPath("curl"); err != nil {
			t.Skip("curl is not installed: the line that weir dev prints is not tried")
		}
		ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
		defer cancel()
		out, err := exec.CommandContext(ctx, "bash", "-c", curl[1]).Output()
		if err != nil || !strings.HasPrefix(string(out), "HTTP/1.1 200 OK") || !strings.Contains(string(out), `"allowed":true`) {
			t.Errorf("%s: %v\n%s", curl[1], err, out)
		}
	})
	p.signal(os.Interrupt)
	if code := p.exit(stopTimeout); code != 0 {
		t.Errorf("exit status %d after SIGINT, want 0", code)
	}
	if err := syscall.Kill(-p.cmd.Process.Pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("a process is left behind: %v", err)
	}
	for _, a := range addrs {
		l, err := net.Listen("tcp", a)
		if err != nil {
			t.Errorf("still taken: %v", err)
			continue
		}
		l.Close()
	}
}

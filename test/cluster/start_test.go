package clustertest

import (
	"context"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// wantEnd waits until a process that cannot go on has ended by itself with exit status 2 and a message that says why,
// has not claimed to be ready before, and has not shown a stack.
func (p *process) wantEnd(within time.Duration, says ...string) {
	p.t.Helper()
	expect.Equal(p.t, p.exit(within), 2, "exit status")
	expect.Equal(p.t, p.stdout.String(), "", "standard output: %s", &p.stdout)
	lines := strings.Split(strings.TrimSpace(p.stderr.String()), "\nweir: ")
	last := strings.TrimPrefix(lines[len(lines)-1], "weir: ")
	for _, want := range says {
		expect.True(p.t, strings.Contains(last, want), "the message lacks %q: %s", want, last)
	}
}

// TestStrangers: nodes that would not agree on who owns a key do not form a cluster.
func TestStrangers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name          string
		first, second string // the secrets that they are given
	}{{"other secret", keyA, keyB}, {"no secret", keyA, ""}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			const flag = "--cluster-secret-file"
			first := startNode(t, "--name", "first", flag, testkit.WriteFile(t, "first", c.first)).awaitReady()
			args := []string{"--name", "second", "--join", first.gossip}
			if c.second != "" {
				args = append(args, flag, testkit.WriteFile(t, "second", c.second))
			}
			startNode(t, args...).wantEnd(45*time.Second, "another cluster secret")
			st := first.status()
			expect.True(t, len(st.Members) == 1, "the first sees %d members", len(st.Members))
			first.terminate()
		})
	}
}

const keyA, keyB = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n", "Hx4dHBsaGRgXFhUUExIREA8ODQwLCgkIBwYFBAMCAQA=\n"

// TestOtherGossipKey: a node that cannot read its seed's gossip, nor its seed its own, stays out and says why, for
// longer than it waits for seeds that are silent; and joins once its key file has been corrected.
func TestOtherGossipKey(t *testing.T) {
	t.Parallel()
	first := startNode(t, "--name", "first", "--gossip-key-file", testkit.WriteFile(t, "first", keyA)).awaitReady()
	file := testkit.WriteFile(t, "second", keyB)
	join := func(name string, args ...string) *process { // which will print no ready line for a while
		addr := freeAddr(t)
		_, port, _ := strings.Cut(addr, ":")
		p := startNode(t, append(args, "--name", name, "--join", first.gossip, "--http-port", port)...)
		p.http = addr
		return p
	}
	second, plain := join("second", "--gossip-key-file", file), join("third")
	start := time.Now()
	for _, p := range []*process{second, plain} {
		p.eventually(waitTimeout, "it says why it is not ready", func() bool {
			code, page, err := p.fetch("/readyz")
			return err == nil && code == 503 && strings.Contains(string(page), "uses another gossip key")
		})
	}
	plain.eventually(waitTimeout, "the seeds' time to answer is over",
		func() bool { return time.Since(start) > 17*time.Second })
	for _, p := range []*process{second, plain} {
		code, page := p.get("/readyz")
		expect.True(t, code == 503 && strings.Contains(page, "uses another gossip key"), "/readyz: %d %s", code, page)
	}
	st := first.status()
	expect.True(t, len(st.Members) == 1, "the first sees %d members", len(st.Members))
	must.NoError(t, os.WriteFile(file, []byte(keyA), 0o600))
	second.awaitReady()
	st = first.status()
	expect.True(t, len(st.Members) == 2, "the first sees %d members", len(st.Members))
	plain.terminate()
	second.terminate()
	first.terminate()
}

var (
	curlLine = regexp.MustCompile(`(?m)^ +(curl .*)$`)
	loopback = regexp.MustCompile(`127\.0\.0\.1:\d+`)
)

// TestDev does what the README says: start a cluster with one command, paste the line it prints, stop it with Ctrl-C.
// No process of its group is left then; its ports are not looked at, which other processes may have got.
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
	expect.Equal(t, p.exit(stopTimeout), 0, "exit status after SIGINT")
	expect.ErrorIs(t, syscall.Kill(-p.cmd.Process.Pid, 0), syscall.ESRCH, "a process is left behind")
}

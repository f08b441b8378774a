package clustertest

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
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

func TestPortInUse(t *testing.T) {
	t.Parallel()
	for _, flag := range []string{"--http-port", "--grpc-port", "--gossip-port", "--peer-port"} {
		t.Run(flag, func(t *testing.T) {
			port := taken(t)
			startNode(t, flag, port).wantEnd(stopTimeout, flag+": ", "127.0.0.1", port, "address already in use")
		})
	}
	t.Run("udp", func(t *testing.T) {
		c := must.Value(net.ListenPacket("udp", "127.0.0.1:0"))(t)
		defer c.Close()
		_, port, err := net.SplitHostPort(c.LocalAddr().String())
		must.NoError(t, err)
		startNode(t, "--gossip-port", port).wantEnd(stopTimeout, "--gossip-port: ", port, "address already in use")
	})
}

func TestBadSettings(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args string
		says string
	}{
		{"--join nowhere", `--join: "nowhere" is not HOST:PORT`},
		{"--join :7946", "--join: "},
		{"--join 127.0.0.1:0", "--join: "},
		{"--join 127.0.0.1:http", "--join: "},
		{"--join 192.0.2.1:7946", "--join: seed 192.0.2.1:7946 is on another machine"},
		{"--http-port 65536", `"--http-port" flag: "65536" is not a port`},
		{"--grpc-port x", `"--grpc-port" flag: "x" is not a port`},
		{"--bind everywhere", "--bind: "},
		{"--bind 192.0.2.1", "--bind: "},
		{"--name two/words", "--name: "},
		{"--gossip-port= --join 127.0.0.1:7946", "--join: "},
		{"--gossip-key-file /none", "--gossip-key-file: "},
		{"--config /none", "--config: "},
		{"--voters a,b", "--voters: 2 voters are given"},
		{"--voters ordinals:3 --name weir", "--voters: ordinals:3: name weir does not end in an ordinal"},
		{"--sideways", "--sideways"},
		{"now", `"now"`},
	} {
		t.Run(c.args, func(t *testing.T) { startNode(t, strings.Fields(c.args)...).wantEnd(stopTimeout, c.says) })
	}
}

func TestPolicyFile(t *testing.T) {
	t.Parallel()
	missing := filepath.Join(t.TempDir(), "none.yaml")
	startNode(t, "--policies", missing).wantEnd(stopTimeout, "--policies: ", missing)

	empty := startNode(t, "--policies", writeFile(t, "empty.yaml", "")).awaitReady()
	code, page := empty.get("/v1/policies")
	expect.True(t, code == 200 && strings.Contains(page, `"policies":[]`), "/v1/policies: %d %s", code, page)
	empty.terminate()

	const head = "policies:\n  - name: payout\n    algorithm: sliding_log\n    limit: 5\n    window: 1m\n"
	for _, c := range []struct{ add, at, says string }{
		{"    colour: red\n", ":6:5: ", "policies[0].colour"},
		{"    limit: 6\n", ":6:5: ", "limit"},
		{"    consistency: strict\n", ":6:18: ", "async is too little for consistency: strict"},
		{"    consistency: strict\n    durability: sync\n", ":6:18: ", "strict needs voters"},
		{"  - [", ":", "yaml"},
	} {
		file := writeFile(t, "wrong.yaml", head+c.add)
		startNode(t, "--policies", file).wantEnd(stopTimeout, "--policies: "+file+c.at, c.says)
	}
}

// TestSeedDoesNotResolve: a name may come to resolve later, so the node says what it waits for, and is not ready.
func TestSeedDoesNotResolve(t *testing.T) {
	t.Parallel()
	p := startNode(t, "--join", "no-such-host.invalid:7946", "--http-port", freePort(t))
	p.eventually(waitTimeout, "the log names the seed", func() bool {
		return strings.Contains(p.stderr.String(), "seed unreachable") &&
			strings.Contains(p.stderr.String(), "no-such-host.invalid:7946")
	})
	p.http = "127.0.0.1:" + p.arg("--http-port")
	code, page := p.get("/readyz")
	expect.True(t, code == 503 && strings.Contains(page, "no seed has answered yet"), "/readyz: %d %s", code, page)
	code, _ = p.get("/healthz")
	expect.Equal(t, code, 200, "/healthz")
	p.terminate()
}

// freePort returns a port that was free a moment ago, for a process whose ready line cannot be waited for.
func freePort(t *testing.T) string {
	t.Helper()
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	must.NoError(t, err)
	return port
}

// arg returns the value of the last flag of that name.
func (p *process) arg(name string) (value string) {
	for i, a := range p.cmd.Args {
		if a == name {
			value = p.cmd.Args[i+1]
		}
	}
	return value
}

func TestNameInUse(t *testing.T) {
	t.Parallel()
	first := startNode(t, "--name", "twin").awaitReady()
	startNode(t, "--name", "twin", "--join", first.gossip).
		wantEnd(30*time.Second, "name twin is in use by "+first.gossip+"; give this node another one")
	code, page := first.get("/readyz")
	expect.True(t, code == 200, "/readyz of the first: %d %s", code, page)
	first.terminate()
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
			first := startNode(t, "--name", "first", flag, writeFile(t, "first", c.first)).awaitReady()
			args := []string{"--name", "second", "--join", first.gossip}
			if c.second != "" {
				args = append(args, flag, writeFile(t, "second", c.second))
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
	first := startNode(t, "--name", "first", "--gossip-key-file", writeFile(t, "first", keyA)).awaitReady()
	file := writeFile(t, "second", keyB)
	second := startNode(t, "--name", "second", "--join", first.gossip, "--gossip-key-file", file, "--http-port",
		freePort(t))
	plain := startNode(t, "--name", "third", "--join", first.gossip, "--http-port", freePort(t))
	start := time.Now()
	for _, p := range []*process{second, plain} {
		p.http = "127.0.0.1:" + p.arg("--http-port")
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

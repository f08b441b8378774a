package clustertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// Deadlines of conditions that hold within a second on an idle machine, and are waited for on a busy one.
const (
	startTimeout = testkit.Patience
	stopTimeout  = testkit.Patience
	waitTimeout  = testkit.Patience
)

// process is a running weir.
type process struct {
	t              *testing.T
	cmd            *exec.Cmd
	stdout, stderr testkit.Buffer
	done           chan struct{} // closed when it has ended, after everything it wrote has been read
	web            *http.Client  // that reaches it

	// From the ready line.
	name, http, grpc, gossip, peer, resp string
}

// environment is this process's own without settings of Weir.
func environment() []string {
	env := []string{"GORACE=atexit_sleep_ms=0"} // a second in which a race might still show, for every weir check
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "WEIR_") {
			env = append(env, e)
		}
	}
	return env
}

// launch starts weir with the given arguments, in a process group of its own. It is killed when the test ends, if it
// still runs, and what it wrote is shown if the test failed.
func launch(t *testing.T, args ...string) *process {
	t.Helper()
	return launchWith(t, nil, binary(t), args...)
}

// launchWith is launch of another binary, by way of another command, which runs the one that is appended to its arguments
// in its place.
func launchWith(t *testing.T, wrapper []string, program string, args ...string) *process {
	t.Helper()
	line := slices.Concat(wrapper, []string{program}, args)
	p := &process{t: t, cmd: exec.Command(line[0], line[1:]...), done: make(chan struct{}), web: web}
	p.cmd.Env = environment()
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	must.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // ProcessState says it all
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.done
		for _, sign := range []string{"WARNING: DATA RACE", "panic:", "fatal error:"} {
			expect.True(t, !strings.Contains(p.stderr.String(), sign), "weir %s: %s", strings.Join(args, " "), sign)
		}
		if t.Failed() {
			t.Logf("weir %s (pid %d, %v) wrote:\n%s%s", strings.Join(args, " "), p.cmd.Process.Pid, p.cmd.ProcessState, &p.stdout, &p.stderr)
		}
	})
	return p
}

// startNode starts weir run on free loopback ports. Arguments given count before the usual ones.
func startNode(t *testing.T, args ...string) *process {
	t.Helper()
	return launch(t, append([]string{"run", "--http-port=0", "--grpc-port=0", "--gossip-port=0", "--peer-port=0",
		// Longer than any machine is busy, so that a check is never answered by on_error just for want of a processor.
		"--timeout=20s"}, args...)...)
}

var readyLine = regexp.MustCompile(`(?m)^weir ready name=(\S*) http=(\S*) grpc=(\S*) gossip=(\S*) peer=(\S*)(?: resp=(\S*))?$`)

// awaitReady waits for the ready line and takes the addresses from it.
func (p *process) awaitReady() *process {
	p.t.Helper()
	var m []string
	p.eventually(startTimeout, "the ready line", func() bool {
		m = readyLine.FindStringSubmatch(p.stdout.String())
		return m != nil
	})
	p.name, p.http, p.grpc, p.gossip, p.peer, p.resp = m[1], m[2], m[3], m[4], m[5], m[6]
	return p
}

// eventually waits for a condition that p brings about, and fails when p ends before.
func (p *process) eventually(within time.Duration, what string, holds func() bool) {
	p.t.Helper()
	eventually(p.t, within, what, func() bool {
		if holds() {
			return true
		}
		select {
		case <-p.done:
			must.True(p.t, holds(), "%s: the process has ended (%v)", what, p.cmd.ProcessState)
			return true
		default:
			return false
		}
	})
}

// eventually waits for a condition, and fails when it does not come to hold. It returns how long that took.
func eventually(t *testing.T, within time.Duration, what string, holds func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		must.True(t, time.Since(start) <= within, "waited %v in vain for: %s", within, what)
		<-tick.C
	}
	return time.Since(start)
}

// signal sends a signal to the process.
func (p *process) signal(s os.Signal) {
	p.t.Helper()
	must.NoError(p.t, p.cmd.Process.Signal(s))
}

// exit waits until the process has ended by itself and returns its exit status, -1 after a signal.
func (p *process) exit(within time.Duration) int {
	p.t.Helper()
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(within):
		p.t.Fatalf("weir did not end within %v", within)
		panic("not reached")
	}
}

// terminate ends the process in good order.
func (p *process) terminate() {
	p.t.Helper()
	p.signal(syscall.SIGTERM)
	code := p.exit(stopTimeout)
	expect.True(p.t, code == 0, "%s: exit status %d after SIGTERM, want 0", p.name, code)
}

// startCluster starts as many nodes as asked for, named n0, n1, …, with the same further arguments, joins them and waits
// until all are ready. They are ended in good order when the test ends.
func startCluster(t *testing.T, size int, args ...string) []*process {
	t.Helper()
	nodes := make([]*process, size)
	seed := ""
	for i := range nodes {
		own := append([]string{"--name", fmt.Sprintf("n%d", i)}, args...)
		if i == 0 {
			nodes[i] = startNode(t, own...).awaitReady()
			seed = nodes[i].gossip
			continue
		}
		nodes[i] = startNode(t, append(own, "--join", seed)...)
	}
	for _, p := range nodes {
		p.awaitReady()
	}
	for _, p := range nodes {
		eventually(t, waitTimeout, p.name+" sees all members active", func() bool {
			members := p.status().Members
			active := 0
			for _, m := range members {
				if m.State == "active" && m.Reachable {
					active++
				}
			}
			return active == size && len(members) == size
		})
	}
	t.Cleanup(func() {
		for _, p := range nodes {
			_ = p.cmd.Process.Signal(syscall.SIGTERM) // some have ended, as their test wants it
		}
		for _, p := range nodes {
			p.exit(stopTimeout)
			ws := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
			expect.True(t, !ws.Exited() || ws.ExitStatus() == 0, "%s: exit status %d", p.name, ws.ExitStatus())
		}
	})
	return nodes
}

// weir runs a command to its end.
func weir(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, binary(t), args...)
	cmd.Env = environment()
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	must.True(t, err == nil || errors.As(err, &exit), "%v", err)
	must.NoError(t, ctx.Err(), "weir %s did not end within %v", strings.Join(args, " "), startTimeout)
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// writeFile puts a file where nobody else looks and returns its path.
func writeFile(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	must.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

// taken returns a loopback port that somebody listens on, by TCP, until the test ends.
func taken(t *testing.T) string {
	t.Helper()
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { l.Close() })
	_, port, err := net.SplitHostPort(l.Addr().String())
	must.NoError(t, err)
	return port
}

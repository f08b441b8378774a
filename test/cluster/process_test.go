package clustertest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

// process is a running weir, or another program.
type process struct {
	t              *testing.T
	cmd            *exec.Cmd
	stdin          io.WriteCloser
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

// launchWith is launch of any program, by way of another command, which runs the one that is appended to its arguments
// in its place.
func launchWith(t *testing.T, wrapper []string, program string, args ...string) *process {
	t.Helper()
	line := slices.Concat(wrapper, []string{program}, args)
	p := &process{t: t, cmd: exec.Command(line[0], line[1:]...), done: make(chan struct{}), web: web}
	p.cmd.Env = environment()
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.stdin = must.Value(p.cmd.StdinPipe())(t)
	must.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // ProcessState says it all
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.done
		for _, sign := range []string{"WARNING: DATA RACE", "panic:", "fatal error:"} {
			expect.True(t, !strings.Contains(p.stderr.String(), sign), "%s: %s", p.cmd, sign)
		}
		if t.Failed() {
			t.Logf("%s (pid %d, %v) wrote:\n%s%s", p.cmd, p.cmd.Process.Pid, p.cmd.ProcessState, &p.stdout, &p.stderr)
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

var readyLine = regexp.MustCompile(
	`(?m)^weir ready name=(\S*) http=(\S*) grpc=(\S*) gossip=(\S*) peer=(\S*)(?: resp=(\S*))?$`)

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

// kill ends the process without notice.
func (p *process) kill() {
	p.t.Helper()
	p.signal(syscall.SIGKILL)
	p.exit(stopTimeout)
}

// terminate ends the process in good order.
func (p *process) terminate() {
	p.t.Helper()
	p.signal(syscall.SIGTERM)
	expect.Equal(p.t, p.exit(stopTimeout), 0, "%s: exit status after SIGTERM", p.name)
}

// startCluster starts as many nodes as asked for, named n0, n1, …, with the same further arguments, joins them and
// waits until all are ready. They are ended in good order when the test ends.
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
	ctx := testkit.Within(t, startTimeout)
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

const twoPolicies = `
policies:
  - {name: once, algorithm: sliding_log, limit: 1, window: 1h}
  - {name: leases, algorithm: concurrency, limit: 1, ttl: 1m}
`

func TestCommands(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3, "--policies", testkit.WriteFile(t, "policies.yaml", twoPolicies))
	t.Run("check", func(t *testing.T) { testCheck(t, nodes) })
	t.Run("status", func(t *testing.T) { testStatus(t, nodes) })
}

func testCheck(t *testing.T, nodes []*process) {
	a, b := "--addr="+nodes[0].grpc, "--addr="+nodes[1].grpc
	for _, c := range []struct {
		args string
		code int
		want string // in standard output, or for an error in standard error
	}{
		{"check alice --policy once " + a, 0, "allowed  policy=once granted=1 limit=1 remaining=0"},
		{"check alice --policy once " + b, 1, "refused  policy=once granted=0 limit=1 remaining=0 retry_after="},
		{"check alice --policy once -o json " + b, 1, `"allowed":false`},
		{"check alice --policy once --cost 2 " + b, 1, "retry_after=never"},
		{"check bob --policy once --cost 0 " + b, 0, "granted=0 limit=1 remaining=1"},
		{"check bob --limit 1/1m " + a, 0, "allowed  policy=inline"},
		{"check bob --limit 1/1m --algorithm sliding_log " + b, 1, "refused  policy=inline"},
		{"check bob --limit 2/1m " + b, 0, "remaining=0"}, // the limit has no part in whose state it is
		{"check bob --limit 1/1m --namespace other " + b, 0, "allowed"},

		{"check alice --policy none " + a, 2, "policy: there is no policy named none"},
	} {
		code, stdout, stderr := weir(t, strings.Fields(c.args)...)
		said, other := stdout, stderr
		if c.code == 2 {
			said, other = stderr, stdout
		}
		expect.True(t, code == c.code && strings.Contains(said, c.want) && other == "",
			"weir %s: exit status %d, want %d and %q\nstdout: %s\nstderr: %s", c.args, code, c.code, c.want, stdout,
			stderr)
	}
}

func testStatus(t *testing.T, nodes []*process) {
	const partitions = 4093
	for _, p := range nodes {
		code, text, stderr := weir(t, "status", "--addr", p.grpc)
		expect.True(t, code == 0 && strings.HasPrefix(text, p.name+" sees 3 members (ready, "),
			"weir status: exit status %d\n%s%s", code, text, stderr)
		var st struct {
			Node       string
			Ready      bool
			Partitions int
			Ring       string
			Members    []struct {
				Name, State, HTTP string
				Partitions        int
			}
		}
		code, text, stderr = weir(t, "status", "--addr", p.grpc, "-o", "json")
		err := json.Unmarshal([]byte(text), &st)
		must.True(t, code == 0 && err == nil, "weir status -o json: exit status %d, %v\n%s%s", code, err, text, stderr)
		expect.True(t, st.Node == p.name && st.Ready && st.Partitions == partitions && len(st.Members) == len(nodes),
			"status of %s: %s", p.name, text)
		sum := 0
		for i, m := range st.Members {
			sum += m.Partitions
			expect.True(t, m.Name == fmt.Sprintf("n%d", i) && m.State == "active" &&
				m.HTTP == nodes[i].http, "%s shows as member %d: %+v", p.name, i, m)
			expect.True(t, m.Partitions >= partitions*25/100 && m.Partitions <= partitions*42/100,
				"%s shows %d partitions of %s, which is not a fair share", p.name, m.Partitions, m.Name)
		}
		expect.True(t, sum == partitions, "%s shows owners of %d partitions", p.name, sum)
	}
}

// TestLogReaderDies: a node whose log nobody reads any more goes on, and stops in good order.
func TestLogReaderDies(t *testing.T) {
	t.Parallel()
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("needs bash")
	}
	// The reader goes after the first byte; a node writes some lines as it starts, and more as it stops.
	p := launchWith(t, []string{bash, "-c", `exec "$0" "$@" 2> >(head -c 1 >/dev/null)`}, binary(t),
		"run", "--http-port=0", "--grpc-port=0", "--gossip-port=0", "--peer-port=0", "--log-level=debug")
	p.awaitReady()
	p.signal(syscall.SIGHUP)
	p.terminate()
}

// TestLogReaderStalls: a node whose log, audit log and standard output nobody reads, while their pipe stays open, goes
// on deciding, counts what it drops, and stops in good order.
func TestLogReaderStalls(t *testing.T) {
	t.Parallel()
	fifo := filepath.Join(t.TempDir(), "log")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Skip("no pipes here:", err)
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("needs bash")
	}
	pipe, err := os.OpenFile(fifo, os.O_RDWR, 0) // both ends, so that neither open waits
	must.NoError(t, err)
	defer pipe.Close()
	p := launchWith(t, []string{bash, "-c", `exec "$0" "$@" >"` + fifo + `" 2>&1`}, binary(t),
		"run", "--http-port=0", "--grpc-port=0", "--gossip-port=0", "--peer-port=0", "--log-level=debug",
		"--audit-log=stderr")
	var said bytes.Buffer
	for some := make([]byte, 1024); !readyLine.Match(said.Bytes()); {
		must.NoError(t, pipe.SetReadDeadline(time.Now().Add(startTimeout)))
		n, err := pipe.Read(some)
		must.NoError(t, err, "after %s", &said)
		said.Write(some[:n])
	}
	m := readyLine.FindSubmatch(said.Bytes())
	p.http = string(m[2])
	// From here on nobody reads.
	key := strings.Repeat("k", 1000)
	dropped := func(log string) bool { return p.metrics().value("weir_log_records_dropped_total", "log", log) > 0 }
	for _, one := range []struct {
		log, path, body string
		want            int
	}{
		{"audit", "/v1/refund", `{"limit":{"algorithm":"sliding_log","limit":5,"window":"1m"},"cost":1,"key":"` + key +
			`"}`, http.StatusOK},
		{"log", "/v1/check", `{"policy":"none","key":"` + key + `"}`, http.StatusNotFound},
	} {
		p.eventually(2*time.Minute, "lines to be dropped of the "+one.log, func() bool {
			for range 200 {
				code, _, answer, err := p.post(one.path, "application/json", []byte(one.body))
				must.True(t, err == nil && code == one.want, "%s: %d, %v, %s", one.path, code, err, answer)
			}
			return dropped(one.log)
		})
	}
	d, err := p.check(`{"limit":{"algorithm":"sliding_log","limit":5,"window":"1m"},"key":"a"}`)
	expect.True(t, err == nil && d.Allowed, "%+v, %v", d, err)
	p.terminate()
}

// TestSecondSignal: SIGTERM while a node stops ends it at once, and that is said.
func TestSecondSignal(t *testing.T) {
	t.Parallel()
	p := startNode(t, "--grace=10m").awaitReady()
	// A request that goes on for as long as it may keeps the node from stopping.
	conn := must.Value(net.Dial("tcp", p.http))(t)
	defer conn.Close()
	fmt.Fprintf(conn, "POST /v1/check HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n", p.http)
	answer := make([]byte, 25)
	n, err := conn.Read(answer)
	must.True(t, err == nil && strings.HasPrefix(string(answer[:n]), "HTTP/1.1 100 "), "%q, %v", answer[:n], err)
	p.signal(syscall.SIGTERM)
	p.eventually(stopTimeout, "the log to say that it stops",
		func() bool { return strings.Contains(p.stderr.String(), `msg="node stopping" grace=10m`) })
	p.signal(syscall.SIGTERM)
	expect.Equal(t, p.exit(stopTimeout), 2, "ended with %v", p.cmd.ProcessState)
	for _, want := range []string{`msg="stop aborted by another signal" signal=terminated`,
		"weir: terminated while stopping"} {
		expect.True(t, strings.Contains(p.stderr.String(), want), "does not say %q", want)
	}
}

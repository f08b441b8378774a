package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// children are the processes that the harness has started. Each is ended by its own pid.
type children struct {
	mu      sync.Mutex
	running []*process
}

// A process is one child.
type process struct {
	name   string
	cmd    *exec.Cmd
	stdin  io.Closer
	lines  chan string // the first lines of its standard output
	stderr *tail
	exited chan struct{}
	err    error // of Wait; valid once exited is closed
}

// stopGrace is how long a child may take to end after SIGTERM.
const stopGrace = 3 * time.Second

// start starts a program. Its standard input stays open until it is stopped, so a child of this binary sees the end of
// the harness. The kernel ends all other children then.
func (c *children) start(name, path string, args, env []string) (*process, error) {
	p := &process{name: name, lines: make(chan string, 16), stderr: &tail{most: 4 << 10}, exited: make(chan struct{})}
	p.cmd = exec.Command(path, args...)
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = p.stderr
	// In its own group, the child does not get the terminal's interrupt; the harness ends it.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	p.stdin = stdin
	c.mu.Lock()
	c.running = append(c.running, p)
	c.mu.Unlock()
	go func() {
		in := bufio.NewScanner(stdout)
		in.Buffer(nil, 1<<20)
		for in.Scan() {
			select {
			case p.lines <- in.Text():
			default: // no goroutine reads lines any more; the child must not block
			}
		}
		_, _ = io.Copy(io.Discard, stdout) // after a line that is too long for any that line waits for
		p.err = p.cmd.Wait()
		close(p.exited)
	}()
	return p, nil
}

// line waits for a line of the child's standard output that begins with prefix, and returns the rest of it.
func (p *process) line(ctx context.Context, prefix string) (string, error) {
	for {
		select {
		case line := <-p.lines:
			if rest, ok := strings.CutPrefix(line, prefix); ok {
				return rest, nil
			}
		case <-p.exited:
			select {
			case line := <-p.lines: // its last lines
				if rest, ok := strings.CutPrefix(line, prefix); ok {
					return rest, nil
				}
			default:
			}
			return "", p.died()
		case <-ctx.Done():
			return "", fmt.Errorf("%s: no line %q: %w", p.name, prefix, ctx.Err())
		}
	}
}

// died returns the error for a child that has ended too early.
func (p *process) died() error {
	how := p.err
	if how == nil {
		how = errors.New("exit status 0")
	}
	return fmt.Errorf("%s ended: %w; it said: %s", p.name, how, p.stderr)
}

// alive returns an error when the child has ended.
func (p *process) alive() error {
	select {
	case <-p.exited:
		return p.died()
	default:
		return nil
	}
}

// stop ends the children and waits for them: by SIGTERM, and after stopGrace by SIGKILL.
func (c *children) stop(ps ...*process) {
	for _, p := range ps {
		p.stdin.Close()
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	}
	patience := time.NewTimer(stopGrace)
	defer patience.Stop()
	for _, p := range ps {
		select {
		case <-p.exited:
		case <-patience.C:
			patience.Reset(0)
			_ = p.cmd.Process.Kill()
			<-p.exited
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	left := c.running[:0]
	for _, p := range c.running {
		if p.alive() == nil {
			left = append(left, p)
		}
	}
	c.running = left
}

func (c *children) stopAll() {
	c.mu.Lock()
	all := append([]*process(nil), c.running...)
	c.mu.Unlock()
	c.stop(all...)
}

// usage is what a process has used so far.
type usage struct {
	cpu time.Duration // user and system, since its start, in steps of 10 ms
	rss int64         // resident bytes
}

// usage reads the child's CPU time and memory from /proc.
func (p *process) usage() (usage, error) {
	if err := p.alive(); err != nil {
		return usage{}, err
	}
	dir := "/proc/" + strconv.Itoa(p.cmd.Process.Pid)
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return usage{}, fmt.Errorf("%s: %w", p.name, err)
	}
	status, err := os.ReadFile(dir + "/status")
	if err != nil {
		return usage{}, fmt.Errorf("%s: %w", p.name, err)
	}
	var u usage
	if u.cpu, err = statCPU(stat); err != nil {
		return usage{}, fmt.Errorf("%s: %w", p.name, err)
	}
	if u.rss, err = statusBytes(status, "VmRSS"); err != nil {
		return usage{}, fmt.Errorf("%s: %w", p.name, err)
	}
	return u, nil
}

// clockTick is the unit of CPU time in /proc: USER_HZ is 100 on every Linux architecture of Go.
const clockTick = 10 * time.Millisecond

// statCPU returns user and system time from /proc/PID/stat. It counts fields from the end of the command's name, which
// may contain any characters.
func statCPU(stat []byte) (time.Duration, error) {
	end := bytes.LastIndexByte(stat, ')')
	fields := bytes.Fields(stat[end+1:])
	if end < 0 || len(fields) < 13 {
		return 0, fmt.Errorf("/proc/PID/stat: %q is not understood", stat)
	}
	var ticks uint64
	for _, f := range fields[11:13] { // utime and stime, fields 14 and 15 of proc(5)
		n, err := strconv.ParseUint(string(f), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/PID/stat: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * clockTick, nil
}

// statusBytes returns an amount of memory from /proc/PID/status.
func statusBytes(status []byte, name string) (int64, error) {
	for line := range bytes.Lines(status) {
		rest, ok := bytes.CutPrefix(line, []byte(name+":"))
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(string(rest)), " kB"), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/PID/status: %s: %w", name, err)
		}
		return n << 10, nil
	}
	return 0, fmt.Errorf("/proc/PID/status has no %s", name)
}

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	most int
	b    []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b...)
	if over := len(t.b) - t.most; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.b))
}

// freePorts returns n TCP ports on loopback that were free a moment ago, for programs that cannot choose a port.
func freePorts(n int) ([]int, error) {
	var ports []int
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // all are open until the last one is known, so that they differ
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

// startLimit bounds the start of a system, without compilation.
const startLimit = 20 * time.Second

// eventually calls ready until it returns nil, for startLimit at most, while all processes live.
func eventually(ctx context.Context, ps []*process, ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		for _, p := range ps {
			if err := p.alive(); err != nil {
				return err
			}
		}
		err := ready(ctx)
		if err == nil {
			return nil
		}
		wait(ctx, 20*time.Millisecond)
		if ctx.Err() != nil {
			return fmt.Errorf("not ready within %v: %w", startLimit, err)
		}
	}
}

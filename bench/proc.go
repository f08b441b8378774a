package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// children are the processes that the harness has started. They run until ctx ends. Each is then ended by its own pid.
type children struct {
	ctx     context.Context
	dir     string // of the files that they write their standard error to
	running sync.WaitGroup
}

// A process is one child.
type process struct {
	name   string
	cmd    *exec.Cmd
	stderr string        // the name of a file
	lines  chan string   // the first lines of its standard output; closed once exited is
	exited chan struct{} // closed once the child has ended
	err    error         // of Wait; valid once exited is closed
}

// stopGrace is how long a child may take to end after SIGTERM, before SIGKILL.
const stopGrace = 3 * time.Second

// start starts a program. Its standard input stays open until it ends, so a child of this binary sees the end of the
// harness. The kernel ends all other children then.
func (c *children) start(name, path string, args, env []string) (*process, error) {
	p := &process{name: name, lines: make(chan string, 16), exited: make(chan struct{})}
	p.cmd = exec.CommandContext(c.ctx, path, args...)
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	p.cmd.WaitDelay = stopGrace
	p.cmd.Env = append(os.Environ(), env...)
	// In its own group, the child does not get the terminal's interrupt; the harness ends it.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	stderr, err := os.CreateTemp(c.dir, name+"-*.log")
	if err != nil {
		return nil, err
	}
	defer stderr.Close() // the child has a descriptor of its own
	p.cmd.Stderr, p.stderr = stderr, stderr.Name()
	if _, err := p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	c.running.Go(func() {
		for in := bufio.NewScanner(stdout); in.Scan(); {
			select {
			case p.lines <- in.Text():
			default: // no goroutine reads lines any more; the child must not block
			}
		}
		p.err = p.cmd.Wait()
		close(p.exited)
		close(p.lines)
	})
	return p, nil
}

// line waits for a line of the child's standard output that begins with prefix, and returns the rest of it.
func (p *process) line(ctx context.Context, prefix string) (string, error) {
	for {
		select {
		case line, running := <-p.lines:
			if !running {
				return "", p.died()
			}
			if rest, ok := strings.CutPrefix(line, prefix); ok {
				return rest, nil
			}
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
	said, _ := os.ReadFile(p.stderr) // without it, the error has the exit status
	return fmt.Errorf("%s ended: %w; it said: %s", p.name, how, said[max(len(said)-4<<10, 0):])
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

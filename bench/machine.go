package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
)

// A machine describes the machine and the programs that the figures are from.
type machine struct {
	CPU      string
	Cores    int
	MemoryMB uint64
	Kernel   string
	Go       string
	Weir     string // revision of the checkout, with "+" if it has changes
	Redis    string // version of redis-server; go.mod has those of the other systems
}

func describeMachine(ctx context.Context, weirPath string) machine {
	m := machine{Cores: runtime.NumCPU(), Go: runtime.Version()}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		m.CPU = cpuModel(b)
	}
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.Kernel = strings.TrimSpace(string(b))
	}
	var info syscall.Sysinfo_t
	if syscall.Sysinfo(&info) == nil {
		m.MemoryMB = info.Totalram * uint64(info.Unit) >> 20
	}
	m.Weir = revision(ctx)
	if weirPath != "" {
		m.Weir = "binary " + filepath.Base(weirPath)
	}
	// "Redis server v=7.0.15 sha=…"
	for _, f := range strings.Fields(output(ctx, "redis-server", "--version")) {
		if v, ok := strings.CutPrefix(f, "v="); ok {
			m.Redis = v
		}
	}
	return m
}

// cpuModel returns the first processor's model from /proc/cpuinfo; some architectures have none.
func cpuModel(cpuinfo []byte) string {
	for line := range bytes.Lines(cpuinfo) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		if string(bytes.TrimSpace(name)) == "model name" {
			return string(bytes.TrimSpace(value))
		}
	}
	return runtime.GOARCH
}

// revision returns the commit of the checkout. git writes nothing.
func revision(ctx context.Context) string {
	rev := output(ctx, "git", "--no-optional-locks", "-C", "..", "rev-parse", "--short", "HEAD")
	if rev == "" {
		return "unknown"
	}
	if output(ctx, "git", "--no-optional-locks", "-C", "..", "status", "--porcelain") != "" {
		rev += "+"
	}
	return rev
}

// output returns what a command prints, or "" if it fails or does not exist.
func output(ctx context.Context, name string, args ...string) string {
	b, err := exec.CommandContext(ctx, name, args...).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

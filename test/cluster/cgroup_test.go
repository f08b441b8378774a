package clustertest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
)

// cgroup is a control group with a limit of memory, of version 1 or 2.
type cgroup struct {
	t   *testing.T
	dir string
	v2  bool
}

var cgroups atomic.Int32

// newCgroup makes a control group whose processes may use so many bytes together, and removes it when the test ends; it is to
// be made before the processes that enter it. The test is skipped where none can be made.
func newCgroup(t *testing.T, limit int64) *cgroup {
	t.Helper()
	name := fmt.Sprintf("weir-test-%d-%d", os.Getpid(), cgroups.Add(1))
	var reasons []error
	for _, parent := range memoryGroups() {
		g := &cgroup{t: t, dir: filepath.Join(parent.dir, name), v2: parent.v2}
		err := os.Mkdir(g.dir, 0o755)
		if err == nil {
			if err = g.setLimit(limit); err == nil {
				t.Cleanup(g.remove)
				return g
			}
			_ = os.Remove(g.dir)
		}
		reasons = append(reasons, err)
	}
	t.Skipf("needs a control group with a limit of memory, which root can make where /sys/fs/cgroup may be written: %v", errors.Join(reasons...))
	return nil
}

// memoryGroups returns the groups that one with a limit of memory may be made in: this process's own, and those above it.
// Under version 2 only a group without processes has others with limits, the topmost excepted.
func memoryGroups() (parents []*cgroup) {
	own, _ := os.ReadFile("/proc/self/cgroup") // without it there is none
	for line := range strings.Lines(string(own)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			continue
		}
		root, v2 := "", false
		switch {
		case fields[1] == "memory":
			root = "/sys/fs/cgroup/memory"
		case fields[0] == "0" && fields[1] == "":
			root, v2 = "/sys/fs/cgroup", true
		default:
			continue
		}
		for path := filepath.Clean(fields[2]); ; path = filepath.Dir(path) {
			parents = append(parents, &cgroup{dir: filepath.Join(root, path), v2: v2})
			if path == "/" {
				break
			}
		}
	}
	return parents
}

// file returns the name of a file of the group in the version that it is of.
func (g *cgroup) file(v1, v2 string) string {
	if g.v2 {
		return filepath.Join(g.dir, v2)
	}
	return filepath.Join(g.dir, v1)
}

func (g *cgroup) setLimit(bytes int64) error {
	// Not O_CREATE: a file that is not there is none that the kernel would heed.
	write := func(name string, n int64) error {
		f, err := os.OpenFile(name, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = f.WriteString(strconv.FormatInt(n, 10))
		return err
	}
	if err := write(g.file("memory.limit_in_bytes", "memory.max"), bytes); err != nil {
		return err
	}
	// Without memory to swap to, where there is such a bound.
	swap := int64(0)
	if !g.v2 {
		swap = bytes // with memory
	}
	if err := write(g.file("memory.memsw.limit_in_bytes", "memory.swap.max"), swap); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// inside is the wrapper of a command that runs in the group.
func (g *cgroup) inside() []string {
	return []string{"sh", "-c", `echo $$ >"$0" && exec "$@"`, filepath.Join(g.dir, "cgroup.procs")}
}

// kills returns how many processes of the group the kernel has killed for want of memory, and peak the most that the group
// has had at a time.
func (g *cgroup) kills() int64 {
	g.t.Helper()
	text := string(must[[]byte](g.t)(os.ReadFile(g.file("memory.oom_control", "memory.events"))))
	for line := range strings.Lines(text) {
		if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
			return must[int64](g.t)(strconv.ParseInt(strings.TrimSpace(n), 10, 64))
		}
	}
	g.t.Fatalf("no oom_kill in %q", text)
	return 0
}

func (g *cgroup) peak() int64 {
	text, err := os.ReadFile(g.file("memory.max_usage_in_bytes", "memory.peak"))
	if err != nil { // kernels before 5.19
		return -1
	}
	return must[int64](g.t)(strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64))
}

// remove removes the group, whose processes have ended; the kernel may take a moment to see that.
func (g *cgroup) remove() {
	eventually(g.t, waitTimeout, "the control group to be removed", func() bool {
		err := os.Remove(g.dir)
		return err == nil || errors.Is(err, os.ErrNotExist)
	})
}

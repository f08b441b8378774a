package clustertest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
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
	text := string(must.Value(os.ReadFile(g.file("memory.oom_control", "memory.events")))(g.t))
	for line := range strings.Lines(text) {
		if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
			return must.Value(strconv.ParseInt(strings.TrimSpace(n), 10, 64))(g.t)
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
	return must.Value(strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64))(g.t)
}

// remove removes the group, whose processes have ended; the kernel may take a moment to see that.
func (g *cgroup) remove() {
	eventually(g.t, waitTimeout, "the control group to be removed", func() bool {
		err := os.Remove(g.dir)
		return err == nil || errors.Is(err, os.ErrNotExist)
	})
}

// TestLimitOfVersion2: a node keeps to the limit of a control group of version 2, its own or one above it. The kernel has each
// controller in one version only, so the files are made up here, and what the process reads of itself is mounted over.
func TestLimitOfVersion2(t *testing.T) {
	unshare, err := exec.LookPath("unshare")
	if err != nil || os.Geteuid() != 0 {
		t.Skip("needs root and unshare, for mounts of its own")
	}
	const v2, weir = "cgroup2 cgroup2 rw", "0::/pods/weir\n"
	for name, test := range map[string]struct {
		kind, group string            // what is mounted, and the group that the process is in
		limits      map[string]string // files
		want        int64
	}{
		"its own":            {v2, weir, map[string]string{"pods/weir/memory.max": "268435456", "pods/memory.max": "max"}, 256 << 20},
		"of one above it":    {v2, weir, map[string]string{"pods/weir/memory.max": "max", "pods/memory.max": "536870912"}, 512 << 20},
		"the smaller of two": {v2, weir, map[string]string{"pods/weir/memory.max": "536870912", "pods/memory.max": "268435456"}, 256 << 20},
		// As in a container, whose group is the topmost one that it sees.
		"a namespace of groups": {v2, "0::/\n", map[string]string{"memory.max": "268435456"}, 256 << 20},
		// The topmost group has no such file, nor has one whose parent leaves memory to itself.
		"no file": {v2, weir, map[string]string{"pods/weir/cgroup.procs": "", "pods/memory.max": "268435456"}, 256 << 20},
		// Both versions are mounted, and memory is with the older one.
		"version 1 beside it": {
			"cgroup cgroup rw,memory", "4:memory:/pods/weir\n0::/\n",
			map[string]string{"pods/weir/memory.limit_in_bytes": "536870912", "pods/weir/memory.stat": "cache 0\nhierarchical_memory_limit 268435456"}, 256 << 20,
		},
	} {
		t.Run(name, func(t *testing.T) {
			write := func(err error) { must.NoError(t, err) }
			dir := t.TempDir()
			mounted := filepath.Join(dir, "fs")
			for file, limit := range test.limits {
				file = filepath.Join(mounted, file)
				write(os.MkdirAll(filepath.Dir(file), 0o755))
				write(os.WriteFile(file, []byte(limit+"\n"), 0o644))
			}
			mounts := fmt.Appendf(nil, "30 23 0:26 / %s rw,nosuid,nodev,noexec,relatime shared:4 - %s\n", mounted, test.kind)
			if test.kind != v2 {
				mounts = fmt.Appendf(mounts, "31 23 0:27 / %s rw,nosuid,nodev,noexec,relatime shared:5 - %s\n", filepath.Join(dir, "unified"), v2)
				write(os.Mkdir(filepath.Join(dir, "unified"), 0o755))
			}
			write(os.WriteFile(filepath.Join(dir, "cgroup"), []byte(test.group), 0o644))
			write(os.WriteFile(filepath.Join(dir, "mountinfo"), mounts, 0o644))
			wrapper := []string{unshare, "--mount", "sh", "-c",
				`mount --bind "$0/cgroup" /proc/$$/cgroup && mount --bind "$0/mountinfo" /proc/$$/mountinfo && exec "$@"`, dir}
			p := launchWith(t, wrapper, binary(t), "run", "--http-port=0", "--grpc-port=0", "--gossip-port=").awaitReady()
			page := p.metrics()
			got, want := int64(page.value("go_gc_gomemlimit_bytes")), test.want/100*90
			expect.Equal(t, got, want, "go_gc_gomemlimit_bytes")
			most := int64(page.value("weir_state_bytes_max"))
			expect.True(t, most >= test.want/5 && most <= test.want/2, "state may take %d", most)
		})
	}
}

package clustertest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/weirlimit/weir/test/must"
)

// network is a switch with hosts on it, each in a network namespace of its own, that can be cut from one another. The
// tests themselves are on the switch too and reach all hosts at all times.
type network struct {
	t      *testing.T
	subnet string // 10.77.0.
	hub    *namespace
	hosts  []*namespace
}

// namespace is a network namespace. It lasts as long as a process in it, which does nothing else.
type namespace struct{ pid, fd int }

// newNetwork makes a network of so many hosts, numbered from 1 in their addresses and from 0 here. The test is skipped
// where that cannot be done.
func newNetwork(t *testing.T, size int) *network {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root: run this test as root to see the network cut")
	}
	for _, tool := range []string{"ip", "iptables", "nsenter", "cat"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("no %s on this machine: install iproute2, iptables, util-linux and coreutils to see the network cut", tool)
		}
	}
	n := &network{t: t, subnet: "10.77.0."}
	n.hub = newNamespace(t)
	n.set(n.hub, "ip link set lo up")
	n.set(n.hub, "ip link add switch type bridge")
	n.set(n.hub, "ip link set switch up")
	n.set(n.hub, "ip address add "+n.subnet+"254/24 dev switch")
	for i := range size {
		n.hosts = append(n.hosts, n.attach(i+1))
	}
	return n
}

// attach puts one more host on the switch, by the number in its address.
func (n *network) attach(number int) *namespace {
	n.t.Helper()
	host, port := newNamespace(n.t), "port"+strconv.Itoa(number)
	n.set(n.hub, "ip link add "+port+" type veth peer name eth0 netns "+strconv.Itoa(host.pid))
	n.set(n.hub, "ip link set "+port+" master switch up")
	n.set(host, "ip link set lo up")
	n.set(host, "ip link set eth0 up")
	n.set(host, fmt.Sprintf("ip address add %s%d/24 dev eth0", n.subnet, number))
	return host
}

// set carries out a command line that must succeed.
func (n *network) set(ns *namespace, command string) {
	n.t.Helper()
	must.NoError(n.t, ns.run(command))
}

func newNamespace(t *testing.T) *namespace {
	t.Helper()
	cmd := exec.Command("cat")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Setpgid: true}
	must.Value(cmd.StdinPipe())(t) // it ends with this process, even if nobody is left to end it
	if err := cmd.Start(); err != nil {
		t.Skipf("no network namespace can be made here: %v", err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed, as it was told to be
	})
	fd := must.Value(unix.Open(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid), unix.O_RDONLY|unix.O_CLOEXEC, 0))(t)
	t.Cleanup(func() { unix.Close(fd) })
	return &namespace{pid: cmd.Process.Pid, fd: fd}
}

// enter is the beginning of a command line that is carried out in the namespace.
func (ns *namespace) enter() []string {
	return []string{"nsenter", "--net=/proc/" + strconv.Itoa(ns.pid) + "/ns/net", "--"}
}

// run carries out a command line, given as one text.
func (ns *namespace) run(command string) error {
	line := slices.Concat(ns.enter(), strings.Fields(command))
	if out, err := exec.Command(line[0], line[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", command, err, out)
	}
	return nil
}

// inside is the beginning of a command line that is carried out on a host.
func (n *network) inside(host int) []string { return n.hosts[host].enter() }

// cut has the hosts of the first list hear nothing any more of what those of the second send.
func (n *network) cut(deaf, from []int) {
	n.t.Helper()
	n.all(deaf, func(host *namespace) error {
		for _, other := range from {
			if err := host.run(fmt.Sprintf("iptables -A INPUT -s %s%d -j DROP", n.subnet, other+1)); err != nil {
				return err
			}
		}
		return nil
	})
}

// heal undoes all cuts.
func (n *network) heal() {
	n.t.Helper()
	var everybody []int
	for i := range n.hosts {
		everybody = append(everybody, i)
	}
	n.all(everybody, func(host *namespace) error { return host.run("iptables -F INPUT") })
}

// all does something to hosts side by side, because it takes a while and is to be one event.
func (n *network) all(hosts []int, do func(*namespace) error) {
	n.t.Helper()
	var work errgroup.Group
	for _, i := range hosts {
		work.Go(func() error { return do(n.hosts[i]) })
	}
	must.NoError(n.t, work.Wait())
}

// dial connects from the switch to a host, whose address is given as numbers.
func (n *network) dial(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	err = n.hub.do(func() (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, network, addr)
		return err
	})
	return conn, err
}

// do does something in the namespace, such as opening a socket, which stays there.
func (ns *namespace) do(something func() error) error {
	done := make(chan error, 1)
	go func() {
		// The thread that has been moved to the other namespace is not given back: it ends with the goroutine.
		runtime.LockOSThread()
		if err := unix.Setns(ns.fd, unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- something()
	}()
	return <-done
}

// cgroup is a control group with a limit of memory, of version 1 or 2.
type cgroup struct {
	t   *testing.T
	dir string
	v2  bool
}

var cgroups atomic.Int32

// newCgroup makes a control group whose processes may use so many bytes together, and removes it when the test ends; it
// is to be made before the processes that enter it. The test is skipped where none can be made.
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
	t.Skipf("needs a control group with a limit of memory, which root can make where /sys/fs/cgroup may be written: %v",
		errors.Join(reasons...))
	return nil
}

// memoryGroups returns the groups that one with a limit of memory may be made in: this process's own, and those above
// it. Under version 2 only a group without processes has others with limits, the topmost excepted.
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
	if err := write(g.file("memory.memsw.limit_in_bytes", "memory.swap.max"), swap); err != nil &&
		!errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// inside is the wrapper of a command that runs in the group.
func (g *cgroup) inside() []string {
	return []string{"sh", "-c", `echo $$ >"$0" && exec "$@"`, filepath.Join(g.dir, "cgroup.procs")}
}

// kills returns how many processes of the group the kernel has killed for want of memory, and peak the most that the
// group has had at a time.
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

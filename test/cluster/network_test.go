package clustertest

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
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
type namespace struct {
	pid   int
	fd    int
	close func() // ends it, at the latest when the test does
}

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
	n.set(n.hub, "ip address add "+n.hubAddress()+"/24 dev switch")
	for i := range size {
		n.hosts = append(n.hosts, n.attach(i+1))
	}
	return n
}

// hubAddress is where hosts reach the tests.
func (n *network) hubAddress() string { return n.subnet + "254" }

// attach puts one more host on the switch, by the number in its address. When it is closed, its address is nobody's.
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
	end := sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed, as it was told to be
	})
	t.Cleanup(end)
	fd := must.Value(unix.Open(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid), unix.O_RDONLY|unix.O_CLOEXEC, 0))(t)
	ns := &namespace{pid: cmd.Process.Pid, fd: fd, close: sync.OnceFunc(func() { unix.Close(fd); end() })}
	t.Cleanup(ns.close)
	return ns
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

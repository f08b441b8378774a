package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

const patience = testkit.Patience // before a test gives up waiting for a condition

// TestMain has members, which wait for each other most of the time, run side by side, and checks that closed clusters
// leave no goroutine behind.
func TestMain(m *testing.M) {
	testkit.Parallel(6)
	code := m.Run()
	if code == 0 {
		var left string
		if !within(patience, func() bool { left = goroutines(); return left == "" }) {
			fmt.Println("goroutines left behind:\n" + left)
			code = 1
		}
	}
	os.Exit(code)
}

// goroutines returns the stacks of those that work for a cluster.
func goroutines() string {
	buf := make([]byte, 1<<20)
	var left []string
	for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if strings.Contains(stack, "hashicorp/memberlist") || strings.Contains(stack, "cluster.(*") {
			left = append(left, stack)
		}
	}
	return strings.Join(left, "\n\n")
}

func within(d time.Duration, condition func() bool) bool {
	deadline := time.NewTimer(d)
	defer deadline.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-deadline.C:
			return condition()
		case <-tick.C:
		}
	}
	return true
}

// testNode is a cluster with what it has logged.
type testNode struct {
	*Cluster
	log *testkit.Buffer
}

const firstPeerPort = 10_000

// neighbours are the processes of all tests, by peer port, as far as they answer there. No port is opened.
var neighbours = struct {
	sync.Mutex
	last int
	at   map[int]*Cluster
}{last: firstPeerPort, at: map[int]*Cluster{}}

func newPeerPort() int {
	neighbours.Lock()
	defer neighbours.Unlock()
	neighbours.last++
	return neighbours.last
}

// answerAt has a process answer on its peer port, or nobody when it is nil.
func answerAt(port int, c *Cluster) {
	neighbours.Lock()
	defer neighbours.Unlock()
	neighbours.at[port] = c
}

// identify asks who is at a peer address.
func identify(ctx context.Context, addr string) (Identity, error) {
	port := int(netip.MustParseAddrPort(addr).Port())
	for {
		neighbours.Lock()
		c, opened := neighbours.at[port]
		mayCome := port > firstPeerPort && port <= neighbours.last
		neighbours.Unlock()
		switch {
		case c != nil:
			return c.Identity(), nil
		case opened || !mayCome:
			return Identity{}, errors.New("connection refused")
		}
		select { // until Start has returned
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return Identity{}, ctx.Err()
		}
	}
}

// config is one for tests: on the loopback address, in a hurry.
func config(name string, seeds ...string) Config {
	return Config{
		Name:                name,
		Join:                seeds,
		PeerPort:            newPeerPort(),
		Identify:            identify,
		HTTPPort:            2,
		GRPCPort:            3,
		SettingsFingerprint: ring.SettingsFingerprint(ring.HashKey{}),
		ProbeInterval:       150 * time.Millisecond,
		Settle:              100 * time.Millisecond,
		SeedTimeout:         2 * time.Second,
		RejoinInterval:      500 * time.Millisecond,
	}
}

func startNode(t *testing.T, cfg Config, changes ...func(*Config)) testNode {
	t.Helper()
	for _, change := range changes {
		change(&cfg)
	}
	n := testNode{log: new(testkit.Buffer)}
	cfg.Logger = slog.New(slog.NewTextHandler(n.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	n.Cluster = must.Value(Start(cfg))(t)
	answerAt(cfg.PeerPort, n.Cluster)
	t.Cleanup(func() {
		n.Close()
		if t.Failed() {
			t.Logf("log of %s:\n%s", cfg.Name, n.log)
		}
	})
	return n
}

// gossip returns the node's address for others to join.
func (n testNode) gossip() string { return n.View().Self.GossipAddr }

// crash ends a node without a goodbye.
func (n testNode) crash() {
	answerAt(int(n.self.Peer), nil)
	n.stop(func() error { return nil })
}

// Close ends a node with one.
func (n testNode) Close() error {
	defer answerAt(int(n.self.Peer), nil)
	return n.Cluster.Close()
}

// agree waits until all nodes have the same ring, of these nodes and no others.
func agree(t *testing.T, nodes ...testNode) {
	t.Helper()
	var names []string
	for _, n := range nodes {
		names = append(names, n.View().Self.Name)
	}
	want := ring.Build(names)
	testkit.Eventually(t, fmt.Sprintf("a ring of %q everywhere", names), func() bool {
		return !slices.ContainsFunc(nodes, func(n testNode) bool {
			return n.View().Ring.Fingerprint() != want.Fingerprint()
		})
	})
}

// fatal waits for a node's fatal error.
func (n testNode) waitFatal(t *testing.T) string {
	t.Helper()
	select {
	case err := <-n.Fatal():
		return err.Error()
	case <-time.After(patience):
		t.Fatalf("no fatal error; the node is %v", n.View().Self.State)
		return ""
	}
}

func noFatal(t *testing.T, nodes ...testNode) {
	t.Helper()
	for _, n := range nodes {
		select {
		case err := <-n.Fatal():
			t.Errorf("fatal error of %s: %v", n.View().Self.Name, err)
		default:
		}
	}
}

// freePorts finds ports that are free for TCP and UDP, for nodes that must know of each other before they start.
func freePorts(t *testing.T, n int) []int {
	t.Helper()
	var ports []int
	for range n {
		transport := must.Value(listen(t.Context(), Config{}.withDefaults(), nil,
			newGossipLog(slog.New(slog.DiscardHandler), func() {})))(t)
		defer transport.Shutdown()
		ports = append(ports, transport.GetAutoBindPort())
	}
	return ports
}

// freeSeeds are such ports and their addresses.
func freeSeeds(t *testing.T, n int) (ports []int, seeds []string) {
	t.Helper()
	ports = freePorts(t, n)
	for _, p := range ports {
		seeds = append(seeds, local(p))
	}
	return ports, seeds
}

func local(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

func TestThreeNodes(t *testing.T) {
	a := startNode(t, config("a"))
	b := startNode(t, config("b", a.gossip()))
	c := startNode(t, config("c", a.gossip()))
	agree(t, a, b, c)
	for _, n := range []testNode{a, b, c} {
		testkit.Eventually(t, "ready", func() bool { ready, detail := n.Ready(); return ready && detail == "" })
	}
	v := b.View()
	for p := range ring.Partitions {
		must.Equal(t, a.View().Owner(p).Name, v.Owner(p).Name, "partition %d has two owners", p)
	}
	m := a.View().Member("b")
	expect.True(t, *m == *v.Self && m.PeerAddr == local(b.cfg.PeerPort) && m.HTTPAddr == "127.0.0.1:2" &&
		m.GRPCAddr == "127.0.0.1:3", "a knows b as %+v, b itself as %+v", m, v.Self)

	b.SetPolicyHash(4711)
	<-v.Replaced()
	for _, n := range []testNode{a, b, c} {
		testkit.Eventually(t, "the policies' hash is known",
			func() bool { return n.View().Member("b").PolicyHash == 4711 })
	}
	expect.True(t, b.View().Ring == v.Ring && b.View().Version > v.Version,
		"news without a change of the ring changed the ring, or not the version")
	noFatal(t, a, b, c)
}

// Nodes that all start together, each with the addresses of all, end up in one ring, and none is ever active by itself.
func TestStartTogether(t *testing.T) {
	ports, seeds := freeSeeds(t, 5)
	nodes := make([]testNode, len(ports))
	var wg sync.WaitGroup
	for i, p := range ports {
		cfg := config(fmt.Sprintf("n%d", i), seeds...)
		cfg.GossipPort = p
		cfg.SeedTimeout = patience
		nodes[i] = startNode(t, cfg)
		wg.Go(func() {
			v := nodes[i].View()
			for v.Self.State == Joining {
				<-v.Replaced()
				v = nodes[i].View()
			}
			if v.Alone || len(v.Members) == 1 {
				t.Errorf("%s became active alone", v.Self.Name)
			}
		})
	}
	agree(t, nodes...)
	wg.Wait()
	noFatal(t, nodes...)
}

func TestLeave(t *testing.T) {
	a := startNode(t, config("a"))
	b := startNode(t, config("b", a.gossip()))
	c := startNode(t, config("c", a.gossip()))
	agree(t, a, b, c)
	expect.NoError(t, b.Leave(t.Context()))
	if v := b.View(); v.Self.State != Leaving || v.Owner(0) == v.Self {
		t.Errorf("after Leave: %v, owner of partition 0 %v", v.Self.State, v.Owner(0))
	}
	agree(t, a, c)
	ready, detail := b.Ready()
	expect.True(t, !ready && detail == "leaving", "a leaving node is ready: %v, %q", ready, detail)
	m := a.View().Member("b")
	expect.True(t, m != nil && m.State == Leaving, "a leaving node is no member any more: %+v", m)
	expect.NoError(t, b.Leave(t.Context()), "leaving again")
	expect.NoError(t, b.Close())
	testkit.Eventually(t, "b is gone",
		func() bool { return a.View().Member("b") == nil && c.View().Member("b") == nil })
	expect.NoError(t, b.Close(), "closing again")
	expect.ErrorIs(t, b.Leave(t.Context()), errClosed, "leaving after Close")
	expect.True(t, !strings.Contains(a.log.String(), "member lost"), "a took b, which had left, for dead")
}

// Names of one length and leaves at one time are what the library's queue mixes up: see leaveAttempt.
func TestLeaveTogether(t *testing.T) {
	a := startNode(t, config("node-0"))
	nodes := []testNode{a}
	for i := 1; i < 5; i++ {
		nodes = append(nodes, startNode(t, config(fmt.Sprint("node-", i), a.gossip())))
	}
	agree(t, nodes...)
	var leaving sync.WaitGroup
	for _, n := range nodes[1:] {
		leaving.Go(func() {
			expect.NoError(t, n.Leave(t.Context()))
		})
	}
	leaving.Wait()
	testkit.Eventually(t, "everybody to have heard of every leave", func() bool {
		for _, n := range nodes {
			if len(n.View().Ring.Members()) != 1 {
				return false
			}
		}
		return true
	})
}

func TestLeaveIsBounded(t *testing.T) {
	a := startNode(t, config("a"))
	b := startNode(t, config("b", a.gossip()))
	agree(t, a, b)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := b.Leave(ctx)
	expect.True(t, err == nil || errors.Is(err, context.Canceled), "%v", err)
	testkit.Eventually(t, "b leaves all the same", func() bool { return a.View().Member("b").State == Leaving })
}

// A member whose gossip nobody hears stays one while it answers on its peer port, and is heard again; it is gone when
// it hangs there.
func TestDoubt(t *testing.T) {
	t.Parallel()
	var cable cable
	var hangs atomic.Bool
	ports, seeds := freeSeeds(t, 3)
	var nodes []testNode
	for i, p := range ports {
		cfg := config(string(rune('a'+i)), seeds...)
		cfg.GossipPort = p
		cfg.wrapTransport = cable.wrap
		if i < 2 {
			cfg.Identify = func(ctx context.Context, addr string) (Identity, error) {
				id, err := identify(ctx, addr)
				if id.Name == "c" && hangs.Load() {
					<-ctx.Done()
					err = ctx.Err()
				}
				return id, err
			}
		}
		nodes = append(nodes, startNode(t, cfg))
	}
	agree(t, nodes...)
	views := []*View{nodes[0].View(), nodes[1].View()}
	cable.cut(seeds[2])
	for _, n := range nodes[:2] {
		testkit.Eventually(t, "gossip takes c for dead",
			func() bool { return strings.Contains(n.log.String(), "member suspected") })
	}
	cable.cut()
	// Dead to the list, it is up again once it has refuted that.
	for _, n := range nodes[:2] {
		testkit.Eventually(t, "c is listed again", func() bool {
			n.prober.mu.Lock()
			defer n.prober.mu.Unlock()
			_, listed := n.prober.listed[nodes[2].self.identity]
			return listed
		})
	}
	for i, n := range nodes[:2] {
		if n.View().Ring != views[i].Ring || strings.Contains(n.log.String(), "member lost") {
			t.Errorf("%s took c for gone, which answered", n.View().Self.Name)
		}
	}

	cable.cut(seeds[2])
	hangs.Store(true)
	agree(t, nodes[0], nodes[1])
}

// A process that starts again at once, with its old name and address, takes its place long before the failure
// detection has noticed that its predecessor is gone.
func TestRestartInPlace(t *testing.T) {
	t.Parallel()
	slow := func(cfg Config) Config { cfg.ProbeInterval = 30 * time.Second; return cfg }
	// The gossip's pace hangs on the same setting, so news travel by joining only; two nodes are enough for that.
	a := startNode(t, slow(config("a")))
	b := startNode(t, slow(config("b", a.gossip())))
	testkit.Eventually(t, "b is active", func() bool { return b.View().Self.State == Active })
	port := netip.MustParseAddrPort(b.gossip()).Port()
	old := b.View().Self.Boot
	b.crash()
	again := startNode(t, slow(config("b", a.gossip())), func(c *Config) { c.GossipPort = int(port) })
	testkit.Eventually(t, "b is active again", func() bool { return again.View().Self.State == Active })
	expect.True(t, again.View().Self.Boot != old, "the boot is that of before")
	if again.View().Owner(0) == nil || again.View().Member("b") != again.View().Self {
		t.Errorf("the process that counts for b is %+v, not itself", again.View().Member("b"))
	}
	noFatal(t, a, again)
}

func TestNameInUse(t *testing.T) {
	t.Parallel()
	a := startNode(t, config("a"))
	b := startNode(t, config("b", a.gossip()))
	agree(t, a, b)
	thief := startNode(t, config("b", a.gossip()))
	want := fmt.Sprintf("name b is in use by %s; give this node another one", b.gossip())
	testkit.Eventually(t, "the newcomer says what is wrong", func() bool {
		ready, detail := thief.Ready()
		return !ready && strings.Contains(detail, want)
	})
	expect.Equal(t, thief.waitFatal(t), want, "fatal error")
	v := thief.View()
	expect.True(t, v.Self.State == Joining && v.Owner(0) != v.Self, "the newcomer is %v", v.Self.State)
	thief.Close()
	testkit.Eventually(t, "a knows one b", func() bool { return a.View().Member("b").Boot == b.View().Self.Boot })
	agree(t, a, b)
	noFatal(t, a, b)
}

// Two that start together with one name: one of them gets it.
func TestNameTwiceFromTheStart(t *testing.T) {
	t.Parallel()
	a := startNode(t, config("a"))
	twins := []testNode{startNode(t, config("b", a.gossip())), startNode(t, config("b", a.gossip()))}
	var loser, winner testNode
	select {
	case err := <-twins[0].Fatal():
		t.Log(err)
		loser, winner = twins[0], twins[1]
	case err := <-twins[1].Fatal():
		t.Log(err)
		loser, winner = twins[1], twins[0]
	case <-time.After(patience):
		t.Fatal("both go on")
	}
	loser.Close()
	agree(t, a, winner)
	noFatal(t, winner)
}

func TestOtherVoters(t *testing.T) {
	a := startNode(t, config("a"), func(c *Config) { c.Voters = []string{"a", "b", "c"} })
	cfg := config("b", a.gossip())
	cfg.Voters = []string{"c", "b", "a"} // the order does not count
	b := startNode(t, cfg)
	agree(t, a, b)
	for _, voters := range [][]string{nil, {"a", "b", "d"}} {
		got := startNode(t, config("d", a.gossip(), b.gossip()), func(c *Config) { c.Voters = voters }).waitFatal(t)
		expect.True(t, strings.Contains(got, "another list of voters"), "with voters %v: %q", voters, got)
	}
	expect.Equal(t, a.View().Member("d"), nil, "one with other voters is a member")
}

func TestOtherSettings(t *testing.T) {
	a := startNode(t, config("a"))
	b := startNode(t, config("b", a.gossip()))
	agree(t, a, b)
	cfg := config("c", a.gossip(), b.gossip())
	cfg.SettingsFingerprint = ring.SettingsFingerprint(ring.RandomHashKey())
	stranger := startNode(t, cfg)
	got := stranger.waitFatal(t)
	for _, want := range []string{"another cluster secret", fmt.Sprintf("%016x", cfg.SettingsFingerprint)} {
		expect.True(t, strings.Contains(got, want), "fatal error %q, want one with %q", got, want)
	}
	v := stranger.View()
	expect.True(t, v.Self.State == Joining && len(v.Members) == 1, "the stranger has view %+v", v)
	testkit.Eventually(t, "a logs the rejection",
		func() bool { return strings.Contains(a.log.String(), `msg="node rejected"`) })
	testkit.Eventually(t, "the stranger has knocked twice",
		func() bool { return strings.Count(a.log.String(), "ignoring alive message") >= 2 })
	n := strings.Count(a.log.String(), "level=ERROR")
	expect.True(t, n == 1, "the rejection is logged %d times", n)
	expect.Equal(t, a.View().Member("c"), nil, "the stranger is a member")
	agree(t, a, b)
	noFatal(t, a, b)
}

func TestKeys(t *testing.T) {
	t.Parallel()
	key := func(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }
	with := func(cfg Config, keys ...[]byte) Config { cfg.Keys = keys; return cfg }
	a := startNode(t, with(config("a"), key(1), key(2)))
	b := startNode(t, with(config("b", a.gossip()), key(2), key(1))) // a key is being changed
	agree(t, a, b)
	wrong := startNode(t, with(config("c", a.gossip()), key(3)))
	none := startNode(t, config("d", a.gossip()))
	for _, n := range []testNode{wrong, none} {
		n.staysOut(t, "gossip-key-file", a.gossip())
	}
	n := len(a.View().Members)
	expect.True(t, n == 2, "a has %d members", n)
	noFatal(t, a, b)

	plain := startNode(t, config("e"))
	keyed := startNode(t, with(config("f", plain.gossip()), key(1)))
	keyed.staysOut(t, "gossip-key-file", plain.gossip())
	noFatal(t, plain)
	// Its key can be corrected while it runs; whoever it finds then takes it in.
	must.NoError(t, wrong.AddKey(key(1)))
	must.NoError(t, wrong.UseKey(KeyID(key(1))))
	agree(t, a, b, wrong)
}

// staysOut waits until a node has waited for its seeds in vain, and checks that it has neither gone on alone nor ended,
// and says why.
func (n testNode) staysOut(t *testing.T, why ...string) {
	t.Helper()
	testkit.Eventually(t, "the time for the seeds to answer is over", func() bool {
		silence := make(chan bool, 1)
		n.post(func() { silence <- n.roster.silence })
		return <-silence
	})
	ready, detail := n.Ready()
	if n.View().Self.State != Joining || ready {
		t.Errorf("%s is %v", n.View().Self.Name, n.View().Self.State)
	}
	for _, want := range why {
		if !strings.Contains(detail, want) {
			t.Errorf("%s says %q, want something with %q", n.View().Self.Name, detail, want)
		}
	}
	noFatal(t, n)
}

// cable is a network that can be cut between the nodes of its two sides.
type cable struct {
	mu    sync.Mutex
	other map[string]bool // addresses of one side; nil while nothing is cut
}

func (c *cable) cut(addrs ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.other = map[string]bool{}
	for _, a := range addrs {
		c.other[a] = true
	}
}

func (c *cable) carries(from, to string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.other[from] == c.other[to]
}

// wire is a node's end of the cable.
type wire struct {
	memberlist.NodeAwareTransport
	cable *cable
	self  string
}

func (c *cable) wrap(t memberlist.NodeAwareTransport) memberlist.NodeAwareTransport {
	return wire{t, c, local(t.(*transport).GetAutoBindPort())}
}

func (w wire) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	if !w.cable.carries(w.self, a.Addr) {
		return time.Time{}, nil // lost
	}
	return w.NodeAwareTransport.WriteToAddress(b, a)
}

func (w wire) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	if !w.cable.carries(w.self, a.Addr) {
		return nil, errors.New("cut")
	}
	return w.NodeAwareTransport.DialAddressTimeout(a, timeout)
}

// identify asks from an address who is at a peer address.
func (c *cable) identify(self string) func(context.Context, string) (Identity, error) {
	return func(ctx context.Context, addr string) (Identity, error) {
		id, err := identify(ctx, addr)
		if err == nil && !c.carries(self, local(int(id.GossipPort))) {
			return Identity{}, errors.New("cut")
		}
		return id, err
	}
}

func TestSplitHeals(t *testing.T) {
	t.Parallel()
	var cable cable
	ports, seeds := freeSeeds(t, 4)
	var nodes []testNode
	for i, p := range ports {
		cfg := config(fmt.Sprintf("n%d", i), seeds...)
		cfg.GossipPort = p
		cfg.wrapTransport = cable.wrap
		cfg.Identify = cable.identify(local(p))
		nodes = append(nodes, startNode(t, cfg))
	}
	agree(t, nodes...)
	cable.cut(seeds[2], seeds[3])
	agree(t, nodes[0], nodes[1])
	agree(t, nodes[2], nodes[3])
	cable.cut()
	agree(t, nodes...)
	cable.cut(seeds[1])
	agree(t, nodes[0], nodes[2], nodes[3])
	agree(t, nodes[1])
	testkit.Eventually(t, "n1 says that it is alone", func() bool {
		ready, detail := nodes[1].Ready()
		return ready && nodes[1].View().Alone && strings.Contains(detail, "alone")
	})
	cable.cut()
	agree(t, nodes...)
	noFatal(t, nodes...)
}

func TestSeedIsSelf(t *testing.T) {
	t.Parallel()
	port := freePorts(t, 1)[0]
	seeds := []string{local(port), fmt.Sprintf("localhost:%d", port)}
	n := startNode(t, config("a", seeds...), func(c *Config) { c.GossipPort = port })
	ready, detail := n.Ready()
	expect.True(t, !ready && strings.Contains(detail, "no seed has answered"), "at once: ready %v, %q", ready, detail)
	agree(t, n)
	ready, detail = n.Ready()
	expect.True(t, ready && strings.Contains(detail, "alone"), "after the time-out: ready %v, %q", ready, detail)
	noFatal(t, n)
}

// A node whose seeds are silent goes on alone, and joins them when they come.
func TestSilentSeeds(t *testing.T) {
	t.Parallel()
	port := freePorts(t, 1)[0]
	b := startNode(t, config("b", local(port), "no-such-host.invalid:7946"))
	agree(t, b)
	ready, detail := b.Ready()
	expect.True(t, ready && strings.Contains(detail, "alone"), "ready %v, %q", ready, detail)
	a := startNode(t, config("a"), func(c *Config) { c.GossipPort = port })
	agree(t, a, b)
	testkit.Eventually(t, "all is well", func() bool { ready, detail := b.Ready(); return ready && detail == "" })
	testkit.Eventually(t, "b logs that a answers",
		func() bool { return strings.Contains(b.log.String(), "seed reached") })
	n := strings.Count(b.log.String(), "does not resolve")
	expect.True(t, n == 1, "the name that does not resolve is logged %d times", n)
	noFatal(t, a, b)
}

// Two processes whose metadata differ only by garbage must not take each other down.
func TestForeignGossip(t *testing.T) {
	a := startNode(t, config("a"))
	conf := memberlist.DefaultLocalConfig()
	conf.Name = "consul"
	conf.BindAddr, conf.BindPort = "127.0.0.1", 0
	conf.EnableCompression = false // nodes do not compress, and turn away who does
	conf.Logger = newGossipLog(slog.New(slog.DiscardHandler), func() {}).standard()
	foreign, err := memberlist.Create(conf)
	must.NoError(t, err)
	defer foreign.Shutdown()
	must.Value(foreign.Join([]string{a.gossip()}))(t)
	testkit.Eventually(t, "the rejection is logged",
		func() bool { return strings.Contains(a.log.String(), "not the gossip name of a weir node") })
	expect.Equal(t, len(a.View().Members), 1, "members")
	noFatal(t, a)
}

func TestStartErrors(t *testing.T) {
	a := startNode(t, config("a"))
	port := int(netip.MustParseAddrPort(a.gossip()).Port())
	for _, test := range []struct {
		name   string
		change func(*Config)
		want   []string
	}{
		{"port in use", func(c *Config) { c.GossipPort = port }, []string{"gossip-port", a.gossip(), "in use"}},
		{"not our address", func(c *Config) { c.Bind = "192.0.2.1" }, []string{"gossip-port", "192.0.2.1"}},
		{"advertise what does not resolve", func(c *Config) { c.Advertise = "no-such-host.invalid" },
			[]string{"advertise", "no-such-host.invalid"}},
		{"seed elsewhere, bound to loopback", func(c *Config) { c.Join = []string{"192.0.2.1:7946"} },
			[]string{"join", "192.0.2.1:7946", "bind"}},
		{"invalid", func(c *Config) { c.Name = "" }, []string{"name"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := config("b")
			test.change(&cfg)
			c, err := Start(cfg)
			if err == nil {
				c.Close()
				t.Fatal("no error")
			}
			for _, want := range test.want {
				expect.True(t, strings.Contains(err.Error(), want), "error %q, want one with %q", err, want)
			}
		})
	}
}

func TestAdvertise(t *testing.T) {
	a := startNode(t, config("a"), func(c *Config) { c.Bind = "0.0.0.0"; c.Advertise = "localhost" })
	host := a.View().Self.Host
	expect.True(t, host == "127.0.0.1" || host == "::1", "advertised %s", host)
	b := startNode(t, config("b", a.gossip()))
	agree(t, a, b)
}

package node

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

const onePolicy = "policies:\n  - {name: login, algorithm: sliding_log, limit: %d, window: 1m}\n"

// strictPolicy can only be decided by nodes with voters.
const strictPolicy = "policies:\n  - {name: a, algorithm: sliding_log, limit: 1, window: 1m, durability: sync, consistency: strict}\n"

// TestMain has nodes, most of which wait, run side by side.
func TestMain(m *testing.M) {
	clusters = make(chan struct{}, max(testkit.Parallel(9)/3, 1))
	os.Exit(m.Run())
}

// clusters has a place for each cluster that may run at a time. Nodes that get no processor time for seconds are taken
// for dead, rightly.
var clusters chan struct{}

// awaitTurn waits until a test may have a cluster, to its end.
func awaitTurn(t *testing.T) {
	clusters <- struct{}{}
	t.Cleanup(func() { <-clusters })
}

// testConfig is a node on free loopback ports.
func testConfig(t *testing.T, name string) Config {
	return Config{
		Name: name, Bind: "127.0.0.1", HTTPPort: PortAny, GRPCPort: PortAny, GossipPort: PortAny, PeerPort: PortAny,
		PolicyFile: testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(onePolicy, 5)),
		Timeout:    20 * time.Second, Grace: 5 * time.Second, Logger: slog.New(slog.DiscardHandler),
		probeInterval: 1500 * time.Millisecond,
	}
}

func mustStart(t *testing.T, cfg Config) *Node {
	t.Helper()
	n := must.Value(Start(t.Context(), cfg))(t)
	t.Cleanup(n.Stop)
	return n
}

// mustSettle starts a node, and waits until it is ready.
func mustSettle(t *testing.T, cfg Config) *Node {
	t.Helper()
	n := mustStart(t, cfg)
	awaitSettled(t, n)
	return n
}

// startCluster starts nodes of these names, as change has them, of which all but the first join it, and waits until
// they are ready.
func startCluster(t *testing.T, names string, change func(i int, cfg *Config)) (nodes []*Node) {
	t.Helper()
	awaitTurn(t)
	for i, name := range strings.Fields(names) {
		cfg := testConfig(t, name)
		if i > 0 {
			cfg.Join = []string{nodes[0].GossipAddr()}
		}
		if change != nil {
			change(i, &cfg)
		}
		nodes = append(nodes, mustStart(t, cfg))
	}
	awaitSettled(t, nodes...)
	return nodes
}

func awaitSettled(t *testing.T, nodes ...*Node) {
	t.Helper()
	for _, n := range nodes {
		select {
		case <-n.Settled():
		case <-n.Failed():
			t.Fatal(n.Err())
		case <-time.After(2 * testkit.Patience):
			_, why := n.Ready()
			t.Fatalf("%s is not ready: %s", n.cfg.Name, why)
		}
	}
}

// leavesNothing fails the test when, after f, goroutines are left that were not there before.
func leavesNothing(t *testing.T, f func()) {
	t.Helper()
	before := runtime.NumGoroutine()
	f()
	http.DefaultClient.CloseIdleConnections()
	for deadline := time.Now().Add(testkit.Patience); runtime.NumGoroutine() > before; runtime.Gosched() {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines before, %d after:\n%s", before, runtime.NumGoroutine(),
				stacks[:runtime.Stack(stacks, true)])
		}
	}
}

// wantClosed does not listen at the addresses again: processes of other tests may get the ports at once.
func wantClosed(t *testing.T, listeners ...*admission.Listener) {
	t.Helper()
	for _, l := range listeners {
		if l != nil {
			expect.ErrorIs(t, l.Close(), net.ErrClosed, "%s is still open", l.Addr())
		}
	}
}

func get(t *testing.T, n *Node, path string) (int, string) {
	t.Helper()
	resp, body := send(t, n, "GET", path, "", "")
	return resp.StatusCode, body
}

func check(t *testing.T, n *Node, key string) limit.Decision {
	t.Helper()
	r, err := n.limiter.Check(t.Context(), []limit.Check{{Target: limit.Target{Policy: "login", Key: key}, Cost: 1}})
	must.NoError(t, err)
	must.NoError(t, r[0].Err)
	return r[0].Decision
}

func TestTwoNodes(t *testing.T) {
	leavesNothing(t, func() {
		nodes := startCluster(t, "a b", nil)
		a, b := nodes[0], nodes[1]
		line := regexp.MustCompile(
			`^weir ready name=b http=127\.0\.0\.1:\d+ grpc=127\.0\.0\.1:\d+ gossip=127\.0\.0\.1:\d+ peer=127\.0\.0\.1:\d+$`)
		expect.True(t, line.MatchString(b.ReadyLine()), "ready line: %s", b.ReadyLine())
		for k := range 20 {
			for i := range 8 {
				n := nodes[(i+k)%2]
				d := check(t, n, fmt.Sprint("key-", k))
				expect.True(t, d.Allowed == (i < 5) && !d.FailedOpen, "key %d, check %d: %+v", k, i, d)
			}
		}
		for _, n := range nodes {
			st := n.Status(t.Context())
			expect.True(t, st.Ready && len(st.Members) == 2 &&
				st.Members[0].Partitions+st.Members[1].Partitions == st.Partitions, "status of %s: %v", n.cfg.Name, st)
			for _, m := range st.Members {
				expect.True(t, m.State == "active" && m.Reachable && m.Policies == 1 && m.Keys != 0,
					"%s says of %s: %v", n.cfg.Name, m.Name, m)
			}
			code, page := get(t, n, "/readyz")
			expect.True(t, code == http.StatusOK, "/readyz: %d %s", code, page)
		}

		b.Stop()
		ready, why := b.Ready()
		expect.True(t, !ready && strings.Contains(why, "leaving"), "after Stop: %t, %s", ready, why)
		testkit.Eventually(t, "the other to own everything", func() bool {
			st := a.Status(t.Context())
			return len(st.Members) == 1 && st.Members[0].Partitions == st.Partitions
		})
		d := check(t, a, "another")
		expect.True(t, d.Allowed && !d.FailedOpen, "alone: %+v", d)
		testkit.Eventually(t, "the links to the other to end", func() bool {
			stacks := make([]byte, 1<<20)
			return !strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "transport.(*link[")
		})
		a.Stop()
		wantClosed(t, a.listeners.http, a.listeners.grpc, a.listeners.peer, b.listeners.peer)
	})
}

// TestStartNodeErrors: whatever keeps a node from starting is named, and what was started before it is ended.
func TestStartNodeErrors(t *testing.T) {
	busy := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer busy.Close()
	taken := Port(busy.Addr().(*net.TCPAddr).Port)
	short := testkit.WriteFile(t, "short", "secret")
	strict := testkit.WriteFile(t, "strict.yaml", strictPolicy)
	for _, c := range []struct {
		want  string // at the beginning of the error
		spoil func(*Config)
	}{
		{"bind: ", func(c *Config) { c.Bind = "" }},
		{"bind: ", func(c *Config) { c.Bind = "nowhere" }},
		{"bind: ", func(c *Config) { c.Bind = "192.0.2.1" }},
		{"name: ", func(c *Config) { c.Name = "two words" }},
		{"name: ", func(c *Config) { c.Name, c.GossipPort = "two words", PortOff }},
		{"join: ", func(c *Config) { c.Join = []string{"nowhere"} }},
		{"join: ", func(c *Config) { c.Join = []string{"192.0.2.1:7946"} }},
		{"join: ", func(c *Config) { c.Join, c.GossipPort = []string{"127.0.0.1:1"}, PortOff }},
		{"advertise: ", func(c *Config) { c.Advertise = "0.0.0.0" }},
		{"peer-port: ", func(c *Config) { c.PeerPort = PortOff }},
		{"http-port: ", func(c *Config) { c.HTTPPort = taken }},
		{"grpc-port: ", func(c *Config) { c.GRPCPort = taken }},
		{"peer-port: ", func(c *Config) { c.PeerPort = taken }},
		{"gossip-port: ", func(c *Config) { c.GossipPort = taken }},
		{"policies: ", func(c *Config) { c.PolicyFile = "/none" }},
		{"policies: ", func(c *Config) { c.PolicyFile = short }},
		{"policies: ", func(c *Config) { c.PolicyFile = strict }},
		{"voters: ", func(c *Config) { c.GossipPort, c.Voters = PortOff, []string{"a", "b", "c"} }},
		{"gossip-key-file: ", func(c *Config) { c.Security.GossipKeyFile = "/none" }},
		{"gossip-key-file: ", func(c *Config) { c.Security.GossipKeyFile = short }},
		{"cluster-secret-file: ", func(c *Config) { c.Security.ClusterSecretFile = "/none" }},
		{"cluster-secret-file: ", func(c *Config) { c.Security.ClusterSecretFile = short }},
	} {
		leavesNothing(t, func() {
			cfg := testConfig(t, "node")
			c.spoil(&cfg)
			n, err := Start(t.Context(), cfg)
			expect.True(t, err != nil && strings.HasPrefix(err.Error(), c.want), "%v, want %s", err, c.want)
			n.Stop() // once more does no harm
			wantClosed(t, n.listeners.http, n.listeners.grpc, n.listeners.peer)
		})
	}
}

// TestStop: several at once, with callers that stay, watch or say nothing, and again.
func TestStop(t *testing.T) {
	leavesNothing(t, func() {
		n := mustSettle(t, testConfig(t, "node"))
		for _, d := range []*admission.Listener{n.listeners.http, n.listeners.grpc, n.listeners.peer} {
			c := must.Value(net.Dial("tcp", addrOf(d)))(t)
			defer c.Close()
			testkit.Eventually(t, "the server to have taken the connection", func() bool {
				_, anonymous, _ := d.Connections()
				return anonymous == 1
			})
		}
		c, err := client.Dial(t.Context(), addrOf(n.listeners.grpc)) // which watches the node's health
		must.NoError(t, err)
		defer c.Close()
		must.NoError(t, c.Ready(t.Context()))
		conn := dialed(t, n)
		defer conn.Close()
		watch := must.Value(healthv1.NewHealthClient(conn).Watch(t.Context(), &healthv1.HealthCheckRequest{}))(t)
		r, err := watch.Recv()
		expect.True(t, err == nil && r.Status == healthv1.HealthCheckResponse_SERVING, "health: %v, %v", r, err)
		asked := time.Now()
		var stops sync.WaitGroup
		for range 3 {
			stops.Go(n.Stop)
		}
		stops.Wait()
		n.Stop()
		r, err = watch.Recv()
		expect.True(t, err != nil || r.Status == healthv1.HealthCheckResponse_NOT_SERVING, "health after Stop: %v", r)
		took := time.Since(asked)
		expect.True(t, took <= 4*time.Second, "took %v", took) // http.Server alone would take 5 s
		select {
		case <-n.Failed():
			t.Errorf("stopping is taken for a failure: %v", n.Err())
		default:
		}
	})
}

// TestStopCutsOff: a request that does not end is cut off after the grace time.
func TestStopCutsOff(t *testing.T) {
	leavesNothing(t, func() {
		cfg := testConfig(t, "node")
		cfg.Grace = 100 * time.Millisecond
		n := mustSettle(t, cfg)
		c := must.Value(net.Dial("tcp", addrOf(n.listeners.http)))(t)
		defer c.Close()
		// The node says to go on once the handler reads the body, which never comes.
		_, err := io.WriteString(c,
			"POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n")
		must.NoError(t, err)
		_, err = c.Read(make([]byte, 8))
		must.NoError(t, err)
		asked := time.Now()
		n.Stop()
		took := time.Since(asked)
		expect.True(t, took >= cfg.Grace && took <= 4*time.Second, "took %v, the grace time is %v", took, cfg.Grace)
	})
}

// TestSettle: a node whose seed is silent answers, says that it is not ready and why, and does not become ready by
// being stopped.
func TestSettle(t *testing.T) {
	leavesNothing(t, func() {
		cfg := testConfig(t, "node")
		cfg.Join = []string{"127.0.0.1:1"}
		n := mustStart(t, cfg)
		code, page := get(t, n, "/readyz")
		expect.True(t, code == http.StatusServiceUnavailable && strings.Contains(page, "no seed has answered yet"),
			"/readyz: %d %s", code, page)
		code, page = get(t, n, "/healthz")
		expect.True(t, code == http.StatusOK, "/healthz: %d %s", code, page)
		n.Stop()
		select {
		case <-n.Settled():
			t.Error("settled by being stopped")
		default:
		}
	})
}

// TestConnectionsEndWithAnswers: whoever keeps a connection over HTTP hears with an answer that the node stops, before
// the connection is closed.
func TestConnectionsEndWithAnswers(t *testing.T) {
	t.Parallel()
	n := mustSettle(t, testConfig(t, "node"))
	closes := func() bool {
		t.Helper()
		resp := must.Value(http.Get("http://" + n.HTTPAddr() + "/healthz"))(t)
		must.NoError(t, resp.Body.Close())
		return resp.Close
	}
	expect.True(t, !closes(), "a node that runs ends a connection")
	n.readiness.Stop() // the first that stopping does, before others decide what this node decided
	expect.True(t, closes(), "a node that stops keeps a connection")
}

// TestRoomForCopies: a member of a cluster leaves the last sixteenth of its keys to copies of others' partitions.
func TestRoomForCopies(t *testing.T) {
	t.Parallel()
	const keys, shares = 1600, 40 // few policies, or callers, may not take all that there is
	cfg := testConfig(t, "node")
	text := "policies:\n"
	for i := range shares {
		text += fmt.Sprintf("  - {name: p%d, limits: [5/1h]}\n", i)
	}
	cfg.PolicyFile, cfg.MaxKeys = testkit.WriteFile(t, "policies.yaml", text), keys
	n := mustSettle(t, cfg)
	kept := 0
	for i := range keys {
		target := limit.Target{Policy: fmt.Sprintf("p%d", i%shares), Key: fmt.Sprint(i), Caller: fmt.Sprint(i % shares)}
		r, err := n.limiter.Check(t.Context(), []limit.Check{{Target: target, Cost: 1}})
		must.True(t, err == nil && r[0].Err == nil, "%v %v", r, err)
		if !r[0].FailedOpen {
			kept++
		}
	}
	expect.Equal(t, kept, keys-keys/16, "new keys of %d are kept", keys)
}

// TestInStep: a member that keeps another ring, or that cannot be asked, is not in step.
func TestInStep(t *testing.T) {
	t.Parallel()
	n := mustSettle(t, testConfig(t, "a"))
	expect.True(t, n.inStep(t.Context()), "a node alone is not in step with itself")
	members := []cluster.Member{*n.view().Self, {Name: "b", Boot: 7, State: cluster.Active, PeerAddr: "127.0.0.1:1"}}
	v := &cluster.View{Members: members, Self: &members[0]}
	everybody := func(*cluster.Member) bool { return true }
	got := n.inspectOthers(t.Context(), v, everybody)
	expect.True(t, len(got) == 1 && got[0].member.Name == "b" && got[0].response == nil,
		"of a member that is not there: %+v", got)
	got = n.inspectOthers(t.Context(), v, func(*cluster.Member) bool { return false })
	expect.Equal(t, len(got), 0, "nobody was to be asked: %+v", got)
	v.Ring = n.view().Ring
	expect.True(t, !n.agreed(t.Context(), v), "in step with a member that is not there")
	alone := *n.view()
	alone.Ring = ring.Build([]string{"a", "b"})
	expect.True(t, !n.agreed(t.Context(), &alone), "in step by a ring that is this node's no more")
}

// TestReload: what changes in the policy file reaches the limiter, and a mistake in it those who look.
func TestReload(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "node")
	n := mustSettle(t, cfg)
	put := func(content string) {
		t.Helper()
		next := filepath.Join(filepath.Dir(cfg.PolicyFile), "next")
		must.NoError(t, os.WriteFile(next, []byte(content), 0o600))
		must.NoError(t, os.Rename(next, cfg.PolicyFile))
		n.Reload()
	}
	put(fmt.Sprintf(onePolicy, 7))
	testkit.Eventually(t, "the new limit", func() bool { return check(t, n, "alice").Limit == 7 })
	testkit.Eventually(t, "the new hash in the gossip",
		func() bool { return n.view().Self.PolicyHash == shortHash(n.limiter.Policies()) })
	put(fmt.Sprintf(onePolicy, 0))
	testkit.Eventually(t, "the mistake", func() bool { return n.policyError() != "" })
	if ready, why := n.Ready(); !ready || !strings.Contains(why, "policy file rejected: "+cfg.PolicyFile+":2:") {
		t.Errorf("ready: %t, %q", ready, why)
	}
	d := check(t, n, "alice")
	expect.Equal(t, d.Limit, 7, "a file with a mistake changed the limit to")
	put(strictPolicy)
	testkit.Eventually(t, "the lack of voters", func() bool {
		return strings.HasSuffix(n.policyError(),
			":2:92: policies[0].consistency: strict needs voters: give all nodes the same voters, or use available")
	})
	d = check(t, n, "alice")
	expect.Equal(t, d.Limit, 7, "a file that needs voters changed the limit to")
	put("")
	testkit.Eventually(t, "no policy",
		func() bool { return len(n.limiter.Policies().Policies()) == 0 && n.policyError() == "" })
}

// node is one whose conditions a test sets.
type node struct {
	joined, first, second atomic.Bool
	held                  atomic.Int64
	became                atomic.Int32
	log                   testkit.Buffer
	*readiness
}

func newNode() *node {
	n := &node{}
	n.readiness = newReadiness(readinessConfig{
		Joined: func() (bool, string) {
			if n.joined.Load() {
				return true, ""
			}
			return false, "not a member"
		},
		Conditions: []condition{
			{"the first", func(context.Context) bool { return n.first.Load() }},
			{"the second", func(context.Context) bool { return n.second.Load() }},
		},
		Held: func() int { return int(n.held.Load()) }, Became: func() { n.became.Add(1) }, Logger: n.log.Logger(),
	})
	return n
}

func (n *node) want(t *testing.T, ready bool, why string) {
	t.Helper()
	time.Sleep(time.Second) // of the bubble
	synctest.Wait()
	if got, said := n.Ready(); got != ready || said != why || n.Settled() != ready {
		t.Errorf("ready %t, %q, settled %t, want %t, %q", got, said, n.Settled(), ready, why)
	}
}

// TestReadinessSettle: a node says what it waits for, one thing after the other, becomes ready once, and is not when it
// stops.
func TestReadinessSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		go n.Settle(t.Context())
		n.want(t, false, "not a member")
		n.joined.Store(true)
		n.want(t, false, "the first")
		n.first.Store(true)
		n.want(t, false, "the second")
		n.second.Store(true)
		n.want(t, true, "")
		<-n.Became()
		n.first.Store(false) // what held is not looked at again
		n.want(t, true, "")
		n.Stop()
		n.want(t, false, "stopping")
		expect.True(t, n.became.Load() == 1, "became ready %d times", n.became.Load())
	})
}

// TestStopBefore: a node that stops before it was ready never is, though all conditions hold.
func TestStopBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		go n.Settle(t.Context())
		n.want(t, false, "not a member")
		n.Stop()
		for _, c := range []*atomic.Bool{&n.joined, &n.first, &n.second} {
			c.Store(true)
		}
		n.want(t, false, "stopping")
		select {
		case <-n.Became():
			t.Error("became ready")
		default:
		}
		expect.Equal(t, n.became.Load(), 0, "was said to be ready")
	})
}

// TestPatience: a member does not wait for ever for what does not come, but does as long as partitions come.
func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		go n.Settle(t.Context())
		time.Sleep(time.Minute)
		n.joined.Store(true)
		for range 5 {
			time.Sleep(patience - 2*time.Second)
			n.held.Add(1)
			n.want(t, false, "the first")
		}
		time.Sleep(patience - 2*time.Second)
		n.held.Add(-2) // some have gone to another that came, which is no progress, nor is it when some come back
		n.want(t, false, "the first")
		n.held.Add(2)
		n.want(t, true, "")
	})
}

// TestPanicsDoNotFillTheLog: of panics in a row the log has one stack a second for each listener; all are counted.
func TestPanicsDoNotFillTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		s := &security{log: log, metrics: observe.NewSecurity(func() map[string]time.Time { return nil })}
		s.denials = newDenials(log, s.metrics)
		n := &Node{log: log, security: s}
		for range 3 {
			for range 100 {
				n.panicked("http")("/v1/check", &panics.Error{Value: "secret", Stack: []byte("frames")})
			}
			n.panicked("grpc")("Check", &panics.Error{Value: "secret", Stack: []byte("frames")})
			time.Sleep(denialInterval)
		}
		got := strings.Count(out.String(), "\n")
		expect.True(t, got == 6 && !strings.Contains(out.String(), "secret"), "%d lines:\n%s", got, &out)
		expect.True(t, strings.Contains(out.String(), "unlogged=99"),
			"the log does not say how many it leaves out:\n%s", &out)
		want := `
# HELP weir_panics_total Panics of handlers and of work behind answers.
# TYPE weir_panics_total counter
weir_panics_total{listener="background"} 0
weir_panics_total{listener="grpc"} 3
weir_panics_total{listener="http"} 300
weir_panics_total{listener="peer"} 0
weir_panics_total{listener="resp"} 0
`
		expect.NoError(t, testutil.CollectAndCompare(s.metrics, strings.NewReader(want), "weir_panics_total"))
	})
}

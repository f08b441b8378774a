package client

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	grpcapi "github.com/weirlimit/weir/gateway/grpc"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// cluster is limiters that decide for the keys that the ring gives them, behind gRPC servers of their own, and forward
// the rest to one another. It counts what is forwarded.
type cluster struct {
	table     *ring.Table
	nodes     []*limiter.Limiter
	addrs     []string
	ready     []*told[bool]
	told      *weirv1.TopologyResponse
	forwarded atomic.Int64
	calls     []atomic.Int64 // of the unary kind, by node
	away      atomic.Pointer[away]

	mu     sync.Mutex
	traced []string // what checks of streams and other calls said of their traces
}

func (c *cluster) saw(trace string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.traced = append(c.traced, trace)
}

// away is a partition that another node holds than the ring says.
type away struct{ partition, holder int }

// place is where in a cluster a limiter is: its Ownership, and its Peers.
type place struct {
	c  *cluster
	at int
}

func (p place) Route(partition int) *ownership.Route {
	owner := p.c.table.Owner(partition)
	if a := p.c.away.Load(); a != nil && a.partition == partition {
		owner = a.holder
	}
	if owner == p.at {
		return &ownership.Route{Standing: ownership.Owned}
	}
	return &ownership.Route{Standing: ownership.Elsewhere,
		Node: ownership.Node{Name: p.c.table.Members()[owner], Boot: 1}}
}

func (p place) Await(_ context.Context, partition int, _ *ownership.Route) *ownership.Route {
	return p.Route(partition)
}

func (p place) AwaitProgress(context.Context, int, uint64, bool) (degraded, ok bool) {
	return true, true
}

func (p place) Forward(ctx context.Context, to ownership.Node, ops []*limiter.Op) {
	p.c.forwarded.Add(int64(len(ops)))
	for i, name := range p.c.table.Members() {
		if name == to.Name {
			if rest := p.c.nodes[i].Receive(ops); rest != nil {
				rest(ctx)
			}
		}
	}
}

// newCluster returns a cluster of n nodes, and a Client that was told the address of the first and knows the rest.
func newCluster(t *testing.T, n int, policies string) (*cluster, *Client) {
	t.Helper()
	set, err := policy.Parse("policies.yaml", []byte(policies))
	must.NoError(t, err)
	c := &cluster{calls: make([]atomic.Int64, n)}
	c.told = &weirv1.TopologyResponse{HashKey: testKey.Bytes(), RingSettings: ring.SettingsFingerprint(testKey)}
	var names []string
	listeners := make([]net.Listener, n)
	for i := range n {
		listeners[i], err = net.Listen("tcp", "127.0.0.1:0")
		must.NoError(t, err)
		names = append(names, fmt.Sprintf("node %d", i))
		c.addrs = append(c.addrs, listeners[i].Addr().String())
		c.told.Members = append(c.told.Members, &weirv1.TopologyMember{Name: names[i], Grpc: c.addrs[i]})
	}
	c.table = ring.Build(names)
	c.told.Ring = c.table.Fingerprint()
	for i := range n {
		p := place{c, i}
		states := limiter.NewStore(store.Config{}, false)
		l := limiter.New(limiter.Config{Store: states, Ownership: p, Peers: p, Policies: set, HashKey: testKey})
		t.Cleanup(l.Close)
		for partition := range ring.Partitions {
			states.Open(partition) // the ring says who decides
		}
		c.nodes = append(c.nodes, l)
	}
	for i := range n {
		c.serve(t, i, listeners[i])
	}
	client := dial(t, c.addrs[0], WithTimeout(time.Minute))
	reaches(t, client, c.addrs...)
	return c, client
}

func (c *cluster) serve(t *testing.T, i int, on net.Listener) {
	ready := newTold(true)
	c.ready = append(c.ready, ready)
	server := grpcapi.NewServer(grpcapi.ServerConfig{
		Service: c.nodes[i],
		Lender:  c.nodes[i],
		Caller:  func(context.Context) string { return "" },
		Status:  func(context.Context) *weirv1.StatusResponse { return &weirv1.StatusResponse{Ready: true} },
		Topology: func(context.Context) (*weirv1.TopologyResponse, <-chan struct{}, *limit.Error) {
			return c.told, nil, nil
		},
		Ready: ready.now,
		Trace: func(parent string) (string, func(codes.Code)) {
			c.saw(hex.EncodeToString([]byte(parent)))
			return "", nil
		},
	})
	count := func(ctx context.Context, in any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		c.calls[i].Add(1)
		c.saw(strings.Join(metadata.ValueFromIncomingContext(ctx, traceparent), " "))
		return handle(ctx, in)
	}
	t.Cleanup(server.Close)
	testkit.ServeOn(t, on, server.Register, grpc.ForceServerCodecV2(wire.Codec()), pings, grpc.UnaryInterceptor(count))
}

// key returns the i-th key of a scope that a node owns.
func (c *cluster) key(scope string, node, i int) string {
	for k := 0; ; k++ {
		if key := fmt.Sprint("key ", k); owner(c.table, scope, key) == node {
			if i--; i < 0 {
				return key
			}
		}
	}
}

const clusterPolicies = `policies:
  - {name: log, algorithm: sliding_log, limit: 100, window: 1h}
  - {name: jobs, algorithm: concurrency, limit: 1, ttl: 1h}
`

// What is about one key goes to its owner, whatever it is, so that no node has to ask another.
func TestCallsGoToOwners(t *testing.T) {
	c, client := newCluster(t, 3, clusterPolicies)
	limit := algo.Limit{Algorithm: algo.SlidingLog, Limit: 100, Window: time.Hour}
	for _, l := range []*Limiter{client.Policy("log"), client.Inline("n", limit)} {
		for i := range 12 {
			key := fmt.Sprint("key ", i)
			r, d, err := l.ReserveN(t.Context(), key, 9, 0)
			must.True(t, err == nil && !d.FailedOpen && d.Remaining == 91, "reserve: %+v, %v", d, err)
			expect.NoError(t, r.Commit(5), "commit")
			r, _, err = l.ReserveN(t.Context(), key, 7, 0)
			expect.True(t, err == nil && r.Cancel() == nil, "cancel: %v", err)
			n, err := l.Refund(t.Context(), key, 2)
			expect.True(t, n == 2 && err == nil, "refund: %d, %v", n, err)
			d, err = l.Peek(t.Context(), key)
			expect.True(t, d.Remaining == 97 && err == nil, "%d left, want 97; %v", d.Remaining, err)
			expect.NoError(t, l.Reset(t.Context(), key), "reset")
		}
	}
	for i := range 12 {
		lease, d, err := client.Policy("jobs").Acquire(t.Context(), fmt.Sprint("key ", i))
		must.True(t, err == nil && d.Allowed, "acquire: %+v, %v", d, err)
		_, err = client.svc.Renew(t.Context(), lease.target, lease.id, 0)
		expect.NoError(t, err, "renew")
		expect.NoError(t, lease.Release(), "release")
	}
	expect.Equal(t, c.forwarded.Load(), 0, "operations were forwarded")
	for i := range c.calls {
		expect.True(t, c.calls[i].Load() != 0, "node %d was not asked", i)
	}
}

// An atomic check goes to the owner of its first key, and the others are asked from there.
func TestAllGoesToTheOwnerOfTheFirst(t *testing.T) {
	c, client := newCluster(t, 3, clusterPolicies)
	for node := range 3 {
		before := c.forwarded.Load()
		asked := c.calls[node].Load()
		all, err := client.All(t.Context(), []Check{
			{Policy: "log", Key: c.key("log", node, 0)}, {Policy: "log", Key: c.key("log", (node+1)%3, node)}})
		must.True(t, err == nil && all.Allowed, "%+v, %v", all, err)
		expect.Equal(t, c.calls[node].Load()-asked, 1, "how often node %d was asked", node)
		// The reservation of the one key that is another's, and behind the answer its settlement.
		testkit.Eventually(t, "two operations to be forwarded", func() bool { return c.forwarded.Load()-before >= 2 })
		expect.Equal(t, c.forwarded.Load()-before, 2, "operations that node %d forwarded", node)
	}
}

// A call whose owner is not there goes to any other node, once, and is forwarded from there.
func TestCallsGoAroundAnOwner(t *testing.T) {
	c, client := newCluster(t, 3, clusterPolicies)
	c.ready[2].set(false)
	reaches(t, client, c.addrs[0], c.addrs[1])
	key := c.key("log", 2, 0)
	calls := func() (n int64) {
		for i := range c.calls {
			n += c.calls[i].Load()
		}
		return n
	}
	before, there := calls(), c.calls[2].Load()
	r, d, err := client.Policy("log").Reserve(t.Context(), key)
	must.True(t, err == nil && d.Remaining == 99, "%+v, %v", d, err)
	expect.NoError(t, r.Cancel())
	all, err := client.All(t.Context(), []Check{{Policy: "log", Key: key}})
	expect.True(t, err == nil && all.Decisions[0].Remaining == 99, "%+v, %v", all, err)
	expect.Equal(t, calls()-before, 3, "calls")
	if n := c.calls[2].Load() - there; n != 0 || c.forwarded.Load() == 0 {
		t.Errorf("the owner was asked %d times, and %d operations were forwarded", n, c.forwarded.Load())
	}
}

// The nodes learn to which trace a question belongs; of checks only where that is sampled, since they are many.
func TestTraces(t *testing.T) {
	c, _ := newCluster(t, 3, clusterPolicies)
	client := another(t, c.addrs[0], WithoutLoans()) // nodes learn nothing of checks that are answered from loans
	reaches(t, client, c.addrs...)
	const ids, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	within := func(flags trace.TraceFlags) context.Context {
		traceID, _ := trace.TraceIDFromHex(ids)
		spanID, _ := trace.SpanIDFromHex(span)
		return trace.ContextWithSpanContext(t.Context(),
			trace.NewSpanContext(trace.SpanContextConfig{TraceID: traceID, SpanID: spanID, TraceFlags: flags}))
	}
	log := client.Policy("log")
	for _, test := range []struct {
		what string
		ctx  context.Context
		want string // of a call
	}{
		{"none", t.Context(), ""},
		{"not sampled", within(0), "00-" + ids + "-" + span + "-00"},
		{"sampled", within(trace.FlagsSampled), "00-" + ids + "-" + span + "-01"},
		{"said by the caller", metadata.AppendToOutgoingContext(within(trace.FlagsSampled), traceparent, "own"), "own"},
	} {
		check := ""
		if trace.SpanContextFromContext(test.ctx).IsSampled() {
			check = ids + span
		}
		c.mu.Lock()
		c.traced = nil
		c.mu.Unlock()
		_, err := log.Allow(test.ctx, "a")
		must.NoError(t, err)
		_, err = client.Check(test.ctx, []Check{{Policy: "log", Key: "a"}, {Policy: "log", Key: "b"}})
		must.NoError(t, err)
		_, err = client.All(test.ctx, []Check{{Policy: "log", Key: "a"}})
		must.NoError(t, err)
		must.NoError(t, log.Reset(test.ctx, "a"))
		c.mu.Lock()
		want := []string{check, check, check, test.want, test.want}
		expect.True(t, slices.Equal(c.traced, want), "%s: %q, want %q", test.what, c.traced, want)
		c.mu.Unlock()
	}
	// Callers who share a message keep their traces apart.
	var p packer
	m := &message{}
	for _, of := range []string{"", "", "x", "", "y", ""} {
		m.checks = append(m.checks,
			pending{&request{checks: []limit.Check{{Target: limit.Target{Policy: "log", Key: "k"}}}, trace: of}, 0})
	}
	got := p.pack(m, 0).TraceContexts
	expect.True(t, slices.EqualFunc(got, []string{"", "", "x", "", "y", ""},
		func(a []byte, b string) bool { return string(a) == b }), "%q", got)
	m.checks = m.checks[:2]
	in := p.pack(m, 0)
	expect.True(t, len(in.TraceContexts) == 0, "%q", in.TraceContexts)
}

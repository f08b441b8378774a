package grpc

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"testing"

	"google.golang.org/grpc"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/rpc/peer"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// trio is three nodes that own a third of the partitions each, and speak to one another and to callers over TCP. They serve callers
// with options.
func trio(t *testing.T, text string, options ...grpc.ServerOption) []weirv1.LimiterClient {
	t.Helper()
	noLeaks(t)
	set := must.Value(policy.Parse("test.yaml", []byte(text)))(t)
	nodes := []ownership.Node{{Name: "n0", Boot: 1}, {Name: "n1", Boot: 2}, {Name: "n2", Boot: 3}}
	address := map[ownership.Node]string{}
	var listeners []net.Listener
	for _, n := range nodes {
		lis := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
		listeners = append(listeners, lis)
		address[n] = lis.Addr().String()
	}
	var clients []weirv1.LimiterClient
	for i, n := range nodes {
		streams := transport.Config{
			Self: n, RingSettings: 0xabc, Logger: slog.New(slog.DiscardHandler),
			Address: func(n ownership.Node) (string, bool) { a, ok := address[n]; return a, ok },
		}
		peers := peer.NewForwarder(peer.ForwarderConfig{Config: streams})
		own, states := byNumber{i, nodes}, limiter.NewStore(store.Config{}, false)
		l := limiter.New(limiter.Config{Store: states, Policies: set, Ownership: own, Peers: peers, Timeout: testkit.Patience})
		own.open(states)
		server := grpc.NewServer(append(options, grpc.ForceServerCodecV2(transport.Codec()))...)
		peerv1.RegisterPeerServer(server, peer.NewServer(peer.ServerConfig{Config: streams, Receiver: l}))
		NewServer(ServerConfig{Service: l}).Register(server)
		var served sync.WaitGroup
		served.Go(func() { _ = server.Serve(listeners[i]) }) // ends with Stop
		t.Cleanup(func() {
			l.Close()
			peers.Close()
			server.Stop()
			served.Wait()
		})
		clients = append(clients, weirv1.NewLimiterClient(testkit.Dial(t, address[n])))
	}
	return clients
}

func named(policy, key string, cost int64) *weirv1.Check {
	return &weirv1.Check{Target: &weirv1.Target{Policy: policy, Key: key}, Cost: &cost}
}

type byNumber struct {
	self  int
	nodes []ownership.Node
}

func (o byNumber) Route(p int) *ownership.Route {
	if p %= len(o.nodes); p != o.self {
		return &ownership.Route{Standing: ownership.Elsewhere, Node: o.nodes[p]}
	}
	return &ownership.Route{Standing: ownership.Owned}
}

// open opens what belongs to the node.
func (o byNumber) open(states *store.Store) {
	for p := range ring.Partitions {
		if o.Route(p).Standing == ownership.Owned {
			states.Open(p)
		}
	}
}

func (o byNumber) Await(_ context.Context, p int, _ *ownership.Route) *ownership.Route {
	return o.Route(p)
}

func (o byNumber) AwaitProgress(context.Context, int, uint64, bool) (degraded, ok bool) {
	return false, true
}

package grpc

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/rpc/peer"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
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

const trioPolicies = `policies:
  - {name: log, algorithm: sliding_log, limit: 50, window: 1h, on_error: closed}
  - {name: bucket, algorithm: token_bucket, limit: 50, window: 366d, on_error: closed}
  - {name: fixed, algorithm: fixed_window, limit: 50, window: 1h, on_error: closed}
  - {name: jobs, algorithm: concurrency, limit: 5, ttl: 1m}
`

func named(policy, key string, cost int64) *weirv1.Check {
	return &weirv1.Check{Target: &weirv1.Target{Policy: policy, Key: key}, Cost: &cost}
}

func left(t *testing.T, c weirv1.LimiterClient, policy, key string) int64 {
	t.Helper()
	resp := must.Value(c.Check(t.Context(), &weirv1.CheckRequest{Checks: []*weirv1.Check{named(policy, key, 0)}}))(t)
	return resp.Results[0].GetDecision().GetRemaining()
}

// TestAtomicChecksOverTheWire has many callers ask for units of twelve keys on three owners, all or none: what is
// admitted is what is charged, whoever is asked afterwards, and no limit is passed.
func TestAtomicChecksOverTheWire(t *testing.T) {
	nodes := trio(t, trioPolicies)
	policies := []string{"log", "bucket", "fixed"}
	var mu sync.Mutex
	admitted := map[[2]string]int64{}
	yes, no := 0, 0
	var callers sync.WaitGroup
	for i := range 30 {
		callers.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 4))
			for range 20 {
				req := &weirv1.CheckRequest{Atomic: true}
				for range 2 + random.IntN(4) {
					req.Checks = append(req.Checks, named(policies[random.IntN(3)], fmt.Sprint(random.IntN(4)), 1+random.Int64N(4)))
				}
				resp, err := nodes[random.IntN(3)].Check(t.Context(), req)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if !resp.Allowed {
					no++
				} else {
					yes++
				}
				for j, r := range resp.Results {
					d, q := r.GetDecision(), req.Checks[j]
					expect.True(t, !d.GetFailedOpen() && !d.GetFailedClosed() &&
						resp.Allowed == (d.GetGranted() == *q.Cost) && (resp.Allowed || d.GetGranted() == 0),
						"%v: %v", resp.Allowed, d)
					admitted[[2]string{q.Target.Policy, q.Target.Key}] += d.GetGranted()
				}
				mu.Unlock()
			}
		})
	}
	callers.Wait()
	expect.True(t, yes >= 30 && no >= 30, "%d admitted, %d refused: the test shows little", yes, no)
	for k, n := range admitted {
		expect.True(t, n <= 50, "%v: %d admitted", k, n)
		for _, node := range nodes {
			left := left(t, node, k[0], k[1])
			expect.True(t, left == 50-n, "%v: %d admitted, %d left", k, n, left)
		}
	}
	_, err := nodes[0].Check(t.Context(), &weirv1.CheckRequest{Atomic: true, Checks: []*weirv1.Check{named("log", "a", 1), named("jobs", "a", 1)}})
	wantStatus(t, err, codes.InvalidArgument, "checks[1].target.policy: ")
	_, err = nodes[0].Check(t.Context(), &weirv1.CheckRequest{Atomic: true, Checks: []*weirv1.Check{named("log", "a", 1), named("nope", "a", 1)}})
	wantStatus(t, err, codes.NotFound, "checks[1].target.policy: ")
	expect.Equal(t, left(t, nodes[1], "log", "a"), 50, "left after errors")
}

// TestClusterOverSockets: three whole nodes but for the gossip, exactly the limit.
func TestClusterOverSockets(t *testing.T) {
	nodes := trio(t, `policies: [{name: p, algorithm: sliding_log, limit: 100, window: 1h}]`)
	const keys = 5
	var admitted, failed [keys]atomic.Int64
	var callers sync.WaitGroup
	for i := range 300 {
		callers.Go(func() {
			var req weirv1.CheckRequest
			for k := range keys {
				req.Checks = append(req.Checks, named("p", fmt.Sprint(k), 1))
			}
			got, err := nodes[i%3].Check(t.Context(), &req)
			if err != nil {
				t.Error(err)
				return
			}
			for k, r := range got.Results {
				if d := r.GetDecision(); d == nil || d.FailedOpen {
					failed[k].Add(1)
				} else if d.Allowed {
					admitted[k].Add(1)
				}
			}
		})
	}
	callers.Wait()
	for k := range keys {
		if admitted[k].Load() != 100 || failed[k].Load() != 0 {
			t.Errorf("key %d: %d admitted, %d failed", k, admitted[k].Load(), failed[k].Load())
		}
	}
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

// TestBadLists: what is wrong with a list of reservations, or with an element of it.
func TestBadLists(t *testing.T) {
	_, c := serveLimiter(t, localLimiter(t))
	target := &weirv1.Target{Policy: "p", Key: "k"}
	for want, reserves := range map[string][]*weirv1.ReserveRequest{
		"InvalidArgument reserves: ": {}, "ResourceExhausted reserves: ": make([]*weirv1.ReserveRequest, 1001),
		"InvalidArgument reserves[0].ttl_ns: ": {{Target: target, TtlNs: 1}}, "InvalidArgument reserves[1].target": {{Target: target}, nil},
	} {
		_, err := c.ReserveAll(t.Context(), &weirv1.ReserveAllRequest{Reserves: reserves})
		code, text, _ := strings.Cut(want, " ")
		expect.Equal(t, status.Code(err).String(), code, "%v", err)
		wantStatus(t, err, status.Code(err), text)
	}
	_, err := c.Commit(t.Context(), &weirv1.CommitRequest{Target: target, ReservationId: "1-2", Cost: new(int64), Overrun: 7})
	wantStatus(t, err, codes.InvalidArgument, "overrun: ")
}

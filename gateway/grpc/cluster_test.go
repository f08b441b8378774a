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

// TestReservationsOverTheWire settles through another node than reserved, for keys of every owner.
func TestReservationsOverTheWire(t *testing.T) {
	nodes := trio(t, trioPolicies)
	for i := range 12 {
		target := &weirv1.Target{Policy: []string{"log", "bucket", "fixed"}[i%3], Key: fmt.Sprint(i)}
		most, did, over := int64(40), int64(15), int64(41)
		d, err := nodes[i%3].Reserve(t.Context(), &weirv1.ReserveRequest{Target: target, Cost: &most, RequestId: "r"})
		must.True(t, err == nil && d.Allowed && d.Granted == 40 && d.Remaining == 10 && d.ReservationId != "",
			"%v, %v", d, err)
		again, err := nodes[(i+1)%3].Reserve(t.Context(), &weirv1.ReserveRequest{Target: target, Cost: &most, RequestId: "r"})
		expect.True(t, err == nil && again.ReservationId == d.ReservationId && again.Remaining == 10,
			"again: %v, %v", again, err)
		other := nodes[(i+2)%3]
		_, err = other.Commit(t.Context(), &weirv1.CommitRequest{Target: target, ReservationId: d.ReservationId})
		wantStatus(t, err, codes.InvalidArgument, "cost: ")
		_, err = other.Commit(t.Context(), &weirv1.CommitRequest{Target: target, ReservationId: d.ReservationId, Cost: &over, Overrun: weirv1.Overrun_OVERRUN_ERROR})
		wantStatus(t, err, codes.InvalidArgument, "cost: ")
		resp, err := other.Commit(t.Context(), &weirv1.CommitRequest{Target: target, ReservationId: d.ReservationId, Cost: &did})
		expect.True(t, err == nil && resp.Refunded == 25, "commit: %v, %v", resp, err)
		_, err = other.Cancel(t.Context(), &weirv1.CancelRequest{Target: target, ReservationId: d.ReservationId})
		wantStatus(t, err, codes.NotFound, "reservation_id: ")
		d, err = nodes[0].Reserve(t.Context(), &weirv1.ReserveRequest{Target: target, TtlNs: 1e9})
		expect.True(t, err == nil && d.Granted == 1, "a missing cost: %v, %v", d, err)
		if resp, err := nodes[1].Cancel(t.Context(), &weirv1.CancelRequest{Target: target, ReservationId: d.ReservationId}); err != nil || resp.Refunded != 1 {
			t.Errorf("cancel: %v, %v", resp, err)
		}
		expect.Equal(t, left(t, nodes[2], target.Policy, target.Key), 35, "left")
	}
	_, err := nodes[0].Cancel(t.Context(), &weirv1.CancelRequest{Target: &weirv1.Target{Policy: "log", Key: "k"}, ReservationId: "nonsense"})
	wantStatus(t, err, codes.InvalidArgument, "reservation_id: ")
	_, err = nodes[0].Reserve(t.Context(), &weirv1.ReserveRequest{Target: &weirv1.Target{Policy: "jobs", Key: "k"}})
	wantStatus(t, err, codes.InvalidArgument, "target.policy: ")
	_, err = nodes[0].Reserve(t.Context(), &weirv1.ReserveRequest{Target: &weirv1.Target{Policy: "log", Key: "k"}, TtlNs: 2 * 3600e9})
	wantStatus(t, err, codes.InvalidArgument, "ttl_ns: ")
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

// TestBudgetsOverTheWire: what Go callers say and are told of charges, extensions and reservations of several keys, through nodes
// that do not own them.
func TestBudgetsOverTheWire(t *testing.T) {
	nodes := trio(t, trioPolicies+`
  - {name: priced, algorithm: sliding_log, limit: 50, window: 1h, prices: {input: 1, output: 4}, estimate: 7}
`)
	n := func(v int64) *int64 { return &v }
	for i := range 12 {
		target := &weirv1.Target{Policy: "priced", Key: fmt.Sprint(i)}
		node := func(k int) weirv1.LimiterClient { return nodes[(i+k)%3] }
		d, err := node(0).Reserve(t.Context(), &weirv1.ReserveRequest{Target: target, Class: "m"})
		must.True(t, err == nil && d.Granted == 7, "by the estimate: %v, %v", d, err)
		e := &weirv1.ExtendRequest{Target: target, ReservationId: d.ReservationId, Usage: map[string]int64{"input": 1, "output": 2}, RequestId: "e", TtlNs: 30e9}
		for k := range 3 { // once, through whichever node
			got, err := node(k).Extend(t.Context(), e)
			expect.True(t, err == nil && got.Allowed && got.Granted == 9 && got.Remaining == 34 &&
				got.ReservationId == d.ReservationId, "extend: %v, %v", got, err)
		}
		got, err := node(1).Extend(t.Context(), &weirv1.ExtendRequest{Target: target, ReservationId: d.ReservationId, Cost: n(35)})
		expect.True(t, err == nil && !got.Allowed && got.ReservationId == "", "refused: %v, %v", got, err)
		for k := range 3 {
			got, err := node(k).Commit(t.Context(), &weirv1.CommitRequest{Target: target, ReservationId: d.ReservationId, Usage: map[string]int64{"output": 15}, Class: "m"})
			expect.True(t, err == nil && got.Refunded == 0 && got.Excess == 44 && got.OverLimit,
				"commit: %v, %v", got, err)
		}
		c := &weirv1.ChargeRequest{Target: target, Usage: map[string]int64{"input": 3}, RequestId: "c"}
		for k := range 3 {
			got, err := node(k).Charge(t.Context(), c)
			expect.True(t, err == nil && !got.Allowed && got.Granted == 3 && got.GetRetryAfterNs() > 0,
				"charge: %v, %v", got, err)
		}
	}

	var all weirv1.ReserveAllRequest
	for i := range 12 {
		all.Reserves = append(all.Reserves, &weirv1.ReserveRequest{Target: &weirv1.Target{Policy: []string{"log", "bucket", "fixed"}[i%3], Key: fmt.Sprint("all ", i)}, Cost: n(30)})
	}
	got, err := nodes[1].ReserveAll(t.Context(), &all)
	must.True(t, err == nil && got.Allowed && len(got.Decisions) == 12 && got.ReservationId != "" &&
		got.Decisions[7].ReservationId == got.ReservationId, "%v, %v", got, err)
	again, err := nodes[2].ReserveAll(t.Context(), &all)
	expect.True(t, err == nil && !again.Allowed && again.ReservationId == "", "%v, %v", again, err)
	for i, r := range all.Reserves {
		settled, err := nodes[i%3].Commit(t.Context(), &weirv1.CommitRequest{Target: r.Target, ReservationId: got.ReservationId, Cost: n(10)})
		expect.True(t, err == nil && settled.Refunded == 20, "%v, %v", settled, err)
		left := left(t, nodes[0], r.Target.Policy, r.Target.Key)
		expect.True(t, left == 40, "%v: %d left", r.Target, left)
	}

	target := &weirv1.Target{Policy: "priced", Key: "k"}
	_, err = nodes[0].ReserveAll(t.Context(), &weirv1.ReserveAllRequest{})
	wantStatus(t, err, codes.InvalidArgument, "reserves: ")
	_, err = nodes[0].ReserveAll(t.Context(), &weirv1.ReserveAllRequest{Reserves: make([]*weirv1.ReserveRequest, 1001)})
	wantStatus(t, err, codes.ResourceExhausted, "reserves: ")
	_, err = nodes[0].ReserveAll(t.Context(), &weirv1.ReserveAllRequest{Reserves: []*weirv1.ReserveRequest{{Target: target}, {Target: target, Usage: map[string]int64{"x": 1}}}})
	wantStatus(t, err, codes.InvalidArgument, "reserves[1].usage.x: ")
	_, err = nodes[0].ReserveAll(t.Context(), &weirv1.ReserveAllRequest{Reserves: []*weirv1.ReserveRequest{{Target: target, RequestId: "r"}}})
	wantStatus(t, err, codes.InvalidArgument, "reserves[0].request_id: ")
	_, err = nodes[0].Reserve(t.Context(), &weirv1.ReserveRequest{Target: target, Class: strings.Repeat("x", 129)})
	wantStatus(t, err, codes.ResourceExhausted, "class: ")
	_, err = nodes[0].Extend(t.Context(), &weirv1.ExtendRequest{Target: target, ReservationId: got.ReservationId, Cost: n(1), Usage: map[string]int64{"input": 1}})
	wantStatus(t, err, codes.InvalidArgument, "usage: ")
	_, err = nodes[0].Extend(t.Context(), &weirv1.ExtendRequest{Target: target, ReservationId: got.ReservationId, Cost: n(1)})
	wantStatus(t, err, codes.NotFound, "reservation_id: ")
	_, err = nodes[0].Commit(t.Context(), &weirv1.CommitRequest{Target: target, ReservationId: got.ReservationId, Cost: n(1), Overrun: 7})
	wantStatus(t, err, codes.InvalidArgument, "overrun: ")
	_, err = nodes[0].Charge(t.Context(), &weirv1.ChargeRequest{Target: target, Cost: n(0)})
	wantStatus(t, err, codes.InvalidArgument, "cost: ")
	_, err = nodes[0].Charge(t.Context(), &weirv1.ChargeRequest{Target: &weirv1.Target{Policy: "jobs", Key: "k"}})
	wantStatus(t, err, codes.InvalidArgument, "target.policy: ")
	_, err = nodes[0].ReserveAll(t.Context(), &weirv1.ReserveAllRequest{Reserves: []*weirv1.ReserveRequest{{Target: target, TtlNs: 1}}})
	wantStatus(t, err, codes.InvalidArgument, "reserves[0].ttl_ns: ")
	_, err = nodes[0].ReserveAll(t.Context(), &weirv1.ReserveAllRequest{Reserves: []*weirv1.ReserveRequest{{Target: target}, nil}})
	wantStatus(t, err, codes.InvalidArgument, "reserves[1].target")
}

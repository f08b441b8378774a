package grpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/rpc/peer"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
	"github.com/weirlimit/weir/test/testkit"
)

func serveLimiter(t *testing.T, svc limiter.BatchService,
	opts ...grpc.ServerOption) (*grpc.ClientConn, weirv1.LimiterClient) {
	t.Helper()
	noLeaks(t)
	conn := connect(t, ServerConfig{Service: svc}, opts...)
	return conn, weirv1.NewLimiterClient(conn)
}

func localLimiter(t *testing.T) *limiter.Limiter {
	t.Helper()
	set := must.Value(policy.Parse("test.yaml", []byte(`policies:
  - {name: p, algorithm: sliding_log, limit: 10, window: 1m}
  - {name: c, algorithm: concurrency, limit: 10, ttl: 1m}`)))(t)
	l := limiter.New(limiter.Config{Policies: set})
	t.Cleanup(l.Close)
	return l
}

func wantStatus(t *testing.T, err error, code codes.Code, prefix string) {
	t.Helper()
	if s := status.Convert(err); s.Code() != code || !strings.HasPrefix(s.Message(), prefix) {
		t.Errorf("%v: %q, want %v: %q…", s.Code(), s.Message(), code, prefix)
	}
}

func TestEveryErrorHasItsCode(t *testing.T) {
	for _, test := range []struct {
		err  error
		code codes.Code
		text string
	}{
		{limit.NewError(limit.Invalid, "f", "m"), codes.InvalidArgument, "f: m"},
		{limit.NewError(limit.NotFound, "f", "m"), codes.NotFound, "f: m"},
		{limit.NewError(limit.TooLarge, "f", "m"), codes.ResourceExhausted, "f: m"},
		{&limit.Error{Kind: limit.Unavailable, Message: "m"}, codes.Unavailable, "m"},
		{fmt.Errorf("wrapped: %w", limit.NewError(limit.NotFound, "f", "m")), codes.NotFound, "f: m"},
		{context.DeadlineExceeded, codes.DeadlineExceeded, ""},
		{errors.New("odd"), codes.Unknown, "odd"},
	} {
		t.Run(test.text, func(t *testing.T) {
			_, c := serveLimiter(t, &scripted.Service{Err: test.err})
			ctx, to := t.Context(), &weirv1.Target{Policy: "p", Key: "k"}
			_, err := c.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: to}}})
			wantStatus(t, err, test.code, test.text)
			_, err = c.Reset(ctx, &weirv1.ResetRequest{Target: to})
			wantStatus(t, err, test.code, test.text)
		})
	}
}

func TestBatchErrors(t *testing.T) {
	notFound := limit.NewError(limit.NotFound, "policy", "unknown")
	two := &weirv1.CheckRequest{Checks: []*weirv1.Check{{}, {}}}
	t.Run("all", func(t *testing.T) {
		_, c := serveLimiter(t, &scripted.Service{Results: []limit.Result{{Err: notFound},
			{Err: &limit.Error{Kind: limit.Invalid}}}})
		_, err := c.Check(t.Context(), two)
		wantStatus(t, err, codes.NotFound, "checks[0].target.policy: unknown")
		_, err = c.Check(t.Context(), &weirv1.CheckRequest{Checks: two.Checks[:1]})
		wantStatus(t, err, codes.NotFound, "target.policy: unknown") // no batch to speak of
	})
	t.Run("all, the first about no field", func(t *testing.T) {
		_, c := serveLimiter(t, &scripted.Service{Results: []limit.Result{{Err: &limit.Error{Kind: limit.Unavailable,
			Message: "nobody"}}, {Err: notFound}}})
		_, err := c.Check(t.Context(), two)
		wantStatus(t, err, codes.Unavailable, "nobody")
	})
}

// TestBadRequests: what no decoding finds wrong with a request; test/conformance has more.
func TestBadRequests(t *testing.T) {
	_, c := serveLimiter(t, localLimiter(t))
	ctx := t.Context()
	_, err := c.Check(ctx, &weirv1.CheckRequest{})
	wantStatus(t, err, codes.InvalidArgument, "checks: ")
	_, err = c.Check(ctx, &weirv1.CheckRequest{Checks: make([]*weirv1.Check, 1001)})
	wantStatus(t, err, codes.ResourceExhausted, "checks: ")
	_, err = c.Acquire(ctx, &weirv1.AcquireRequest{Target: &weirv1.Target{Policy: "c", Key: "k"}, TtlNs: -1})
	wantStatus(t, err, codes.InvalidArgument, "ttl_ns: ")
	target := &weirv1.Target{Policy: "p", Key: "k"}
	for want, reserves := range map[string][]*weirv1.ReserveRequest{
		"InvalidArgument reserves: ": {}, "ResourceExhausted reserves: ": make([]*weirv1.ReserveRequest, 1001),
		"InvalidArgument reserves[0].ttl_ns: ": {{Target: target, TtlNs: 1}},
		"InvalidArgument reserves[1].target":   {{Target: target}, nil},
	} {
		_, err := c.ReserveAll(t.Context(), &weirv1.ReserveAllRequest{Reserves: reserves})
		code, text, _ := strings.Cut(want, " ")
		expect.Equal(t, status.Code(err).String(), code, "%v", err)
		wantStatus(t, err, status.Code(err), text)
	}
	_, err = c.Commit(t.Context(),
		&weirv1.CommitRequest{Target: target, ReservationId: "1-2", Cost: new(int64), Overrun: 7})
	wantStatus(t, err, codes.InvalidArgument, "overrun: ")
}

func TestMalformedMessages(t *testing.T) {
	conn, c := serveLimiter(t, localLimiter(t))
	field := func(number protowire.Number, b []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), b)
	}
	target := append(field(1, []byte("p")), field(4, []byte("k\xff"))...)
	for _, bad := range [][]byte{
		{0xff}, {0x0a}, {0x0a, 0x7f, 1}, []byte("nonsense"), field(1, field(1, target)), field(1, []byte{0x10}),
	} {
		for _, method := range []string{"Check", "Acquire", "Renew", "Release", "Refund", "Reset"} {
			in, out := bad, []byte(nil)
			if method != "Check" && len(bad) > 0 && bad[0] == 0x0a && len(bad) > 10 {
				in = field(1, target)
			}
			err := conn.Invoke(t.Context(), "/weir.v1.Limiter/"+method, &in, &out, grpc.ForceCodec(testkit.RawCodec{}))
			wantStatus(t, err, codes.InvalidArgument, "")
		}
	}
	// Larger than the server takes.
	huge := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "p",
		Key: strings.Repeat("k", maxMessage)}}}}
	_, err := c.Check(t.Context(), huge)
	wantStatus(t, err, codes.ResourceExhausted, "")
	out, err := c.Check(t.Context(), &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "p",
		Key: "k"}, Cost: new(int64)}}})
	expect.True(t, err == nil && out.Results[0].GetDecision().GetRemaining() == 10, "%v, %v", out, err)
}

// Requests of many checks wait where those that are being carried out take all the memory that there is for them; those
// of few do not. All of it is given back.
func TestRequestsShareMemory(t *testing.T) {
	noLeaks(t)
	d := &distant{answer: make(chan struct{})}
	full := func(prefix string) *weirv1.CheckStreamRequest {
		in := streamed(1)
		for i := range limit.MaxBatch {
			key := fmt.Sprintf("%s %d", prefix, i)
			in.Keys, in.KeyLengths = append(in.Keys, key...), append(in.KeyLengths, uint32(len(key)))
		}
		return in
	}
	most := int64(full("far").SizeVT())*perByte + limit.MaxBatch*perCheck + lightRequest
	gate := admission.NewGate(most)
	c := client(t, ServerConfig{Service: d, Requests: gate})
	first, second, light := openStream(t, c), openStream(t, c), openStream(t, c)
	must.NoError(t, first.Send(full("far")))
	out := nextOf(t, first)
	must.True(t, out.More, "%v", out)
	must.NoError(t, second.Send(full("near")))
	const few = 50
	for range few {
		out := exchange(t, light, streamed(1, "near"))
		must.True(t, out.Error == nil && len(out.Flags) == 1, "%v", out)
	}
	d.mu.Lock()
	expect.Equal(t, d.begun, 1+few, "requests are begun")
	d.mu.Unlock()
	close(d.answer)
	out = nextOf(t, second)
	expect.Equal(t, out.Error, nil, "%v", out)
	// What cannot be decoded and what is refused as a whole gives back what it took, too.
	bad := full("near")
	bad.KeyLengths[0] = 1 << 20
	out = exchange(t, second, bad)
	expect.True(t, out.Error != nil, "a request that is not acceptable is answered")
	_, err := c.Check(t.Context(), &weirv1.CheckRequest{Checks: make([]*weirv1.Check, 2000)})
	expect.True(t, err != nil, "2000 checks are answered")
	taken, err := gate.Enter(t.Context(), most)
	expect.True(t, err == nil && taken == most, "%d, %v", taken, err)
	left, cancel := context.WithCancel(t.Context())
	cancel()
	err = (&callMemory{gate: gate}).enter(left, lightRequest, leastCheck)
	expect.Equal(t, status.Code(err), codes.Canceled, "a caller who left while there was no room is answered %v", err)
}

// TestDefinitionsByBytes is an attack: streams that define as many targets as there may be. What a caller's streams
// keep takes no more than its share of the bytes that there are; other callers' define theirs; all is given back when
// the streams end.
func TestDefinitionsByBytes(t *testing.T) {
	noLeaks(t)
	const all = 1 << 20
	kept := fairshare.New(all)
	t.Cleanup(func() { // after the servers' ends
		taken, _ := kept.InUse()
		expect.Equal(t, taken, 0, "bytes are taken without streams")
	})
	client := func(caller string) weirv1.LimiterClient {
		return client(t, ServerConfig{Service: &distant{}, Kept: kept,
			Caller: func(context.Context) string { return caller }})
	}
	define := func(c weirv1.LimiterClient, number uint32) bool {
		in := streamed(1, "near")
		in.Define = append(in.Define, &weirv1.StreamTarget{Number: number, Policy: "p"})
		return exchange(t, openStream(t, c), in).Error == nil
	}
	thief, shop := client("thief"), client("shop")
	defined := 0
	for range 20 {
		if define(thief, wire.MaxTargets-1) {
			defined++
		}
	}
	taken, _ := kept.InUse()
	expect.True(t, defined != 0 && defined*(wire.MaxTargets-freeTargets)*targetBytes == int(taken) && taken <= all*3/4,
		"%d streams take %d bytes of %d", defined, taken, all)
	expect.True(t, define(shop, 100) && define(thief, freeTargets-1), "a stream with few targets is denied")
}

// lenderFunc is a Lender that nobody can be asked by.
type lenderFunc func(in []limit.Borrow, out []limit.Lent)

func (f lenderFunc) Lend(_ context.Context, in []limit.Borrow, out []limit.Lent) (func(), error) {
	f(in, out)
	return nil, nil
}

func (lenderFunc) OpenBorrower(uint64, func(limit.Recall)) func() { return func() {} }

// What a request of many loans takes is counted while it is carried out.
func TestLoansShareMemory(t *testing.T) {
	noLeaks(t)
	in := &weirv1.BorrowRequest{Borrower: 1}
	for range limit.MaxBatch {
		in.Loans = append(in.Loans, report(0))
	}
	need := int64(in.SizeVT())*perByte + limit.MaxBatch*perCheck
	gate := admission.NewGate(need + 1)
	lends := make(chan error, 2)
	stream := openLoans(t, connect(t,
		ServerConfig{Service: &distant{}, Requests: gate, Lender: lenderFunc(func([]limit.Borrow, []limit.Lent) {
			none, cancel := context.WithCancel(context.Background())
			cancel()
			_, err := gate.Enter(none, 2)
			lends <- err
		})}))
	for range 2 {
		must.NoError(t, stream.Send(in))
		out, err := stream.Recv()
		must.True(t, err == nil && len(out.Loans) == limit.MaxBatch, "%v, %v", out, err)
		expect.True(t, <-lends != nil, "there is room for more than is left beside the request")
	}
	taken, err := gate.Enter(t.Context(), need+1)
	expect.True(t, err == nil && taken == need+1, "%d, %v", taken, err)
}

// trio is three nodes that own a third of the partitions each, and speak to one another and to callers over TCP. They
// serve callers with options.
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
		l := limiter.New(limiter.Config{Store: states, Policies: set, Ownership: own, Peers: peers,
			Timeout: testkit.Patience})
		own.open(states)
		testkit.ServeOn(t, listeners[i], func(r grpc.ServiceRegistrar) {
			peerv1.RegisterPeerServer(r, peer.NewServer(peer.ServerConfig{Config: streams, Receiver: l}))
			NewServer(ServerConfig{Service: l}).Register(r)
		}, append(options, grpc.ForceServerCodecV2(transport.Codec()))...)
		t.Cleanup(func() {
			l.Close()
			peers.Close()
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

// TestForeignRequestsShareMemory is an attack: messages of another service with tens of thousands of empty elements,
// many at a time. As many are decoded as there is room for; small ones do not wait, and all of it is given back.
func TestForeignRequestsShareMemory(t *testing.T) {
	noLeaks(t)
	var running atomic.Int64
	begun, goOn := make(chan struct{}, 100), make(chan struct{})
	desc := grpc.ServiceDesc{
		ServiceName: "foreign.Service", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Ask", Handler: func(_ any, ctx context.Context, decode func(any) error,
			_ grpc.UnaryServerInterceptor) (any, error) {
			in := new(structpb.ListValue)
			if err := decode(in); err != nil {
				return nil, err
			}
			if len(in.Values) > 1 {
				running.Add(1)
				begun <- struct{}{}
				<-goOn
			}
			return in, nil
		}}},
	}
	large := &structpb.ListValue{Values: make([]*structpb.Value, 20_000)}
	for i := range large.Values {
		large.Values[i] = new(structpb.Value)
	}
	const size = 2 * 20_000
	need := max(size*perByte+admission.Parts(size), size*perByte+limit.MaxBatch*perCheck)
	gate := admission.NewGate(2 * need)
	conn := testkit.Dial(t, serve(t, func(r grpc.ServiceRegistrar) { Admitted(r, gate).RegisterService(&desc, nil) }))
	ask := func(in *structpb.ListValue) error {
		return conn.Invoke(t.Context(), "/foreign.Service/Ask", in, new(structpb.ListValue))
	}
	errs := make(chan error, 10)
	for range 10 {
		go func() { errs <- ask(large) }()
	}
	<-begun
	<-begun
	for range 50 {
		expect.NoError(t, ask(&structpb.ListValue{Values: large.Values[:1]}))
	}
	expect.Equal(t, running.Load(), 2, "large requests are carried out, there is room for 2")
	close(goOn)
	for range 10 {
		expect.NoError(t, <-errs)
	}
	taken, err := gate.Enter(t.Context(), 2*need)
	expect.True(t, err == nil && taken != 0, "not all has been given back")
}

// registered keeps the service that is registered with it.
type registered struct{ desc *grpc.ServiceDesc }

func (r *registered) RegisterService(desc *grpc.ServiceDesc, _ any) { r.desc = desc }

// BenchmarkCheck is a Check from the bytes of its request to those of its answer, without gRPC.
func BenchmarkCheck(b *testing.B) {
	set := must.Value(policy.Parse("test.yaml",
		[]byte("policies: [{name: p, algorithm: token_bucket, limit: 1000000, window: 1s}]")))(b)
	l := limiter.New(limiter.Config{Policies: set})
	defer l.Close()
	s := NewServer(ServerConfig{Service: l, Requests: admission.NewGate(32 << 20)})
	defer s.Close()
	var r registered
	s.Register(&r)
	i := 0
	for r.desc.Methods[i].MethodName != "Check" {
		i++
	}
	handle, codec := r.desc.Methods[i].Handler, wire.ServerCodec(nil, 1<<16)
	intercept := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		return next(ctx, req)
	}
	for _, n := range []int{1, 100, 1000} {
		b.Run(fmt.Sprintf("batch=%d", n), func(b *testing.B) {
			in := new(weirv1.CheckRequest)
			for i := range n {
				in.Checks = append(in.Checks,
					&weirv1.Check{Target: &weirv1.Target{Policy: "p", Key: fmt.Sprintf("user:%012d", i)}})
			}
			data := must.Value(proto.Marshal(in))(b)
			read := func(m any) error { return codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, m) }
			b.ReportAllocs()
			for b.Loop() {
				out := must.Value(handle(s, b.Context(), read, intercept))(b)
				answer := must.Value(codec.Marshal(out))(b)
				answer.Free()
			}
		})
	}
}

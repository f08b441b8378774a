package rpc

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/testkit"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

const patience = testkit.Patience

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	testkit.Eventually(t, what, ok)
}

// noLeaks looks for goroutines of this package and of gRPC.
func noLeaks(t testing.TB) {
	t.Helper()
	testkit.NoLeaks(t, "weir/rpc.", "google.golang.org/grpc")
}

// serve serves gRPC on loopback and returns the address.
func serve(t testing.TB, register func(grpc.ServiceRegistrar), opts ...grpc.ServerOption) string {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	opts = append(opts, grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage), grpc.ForceServerCodecV2(wire.Codec()))
	server := grpc.NewServer(opts...)
	register(server)
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(lis) }) // ends with Stop
	t.Cleanup(func() {
		server.Stop()
		served.Wait()
	})
	return lis.Addr().String()
}

// dial connects a client of the test's own.
func dial(t testing.TB, addr string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(16<<20)))
	conn, err := grpc.NewClient("passthrough:///"+addr, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// receiver is a Receiver in a function.
type receiver func(ops []*limiter.Op) func(context.Context)

func (r receiver) Receive(ops []*limiter.Op) func(context.Context) { return r(ops) }

// admit answers everything with a decision that tells the operation's cost.
func admit(ops []*limiter.Op) func(context.Context) {
	for _, op := range ops {
		op.Outcome.Decision = limit.Decision{Policy: op.Policy, Allowed: true, Granted: op.Cost}
	}
	return nil
}

var (
	alice = Node{"alice", 1}
	bob   = Node{"bob", 2}
)

const settings = 0xabc

// servePeer serves a PeerServer of a node.
func servePeer(t testing.TB, self Node, r Receiver) (*PeerServer, string) {
	t.Helper()
	s := NewPeerServer(PeerServerConfig{
		Self: self, RingSettings: settings, Receiver: r, Logger: slog.New(slog.DiscardHandler),
		Identify: func() *peerv1.IdentifyResponse { return &peerv1.IdentifyResponse{Name: self.Name, Boot: self.Boot} },
		Inspect:  func() *peerv1.InspectResponse { return &peerv1.InspectResponse{Name: self.Name, Boot: self.Boot} },
	})
	return s, serve(t, func(r grpc.ServiceRegistrar) { peerv1.RegisterPeerServer(r, s) })
}

// newPeers returns alice's Peers, who knows bob's address.
func newPeers(t testing.TB, addr string, change ...func(*PeersConfig)) *Peers {
	t.Helper()
	cfg := PeersConfig{
		Self: alice, RingSettings: settings, Logger: slog.New(slog.DiscardHandler),
		Address: func(n Node) (string, bool) { return addr, n.Name == bob.Name },
	}
	for _, c := range change {
		c(&cfg)
	}
	p := NewPeers(cfg)
	t.Cleanup(p.Close)
	return p
}

func holder(n Node) limiter.Holder { return limiter.Holder{Name: n.Name, Boot: n.Boot} }

// check is a check of a key with a cost.
func check(key string, cost int64) *limiter.Op {
	return &limiter.Op{Kind: limiter.OpCheck, Check: limit.Check{Target: limit.Target{Policy: "p", Key: key}, Cost: cost}, Hops: 1}
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// forward sends one check to bob.
func forward(p *Peers, ctx context.Context, cost int64) *limiter.Op {
	op := check("k", cost)
	p.Forward(ctx, holder(bob), []*limiter.Op{op})
	return op
}

func wantAnswer(t testing.TB, op *limiter.Op) {
	t.Helper()
	if d := op.Outcome.Decision; op.Outcome.Unreachable || op.Outcome.Err != nil || op.Outcome.NotHolder != nil || !d.Allowed || d.Granted != op.Cost {
		t.Errorf("no answer to %v: %+v", op.Cost, op.Outcome)
	}
}

func wantUnreachable(t testing.TB, op *limiter.Op) {
	t.Helper()
	if !op.Outcome.Unreachable {
		t.Errorf("answered: %+v", op.Outcome)
	}
}

// soon fails the test when f takes so long that it must have waited for a deadline.
func soon(t testing.TB, f func()) {
	t.Helper()
	start := time.Now()
	f()
	if took := time.Since(start); took > patience/2 {
		t.Errorf("took %v", took)
	}
}

// bobIs is a peer's Forward in a function, for bobs that do not behave.
type bobIs struct {
	peerv1.UnimplementedPeerServer
	forward func(peerv1.Peer_ForwardServer) error
}

func (b bobIs) Forward(s peerv1.Peer_ForwardServer) error { return b.forward(s) }

func serveBob(t testing.TB, forward func(peerv1.Peer_ForwardServer) error) string {
	return serve(t, func(r grpc.ServiceRegistrar) { peerv1.RegisterPeerServer(r, bobIs{forward: forward}) })
}

func welcome(protocol uint32) *peerv1.ForwardReply {
	return &peerv1.ForwardReply{Body: &peerv1.ForwardReply_Welcome{Welcome: &peerv1.Welcome{Protocol: protocol}}}
}

func replyOf(seq uint64, ops ...*limiter.Op) *peerv1.ForwardReply {
	r := &peerv1.Reply{Sequence: seq}
	var q quota
	for _, op := range ops {
		r.Outcomes = appendOutcome(r.Outcomes, &q, op)
	}
	return &peerv1.ForwardReply{Body: &peerv1.ForwardReply_Reply{Reply: r}}
}

// asked is what a batch asks for. names are those of its stream.
func asked(t testing.TB, names *numberedTargets, b *peerv1.Batch) (ops []*limiter.Op) {
	t.Helper()
	list, err := names.unpack(b, nil)
	if err != nil {
		t.Error(err)
	}
	for i := range list {
		ops = append(ops, &list[i])
	}
	return ops
}

// answers is the right reply to a batch.
func answers(t testing.TB, names *numberedTargets, b *peerv1.Batch) *peerv1.ForwardReply {
	ops := asked(t, names, b)
	admit(ops)
	return replyOf(b.Sequence, ops...)
}

// rawStream is a stream to bob that is the test's to misuse.
func rawStream(t testing.TB, addr string, hello *peerv1.Hello) peerv1.Peer_ForwardClient {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	conn := dial(t, addr)
	t.Cleanup(cancel)
	stream, err := peerv1.NewPeerClient(conn).Forward(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if hello != nil {
		sendTo(t, stream, &peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Hello{Hello: hello}})
		if in := recv(t, stream); in.GetWelcome().GetProtocol() != Protocol {
			t.Fatalf("no welcome: %v", in)
		}
	}
	return stream
}

func hello() *peerv1.Hello {
	return &peerv1.Hello{Protocol: Protocol, FromName: alice.Name, FromBoot: alice.Boot, Stream: 1, ToName: bob.Name, ToBoot: bob.Boot, RingSettings: settings}
}

func batch(seq, acked uint64, ops ...*limiter.Op) *peerv1.ForwardRequest {
	p := packer{numbers: make(numbers), sequence: seq}
	for _, op := range ops {
		p.add(op, time.Second)
	}
	b := &peerv1.Batch{Sequence: seq, Acknowledged: acked, Define: p.define, Operations: p.bytes}
	return &peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Batch{Batch: b}}
}

func sendTo(t testing.TB, s peerv1.Peer_ForwardClient, m *peerv1.ForwardRequest) {
	t.Helper()
	if err := s.Send(m); err != nil {
		t.Fatal(err)
	}
}

func recv(t testing.TB, s peerv1.Peer_ForwardClient) *peerv1.ForwardReply {
	t.Helper()
	in, err := s.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return in
}

// wantReply receives the reply to a batch and returns what its first operation was granted.
func wantReply(t testing.TB, s peerv1.Peer_ForwardClient, to *peerv1.ForwardRequest) int64 {
	t.Helper()
	r := recv(t, s).GetReply()
	if r.GetSequence() != to.GetBatch().Sequence {
		t.Fatalf("reply %v, want to sequence %d", r, to.GetBatch().Sequence)
	}
	ops := asked(t, new(numberedTargets), to.GetBatch())
	in := outcomes{reader: reader{rest: string(r.Outcomes)}}
	for _, op := range ops {
		if !in.next(op) {
			t.Fatalf("malformed: %v", r)
		}
	}
	if in.rest != "" {
		t.Fatalf("too many outcomes: %v", r)
	}
	if len(ops) == 0 {
		return 0
	}
	return ops[0].Outcome.Decision.Granted
}

// ask sends a batch and is wantReply.
func ask(t testing.TB, s peerv1.Peer_ForwardClient, m *peerv1.ForwardRequest) int64 {
	t.Helper()
	sendTo(t, s, m)
	return wantReply(t, s, m)
}

// proxy carries TCP connections to an address until they are cut.
type proxy struct {
	addr string

	mu    sync.Mutex
	deaf  bool // what comes back is thrown away
	conns []net.Conn
}

func newProxy(t testing.TB, to string) *proxy {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{addr: lis.Addr().String()}
	var work sync.WaitGroup
	work.Go(func() {
		for {
			in, err := lis.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				_ = in.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, in, out)
			p.mu.Unlock()
			work.Go(func() { p.carry(out, in, func() bool { return false }) })
			work.Go(func() { p.carry(in, out, p.isDeaf) })
		}
	})
	t.Cleanup(func() {
		_ = lis.Close()
		p.cut()
		work.Wait()
	})
	return p
}

func (p *proxy) isDeaf() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.deaf
}

func (p *proxy) setDeaf(deaf bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deaf = deaf
}

// carry copies until one end is closed, and closes the other.
func (p *proxy) carry(to, from net.Conn, drop func() bool) {
	defer to.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if drop() {
			continue
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

// cut closes every connection; new ones may be made.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

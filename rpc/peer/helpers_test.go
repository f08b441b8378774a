package peer

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/testkit"

	"google.golang.org/grpc"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// noLeaks looks for goroutines of this package and of gRPC.
func noLeaks(t testing.TB) {
	t.Helper()
	testkit.NoLeaks(t, "rpc/peer.", "google.golang.org/grpc")
}

// serve serves a peer service on loopback and returns its address.
func serve(t testing.TB, register func(grpc.ServiceRegistrar)) string {
	t.Helper()
	return testkit.Serve(t, register, grpc.MaxRecvMsgSize(transport.MaxMessage),
		grpc.MaxSendMsgSize(transport.MaxMessage), grpc.ForceServerCodecV2(wire.Codec()))
}

// receiver is a Receiver in a function.
type receiver func(ops []*limiter.Op) func(context.Context)

func (r receiver) Receive(ops []*limiter.Op) func(context.Context) { return r(ops) }

// admit answers everything with a decision that tells the operation's cost.
func admit(ops []*limiter.Op) func(context.Context) {
	for _, op := range ops {
		*op.Decision = limit.Decision{Policy: op.Policy, Allowed: true, Granted: op.Cost}
	}
	return nil
}

var (
	alice = ownership.Node{Name: "alice", Boot: 1}
	bob   = ownership.Node{Name: "bob", Boot: 2}
)

const settings = 0xabc

// servePeer serves a Server of a node.
func servePeer(t testing.TB, self ownership.Node, r Receiver) (*Server, string) {
	t.Helper()
	s := NewServer(ServerConfig{
		Config:   transport.Config{Self: self, RingSettings: settings, Logger: slog.New(slog.DiscardHandler)},
		Receiver: r,
		Identify: func() *peerv1.IdentifyResponse { return &peerv1.IdentifyResponse{Name: self.Name, Boot: self.Boot} },
		Inspect:  func() *peerv1.InspectResponse { return &peerv1.InspectResponse{Version: self.Name} },
	})
	return s, serve(t, func(r grpc.ServiceRegistrar) { peerv1.RegisterPeerServer(r, s) })
}

// newPeers returns alice's Peers, who knows bob's address.
func newPeers(t testing.TB, addr string, change ...func(*ForwarderConfig)) *Forwarder {
	t.Helper()
	cfg := ForwarderConfig{Config: transport.Config{
		Self: alice, RingSettings: settings, Logger: slog.New(slog.DiscardHandler),
		Address: func(n ownership.Node) (string, bool) { return addr, n.Name == bob.Name },
	}}
	for _, c := range change {
		c(&cfg)
	}
	p := NewForwarder(cfg)
	t.Cleanup(p.Close)
	return p
}

// localLimiter decides everything itself.
func localLimiter(t *testing.T) *limiter.Limiter {
	t.Helper()
	set := must.Value(policy.Parse("test.yaml", []byte(`policies:
  - {name: p, algorithm: sliding_log, limit: 10, window: 1m}
  - {name: c, algorithm: concurrency, limit: 10, ttl: 1m}`)))(t)
	l := limiter.New(limiter.Config{Policies: set})
	t.Cleanup(l.Close)
	return l
}

// check is a check of a key with a cost.
func check(key string, cost int64) *limiter.Op {
	op := new(received).link()
	op.Kind, op.Policy, op.Key, op.Cost, op.Hops = limiter.OpCheck, "p", key, cost, 1
	return op
}

// forward sends one check to bob.
func forward(p *Forwarder, ctx context.Context, cost int64) *limiter.Op {
	op := check("k", cost)
	p.Forward(ctx, bob, []*limiter.Op{op})
	return op
}

func wantAnswer(t testing.TB, op *limiter.Op) {
	t.Helper()
	d := op.Decision
	expect.True(t, !op.Outcome.Unreachable && op.Outcome.Err == nil && op.Outcome.NotHolder == nil && d.Allowed &&
		d.Granted == op.Cost, "no answer to %v: %+v", op.Cost, op.Outcome)
}

func wantUnreachable(t testing.TB, op *limiter.Op) {
	t.Helper()
	expect.True(t, op.Outcome.Unreachable, "answered: %+v", op.Outcome)
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

// errOver has serveBatches end a stream with status OK.
var errOver = errors.New("over")

// serveBatches is a bob who welcomes, and ends a stream when what he does with a batch fails.
func serveBatches(t testing.TB, do func(peerv1.Peer_ForwardServer, *numberedTargets, *peerv1.Batch) error) string {
	return serveBob(t, func(s peerv1.Peer_ForwardServer) error {
		_ = s.Send(welcome(transport.Protocol))
		var names numberedTargets
		for {
			in, err := s.Recv()
			if err != nil {
				return nil
			}
			if b := in.GetBatch(); b != nil {
				if err := do(s, &names, b); errors.Is(err, errOver) {
					return nil
				} else if err != nil {
					return err
				}
			}
		}
	})
}

func welcome(protocol uint32) *peerv1.ForwardReply {
	return &peerv1.ForwardReply{Body: &peerv1.ForwardReply_Welcome{Welcome: &peerv1.Welcome{Protocol: protocol}}}
}

func replyOf(seq uint64, ops ...*limiter.Op) *peerv1.ForwardReply {
	list := make([]received, len(ops))
	for i, op := range ops {
		list[i].Op = *op
	}
	return &peerv1.ForwardReply{Body: &peerv1.ForwardReply_Reply{Reply: reply(seq, list)}}
}

// asked is what a batch asks for. names are those of its stream.
func asked(t testing.TB, names *numberedTargets, b *peerv1.Batch) (ops []*limiter.Op) {
	t.Helper()
	list, err := names.unpack(b, nil)
	expect.NoError(t, err)
	for i := range list {
		ops = append(ops, list[i].link())
	}
	return ops
}

// rawStream is a stream to bob that is the test's to misuse.
func rawStream(t testing.TB, addr string, hello *peerv1.Hello) peerv1.Peer_ForwardClient {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	conn := testkit.Dial(t, addr)
	t.Cleanup(cancel)
	stream := must.Value(peerv1.NewPeerClient(conn).Forward(ctx))(t)
	if hello != nil {
		sendTo(t, stream, &peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Hello{Hello: hello}})
		in := recv(t, stream)
		must.True(t, in.GetWelcome().GetProtocol() == transport.Protocol, "no welcome: %v", in)
	}
	return stream
}

func hello() *peerv1.Hello {
	return &peerv1.Hello{Protocol: transport.Protocol, FromName: alice.Name, FromBoot: alice.Boot, ToName: bob.Name,
		ToBoot: bob.Boot, RingSettings: settings}
}

func batch(seq uint64, ops ...*limiter.Op) *peerv1.ForwardRequest {
	b := packedBatch(new(wire.Numbers), seq, time.Second, ops...)
	return &peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Batch{Batch: b}}
}

// packedBatch packs operations, the checks first, as one batch of a stream.
func packedBatch(n *wire.Numbers, sequence uint64, left time.Duration, ops ...*limiter.Op) *peerv1.Batch {
	b := &peerv1.Batch{Sequence: sequence}
	p := newPacker(n, b, checksOf(ops), 0)
	for _, op := range ops {
		if !p.add(op, left) {
			panic("no number left")
		}
	}
	return b
}

// checksOf is how many of some operations, the first ones, are checks.
func checksOf(ops []*limiter.Op) (n int) {
	for n < len(ops) && isItem(ops[n]) == 0 {
		n++
	}
	return n
}

// read fills in the outcomes of operations from a reply, and says whether it is one to them.
func read(r *peerv1.Reply, ops []*limiter.Op) bool {
	checks := checksOf(ops)
	in := outcomesOf(r, checks, len(ops)-checks)
	if in == nil {
		return false
	}
	for i, op := range ops {
		in.next(op, i < checks)
	}
	return in.ended()
}

func sendTo(t testing.TB, s peerv1.Peer_ForwardClient, m *peerv1.ForwardRequest) {
	t.Helper()
	must.NoError(t, s.Send(m))
}

func recv(t testing.TB, s peerv1.Peer_ForwardClient) *peerv1.ForwardReply {
	t.Helper()
	return must.Value(s.Recv())(t)
}

// wantReply receives the reply to a batch and returns what its first operation was granted.
func wantReply(t testing.TB, s peerv1.Peer_ForwardClient, to *peerv1.ForwardRequest) int64 {
	t.Helper()
	r := recv(t, s).GetReply()
	must.True(t, r.GetSequence() == to.GetBatch().Sequence, "reply %v, want to sequence %d", r, to.GetBatch().Sequence)
	ops := asked(t, new(numberedTargets), to.GetBatch())
	must.True(t, read(r, ops), "malformed: %v", r)
	if len(ops) == 0 {
		return 0
	}
	return ops[0].Decision.Granted
}

// ask sends a batch and is wantReply.
func ask(t testing.TB, s peerv1.Peer_ForwardClient, m *peerv1.ForwardRequest) int64 {
	t.Helper()
	sendTo(t, s, m)
	return wantReply(t, s, m)
}

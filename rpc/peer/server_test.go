package peer

import (
	"context"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

func TestHello(t *testing.T) {
	noLeaks(t)
	_, addr := servePeer(t, bob, receiver(admit))
	for what, test := range map[string]struct {
		first *peerv1.ForwardRequest
		code  codes.Code
		field string
	}{
		"nothing":     {&peerv1.ForwardRequest{}, codes.InvalidArgument, "hello: "},
		"a batch":     {batch(1, check("k", 1)), codes.InvalidArgument, "hello: "},
		"protocol":    {helloWith(func(h *peerv1.Hello) { h.Protocol++ }), codes.FailedPrecondition, "protocol: "},
		"no protocol": {helloWith(func(h *peerv1.Hello) { h.Protocol = 0 }), codes.FailedPrecondition, "protocol: "},
		"name":        {helloWith(func(h *peerv1.Hello) { h.ToName = "carol" }), codes.FailedPrecondition, "to: "},
		"boot":        {helloWith(func(h *peerv1.Hello) { h.ToBoot++ }), codes.FailedPrecondition, "to: "},
		"ring settings": {helloWith(func(h *peerv1.Hello) { h.RingSettings++ }), codes.FailedPrecondition,
			"ring_settings: "},
		"an empty hello": {&peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Hello{Hello: &peerv1.Hello{}}},
			codes.FailedPrecondition, "protocol: "},
	} {
		s := rawStream(t, addr, nil)
		sendTo(t, s, test.first)
		_, err := s.Recv()
		st := status.Convert(err)
		expect.True(t, st.Code() == test.code && strings.HasPrefix(st.Message(), test.field), "%s: %v", what, err)
	}
}

func helloWith(change func(*peerv1.Hello)) *peerv1.ForwardRequest {
	h := hello()
	change(h)
	return &peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Hello{Hello: h}}
}

func TestGarbageBatches(t *testing.T) {
	packed := batch(1, slices.Repeat([]*limiter.Op{check("k", 1)}, maxBatch+1)...)
	short := batch(1, check("k", 1))
	short.GetBatch().Checks.Keys = nil
	for what, test := range map[string]struct {
		send []*peerv1.ForwardRequest
		good int // of the first ones, that are answered
		code codes.Code
	}{
		"too many operations": {[]*peerv1.ForwardRequest{packed}, 0, codes.ResourceExhausted},
		"cut short":           {[]*peerv1.ForwardRequest{short}, 0, codes.InvalidArgument},
		"another hello": {[]*peerv1.ForwardRequest{batch(1, check("k", 1)),
			helloWith(func(*peerv1.Hello) {})}, 1, codes.InvalidArgument},
		"nothing": {[]*peerv1.ForwardRequest{batch(1, check("k", 1)), {}}, 1, codes.InvalidArgument},
	} {
		t.Run(what, func(t *testing.T) {
			noLeaks(t)
			var carried atomic.Int64
			_, addr := servePeer(t, bob, receiver(func(ops []*limiter.Op) func(context.Context) {
				carried.Add(1)
				return admit(ops)
			}))
			s := rawStream(t, addr, hello())
			for _, m := range test.send {
				sendTo(t, s, m)
			}
			for i := range test.good {
				wantReply(t, s, test.send[i])
			}
			_, err := s.Recv()
			expect.Equal(t, status.Code(err), test.code, "%v", err)
			expect.Equal(t, int(carried.Load()), test.good, "%d carried out", carried.Load())
		})
	}
	t.Run("not protobuf", func(t *testing.T) {
		noLeaks(t)
		_, addr := servePeer(t, bob, receiver(admit))
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		s := must.Value(testkit.Dial(t, addr).NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true},
			"/weir.peer.v1.Peer/Forward", grpc.ForceCodec(testkit.RawCodec{})))(t)
		garbage, out := []byte{0xff, 0xff}, []byte(nil)
		must.NoError(t, s.SendMsg(&garbage))
		err := s.RecvMsg(&out)
		expect.Equal(t, status.Code(err), codes.Internal, "%v", err)
	})
	t.Run("items without sense", func(t *testing.T) {
		noLeaks(t)
		_, addr := servePeer(t, bob, localLimiter(t))
		s := rawStream(t, addr, hello())
		m := batch(1)
		m.GetBatch().Items = []*peerv1.Item{{}, protoItem(check("", 1), 0),
			{TimeoutNs: 1 << 63, Hops: 1 << 31, Operation: peerv1.Operation_OPERATION_RESET}}
		sendTo(t, s, m)
		resets := make([]*limiter.Op, 3)
		for i := range resets {
			resets[i] = limiter.NewOp(limiter.OpReset, limit.Check{}, limiter.Extra{})
		}
		expect.True(t, read(recv(t, s).GetReply(), resets), "no reply")
		for i, op := range resets {
			expect.True(t, op.Outcome.Err != nil, "item %d: %+v", i, op.Outcome)
		}
		// A batch of nothing.
		ask(t, s, batch(2))
	})
}

// TestOnwardForwardingDoesNotBlock: what is handed on to a slow node is answered when it is, and what comes after
// before.
func TestOnwardForwardingDoesNotBlock(t *testing.T) {
	noLeaks(t)
	release := make(chan struct{})
	_, addr := servePeer(t, bob, receiver(func(ops []*limiter.Op) func(context.Context) {
		admit(ops)
		if ops[0].Cost != 1 {
			return nil
		}
		return func(ctx context.Context) {
			d, ok := ctx.Deadline()
			expect.True(t, ok && time.Until(d) <= time.Second, "handed on until %v", d)
			<-release
		}
	}))
	s := rawStream(t, addr, hello())
	sendTo(t, s, batch(1, check("k", 1)))
	for seq := uint64(2); seq < 50; seq++ {
		ask(t, s, batch(seq, check("k", 2)))
	}
	close(release)
	expect.Equal(t, recv(t, s).GetReply().GetSequence(), 1, "sequence of the late reply")
}

// TestSenderThatDoesNotRead: its replies fill the connection, and hold up nobody else, not even another stream of its
// own. The server begins few of its batches, also of those that wait for other nodes.
func TestSenderThatDoesNotRead(t *testing.T) {
	for name, rest := range map[string]func(context.Context){
		"decided here": nil, "handed on": func(context.Context) {},
	} {
		t.Run(name, func(t *testing.T) { testUnread(t, rest) })
	}
}

func testUnread(t *testing.T, rest func(context.Context)) {
	noLeaks(t)
	var begun atomic.Int64
	_, addr := servePeer(t, bob, receiver(func(ops []*limiter.Op) func(context.Context) {
		admit(ops)
		for _, op := range ops {
			op.Decision.LeaseID = strings.Repeat("x", 10_000)
		}
		begun.Add(1)
		return rest
	}))
	var ops []*limiter.Op
	for range 100 {
		ops = append(ops, check("k", 1))
	}
	const batches = 50 // a megabyte of replies each; gRPC lets up to 16 of them pile up at a client
	rude := rawStream(t, addr, hello())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for seq := range uint64(batches) {
			if rude.Send(batch(seq+1, ops...)) != nil {
				return
			}
		}
	}()
	seen := int64(-1)
	testkit.Eventually(t, "bob is stuck", func() bool {
		before := seen
		seen = begun.Load()
		return seen > 0 && seen == before // for a millisecond, or he is about to be
	})
	testkit.Soon(t, func() {
		for boot := range uint64(20) {
			h := hello()
			h.FromBoot = boot // alice's own among them
			s := rawStream(t, addr, h)
			ask(t, s, batch(1000, check("k", 1)))
		}
	})
	n := begun.Load()
	must.True(t, n < batches, "%d batches are not enough to fill the connection", batches)
	for range batches {
		recv(t, rude) // nothing was lost
	}
	<-done
}

// TestDrain: a node that leaves answers what it has handed on for others before it cuts their streams.
func TestDrain(t *testing.T) {
	noLeaks(t)
	begun, finish := make(chan struct{}, 2), make(chan struct{})
	s, addr := servePeer(t, bob, receiver(func(ops []*limiter.Op) func(context.Context) {
		return func(context.Context) {
			begun <- struct{}{}
			<-finish
			admit(ops)
		}
	}))
	s.Drain(t.Context()) // nothing is waited for
	stream := rawStream(t, addr, hello())
	batches := []*peerv1.ForwardRequest{batch(1, check("k", 1)), batch(2, check("k", 2))}
	for _, b := range batches {
		sendTo(t, stream, b)
		<-begun
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	s.Drain(over) // which does not wait for more than its context
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		s.Drain(t.Context())
	}()
	for range batches {
		select {
		case <-drained:
			t.Fatal("drained with a batch that is not answered")
		case finish <- struct{}{}:
		}
	}
	<-drained
	granted := int64(0)
	for range batches {
		r := recv(t, stream).GetReply()
		op := check("k", int64(r.GetSequence()))
		must.True(t, read(r, []*limiter.Op{op}), "%v", r)
		granted += op.Decision.Granted
	}
	expect.Equal(t, granted, 3, "granted")
}

// TestLongestLeft: a batch is handed on for as long as anybody waits for one of its operations.
func TestLongestLeft(t *testing.T) {
	b := &peerv1.Batch{Sequence: 1}
	p := newPacker(new(wire.Numbers), b, 3, 0)
	for _, left := range []time.Duration{time.Second, 3 * time.Second, 2 * time.Second} {
		p.add(check("k", 1), left)
	}
	var w work
	err := w.read(b, 1, new(numberedTargets))
	expect.True(t, err == nil && w.longest == 3*time.Second, "%v, %v", w.longest, err)
}

// aged is a stream whose connection becomes too old when old is called.
type aged struct {
	peerv1.Peer_ForwardServer
	ctx context.Context
	old context.CancelFunc
}

func newAged(s peerv1.Peer_ForwardServer) aged {
	ctx, old := context.WithCancel(s.Context())
	return aged{s, ctx, old}
}

func (a aged) Context() context.Context { return a.ctx }

// TestOldConnections: streams end again and again because of the age of their connections, and each operation is
// carried out once and answered, also one that waits for another node meanwhile.
func TestOldConnections(t *testing.T) {
	noLeaks(t)
	server := NewServer(ServerConfig{Config: transport.Config{Self: bob, RingSettings: settings,
		Logger: slog.New(slog.DiscardHandler)}})
	var carried, streams atomic.Int64
	server.cfg.Receiver = receiver(func(ops []*limiter.Op) func(context.Context) {
		carried.Add(int64(len(ops)))
		if ops[0].Cost%2 == 0 {
			return admit(ops)
		}
		return func(ctx context.Context) {
			time.Sleep(time.Millisecond)
			expect.NoError(t, ctx.Err(), "what is handed on ends with the stream it came by")
			admit(ops)
		}
	})
	addr := serveBob(t, func(s peerv1.Peer_ForwardServer) error {
		streams.Add(1)
		a := newAged(s)
		defer time.AfterFunc(5*time.Millisecond, a.old).Stop()
		return server.Forward(a)
	})
	p := newPeers(t, addr)
	ctx := testkit.Within(t, testkit.Patience)
	const callers, each = 8, 200
	var work sync.WaitGroup
	for c := range int64(callers) {
		work.Go(func() {
			for range each {
				wantAnswer(t, forward(p, ctx, c))
			}
		})
	}
	work.Wait()
	expect.True(t, carried.Load() == callers*each && streams.Load() > 3,
		"carried out %d operations on %d streams", carried.Load(), streams.Load())
}

// TestPanics: a panic of a batch ends its stream, with an error, so that nobody repeats the batch, and nothing else.
func TestPanics(t *testing.T) {
	noLeaks(t)
	var told atomic.Int64
	server := NewServer(ServerConfig{Config: transport.Config{Self: bob, RingSettings: settings,
		Logger: slog.New(slog.DiscardHandler)}, Panicked: func(*panics.Error) { told.Add(1) }})
	server.cfg.Receiver = receiver(func(ops []*limiter.Op) func(context.Context) {
		switch ops[0].Cost {
		case 1:
			panic("at once")
		case 2:
			return func(context.Context) { panic("later") }
		}
		return admit(ops)
	})
	addr := serveBob(t, func(s peerv1.Peer_ForwardServer) error {
		a := newAged(s)
		defer time.AfterFunc(50*time.Millisecond, a.old).Stop()
		return server.Forward(a)
	})
	for cost := range int64(3) {
		s := rawStream(t, addr, hello())
		if sendTo(t, s, batch(1, check("k", cost))); cost == 0 {
			recv(t, s)
		}
		_, err := s.Recv()
		expect.True(t, (err == io.EOF) == (cost == 0) && told.Load() == cost, "%d: %v, %d panics", cost, err, told.Load())
	}
}

// TestStreamsAreBounded: beyond maxStreams a stream is refused, until another one has ended.
func TestStreamsAreBounded(t *testing.T) {
	noLeaks(t)
	server, addr := servePeer(t, bob, receiver(admit))
	server.streams.Add(maxStreams)
	s := rawStream(t, addr, nil)
	sendTo(t, s, &peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Hello{Hello: hello()}})
	_, err := s.Recv()
	expect.Equal(t, status.Code(err), codes.ResourceExhausted, "%v", err)
	server.streams.Add(-1)
	ask(t, rawStream(t, addr, hello()), batch(1, check("k", 1)))
}

package peer

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
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
		"a batch":     {batch(1, 0, check("k", 1)), codes.InvalidArgument, "hello: "},
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
	packed := batch(1, 0, slices.Repeat([]*limiter.Op{check("k", 1)}, maxBatch+1)...)
	broken := func(change func(*peerv1.Batch)) *peerv1.ForwardRequest {
		m := batch(1, 0, check("k", 1))
		change(m.GetBatch())
		return m
	}
	for what, test := range map[string]struct {
		send []*peerv1.ForwardRequest
		good int // of the first ones, that are answered
		code codes.Code
	}{
		"sequence 0":          {[]*peerv1.ForwardRequest{batch(0, 0, check("k", 1))}, 0, codes.InvalidArgument},
		"too many operations": {[]*peerv1.ForwardRequest{packed}, 0, codes.ResourceExhausted},
		"cut short": {[]*peerv1.ForwardRequest{broken(func(b *peerv1.Batch) {
			b.Checks.Keys = nil
		})}, 0, codes.InvalidArgument},
		"not defined": {[]*peerv1.ForwardRequest{broken(func(b *peerv1.Batch) { b.Checks.Define = nil })},
			0, codes.InvalidArgument},
		"number too large": {[]*peerv1.ForwardRequest{broken(
			func(b *peerv1.Batch) { b.Checks.Define[0].Number = wire.MaxTargets })}, 0, codes.InvalidArgument},
		"another hello": {[]*peerv1.ForwardRequest{batch(1, 0, check("k", 1)),
			helloWith(func(*peerv1.Hello) {})}, 1, codes.InvalidArgument},
		"nothing": {[]*peerv1.ForwardRequest{batch(1, 0, check("k", 1)), {}}, 1, codes.InvalidArgument},
		"below the acknowledged": {[]*peerv1.ForwardRequest{batch(5, 4, check("k", 1)), batch(4, 0, check("k", 1))}, 1,
			codes.InvalidArgument},
		"acknowledged far ahead": {[]*peerv1.ForwardRequest{batch(1, 1<<63, check("k", 1))}, 0, codes.InvalidArgument},
		"acknowledged itself":    {[]*peerv1.ForwardRequest{batch(1, 1, check("k", 1))}, 0, codes.InvalidArgument},
		"acknowledged going back": {[]*peerv1.ForwardRequest{batch(9, 8, check("k", 1)), batch(10, 2, check("k", 1)),
			batch(8, 0, check("k", 1))}, 2, codes.InvalidArgument},
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
			// The sequence space is not spoilt for a sender that comes to its senses.
			s = rawStream(t, addr, hello())
			expect.Equal(t, ask(t, s, batch(100, 0, check("k", 5))), 5)
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
		m := batch(1, 0)
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
		ask(t, s, batch(2, 0))
	})
}

// TestRepeatedBatch: the same sequence gets the same reply, on whatever stream, until it is acknowledged.
func TestRepeatedBatch(t *testing.T) {
	noLeaks(t)
	var carried atomic.Int64
	_, addr := servePeer(t, bob, receiver(func(ops []*limiter.Op) func(context.Context) {
		for _, op := range ops {
			op.Decision.Granted = carried.Add(1)
		}
		return nil
	}))
	a, b := rawStream(t, addr, hello()), rawStream(t, addr, hello())
	other := hello()
	other.Stream++
	c := rawStream(t, addr, other)
	for _, step := range []struct {
		on   peerv1.Peer_ForwardClient
		seq  uint64
		want int64
	}{{a, 1, 1}, {a, 1, 1}, {b, 1, 1}, {b, 2, 2}, {a, 2, 2}, {a, 3, 3}, {c, 1, 4}, {c, 1, 4}, {b, 1, 1}} {
		expect.Equal(t, ask(t, step.on, batch(step.seq, 0, check("k", 1))), step.want, "sequence %d: answer", step.seq)
	}
}

// TestRepliesGoWhereTheQuestionCameFrom: also when another stream of the same sender was opened since, or closed.
func TestRepliesGoWhereTheQuestionCameFrom(t *testing.T) {
	noLeaks(t)
	server, addr := servePeer(t, bob, receiver(admit))
	a, b := rawStream(t, addr, hello()), rawStream(t, addr, hello())
	expect.Equal(t, ask(t, a, batch(1, 0, check("k", 3))), 3)
	must.NoError(t, b.CloseSend())
	_, err := b.Recv()
	must.True(t, err != nil, "an answer to nothing")
	testkit.Eventually(t, "one stream is left", func() bool {
		server.mu.Lock()
		defer server.mu.Unlock()
		sess := server.sessions[sessionKey{alice.Boot, 1}]
		sess.mu.Lock()
		defer sess.mu.Unlock()
		return sess.open == 1
	})
	expect.Equal(t, ask(t, a, batch(2, 0, check("k", 4))), 4)
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
	sendTo(t, s, batch(1, 0, check("k", 1)))
	for seq := uint64(2); seq < 50; seq++ {
		ask(t, s, batch(seq, 0, check("k", 2)))
	}
	// The sender gives up on the first: its reply is not sent any more.
	ask(t, s, batch(50, 49, check("k", 2)))
	close(release)
	ask(t, s, batch(51, 50, check("k", 2)))
}

// TestSenderThatDoesNotRead: its replies fill the connection, and hold up nobody else, not even another stream of its
// own.
func TestSenderThatDoesNotRead(t *testing.T) {
	noLeaks(t)
	var begun atomic.Int64
	_, addr := servePeer(t, bob, receiver(func(ops []*limiter.Op) func(context.Context) {
		admit(ops)
		for _, op := range ops {
			op.Decision.LeaseID = strings.Repeat("x", 10_000)
		}
		begun.Add(1)
		return nil
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
			if rude.Send(batch(seq+1, 0, ops...)) != nil {
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
			ask(t, s, batch(1000, 0, check("k", 1)))
		}
	})
	n := begun.Load()
	must.True(t, n < batches, "%d batches are not enough to fill the connection", batches)
	for range batches {
		recv(t, rude) // nothing was lost
	}
	<-done
}

func TestSessionsAreForgotten(t *testing.T) {
	noLeaks(t)
	var carried atomic.Int64
	server, addr := servePeer(t, bob, receiver(func(ops []*limiter.Op) func(context.Context) {
		carried.Add(1)
		return admit(ops)
	}))
	var ahead atomic.Int64
	server.now = func() time.Time { return time.Unix(0, ahead.Load()) }
	ask := func(stream uint64) {
		t.Helper()
		h := hello()
		h.Stream = stream
		s := rawStream(t, addr, h)
		ask(t, s, batch(1, 0, check("k", 1)))
		must.NoError(t, s.CloseSend())
		_, err := s.Recv()
		expect.True(t, err != nil, "an answer to nothing")
		testkit.Eventually(t, "the stream is over", func() bool {
			server.mu.Lock()
			defer server.mu.Unlock()
			sess := server.sessions[sessionKey{alice.Boot, stream}]
			sess.mu.Lock()
			defer sess.mu.Unlock()
			return sess.open == 0
		})
	}
	ask(1)
	ahead.Add(int64(rememberFor))
	ask(1)
	expect.Equal(t, carried.Load(), 1, "carried out again although it was remembered")
	ahead.Add(int64(rememberFor) + 1)
	ask(2)
	expect.Equal(t, len(server.sessions), 1, "sessions")
	ask(1)
	expect.Equal(t, carried.Load(), 3, "carried out")

	// Their number is bounded, and those that are over make room.
	server.mu.Lock()
	for i := uint64(100); len(server.sessions) < maxSessions; i++ {
		server.sessions[sessionKey{i, i}] = &session{open: 1}
	}
	server.mu.Unlock()
	h := hello()
	h.Stream = 99
	s := rawStream(t, addr, nil)
	sendTo(t, s, &peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Hello{Hello: h}})
	_, err := s.Recv()
	expect.Equal(t, status.Code(err), codes.ResourceExhausted, "%v", err)
	ask(1) // which is known
	ahead.Add(int64(rememberFor) + 1)
	ask(99)
}

// TestUnacknowledged: a sender that acknowledges nothing is stopped.
func TestUnacknowledged(t *testing.T) {
	s := &session{answers: make(map[uint64]*answer), all: new(atomic.Int64)}
	begin := func(seq, acked uint64) (bool, error) {
		fresh, _, err := s.begin(&peerv1.Batch{Sequence: seq, Acknowledged: acked}, nil, 0, time.Time{})
		return fresh, err
	}
	for seq := uint64(1); seq <= maxUnacknowledged; seq++ {
		fresh, err := begin(seq, 0)
		must.True(t, fresh && err == nil, "%v %v", fresh, err)
	}
	_, err := begin(maxUnacknowledged+1, 0)
	expect.Equal(t, status.Code(err), codes.ResourceExhausted, "%v", err)
	// Acknowledged one by one, or by a leap.
	if fresh, err := begin(maxUnacknowledged+1, 1); !fresh || err != nil || len(s.answers) != maxUnacknowledged ||
		s.floor != 1 {
		t.Error(fresh, err, len(s.answers), s.floor)
	}
	if fresh, err := begin(1<<62, 1<<62-1); !fresh || err != nil || len(s.answers) != 1 || s.floor != 1<<62-1 {
		t.Error(fresh, err, len(s.answers), s.floor)
	}
}

// Remembered replies of all senders are bounded together: at the bound a sender with some is told so until it has
// acknowledged them or they are old, and one without is served.
func TestRememberedRepliesAreBounded(t *testing.T) {
	var all atomic.Int64
	now := time.Now()
	a, b := &session{answers: make(map[uint64]*answer), all: &all},
		&session{answers: make(map[uint64]*answer), all: &all}
	reply := func(seq uint64) *peerv1.Reply { return &peerv1.Reply{Sequence: seq, LeasesNs: make([]uint64, 1000)} }
	most := 2 * replySize(reply(0))
	batch := func(s *session, seq, acked uint64) error {
		_, _, err := s.begin(&peerv1.Batch{Sequence: seq, Acknowledged: acked}, new(outlet), most, now)
		if err == nil {
			s.finish(reply(seq), now)
		}
		return err
	}
	for seq := uint64(1); seq <= 2; seq++ {
		must.NoError(t, batch(a, seq, 0))
	}
	err := batch(a, 3, 0)
	expect.Equal(t, status.Code(err), codes.ResourceExhausted, "beyond the bound: %v", err)
	expect.NoError(t, batch(b, 1, 0), "of another sender")
	expect.NoError(t, batch(a, 3, 2), "after others have been acknowledged")
	now = now.Add(rememberFor + 1)
	expect.NoError(t, batch(a, 4, 2), "after others are old")
	now = now.Add(rememberFor + 1)
	expect.True(t, a.over(now) && b.over(now) && all.Load() == 0, "%d bytes are left", all.Load())
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
	batches := []*peerv1.ForwardRequest{batch(1, 0, check("k", 1)), batch(2, 0, check("k", 2))}
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

// TestAcknowledgedAfterGap: an acknowledgement covers the batch that it names, also where many before it are not known.
func TestAcknowledgedAfterGap(t *testing.T) {
	s := &session{answers: map[uint64]*answer{5: {}, 6: {}}, all: new(atomic.Int64)}
	s.acknowledgeLocked(5)
	expect.True(t, s.answers[5] == nil && s.answers[6] != nil && s.floor == 5,
		"up to %d, and known are %v", s.floor, s.answers)
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

// handing has everything handed on, and notes under what.
type handing struct{ err error }

func (h *handing) Receive([]*limiter.Op) func(context.Context) {
	return func(ctx context.Context) { h.err = ctx.Err() }
}

// TestHandedOnBeyondTheStream: what was begun for a sender is finished although its stream ends, for it may ask again.
func TestHandedOnBeyondTheStream(t *testing.T) {
	var h handing
	s := NewServer(ServerConfig{Receiver: &h})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var handed sync.WaitGroup
	s.carryOut(ctx, &session{all: &s.replies}, &work{longest: time.Hour}, &handed)
	handed.Wait()
	expect.NoError(t, h.err, "what is handed on ends with the stream it came by")
}

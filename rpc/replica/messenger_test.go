package replica

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// newMessenger returns a node's Messenger, which knows all others by name, whatever their boot.
func newMessenger(t testing.TB, self ownership.Node, addrs map[string]string, receive func(ownership.Envelope),
	change ...func(*MessengerConfig)) *Messenger {
	t.Helper()
	cfg := MessengerConfig{
		Config: transport.Config{
			Self: self, RingSettings: settings, Logger: slog.New(slog.DiscardHandler),
			Address: func(n ownership.Node) (string, bool) {
				addr, ok := addrs[n.Name]
				return addr, ok
			},
		},
		Partitions: testPartitions,
		Receive: func(list []ownership.Envelope) {
			for _, e := range list {
				receive(e)
			}
		},
	}
	for _, c := range change {
		c(&cfg)
	}
	m := NewMessenger(cfg)
	t.Cleanup(m.Close)
	return m
}

// serveMessenger serves a Messenger and returns its address.
func serveMessenger(t testing.TB, m *Messenger) string {
	t.Helper()
	return serve(t, func(r grpc.ServiceRegistrar) { peerv1.RegisterOwnershipServer(r, m) })
}

// to makes envelopes for a node.
func to(n ownership.Node, messages ...ownership.Message) []ownership.Envelope {
	var list []ownership.Envelope
	for _, m := range messages {
		list = append(list, ownership.Envelope{From: alice, To: n, Message: m})
	}
	return list
}

func numbered(i int) ownership.Message { return &ownership.ReadRecords{ID: uint64(i)} }

// receive waits for a message.
func receive(t testing.TB, from <-chan ownership.Envelope) ownership.Envelope {
	t.Helper()
	select {
	case e := <-from:
		return e
	case <-time.After(testkit.Patience):
		t.Fatal("no message")
		return ownership.Envelope{}
	}
}

// into is a Receive that passes on to a channel.
func into(c chan<- ownership.Envelope) func(ownership.Envelope) {
	return func(e ownership.Envelope) { c <- e }
}

func nothing(ownership.Envelope) {}

func TestMessengerCarriesEveryMessage(t *testing.T) {
	noLeaks(t)
	arrived := make(chan ownership.Envelope, 100)
	addr := serveMessenger(t, newMessenger(t, bob, nil, into(arrived)))
	m := newMessenger(t, alice, map[string]string{bob.Name: addr}, nothing)
	rng := rand.New(rand.NewPCG(5, 6))
	messages := coreMessages()
	for _, msg := range messages {
		fillMessage(rng, reflect.ValueOf(msg).Elem(), false)
	}
	m.Send(to(bob, messages...))
	for _, msg := range messages {
		want := ownership.Envelope{From: alice, To: bob, Message: msg}
		got := receive(t, arrived)
		expect.True(t, reflect.DeepEqual(got, want), "sent    %+v\narrived %+v", want, got)
	}
	testkit.Eventually(t, "all are counted", func() bool {
		return m.Stats() == MessengerStats{Sent: uint64(len(messages))}
	})
	// Whoever is not known is not looked for, and a node does not talk to itself.
	m.Send(to(ownership.Node{Name: "nobody", Boot: 1}, numbered(1)))
	m.Send(to(alice, numbered(1)))
	s := m.Stats()
	expect.Equal(t, s.Dropped, 2, "%+v", s)
}

func TestMessengerRefuses(t *testing.T) {
	hello := func(change func(*peerv1.Hello)) *peerv1.ConverseRequest {
		h := hello()
		change(h)
		return &peerv1.ConverseRequest{Hello: h}
	}
	for want, first := range map[string]*peerv1.ConverseRequest{
		"FailedPrecondition protocol: this node speaks 7, not 8": hello(func(h *peerv1.Hello) { h.Protocol++ }),
		"FailedPrecondition to: this is bob/2, not bob/1":        hello(func(h *peerv1.Hello) { h.ToBoot = 1 }),
		"FailedPrecondition to: this is bob/2, not ann/2":        hello(func(h *peerv1.Hello) { h.ToName = "ann" }),
		"FailedPrecondition ring_settings":                       hello(func(h *peerv1.Hello) { h.RingSettings++ }),
		"InvalidArgument from_name: must have 1 to 63":           hello(func(h *peerv1.Hello) { h.FromName = "" }),
		"InvalidArgument from_name": hello(
			func(h *peerv1.Hello) { h.FromName = strings.Repeat("n", 64) }),
		"InvalidArgument from: is this process": hello(
			func(h *peerv1.Hello) { h.FromName, h.FromBoot = bob.Name, bob.Boot }),
		"InvalidArgument hello": {Messages: [][]byte{{0}}},
	} {
		t.Run(want, func(t *testing.T) {
			noLeaks(t)
			addr := serveMessenger(t,
				newMessenger(t, bob, nil, func(e ownership.Envelope) { t.Errorf("received %+v", e) }))
			stream := must.Value(peerv1.NewOwnershipClient(testkit.Dial(t, addr)).Converse(testkit.Within(t,
				testkit.Patience)))(t)
			must.NoError(t, stream.Send(first))
			_, err := stream.Recv()
			got := fmt.Sprint(status.Code(err), " ", status.Convert(err).Message())
			expect.True(t, strings.HasPrefix(got, want), "got %q", got)
		})
	}
}

// converse opens a stream to bob that is the test's to misuse.
func converse(t testing.TB, addr string) peerv1.Ownership_ConverseClient {
	t.Helper()
	stream, err := peerv1.NewOwnershipClient(testkit.Dial(t, addr)).Converse(testkit.Within(t, testkit.Patience))
	must.NoError(t, err)
	must.NoError(t, stream.Send(&peerv1.ConverseRequest{Hello: hello()}))
	in, err := stream.Recv()
	must.True(t, err == nil && in.GetWelcome().GetProtocol() == transport.Protocol, "no welcome: %v, %v", in, err)
	return stream
}

func frame(messages ...[]byte) *peerv1.ConverseRequest {
	return &peerv1.ConverseRequest{Messages: messages}
}

// TestMessengerDropsWhatMakesNoSense: a bad message is the loss of one message, a bad stream that of the stream.
func TestMessengerDropsWhatMakesNoSense(t *testing.T) {
	noLeaks(t)
	arrived := make(chan ownership.Envelope, 10)
	var log testkit.Buffer
	m := newMessenger(t, bob, nil, into(arrived),
		func(c *MessengerConfig) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	addr := serveMessenger(t, m)
	stream := converse(t, addr)
	bad := Append(nil, &ownership.Offer{Partition: testPartitions})
	for _, f := range []*peerv1.ConverseRequest{frame(bad, Append(nil, numbered(1))), frame(bad, bad),
		frame(Append(nil, numbered(2)))} {
		must.NoError(t, stream.Send(f))
	}
	for i := 1; i <= 2; i++ {
		got := receive(t, arrived)
		expect.True(t, reflect.DeepEqual(got.Message, numbered(i)), "%+v", got)
	}
	s := m.Stats()
	expect.True(t, s.Invalid == 3 && s.Received == 2, "%+v", s)
	expect.Equal(t, strings.Count(log.String(), "Offer: partition"), 1, "how often it is logged:\n%s", log.String())
	for want, f := range map[string]*peerv1.ConverseRequest{
		"hello":   {Hello: hello()},
		"at most": frame(make([][]byte, maxFrameMessages+1)...),
	} {
		stream := converse(t, addr)
		must.NoError(t, stream.Send(f))
		_, err := stream.Recv()
		expect.True(t, strings.Contains(fmt.Sprint(err), want), "want %q: %v", want, err)
	}
}

// conversation is a peer's Converse in a function.
type conversation struct {
	peerv1.UnimplementedOwnershipServer
	converse func(peerv1.Ownership_ConverseServer) error
}

func (c conversation) Converse(s peerv1.Ownership_ConverseServer) error { return c.converse(s) }

// serveConversation serves a bob who welcomes whoever comes, before he goes his own way.
func serveConversation(t testing.TB, then func(peerv1.Ownership_ConverseServer) error) string {
	return serveConversationAt(t, transport.Protocol, then)
}

// serveConversationAt is serveConversation with a bob who speaks so old a protocol.
func serveConversationAt(t testing.TB, version uint32, then func(peerv1.Ownership_ConverseServer) error) string {
	return serve(t, func(r grpc.ServiceRegistrar) {
		peerv1.RegisterOwnershipServer(r, conversation{converse: func(s peerv1.Ownership_ConverseServer) error {
			if _, err := s.Recv(); err != nil {
				return err
			}
			if err := s.Send(&peerv1.ConverseReply{Welcome: &peerv1.Welcome{Protocol: version}}); err != nil {
				return err
			}
			return then(s)
		}})
	})
}

// queued is what waits for a node.
func queued(m *Messenger, n ownership.Node) (messages, bytes int) {
	q, _, err := m.links.To(n)
	if err != nil {
		return 0, 0
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.list.Len(), q.weight
}

// TestMessengerToldApart: what is sent at once to two processes of one name is for each of them.
func TestMessengerToldApart(t *testing.T) {
	m := newMessenger(t, alice, map[string]string{bob.Name: "127.0.0.1:1"}, nothing)
	next := ownership.Node{Name: bob.Name, Boot: bob.Boot + 1}
	m.Send(append(to(bob, numbered(1)), to(next, numbered(2), numbered(3))...))
	for n, want := range map[ownership.Node]int{bob: 1, next: 2} {
		got, _ := queued(m, n)
		expect.Equal(t, got, want, "messages wait for %+v", n)
	}
}

// block is a Block at a position with a chunk of so many bytes.
func block(position, bytes int) ownership.Message {
	return &ownership.Block{Log: 1, Position: uint64(position),
		Entries: []ownership.Entry{{Partition: 1, Chunk: make([]byte, bytes)}}}
}

// messagesOf are the messages of a frame.
func messagesOf(t testing.TB, frame [][]byte) (list []ownership.Message) {
	t.Helper()
	m := &Messenger{cfg: MessengerConfig{Config: transport.Config{Self: bob}, Receive: func(got []ownership.Envelope) {
		for _, e := range got {
			list = append(list, e.Message)
		}
	}}}
	in := intake{m: m, coder: coder{reading: true, partitions: testPartitions}, told: true}
	in.take(frame)
	n := m.invalid.Load()
	expect.True(t, n <= 0, "%d messages make no sense", n)
	return list
}

// TestMessengerBatches: what gathers while the connection is busy goes out together, in frames of bounded size.
func TestMessengerBatches(t *testing.T) {
	noLeaks(t)
	const messages = 3000
	start := make(chan struct{})
	begin := sync.OnceFunc(func() { close(start) })
	defer begin()
	var frames, arrived, largest atomic.Int64
	addr := serveConversation(t, func(s peerv1.Ownership_ConverseServer) error {
		<-start
		for {
			in, err := s.Recv()
			if err != nil {
				return nil
			}
			frames.Add(1)
			arrived.Add(int64(len(messagesOf(t, in.Messages))))
			largest.Store(max(largest.Load(), int64(proto.Size(in))))
		}
	})
	m := newMessenger(t, alice, map[string]string{bob.Name: addr}, nothing)
	for range messages {
		m.Send(to(bob, block(0, 4<<10)))
	}
	testkit.Eventually(t, "the stream is open and full", func() bool { return m.Stats().Sent > 0 })
	begin()
	testkit.Eventually(t, "all are there", func() bool { return arrived.Load() == messages })
	// 3000 · 4 KiB in frames of 256 KiB; some small ones go out before the connection is full.
	if n := frames.Load(); n > 200 || largest.Load() < maxFrame/2 || largest.Load() > maxFrame {
		t.Errorf("%d frames, the largest of %d bytes", n, largest.Load())
	}
}

// TestMessengerQueueIsBounded: bob does not read. What is kept for him is what was said last, and no more than so much
// of it; and nobody waits.
func TestMessengerQueueIsBounded(t *testing.T) {
	noLeaks(t)
	start := make(chan struct{})
	last := make(chan int, 1000)
	addr := serveConversation(t, func(s peerv1.Ownership_ConverseServer) error {
		select {
		case <-start:
		case <-s.Context().Done():
		}
		for {
			in, err := s.Recv()
			if err != nil {
				return nil
			}
			for _, m := range messagesOf(t, in.Messages) {
				last <- int(m.(*ownership.Block).Position)
			}
		}
	})
	m := newMessenger(t, alice, map[string]string{bob.Name: addr}, nothing)
	const messages = 100
	testkit.Soon(t, func() {
		for i := range messages {
			m.Send(to(bob, block(i, 1<<20)))
			_, bytes := queued(m, bob)
			must.True(t, bytes <= maxQueued, "%d bytes are queued", bytes)
		}
	})
	n, _ := queued(m, bob)
	s := m.Stats()
	expect.True(t, n >= maxQueued>>20-1 && s.Dropped >= messages-maxQueued>>20-5, "%d are queued, %+v", n, s)
	close(start)
	arrived := 0
	for i := -1; i < messages-1; arrived++ {
		select {
		case next := <-last:
			must.True(t, next > i, "%d after %d", next, i)
			i = next
		case <-time.After(testkit.Patience):
			t.Fatalf("the last was %d", i)
		}
	}
	s = m.Stats()
	expect.Equal(t, arrived+int(s.Dropped), messages, "%d arrived, %+v", arrived, s)
}

func TestMessengerDropsWhatIsTooLarge(t *testing.T) {
	noLeaks(t)
	arrived := make(chan ownership.Envelope, 10)
	addr := serveMessenger(t, newMessenger(t, bob, nil, into(arrived)))
	var log testkit.Buffer
	m := newMessenger(t, alice, map[string]string{bob.Name: addr}, nothing,
		func(c *MessengerConfig) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	large := block(0, maxWeight)
	m.Send(to(bob, large, large, numbered(1)))
	got := receive(t, arrived)
	expect.True(t, reflect.DeepEqual(got.Message, numbered(1)), "%T", got.Message)
	s := m.Stats()
	expect.True(t, s.Dropped == 2 && strings.Count(log.String(), "too large") == 1, "%+v\n%s", s, log.String())
	// The largest that there may be does arrive.
	most := maxWeight - ownership.Weight(block(0, 0))
	m.Send(to(bob, block(0, most)))
	if got, ok := receive(t, arrived).Message.(*ownership.Block); !ok || len(got.Entries[0].Chunk) != most {
		t.Error("not arrived")
	}
}

// listenAt serves a Messenger at an address, which must be free, until stop is called.
func listenAt(t testing.TB, addr string, m *Messenger) (stop func()) {
	t.Helper()
	lis := must.Value(net.Listen("tcp", addr))(t)
	register := func(r grpc.ServiceRegistrar) { peerv1.RegisterOwnershipServer(r, m) }
	return testkit.ServeOn(t, lis, register, grpc.ForceServerCodecV2(transport.Codec()))
}

// freeAddr is an address that nobody listens at.
func freeAddr(t testing.TB) string {
	t.Helper()
	lis := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer lis.Close()
	return lis.Addr().String()
}

// TestMessengerFindsRestartedPeer: bob is killed and comes back in place as another process, which gets what is meant
// for it, including what was said before it was up, and nothing of what was meant for the one before.
func TestMessengerFindsRestartedPeer(t *testing.T) {
	noLeaks(t)
	addr := freeAddr(t)
	m := newMessenger(t, alice, map[string]string{bob.Name: addr}, nothing)
	before := make(chan ownership.Envelope, 10)
	stop := listenAt(t, addr, newMessenger(t, bob, nil, into(before)))
	m.Send(to(bob, numbered(1)))
	receive(t, before)
	stop()

	again := ownership.Node{Name: bob.Name, Boot: bob.Boot + 1}
	m.Send(to(bob, numbered(2)))
	m.Send(to(again, numbered(3)))
	testkit.Eventually(t, "the new process was looked for in vain", func() bool {
		_, conn, err := m.links.To(again)
		return err == nil && conn.GetState().String() == "TRANSIENT_FAILURE"
	})
	after := make(chan ownership.Envelope, 10)
	up := time.Now()
	listenAt(t, addr, newMessenger(t, again, nil, into(after)))
	got := receive(t, after)
	t.Logf("reached %v after it was up", time.Since(up))
	want := (ownership.Envelope{From: alice, To: again, Message: numbered(3)})
	expect.True(t, reflect.DeepEqual(got, want), "%+v", got)
	m.Send(to(bob, numbered(4)))
	testkit.Eventually(t, "what was meant for the old process is dropped", func() bool {
		s := m.Stats() // the second message may have been written before the connection was seen to be broken
		return s.Dropped >= 1 && s.Dropped+s.Sent == 4
	})
	select {
	case e := <-after:
		t.Errorf("received %+v", e)
	default:
	}
	// Nobody looks for the old process any more.
	old, _, _ := m.links.To(bob)
	kept, _, _ := m.links.To(again)
	m.Retain(func(n ownership.Node) bool { return n == again })
	closed := func(q *queue) bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return q.closed
	}
	testkit.Eventually(t, "the way to the old process is closed", func() bool { return closed(old) })
	expect.True(t, !closed(kept), "so is that to the new one")
	fresh, _, err := m.links.To(bob)
	expect.True(t, err == nil && !closed(fresh), "who is there again is sent what nobody takes: %v", err)
}

// TestMessengerReopens: a broken connection costs what was in flight and nothing more.
func TestMessengerReopens(t *testing.T) {
	noLeaks(t)
	var last atomic.Uint64
	p := testkit.NewProxy(t, serveMessenger(t, newMessenger(t, bob, nil, func(e ownership.Envelope) {
		last.Store(e.Message.(*ownership.ReadRecords).ID)
	})))
	m := newMessenger(t, alice, map[string]string{bob.Name: p.Addr}, nothing)
	for i := 1; i <= 5; i++ {
		// What is said before the break is seen is lost; who wants to be heard says it again.
		testkit.Eventually(t, "a message gets through", func() bool {
			m.Send(to(bob, numbered(i)))
			return last.Load() == uint64(i)
		})
		p.Cut()
	}
}

// TestMessengerGivesUp: what waits for a peer that does not answer is dropped, also by one that is in another world.
func TestMessengerGivesUp(t *testing.T) {
	for name, converse := range map[string]func(peerv1.Ownership_ConverseServer) error{
		"silent": func(s peerv1.Ownership_ConverseServer) error {
			<-s.Context().Done()
			return nil
		},
		"refuses": func(peerv1.Ownership_ConverseServer) error { return status.Error(codes.FailedPrecondition, "no") },
		"other protocol": func(s peerv1.Ownership_ConverseServer) error {
			if err := s.Send(&peerv1.ConverseReply{Welcome: &peerv1.Welcome{Protocol: transport.Protocol +
				1}}); err != nil {
				return err
			}
			<-s.Context().Done()
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			addr := serve(t, func(r grpc.ServiceRegistrar) { peerv1.RegisterOwnershipServer(r, conversation{converse: converse}) })
			var log testkit.Buffer
			m := newMessenger(t, alice, map[string]string{bob.Name: addr}, nothing,
				func(c *MessengerConfig) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
			rounds := uint64(2)
			if name == "silent" {
				rounds = 1 // it takes a second
			}
			for i := range rounds {
				m.Send(to(bob, numbered(1)))
				testkit.Eventually(t, "it is dropped", func() bool { return m.Stats().Dropped == i+1 })
			}
			testkit.Eventually(t, "it is said", func() bool { return strings.Contains(log.String(), "unreachable") })
			expect.Equal(t, strings.Count(log.String(), "unreachable"), 1, "how often it is logged:\n%s", log.String())
		})
	}
}

// TestMessengerCloseUnderLoad: Close and Retain return, with everything ended, whatever is going on.
func TestMessengerCloseUnderLoad(t *testing.T) {
	noLeaks(t)
	var received atomic.Int64
	addrs := map[string]string{}
	nodes := []ownership.Node{{Name: "b", Boot: 2}, {Name: "c", Boot: 3}, {Name: "gone", Boot: 4},
		{Name: "stuck", Boot: 5}}
	for _, n := range nodes[:2] {
		addrs[n.Name] = serveMessenger(t, newMessenger(t, n, nil, func(ownership.Envelope) { received.Add(1) }))
	}
	addrs["gone"] = freeAddr(t)
	addrs["stuck"] = serveConversation(t, func(s peerv1.Ownership_ConverseServer) error {
		<-s.Context().Done()
		return nil
	})
	round := func() {
		m := newMessenger(t, alice, addrs, nothing)
		ctx, cancel := context.WithCancel(context.Background())
		var senders sync.WaitGroup
		defer senders.Wait()
		defer cancel()
		for _, n := range nodes {
			senders.Go(func() {
				for i := 0; ctx.Err() == nil; i++ {
					m.Send(to(n, numbered(i), block(0, i%(64<<10))))
					if i%100 == 0 && n.Name != "b" {
						m.Retain(func(r ownership.Node) bool { return r != n })
					}
					_ = m.Stats()
				}
			})
		}
		before := received.Load()
		testkit.Eventually(t, "messages get through", func() bool { return received.Load() > before+100 })
		testkit.Soon(t, m.Close)
		dropped := m.Stats().Dropped
		m.Send(to(ownership.Node{Name: "other", Boot: 6}, numbered(1)))
		expect.True(t, m.Stats().Dropped > dropped, "sent after Close")
	}
	for range 5 {
		round()
	}
}

var (
	alice = ownership.Node{Name: "alice", Boot: 1}
	bob   = ownership.Node{Name: "bob", Boot: 2}
)

const settings = 0xabc

// noLeaks looks for goroutines of this package and of gRPC.
func noLeaks(t testing.TB) {
	t.Helper()
	testkit.NoLeaks(t, "rpc/replica.", "google.golang.org/grpc")
}

// serve serves a peer service on loopback and returns its address.
func serve(t testing.TB, register func(grpc.ServiceRegistrar)) string {
	t.Helper()
	return testkit.Serve(t, register, grpc.MaxRecvMsgSize(transport.MaxMessage),
		grpc.MaxSendMsgSize(transport.MaxMessage), grpc.ForceServerCodecV2(transport.Codec()))
}

func hello() *peerv1.Hello {
	return &peerv1.Hello{
		Protocol: transport.Protocol, FromName: alice.Name, FromBoot: alice.Boot, ToName: bob.Name, ToBoot: bob.Boot,
		RingSettings: settings,
	}
}

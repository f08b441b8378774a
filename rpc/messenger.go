package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
)

const (
	// maxFrame is the weight from which a frame takes no more messages: what comes next waits until it is written, which
	// takes 2 ms at 1 Gbit/s.
	maxFrame = 256 << 10
	// maxFrameMessages bounds the messages in one frame.
	maxFrameMessages = 4096
	// maxQueued bounds the weight of the messages that wait for one destination, in each lane: what a network of 1 Gbit/s
	// carries in an eighth of a second.
	maxQueued = 16 << 20
	// lightChunk is the largest chunk of a Replicate that is not kept waiting for others.
	lightChunk = 4 << 10
	// reachWithin is how long messages may wait for a stream before they are dropped. Cores repeat what must be heard.
	reachWithin = time.Second
	// reopenAfter is how long a stream that broke, or was refused, is left alone.
	reopenAfter = 50 * time.Millisecond
	// maxStreams bounds the streams that are served at a time: some for every node of the largest cluster.
	maxStreams = 1024
)

// MessengerConfig is what a Messenger needs. All fields but Credentials are required.
type MessengerConfig struct {
	Self         Node
	RingSettings uint64 // fingerprint of the ring's settings; a peer with another one is refused
	Partitions   int    // a message that names a partition beyond them is dropped
	// Address returns the host:port of a node's peer service, or false when the node is not known (any more). It is called
	// with a lock held and must not call the Messenger.
	Address func(Node) (string, bool)
	// Receive is called with every message that arrives, by one goroutine for each sender. It must return soon.
	Receive func(ownership.Envelope)
	Logger  *slog.Logger
	// Credentials, when set, is how the peers prove who they are; nil stands for plain text.
	Credentials credentials.TransportCredentials
}

// MessengerStats counts messages since the Messenger was made.
type MessengerStats struct {
	Sent     uint64 // written to a stream
	Dropped  uint64 // not written: the destination is unknown or unreachable, or too much waits for it
	Received uint64
	Invalid  uint64 // arrived, but are no messages of a core of this cluster
}

// Messenger carries the messages of ownership cores: one stream to each destination, opened when first needed. What
// gathers while a frame is being written goes out together in the next one; there is no timer. A message may be lost,
// and nobody is told: that is for the cores to deal with. In place of any bookkeeping of what has arrived there is only
// a bound on what waits.
//
// It is also the receiving side, to be registered with the gRPC server of the peer service. Its methods are safe for
// concurrent use.
type Messenger struct {
	peerv1.UnimplementedOwnershipServer
	cfg MessengerConfig

	mu       sync.Mutex
	couriers map[Node]*courier
	closed   bool
	work     sync.WaitGroup

	streams                          atomic.Int64 // being served
	sent, dropped, received, invalid atomic.Uint64
}

// NewMessenger returns a Messenger without connections.
func NewMessenger(cfg MessengerConfig) *Messenger {
	return &Messenger{cfg: cfg, couriers: make(map[Node]*courier)}
}

// Stats returns the counts.
func (m *Messenger) Stats() MessengerStats {
	return MessengerStats{Sent: m.sent.Load(), Dropped: m.dropped.Load(), Received: m.received.Load(), Invalid: m.invalid.Load()}
}

// Close drops what waits and waits for every goroutine of the sending side. Streams from other nodes end with the gRPC
// server that they are served by.
func (m *Messenger) Close() {
	m.mu.Lock()
	m.closed = true
	for _, c := range m.couriers {
		c.stop()
	}
	m.mu.Unlock()
	m.work.Wait()
}

// Retain drops the streams to nodes that keep no longer holds for, and what waits for them.
func (m *Messenger) Retain(keep func(Node) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for node, c := range m.couriers {
		if !keep(node) {
			c.stop()
			delete(m.couriers, node)
		}
	}
}

// Send passes messages on, whatever they say of their sender. It never blocks. Messages to this node itself are dropped.
func (m *Messenger) Send(envelopes []ownership.Envelope) {
	for len(envelopes) > 0 {
		to := envelopes[0].To
		n := 1
		for n < len(envelopes) && envelopes[n].To == to {
			n++
		}
		if c, err := m.courier(Node(to)); err != nil {
			m.dropped.Add(uint64(n))
		} else {
			c.add(envelopes[:n])
		}
		envelopes = envelopes[n:]
	}
}

// courier returns the way to a node, making it where there is none.
func (m *Messenger) courier(to Node) (*courier, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c, ok := m.couriers[to]; ok {
		return c, nil
	}
	if m.closed || to == m.cfg.Self {
		return nil, errors.New("rpc: closed, or a message to this node itself")
	}
	addr, ok := m.cfg.Address(to)
	if !ok {
		return nil, fmt.Errorf("rpc: %s is not known", to.Name)
	}
	// A connection is tried again without regard for the cost: a node that is back is to be found within 100 ms, since
	// some partitions may wait for it, and one that is not is soon no member any more.
	conn, err := dialPeer(addr, m.cfg.Credentials, grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 80 * time.Millisecond},
		MinConnectTimeout: reachWithin,
	})
	if err != nil {
		return nil, fmt.Errorf("rpc: peer %s at %s: %w", to.Name, addr, err)
	}
	c := &courier{m: m, to: to, conn: conn, wake: make(chan struct{}, 1), waiting: make(map[ownership.Message]struct{})}
	c.ctx, c.stop = context.WithCancel(context.Background())
	m.couriers[to] = c
	m.work.Go(c.run)
	return c, nil
}

// courier is the way to one process of one peer: what waits for it, a connection, and on it a stream at a time. One
// goroutine (run) opens streams and writes; one more for each stream waits for its end.
type courier struct {
	m    *Messenger
	to   Node
	conn *grpc.ClientConn
	ctx  context.Context
	stop context.CancelFunc
	wake chan struct{} // holds a token when there may be something to write

	mu        sync.Mutex
	lanes     [2]lane
	waiting   map[ownership.Message]struct{} // what is in the lanes
	oversized bool                           // a message too large to be sent has been logged
}

// Lanes of a courier. A copy of many partitions is more than the network carries in the time for which a partition may
// stand still, or a lease last. So the bulk of it is overtaken by everything else.
const (
	light = 0
	heavy = 1
)

// lane is a queue of messages.
type lane struct {
	messages []ownership.Message
	weight   int
}

// pop takes the oldest message.
func (l *lane) pop() ownership.Message {
	msg := l.messages[0]
	l.messages[0], l.messages = nil, l.messages[1:]
	l.weight -= weight(msg)
	return msg
}

// add queues messages, all for its node.
func (c *courier) add(envelopes []ownership.Envelope) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range envelopes {
		c.addLocked(e.Message)
	}
	c.signal()
}

// addLocked queues a message, unless the very same one is waiting already: cores repeat what is not answered in time.
// When too much waits, the oldest gives way: if it is still of interest, it is going to be repeated.
func (c *courier) addLocked(msg ownership.Message) {
	w := weight(msg)
	if w > maxWeight {
		c.m.dropped.Add(1)
		if !c.oversized {
			c.oversized = true
			c.m.cfg.Logger.Error("message to a peer too large", "peer", c.to.Name, "message", fmt.Sprintf("%T", msg), "bytes", w)
		}
		return
	}
	if _, ok := c.waiting[msg]; ok {
		return
	}
	l := &c.lanes[light]
	if r, ok := msg.(*ownership.Replicate); ok && len(r.Chunk) > lightChunk {
		l = &c.lanes[heavy]
	}
	for l.weight+w > maxQueued {
		delete(c.waiting, l.pop())
		c.m.dropped.Add(1)
	}
	l.messages = append(l.messages, msg)
	l.weight += w
	c.waiting[msg] = struct{}{}
}

func (c *courier) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// take returns the next frame to write, or nil when nothing has gathered. One message from each lane finds room in any
// case: none is so large that the frame would not arrive.
func (c *courier) take() []ownership.Message {
	c.mu.Lock()
	defer c.mu.Unlock()
	var frame []ownership.Message
	left := maxFrame
	for i := range c.lanes {
		for l, first := &c.lanes[i], true; len(l.messages) > 0 && (first || len(frame) < maxFrameMessages-1); first = false {
			w := weight(l.messages[0])
			if w > left && !first {
				break
			}
			msg := l.pop()
			delete(c.waiting, msg)
			frame = append(frame, msg)
			left -= w
		}
	}
	return frame
}

// dropAll drops what waits.
func (c *courier) dropAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.m.dropped.Add(uint64(len(c.waiting)))
	c.lanes = [2]lane{}
	clear(c.waiting)
}

func (c *courier) pending() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.waiting) > 0
}

// run owns the courier until it is stopped.
func (c *courier) run() {
	defer c.conn.Close()
	defer c.dropAll()
	down := false // said so in the log, and not been up since
	for {
		select {
		case <-c.wake:
		case <-c.ctx.Done():
			return
		}
		if !c.pending() {
			continue
		}
		welcomed, err := c.talk()
		switch {
		case c.ctx.Err() != nil:
			return
		case welcomed:
			c.m.cfg.Logger.Info("stream of messages to a peer broken", "peer", c.to.Name, "error", err)
			down = false
		default:
			c.dropAll()
			if !down {
				c.m.cfg.Logger.Warn("peer unreachable for messages", "peer", c.to.Name, "error", err)
				down = true
			}
		}
		select {
		case <-time.After(reopenAfter):
			c.signal()
		case <-c.ctx.Done():
			return
		}
	}
}

// talk opens a stream and writes to it until it breaks. It reports whether the peer welcomed it.
func (c *courier) talk() (welcomed bool, err error) {
	ctx, cancel := context.WithCancelCause(c.ctx)
	defer cancel(nil)
	slow := time.AfterFunc(reachWithin, func() { cancel(errNoWelcome) })
	defer slow.Stop()
	stream, err := c.open(ctx)
	if !slow.Stop() {
		err = errNoWelcome
	}
	if err != nil {
		return false, err
	}
	broken := make(chan struct{})
	go func() {
		defer close(broken)
		for err == nil {
			_, err = stream.Recv() // nothing comes but the end
		}
	}()
	c.write(stream, broken)
	cancel(nil)
	<-broken
	return true, err
}

// open opens a stream and waits for its welcome.
func (c *courier) open(ctx context.Context) (peerv1.Ownership_ConverseClient, error) {
	stream, err := peerv1.NewOwnershipClient(c.conn).Converse(ctx, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}
	self := c.m.cfg.Self
	hello := &peerv1.Hello{
		Protocol: Protocol, OldestProtocol: OldestProtocol, FromName: self.Name, FromBoot: self.Boot,
		ToName: c.to.Name, ToBoot: c.to.Boot, RingSettings: c.m.cfg.RingSettings,
	}
	// An error of Send only says that there is one: Recv tells which.
	_ = stream.Send(&peerv1.ConverseRequest{Body: &peerv1.ConverseRequest_Hello{Hello: hello}})
	first, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	return stream, welcomes(c.to, first.GetWelcome())
}

// write sends what gathers until the stream is broken or the courier stopped.
func (c *courier) write(stream peerv1.Ownership_ConverseClient, broken <-chan struct{}) {
	for {
		for msgs := c.take(); msgs != nil; msgs = c.take() {
			frame := &peerv1.Frame{Messages: protoList(msgs, protoMessage)}
			if err := stream.Send(&peerv1.ConverseRequest{Body: &peerv1.ConverseRequest_Frame{Frame: frame}}); err != nil {
				c.m.dropped.Add(uint64(len(msgs)))
				return // the reading side tells why
			}
			c.m.sent.Add(uint64(len(msgs)))
		}
		select {
		case <-c.wake:
		case <-broken:
			return
		case <-c.ctx.Done():
			return
		}
	}
}

// Converse implements peerv1.OwnershipServer.
func (m *Messenger) Converse(stream peerv1.Ownership_ConverseServer) error {
	if m.streams.Add(1) > maxStreams {
		m.streams.Add(-1)
		return status.Errorf(codes.ResourceExhausted, "%d streams are being served already", maxStreams)
	}
	defer m.streams.Add(-1)
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	hello := first.GetHello()
	version, err := m.accept(hello)
	if err != nil {
		m.cfg.Logger.Warn("refused a peer's stream of messages", "peer", hello.GetFromName(), "error", err)
		return err
	}
	if err := stream.Send(&peerv1.ConverseReply{Welcome: &peerv1.Welcome{Protocol: version}}); err != nil {
		return err
	}
	err = m.serve(stream, ownership.Node{Name: hello.FromName, Boot: hello.FromBoot})
	if err != nil {
		m.cfg.Logger.Warn("ended a peer's stream of messages", "peer", hello.FromName, "error", err)
	}
	return err
}

// accept checks that the sender means this process, shares its idea of the ring, and says who it is. It returns the
// version of the protocol to use with it.
func (m *Messenger) accept(h *peerv1.Hello) (version uint32, err error) {
	if version, err = acceptHello(h, m.cfg.Self, m.cfg.RingSettings); err != nil {
		return 0, err
	}
	switch {
	case h.FromName == "" || len(h.FromName) > maxName:
		return 0, status.Errorf(codes.InvalidArgument, "from_name: must have 1 to %d bytes, not %d", maxName, len(h.FromName))
	case h.FromName == m.cfg.Self.Name && h.FromBoot == m.cfg.Self.Boot:
		return 0, status.Error(codes.InvalidArgument, "from: is this process itself")
	}
	return version, nil
}

// serve passes on what arrives until the stream ends. An error is the sender's fault.
func (m *Messenger) serve(stream peerv1.Ownership_ConverseServer, from ownership.Node) error {
	to := ownership.Node(m.cfg.Self)
	r := messageReader{partitions: m.cfg.Partitions}
	told := false
	for {
		in, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) || stream.Context().Err() != nil:
			return nil // the sender is gone, or goes on with another stream
		case err != nil:
			return err // malformed
		}
		frame := in.GetFrame()
		if frame == nil {
			return status.Error(codes.InvalidArgument, "a Frame was expected")
		}
		if len(frame.Messages) > maxFrameMessages {
			return status.Errorf(codes.ResourceExhausted, "messages: a frame holds at most %d, not %d", maxFrameMessages, len(frame.Messages))
		}
		for _, msg := range frame.Messages {
			got, err := r.read(msg)
			if err != nil {
				// The others may be all right, and be waited for.
				m.invalid.Add(1)
				if !told {
					told = true
					m.cfg.Logger.Error("dropped a peer's message", "peer", from.Name, "error", err)
				}
				continue
			}
			m.received.Add(1)
			m.cfg.Receive(ownership.Envelope{From: from, To: to, Message: got})
		}
	}
}

// Package replica carries the messages of the ownership protocol between nodes (weir.peer.v1.Ownership), the copies of partitions
// among them.
//
// What it does not promise: that a message arrives, or that anybody learns of its loss. The protocol's core repeats what must be
// heard. Messages to one node keep their order, but for large chunks, which others overtake.
package replica

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
	"github.com/weirlimit/weir/rpc/transport"
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
	Self         ownership.Node
	RingSettings uint64 // fingerprint of the ring's settings; a peer with another one is refused
	Partitions   int    // a message that names a partition beyond them is dropped
	// Address returns the host:port of a node's peer service, or false when the node is not known (any more). It is called
	// with a lock held and must not call the Messenger.
	Address func(ownership.Node) (string, bool)
	// Receive is called with what arrives, in order, by one goroutine for each sender. It must return soon, and not keep
	// the slice.
	Receive func([]ownership.Envelope)
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

var errNoWelcome = errors.New("replica: no welcome in time")

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
	couriers map[ownership.Node]*courier
	closed   bool
	work     sync.WaitGroup

	streams                          atomic.Int64 // being served
	sent, dropped, received, invalid atomic.Uint64
}

// NewMessenger returns a Messenger without connections.
func NewMessenger(cfg MessengerConfig) *Messenger {
	return &Messenger{cfg: cfg, couriers: make(map[ownership.Node]*courier)}
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
func (m *Messenger) Retain(keep func(ownership.Node) bool) {
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
		if c, err := m.courier(to); err != nil {
			m.dropped.Add(uint64(n))
		} else {
			c.add(envelopes[:n])
		}
		envelopes = envelopes[n:]
	}
}

// courier returns the way to a node, making it where there is none.
func (m *Messenger) courier(to ownership.Node) (*courier, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c, ok := m.couriers[to]; ok {
		return c, nil
	}
	if m.closed || to == m.cfg.Self {
		return nil, errors.New("replica: closed, or a message to this node itself")
	}
	addr, ok := m.cfg.Address(to)
	if !ok {
		return nil, fmt.Errorf("replica: %s is not known", to.Name)
	}
	// A connection is tried again without regard for the cost: a node that is back is to be found within 100 ms, since
	// some partitions may wait for it, and one that is not is soon no member any more.
	conn, err := transport.Dial(addr, m.cfg.Credentials, grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 80 * time.Millisecond},
		MinConnectTimeout: reachWithin,
	})
	if err != nil {
		return nil, fmt.Errorf("replica: peer %s at %s: %w", to.Name, addr, err)
	}
	c := &courier{m: m, to: to, conn: conn, wake: make(chan struct{}, 1)}
	c.ctx, c.stop = context.WithCancel(context.Background())
	m.couriers[to] = c
	m.work.Go(c.run)
	return c, nil
}

// courier is the way to one process of one peer: what waits for it, a connection, and on it a stream at a time. One
// goroutine (run) opens streams and writes; one more for each stream waits for its end.
type courier struct {
	m    *Messenger
	to   ownership.Node
	conn *grpc.ClientConn
	ctx  context.Context
	stop context.CancelFunc
	wake chan struct{} // holds a token when there may be something to write

	mu    sync.Mutex
	lanes [2]lane
	// What is in the lanes, from the first message on that may be among them already until they are empty: only a core that
	// is not answered sends one again. Otherwise nil.
	waiting   map[ownership.Message]struct{}
	oversized bool // a message too large to be sent has been logged

	// Of the goroutine that writes.
	frame  []ownership.Message // the array of the last frame
	packed []byte              // and its bytes
}

// Lanes of a courier. A copy of many partitions is more than the network carries in the time for which a partition may
// stand still, or a lease last. So the bulk of it is overtaken by everything else.
const (
	light = 0
	heavy = 1
)

// lane is a queue of messages.
type lane struct {
	messages []ownership.Message // from head on
	head     int
	weight   int
}

func (l *lane) len() int { return len(l.messages) - l.head }

func (l *lane) first() ownership.Message { return l.messages[l.head] }

// push adds a message, where the oldest were if there is no room behind the newest.
func (l *lane) push(msg ownership.Message) {
	if len(l.messages) == cap(l.messages) && l.head > len(l.messages)/2 {
		n := copy(l.messages, l.messages[l.head:])
		clear(l.messages[n:])
		l.messages, l.head = l.messages[:n], 0
	}
	l.messages = append(l.messages, msg)
}

// pop takes the oldest message.
func (l *lane) pop() ownership.Message {
	msg := l.messages[l.head]
	l.messages[l.head] = nil
	l.weight -= weight(msg)
	if l.head++; l.head == len(l.messages) {
		l.messages, l.head = l.messages[:0], 0
		if cap(l.messages) > maxFrameMessages {
			l.messages = nil // room for as much as seldom waits
		}
	}
	return msg
}

// add queues messages, all for its node.
func (c *courier) add(envelopes []ownership.Envelope) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range envelopes {
		if !e.Again || !c.holdsLocked(e.Message) {
			c.addLocked(e.Message)
		}
	}
	c.signal()
}

// holdsLocked says whether the very same message is waiting.
func (c *courier) holdsLocked(msg ownership.Message) bool {
	if c.waiting == nil && c.pendingLocked() {
		c.waiting = make(map[ownership.Message]struct{})
		for i := range c.lanes {
			for _, m := range c.lanes[i].messages[c.lanes[i].head:] {
				c.waiting[m] = struct{}{}
			}
		}
	}
	_, ok := c.waiting[msg]
	return ok
}

// addLocked queues a message. When too much waits, the oldest gives way: if it is still of interest, it is going to be
// repeated.
func (c *courier) addLocked(msg ownership.Message) {
	w := weight(msg)
	if w > maxWeight {
		c.m.dropped.Add(1)
		if !c.oversized {
			c.oversized = true
			c.m.cfg.Logger.Error("peer message too large", "peer", c.to.Name, "message", fmt.Sprintf("%T", msg), "bytes", w)
		}
		return
	}
	l := &c.lanes[light]
	if r, ok := msg.(*ownership.Replicate); ok && len(r.Chunk) > lightChunk {
		l = &c.lanes[heavy]
	}
	for l.weight+w > maxQueued {
		c.popLocked(l)
		c.m.dropped.Add(1)
	}
	l.push(msg)
	l.weight += w
	if c.waiting != nil {
		c.waiting[msg] = struct{}{}
	}
}

// popLocked takes the oldest message of a lane.
func (c *courier) popLocked(l *lane) ownership.Message {
	msg := l.pop()
	if c.waiting != nil {
		delete(c.waiting, msg)
		if len(c.waiting) == 0 {
			c.waiting = nil
		}
	}
	return msg
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
	clear(c.frame) // the array lives on, the messages need not
	frame := c.frame[:0]
	left := maxFrame
	for i := range c.lanes {
		for l, first := &c.lanes[i], true; l.len() > 0 && (first || len(frame) < maxFrameMessages-1); first = false {
			w := weight(l.first())
			if w > left && !first {
				break
			}
			frame = append(frame, c.popLocked(l))
			left -= w
		}
	}
	c.frame = frame
	if len(frame) == 0 {
		return nil
	}
	return frame
}

// dropAll drops what waits.
func (c *courier) dropAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.lanes {
		c.m.dropped.Add(uint64(c.lanes[i].len()))
	}
	c.lanes = [2]lane{}
	c.waiting = nil
}

func (c *courier) pending() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pendingLocked()
}

func (c *courier) pendingLocked() bool { return c.lanes[light].len()+c.lanes[heavy].len() > 0 }

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
			c.m.cfg.Logger.Info("peer message stream broken", "peer", c.to.Name, "error", err)
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
func (c *courier) open(ctx context.Context) (stream peerv1.Ownership_ConverseClient, err error) {
	if stream, err = peerv1.NewOwnershipClient(c.conn).Converse(ctx, grpc.WaitForReady(true)); err != nil {
		return nil, err
	}
	hello := transport.Greeting(c.m.cfg.Self, c.to, c.m.cfg.RingSettings)
	// An error of Send only says that there is one: Recv tells which.
	_ = stream.Send(&peerv1.ConverseRequest{Body: &peerv1.ConverseRequest_Hello{Hello: hello}})
	first, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	return stream, transport.Welcomed(c.to, first.GetWelcome())
}

// write sends what gathers until the stream is broken or the courier stopped.
func (c *courier) write(stream peerv1.Ownership_ConverseClient, broken <-chan struct{}) {
	for {
		for msgs := c.take(); msgs != nil; msgs = c.take() {
			frame := &peerv1.Frame{}
			frame.Messages, c.packed = protoMessages(msgs, c.packed[:0])
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
	if err := m.accept(hello); err != nil {
		m.cfg.Logger.Warn("peer message stream rejected", "peer", hello.GetFromName(), "error", err)
		return err
	}
	if err := stream.Send(&peerv1.ConverseReply{Welcome: transport.Welcome()}); err != nil {
		return err
	}
	err = m.serve(stream, ownership.Node{Name: hello.FromName, Boot: hello.FromBoot})
	if err != nil {
		m.cfg.Logger.Warn("peer message stream ended", "peer", hello.FromName, "error", err)
	}
	return err
}

// accept checks that the sender means this process, shares its idea of the ring, and says who it is.
func (m *Messenger) accept(h *peerv1.Hello) error {
	if err := transport.Accept(h, m.cfg.Self, m.cfg.RingSettings); err != nil {
		return err
	}
	switch {
	case h.FromName == "" || len(h.FromName) > maxName:
		return status.Errorf(codes.InvalidArgument, "from_name: must have 1 to %d bytes, not %d", maxName, len(h.FromName))
	case h.FromName == m.cfg.Self.Name && h.FromBoot == m.cfg.Self.Boot:
		return status.Error(codes.InvalidArgument, "from: is this process itself")
	}
	return nil
}

// serve passes on what arrives until the stream ends. An error is the sender's fault.
func (m *Messenger) serve(stream peerv1.Ownership_ConverseServer, from ownership.Node) error {
	in := intake{m: m, from: from, r: messageReader{partitions: m.cfg.Partitions}}
	for {
		next, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) || stream.Context().Err() != nil:
			return nil // the sender is gone, or goes on with another stream
		case err != nil:
			return err // malformed
		}
		frame := next.GetFrame()
		if frame == nil {
			return status.Error(codes.InvalidArgument, "a Frame was expected")
		}
		if len(frame.Messages) > maxFrameMessages {
			return status.Errorf(codes.ResourceExhausted, "messages: a frame holds at most %d, not %d", maxFrameMessages, len(frame.Messages))
		}
		in.take(frame)
	}
}

// intake is what one stream brings.
type intake struct {
	m    *Messenger
	from ownership.Node
	r    messageReader
	told bool                 // of a message that was dropped
	list []ownership.Envelope // the array of the last frame's
}

// take passes on the messages of a frame.
func (in *intake) take(frame *peerv1.Frame) {
	in.list = in.list[:0]
	in.r.frame(frame, in.add, in.refuse)
	in.m.received.Add(uint64(len(in.list)))
	if len(in.list) > 0 {
		in.m.cfg.Receive(in.list)
		clear(in.list) // the array lives on, the messages need not
	}
}

func (in *intake) add(m ownership.Message) {
	in.list = append(in.list, ownership.Envelope{From: in.from, To: in.m.cfg.Self, Message: m})
}

// refuse counts messages that are dropped, and logs the first of a stream.
func (in *intake) refuse(n int, err error) {
	in.m.invalid.Add(uint64(n))
	if err != nil && !in.told {
		in.told = true
		in.m.cfg.Logger.Error("peer message dropped", "peer", in.from.Name, "error", err)
	}
}

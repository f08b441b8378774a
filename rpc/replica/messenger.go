// Package replica carries the messages of the ownership protocol between nodes (weir.peer.v1.Ownership), the copies of partitions
// among them.
//
// What it does not promise: that a message arrives, or that anybody learns of its loss. The protocol's core repeats what
// must arrive. Messages to one node keep their order.
package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/rpc/stream"
	"github.com/weirlimit/weir/rpc/transport"
)

const (
	// maxFrame is the weight from which a frame takes no more messages: what comes next waits until it is written, which
	// takes 2 ms at 1 Gbit/s.
	maxFrame = 256 << 10
	// maxFrameMessages bounds the messages in one frame.
	maxFrameMessages = 4096
	// maxQueued bounds the weight of the messages that wait for one destination: what a network of 1 Gbit/s carries in an
	// eighth of a second.
	maxQueued = 16 << 20
	// reachWithin is how long messages may wait for a stream before they are dropped. Cores repeat what must be heard.
	reachWithin = time.Second
	// reopenAfter is how long a stream that broke, or was rejected, is left alone.
	reopenAfter = 50 * time.Millisecond
	// maxStreams bounds the streams that are served at a time: some for every node of the largest cluster.
	maxStreams = 1024
)

// MessengerConfig is what a Messenger needs. All fields are required, but for those that transport.Config says.
type MessengerConfig struct {
	transport.Config
	Partitions int // a message that names a partition beyond them is dropped
	// Receive is called with what arrives, in order, by one goroutine for each sender. It must return soon, and not keep
	// the slice.
	Receive func([]ownership.Envelope)
}

// MessengerStats counts messages since the Messenger was made.
type MessengerStats struct {
	Sent     uint64 // handed to a stream
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
	cfg   MessengerConfig
	links *transport.Links[*queue]

	streams                          atomic.Int64 // being served
	sent, dropped, received, invalid atomic.Uint64
}

// NewMessenger returns a Messenger without connections.
func NewMessenger(cfg MessengerConfig) *Messenger {
	m := &Messenger{cfg: cfg}
	// A connection is tried again without regard for the cost: a node that is back is to be found within 100 ms, since
	// some partitions may wait for it, and one that is not is soon no member any more.
	m.links = transport.NewLinks(cfg.Config, transport.Dialing{
		Carries: "ownership messages", Timeout: reachWithin, Pause: reopenAfter,
		Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 80 * time.Millisecond},
	}, func(to ownership.Node, wake fifo.Signal) *queue { return &queue{m: m, to: to, wake: wake} })
	return m
}

// Stats returns the counts.
func (m *Messenger) Stats() MessengerStats {
	return MessengerStats{Sent: m.sent.Load(), Dropped: m.dropped.Load(), Received: m.received.Load(), Invalid: m.invalid.Load()}
}

// Close drops what waits and waits for every goroutine of the sending side. Streams from other nodes end with the gRPC
// server that they are served by.
func (m *Messenger) Close() { m.links.Close() }

// Retain drops the streams to nodes that keep no longer holds for, and what waits for them.
func (m *Messenger) Retain(keep func(ownership.Node) bool) { m.links.Retain(keep) }

// Send passes messages on, whatever they say of their sender. It never blocks. Messages to this node itself are dropped.
func (m *Messenger) Send(envelopes []ownership.Envelope) {
	for len(envelopes) > 0 {
		to := envelopes[0].To
		n := 1
		for n < len(envelopes) && envelopes[n].To == to {
			n++
		}
		if q, _, err := m.links.To(to); err != nil {
			m.dropped.Add(uint64(n))
		} else {
			q.add(envelopes[:n])
		}
		envelopes = envelopes[n:]
	}
}

// queue is what waits for one process of one peer.
type queue struct {
	m    *Messenger
	to   ownership.Node
	wake fifo.Signal

	mu        sync.Mutex
	list      fifo.Queue[ownership.Message]
	weight    int // of list
	closed    bool
	oversized bool // a message too large to be sent has been logged

	// Of the goroutine that writes.
	frame []ownership.Message // the array of the last frame
	room  []byte              // of its messages
}

// add queues messages, all for its node.
func (q *queue) add(envelopes []ownership.Envelope) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, e := range envelopes {
		q.addLocked(e.Message)
	}
	q.wake.Set()
}

// addLocked queues a message. When too much waits, the oldest gives way: if it is still of interest, it is going to be
// repeated.
func (q *queue) addLocked(msg ownership.Message) {
	w := ownership.Weight(msg)
	switch {
	case q.closed:
		q.m.dropped.Add(1)
		return
	case w > maxWeight:
		q.m.dropped.Add(1)
		if !q.oversized {
			q.oversized = true
			q.m.cfg.Logger.Error("peer message too large", "peer", q.to.Name, "message", fmt.Sprintf("%T", msg), "bytes", w)
		}
		return
	}
	for ; q.weight+w > maxQueued; q.m.dropped.Add(1) {
		q.weight -= ownership.Weight(q.list.Pop())
	}
	q.list.Push(msg)
	q.weight += w
}

// take returns the next frame to write, or nil when nothing has gathered. One message finds room in any case: none is so
// large that the frame would not arrive.
func (q *queue) take() []ownership.Message {
	q.mu.Lock()
	defer q.mu.Unlock()
	clear(q.frame) // the array lives on, the messages need not
	frame := q.frame[:0]
	left := maxFrame
	for q.list.Len() > 0 && len(frame) < maxFrameMessages {
		w := ownership.Weight(q.list.First())
		if w > left && len(frame) > 0 {
			break
		}
		frame = append(frame, q.list.Pop())
		left -= w
		q.weight -= w
	}
	q.frame = frame
	return frame
}

// Pending implements transport.Queue.
func (q *queue) Pending() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.list.Len() > 0
}

// Open implements transport.Queue.
func (q *queue) Open(ctx context.Context, conn *grpc.ClientConn, hello *peerv1.Hello) (*peerv1.Welcome, func(end func()) error, error) {
	s, err := peerv1.NewOwnershipClient(conn).Converse(ctx, grpc.WaitForReady(true))
	if err != nil {
		return nil, nil, err
	}
	// An error of Send only says that there is one: Recv tells which.
	_ = s.Send(&peerv1.ConverseRequest{Hello: hello})
	first, err := s.Recv()
	nothing := func(*peerv1.ConverseReply) error { return nil } // comes but the end
	return first.GetWelcome(), func(end func()) error { return stream.Run(s, end, q.wake, q.next, nothing) }, err
}

// next makes a message of what has gathered. It counts as sent: if the stream breaks, it may be lost, as any.
func (q *queue) next() *peerv1.ConverseRequest {
	msgs := q.take()
	if len(msgs) == 0 {
		return nil
	}
	q.m.sent.Add(uint64(len(msgs)))
	frame := &peerv1.ConverseRequest{Messages: make([][]byte, len(msgs))}
	q.room = q.room[:0]
	for i, m := range msgs {
		from := len(q.room)
		q.room = Append(q.room, m)
		frame.Messages[i] = q.room[from:]
	}
	return frame
}

// Broken implements transport.Queue. What waits is for the next stream.
func (q *queue) Broken() {}

// Failed implements transport.Queue: what waits is dropped.
func (q *queue) Failed(closed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = closed
	q.m.dropped.Add(uint64(q.list.Len()))
	q.list, q.weight = fifo.Queue[ownership.Message]{}, 0
}

// Converse implements peerv1.OwnershipServer.
func (m *Messenger) Converse(s peerv1.Ownership_ConverseServer) error {
	if m.streams.Add(1) > maxStreams {
		m.streams.Add(-1)
		return status.Errorf(codes.ResourceExhausted, "%d streams are being served already", maxStreams)
	}
	defer m.streams.Add(-1)
	first, err := s.Recv()
	if err != nil {
		return err
	}
	hello := first.GetHello()
	welcome, err := m.cfg.Accept(hello)
	if err != nil {
		return err
	}
	if err := s.Send(&peerv1.ConverseReply{Welcome: welcome}); err != nil {
		return err
	}
	err = m.serve(s, ownership.Node{Name: hello.FromName, Boot: hello.FromBoot})
	if err != nil {
		m.cfg.Logger.Warn("peer stream ended", "carries", "ownership messages", "peer", hello.FromName, "error", err)
	}
	return err
}

// serve passes on what arrives until the stream ends. An error is the sender's fault.
func (m *Messenger) serve(stream peerv1.Ownership_ConverseServer, from ownership.Node) error {
	in := intake{m: m, from: from, coder: coder{reading: true, partitions: m.cfg.Partitions}}
	for {
		next, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) || stream.Context().Err() != nil:
			return nil // the sender is gone, or goes on with another stream
		case err != nil:
			return err // malformed
		}
		if next.Hello != nil {
			return status.Error(codes.InvalidArgument, "hello: only the first message has one")
		}
		if len(next.Messages) > maxFrameMessages {
			return status.Errorf(codes.ResourceExhausted, "messages: a frame holds at most %d, not %d", maxFrameMessages, len(next.Messages))
		}
		in.take(next.Messages)
	}
}

// intake is what one stream brings.
type intake struct {
	m     *Messenger
	from  ownership.Node
	coder coder
	told  bool                 // of a message that was dropped
	list  []ownership.Envelope // the array of the last frame's
}

// take passes on the messages of a frame. It drops a message that is malformed, and logs the first of a stream: the
// others may be all right, and be waited for.
func (in *intake) take(frame [][]byte) {
	in.list, in.coder.items = in.list[:0], maxItems
	for _, data := range frame {
		m, err := in.coder.read(data)
		if err == nil {
			in.list = append(in.list, ownership.Envelope{From: in.from, To: in.m.cfg.Self, Message: m})
			continue
		}
		in.m.invalid.Add(1)
		if !in.told {
			in.told = true
			in.m.cfg.Logger.Error("peer message dropped", "peer", in.from.Name, "error", err)
		}
	}
	in.m.received.Add(uint64(len(in.list)))
	if len(in.list) > 0 {
		in.m.cfg.Receive(in.list)
		clear(in.list) // the array lives on, the messages need not
	}
}

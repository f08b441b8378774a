// Package replica carries the messages of the ownership protocol between nodes (weir.peer.v1.Ownership), including
// copies of partitions.
//
// It does not promise that a message arrives, and does not report a loss: the protocol's core repeats messages that
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

// This file has both ends. To send, Send adds messages to the queue of their process, and stream.Run writes a frame of
// what take returns. To receive, Converse checks the Hello, and intake.take decodes each frame and passes its messages
// to Receive. codec.go has the form of a message.

const (
	// maxFrame is the weight at which a frame takes no more messages. Writing it takes 2 ms at 1 Gbit/s, for which
	// later messages wait.
	maxFrame = 256 << 10
	// maxFrameMessages bounds the messages in one frame.
	maxFrameMessages = 4096
	// maxQueued bounds the weight of the messages that wait for one destination: what 1 Gbit/s carries in an eighth of
	// a second.
	maxQueued = 16 << 20
	// reachWithin is how long messages may wait for a stream before they are dropped. The core repeats messages that
	// must arrive.
	reachWithin = time.Second
	// reopenAfter is the pause between the end of a stream, or a failed attempt, and the next attempt.
	reopenAfter = 50 * time.Millisecond
	// maxStreams bounds the streams that are served at a time: several for every node of the largest cluster.
	maxStreams = 1024
)

// MessengerConfig is what a Messenger needs. All fields are required unless transport.Config says otherwise.
type MessengerConfig struct {
	transport.Config
	Partitions int // number of partitions; a message that names a partition beyond it is dropped
	// Receive is called with the messages of each frame, in order, by one goroutine for each stream. It must return
	// soon and must not keep the slice.
	Receive func([]ownership.Envelope)
}

// MessengerStats counts messages since the Messenger was made.
type MessengerStats struct {
	Sent uint64 // handed to a stream
	// not written: the destination is unknown or unreachable, too much waits for it, or the message is too large
	Dropped  uint64
	Received uint64
	Invalid  uint64 // arrived, and malformed
}

// Messenger carries the messages of ownership cores, over one stream to each destination, opened when it is first
// needed. Messages that gather while a frame is being written share the next frame. There is no timer. A message may be
// lost without notice, so the Messenger keeps no record of what has arrived and only bounds what waits.
//
// It also serves the receiving side, to be registered with the gRPC server of the peer service. Its methods are safe
// for concurrent use.
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
	// The backoff is short whatever it costs: a node that restarts must be reached within 100 ms, since partitions may
	// wait for it, and a node that stays away soon stops being a member.
	m.links = transport.NewLinks(cfg.Config, transport.Dialing{
		Carries: "ownership messages", Timeout: reachWithin, Pause: reopenAfter,
		Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2,
			MaxDelay: 80 * time.Millisecond},
	}, func(to ownership.Node, wake fifo.Signal) *queue { return &queue{m: m, to: to, wake: wake} })
	return m
}

// Stats returns the counts.
func (m *Messenger) Stats() MessengerStats {
	return MessengerStats{Sent: m.sent.Load(), Dropped: m.dropped.Load(), Received: m.received.Load(),
		Invalid: m.invalid.Load()}
}

// Close drops waiting messages and waits for every goroutine of the sending side. The streams that other nodes have
// opened end with the gRPC server.
func (m *Messenger) Close() { m.links.Close() }

// Retain closes the streams to nodes for which keep returns false, and drops messages that wait for them.
func (m *Messenger) Retain(keep func(ownership.Node) bool) { m.links.Retain(keep) }

// Send queues messages for their destinations (To); it ignores From. It never blocks. It drops messages to this node
// itself.
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

// queue holds the messages that wait for one process.
type queue struct {
	m    *Messenger
	to   ownership.Node
	wake fifo.Signal

	mu        sync.Mutex
	list      fifo.Queue[ownership.Message]
	weight    int // of the messages in list
	closed    bool
	oversized bool // the first message that was too large has been logged

	// Only the writing goroutine uses the fields below.
	frame []ownership.Message // the last frame; the next one uses its array
	room  []byte              // the encoded messages of the last frame
}

// add queues messages, all for the queue's process.
func (q *queue) add(envelopes []ownership.Envelope) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, e := range envelopes {
		q.addLocked(e.Message)
	}
	q.wake.Set()
}

// addLocked queues a message. When the queue is full it drops the oldest messages: the core repeats those that still
// matter.
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
			q.m.cfg.Logger.Error("peer message too large", "peer", q.to.Name, "message", fmt.Sprintf("%T", msg),
				"bytes", w)
		}
		return
	}
	for ; q.weight+w > maxQueued; q.m.dropped.Add(1) {
		q.weight -= ownership.Weight(q.list.Pop())
	}
	q.list.Push(msg)
	q.weight += w
}

// take returns the messages of the next frame, none when nothing waits. A frame has at least one message, however
// large: maxWeight is below transport.MaxMessage.
func (q *queue) take() []ownership.Message {
	q.mu.Lock()
	defer q.mu.Unlock()
	clear(q.frame) // so that the array does not keep messages alive
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
func (q *queue) Open(ctx context.Context, conn *grpc.ClientConn,
	hello *peerv1.Hello) (*peerv1.Welcome, func(end func()) error, error) {
	s, err := peerv1.NewOwnershipClient(conn).Converse(ctx, grpc.WaitForReady(true))
	if err != nil {
		return nil, nil, err
	}
	// When Send fails, Recv returns the stream's error.
	_ = s.Send(&peerv1.ConverseRequest{Hello: hello})
	first, err := s.Recv()
	nothing := func(*peerv1.ConverseReply) error { return nil } // a peer sends nothing after its Welcome
	return first.GetWelcome(), func(end func()) error { return stream.Run(s, end, q.wake, q.next, nothing) }, err
}

// next encodes the next frame, or returns nil. Its messages count as sent, though they are lost if the stream breaks.
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

// Broken implements transport.Queue. Waiting messages stay for the next stream.
func (q *queue) Broken(error) {}

// Failed implements transport.Queue: it drops the waiting messages.
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

// serve passes on the messages of a stream until it ends. It returns an error when the sender broke a rule.
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
			return status.Errorf(codes.ResourceExhausted, "messages: a frame holds at most %d, not %d",
				maxFrameMessages, len(next.Messages))
		}
		in.take(next.Messages)
	}
}

// intake reads the frames of one stream.
type intake struct {
	m     *Messenger
	from  ownership.Node
	coder coder
	told  bool                 // a dropped message has been logged
	list  []ownership.Envelope // the messages of the last frame; the next one uses its array
}

// take passes the messages of a frame to Receive. It drops a malformed message, logs the first one of the stream, and
// goes on, because the other messages may be good and waited for.
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
		clear(in.list) // so that the array does not keep messages alive
	}
}

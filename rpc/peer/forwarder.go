// Package peer forwards operations to the holders of their partitions, over one stream to each process (Forwarder), and
// answers operations that other nodes forward to this one (Server): the two sides of weir.peer.v1.Peer.
//
// It decides nothing. Its only state belongs to its streams: messages without an answer. It does not promise that an
// operation without an answer was not carried out, nor that operations to different nodes keep their order.
package peer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/rpc/stream"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/rpc/wire"
)

// This file has the sending side. The path of one call:
//
//	Forward     finds the queue of the process and cuts the operations into calls of at most maxBatch
//	send        adds a call to the queue and waits until the queue ends it or the caller's context is done
//	queue.take  makes a message of the calls that have gathered; stream.Run writes it
//	answered    fills in the outcomes from the reply, and ends the calls of its message
//	Broken      queues the calls of unanswered messages again if the peer has not carried them out, and otherwise
//	            ends them without an answer
//
// Forwarder has one queue for each process, made by transport.Links.

const (
	// maxBatch bounds the items of one Batch message.
	maxBatch = 1000
	// maxWaiting bounds the operations of the calls that one queue holds, queued or sent. Further operations are
	// unreachable at once, so that a stuck peer does not fill the memory of this node.
	maxWaiting = 100_000
	// openTimeout bounds how long a stream waits for its Welcome. It is longer than most callers wait, so that a lost
	// packet (TCP repeats it after 1 s) or a busy machine does not fail a connection that would have succeeded.
	openTimeout = 3 * time.Second
	// maxRepeats bounds how often a call is queued again, so that a peer that ends each stream is not asked without end.
	maxRepeats = 8
	// maxIdentity bounds the answer to Identify, which comes from a process that may not be a node, and maxReason the
	// text of an error in its place, which callers keep.
	maxIdentity, maxReason = 4 << 10, 512
)

// ForwarderConfig is what a Forwarder needs. transport.Config says which of its fields are required.
type ForwarderConfig struct {
	transport.Config
	// Observe, when set, is called when a message is answered or given up: took is the time since it was made, items
	// the number of its operations, answered whether a reply came. It is called with a lock held and must return at
	// once.
	Observe func(took time.Duration, items int, answered bool)
}

// Forwarder sends operations to other nodes: one stream to each process, opened when it is first needed. Calls that
// arrive while a message is being written, or before the writer's goroutine runs again, share the next message. There
// is no timer. Its methods are safe for concurrent use.
type Forwarder struct {
	cfg   ForwarderConfig
	links *transport.Links[*queue]
	calls sync.Pool // of *call
}

// NewForwarder returns a Forwarder without connections.
func NewForwarder(cfg ForwarderConfig) *Forwarder {
	p := &Forwarder{cfg: cfg, calls: sync.Pool{New: func() any { return &call{done: make(chan struct{}, 1)} }}}
	// The backoff stays short, so that a peer that restarts is reached again within a second or so.
	p.links = transport.NewLinks(cfg.Config, transport.Dialing{
		Carries: "operations", Timeout: openTimeout,
		Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
	}, func(to ownership.Node, wake fifo.Signal) *queue { return newQueue(&p.cfg, to, wake) })
	return p
}

// Close ends all calls without an answer, and waits for every goroutine.
func (p *Forwarder) Close() { p.links.Close() }

// Retain closes the streams to nodes for which keep returns false. Operations that wait for such a node are unreachable
// at once.
func (p *Forwarder) Retain(keep func(ownership.Node) bool) { p.links.Retain(keep) }

// Forward implements limiter.Peers: it sets the Outcome of each operation, and may reorder ops. It returns when all are
// answered or ctx is done. Without a deadline, an operation has openTimeout to be sent. A hint may name this node as
// the holder, where a peer's view is old: the answer is NotHolder then, because the Limiter decides its own partitions
// without this package.
func (p *Forwarder) Forward(ctx context.Context, to ownership.Node, ops []*limiter.Op) {
	if to == p.cfg.Self {
		for _, op := range ops {
			op.Outcome.NotHolder = &ownership.Route{}
		}
		return
	}
	q, _, err := p.links.To(to)
	if err != nil || ctx.Err() != nil {
		unreachable(ops)
		return
	}
	until, ok := ctx.Deadline()
	if !ok {
		until = time.Now().Add(openTimeout)
	}
	slices.SortStableFunc(ops, func(a, b *limiter.Op) int { return cmp.Compare(isItem(a), isItem(b)) })
	for len(ops) > 0 {
		n := min(len(ops), maxBatch)
		p.send(ctx, q, ops[:n], until)
		ops = ops[n:]
	}
}

// isItem is 0 for a check and 1 for any other operation, which a Batch has after its checks.
func isItem(op *limiter.Op) int {
	if op.Kind == limiter.OpCheck {
		return 0
	}
	return 1
}

// send has operations answered that fit into one message, the checks first, and sets their outcomes.
func (p *Forwarder) send(ctx context.Context, q *queue, ops []*limiter.Op, until time.Time) {
	c := p.calls.Get().(*call)
	c.begin(ops, until)
	if !q.add(c) {
		unreachable(ops)
		return
	}
	select {
	case <-c.done:
	case <-ctx.Done():
		if q.abandon(c) {
			unreachable(ops)
			return // the queue may still refer to the call, so that it is not used again
		}
		<-c.done
	}
	if !c.answered {
		unreachable(ops)
	}
	c.ops, c.message, c.answered, c.ended, c.repeats = nil, nil, false, false, 0
	p.calls.Put(c)
}

func unreachable(ops []*limiter.Op) {
	for _, op := range ops {
		op.Outcome = limiter.Outcome{Unreachable: true}
	}
}

// Client returns a client for the unary calls of a node's peer service. It is valid until Retain drops the node.
func (p *Forwarder) Client(node ownership.Node) (peerv1.PeerClient, error) {
	_, conn, err := p.links.To(node)
	if err != nil {
		return nil, err
	}
	return peerv1.NewPeerClient(conn), nil
}

// Identify asks the process at a peer address which process it is, over a connection of its own, since the process need
// not be a node. creds are as in ForwarderConfig. Without an answer it returns when ctx is done. Its errors are short.
func Identify(ctx context.Context, addr string,
	creds credentials.TransportCredentials) (*peerv1.IdentifyResponse, error) {
	conn, err := transport.Dial(addr, creds, 0,
		grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: openTimeout})
	if err != nil {
		return nil, fmt.Errorf("peer: %s: %w", addr, err)
	}
	defer conn.Close()
	r, err := peerv1.NewPeerClient(conn).Identify(ctx, &peerv1.IdentifyRequest{}, grpc.MaxCallRecvMsgSize(maxIdentity))
	if err != nil {
		return nil, fmt.Errorf("peer: %.*s", maxReason, err.Error()) // the process may have made its text up
	}
	return r, nil
}

// call is the operations of one send, on their way to a peer. It ends once. Either the queue ends it (end), and touches
// neither the call nor its operations afterwards, or its caller abandons it.
type call struct {
	ops []*limiter.Op // with their outcomes, once the call has ended; nil once it is abandoned
	n   int           // length of ops
	// checks is how many of ops, from the first on, are checks; keys is the length of their keys in bytes.
	checks, keys int
	until        time.Time     // when the caller gives up
	done         chan struct{} // receives one value when the queue ends the call
	// answered says whether the outcomes are set. It is written before done receives its value.
	answered bool
	// The queue's lock guards the fields below.
	message *message // the message that has this call; nil while the call is queued
	ended   bool     // or abandoned
	repeats int      // how often the call was queued again
}

// begin sets the fields that follow from the operations.
func (c *call) begin(ops []*limiter.Op, until time.Time) {
	c.ops, c.n, c.until = ops, len(ops), until
	for c.checks, c.keys = 0, 0; c.checks < c.n && isItem(ops[c.checks]) == 0; c.checks++ {
		c.keys += len(ops[c.checks].Key)
	}
}

// message is a Batch that is about to be sent or was sent. It holds one or more calls. The queue's lock guards its
// fields, except for request, body and batch, which the writer uses without it.
type message struct {
	request peerv1.ForwardRequest
	body    peerv1.ForwardRequest_Batch
	batch   peerv1.Batch

	sequence uint64
	items    int // number of operations
	checks   int // number of those that are checks
	calls    []*call
	live     int // number of calls that have not ended
	made     time.Time
}

// queue holds the calls to one process: queued, or part of a message that has no answer yet.
//
// A call ends with outcomes when its message is answered. It ends without when its caller gives up, no stream can be
// opened, the stream breaks, or the link is closed. A message without a live call is forgotten at once, and
// a late reply to it is ignored.
type queue struct {
	cfg  *ForwarderConfig
	to   ownership.Node
	wake fifo.Signal

	mu       sync.Mutex
	calls    fifo.Queue[*call]   // not yet part of a message; some may have been abandoned
	sent     map[uint64]*message // messages without an answer, by sequence
	waiting  int                 // number of operations in calls and in the messages of sent
	sequence uint64              // of the last message made
	closed   bool
	numbers  wire.Numbers // of the targets that the current stream has defined
}

func newQueue(cfg *ForwarderConfig, to ownership.Node, wake fifo.Signal) *queue {
	return &queue{cfg: cfg, to: to, wake: wake, sent: make(map[uint64]*message)}
}

// add queues a call. It returns false when there is no room for the call, or the link is closed.
func (q *queue) add(c *call) bool {
	q.mu.Lock()
	if q.closed || q.waiting+c.n > maxWaiting {
		q.mu.Unlock()
		return false
	}
	q.waiting += c.n
	q.calls.Push(c)
	q.mu.Unlock()
	q.wake.Set()
	return true
}

// abandon ends a call for its caller. It returns false when the queue has ended the call before.
func (q *queue) abandon(c *call) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if c.ended {
		return false
	}
	c.ended, c.ops = true, nil
	if m := c.message; m != nil {
		if m.live--; m.live == 0 {
			q.forgetLocked(m, false)
		}
	}
	return true // a queued call stays in calls until take drops it: calls is long only while the peer is stuck
}

// end ends a call that has not ended. The caller holds the queue's lock.
func (c *call) end(answered bool) {
	c.ended, c.answered = true, answered
	if c.message != nil {
		c.message.live--
	}
	c.done <- struct{}{}
}

// endLocked ends those calls of a message that have not ended, and forgets the message.
func (q *queue) endLocked(m *message, answered bool) {
	for _, c := range m.calls {
		if !c.ended {
			c.end(answered)
		}
	}
	q.forgetLocked(m, answered)
}

// forgetLocked removes a message without a live call from sent.
func (q *queue) forgetLocked(m *message, answered bool) {
	delete(q.sent, m.sequence)
	q.waiting -= m.items
	if q.cfg.Observe != nil {
		q.cfg.Observe(time.Since(m.made), m.items, answered)
	}
}

// Pending implements transport.Queue.
func (q *queue) Pending() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.calls.Len() > 0
}

// Open implements transport.Queue.
func (q *queue) Open(ctx context.Context, conn *grpc.ClientConn,
	hello *peerv1.Hello) (*peerv1.Welcome, func(end func()) error, error) {
	s, err := peerv1.NewPeerClient(conn).Forward(ctx)
	if err != nil {
		return nil, nil, err
	}
	// When Send fails, Recv returns the stream's error.
	_ = s.Send(&peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Hello{Hello: hello}})
	first, err := s.Recv()
	return first.GetWelcome(), func(end func()) error {
		q.mu.Lock()
		q.numbers.Reset() // the peer knows none on this stream
		q.mu.Unlock()
		return stream.Run(s, end, q.wake, q.next, q.received)
	}, err
}

// Failed implements transport.Queue: it ends all calls without an answer. A later stream does not repeat them, so that
// callers do not wait for a peer that cannot be reached or rejects the stream.
func (q *queue) Failed(closed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = closed
	for _, c := range q.calls.Items() {
		q.waiting -= c.n
		if !c.ended {
			c.end(false)
		}
	}
	q.calls = fifo.Queue[*call]{}
	for _, m := range q.sent {
		q.endLocked(m, false)
	}
}

// Broken implements transport.Queue. A peer that ends a stream with status OK has answered all that it has carried out:
// the other calls are queued again, before those that wait. After any other end the peer may have carried them out, so
// that they end.
func (q *queue) Broken(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	var again fifo.Queue[*call]
	for _, sequence := range slices.Sorted(maps.Keys(q.sent)) {
		m := q.sent[sequence]
		if !errors.Is(err, io.EOF) {
			q.endLocked(m, false)
			continue
		}
		delete(q.sent, sequence)
		q.waiting -= m.items
		for _, c := range m.calls {
			switch {
			case c.ended:
			case c.repeats == maxRepeats:
				c.end(false)
			default:
				c.message, c.repeats = nil, c.repeats+1
				q.waiting += c.n
				again.Push(c)
			}
		}
	}
	for _, c := range q.calls.Items() {
		again.Push(c)
	}
	q.calls = again
	q.wake.Set()
}

// next is take for stream.Run.
func (q *queue) next() *peerv1.ForwardRequest {
	if m := q.take(); m != nil {
		return &m.request
	}
	return nil
}

// take returns the next message to write, of the calls that have gathered. It returns nil when there is none.
func (q *queue) take() *message {
	q.mu.Lock()
	defer q.mu.Unlock()
	m, keys := &message{made: time.Now()}, 0
	for q.calls.Len() > 0 && m.items+q.calls.First().n <= maxBatch {
		c := q.calls.Pop()
		switch {
		case c.ended:
			q.waiting -= c.n
		case !c.until.After(m.made):
			// The caller is about to give up. If the operations were sent, they could be charged without an answer to
			// anyone.
			q.waiting -= c.n
			c.end(false)
		default:
			c.message = m
			m.calls = append(m.calls, c)
			m.items += c.n
			m.checks += c.checks
			keys += c.keys
		}
	}
	if len(m.calls) == 0 {
		return nil
	}
	q.sequence++
	m.sequence, m.live, m.batch.Sequence = q.sequence, len(m.calls), q.sequence
	m.body.Batch, m.request.Body = &m.batch, &m.body
	q.packLocked(m, keys)
	q.sent[m.sequence] = m
	return m
}

// packLocked packs the operations of a new message. keys is the length of the keys of its checks in bytes.
func (q *queue) packLocked(m *message, keys int) {
	m.batch.Items = nil
	p := newPacker(&q.numbers, &m.batch, m.checks, keys)
	for _, c := range m.calls {
		for _, op := range c.ops {
			if !p.add(op, c.until.Sub(m.made)) {
				q.numbers.Reset() // the second attempt succeeds: maxBatch is below wire.MaxTargets
				q.packLocked(m, keys)
				return
			}
		}
	}
}

// received processes one message of the peer for stream.Run. A message that is not a Reply is ignored.
func (q *queue) received(in *peerv1.ForwardReply) error {
	if r := in.GetReply(); r != nil && q.answered(r) {
		r.ReturnToVTPool()
	}
	return nil
}

// answered processes a reply. It returns true when the memory of the reply is worth keeping, which that of a reply with
// Others or Items is not.
func (q *queue) answered(r *peerv1.Reply) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	m := q.sent[r.Sequence]
	if m == nil {
		return false // given up, or answered on an earlier stream
	}
	if !m.answer(r) {
		q.cfg.Logger.Error("peer reply malformed", "peer", q.to.Name, "asked", m.items)
		q.endLocked(m, false)
		return false
	}
	q.endLocked(m, true)
	return len(r.Others)+len(r.Items) == 0
}

// answer sets the outcomes of the calls that have not ended. It returns false when the reply does not fit the message.
func (m *message) answer(r *peerv1.Reply) bool {
	in := outcomesOf(r, m.checks, m.items-m.checks)
	if in == nil {
		return false
	}
	var nobodys received // takes the outcomes of abandoned calls
	for _, c := range m.calls {
		for i := range c.n {
			op := nobodys.link()
			if !c.ended {
				op = c.ops[i]
			}
			in.next(op, i < c.checks)
		}
	}
	return in.ended()
}

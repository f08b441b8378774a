// Package peer has other nodes decide: it forwards operations to the holders of their partitions, over one stream to each, and
// serves the other end (weir.peer.v1.Peer).
//
// It decides nothing and keeps no state but that of its streams: replies that a peer may still ask for again. What it does not
// promise: that an operation whose answer did not come was not carried out; that operations to different nodes keep their order.
package peer

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/stream"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/rpc/wire"
)

const (
	// maxBatch bounds the items of one Batch message.
	maxBatch = 1000
	// maxWaiting bounds the operations that wait for one peer, or are in one message with some that do: beyond it they are
	// unreachable at once, which keeps the memory of a node bounded while a peer is stuck.
	maxWaiting = 100_000
	// openTimeout bounds how long a stream may take to be welcomed. It is longer than most callers wait, so that a lost
	// packet (repeated after 1 s) or a machine under load does not fail a connection that is about to be made.
	openTimeout = 3 * time.Second
	// maxTries is how often a message is sent at most, each time on another stream because the one before broke.
	maxTries = 3
	// repeatWithin is the age up to which a message is sent again. The receiver remembers what it answered for longer
	// (rememberFor): later than that, a repeated message would be carried out a second time.
	repeatWithin = rememberFor / 2
	// maxIdentity bounds what one may say who may not even be a peer.
	maxIdentity = 4 << 10
)

// ForwarderConfig is what a Forwarder needs: see transport.Config.
type ForwarderConfig struct {
	transport.Config
	// Observe, when set, is told how long each message to a peer took to be answered or given up, how many operations it
	// held, and whether it was answered. It is called with a lock held and must return at once.
	Observe func(took time.Duration, items int, answered bool)
}

// Forwarder is how this node has others decide: one stream to each, opened when first needed. What gathers while a message
// is being written, or while other goroutines of this process were to run, goes out together in the next one; there is
// no timer. Its methods are safe for concurrent use.
type Forwarder struct {
	cfg   ForwarderConfig
	links *transport.Links[*queue]
	calls sync.Pool     // of *call
	last  atomic.Uint64 // number of the last queue's sequence space
}

// NewForwarder returns a Forwarder without connections.
func NewForwarder(cfg ForwarderConfig) *Forwarder {
	p := &Forwarder{cfg: cfg, calls: sync.Pool{New: func() any { return &call{done: make(chan struct{}, 1)} }}}
	// A peer that was gone for a moment is to be found again in a moment.
	p.links = transport.NewLinks(cfg.Config, transport.Dialing{
		Carries: "operations", Timeout: openTimeout,
		Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
	}, func(to ownership.Node, wake fifo.Signal) *queue { return newQueue(&p.cfg, to, p.last.Add(1), wake) })
	return p
}

// Close fails what is in flight, and waits for every goroutine.
func (p *Forwarder) Close() { p.links.Close() }

// Retain drops the streams to nodes that keep no longer holds for: what waits for them is unreachable at once.
func (p *Forwarder) Retain(keep func(ownership.Node) bool) { p.links.Retain(keep) }

// Forward implements limiter.Peers. What is for this node itself, which some peer took for the holder, is answered
// NotHolder: whoever decides here does not send it away.
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

// isItem is 1 for what a Batch has after its checks.
func isItem(op *limiter.Op) int {
	if op.Kind == limiter.OpCheck {
		return 0
	}
	return 1
}

// send sends operations that fit into one message, the checks first, and waits for what comes of them.
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
			return // the queue may know of the call for some more time
		}
		<-c.done
	}
	if !c.answered {
		unreachable(ops)
	}
	c.ops, c.message, c.answered, c.ended = nil, nil, false, false
	p.calls.Put(c)
}

func unreachable(ops []*limiter.Op) {
	for _, op := range ops {
		op.Outcome = limiter.Outcome{Unreachable: true}
	}
}

// Client returns what asks a node for what only it knows of itself. It is good until the node is no longer retained.
func (p *Forwarder) Client(node ownership.Node) (peerv1.PeerClient, error) {
	_, conn, err := p.links.To(node)
	if err != nil {
		return nil, err
	}
	return peerv1.NewPeerClient(conn), nil
}

// Identify asks whoever is at a peer address who it is, over a connection of its own: what answers there need not be a node. creds
// are as in ForwarderConfig. It takes as long as ctx allows when nobody answers.
func Identify(ctx context.Context, addr string, creds credentials.TransportCredentials) (*peerv1.IdentifyResponse, error) {
	conn, err := transport.Dial(addr, creds, 0, grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: openTimeout})
	if err != nil {
		return nil, fmt.Errorf("peer: %s: %w", addr, err)
	}
	defer conn.Close()
	return peerv1.NewPeerClient(conn).Identify(ctx, &peerv1.IdentifyRequest{}, grpc.MaxCallRecvMsgSize(maxIdentity))
}

// call is some operations of one caller on their way to a peer. It ends once: ended by the queue, which touches neither it nor
// its operations after that, or abandoned by its caller.
type call struct {
	ops []*limiter.Op // with their outcomes, once ended; nil once abandoned
	n   int           // how many they are
	// checks is how many of them, the first ones, are checks, and keys how many bytes their keys take.
	checks, keys int
	until        time.Time     // when its caller gives up
	done         chan struct{} // holds a token once ended
	// answered says that the outcomes are there; otherwise it is clear that none will come. Set before it ends.
	answered bool
	// Guarded by the queue's lock.
	message *message // that it is part of; nil while it is queued
	ended   bool     // or abandoned
}

// begin gives the call its operations.
func (c *call) begin(ops []*limiter.Op, until time.Time) {
	c.ops, c.n, c.until = ops, len(ops), until
	for c.checks, c.keys = 0, 0; c.checks < c.n && isItem(ops[c.checks]) == 0; c.checks++ {
		c.keys += len(ops[c.checks].Key)
	}
}

// message is a Batch that was sent or is about to be: one or more calls. It is guarded by the queue's lock, but for what is
// sent, which is the writer's. That has all that is to be known of the operations, which may be gone when it is repeated.
type message struct {
	request peerv1.ForwardRequest
	body    peerv1.ForwardRequest_Batch
	batch   peerv1.Batch

	sequence uint64
	items    int // operations, checks of which are checks
	checks   int
	uses     []*weirv1.StreamTarget // what batch names
	calls    []*call
	live     int // calls that are still waited for
	made     time.Time
	tries    int // how often it was sent
}

// queue is what waits for one process of one peer: queued, or sent and not answered. Its messages have numbers in a sequence space
// that outlives the stream.
//
// A call ends once: with replies, when its message is answered; without, when its caller gives up, no stream can be
// opened, its message has been sent too often, or the link is closed. A message that nobody waits for any more is
// forgotten at once: it is not repeated, and its reply is ignored if it comes after all.
type queue struct {
	cfg    *ForwarderConfig
	to     ownership.Node
	stream uint64
	wake   fifo.Signal

	mu       sync.Mutex
	calls    fifo.Queue[*call]   // not yet part of a message; some may have ended
	sent     map[uint64]*message // made and waited for, by sequence
	again    []*message          // of a broken stream, to be repeated on the next unless forgotten meanwhile
	waiting  int                 // operations of calls, and of the messages in sent
	sequence uint64              // of the last message made
	acked    uint64              // no message up to it is waited for
	closed   bool
	numbers  wire.Numbers // of targets, in the stream that is written to
}

func newQueue(cfg *ForwarderConfig, to ownership.Node, number uint64, wake fifo.Signal) *queue {
	return &queue{cfg: cfg, to: to, stream: number, wake: wake, sent: make(map[uint64]*message)}
}

// add queues a call, or returns false when there is no room for it.
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

// abandon gives up waiting for a call, and reports false if it has ended.
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
	return true // what is queued keeps its place: the queue is only long when the peer is stuck
}

// end ends a call that has not ended. The queue's lock is held.
func (c *call) end(answered bool) {
	c.ended, c.answered = true, answered
	if c.message != nil {
		c.message.live--
	}
	c.done <- struct{}{}
}

// endLocked ends the calls of a message that have not ended, and forgets it.
func (q *queue) endLocked(m *message, answered bool) {
	for _, c := range m.calls {
		if !c.ended {
			c.end(answered)
		}
	}
	q.forgetLocked(m, answered)
}

// forgetLocked takes a message, in which no call is waited for any more, out of what is sent.
func (q *queue) forgetLocked(m *message, answered bool) {
	full := q.fullLocked()
	delete(q.sent, m.sequence)
	q.waiting -= m.items
	for q.acked < q.sequence && q.sent[q.acked+1] == nil {
		q.acked++
	}
	if full {
		q.wake.Set()
	}
	if q.cfg.Observe != nil {
		q.cfg.Observe(time.Since(m.made), m.items, answered)
	}
}

// fullLocked says whether the receiver would have to remember more messages than it does, were another one sent.
func (q *queue) fullLocked() bool { return q.sequence-q.acked >= maxUnacknowledged }

// Pending implements transport.Queue.
func (q *queue) Pending() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.calls.Len() > 0 || len(q.again) > 0
}

// Open implements transport.Queue.
func (q *queue) Open(ctx context.Context, conn *grpc.ClientConn, hello *peerv1.Hello) (*peerv1.Welcome, func(end func()) error, error) {
	s, err := peerv1.NewPeerClient(conn).Forward(ctx)
	if err != nil {
		return nil, nil, err
	}
	hello.Stream = q.stream
	// An error of Send only says that there is one: Recv tells which.
	_ = s.Send(&peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Hello{Hello: hello}})
	first, err := s.Recv()
	return first.GetWelcome(), func(end func()) error {
		q.mu.Lock()
		q.numbers.Reset() // the peer knows none on this stream
		q.mu.Unlock()
		return stream.Run(s, end, q.wake, q.next, q.received)
	}, err
}

// Failed implements transport.Queue: all that waits ends without an answer. A peer that cannot be reached, or rejects the stream, is
// not asked again for the same operations.
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
	q.calls, q.again = fifo.Queue[*call]{}, nil
	for _, m := range q.sent {
		q.endLocked(m, false)
	}
}

// Broken implements transport.Queue: what is unanswered is written again on the next stream, under the same sequence, so that the
// peer does not carry it out twice, and in order. What was sent too often or too long ago is given up.
func (q *queue) Broken() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.again = nil
	for s := q.acked + 1; s <= q.sequence; s++ {
		switch m := q.sent[s]; {
		case m == nil:
		case m.tries >= maxTries || time.Since(m.made) > repeatWithin:
			q.endLocked(m, false)
		default:
			q.again = append(q.again, m)
		}
	}
	q.wake.Set()
}

// next makes a message of what has gathered.
func (q *queue) next() *peerv1.ForwardRequest {
	if m := q.take(); m != nil {
		return &m.request
	}
	return nil
}

// take returns the next message to write, or nil when nothing has gathered.
func (q *queue) take() *message {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.again) > 0 {
		m := q.again[0]
		q.again = q.again[1:]
		if q.sent[m.sequence] == m {
			m.tries++
			// Its numbers are those of an earlier stream. What is new comes after all that is repeated, and has numbers of its own.
			m.batch.Checks.Define = m.uses
			return m
		}
	}
	if q.fullLocked() {
		return nil // forgetLocked wakes the writer when there is room
	}
	m, keys := &message{made: time.Now()}, 0
	for q.calls.Len() > 0 && m.items+q.calls.First().n <= maxBatch {
		c := q.calls.Pop()
		switch {
		case c.ended:
			q.waiting -= c.n
		case !c.until.After(m.made):
			// Its caller is about to say so. It could still be charged for, and nobody would hear of it.
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
	m.sequence, m.live, m.tries = q.sequence, len(m.calls), 1
	m.batch.Sequence, m.batch.Acknowledged = q.sequence, q.acked
	m.body.Batch, m.request.Body = &m.batch, &m.body
	q.packLocked(m, keys)
	q.sent[m.sequence] = m
	return m
}

// packLocked packs the operations of a new message, whose keys take so many bytes.
func (q *queue) packLocked(m *message, keys int) {
	m.batch.Items = nil
	p := newPacker(&q.numbers, &m.batch, m.checks, keys)
	for _, c := range m.calls {
		for _, op := range c.ops {
			if !p.add(op, c.until.Sub(m.made)) {
				q.numbers.Reset() // a message has fewer operations than there are numbers
				q.packLocked(m, keys)
				return
			}
		}
	}
	m.uses = p.uses
}

// received takes in a reply, or what is none.
func (q *queue) received(in *peerv1.ForwardReply) error {
	if r := in.GetReply(); r != nil && q.answered(r) {
		r.ReturnToVTPool()
	}
	return nil
}

// answered takes in a reply, and reports whether its room is worth keeping: that of an answer to a message is not too large.
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

// answer fills in the outcomes of the operations that are waited for. It reports false when the reply is none to this message.
func (m *message) answer(r *peerv1.Reply) bool {
	in := outcomesOf(r, m.checks, m.items-m.checks)
	if in == nil {
		return false
	}
	var nobodys received // for callers that have gone on
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

package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
)

// Protocol is the version of the peer protocol that this build speaks. Nodes of different versions refuse one another.
const Protocol = 1

const (
	// maxBatch bounds the items of one Batch message.
	maxBatch = 1000
	// maxWaiting bounds the operations that wait for one peer: beyond it they are unreachable at once, which keeps the
	// memory of a node bounded while a peer is stuck.
	maxWaiting = 100_000
	// openTimeout bounds how long a stream may take to be welcomed.
	openTimeout = time.Second
	// maxMessage bounds a message between peers: a thousand checks with the longest keys and answers fit well.
	maxMessage = 8 << 20
)

// Node is a process that can be reached.
type Node struct {
	Name string
	Boot uint64
}

// PeersConfig is what Peers needs. All fields but Observe are required.
type PeersConfig struct {
	Self         Node
	RingSettings uint64 // fingerprint of the ring's settings; a peer with another one is refused
	// Address returns the host:port of a node's peer service, or false when the node is not known (any more).
	Address func(Node) (string, bool)
	Logger  *slog.Logger
	// Observe, when set, is told how long each message to a peer took to be answered, and whether it was.
	Observe func(took time.Duration, answered bool)
}

// Peers is how this node has others decide: one stream to each, opened when first needed. What gathers while a message
// is being written goes out together in the next one; there is no timer. Its methods are safe for concurrent use.
type Peers struct {
	cfg PeersConfig

	mu     sync.Mutex
	links  map[Node]*link
	next   uint64 // number of the next link's sequence space
	closed bool
	work   sync.WaitGroup
}

// NewPeers returns Peers without connections.
func NewPeers(cfg PeersConfig) *Peers { return &Peers{cfg: cfg, links: make(map[Node]*link)} }

// Close fails what is under way, and waits for every goroutine.
func (p *Peers) Close() {
	p.mu.Lock()
	p.closed = true
	for _, l := range p.links {
		l.stop()
	}
	p.mu.Unlock()
	p.work.Wait()
}

// Retain drops the links to nodes that keep no longer holds for: what waits for them is unreachable at once.
func (p *Peers) Retain(keep func(Node) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for node, l := range p.links {
		if !keep(node) {
			l.stop()
			delete(p.links, node)
		}
	}
}

// link returns the link to a node, making it where there is none.
func (p *Peers) link(to Node) (*link, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l, ok := p.links[to]; ok {
		return l, nil
	}
	if p.closed {
		return nil, errors.New("rpc: closed")
	}
	addr, ok := p.cfg.Address(to)
	if !ok {
		return nil, fmt.Errorf("rpc: %s is not known", to.Name)
	}
	conn, err := grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		// A peer that was gone for a moment is to be found again in a moment.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: openTimeout,
		}),
		grpc.WithDisableServiceConfig(),
		grpc.WithNoProxy(),
	)
	if err != nil {
		return nil, fmt.Errorf("rpc: peer %s at %s: %w", to.Name, addr, err)
	}
	p.next++
	l := newLink(p.cfg, to, p.next, conn)
	p.links[to] = l
	p.work.Go(l.run)
	return l, nil
}

// Forward implements limiter.Peers.
func (p *Peers) Forward(ctx context.Context, to limiter.Holder, ops []*limiter.Op) {
	l, err := p.link(Node{to.Name, to.Boot})
	if err != nil {
		unreachable(ops)
		return
	}
	left := openTimeout
	if d, ok := ctx.Deadline(); ok {
		left = time.Until(d)
	}
	for len(ops) > 0 {
		n := min(len(ops), maxBatch)
		f := &flight{items: make([]*peerv1.Item, n), done: make(chan struct{})}
		for i, op := range ops[:n] {
			f.items[i] = protoItem(op, to, left)
		}
		if !l.send(f) {
			unreachable(ops)
			return
		}
		select {
		case <-f.done:
		case <-ctx.Done():
			l.abandon(f)
			<-f.done
		}
		for i, op := range ops[:n] {
			if f.replies == nil {
				op.Outcome.Unreachable = true
			} else {
				setOutcome(op, f.replies[i])
			}
		}
		ops = ops[n:]
	}
}

func unreachable(ops []*limiter.Op) {
	for _, op := range ops {
		op.Outcome.Unreachable = true
	}
}

// Inspect asks a node what only it knows of itself.
func (p *Peers) Inspect(ctx context.Context, node Node) (*peerv1.InspectResponse, error) {
	l, err := p.link(node)
	if err != nil {
		return nil, err
	}
	return peerv1.NewPeerClient(l.conn).Inspect(ctx, &peerv1.InspectRequest{})
}

// flight is some operations of one caller on their way to a peer. done is closed, under the link's lock, once replies
// are there or it is clear that none will come.
type flight struct {
	items   []*peerv1.Item
	replies []*peerv1.ItemReply // one for each item, or nil
	done    chan struct{}
	ended   bool
}

// message is a Batch that was sent or is about to be: one or more flights.
type message struct {
	batch   *peerv1.Batch
	flights []*flight
	sent    time.Time
}

// link is the way to one process of one peer: a connection, on it a stream at a time, and a sequence space that outlives
// the stream. One goroutine (run) opens streams and writes; one more for each stream reads.
type link struct {
	cfg    PeersConfig
	to     Node
	stream uint64
	conn   *grpc.ClientConn
	ctx    context.Context
	stop   context.CancelFunc
	wake   chan struct{} // holds a token when there may be something to write

	mu       sync.Mutex
	queue    []*flight           // not yet part of a message
	sent     map[uint64]*message // written, or to be written again, and not yet answered
	again    []*message          // messages of a broken stream to be repeated on the next
	waiting  int                 // items in queue and sent
	sequence uint64              // of the last message made
	acked    uint64              // every message up to it was answered or given up
	stopped  bool
}

func newLink(cfg PeersConfig, to Node, number uint64, conn *grpc.ClientConn) *link {
	ctx, stop := context.WithCancel(context.Background())
	return &link{
		cfg: cfg, to: to, stream: number, conn: conn, ctx: ctx, stop: stop,
		wake: make(chan struct{}, 1), sent: make(map[uint64]*message),
	}
}

// send queues a flight, or returns false when the link takes no more.
func (l *link) send(f *flight) bool {
	l.mu.Lock()
	if l.stopped || l.waiting+len(f.items) > maxWaiting {
		l.mu.Unlock()
		return false
	}
	l.waiting += len(f.items)
	l.queue = append(l.queue, f)
	l.mu.Unlock()
	l.signal()
	return true
}

func (l *link) signal() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// abandon gives up waiting for a flight. Its message, if it is under way, stays so until it is answered.
func (l *link) abandon(f *flight) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, q := range l.queue {
		if q == f {
			l.queue = append(l.queue[:i], l.queue[i+1:]...)
			break
		}
	}
	l.endLocked(f, nil)
}

// endLocked completes a flight, once.
func (l *link) endLocked(f *flight, replies []*peerv1.ItemReply) {
	if f.ended {
		return
	}
	f.ended = true
	f.replies = replies
	l.waiting -= len(f.items)
	close(f.done)
}

// run owns the link until it is stopped.
func (l *link) run() {
	defer l.conn.Close()
	defer l.failAll(true)
	down := false // said so in the log, and not been up since
	for {
		select {
		case <-l.wake:
		case <-l.ctx.Done():
			return
		}
		if !l.pending() {
			continue
		}
		progress, err := l.talk()
		if l.ctx.Err() != nil {
			return
		}
		if progress {
			down = false
			continue // what is unanswered is repeated on the next stream
		}
		l.failAll(false)
		if !down {
			l.cfg.Logger.Warn("peer unreachable", "peer", l.to.Name, "error", err)
			down = true
		}
	}
}

func (l *link) pending() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.queue) > 0 || len(l.again) > 0
}

// failAll completes everything under way without replies.
func (l *link) failAll(stopped bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped = l.stopped || stopped
	for _, f := range l.queue {
		l.endLocked(f, nil)
	}
	for _, m := range l.sent {
		for _, f := range m.flights {
			l.endLocked(f, nil)
		}
	}
	l.queue, l.again = nil, nil
	clear(l.sent)
	l.acked = l.sequence
}

// talk opens a stream and writes to it until it breaks. It reports whether anything was answered on it: what is unanswered
// then is worth repeating on the next stream, under the same sequence, so that the peer does not decide it twice. A
// stream that breaks without an answer is not followed by another for the same operations.
func (l *link) talk() (progress bool, err error) {
	ctx, cancel := context.WithCancel(l.ctx)
	defer cancel()
	slow := time.AfterFunc(openTimeout, cancel)
	defer slow.Stop()
	stream, err := peerv1.NewPeerClient(l.conn).Forward(ctx)
	if err != nil {
		return false, err
	}
	hello := &peerv1.Hello{
		Protocol: Protocol, FromName: l.cfg.Self.Name, FromBoot: l.cfg.Self.Boot, Stream: l.stream,
		ToName: l.to.Name, ToBoot: l.to.Boot, RingSettings: l.cfg.RingSettings,
	}
	// An error of Send only says that there is one: Recv tells which.
	_ = stream.Send(&peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Hello{Hello: hello}})
	first, err := stream.Recv()
	if err != nil {
		return false, err
	}
	if !slow.Stop() {
		return false, context.DeadlineExceeded
	}
	if w := first.GetWelcome(); w.GetProtocol() != Protocol {
		return false, fmt.Errorf("rpc: peer %s speaks protocol %d, this node %d", l.to.Name, w.GetProtocol(), Protocol)
	}
	broken := make(chan struct{})
	var reader sync.WaitGroup
	reader.Go(func() {
		defer close(broken)
		progress, err = l.read(stream)
	})
	l.write(stream, broken)
	cancel()
	reader.Wait()
	l.repeat()
	return progress, err
}

// repeat has what is unanswered written again on the next stream, in the order of its sequence.
func (l *link) repeat() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.again = nil
	for s := l.acked + 1; s <= l.sequence; s++ {
		if m, ok := l.sent[s]; ok {
			l.again = append(l.again, m)
		}
	}
	l.signal()
}

// write sends what gathers until the stream is broken or the link stopped.
func (l *link) write(stream peerv1.Peer_ForwardClient, broken <-chan struct{}) {
	for {
		for m := l.take(); m != nil; m = l.take() {
			if err := stream.Send(&peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Batch{Batch: m.batch}}); err != nil {
				return
			}
		}
		select {
		case <-l.wake:
		case <-broken:
			return
		case <-l.ctx.Done():
			return
		}
	}
}

// take returns the next message to write, or nil when nothing has gathered.
func (l *link) take() *message {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.again) > 0 {
		m := l.again[0]
		l.again = l.again[1:]
		return m
	}
	m := &message{batch: &peerv1.Batch{}, sent: time.Now()}
	for len(l.queue) > 0 && len(m.batch.Items)+len(l.queue[0].items) <= maxBatch {
		f := l.queue[0]
		l.queue = l.queue[1:]
		m.flights = append(m.flights, f)
		m.batch.Items = append(m.batch.Items, f.items...)
	}
	if len(m.flights) == 0 {
		return nil
	}
	l.sequence++
	m.batch.Sequence, m.batch.Acknowledged = l.sequence, l.acked
	l.sent[l.sequence] = m
	return m
}

// read completes flights from the peer's replies until the stream breaks, and reports whether there were any.
func (l *link) read(stream peerv1.Peer_ForwardClient) (progress bool, err error) {
	for {
		in, err := stream.Recv()
		if err != nil {
			return progress, err
		}
		if r := in.GetReply(); r != nil {
			progress = true
			l.answered(r)
		}
	}
}

func (l *link) answered(r *peerv1.Reply) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m, ok := l.sent[r.Sequence]
	if !ok {
		return // given up, or answered on an earlier stream
	}
	delete(l.sent, r.Sequence)
	for l.acked < l.sequence {
		if _, open := l.sent[l.acked+1]; open {
			break
		}
		l.acked++
	}
	replies := r.Items
	whole := len(replies) == len(m.batch.Items)
	if !whole {
		l.cfg.Logger.Error("peer answered another number of items than asked", "peer", l.to.Name, "asked", len(m.batch.Items), "answered", len(replies))
	}
	if l.cfg.Observe != nil {
		l.cfg.Observe(time.Since(m.sent), whole)
	}
	for _, f := range m.flights {
		if !whole {
			l.endLocked(f, nil)
			continue
		}
		n := len(f.items)
		l.endLocked(f, replies[:n:n])
		replies = replies[n:]
	}
}

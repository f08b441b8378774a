// Package peer has other nodes decide: it forwards operations to the holders of their partitions, over one stream to each, and
// serves the other end (weir.peer.v1.Peer).
//
// It decides nothing and keeps no state but that of its streams: replies that a peer may still ask for again. What it does not
// promise: that an operation whose answer did not come was not carried out; that operations to different nodes keep their order.
package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/transport"
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
	// keepPacked is how much room for packed operations or outcomes is kept, in bytes: for a full batch of usual ones.
	keepPacked = 64 << 10
)

// ForwarderConfig is what a Forwarder needs. All fields but Observe and Credentials are required.
type ForwarderConfig struct {
	Self         ownership.Node
	RingSettings uint64 // fingerprint of the ring's settings; a peer with another one is refused
	// Address returns the host:port of a node's peer service, or false when the node is not known (any more).
	Address func(ownership.Node) (string, bool)
	Logger  *slog.Logger
	// Observe, when set, is told how long each message to a peer took to be answered or given up, how many operations it
	// held, and whether it was answered. It is called with a lock held and must return at once.
	Observe func(took time.Duration, items int, answered bool)
	// Credentials, when set, is how the peers prove who they are; nil stands for plain text.
	Credentials credentials.TransportCredentials
}

// Forwarder is how this node has others decide: one stream to each, opened when first needed. What gathers while a message
// is being written, or while other goroutines of this process were to run, goes out together in the next one; there is
// no timer. Its methods are safe for concurrent use.
type Forwarder struct {
	cfg ForwarderConfig

	flights sync.Pool // of *flight

	mu     sync.Mutex
	links  map[ownership.Node]*link
	next   uint64 // number of the next link's sequence space
	closed bool
	work   sync.WaitGroup
}

// NewForwarder returns a Forwarder without connections.
func NewForwarder(cfg ForwarderConfig) *Forwarder {
	return &Forwarder{
		cfg: cfg, links: make(map[ownership.Node]*link),
		flights: sync.Pool{New: func() any { return &flight{done: make(chan struct{}, 1)} }},
	}
}

// Close fails what is under way, and waits for every goroutine.
func (p *Forwarder) Close() {
	p.mu.Lock()
	p.closed = true
	for _, l := range p.links {
		l.stop()
	}
	p.mu.Unlock()
	p.work.Wait()
}

// Retain drops the links to nodes that keep no longer holds for: what waits for them is unreachable at once.
func (p *Forwarder) Retain(keep func(ownership.Node) bool) {
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
func (p *Forwarder) link(to ownership.Node) (*link, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l, ok := p.links[to]; ok {
		return l, nil
	}
	if p.closed {
		return nil, errors.New("peer: closed")
	}
	addr, ok := p.cfg.Address(to)
	if !ok {
		return nil, fmt.Errorf("peer: %s is not known", to.Name)
	}
	// A peer that was gone for a moment is to be found again in a moment.
	conn, err := transport.Dial(addr, p.cfg.Credentials, grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
		MinConnectTimeout: openTimeout,
	})
	if err != nil {
		return nil, fmt.Errorf("peer: peer %s at %s: %w", to.Name, addr, err)
	}
	p.next++
	l := newLink(p.cfg, to, p.next, conn)
	p.links[to] = l
	p.work.Go(l.run)
	return l, nil
}

// Forward implements limiter.Peers. What is for this node itself, which some peer took for the holder, is answered
// NotHolder: whoever decides here does not send it away.
func (p *Forwarder) Forward(ctx context.Context, to limiter.Holder, ops []*limiter.Op) {
	node := ownership.Node{Name: to.Name, Boot: to.Boot}
	if node == p.cfg.Self {
		for _, op := range ops {
			op.Outcome.NotHolder = &limiter.Holder{}
		}
		return
	}
	l, err := p.link(node)
	if err != nil || ctx.Err() != nil {
		unreachable(ops)
		return
	}
	until, ok := ctx.Deadline()
	if !ok {
		until = time.Now().Add(openTimeout)
	}
	for len(ops) > 0 {
		n := min(len(ops), maxBatch)
		p.fly(ctx, l, ops[:n], until)
		ops = ops[n:]
	}
}

// fly sends operations that fit into one message, and waits for what comes of them.
func (p *Forwarder) fly(ctx context.Context, l *link, ops []*limiter.Op, until time.Time) {
	f := p.flights.Get().(*flight)
	f.ops, f.n, f.until = ops, len(ops), until
	if !l.send(f) {
		unreachable(ops)
		return
	}
	select {
	case <-f.done:
	case <-ctx.Done():
		if l.abandon(f) {
			unreachable(ops)
			return // the link may know of the flight for some more time
		}
		<-f.done
	}
	if !f.answered {
		unreachable(ops)
	}
	f.ops, f.message, f.answered, f.ended = nil, nil, false, false
	p.flights.Put(f)
}

func unreachable(ops []*limiter.Op) {
	for _, op := range ops {
		op.Outcome = limiter.Outcome{Unreachable: true}
	}
}

// Inspect asks a node what only it knows of itself.
func (p *Forwarder) Inspect(ctx context.Context, node ownership.Node) (*peerv1.InspectResponse, error) {
	l, err := p.link(node)
	if err != nil {
		return nil, err
	}
	return peerv1.NewPeerClient(l.conn).Inspect(ctx, &peerv1.InspectRequest{})
}

// Identify asks whoever is at a peer address who it is, over a connection of its own: what answers there need not be a node. creds
// are as in ForwarderConfig. It takes as long as ctx allows when nobody answers.
func Identify(ctx context.Context, addr string, creds credentials.TransportCredentials) (*peerv1.IdentifyResponse, error) {
	conn, err := transport.Dial(addr, creds, grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: openTimeout})
	if err != nil {
		return nil, fmt.Errorf("peer: %s: %w", addr, err)
	}
	defer conn.Close()
	return peerv1.NewPeerClient(conn).Identify(ctx, &peerv1.IdentifyRequest{}, grpc.MaxCallRecvMsgSize(maxIdentity))
}

// flight is some operations of one caller on their way to a peer. It ends once: landed by the link, who touches neither it nor
// its operations after that, or abandoned by its caller.
type flight struct {
	ops   []*limiter.Op // with their outcomes, once landed; nil once abandoned
	n     int           // how many they are
	until time.Time     // when its caller gives up
	done  chan struct{} // holds a token once landed
	// answered says that the outcomes are there; otherwise it is clear that none will come. Set before it lands.
	answered bool
	// Guarded by the link's lock.
	message *message // that it is part of; nil while it is queued
	ended   bool
}

// message is a Batch that was sent or is about to be: one or more flights. It is guarded by the link's lock, but for what is
// sent, which is the writer's. That has all that is to be known of the operations, which may be gone when it is repeated.
type message struct {
	request peerv1.ForwardRequest
	body    peerv1.ForwardRequest_Batch
	batch   peerv1.Batch

	sequence uint64
	items    int
	uses     []*weirv1.StreamTarget // what batch names, packed
	flights  []*flight
	live     int // flights that are still waited for
	made     time.Time
	tries    int // how often it was sent
}

// link is the way to one process of one peer: a connection, on it a stream at a time, and a sequence space that outlives
// the stream. One goroutine (run) opens streams and writes; one more for each stream reads.
//
// A flight ends once: with replies, when its message is answered; without, when its caller gives up, no stream can be
// opened, its message has been sent too often, or the link is stopped. A message that nobody waits for any more is
// forgotten at once: it is not repeated, and its reply is ignored if it comes after all.
type link struct {
	cfg    ForwarderConfig
	to     ownership.Node
	stream uint64
	conn   *grpc.ClientConn
	ctx    context.Context
	stop   context.CancelFunc
	wake   chan struct{} // holds a token when there may be something to write

	mu       sync.Mutex
	queue    []*flight           // not yet part of a message
	void     int                 // flights in queue that have ended
	sent     map[uint64]*message // made and waited for, by sequence
	again    []*message          // of a broken stream, to be repeated on the next unless forgotten meanwhile
	waiting  int                 // operations of the flights in queue that have not ended, and of the messages in sent
	sequence uint64              // of the last message made
	acked    uint64              // no message up to it is waited for
	stopped  bool
	numbers  numbers // of targets, in the stream that is written to
	scratch  []byte  // room to pack a message in
}

func newLink(cfg ForwarderConfig, to ownership.Node, number uint64, conn *grpc.ClientConn) *link {
	ctx, stop := context.WithCancel(context.Background())
	return &link{
		cfg: cfg, to: to, stream: number, conn: conn, ctx: ctx, stop: stop,
		wake: make(chan struct{}, 1), sent: make(map[uint64]*message), numbers: make(numbers),
	}
}

// send queues a flight, or returns false when the link takes no more.
func (l *link) send(f *flight) bool {
	l.mu.Lock()
	if l.stopped || l.waiting+f.n > maxWaiting {
		l.mu.Unlock()
		return false
	}
	l.waiting += f.n
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

// abandon gives up waiting for a flight, and reports false if it has landed.
func (l *link) abandon(f *flight) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if f.ended {
		return false
	}
	f.ended, f.ops = true, nil
	if m := f.message; m != nil {
		if m.live--; m.live == 0 {
			l.forgetLocked(m, false)
		}
		return true
	}
	l.waiting -= f.n
	// The queue is only long when the peer is stuck, and then all of it is abandoned: one by one, finding each would take
	// time that grows with the square of its length.
	if l.void++; l.void*2 > len(l.queue) {
		l.queue = slices.DeleteFunc(l.queue, func(f *flight) bool { return f.ended })
		l.void = 0
	}
	return true
}

// landLocked ends a flight that has not ended.
func landLocked(f *flight, answered bool) {
	f.ended, f.answered = true, answered
	if f.message != nil {
		f.message.live--
	}
	f.done <- struct{}{}
}

// forgetLocked takes a message, in which no flight is live any more, out of what is sent.
func (l *link) forgetLocked(m *message, answered bool) {
	full := l.fullLocked()
	delete(l.sent, m.sequence)
	l.waiting -= m.items
	for l.acked < l.sequence && l.sent[l.acked+1] == nil {
		l.acked++
	}
	if full {
		l.signal()
	}
	if l.cfg.Observe != nil {
		l.cfg.Observe(time.Since(m.made), m.items, answered)
	}
}

// giveUpLocked lands what waits for a message without an answer.
func (l *link) giveUpLocked(m *message) {
	for _, f := range m.flights {
		if !f.ended {
			landLocked(f, false)
		}
	}
	l.forgetLocked(m, false)
}

// fullLocked says whether the receiver would have to remember more messages than it does, were another one sent.
func (l *link) fullLocked() bool { return l.sequence-l.acked >= maxUnacknowledged }

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
		welcomed, err := l.talk()
		if l.ctx.Err() != nil {
			return
		}
		if welcomed {
			l.cfg.Logger.Info("peer stream broken", "peer", l.to.Name, "error", err)
			down = false
			l.repeat()
			continue
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

// failAll lands everything under way without an answer.
func (l *link) failAll(stopped bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped = l.stopped || stopped
	for _, f := range l.queue {
		if !f.ended {
			l.waiting -= f.n
			landLocked(f, false)
		}
	}
	l.queue, l.void, l.again = nil, 0, nil
	for _, m := range l.sent {
		l.giveUpLocked(m)
	}
}

var errNoWelcome = errors.New("peer: no welcome in time")

// talk opens a stream and writes to it until it breaks. It reports whether the peer welcomed it: what is unanswered then
// may be worth repeating on another. A peer that cannot be reached, or refuses, is not asked again for the same
// operations.
func (l *link) talk() (welcomed bool, err error) {
	ctx, cancel := context.WithCancelCause(l.ctx)
	defer cancel(nil)
	slow := time.AfterFunc(openTimeout, func() { cancel(errNoWelcome) })
	defer slow.Stop()
	stream, err := l.open(ctx)
	if !slow.Stop() {
		err = errNoWelcome
	}
	if err != nil {
		return false, err
	}
	l.mu.Lock()
	clear(l.numbers) // the peer knows none on this stream
	l.mu.Unlock()
	broken := make(chan struct{})
	go func() {
		defer close(broken)
		err = l.read(stream)
	}()
	l.write(stream, broken)
	cancel(nil)
	<-broken
	return true, err
}

// open opens a stream and waits for its welcome.
func (l *link) open(ctx context.Context) (stream peerv1.Peer_ForwardClient, err error) {
	stream, err = peerv1.NewPeerClient(l.conn).Forward(ctx)
	if err != nil {
		return nil, err
	}
	hello := transport.Greeting(l.cfg.Self, l.to, l.cfg.RingSettings)
	hello.Stream = l.stream
	// An error of Send only says that there is one: Recv tells which.
	_ = stream.Send(&peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Hello{Hello: hello}})
	first, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	return stream, transport.Welcomed(l.to, first.GetWelcome())
}

// repeat has what is unanswered written again on the next stream, under the same sequence, so that the peer does not
// carry it out twice, and in order. What was sent too often or too long ago is given up.
func (l *link) repeat() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.again = nil
	for s := l.acked + 1; s <= l.sequence; s++ {
		switch m := l.sent[s]; {
		case m == nil:
		case m.tries >= maxTries || time.Since(m.made) > repeatWithin:
			l.giveUpLocked(m)
		default:
			l.again = append(l.again, m)
		}
	}
	l.signal()
}

// write sends what gathers until the stream is broken or the link stopped.
func (l *link) write(stream peerv1.Peer_ForwardClient, broken <-chan struct{}) {
	for {
		// Callers that are about to ask do so first, and share a message: measured with 256 callers, eight items in one in
		// place of two, and a third less time for each. A lone caller loses nothing.
		runtime.Gosched()
		for m := l.take(); m != nil; m = l.take() {
			if err := stream.Send(&m.request); err != nil {
				return // read tells why
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
	for len(l.again) > 0 {
		m := l.again[0]
		l.again = l.again[1:]
		if l.sent[m.sequence] == m {
			m.tries++
			// Its numbers are those of an earlier stream. What is new comes after all that is repeated, and has numbers of its own.
			m.batch.Define = m.uses
			return m
		}
	}
	if l.fullLocked() {
		return nil // forgetLocked wakes the writer when there is room
	}
	m := &message{made: time.Now()}
	for len(l.queue) > 0 && m.items+l.queue[0].n <= maxBatch {
		f := l.queue[0]
		l.queue[0], l.queue = nil, l.queue[1:]
		switch {
		case f.ended:
			l.void--
		case !f.until.After(m.made):
			// Its caller is about to say so. It could still be charged for, and nobody would hear of it.
			l.waiting -= f.n
			landLocked(f, false)
		default:
			f.message = m
			m.flights = append(m.flights, f)
			m.items += f.n
		}
	}
	if len(m.flights) == 0 {
		return nil
	}
	l.sequence++
	m.sequence, m.live, m.tries = l.sequence, len(m.flights), 1
	m.batch.Sequence, m.batch.Acknowledged = l.sequence, l.acked
	m.body.Batch, m.request.Body = &m.batch, &m.body
	l.packLocked(m)
	l.sent[m.sequence] = m
	return m
}

// packLocked packs the operations of a new message.
func (l *link) packLocked(m *message) {
	p := packer{numbers: l.numbers, sequence: m.sequence, bytes: l.scratch[:0]}
	for _, f := range m.flights {
		for _, op := range f.ops {
			if !p.add(op, f.until.Sub(m.made)) {
				clear(l.numbers) // a message has fewer operations than there are numbers
				l.packLocked(m)
				return
			}
		}
	}
	m.batch.Operations = slices.Clone(p.bytes)
	m.batch.Define, m.uses = p.define, p.uses
	if l.scratch = p.bytes; cap(l.scratch) > keepPacked {
		l.scratch = nil
	}
}

// read lands flights by the peer's replies until the stream breaks, and returns why it did.
func (l *link) read(stream peerv1.Peer_ForwardClient) error {
	var in peerv1.ForwardReply
	for {
		if err := stream.RecvMsg(&in); err != nil {
			return err
		}
		if r := in.GetReply(); r != nil {
			l.answered(r)
			if cap(r.Outcomes) <= keepPacked {
				r.ReturnToVTPool()
			}
		}
	}
}

func (l *link) answered(r *peerv1.Reply) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.sent[r.Sequence]
	if m == nil {
		return // given up, or answered on an earlier stream
	}
	if !m.answer(r) {
		l.cfg.Logger.Error("a peer's reply is malformed, or has another number of outcomes than were asked for",
			"peer", l.to.Name, "asked", m.items)
		l.giveUpLocked(m)
		return
	}
	for _, f := range m.flights {
		if !f.ended {
			landLocked(f, true)
		}
	}
	l.forgetLocked(m, true)
}

// answer fills in the outcomes of the operations that are waited for. It reports false when the reply is none to this message.
func (m *message) answer(r *peerv1.Reply) bool {
	in := outcomes{reader: reader{rest: string(r.Outcomes)}}
	var nobodys limiter.Op // of callers who have gone on
	for _, f := range m.flights {
		for i := range f.n {
			op := &nobodys
			if !f.ended {
				op = f.ops[i]
			}
			if !in.next(op) {
				return false
			}
		}
	}
	return in.rest == ""
}

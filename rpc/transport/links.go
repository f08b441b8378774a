package transport

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
)

// Config is what both ends of the streams between nodes need. All fields but Credentials are required; the end that serves streams
// needs no Address.
type Config struct {
	Self         ownership.Node
	RingSettings uint64 // fingerprint of the ring's settings; a peer with another one is rejected
	// Address returns the host:port of a node's peer service, or false when the node is not known (any more). It is called
	// with a lock held and must not call back.
	Address func(ownership.Node) (string, bool)
	Logger  *slog.Logger
	// Credentials, when set, is how the peers prove who they are; nil stands for plain text.
	Credentials credentials.TransportCredentials
	// Window is the receive window of a stream in bytes; 0 stands for StreamWindow.
	Window int32
}

// Dialing is how often and for how long a process is tried to be reached.
type Dialing struct {
	Carries string         // what the streams carry, for the log
	Backoff backoff.Config // between connections
	Timeout time.Duration  // until a stream is welcomed
	Pause   time.Duration  // between streams; 0: none
}

// Queue is what waits for one process, and takes what comes back. Its methods are called by one goroutine, but for what the
// function that Open returns is about.
type Queue interface {
	// Pending says whether there is anything to write, so that a stream is worth opening.
	Pending() bool
	// Open opens a stream on a connection, which begins with a Hello, and returns the answer to that and what runs the stream: see
	// stream.Run, whose end is the function's argument.
	Open(ctx context.Context, conn *grpc.ClientConn, hello *peerv1.Hello) (*peerv1.Welcome, func(end func()) error, error)
	// Broken is called when a stream has ended that was welcomed: what is unanswered may be worth repeating on another.
	Broken()
	// Failed is called when no stream could be opened; and with closed when none will be any more.
	Failed(closed bool)
}

// Links are the links of this process to others: of each a queue, a connection, and on it a stream at a time, opened when there is
// something in the queue. Its methods are safe for concurrent use.
type Links[Q Queue] struct {
	cfg     Config
	dialing Dialing
	queue   func(to ownership.Node, wake fifo.Signal) Q

	mu     sync.Mutex
	links  map[ownership.Node]*link[Q]
	closed bool
	work   sync.WaitGroup
}

// NewLinks returns Links without connections. queue makes the Queue for a process; whoever adds to it sets wake.
func NewLinks[Q Queue](cfg Config, dialing Dialing, queue func(to ownership.Node, wake fifo.Signal) Q) *Links[Q] {
	return &Links[Q]{cfg: cfg, dialing: dialing, queue: queue, links: make(map[ownership.Node]*link[Q])}
}

// Close ends all links, and waits for every goroutine.
func (ls *Links[Q]) Close() {
	ls.mu.Lock()
	ls.closed = true
	for _, l := range ls.links {
		l.stop()
	}
	ls.mu.Unlock()
	ls.work.Wait()
}

// Retain ends the links to nodes that keep no longer holds for.
func (ls *Links[Q]) Retain(keep func(ownership.Node) bool) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for node, l := range ls.links {
		if !keep(node) {
			l.stop()
			delete(ls.links, node)
		}
	}
}

// To returns the queue for a process, and the connection to it for other calls. The error says that it cannot be reached now.
func (ls *Links[Q]) To(node ownership.Node) (q Q, conn *grpc.ClientConn, err error) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if l, ok := ls.links[node]; ok {
		return l.queue, l.conn, nil
	}
	if ls.closed || node == ls.cfg.Self {
		return q, nil, errors.New("transport: closed, or a link to this process itself")
	}
	addr, ok := ls.cfg.Address(node)
	if !ok {
		return q, nil, fmt.Errorf("transport: %s is not known", node.Name)
	}
	if conn, err = Dial(addr, ls.cfg.Credentials, ls.cfg.Window, grpc.ConnectParams{Backoff: ls.dialing.Backoff, MinConnectTimeout: ls.dialing.Timeout}); err != nil {
		return q, nil, fmt.Errorf("transport: peer %s at %s: %w", node.Name, addr, err)
	}
	wake := fifo.NewSignal()
	l := &link[Q]{cfg: &ls.cfg, dialing: &ls.dialing, to: node, conn: conn, queue: ls.queue(node, wake), wake: wake}
	l.ctx, l.stop = context.WithCancel(context.Background())
	ls.links[node] = l
	ls.work.Go(l.run)
	return l.queue, conn, nil
}

// link is the way to one process. One goroutine (run) opens streams and writes; one more for each stream reads.
type link[Q Queue] struct {
	cfg     *Config
	dialing *Dialing
	to      ownership.Node
	conn    *grpc.ClientConn
	queue   Q
	wake    fifo.Signal
	ctx     context.Context
	stop    context.CancelFunc
}

// run owns the link until it is stopped.
func (l *link[Q]) run() {
	defer l.conn.Close()
	defer l.queue.Failed(true)
	down := false // said so in the log, and not been up since
	for {
		select {
		case <-l.wake:
		case <-l.ctx.Done():
			return
		}
		if !l.queue.Pending() {
			continue
		}
		welcomed, err := l.talk()
		switch {
		case l.ctx.Err() != nil:
			return
		case welcomed:
			l.cfg.Logger.Info("peer stream broken", "carries", l.dialing.Carries, "peer", l.to.Name, "error", err)
			down = false
			l.queue.Broken()
		default:
			l.queue.Failed(false)
			if !down {
				l.cfg.Logger.Warn("peer unreachable", "carries", l.dialing.Carries, "peer", l.to.Name, "error", err)
				down = true
			}
		}
		if l.dialing.Pause > 0 {
			select {
			case <-time.After(l.dialing.Pause):
			case <-l.ctx.Done():
				return
			}
		}
		l.wake.Set()
	}
}

var errNoWelcome = errors.New("transport: no welcome in time")

// talk opens a stream and runs it until it breaks. It reports whether the peer welcomed it.
func (l *link[Q]) talk() (welcomed bool, err error) {
	ctx, cancel := context.WithCancelCause(l.ctx)
	defer cancel(nil)
	slow := time.AfterFunc(l.dialing.Timeout, func() { cancel(errNoWelcome) })
	hello := &peerv1.Hello{
		Protocol: Protocol, FromName: l.cfg.Self.Name, FromBoot: l.cfg.Self.Boot, ToName: l.to.Name, ToBoot: l.to.Boot,
		RingSettings: l.cfg.RingSettings,
	}
	welcome, run, err := l.queue.Open(ctx, l.conn, hello)
	switch {
	case !slow.Stop():
		err = errNoWelcome
	case err == nil && welcome.GetProtocol() != Protocol:
		err = fmt.Errorf("transport: peer %s speaks protocol %d, this node %d", l.to.Name, welcome.GetProtocol(), Protocol)
	}
	if err != nil {
		return false, err
	}
	return true, run(func() { cancel(nil) })
}

// Accept checks the Hello that began a stream: its sender speaks this build's protocol, means this process, shares its idea of the
// ring, and says who it is. The error, a gRPC status, is logged.
func (c *Config) Accept(h *peerv1.Hello) (*peerv1.Welcome, error) {
	if err := c.accept(h); err != nil {
		c.Logger.Warn("peer stream rejected", "peer", h.GetFromName(), "error", err)
		return nil, err
	}
	return &peerv1.Welcome{Protocol: Protocol}, nil
}

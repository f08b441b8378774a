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

// This file keeps one link for each process that is sent to. To makes the link on first use; link.run waits for the
// queue's signal, talk opens a stream with a Hello and runs it, and run tells the queue when the stream has broken or
// could not be opened. rpc/peer and rpc/replica implement Queue.

// Config is what both ends of the streams between nodes need. All fields but Credentials and Window are required. The
// serving end needs no Address.
type Config struct {
	Self         ownership.Node
	RingSettings uint64 // fingerprint of the ring's settings; a peer with another one is rejected
	// Address returns the host:port of a node's peer service, and false when the node is not a known member. It is
	// called with a lock held and must not call methods of Links.
	Address func(ownership.Node) (string, bool)
	Logger  *slog.Logger
	// Credentials authenticate the peers; nil: plain text.
	Credentials credentials.TransportCredentials
	// Window is the receive window of a stream in bytes; 0: StreamWindow.
	Window int32
}

// Dialing says how a link reaches its process.
type Dialing struct {
	Carries string         // what the streams carry, for logs
	Backoff backoff.Config // between attempts to connect
	Timeout time.Duration  // bounds the wait for a stream's Welcome
	Pause   time.Duration  // after the end of a stream; 0: none
}

// Queue holds messages for one process and takes the answers. The link's goroutine calls its methods and the function
// that Open returns. That function may read from the stream in a second goroutine.
type Queue interface {
	// Pending says whether there is something to write. The link opens a stream only then.
	Pending() bool
	// Open opens a stream on conn, sends hello and waits for the Welcome. The function that it returns runs the stream
	// until it ends; calling end ends the stream (see stream.Run).
	Open(ctx context.Context, conn *grpc.ClientConn, hello *peerv1.Hello) (*peerv1.Welcome, func(end func()) error,
		error)
	// Broken is called after a welcomed stream has ended. err is io.EOF if the peer has ended it with status OK. The
	// queue may repeat unanswered messages on the next stream.
	Broken(err error)
	// Failed is called when no stream could be opened, and with closed when the link is stopped: no stream is opened
	// then.
	Failed(closed bool)
}

// Links are the links of this process to others. A link is a queue, a connection, and at most one stream on it, opened
// when the queue has something to write. The methods of Links are safe for concurrent use.
type Links[Q Queue] struct {
	cfg     Config
	dialing Dialing
	queue   func(to ownership.Node, wake fifo.Signal) Q

	mu     sync.Mutex
	links  map[ownership.Node]*link[Q]
	closed bool
	work   sync.WaitGroup
}

// NewLinks returns Links without connections. queue makes the Queue for a process. Adding to that Queue must set wake.
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

// Retain stops the links to nodes for which keep returns false.
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

// To returns the queue for a process, and the connection to it for other calls; it makes the link if there is none. It
// returns an error when the node is this process or not known, the address is invalid, or Links is closed.
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
	if conn, err = Dial(addr, ls.cfg.Credentials, ls.cfg.Window,
		grpc.ConnectParams{Backoff: ls.dialing.Backoff, MinConnectTimeout: ls.dialing.Timeout}); err != nil {
		return q, nil, fmt.Errorf("transport: peer %s at %s: %w", node.Name, addr, err)
	}
	wake := fifo.NewSignal()
	l := &link[Q]{cfg: &ls.cfg, dialing: &ls.dialing, to: node, conn: conn, queue: ls.queue(node, wake), wake: wake}
	l.ctx, l.stop = context.WithCancel(context.Background())
	ls.links[node] = l
	ls.work.Go(l.run)
	return l.queue, conn, nil
}

// link is the link to one process. One goroutine (run) opens streams and writes; a second one reads from the stream.
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

// run opens and runs streams, one after another, until the link is stopped.
func (l *link[Q]) run() {
	defer l.conn.Close()
	defer l.queue.Failed(true)
	down := false // "peer unreachable" has been logged, and no stream has been welcomed since
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
			l.queue.Broken(err)
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

// talk opens a stream and runs it until it ends. It returns whether the peer welcomed the stream.
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
		err = fmt.Errorf("transport: peer %s speaks protocol %d, this node %d", l.to.Name, welcome.GetProtocol(),
			Protocol)
	}
	if err != nil {
		return false, err
	}
	return true, run(func() { cancel(nil) })
}

// Accept checks the Hello of a stream: the sender's protocol and ring settings must be those of this process, the Hello
// must mean this process, and it must name its sender. It logs the error, a gRPC status.
func (c *Config) Accept(h *peerv1.Hello) (*peerv1.Welcome, error) {
	if err := c.accept(h); err != nil {
		name := h.GetFromName()
		c.Logger.Warn("peer stream rejected", "peer", name[:min(len(name), ownership.MaxName)], "error", err)
		return nil, err
	}
	return &peerv1.Welcome{Protocol: Protocol}, nil
}

package cluster

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
)

// Bounds on what comes in, because the library has none: it takes any number of connections, and reads 20 MiB of each
// before it looks whether that is encrypted with a key of ours.
const (
	maxStreams       = 256 // connections at a time from addresses that are known
	maxStreamsOfOne  = 128 // of them, from one address: it can have several nodes
	maxStrangers     = 32  // connections at a time from all others
	maxStrangersOf   = 4   // of them, from one address
	streamTimeout    = 3 * time.Second
	maxPacket        = 8 << 10 // bytes; the library sends at most 1400, and some more when encrypted
	bytesPerMember   = 256     // of a list of members, at most
	bytesBesideThese = 64 << 10
)

// maxList is the size in bytes of the longest list of members that makes sense. Those that are gone are in it for a
// while.
func maxList(members int) int { return bytesBesideThese + 2*bytesPerMember*members }

// transport is the library's, with bounds on what comes in, and with streams that end when the context does, so that
// closing a cluster never waits for a peer.
type transport struct {
	*memberlist.NetTransport
	ctx     context.Context
	cfg     Config
	screen  screen
	known   atomic.Pointer[func(netip.Addr) bool] // reports whether an address is one of ours; nil: none is
	streams chan net.Conn
	packets chan *memberlist.Packet
	done    chan struct{} // closed: what comes in is dropped
	over    chan struct{} // closed: nothing comes in
	work    sync.WaitGroup

	mu        sync.Mutex
	open      map[netip.Addr]int // connections
	strangers int                // of them, from addresses that are not known
	members   int                // and from those that are
}

// listen opens the gossip sockets, TCP and UDP on one port. Without a keyring gossip is in plain text.
func listen(ctx context.Context, cfg Config, keyring *memberlist.Keyring, gossip *gossipLog) (*transport, error) {
	attempts := 1
	if cfg.GossipPort == 0 {
		attempts = 10 // the free TCP port that was picked may be taken for UDP
	}
	var err error
	for range attempts {
		var lower *memberlist.NetTransport
		lower, err = memberlist.NewNetTransport(&memberlist.NetTransportConfig{
			BindAddrs: []string{cfg.Bind},
			BindPort:  cfg.GossipPort,
			Logger:    gossip.standard(),
		})
		if err == nil {
			t := &transport{
				NetTransport: lower, ctx: ctx, cfg: cfg, screen: screen{keyring, cfg.MaxMembers},
				streams: make(chan net.Conn), packets: make(chan *memberlist.Packet), done: make(chan struct{}),
				over: make(chan struct{}), open: map[netip.Addr]int{},
			}
			t.work.Go(t.forward)
			return t, nil
		}
	}
	return nil, fmt.Errorf("gossip-port: cannot listen on %s: %w: give another port, or 0 for any free one",
		net.JoinHostPort(cfg.Bind, strconv.Itoa(cfg.GossipPort)), err)
}

// StreamCh is where the library takes connections from.
func (t *transport) StreamCh() <-chan net.Conn { return t.streams }

// PacketCh is where the library takes packets from.
func (t *transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// Shutdown closes the sockets and waits until nothing more comes from them.
func (t *transport) Shutdown() error {
	close(t.done)
	err := t.NetTransport.Shutdown() // it waits until what it has received is taken
	close(t.over)
	t.work.Wait()
	return err
}

// forward passes on packets and connections, as far as they are let in.
func (t *transport) forward() {
	for {
		select {
		case p := <-t.NetTransport.PacketCh():
			if reason := t.screen.packet(p.Buf); reason != "" {
				t.cfg.Rejected(reason)
				continue
			}
			p.Buf = slices.Clone(p.Buf) // out of the 64 KiB that it was read into
			select {
			case t.packets <- p:
			case <-t.done:
			}
		case conn := <-t.NetTransport.StreamCh():
			if !t.enter(conn) {
				t.cfg.Rejected(TooMany)
				conn.Close()
			}
		case <-t.over:
			return
		}
	}
}

// enter lets a connection in, and has it read, unless there are too many.
func (t *transport) enter(conn net.Conn) bool {
	from := addrOf(conn)
	isKnown := t.known.Load()
	t.mu.Lock()
	defer t.mu.Unlock()
	group, all, of := &t.strangers, maxStrangers, maxStrangersOf
	if isKnown != nil && (*isKnown)(from) {
		group, all, of = &t.members, maxStreams, maxStreamsOfOne
	}
	if *group >= all || t.open[from] >= of {
		return false
	}
	*group++
	t.open[from]++
	forget := t.closing(conn)
	leave := sync.OnceFunc(func() {
		forget()
		t.mu.Lock()
		defer t.mu.Unlock()
		*group--
		if t.open[from]--; t.open[from] == 0 {
			delete(t.open, from)
		}
	})
	t.work.Go(func() { t.admit(conn, leave) })
	return true
}

// closing closes a connection when the context ends, unless forget is called.
func (t *transport) closing(conn net.Conn) (forget func() bool) {
	return context.AfterFunc(t.ctx, func() { conn.Close() })
}

// addrOf returns the address that a connection comes from.
func addrOf(conn net.Conn) netip.Addr {
	if a, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// admit reads what a connection begins with, and leaves it to the library when that is what a node sends. leave takes
// it out of the count.
func (t *transport) admit(conn net.Conn, leave func()) {
	s := stream{Conn: conn, closed: leave}
	if err := conn.SetDeadline(time.Now().Add(streamTimeout)); err != nil {
		s.Close()
		return
	}
	var reason string
	if s.rest, reason = t.screen.stream(conn, isAsked); s.rest == nil {
		if reason != "" {
			t.cfg.Rejected(reason)
		}
		s.Close()
		return
	}
	select {
	case t.streams <- s:
	case <-t.done:
		s.Close()
	}
}

// DialAddressTimeout is the library's way of opening a stream. What comes back is screened like what others send.
func (t *transport) DialAddressTimeout(addr memberlist.Address, timeout time.Duration) (net.Conn, error) {
	dialer := net.Dialer{Timeout: timeout}
	conn, err := dialer.DialContext(t.ctx, "tcp", addr.Addr)
	if err != nil {
		return nil, err
	}
	forget := t.closing(conn)
	return stream{conn, &reply{screen: t.screen, conn: conn}, func() { forget() }}, nil
}

// stream is a connection of which the library reads what the screen lets in.
type stream struct {
	net.Conn
	rest   io.Reader
	closed func()
}

// Read returns what was sent, from the beginning.
func (s stream) Read(b []byte) (int, error) { return s.rest.Read(b) }

// Close closes the connection.
func (s stream) Close() error {
	s.closed()
	return s.Conn.Close()
}

// reply is what comes back on a connection that this node has made.
type reply struct {
	screen screen
	conn   io.Reader
	rest   io.Reader // from the first Read on
}

// Read reads the answer.
func (r *reply) Read(b []byte) (int, error) {
	if r.rest == nil {
		if r.rest, _ = r.screen.stream(r.conn, isAnswer); r.rest == nil {
			r.rest = bytes.NewReader(nil)
		}
	}
	return r.rest.Read(b)
}

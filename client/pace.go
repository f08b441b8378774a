package client

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
)

const (
	// soon is how long a connection must last. One that ends before has the next one wait: gRPC itself connects again at once when a
	// connection ends that had been set up, so that a client that a node rejects would connect a thousand times a second.
	soon = 5 * time.Second
	// minPace is the first wait; each further one is twice as long, up to maxPace.
	minPace, maxPace = 200 * time.Millisecond, 15 * time.Second
)

// pacer makes the connections to one node.
type pacer struct {
	connect func(ctx context.Context, network, addr string) (net.Conn, error)

	mu   sync.Mutex
	wait time.Duration // after the last connection; 0: it lasted
	next time.Time     // not to connect before
}

// paced returns the option that has connections to an address paced. A connection by way of a proxy is gRPC's own, and is not.
func paced(addr string) []grpc.DialOption {
	proxy, err := http.ProxyFromEnvironment(&http.Request{URL: &url.URL{Scheme: "https", Host: addr}})
	if proxy != nil || err != nil {
		return nil
	}
	p := &pacer{connect: new(net.Dialer).DialContext}
	return []grpc.DialOption{grpc.WithContextDialer(p.dial)}
}

// dial connects to an address as gRPC names it. Before it is time it fails at once, and gRPC's own back-off goes on.
func (p *pacer) dial(ctx context.Context, addr string) (net.Conn, error) {
	p.mu.Lock()
	now := time.Now()
	left := p.next.Sub(now)
	p.mu.Unlock()
	if left > 0 {
		return nil, fmt.Errorf("the node ended the last connection soon after it began; the next attempt is in %v", left.Round(time.Millisecond))
	}
	network := "tcp"
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		network, addr = "unix", strings.TrimPrefix(path, "//")
	} else if strings.HasPrefix(addr, "\x00") {
		network, addr = "unix", "@"+addr[1:]
	}
	conn, err := p.connect(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &pacedConn{Conn: conn, of: p, began: now}, nil
}

// ended notes how long a connection lasted.
func (p *pacer) ended(now time.Time, lasted time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if lasted >= soon {
		p.wait = 0
		return
	}
	p.wait = min(max(2*p.wait, minPace), maxPace)
	p.next = now.Add(p.wait/2 + rand.N(p.wait/2))
}

// pacedConn is a connection that tells its pacer when it ends.
type pacedConn struct {
	net.Conn
	of    *pacer
	began time.Time
	once  sync.Once
	heard bool // only for the reader
}

// Read implements net.Conn. What a node says that rejects the connection is an error.
func (c *pacedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.heard || n == 0 {
		return n, err
	}
	c.heard = true
	if why, ok := rejection(b[:n]); ok {
		return 0, fmt.Errorf("the node rejects the connection: %s", why)
	}
	return n, err
}

// rejection returns the text of a GOAWAY frame (RFC 9113, 6.8), with which no server begins that goes on.
func rejection(b []byte) (why string, ok bool) {
	const header, fixed, goAway = 9, 8, 7
	if len(b) < header+fixed || b[0] != 0 || b[1] != 0 || b[3] != goAway {
		return "", false
	}
	return strings.ToValidUTF8(string(b[header+fixed:min(len(b), header+max(fixed, int(b[2])))]), "?"), true
}

// Close implements net.Conn.
func (c *pacedConn) Close() error {
	c.once.Do(func() {
		now := time.Now()
		c.of.ended(now, now.Sub(c.began))
	})
	return c.Conn.Close()
}

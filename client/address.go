package client

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"

	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/rpc/wire"
)

// address is what a Client is told to reach.
type address struct {
	nodes      []string // as they are named: host:port; or a target of gRPC
	target     bool     // it is a target of gRPC
	host, port string   // set where a single host name is to be looked up, which may stand for several nodes
	// name is by what nodes are called that are not named one by one: their certificates are checked against it.
	name string
}

// parseAddress reads the address of Dial. The error is an *Error.
func parseAddress(s string) (a address, err error) {
	s = strings.TrimPrefix(s, "dns:///")
	switch scheme, rest, _ := strings.Cut(s, ":"); {
	case resolver.Get(scheme) != nil:
		a.target = true
		if a.nodes, a.name = []string{s}, "localhost"; scheme != "unix" {
			a.name = rest[strings.LastIndex(rest, "/")+1:]
		}
		return a, nil
	case strings.Contains(s, "://"):
		return a, invalid("address", "must be host:port, without %q", scheme+"://")
	}
	for part := range strings.SplitSeq(s, ",") {
		host, port, err := net.SplitHostPort(strings.TrimSpace(part))
		if err != nil || host == "" {
			return a, invalid("address", "must be host:port, or several separated by commas, not %q", part)
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return a, invalid("address", "the port must be 1 to 65535, not %q", port)
		}
		a.host, a.port = host, port
		a.nodes = append(a.nodes, net.JoinHostPort(host, port))
	}
	a.name = a.nodes[0]
	if _, err := netip.ParseAddr(a.host); err == nil || len(a.nodes) > 1 {
		a.host = ""
	}
	return a, nil
}

// local reports whether an address leads to this host only.
func (a *address) local() bool {
	for _, n := range a.nodes {
		if !strings.HasPrefix(n, "unix:") && !netaddr.LoopbackHostPort(n) {
			return false
		}
	}
	return true
}

// window is the receive window of a stream in bytes: the answers to some thousand checks, or a topology.
const window = 256 << 10

// dialSettings are the options of gRPC for each connection.
func dialSettings(o *options) []grpc.DialOption {
	creds := insecure.NewCredentials()
	if o.tls != nil {
		creds = credentials.NewTLS(o.tls)
	}
	dial := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(connect),
		grpc.WithDisableServiceConfig(),
		// Windows of a fixed size: gRPC would measure the delay of the connection all the time, with pings.
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(2 * window),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wire.Codec())),
		// A node that comes back is found within seconds; gRPC's default would be minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 3 * time.Second},
			MinConnectTimeout: 3 * time.Second,
		}),
		// A node that hangs, or a network that swallows packets, is asked no more once it left a check unanswered; this
		// ends the connection, which TCP would go on trying to use for a quarter of an hour. Ten seconds is the shortest
		// that gRPC accepts.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
	}
	if o.token != "" {
		dial = append(dial, grpc.WithPerRPCCredentials(bearer{token: o.token, plain: o.tls == nil}))
	}
	return append(dial, o.dial...)
}

// connect connects to an address as gRPC names it.
func connect(ctx context.Context, addr string) (net.Conn, error) {
	network := "tcp"
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		network, addr = "unix", strings.TrimPrefix(path, "//")
	}
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &greetedConn{Conn: conn}, nil
}

// greetedConn is a connection whose first bytes may reject it.
type greetedConn struct {
	net.Conn
	heard atomic.Bool // something that does not reject it
}

// Read implements net.Conn. What a node says that rejects the connection is an error.
func (c *greetedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n == 0 || c.heard.Load() {
		return n, err
	}
	if why, ok := rejection(b[:n]); ok {
		return 0, fmt.Errorf("the node rejects the connection: %s", why)
	}
	c.heard.Store(true)
	return n, err
}

// Write implements net.Conn. Until the node has said something else an error is left to Read, since a node that rejects the connection
// closes it at once, and what is written after that fails.
func (c *greetedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if err != nil && !c.heard.Load() {
		return len(b), nil
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

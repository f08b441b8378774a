package client

import (
	"net"
	"net/netip"
	"strconv"
	"strings"
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

// address is the parsed address of Dial.
type address struct {
	nodes      []string // host:port, or one target of gRPC
	target     bool     // nodes has a target of gRPC
	host, port string   // set if the address is a single host name, which may stand for several nodes
	// TLS checks a node's certificate against name if the address does not name that node itself.
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

// window is the receive window of a stream in bytes. The answers to some thousand checks fit into it, or a topology.
const window = 256 << 10

// dialSettings returns gRPC's options for each connection.
func dialSettings(o *options) []grpc.DialOption {
	creds := insecure.NewCredentials()
	if o.tls != nil {
		creds = credentials.NewTLS(o.tls)
	}
	dial := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		// With windows of a fixed size gRPC sends no pings to measure the delay of the connection.
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(2 * window),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wire.Codec())),
		// The client finds a node that comes back within seconds; gRPC's default would be minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2,
				MaxDelay: 3 * time.Second},
			MinConnectTimeout: 3 * time.Second,
		}),
		// A node that hangs, or behind a network that drops packets, is not asked after it has left a check unanswered.
		// The keepalive ends its connection; TCP would go on trying to use it for a quarter of an hour. Ten seconds is
		// the shortest Time that gRPC accepts.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
	}
	if o.token != "" {
		dial = append(dial, grpc.WithPerRPCCredentials(bearer{token: o.token, plain: o.tls == nil}))
	}
	return append(dial, o.dial...)
}

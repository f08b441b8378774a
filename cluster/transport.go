package cluster

import (
	"context"
	"fmt"
	"log"
	"net"
	"strconv"
	"time"

	"github.com/hashicorp/memberlist"
)

// transport is the library's, with streams that end when the context does, so that closing a cluster never waits for
// a peer.
type transport struct {
	*memberlist.NetTransport
	ctx context.Context
}

// listen opens the gossip sockets, TCP and UDP on one port.
func listen(ctx context.Context, bind string, port int, logger *log.Logger) (*transport, error) {
	attempts := 1
	if port == 0 {
		attempts = 10 // the free TCP port that was picked may be taken for UDP
	}
	var err error
	for range attempts {
		var t *memberlist.NetTransport
		t, err = memberlist.NewNetTransport(&memberlist.NetTransportConfig{
			BindAddrs: []string{bind},
			BindPort:  port,
			Logger:    logger,
		})
		if err == nil {
			return &transport{NetTransport: t, ctx: ctx}, nil
		}
	}
	return nil, fmt.Errorf("--gossip-port: cannot listen on %s: %w: give another port, or 0 for any free one", net.JoinHostPort(bind, strconv.Itoa(port)), err)
}

// DialAddressTimeout is the library's way of opening a stream.
func (t *transport) DialAddressTimeout(addr memberlist.Address, timeout time.Duration) (net.Conn, error) {
	dialer := net.Dialer{Timeout: timeout}
	conn, err := dialer.DialContext(t.ctx, "tcp", addr.Addr)
	if err != nil {
		return nil, err
	}
	return stream{conn, context.AfterFunc(t.ctx, func() { conn.Close() })}, nil
}

// stream forgets the context when it is closed.
type stream struct {
	net.Conn
	forget func() bool
}

// Close closes the connection.
func (s stream) Close() error {
	s.forget()
	return s.Conn.Close()
}

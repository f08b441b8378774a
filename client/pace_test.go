package client

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestReconnectStorm: a client that a node lets in, over HTTP/2, and turns out again at once, does not come back more often than every
// few seconds; after a connection that lasted it comes back at once.
func TestReconnectStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		accepted := make(chan net.Conn, 10_000)
		dial := func(context.Context, string) (net.Conn, error) {
			ours, theirs := net.Pipe()
			accepted <- theirs
			return ours, nil
		}
		c := must.Value(Dial(t.Context(), "127.0.0.1:1", WithDialOptions(grpc.WithContextDialer(dial)), WithLogger(slog.New(slog.DiscardHandler))))(t)
		lasts := time.Duration(0)
		n := 0
		serve := func(until time.Duration) { // as a node that speaks as much of HTTP/2 as it takes, and hangs up
			end := time.After(until)
			for {
				select {
				case c := <-accepted:
					n++
					go func() {
						for b := make([]byte, 1<<16); ; {
							if _, err := c.Read(b); err != nil {
								return
							}
						}
					}()
					_, _ = c.Write([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0}) // SETTINGS
					synctest.Wait()                                   // the client is connected
					time.Sleep(lasts)
					_ = c.Close()
				case <-end:
					return
				}
			}
		}
		serve(time.Minute)
		expect.True(t, n >= 3 && n <= 20, "%d connections in a minute", n)
		lasts, n = 2*soon, 0
		serve(time.Minute)
		expect.True(t, n >= 3, "%d connections in a minute of connections that last", n)
		must.NoError(t, c.Close())
	})
}

// TestRejection: what a node says that rejects a connection is the reason, and nothing else is taken for it.
func TestRejection(t *testing.T) {
	goAway := append([]byte{0, 0, 11, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 11}, "why"...)
	why, ok := rejection(goAway)
	expect.True(t, ok && why == "why", "%q, %v", why, ok)
	for _, other := range [][]byte{
		nil, goAway[:16], {0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		{22, 3, 3, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
	} {
		why, ok := rejection(other)
		expect.True(t, !ok, "%v says %q", other, why)
	}
	for n := range goAway { // whatever length it gives
		bad := append([]byte(nil), goAway...)
		bad[n] = 255
		rejection(bad)
	}
}

// brokenConn is a connection on which a node has said something and that it has closed.
type brokenConn struct {
	net.Conn
	said []byte
}

func (c *brokenConn) Read(b []byte) (int, error) { return copy(b, c.said), nil }

func (c *brokenConn) Write([]byte) (int, error) { return 0, syscall.EPIPE }

// TestRejectionIsHeard: what the client writes to a connection that the node has rejected fails; the reason is what the node has said.
func TestRejectionIsHeard(t *testing.T) {
	preface, b := []byte("PRI * HTTP/2.0"), make([]byte, 100)
	rejected := &greetedConn{Conn: &brokenConn{said: append([]byte{0, 0, 11, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 11}, "why"...)}}
	for range 2 { // what is written before and after the first Read
		n, err := rejected.Write(preface)
		expect.True(t, n == len(preface) && err == nil, "%d, %v", n, err)
		_, err = rejected.Read(b)
		expect.True(t, err != nil && strings.Contains(err.Error(), "why"), "%v", err)
	}
	broken := &greetedConn{Conn: &brokenConn{said: []byte{0, 0, 0, 4, 0, 0, 0, 0, 0}}}
	must.Value(broken.Read(b))(t)
	_, err := broken.Write(preface)
	expect.ErrorIs(t, err, syscall.EPIPE)
}

package client

import (
	"context"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestReconnectStorm: a client that a node lets in, over HTTP/2, and turns out again at once, does not come back more often than every
// few seconds.
func TestReconnectStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		accepted := make(chan net.Conn, 10_000)
		p := &pacer{connect: func(context.Context, string, string) (net.Conn, error) {
			ours, theirs := net.Pipe()
			accepted <- theirs
			return ours, nil
		}}
		r := staticResolver{{Addresses: []resolver.Address{{Addr: "node:1"}}}}
		conn := must.Value(grpc.NewClient("weir:///node", grpc.WithResolvers(r), grpc.WithContextDialer(p.dial),
			grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultServiceConfig(serviceConfig)))(t)
		defer conn.Close()
		conn.Connect()
		done := make(chan int)
		stop := make(chan struct{})
		go func() { // a node that speaks as much of HTTP/2 as it takes, and hangs up
			n := 0
			for {
				select {
				case c := <-accepted:
					n++
					go func() { _, _ = c.Read(make([]byte, 1<<16)) }()
					_, _ = c.Write([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0}) // SETTINGS
					synctest.Wait()                                   // the client is connected
					_ = c.Close()
				case <-stop:
					done <- n
					return
				}
			}
		}()
		time.Sleep(time.Minute)
		close(stop)
		n := <-done
		expect.True(t, n >= 3 && n <= 20, "%d connections in a minute", n)
	})
}

// TestPace: the wait doubles up to its bound, and ends with a connection that lasts.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &pacer{connect: func(context.Context, string, string) (net.Conn, error) {
			ours, _ := net.Pipe()
			return ours, nil
		}}
		attempt := func(lasts time.Duration) bool {
			c, err := p.dial(t.Context(), "node:1")
			if err != nil {
				return false
			}
			time.Sleep(lasts)
			_ = c.Close()
			_ = c.Close() // counts once
			return true
		}
		for wait := minPace; ; wait = min(2*wait, maxPace) {
			must.True(t, attempt(0), "no attempt in time for %v", wait)
			time.Sleep(wait/2 - 1)
			must.True(t, !attempt(0), "an attempt too early for %v", wait)
			if time.Sleep(wait/2 + 1); wait == maxPace {
				break
			}
		}
		for range 3 {
			expect.True(t, attempt(soon), "a connection after one that lasted waits")
		}
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

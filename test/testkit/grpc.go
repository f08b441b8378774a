package testkit

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/weirlimit/weir/test/must"

	"github.com/weirlimit/weir/test/expect"
)

// Within returns a context that ends after d, or with the test.
func Within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// Soon fails the test if f takes so long that it must have waited for a deadline.
func Soon(t testing.TB, f func()) {
	t.Helper()
	start := time.Now()
	f()
	took := time.Since(start)
	expect.True(t, took <= Patience/2, "took %v", took)
}

// Serve serves gRPC on loopback and returns the address.
func Serve(t testing.TB, register func(grpc.ServiceRegistrar), opts ...grpc.ServerOption) string {
	t.Helper()
	lis := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	ServeOn(t, lis, register, opts...)
	return lis.Addr().String()
}

// ServeOn serves gRPC on a listener until stop is called, or until the end of the test.
func ServeOn(t testing.TB, lis net.Listener, register func(grpc.ServiceRegistrar),
	opts ...grpc.ServerOption) (stop func()) {
	server := grpc.NewServer(opts...)
	register(server)
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(lis) }) // ends with Stop
	stop = sync.OnceFunc(func() {
		server.Stop()
		served.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// Dial returns a connection that is closed at the end of the test.
func Dial(t testing.TB, addr string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(16<<20)))
	conn := must.Value(grpc.NewClient("passthrough:///"+addr, options...))(t)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// Proxy forwards TCP connections to an address until Cut.
type Proxy struct {
	Addr string

	mu    sync.Mutex
	deaf  bool // answers are dropped
	conns []net.Conn
}

func NewProxy(t testing.TB, to string) *Proxy {
	t.Helper()
	lis := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	p := &Proxy{Addr: lis.Addr().String()}
	var work sync.WaitGroup
	work.Go(func() {
		for {
			in, err := lis.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				_ = in.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, in, out)
			p.mu.Unlock()
			work.Go(func() { p.carry(out, in, func() bool { return false }) })
			work.Go(func() { p.carry(in, out, p.isDeaf) })
		}
	})
	t.Cleanup(func() {
		_ = lis.Close()
		p.Cut()
		work.Wait()
	})
	return p
}

func (p *Proxy) isDeaf() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.deaf
}

func (p *Proxy) SetDeaf(deaf bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deaf = deaf
}

// carry copies until one side is closed, and then closes the other.
func (p *Proxy) carry(to, from net.Conn, drop func() bool) {
	defer to.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if drop() {
			continue
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

// Cut closes all connections. New ones may be opened.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

// RawCodec sends and receives bytes unchanged.
type RawCodec struct{}

// Marshal implements encoding.Codec.
func (RawCodec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

// Unmarshal implements encoding.Codec.
func (RawCodec) Unmarshal(b []byte, v any) error { *v.(*[]byte) = b; return nil }

// Name implements encoding.Codec.
func (RawCodec) Name() string { return "proto" }

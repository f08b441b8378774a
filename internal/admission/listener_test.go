package admission

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// from is a connection from an address.
type from struct {
	net.Conn
	addr net.Addr
}

func (f from) RemoteAddr() net.Addr { return f.addr }

// dial connects from an address.
func (h *harness) dial(address string) net.Conn {
	here, there := net.Pipe()
	h.pipes.Conns <- from{here, net.TCPAddrFromAddrPort(netip.MustParseAddrPort(address))}
	return there
}

// harness is a Listener under test in a bubble of synctest, with a server that keeps what it accepts.
type harness struct {
	*Listener
	pipes    *testkit.Pipes
	rejected []Rejection
	mu       sync.Mutex
	conns    map[string]*Conn // served, by address
}

func newHarness(cfg ListenerConfig) *harness {
	h := &harness{pipes: testkit.NewPipes(), conns: make(map[string]*Conn)}
	cfg.Rejected = func(_ net.Addr, why Rejection) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.rejected = append(h.rejected, why)
	}
	h.Listener = NewListener(h.pipes, cfg)
	go func() {
		for {
			c, err := h.Accept()
			if err != nil {
				return
			}
			h.mu.Lock()
			h.conns[c.RemoteAddr().String()] = c.(*Conn)
			h.mu.Unlock()
		}
	}()
	return h
}

// why lists the rejections.
func (h *harness) why() []Rejection {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.rejected)
}

// served lists the connections that are, by address.
func (h *harness) served() []string {
	synctest.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []string
	for a, c := range h.conns {
		h.Listener.mu.Lock()
		if !c.gone {
			list = append(list, a)
		}
		h.Listener.mu.Unlock()
	}
	slices.Sort(list)
	return list
}

func (h *harness) conn(address string) *Conn {
	synctest.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.conns[address]
}

func (h *harness) close(t *testing.T) {
	t.Helper()
	expect.NoError(t, h.Close())
	for _, a := range h.served() {
		_ = h.conn(a).Close() // a pipe
	}
	authenticated, anonymous, waiting := h.Connections()
	expect.True(t, authenticated+anonymous+waiting == 0 && len(h.sources) == 0,
		"left: %d, %d, %d, %v", authenticated, anonymous, waiting, h.sources)
}

// TestSourcesTakeTurns: a source that floods the port does not shut others out, nor itself for good.
func TestSourcesTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(ListenerConfig{MaxAnonymous: 4})
		defer h.close(t)
		for port := range 20 {
			h.dial(fmt.Sprintf("192.0.2.1:%d", port+10))
		}
		got := h.served()
		must.True(t, slices.Equal(got, []string{"192.0.2.1:10", "192.0.2.1:11", "192.0.2.1:12", "192.0.2.1:13"}),
			"served: %v", got)
		h.dial("192.0.2.2:1")
		got = h.served()
		expect.True(t, !slices.Contains(got, "192.0.2.2:1"), "closed before it had its time: %v", got)
		// When the first ones have had their time, the one of the other source is next but one, and then the newest.
		time.Sleep(anonymousGrace)
		got = h.served()
		expect.True(t, slices.Equal(got, []string{"192.0.2.1:27", "192.0.2.1:28", "192.0.2.1:29", "192.0.2.2:1"}),
			"served after a second: %v", got)
		// Of two sources the larger one makes room, although the other's connection is as old.
		time.Sleep(anonymousGrace)
		got = h.served()
		expect.True(t, slices.Contains(got, "192.0.2.2:1"), "served after two seconds: %v", got)
	})
}

// TestGraceOfASlowNode: where callers take long to authenticate, as on a machine that is short of processor, those who
// come next are given more time, and no more once callers are fast again.
func TestGraceOfASlowNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(ListenerConfig{MaxAnonymous: 1})
		defer h.close(t)
		address := ""
		caller := func(i int, takes time.Duration) bool {
			address = fmt.Sprintf("192.0.2.1:%d", i+10)
			h.dial(address)
			c := h.conn(address)
			time.Sleep(takes)
			return c.Authenticated("caller")
		}
		for i := range 20 {
			expect.True(t, caller(i, 900*time.Millisecond), "caller %d is rejected", i)
		}
		for i, test := range []struct {
			callers int // that are fast before
			stays   time.Duration
		}{{0, 3 * time.Second}, {30, anonymousGrace}} {
			for j := range test.callers {
				expect.True(t, caller(100+j, 0), "caller %d is rejected", j)
			}
			slow, next := fmt.Sprintf("192.0.2.2:%d", i+1), fmt.Sprintf("192.0.2.3:%d", i+1)
			h.dial(slow)
			synctest.Wait()
			h.dial(next)
			time.Sleep(test.stays - time.Millisecond)
			expect.True(t, h.conn(slow) != nil && h.conn(next) == nil, "%d: closed too early: %v", i, h.served())
			time.Sleep(maxGrace - test.stays + time.Millisecond)
			expect.True(t, h.conn(next) != nil, "%d: never closed: %v", i, h.served())
			_ = h.conn(next).Close()
		}
	})
}

// TestAuthenticatedStay: an authenticated connection makes no room, and takes none from those who are not.
func TestAuthenticatedStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(ListenerConfig{MaxAnonymous: 2, MaxConnections: 3, MaxPerSource: 2})
		defer h.close(t)
		known := func(address string) bool {
			h.dial(address)
			return h.conn(address).Authenticated("")
		}
		expect.True(t, known("192.0.2.1:1") && known("192.0.2.1:2") && !known("192.0.2.1:3") && known("192.0.2.2:1") &&
			!known("192.0.2.3:1"), "served: %v", h.served())
		expect.True(t, slices.Equal(h.why(), []Rejection{TooManyConnections, TooManyConnections}),
			"rejected: %v", h.why())
		for port := range 100 {
			h.dial(fmt.Sprintf("192.0.2.1:%d", port+10))
			time.Sleep(anonymousGrace)
		}
		authenticated, anonymous, _ := h.Connections()
		expect.True(t, authenticated == 3 && anonymous == 2, "%d and %d", authenticated, anonymous)
		c := h.conn("192.0.2.1:1")
		expect.True(t, c.Authenticated("") && c.Close() == nil && (!c.Authenticated("") || c.IsAuthenticated()),
			"one that was authenticated is so no more")
		expect.True(t, known("192.0.2.1:4"), "no room when one has ended")
	})
}

// TestWaitingBound: those who wait are bounded, and closed in the same order.
func TestWaitingBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(ListenerConfig{MaxAnonymous: 1})
		defer h.close(t)
		h.dial("192.0.2.2:1")
		other := h.dial("192.0.2.3:1") // waits
		var conns []net.Conn
		for port := range 3 * maxWaiting {
			conns = append(conns, h.dial(fmt.Sprintf("192.0.2.1:%d", port+10)))
		}
		synctest.Wait()
		_, _, waiting := h.Connections()
		expect.Equal(t, waiting, maxWaiting, "wait")
		_, err := conns[0].Write([]byte("x"))
		expect.ErrorIs(t, err, io.ErrClosedPipe, "the oldest")
		expect.Equal(t, len(h.why()), 2*maxWaiting+1, "are rejected")
		time.Sleep(anonymousGrace)
		got := h.served()
		expect.True(t, slices.Equal(got, []string{"192.0.2.3:1"}), "served: %v", got)
		_ = other.Close() // a pipe
	})
}

// TestOneCallerTakesNotAllConnections is an attack: one caller opens connections from many addresses until it gets no
// more. There are some left for others.
func TestOneCallerTakesNotAllConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 40
		memory := fairshare.New(0)
		h := newHarness(ListenerConfig{MaxConnections: most, MaxAnonymous: 1000, Memory: memory, ConnBytes: 10})
		defer h.close(t)
		n := 0
		open := func(caller string) bool {
			n++
			address := fmt.Sprintf("192.0.2.%d:1", n)
			h.dial(address)
			c := h.conn(address)
			if !c.Authenticated(caller) {
				return false
			}
			return c.Authenticated(caller) && c.Authenticated("") // it counts once
		}
		got := 0
		for range 60 {
			if open("greedy") {
				got++
			}
		}
		expect.True(t, got >= most/2 && got <= most*3/4, "one caller has %d of %d connections", got, most)
		for range 3 {
			expect.True(t, open("modest"), "another caller gets none")
		}
		authenticated, _, _ := h.Connections()
		expect.True(t, authenticated == got+3, "%d are counted of %d", authenticated, got+3)
		bytes, _ := memory.InUse()
		expect.Equal(t, bytes, 10*int64(got+3), "bytes of %d connections", got+3)
	})
}

// TestRequestsOfAConnection: an anonymous connection over HTTP/2 with more than a few requests at a time is closed; the
// requests of a caller take the caller's share of the memory.
func TestRequestsOfAConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory := fairshare.New(9 * PerStream)
		h := newHarness(ListenerConfig{MaxAnonymous: 10, Memory: memory})
		defer h.close(t)
		begin := func(c *Conn, anonymous bool) (ends []func()) {
			for range 20 {
				end, ok := c.Begin(anonymous)
				if !ok {
					break
				}
				ends = append(ends, end)
			}
			return ends
		}
		h.dial("192.0.2.1:1")
		c := h.conn("192.0.2.1:1")
		for range 100 {
			end, ok := c.Begin(true)
			expect.True(t, ok, "one after the other")
			end()
		}
		ends := begin(c, true)
		expect.Equal(t, len(ends), maxConnRequests, "requests at a time")
		expect.True(t, slices.Equal(h.why(), []Rejection{TooManyAnonymous}) && len(h.served()) == 0,
			"rejections %v, and %v is served", h.why(), h.served())
		for _, end := range ends {
			end()
		}
		h.dial("192.0.2.2:1")
		c = h.conn("192.0.2.2:1")
		expect.True(t, c.Authenticated("greedy"), "a caller")
		ends = begin(c, false)
		expect.True(t, len(ends) >= 4 && len(ends) < 9 && len(h.served()) == 1, "one caller has %d of 9", len(ends))
		for _, end := range ends {
			end()
		}
		taken, _ := memory.InUse()
		expect.Equal(t, taken, 0, "bytes in the end")
	})
}

// TestAnonymousBytes: before authentication only so much is read; the one that authenticates has a moment; and slow
// probes may go on for as long as they like.
func TestAnonymousBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(ListenerConfig{MaxAnonymous: 128})
		defer h.close(t)
		send := func(address string, n int) *Conn {
			there := h.dial(address)
			go func() {
				_, _ = there.Write(make([]byte, n)) // ends with the connection
				_ = there.Close()
			}()
			return h.conn(address)
		}
		all := bytes.Repeat([]byte{0}, 4*anonymousBytes)
		c := send("192.0.2.1:1", len(all))
		n, err := io.ReadFull(c, all)
		expect.True(t, n == anonymousBytes && errors.Is(err, errBytes), "read %d: %v", n, err)
		expect.True(t, slices.Equal(h.why(), []Rejection{TooManyBytes}), "rejected: %v", h.why())
		c = send("192.0.2.1:2", len(all))
		go func() {
			time.Sleep(authenticationPatience / 2)
			c.Authenticated("")
		}()
		n, err = io.ReadFull(c, all)
		expect.True(t, n == len(all), "when it is authenticated meanwhile: read %d: %v", n, err)
		there := h.dial("192.0.2.1:3")
		c = h.conn("192.0.2.1:3")
		go func() {
			for range 1000 {
				time.Sleep(time.Second)
				_, _ = there.Write(make([]byte, anonymousRate)) // read tells
			}
			_ = there.Close()
		}()
		if n, err := io.Copy(io.Discard, c); n != 1000*anonymousRate || err != nil {
			t.Errorf("slowly: %d, %v", n, err)
		}
	})
}

// TestSlowReader: a caller who does not read has the time that is stated, from each write anew, and then the connection
// ends.
func TestSlowReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const slowest = 30 * time.Second
		h := newHarness(ListenerConfig{MaxAnonymous: 128, WriteTimeout: slowest})
		defer h.close(t)
		there := h.dial("192.0.2.1:1")
		c := h.conn("192.0.2.1:1")
		for range 3 { // slow, but reading
			go func() {
				time.Sleep(slowest - time.Second)
				_, _ = io.ReadFull(there, make([]byte, 3)) // the write tells
			}()
			_, err := c.Write([]byte("abc"))
			must.NoError(t, err)
		}
		began := time.Now()
		_, err := c.Write(bytes.Repeat([]byte{1}, 100))
		expect.ErrorIs(t, err, os.ErrDeadlineExceeded)
		expect.Equal(t, time.Since(began), slowest, "after")
	})
}

// TestCheckWith: nothing is read or written once the check fails.
func TestCheckWith(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(ListenerConfig{MaxAnonymous: 128})
		defer h.close(t)
		bad := errors.New("no longer valid")
		for i, use := range []func(c *Conn) error{
			func(c *Conn) error { _, err := c.Write([]byte("x")); return err },
			func(c *Conn) error { _, err := c.Read(make([]byte, 1)); return err },
		} {
			address := fmt.Sprintf("192.0.2.1:%d", i+1)
			there := h.dial(address)
			go func() {
				_, _ = there.Write([]byte("x")) // ends with the connection
			}()
			c := h.conn(address)
			c.CheckWith(func() error { return bad })
			expect.Equal(t, use(c), bad)
			got := h.served()
			expect.True(t, !slices.Contains(got, address), "the connection stays")
		}
	})
}

// TestSourceOf: an IPv6 network is one source, and an IPv4 address is one however it is written.
func TestSourceOf(t *testing.T) {
	for _, c := range []struct{ a, b string }{
		{"192.0.2.1:1", "[::ffff:192.0.2.1]:2"}, {"[2001:db8::1]:1", "[2001:db8::ffff:0:0:2]:2"},
		{"[fe80::1%eth0]:1", "[fe80::2]:1"},
	} {
		a, b := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.a)),
			net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.b))
		expect.True(t, sourceOf(a) == sourceOf(b), "%s and %s: %v, %v", c.a, c.b, sourceOf(a), sourceOf(b))
	}
	expect.True(t, sourceOf(net.TCPAddrFromAddrPort(netip.MustParseAddrPort("[2001:db8::1]:1"))) != sourceOf(
		net.TCPAddrFromAddrPort(netip.MustParseAddrPort("[2001:db8:0:1::1]:1"))),
		"two networks are one source")
}

// TestCallsEndOnce has many calls and streams end in every way there is at once, about when their first messages are
// due: each is answered with what is its own or with one status, and nothing of it goes on being counted.
func TestCallsEndOnce(t *testing.T) {
	answer := func(in *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
		switch rand.N(8) {
		case 0:
			panic("a mistake")
		case 1:
			return nil, status.Error(codes.Aborted, in.Value)
		}
		return in, nil
	}
	echo := grpc.ServiceDesc{
		ServiceName: "echo.Service", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Unary", Handler: func(_ any, ctx context.Context, read func(any) error,
			_ grpc.UnaryServerInterceptor) (any, error) {
			in := new(wrapperspb.StringValue)
			if err := read(in); err != nil {
				return nil, err
			}
			_ = grpc.SetTrailer(ctx, metadata.Pairs("of", in.Value)) // fails where the call has ended
			return answer(in)
		}}},
		Streams: []grpc.StreamDesc{{StreamName: "Stream", ServerStreams: true, ClientStreams: true,
			Handler: func(_ any, s grpc.ServerStream) error {
				in := new(wrapperspb.StringValue)
				if err := s.RecvMsg(in); err != nil {
					return err
				}
				s.SetTrailer(metadata.Pairs("of", in.Value))
				out, err := answer(in)
				if err != nil {
					return err
				}
				return s.SendMsg(out)
			}}},
	}
	calls := NewCalls(CallsConfig{
		FirstMessage: 3 * time.Millisecond, MaxCalls: 6, Memory: fairshare.New(12), StreamBytes: 1,
		Caller: func(ctx context.Context) (string, bool) {
			who := metadata.ValueFromIncomingContext(ctx, "who")
			return who[0], who[0] != ""
		},
	})
	server, addr := serve(t, calls, &echo)
	var mu sync.Mutex
	seen := make(map[codes.Code]int)
	call := func(conn *grpc.ClientConn, who, text string) codes.Code {
		ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(t.Context(), "who", who))
		defer cancel()
		if rand.N(4) == 0 {
			defer time.AfterFunc(rand.N(5*time.Millisecond), cancel).Stop()
		}
		s, err := conn.NewStream(ctx, &echo.Streams[0], "/echo.Service/"+[]string{"Unary", "Stream"}[rand.N(2)])
		if err != nil {
			return status.Code(err)
		}
		if rand.N(2) == 0 {
			<-time.After(rand.N(6 * time.Millisecond))
		}
		out := new(wrapperspb.StringValue)
		if err = s.SendMsg(wrapperspb.String(text)); err == nil {
			_ = s.CloseSend() // its error is that of RecvMsg
		}
		if err = s.RecvMsg(out); err == nil {
			expect.True(t, out.Value == text, "%q was answered %q", text, out.Value)
			err = s.RecvMsg(out)
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		of := s.Trailer().Get("of")
		expect.True(t, len(of) <= 1 && (len(of) != 1 || of[0] == text) &&
			(status.Code(err) != codes.Aborted || status.Convert(err).Message() == text), "%q ended with %v, %q", text,
			err, of)
		return status.Code(err)
	}
	var conns []*grpc.ClientConn
	for range 24 {
		conns = append(conns, testkit.Dial(t, addr))
	}
	// a busy machine may take a few until too many calls are open at once
	for round := 0; round < 20 && len(seen) < 6; round++ {
		var callers sync.WaitGroup
		for i, conn := range conns {
			callers.Go(func() {
				for n := range 100 {
					code := call(conn, []string{"", "a", "b"}[i%3], fmt.Sprint(i, n))
					mu.Lock()
					seen[code]++
					mu.Unlock()
				}
			})
		}
		callers.Wait()
	}
	for code := range seen {
		switch code {
		case codes.OK, codes.Canceled, codes.Internal, codes.Aborted, codes.DeadlineExceeded, codes.Unavailable:
		default:
			t.Errorf("calls ended with %v", code)
		}
	}
	expect.True(t, len(seen) >= 6, "calls ended with %v: too few ways to say anything", seen)
	server.GracefulStop() // which waits for the handlers
	places := int64(0)
	for _, r := range []*room{&calls.calls, &calls.streams} {
		taken, _ := r.places.InUse()
		places += taken + r.open.Load()
	}
	expect.Equal(t, places, 0, "places taken after the last call")
}

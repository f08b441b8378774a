package admission

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// serve serves a service on loopback until the test ends, within the bounds of calls.
func serve(t *testing.T, calls *Calls, service *grpc.ServiceDesc) (server *grpc.Server, addr string) {
	t.Helper()
	server = grpc.NewServer(append(calls.Options(), grpc.WaitForHandlers(true))...)
	calls.Registrar(server).RegisterService(service, nil)
	l := NewListener(must.Value(net.Listen("tcp", "127.0.0.1:0"))(t), ListenerConfig{MaxAnonymous: 128})
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		expect.NoError(t, <-served)
	})
	return server, l.Addr().String()
}

// TestMaxCalls: calls and streams beyond their bounds are answered UNAVAILABLE, those of the one kind do not count for
// the other, and each that ends makes room.
func TestMaxCalls(t *testing.T) {
	begun, end := make(chan struct{}), make(chan struct{})
	wait := func() error {
		begun <- struct{}{}
		<-end
		return nil
	}
	slow := grpc.ServiceDesc{
		ServiceName: "slow.Service", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Unary",
			Handler: func(_ any, _ context.Context, read func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
				if err := read(new(emptypb.Empty)); err != nil {
					return nil, err
				}
				return new(emptypb.Empty), wait()
			}}},
		Streams: []grpc.StreamDesc{{StreamName: "Stream", ServerStreams: true, ClientStreams: true,
			Handler: func(any, grpc.ServerStream) error {
				return wait()
			}}},
	}
	calls := NewCalls(CallsConfig{MaxCalls: 2, Memory: fairshare.New(199), StreamBytes: 100})
	_, addr := serve(t, calls, &slow)
	conn := testkit.Dial(t, addr)
	unary := func() error {
		return conn.Invoke(t.Context(), "/slow.Service/Unary", new(emptypb.Empty), new(emptypb.Empty))
	}
	stream := func() error {
		s, err := conn.NewStream(t.Context(), &slow.Streams[0], "/slow.Service/Stream")
		if err != nil {
			return err
		}
		return s.RecvMsg(new(emptypb.Empty)) // io.EOF when the handler has returned
	}
	for range 2 { // the second time with what has ended
		ended := make(chan error, 3)
		for _, call := range []func() error{unary, unary, stream} {
			go func() { ended <- call() }()
			<-begun
		}
		for what, call := range map[string]func() error{"a call": unary, "a stream": stream} {
			err := call()
			expect.Equal(t, status.Code(err), codes.Unavailable, "%s beyond the bound: %v", what, err)
		}
		for range 3 {
			end <- struct{}{}
		}
		for range 3 {
			err := <-ended
			expect.True(t, status.Code(err) != codes.Unavailable, "%v", err)
		}
		for calls.calls.open.Load()+calls.streams.open.Load() > 0 { // a caller may hear of the end before it is counted
			runtime.Gosched()
		}
	}
}

// broken is a service whose methods panic after they have read a message.
var broken = grpc.ServiceDesc{
	ServiceName: "broken.Service", HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Unary",
		Handler: func(_ any, _ context.Context, read func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			if err := read(new(emptypb.Empty)); err != nil {
				return nil, err
			}
			panic("unary")
		}}},
	Streams: []grpc.StreamDesc{{StreamName: "Stream", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, s grpc.ServerStream) error {
			if err := s.RecvMsg(new(emptypb.Empty)); err != nil {
				return err
			}
			panic("stream")
		}}},
}

// TestPanics: a panic of a handler ends its own call, and is told.
func TestPanics(t *testing.T) {
	var unary, stream atomic.Int64
	calls := NewCalls(CallsConfig{Panicked: func(method string, p *panics.Error) {
		switch {
		case method == "/broken.Service/Unary" && p.Value == "unary":
			unary.Add(1)
		case method == "/broken.Service/Stream" && p.Value == "stream":
			stream.Add(1)
		default:
			t.Errorf("%s: %v", method, p.Value)
		}
	}})
	_, addr := serve(t, calls, &broken)
	conn := testkit.Dial(t, addr)
	for range 2 {
		err := conn.Invoke(t.Context(), "/broken.Service/Unary", new(emptypb.Empty), new(emptypb.Empty))
		expect.True(t, status.Code(err) == codes.Internal, "a unary call: %v", err)
		s := must.Value(conn.NewStream(t.Context(), &broken.Streams[0], "/broken.Service/Stream"))(t)
		must.NoError(t, s.SendMsg(new(emptypb.Empty)))
		err = s.RecvMsg(new(emptypb.Empty))
		expect.Equal(t, status.Code(err), codes.Internal, "a stream: %v", err)
	}
	expect.True(t, unary.Load() == 2 && stream.Load() == 2, "told of %d and %d", unary.Load(), stream.Load())
}

// TestAge: a stream of an old connection ends, whether its handler waits for its context or reads.
func TestAge(t *testing.T) {
	const age = 50 * time.Millisecond
	waits := grpc.ServiceDesc{ServiceName: "waits.Service", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{
		{StreamName: "Context", ServerStreams: true, ClientStreams: true,
			Handler: func(_ any, s grpc.ServerStream) error {
				<-s.Context().Done()
				return s.Context().Err()
			}},
		{StreamName: "Read", ServerStreams: true, ClientStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
			return s.RecvMsg(new(emptypb.Empty))
		}},
	}}
	calls := NewCalls(CallsConfig{MaxAge: age})
	calls.patience = age
	_, addr := serve(t, calls, &waits)
	conn := testkit.Dial(t, addr)
	for _, desc := range waits.Streams {
		s := must.Value(conn.NewStream(t.Context(), &desc, "/waits.Service/"+desc.StreamName))(t)
		err := s.RecvMsg(new(emptypb.Empty))
		expect.Equal(t, status.Code(err), codes.Unavailable, "%s: %v", desc.StreamName, err)
	}
}

// endings is when calls were ended, by the number of each.
type endings struct {
	mu    sync.Mutex
	began time.Time
	all   []string
}

type ended struct {
	to *endings
	n  int
}

func (ended) RecvCompress() string { return "" }

func (s ended) WriteStatus(st *status.Status) error {
	s.to.mu.Lock()
	defer s.to.mu.Unlock()
	s.to.all = append(s.to.all, fmt.Sprintf("%d after %v: %v", s.n, time.Since(s.to.began), st.Code()))
	return nil
}

// TestAwaited: calls end at their deadlines, not those whose messages have come, or that are over.
func TestAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const patience = 10 * time.Second
		e := &endings{began: time.Now()}
		c := NewCalls(CallsConfig{FirstMessage: patience})
		var calls []*call
		add := func() {
			k := &call{calls: c, stream: ended{e, len(calls)}, read: func(any) error { return nil }, room: &c.calls}
			must.NoError(t, k.begin(t.Context()))
			calls = append(calls, k)
		}
		for range 5 { // at 0 s, 1 s …
			add()
			time.Sleep(time.Second)
		}
		for _, came := range []int{0, 2} {
			must.NoError(t, calls[came].receive(nil))
		}
		calls[4].done()
		time.Sleep(55 * time.Second)
		add() // at 60 s
		time.Sleep(patience)
		calls[1].done() // was ended
		add()
		calls[6].done()
		time.Sleep(time.Minute)
		synctest.Wait()
		want := []string{"1 after 11s: DeadlineExceeded", "3 after 13s: DeadlineExceeded",
			"5 after 1m10s: DeadlineExceeded"}
		expect.True(t, slices.Equal(e.all, want), "ended: %v", e.all)
	})
}

// TestEnded: a unary call is told of when its message has come, and with the time since then. A caller who sends none,
// or what is none, is not: else a stranger could fill a log of errors.
func TestEnded(t *testing.T) {
	ended := make(chan time.Duration, 9)
	calls := NewCalls(CallsConfig{Ended: func(_ context.Context, _ string, took time.Duration, _ error) { ended <- took }})
	desc := grpc.ServiceDesc{
		ServiceName: "quick.Service", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Unary",
			Handler: func(_ any, _ context.Context, read func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
				return new(emptypb.Empty), read(new(emptypb.Empty))
			}}},
	}
	_, addr := serve(t, calls, &desc)
	conn := testkit.Dial(t, addr)
	call := func() grpc.ClientStream {
		return must.Value(conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, "/quick.Service/Unary"))(t)
	}
	silent := call()
	must.NoError(t, silent.CloseSend())
	err := silent.RecvMsg(new(emptypb.Empty))
	expect.Equal(t, status.Code(err), codes.Internal, "a call without a message: %v", err)
	expect.Equal(t, len(ended), 0, "calls told of")
	slow := call()
	const patience = 200 * time.Millisecond
	time.Sleep(patience)
	must.NoError(t, slow.SendMsg(new(emptypb.Empty)))
	must.NoError(t, slow.CloseSend())
	must.NoError(t, slow.RecvMsg(new(emptypb.Empty)))
	took := <-ended
	expect.True(t, took < patience, "the time until the message came is not the node's: %v", took)
}

// TestStopWhileAwaited: a server that stops ends calls whose messages have not come, and leaves no goroutine.
func TestStopWhileAwaited(t *testing.T) {
	testkit.NoLeaks(t, "internal/admission.", "google.golang.org/grpc")
	calls := NewCalls(CallsConfig{FirstMessage: time.Hour})
	server, addr := serve(t, calls, &broken)
	conn := testkit.Dial(t, addr)
	for _, method := range []string{"/broken.Service/Unary", "/broken.Service/Stream"} {
		_, err := conn.NewStream(t.Context(), &broken.Streams[0], method)
		must.NoError(t, err)
	}
	open := func() int64 { return calls.calls.open.Load() + calls.streams.open.Load() }
	testkit.Eventually(t, "two calls that are awaited", func() bool { return open() == 2 })
	server.Stop()
	expect.Equal(t, open(), 0, "calls are left")
}

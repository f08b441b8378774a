package admission

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// broken is a service whose methods panic after they have read a message.
var broken = grpc.ServiceDesc{
	ServiceName: "broken.Service", HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Unary", Handler: func(_ any, _ context.Context, read func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		if err := read(new(emptypb.Empty)); err != nil {
			return nil, err
		}
		panic("unary")
	}}},
	Streams: []grpc.StreamDesc{{StreamName: "Stream", ServerStreams: true, ClientStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
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
	server := grpc.NewServer(calls.Options()...)
	calls.Registrar(server).RegisterService(&broken, nil)
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	defer func() {
		server.Stop()
		expect.NoError(t, <-ended)
	}()
	conn := must.Value(grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	defer conn.Close()
	for range 2 {
		if err := conn.Invoke(t.Context(), "/broken.Service/Unary", new(emptypb.Empty), new(emptypb.Empty)); status.Code(err) != codes.Internal {
			t.Errorf("a unary call: %v", err)
		}
		s, err := conn.NewStream(t.Context(), &broken.Streams[0], "/broken.Service/Stream")
		must.NoError(t, err)
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
		{StreamName: "Context", ServerStreams: true, ClientStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
			<-s.Context().Done()
			return s.Context().Err()
		}},
		{StreamName: "Read", ServerStreams: true, ClientStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
			return s.RecvMsg(new(emptypb.Empty))
		}},
	}}
	calls := NewCalls(CallsConfig{MaxAge: age})
	calls.patience = age
	server := grpc.NewServer(append(calls.Options(), grpc.WaitForHandlers(true))...)
	calls.Registrar(server).RegisterService(&waits, nil)
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(NewListener(l, ListenerConfig{MaxAnonymous: 128})) }()
	defer func() {
		server.Stop()
		expect.NoError(t, <-ended)
	}()
	conn := must.Value(grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	defer conn.Close()
	for _, desc := range waits.Streams {
		s, err := conn.NewStream(t.Context(), &desc, "/waits.Service/"+desc.StreamName)
		must.NoError(t, err)
		err = s.RecvMsg(new(emptypb.Empty))
		expect.Equal(t, status.Code(err), codes.Unavailable, "%s: %v", desc.StreamName, err)
	}
}

package admission

import (
	"context"
	"net"
	"runtime"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestMaxCalls: calls and streams beyond their bounds are answered UNAVAILABLE, those of the one kind do not count for the
// other, and each that ends makes room.
func TestMaxCalls(t *testing.T) {
	begun, end := make(chan struct{}), make(chan struct{})
	wait := func() error {
		begun <- struct{}{}
		<-end
		return nil
	}
	slow := grpc.ServiceDesc{
		ServiceName: "slow.Service", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Unary", Handler: func(_ any, _ context.Context, read func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			if err := read(new(emptypb.Empty)); err != nil {
				return nil, err
			}
			return new(emptypb.Empty), wait()
		}}},
		Streams: []grpc.StreamDesc{{StreamName: "Stream", ServerStreams: true, ClientStreams: true, Handler: func(any, grpc.ServerStream) error {
			return wait()
		}}},
	}
	calls := NewCalls(CallsConfig{MaxCalls: 2, Memory: fairshare.New(199), StreamBytes: 100})
	server := grpc.NewServer(calls.Options()...)
	calls.Registrar(server).RegisterService(&slow, nil)
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	defer func() {
		server.Stop()
		expect.NoError(t, <-served)
	}()
	conn := must.Value(grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	defer conn.Close()
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

package grpc

import (
	"context"
	"testing"

	"google.golang.org/grpc"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/testkit"
)

// noLeaks looks for goroutines of this package and of gRPC.
func noLeaks(t testing.TB) {
	t.Helper()
	testkit.NoLeaks(t, "gateway/grpc.", "google.golang.org/grpc")
}

const maxMessage = 8 << 20

// serve serves callers on loopback and returns the address.
func serve(t testing.TB, register func(grpc.ServiceRegistrar), opts ...grpc.ServerOption) string {
	t.Helper()
	opts = append(opts, grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage),
		grpc.ForceServerCodecV2(wire.Codec()))
	return testkit.Serve(t, register, opts...)
}

// connect returns a connection to a Server, on a gRPC server with options. All end with the test.
func connect(t testing.TB, cfg ServerConfig, opts ...grpc.ServerOption) *grpc.ClientConn {
	t.Helper()
	if cfg.Caller == nil {
		cfg.Caller = func(context.Context) string { return "" }
	}
	s := NewServer(cfg)
	t.Cleanup(s.Close)
	return testkit.Dial(t, serve(t, s.Register, opts...))
}

// client is connect for a caller.
func client(t testing.TB, cfg ServerConfig, opts ...grpc.ServerOption) weirv1.LimiterClient {
	t.Helper()
	return weirv1.NewLimiterClient(connect(t, cfg, opts...))
}

// through is an option with which wrap is put around each stream, and its end is told; both may be nil.
func through(wrap func(grpc.ServerStream) grpc.ServerStream, ended chan<- error) grpc.ServerOption {
	return grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo,
		handle grpc.StreamHandler) error {
		if wrap != nil {
			stream = wrap(stream)
		}
		err := handle(srv, stream)
		if ended != nil {
			ended <- err
		}
		return err
	})
}

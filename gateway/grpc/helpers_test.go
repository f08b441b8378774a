package grpc

import (
	"testing"

	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/testkit"
	"google.golang.org/grpc"
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
	opts = append(opts, grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage), grpc.ForceServerCodecV2(wire.Codec()))
	return testkit.Serve(t, register, opts...)
}

package replica

import (
	"testing"

	"google.golang.org/grpc"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/test/testkit"
)

var (
	alice = ownership.Node{Name: "alice", Boot: 1}
	bob   = ownership.Node{Name: "bob", Boot: 2}
)

const settings = 0xabc

// noLeaks looks for goroutines of this package and of gRPC.
func noLeaks(t testing.TB) {
	t.Helper()
	testkit.NoLeaks(t, "rpc/replica.", "google.golang.org/grpc")
}

// serve serves a peer service on loopback and returns its address.
func serve(t testing.TB, register func(grpc.ServiceRegistrar)) string {
	t.Helper()
	return testkit.Serve(t, register, grpc.MaxRecvMsgSize(transport.MaxMessage), grpc.MaxSendMsgSize(transport.MaxMessage), grpc.ForceServerCodecV2(transport.Codec()))
}

func hello() *peerv1.Hello {
	return &peerv1.Hello{
		Protocol: transport.Protocol, FromName: alice.Name, FromBoot: alice.Boot, ToName: bob.Name, ToBoot: bob.Boot, RingSettings: settings,
	}
}

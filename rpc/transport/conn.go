// Package transport is what the streams between nodes have in common: the connection to a process of a node, and the Hello that
// begins a stream on it.
//
// It knows nothing of what a stream carries. What it does not promise: that the process at an address is the one meant; whoever
// opens a stream learns that from the answer to its Hello, and whoever serves it from the Hello.
package transport

import (
	"cmp"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/rpc/wire"
)

// Protocol is the version of the peer protocol that this build speaks. Nodes of different versions reject each other's streams.
const Protocol = 6

const (
	// MaxMessage bounds a message between peers: a thousand checks with the longest keys and answers fit well.
	MaxMessage = 8 << 20
	// maxParts bounds the parts of a message between peers (see wire.Parts).
	maxParts = 1 << 16
)

// Windows of the connections between nodes, in bytes: how much of a stream, and of all of them, may be on its way to one who
// does not read. gRPC would find them out by itself, by asking after every other message how long the way is, which takes a
// twelfth of a node's time when batches are forwarded. A connection with the larger one carries 1 Gbit/s over 30 ms.
const (
	StreamWindow      = 1 << 20 // unless a node says otherwise
	connectionWindows = 4       // of a stream make that of a connection
)

// Codec returns the codec of the peer service's messages, for both sides of a connection, with a bound on what a message may be decoded
// into.
func Codec() encoding.CodecV2 { return wire.ServerCodec(nil, maxParts) }

// Dial returns a connection to a peer service, which is made when it is first needed; in plain text without creds. window is that
// of each stream, 0 stands for StreamWindow.
func Dial(addr string, creds credentials.TransportCredentials, window int32, params grpc.ConnectParams) (*grpc.ClientConn, error) {
	window, creds = cmp.Or(window, StreamWindow), cmp.Or(creds, insecure.NewCredentials())
	return grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(creds),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage), grpc.ForceCodecV2(Codec())),
		grpc.WithConnectParams(params), grpc.WithInitialWindowSize(window),
		grpc.WithInitialConnWindowSize(connectionWindows*window), grpc.WithDisableServiceConfig(), grpc.WithNoProxy(),
	)
}

func (c *Config) accept(h *peerv1.Hello) error {
	switch {
	case h == nil:
		return status.Error(codes.InvalidArgument, "hello: the first message must be a Hello")
	case h.Protocol != Protocol:
		return status.Errorf(codes.FailedPrecondition, "protocol: this node speaks %d, not %d", Protocol, h.Protocol)
	case h.ToName != c.Self.Name || h.ToBoot != c.Self.Boot:
		return status.Errorf(codes.FailedPrecondition, "to: this is %s/%x, not %s/%x", c.Self.Name, c.Self.Boot, h.ToName, h.ToBoot)
	case h.RingSettings != c.RingSettings:
		return status.Errorf(codes.FailedPrecondition, "ring_settings: the peer has %s, and would not agree on who owns a key", ring.Difference(c.RingSettings, h.RingSettings))
	case h.FromName == "" || len(h.FromName) > ownership.MaxName:
		return status.Errorf(codes.InvalidArgument, "from_name: must have 1 to %d bytes, not %d", ownership.MaxName, len(h.FromName))
	case h.FromName == c.Self.Name && h.FromBoot == c.Self.Boot:
		return status.Error(codes.InvalidArgument, "from: is this process itself")
	}
	return nil
}

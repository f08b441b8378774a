// Package transport has what the streams between nodes have in common: the connection to a process, and the Hello that
// begins a stream.
//
// It does not know what a stream carries. It does not promise that the process at an address is the process that was
// meant: the opening end learns that from the answer to its Hello, the serving end from the Hello.
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

// Protocol is the number of the peer protocol of this build. Nodes with different numbers reject each other's streams.
const Protocol = 7

const (
	// MaxMessage bounds a message between peers, in bytes. A thousand checks with the longest keys and answers are
	// smaller.
	MaxMessage = 8 << 20
	// maxParts bounds the parts of a message between peers (see wire.Parts).
	maxParts = 1 << 16
	// maxHeaders bounds the headers, and so an error, that a process may answer with, in bytes.
	maxHeaders = 32 << 10
)

// Receive windows of the connections between nodes, in bytes: how much a sender may have on its way on one stream, and
// on one connection. Fixed windows switch gRPC's estimation of them off, which measures a round trip after every other
// message and takes a twelfth of a node's CPU when batches are forwarded. The connection's window is enough for 1
// Gbit/s at a round trip of 30 ms.
const (
	StreamWindow      = 1 << 20 // unless Config.Window says otherwise
	connectionWindows = 4       // the connection's window in windows of a stream
)

// Codec returns the codec for messages of the peer service, for both ends of a connection. It decodes no message with
// more than maxParts parts.
func Codec() encoding.CodecV2 { return wire.ServerCodec(nil, maxParts) }

// Dial returns a client connection to a peer service. gRPC connects when the connection is first used. creds nil: plain
// text. window is the receive window of each stream in bytes; 0: StreamWindow.
func Dial(addr string, creds credentials.TransportCredentials, window int32,
	params grpc.ConnectParams) (*grpc.ClientConn, error) {
	window, creds = cmp.Or(window, StreamWindow), cmp.Or(creds, insecure.NewCredentials())
	return grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(creds),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage),
			grpc.ForceCodecV2(Codec())),
		grpc.WithConnectParams(params), grpc.WithInitialWindowSize(window),
		grpc.WithInitialConnWindowSize(connectionWindows*window), grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithDisableServiceConfig(), grpc.WithNoProxy(),
	)
}

func (c *Config) accept(h *peerv1.Hello) error {
	switch {
	case h == nil:
		return status.Error(codes.InvalidArgument, "hello: the first message must be a Hello")
	case h.Protocol != Protocol:
		return status.Errorf(codes.FailedPrecondition, "protocol: this node speaks %d, not %d", Protocol, h.Protocol)
	case h.ToName != c.Self.Name || h.ToBoot != c.Self.Boot:
		return status.Errorf(codes.FailedPrecondition, "to: this is %s/%x, not %.*s/%x", c.Self.Name, c.Self.Boot,
			ownership.MaxName, h.ToName, h.ToBoot)
	case h.RingSettings != c.RingSettings:
		return status.Errorf(codes.FailedPrecondition,
			"ring_settings: the peer has %s, and would not agree on who owns a key",
			ring.Difference(c.RingSettings, h.RingSettings))
	case h.FromName == "" || len(h.FromName) > ownership.MaxName:
		return status.Errorf(codes.InvalidArgument, "from_name: must have 1 to %d bytes, not %d", ownership.MaxName,
			len(h.FromName))
	case h.FromName == c.Self.Name && h.FromBoot == c.Self.Boot:
		return status.Error(codes.InvalidArgument, "from: is this process itself")
	}
	return nil
}

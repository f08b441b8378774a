package peer

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// stranger answers Identify with an error and headers of its own.
type stranger struct {
	peerv1.UnimplementedPeerServer
	text, header string
}

func (s stranger) Identify(ctx context.Context, _ *peerv1.IdentifyRequest) (*peerv1.IdentifyResponse, error) {
	_ = grpc.SetHeader(ctx, metadata.Pairs("x", s.header))
	return nil, status.Error(codes.Unknown, s.text)
}

// A process that gossip invents answers with as much as it likes, and what it says is kept for each.
func TestIdentifyOfStrangers(t *testing.T) {
	const much = 12 << 20
	for what, s := range map[string]stranger{
		"text":      {text: strings.Repeat("x", 20<<10)},
		"long text": {text: strings.Repeat("x", much)},
		"headers":   {header: strings.Repeat("x", much)},
	} {
		t.Run(what, func(t *testing.T) {
			addr := serve(t, func(r grpc.ServiceRegistrar) { peerv1.RegisterPeerServer(r, s) })
			_, err := Identify(testkit.Within(t, testkit.Patience), addr, nil)
			must.True(t, err != nil, "an identity")
			expect.True(t, len(err.Error()) < 2*maxReason, "an error of %d bytes: %.200s", len(err.Error()), err)
		})
	}
}

// What a Hello says is in the log and in the answer no longer than a name can be.
func TestLongHellos(t *testing.T) {
	much := strings.Repeat("x", 1<<20)
	for what, hello := range map[string]*peerv1.Hello{
		"from": {Protocol: transport.Protocol, FromName: much, ToName: bob.Name, ToBoot: bob.Boot,
			RingSettings: settings},
		"to": {Protocol: transport.Protocol, FromName: "a", ToName: much, RingSettings: settings},
	} {
		var log bytes.Buffer
		cfg := transport.Config{Self: bob, RingSettings: settings, Logger: slog.New(slog.NewTextHandler(&log, nil))}
		_, err := cfg.Accept(hello)
		must.True(t, err != nil, "%s: accepted", what)
		expect.True(t, len(err.Error()) < 300 && log.Len() < 600, "%s: an error of %d bytes, a line of %d", what,
			len(err.Error()), log.Len())
	}
}

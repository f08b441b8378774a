package node

import (
	"context"
	"crypto/tls"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/peer"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// TestStolenNodeCertificate: who has a node's certificate and key, but neither the gossip key nor a token, is a node on the peer port,
// and nobody on the ports for callers; its process is no member.
func TestStolenNodeCertificate(t *testing.T) {
	t.Parallel()
	dir, other := filepath.Join(t.TempDir(), "made"), filepath.Join(t.TempDir(), "other")
	makeSecrets(t, dir, other)
	cfg := testConfig(t, "a")
	cfg.Security = made(dir)
	a := mustSettle(t, cfg)

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := peer.Identify(ctx, addrOf(a.listeners.peer), credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})); err == nil {
		t.Error("the peer port answers to nobody's certificate")
	}
	if id, err := peer.Identify(ctx, addrOf(a.listeners.peer), a.security.peerClient()); err != nil || id.Name != "a" {
		t.Errorf("the peer port answers %v, %v to a node's certificate", id, err)
	}

	conn, err := grpc.NewClient(addrOf(a.listeners.peer), grpc.WithTransportCredentials(a.security.peerClient()))
	must.NoError(t, err)
	defer conn.Close()
	for name, add := range map[string]*weirv1.GossipKeysRequest{
		"a key":        {Action: weirv1.KeyAction_KEY_ACTION_ADD, Key: gossipKey(9)},
		"no key":       {Action: weirv1.KeyAction_KEY_ACTION_REMOVE, Id: "0"},
		"another step": {Action: weirv1.KeyAction_KEY_ACTION_USE, Id: a.cluster.Keys()[0].ID},
	} {
		for _, proof := range []string{"", "guessed"} {
			ctx := metadata.AppendToOutgoingContext(ctx, "weir-gossip-proof-bin", proof)
			_, err := peerv1.NewGossipKeysClient(conn).Apply(ctx, add)
			expect.True(t, status.Code(err) == codes.PermissionDenied && len(a.cluster.Keys()) == 1,
				"the gossip keys, %s: %v, %v", name, err, a.cluster.Keys())
		}
	}
	refusedAt(t, a, "peer", "no_gossip_key")

	pair := must.Value(tls.LoadX509KeyPair(cfg.Security.PeerTLSCertFile, cfg.Security.PeerTLSKeyFile))(t)
	stolen := &tls.Config{InsecureSkipVerify: true, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return &pair, nil // whichever authorities are asked for
	}}
	err = askStatus(t, a, credentials.NewTLS(stolen))
	expect.Equal(t, status.Code(err), codes.Unavailable, "over gRPC: %v", err)
	refusedAt(t, a, "grpc", "unknown_authority")
	transport := &http.Transport{TLSClientConfig: stolen, DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Get("https://" + addrOf(a.listeners.http) + "/v1/status")
	if err == nil {
		resp.Body.Close()
		t.Errorf("over HTTP: %s", resp.Status)
	}
	refusedAt(t, a, "http", "unknown_authority")

	cfg = testConfig(t, "thief")
	cfg.Security, cfg.Join = made(dir), []string{a.view().Self.GossipAddr}
	cfg.Security.GossipKeyFile = made(other).GossipKeyFile
	thief := mustStart(t, cfg)
	testkit.Eventually(t, "the thief's gossip to be denied", func() bool {
		return strings.Contains(metricsOf(t, a), `weir_access_denied_total{listener="gossip",reason="gossip_key"}`)
	})
	ready, _ := thief.Ready()
	expect.True(t, !ready && len(a.view().Members) == 1, "ready %v, members %+v", ready, a.view().Members)
	select {
	case <-a.Failed():
		t.Errorf("the node ended: %v", a.Err())
	default:
	}
}

package node

import (
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/weirlimit/weir/internal/reload"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

// TestCallersCertificateInForce: over HTTP, a unary call and a stream of checks, a caller is answered on an open connection for as long
// as its certificate is good, and no longer.
func TestCallersCertificateInForce(t *testing.T) {
	t.Parallel()
	a, b := certstest.NewAuthority(t, "a"), certstest.NewAuthority(t, "b")
	for name, c := range map[string]struct {
		end    func(t *testing.T, n *Node, skew *atomic.Int64, ca string)
		reason string
	}{
		"expired": {func(_ *testing.T, _ *Node, skew *atomic.Int64, _ string) { skew.Store(int64(2 * time.Hour)) }, reload.Expired},
		"authority removed": {func(t *testing.T, n *Node, _ *atomic.Int64, ca string) {
			must.NoError(t, os.WriteFile(ca, b.PEM, 0o600))
			n.Reload()
		}, reload.UnknownAuthority},
	} {
		t.Run(name, func(t *testing.T) {
			var skew atomic.Int64
			cfg := testConfig(t, "node")
			cfg.Security.useTLS(filesOf(t, a, testLeaf))
			cfg.Now = func() time.Time { return time.Now().Add(time.Duration(skew.Load())) }
			n := mustSettle(t, cfg)
			pair := a.Pair(certstest.Leaf{DNS: []string{"caller.test"}, NotAfter: time.Now().Add(time.Hour)})
			config := &tls.Config{RootCAs: a.Pool(), Certificates: []tls.Certificate{pair}}

			conn := must.Value(grpc.NewClient(addrOf(n.listeners.grpc), grpc.WithTransportCredentials(credentials.NewTLS(config))))(t)
			defer conn.Close()
			streaming := must.Value(grpc.NewClient(addrOf(n.listeners.grpc), grpc.WithTransportCredentials(credentials.NewTLS(config))))(t)
			defer streaming.Close()
			stream := must.Value(weirv1.NewLimiterClient(streaming).CheckStream(t.Context()))(t)
			transport := &http.Transport{TLSClientConfig: config.Clone()}
			defer transport.CloseIdleConnections()
			web := &http.Client{Transport: transport}
			ways := map[string]func() error{
				"unary": func() error {
					_, err := weirv1.NewLimiterClient(conn).Status(t.Context(), &weirv1.StatusRequest{})
					return err
				},
				"stream": func() error {
					err := stream.Send(&weirv1.CheckStreamRequest{Define: []*weirv1.StreamTarget{{Policy: "login"}}, Keys: []byte("k"), KeyLengths: []uint32{1}})
					if err == nil {
						_, err = stream.Recv()
					}
					return err
				},
				"http": func() error {
					resp, err := web.Get("https://" + addrOf(n.listeners.http) + "/v1/status")
					if err != nil {
						return err
					}
					defer resp.Body.Close()
					if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
						return fmt.Errorf("%d, %w", resp.StatusCode, err)
					}
					return nil
				},
			}
			for range 2 {
				for way, ask := range ways {
					must.NoError(t, ask(), "%s", way)
				}
			}
			c.end(t, n, &skew, cfg.Security.TLSClientCAFile)
			for way, ask := range ways {
				testkit.Eventually(t, way+" to be cut off", func() bool { return ask() != nil })
			}
			refusedAt(t, n, "grpc", c.reason)
			refusedAt(t, n, "http", c.reason)
		})
	}
}

// TestPeersCertificateInForce: a node goes on with the others on open connections for as long as it takes their certificates to be
// good, and no longer: neither as the one that asks nor as the one that is asked.
func TestPeersCertificateInForce(t *testing.T) {
	t.Parallel()
	a := certstest.NewAuthority(t, "a")
	var skew atomic.Int64
	nodes := secureCluster(t, slog.New(slog.DiscardHandler), a, func(i int, cfg *Config) {
		cfg.Timeout = time.Second
		if i == 0 {
			cfg.Now = func() time.Time { return time.Now().Add(time.Duration(skew.Load())) }
		}
	})
	// Of so many keys each node has some, and its neighbour asks it.
	fresh := 0
	unanswered := func(n *Node) bool {
		for range 60 {
			if fresh++; check(t, n, fmt.Sprint("key-", fresh)).FailedOpen {
				return true
			}
		}
		return false
	}
	for _, n := range nodes {
		must.True(t, !unanswered(n), "%s is not answered", n.cfg.Name)
	}
	skew.Store(int64(13 * time.Hour))
	testkit.Eventually(t, "the first to ask in vain", func() bool { return unanswered(nodes[0]) })
	testkit.Eventually(t, "the second to ask in vain", func() bool { return unanswered(nodes[1]) })
	refusedAt(t, nodes[0], "peer", reload.Expired)
}

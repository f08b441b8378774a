package node

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/internal/control"
	"github.com/weirlimit/weir/internal/reload"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

// makeSecrets makes secrets in directories.
func makeSecrets(t *testing.T, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		c := control.SecretsConfig{Namespace: "weir", Service: "weir", PeerName: "weir-node", Days: 365}
		_, err := control.WriteSecrets(dir, c, time.Now(), false)
		must.NoError(t, err)
	}
}

// made is what nodes take of a directory that weir secrets has made.
func made(dir string) Security {
	var s Security
	at := func(name string) string { return filepath.Join(dir, name) }
	s.TLSCertFile, s.TLSKeyFile, s.TLSClientCAFile = at("weir-callers-tls/tls.crt"), at("weir-callers-tls/tls.key"),
		at("weir-callers-tls/ca.crt")
	s.PeerTLSCertFile, s.PeerTLSKeyFile, s.PeerTLSCAFile, s.PeerTLSName = at("weir-nodes-tls/tls.crt"),
		at("weir-nodes-tls/tls.key"), at("weir-nodes-tls/ca.crt"), "weir-node"
	s.AccessFile, s.GossipKeyFile, s.ClusterSecretFile = at("weir-access/access.yaml"), at("weir-cluster/gossip-keys"),
		at("weir-cluster/secret")
	return s
}

// TestSecureBeyondLoopback: a node whose ports others can reach starts with all that keeps strangers out, or says each
// flag that is missing, or is told that it need not.
func TestSecureBeyondLoopback(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "made")
	makeSecrets(t, dir)
	const (
		callers = "access-file or tls-client-ca-file"
		nodes   = "peer-tls-cert-file, peer-tls-key-file, peer-tls-ca-file and peer-tls-name"
		gossip  = "gossip-key-file"
		secret  = "cluster-secret-file"
	)
	for _, c := range []struct {
		name    string
		change  func(*Config)
		missing []string // all of them: none, and it starts
	}{
		{"nothing", func(*Config) {}, []string{callers, nodes, gossip, secret}},
		{"on loopback", func(c *Config) { c.Bind = "127.0.0.2" }, nil},
		{"told", func(c *Config) { c.Security.Insecure = true }, nil},
		{"all", func(c *Config) { c.Security = made(dir) }, nil},
		{"certificates of callers", func(c *Config) { c.Security = made(dir); c.Security.AccessFile = "" }, nil},
		{"no access file", func(c *Config) { c.Security = made(dir); c.Security.AccessFile, c.Security.TLSClientCAFile = "", "" }, []string{callers}},
		{"no peer TLS", func(c *Config) {
			c.Security = made(dir)
			c.Security.PeerTLSCertFile, c.Security.PeerTLSKeyFile, c.Security.PeerTLSCAFile,
				c.Security.PeerTLSName = "", "", "", ""
		}, []string{nodes}},
		{"no gossip key", func(c *Config) { c.Security = made(dir); c.Security.GossipKeyFile = "" }, []string{gossip}},
		{"no secret of the cluster", func(c *Config) { c.Security = made(dir); c.Security.ClusterSecretFile = "" },
			[]string{secret}},
		{"alone", func(c *Config) { c.GossipPort, c.PeerPort = PortOff, PortOff }, []string{callers}},
		{"alone, without callers", func(c *Config) {
			c.GossipPort, c.PeerPort, c.HTTPPort, c.GRPCPort = PortOff, PortOff, PortOff, PortOff
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := testConfig(t, "node")
			cfg.Bind, cfg.Advertise = "0.0.0.0", "127.0.0.1"
			c.change(&cfg)
			n, err := Start(t.Context(), cfg)
			if err == nil {
				n.Stop()
			}
			must.Equal(t, (err != nil), (len(c.missing) > 0), "error %v, want one that names %q", err, c.missing)
			for _, flags := range []string{callers, nodes, gossip, secret} {
				named := err != nil && strings.Contains(err.Error(), flags)
				want := strings.Contains(strings.Join(c.missing, "\n"), flags)
				expect.True(t, named == want, "%s: named %v, want %v: %v", flags, named, want, err)
			}
			expect.True(t, err == nil || strings.HasPrefix(err.Error(), "bind: ") &&
				strings.Contains(err.Error(), "insecure"), "the message is %v", err)
		})
	}
}

// TestStolenGossipKey: who has the gossip key and the cluster's secret, but no certificate of the nodes' authority, is
// no member, takes no partition, and is not ready; the nodes go on.
func TestStolenGossipKey(t *testing.T) {
	t.Parallel()
	dir, other := filepath.Join(t.TempDir(), "made"), filepath.Join(t.TempDir(), "other")
	makeSecrets(t, dir, other)
	nodes := startCluster(t, "a b", func(_ int, cfg *Config) { cfg.Security = made(dir) })
	cfg := testConfig(t, "thief")
	cfg.Security, cfg.Join = made(dir), []string{nodes[0].GossipAddr()}
	others := made(other)
	cfg.Security.usePeerTLS(others.peerTLS(), "weir-node")
	thief := mustStart(t, cfg)
	testkit.Eventually(t, "a has asked the thief in vain", func() bool { // who therefore does not tell of it
		return strings.Contains(metricsOf(t, nodes[0]),
			`weir_access_denied_total{listener="gossip",reason="unverified"}`)
	})
	testkit.Eventually(t, "the thief says why it is not ready", func() bool {
		ready, why := thief.Ready()
		return !ready && strings.Contains(why, "none has answered on its peer port")
	})
	for _, n := range nodes {
		v := n.view()
		expect.True(t, v.Member("thief") == nil && len(v.Members) == 2, "%s has members %+v", n.cfg.Name, v.Members)
		select {
		case <-n.Failed():
			t.Errorf("%s: %v", n.cfg.Name, n.Err())
		default:
		}
	}
}

// TestCallersCertificateInForce: over HTTP, a unary call and a stream of checks, a caller is answered on an open
// connection for as long as its certificate is good, and no longer.
func TestCallersCertificateInForce(t *testing.T) {
	t.Parallel()
	a, b := certstest.NewAuthority(t, "a"), certstest.NewAuthority(t, "b")
	for name, c := range map[string]struct {
		end    func(t *testing.T, n *Node, skew *atomic.Int64, ca string)
		reason string
	}{
		"expired": {func(_ *testing.T, _ *Node, skew *atomic.Int64, _ string) { skew.Store(int64(2 * time.Hour)) },
			reload.Expired},
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

			conn := must.Value(grpc.NewClient(addrOf(n.listeners.grpc),
				grpc.WithTransportCredentials(credentials.NewTLS(config))))(t)
			defer conn.Close()
			streaming := must.Value(grpc.NewClient(addrOf(n.listeners.grpc),
				grpc.WithTransportCredentials(credentials.NewTLS(config))))(t)
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
					err := stream.Send(&weirv1.CheckStreamRequest{Define: []*weirv1.StreamTarget{{Policy: "login"}},
						Keys: []byte("k"), KeyLengths: []uint32{1}})
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

// TestPeersCertificateInForce: a node goes on with the others on open connections for as long as it takes their
// certificates to be good, and no longer: neither as the one that asks nor as the one that is asked.
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

func TestReadSecret(t *testing.T) {
	const secret = "0123456789abcdef0123456789abcdef"
	key := func(content string) ring.HashKey {
		t.Helper()
		return must.Value(readSecret(testkit.WriteFile(t, "secret", content)))(t)
	}
	// Nodes of different builds must agree: this value, worked out with another HKDF, never changes.
	got, want := hex.EncodeToString(key(secret).Bytes()), "2101ffdecc97c08b97fb69c47234600e"
	expect.True(t, got == want, "%s, was %s", got, want)
	expect.Equal(t, key(secret), key(" "+secret+"\n"), "space around the secret counts")
	expect.True(t, key(secret) != key(secret+"0"), "different secrets, one key")
	_, err := readSecret(testkit.WriteFile(t, "secret", secret[:minSecret-1]))
	expect.True(t, err != nil && !strings.Contains(err.Error(), secret[:minSecret-1]), "%v", err)
}

// topologyOf asks a node who owns which keys.
func topologyOf(t *testing.T, n *Node, token string) (*weirv1.TopologyResponse, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(bearer(t, token))
	defer cancel()
	stream := must.Value(weirv1.NewLimiterClient(dialed(t, n)).CheckStream(ctx))(t)
	must.NoError(t, stream.Send(&weirv1.CheckStreamRequest{Topology: true}))
	out, err := stream.Recv()
	if err == nil && out.Error != nil {
		err = status.Error(codes.Code(out.Error.Code), out.Error.Message)
	}
	return out.GetTopology(), err
}

// The hash key goes to callers with the role topology, and nowhere else.
func TestHashKeyIsToldToWhoMayKnow(t *testing.T) {
	const secret = "0123456789abcdef0123456789abcdef"
	file := testkit.WriteFile(t, "secret", secret)
	key := must.Value(readSecret(file))(t)
	n, shop, all, book := withAccess(t, func(cfg *Config) { cfg.Security.ClusterSecretFile = file })
	told, err := topologyOf(t, n, all)
	expect.True(t, err == nil && string(told.GetHashKey()) == string(key.Bytes()) &&
		told.GetRingSettings() == ring.SettingsFingerprint(key), "%v, %v", told, err)
	told, err = topologyOf(t, n, shop)
	expect.Equal(t, status.Code(err), codes.PermissionDenied, "%v, %v", told, err)
	seen := book.String() + metricsOf(t, n)
	for _, path := range []string{"/v1/status", "/v1/policies", "/readyz", "/healthz"} {
		_, page := send(t, n, "GET", path, all, "")
		seen += page
	}
	for _, form := range []string{secret, string(key.Bytes()), hex.EncodeToString(key.Bytes()),
		base64.StdEncoding.EncodeToString(key.Bytes()), fmt.Sprint(key.Bytes())} {
		expect.True(t, !strings.Contains(seen, form), "%q is in what the node says", form)
	}
}

// Without gossip a node needs no secret for keys that nobody can aim.
func TestNodesWithoutGossipHaveHashKeysOfTheirOwn(t *testing.T) {
	t.Parallel()
	var keys []string
	for _, gossip := range []Port{PortOff, PortOff, PortAny} {
		cfg := testConfig(t, "node")
		if cfg.GossipPort = gossip; gossip == PortOff {
			cfg.PeerPort = PortOff
		}
		n := mustSettle(t, cfg)
		told := must.Value(topologyOf(t, n, ""))(t)
		keys = append(keys, string(told.GetHashKey()))
	}
	expect.True(t, len(keys[0]) == ring.HashKeySize && len(keys[1]) == ring.HashKeySize && keys[0] != keys[1] &&
		keys[2] == "", "%d, %d and %d bytes", len(keys[0]), len(keys[1]), len(keys[2]))
}

// TestClientKnowsOwnersUnderASecret: once it has learned the ring, a client asks owners, and nodes forward nothing.
func TestClientKnowsOwnersUnderASecret(t *testing.T) {
	t.Parallel()
	file := testkit.WriteFile(t, "secret", "0123456789abcdef0123456789abcdef")
	nodes := startCluster(t, "a b", func(_ int, cfg *Config) { cfg.Security.ClusterSecretFile = file })
	c := must.Value(client.Dial(t.Context(), nodes[0].GRPCAddr()+","+nodes[1].GRPCAddr(),
		client.WithTimeout(testkit.Patience)))(t)
	t.Cleanup(func() { c.Close() })
	forwarded := func() (sum float64) {
		for _, n := range nodes {
			for _, m := range regexp.MustCompile(
				`(?m)^weir_forwarded_total{answered="true"} (.*)$`).FindAllStringSubmatch(metricsOf(t, n), -1) {
				v := must.Value(strconv.ParseFloat(m[1], 64))(t)
				sum += v
			}
		}
		return sum
	}
	round := 0
	testkit.Eventually(t, "the owners to be asked", func() bool {
		before := forwarded()
		round++
		for i := range 50 {
			_, err := c.Policy("login").Allow(t.Context(), fmt.Sprintf("%d-%d", round, i))
			must.NoError(t, err)
		}
		return forwarded() == before
	})
}

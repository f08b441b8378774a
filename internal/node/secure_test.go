package node

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/internal/control"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
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
	s.TLSCertFile, s.TLSKeyFile, s.TLSClientCAFile = at("weir-callers-tls/tls.crt"), at("weir-callers-tls/tls.key"), at("weir-callers-tls/ca.crt")
	s.PeerTLSCertFile, s.PeerTLSKeyFile, s.PeerTLSCAFile, s.PeerTLSName = at("weir-nodes-tls/tls.crt"), at("weir-nodes-tls/tls.key"), at("weir-nodes-tls/ca.crt"), "weir-node"
	s.AccessFile, s.GossipKeyFile, s.ClusterSecretFile = at("weir-access/access.yaml"), at("weir-cluster/gossip-keys"), at("weir-cluster/secret")
	return s
}

// TestSecureBeyondLoopback: a node whose ports others can reach starts with all that keeps strangers out, or says each flag that
// is missing, or is told that it need not.
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
			c.Security.PeerTLSCertFile, c.Security.PeerTLSKeyFile, c.Security.PeerTLSCAFile, c.Security.PeerTLSName = "", "", "", ""
		}, []string{nodes}},
		{"no gossip key", func(c *Config) { c.Security = made(dir); c.Security.GossipKeyFile = "" }, []string{gossip}},
		{"no secret of the cluster", func(c *Config) { c.Security = made(dir); c.Security.ClusterSecretFile = "" }, []string{secret}},
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

// TestStolenGossipKey: who has the gossip key and the cluster's secret, but no certificate of the nodes' authority, is no member,
// takes no partition, and is not ready; the nodes go on.
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
		return strings.Contains(metricsOf(t, nodes[0]), `weir_access_denied_total{listener="gossip",reason="unverified"}`)
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

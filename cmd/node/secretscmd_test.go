package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/auth"
)

// secrets has the command make secrets, and returns what it says.
func secrets(args ...string) (status int, stdout, stderr string) {
	var out, errs bytes.Buffer
	status = run(append([]string{"secrets"}, args...), &out, &errs)
	return status, out.String(), errs.String()
}

func TestSecrets(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made")
	status, listed, stderr := secrets(dir, "--namespace", "shop", "--names", "weir.example.org,192.0.2.7")
	if status != exitOK {
		t.Fatal(stderr)
	}
	contents := make(map[string]string)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if perm := info.Mode().Perm(); perm&0o077 != 0 {
			t.Errorf("%s has mode %o", path, perm)
		}
		if d.IsDir() {
			return nil
		}
		if !strings.Contains(listed, path+"\n") {
			t.Errorf("%s is not listed", path)
		}
		content, err := os.ReadFile(path)
		contents[path] = string(content)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(dir, name) }

	// What is there stays, to the byte, unless --force says otherwise.
	if status, _, stderr := secrets(dir); status != exitError || !strings.Contains(stderr, "--force") || !strings.Contains(stderr, dir) {
		t.Errorf("again: status %d, %s", status, stderr)
	}
	for path, content := range contents {
		if now, err := os.ReadFile(path); err != nil || string(now) != content {
			t.Errorf("%s has changed (%v)", path, err)
		}
	}
	if err := os.Remove(at("kustomization.yaml")); err != nil {
		t.Fatal(err)
	}
	if status, _, _ := secrets(dir); status != exitError {
		t.Error("written although only one of the files is gone")
	}
	if _, err := os.Stat(at("kustomization.yaml")); err == nil {
		t.Error("a file is written although others are in the way")
	}

	// Certificates are good under the names that callers use, tokens are those of the access file.
	for _, c := range []struct {
		secret, authority string
		names             []string
		usages            []x509.ExtKeyUsage
	}{
		{"weir-callers-tls", "authorities/callers.crt", []string{"weir", "weir.shop.svc", "weir-headless.shop", "weir-0.weir-headless.shop.svc.cluster.local",
			"weir.example.org", "192.0.2.7", "localhost", "127.0.0.1"}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}},
		{"weir-nodes-tls", "authorities/nodes.crt", []string{"weir-node"}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}},
	} {
		pair, err := tls.LoadX509KeyPair(at(c.secret+"/tls.crt"), at(c.secret+"/tls.key"))
		if err != nil {
			t.Fatal(err)
		}
		roots := x509.NewCertPool()
		if contents[at(c.authority)] != contents[at(c.secret+"/ca.crt")] || !roots.AppendCertsFromPEM([]byte(contents[at(c.authority)])) {
			t.Fatalf("%s: its ca.crt is not %s", c.secret, c.authority)
		}
		for _, usage := range c.usages {
			for _, name := range c.names {
				if _, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots, KeyUsages: []x509.ExtKeyUsage{usage}}); err != nil {
					t.Errorf("%s: %v", c.secret, err)
				}
			}
		}
		if left := time.Until(pair.Leaf.NotAfter); left < 364*24*time.Hour || left > 366*24*time.Hour {
			t.Errorf("%s is good for %v", c.secret, left)
		}
	}
	file := contents[at("weir-access/access.yaml")]
	if _, err := auth.Parse("access.yaml", []byte(file)); err != nil {
		t.Error(err)
	}
	for _, token := range []string{"tokens/caller", "tokens/operator", "weir-metrics/token"} {
		if !strings.Contains(file, auth.Hash(contents[at(token)])) || strings.Contains(file, contents[at(token)]) {
			t.Errorf("the access file lacks the hash of %s, or has the token", token)
		}
	}

	if status, _, stderr := secrets(dir, "--force"); status != exitOK {
		t.Errorf("--force: %s", stderr)
	}
	if now, err := os.ReadFile(at("weir-cluster/secret")); err != nil || string(now) == contents[at("weir-cluster/secret")] {
		t.Errorf("--force leaves the secret as it was (%v)", err)
	}
	for flag, value := range map[string]string{"--namespace": "a/b", "--service": "", "--days": "0", "--peer-tls-name": "a b"} {
		if status, _, stderr := secrets(filepath.Join(t.TempDir(), "x"), flag, value); status != exitError || !strings.Contains(stderr, flag) {
			t.Errorf("%s %q: status %d, %s", flag, value, status, stderr)
		}
	}
}

// made is what nodes take of a directory that weir secrets has made.
func made(dir string) securityConfig {
	var s securityConfig
	at := func(name string) string { return filepath.Join(dir, name) }
	s.TLS.Cert, s.TLS.Key, s.TLS.CA = at("weir-callers-tls/tls.crt"), at("weir-callers-tls/tls.key"), at("weir-callers-tls/ca.crt")
	s.PeerTLS.Cert, s.PeerTLS.Key, s.PeerTLS.CA, s.PeerName = at("weir-nodes-tls/tls.crt"), at("weir-nodes-tls/tls.key"), at("weir-nodes-tls/ca.crt"), "weir-node"
	s.AccessFile, s.GossipKeyFile, s.SecretFile = at("weir-access/access.yaml"), at("weir-cluster/gossip-keys"), at("weir-cluster/secret")
	return s
}

// TestSecureBeyondLoopback: a node whose ports others can reach starts with all that keeps strangers out, or says each flag that
// is missing, or is told that it need not.
func TestSecureBeyondLoopback(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made")
	if status, _, stderr := secrets(dir); status != exitOK {
		t.Fatal(stderr)
	}
	const (
		callers = "--access-file or --tls-client-ca-file"
		nodes   = "--peer-tls-cert-file, --peer-tls-key-file, --peer-tls-ca-file and --peer-tls-name"
		gossip  = "--gossip-key-file"
		secret  = "--cluster-secret-file"
	)
	for _, c := range []struct {
		name    string
		change  func(*nodeConfig)
		missing []string // all of them: none, and it starts
	}{
		{"nothing", func(*nodeConfig) {}, []string{callers, nodes, gossip, secret}},
		{"on loopback", func(c *nodeConfig) { c.Bind = "127.0.0.2" }, nil},
		{"told", func(c *nodeConfig) { c.Security.Insecure = true }, nil},
		{"all", func(c *nodeConfig) { c.Security = made(dir) }, nil},
		{"certificates of callers", func(c *nodeConfig) { c.Security = made(dir); c.Security.AccessFile = "" }, nil},
		{"no access file", func(c *nodeConfig) { c.Security = made(dir); c.Security.AccessFile, c.Security.TLS.CA = "", "" }, []string{callers}},
		{"no peer TLS", func(c *nodeConfig) {
			c.Security = made(dir)
			c.Security.PeerTLS.Cert, c.Security.PeerTLS.Key, c.Security.PeerTLS.CA, c.Security.PeerName = "", "", "", ""
		}, []string{nodes}},
		{"no gossip key", func(c *nodeConfig) { c.Security = made(dir); c.Security.GossipKeyFile = "" }, []string{gossip}},
		{"no secret of the cluster", func(c *nodeConfig) { c.Security = made(dir); c.Security.SecretFile = "" }, []string{secret}},
		{"alone", func(c *nodeConfig) { c.GossipPort, c.PeerPort = portOff, portOff }, []string{callers}},
		{"alone, without callers", func(c *nodeConfig) {
			c.GossipPort, c.PeerPort, c.HTTPPort, c.GRPCPort = portOff, portOff, portOff, portOff
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := testConfig(t, "node")
			cfg.Bind, cfg.Advertise = "0.0.0.0", "127.0.0.1"
			c.change(&cfg)
			n, err := startNode(t.Context(), cfg)
			if err == nil {
				n.Stop()
			}
			if (err != nil) != (len(c.missing) > 0) {
				t.Fatalf("error %v, want one that names %q", err, c.missing)
			}
			for _, flags := range []string{callers, nodes, gossip, secret} {
				named := err != nil && strings.Contains(err.Error(), flags)
				want := strings.Contains(strings.Join(c.missing, "\n"), flags)
				if named != want {
					t.Errorf("%s: named %v, want %v: %v", flags, named, want, err)
				}
			}
			if err != nil && (!strings.HasPrefix(err.Error(), "--bind: ") || !strings.Contains(err.Error(), "--insecure")) {
				t.Errorf("the message is %v", err)
			}
		})
	}
}

// TestStolenGossipKey: who has the gossip key and the cluster's secret, but no certificate of the nodes' authority, is no member,
// takes no partition, and is not ready; the nodes go on.
func TestStolenGossipKey(t *testing.T) {
	dir, other := filepath.Join(t.TempDir(), "made"), filepath.Join(t.TempDir(), "other")
	for _, d := range []string{dir, other} {
		if status, _, stderr := secrets(d); status != exitOK {
			t.Fatal(stderr)
		}
	}
	cfg := testConfig(t, "a")
	cfg.Security = made(dir)
	a := mustStart(t, cfg)
	join := []string{a.view().Self.GossipAddr}
	cfg = testConfig(t, "b")
	cfg.Security, cfg.Join = made(dir), join
	b := mustStart(t, cfg)
	awaitSettled(t, a, b)
	cfg = testConfig(t, "thief")
	cfg.Security, cfg.Join = made(dir), join
	cfg.Security.PeerTLS, cfg.Security.PeerName = made(other).PeerTLS, "weir-node"
	thief := mustStart(t, cfg)
	eventually(t, "a has asked the thief in vain", func() bool { // who therefore does not tell of it
		return strings.Contains(metricsOf(t, a), `weir_access_denied_total{listener="gossip",reason="unverified"}`)
	})
	eventually(t, "the thief says why it is not ready", func() bool {
		ready, why := thief.Ready()
		return !ready && strings.Contains(why, "none has answered on its peer port")
	})
	for _, n := range []*node{a, b} {
		if v := n.view(); v.Member("thief") != nil || len(v.Members) != 2 {
			t.Errorf("%s has members %+v", n.cfg.Name, v.Members)
		}
		select {
		case err := <-n.Failed():
			t.Errorf("%s: %v", n.cfg.Name, err)
		default:
		}
	}
}

package cli

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

// runSecrets has the command make secrets, and returns what it says.
func runSecrets(args ...string) (status int, stdout, stderr string) {
	var out, errs bytes.Buffer
	status = run(append([]string{"secrets"}, args...), &out, &errs)
	return status, out.String(), errs.String()
}

func TestSecrets(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made")
	status, listed, stderr := runSecrets(dir, "--namespace", "shop", "--names", "weir.example.org,192.0.2.7")
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
	if status, _, stderr := runSecrets(dir); status != exitError || !strings.Contains(stderr, "--force") || !strings.Contains(stderr, dir) {
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
	if status, _, _ := runSecrets(dir); status != exitError {
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
	callers, err := auth.Parse("access.yaml", []byte(file))
	if err != nil {
		t.Fatal(err)
	}
	const every = auth.RoleCheck | auth.RoleCharge | auth.RoleRefund | auth.RoleRead | auth.RoleTopology | auth.RoleAdmin | auth.RoleKeys | auth.RoleOverrides
	for name, roles := range map[string]auth.Role{"caller": auth.RoleCheck | auth.RoleTopology, "operator": every} {
		c, _ := callers.ByToken(contents[at("tokens/"+name)])
		if c == nil || c.Roles != roles || !c.MayUsePolicy(auth.RoleCheck, "any") || !c.MayUseNamespace(auth.RoleCheck, "any") {
			t.Errorf("%s is %+v, want the roles %v", name, c, roles)
		}
	}
	for _, token := range []string{"tokens/caller", "tokens/operator", "weir-metrics/token"} {
		if !strings.Contains(file, auth.Hash(contents[at(token)])) || strings.Contains(file, contents[at(token)]) {
			t.Errorf("the access file lacks the hash of %s, or has the token", token)
		}
	}

	if status, _, stderr := runSecrets(dir, "--force"); status != exitOK {
		t.Errorf("--force: %s", stderr)
	}
	if now, err := os.ReadFile(at("weir-cluster/secret")); err != nil || string(now) == contents[at("weir-cluster/secret")] {
		t.Errorf("--force leaves the secret as it was (%v)", err)
	}
	for flag, value := range map[string]string{"--namespace": "a/b", "--service": "", "--days": "0", "--peer-tls-name": "a b"} {
		if status, _, stderr := runSecrets(filepath.Join(t.TempDir(), "x"), flag, value); status != exitError || !strings.Contains(stderr, flag) {
			t.Errorf("%s %q: status %d, %s", flag, value, status, stderr)
		}
	}
}

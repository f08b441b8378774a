package cli

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
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
	must.Equal(t, status, exitOK, "%v", stderr)
	contents := make(map[string]string)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		perm := info.Mode().Perm()
		expect.Equal(t, perm&0o077, 0, "%s has mode %o", path, perm)
		if d.IsDir() {
			return nil
		}
		expect.True(t, strings.Contains(listed, path+"\n"), "%s is not listed", path)
		content, err := os.ReadFile(path)
		contents[path] = string(content)
		return err
	})
	must.NoError(t, err)
	at := func(name string) string { return filepath.Join(dir, name) }

	// What is there stays, to the byte, unless --force says otherwise.
	status, _, stderr = runSecrets(dir)
	expect.True(t, status == exitError && strings.Contains(stderr, "--force") && strings.Contains(stderr, dir),
		"again: status %d, %s", status, stderr)
	for path, content := range contents {
		now, err := os.ReadFile(path)
		expect.True(t, err == nil && string(now) == content, "%s has changed (%v)", path, err)
	}
	must.NoError(t, os.Remove(at("kustomization.yaml")))
	status, _, _ = runSecrets(dir)
	expect.Equal(t, status, exitError, "written although only one of the files is gone")
	_, err = os.Stat(at("kustomization.yaml"))
	expect.True(t, err != nil, "a file is written although others are in the way")

	// Certificates are good under the names that callers use, tokens are those of the access file.
	for _, c := range []struct {
		secret, authority string
		names             []string
		usages            []x509.ExtKeyUsage
	}{
		{"weir-callers-tls", "authorities/callers.crt",
			[]string{"weir", "weir.shop.svc", "weir-headless.shop", "weir-0.weir-headless.shop.svc.cluster.local",
				"weir.example.org", "192.0.2.7", "localhost", "127.0.0.1"},
			[]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}},
		{"weir-nodes-tls", "authorities/nodes.crt", []string{"weir-node"},
			[]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}},
	} {
		pair := must.Value(tls.LoadX509KeyPair(at(c.secret+"/tls.crt"), at(c.secret+"/tls.key")))(t)
		roots := x509.NewCertPool()
		must.True(t, contents[at(c.authority)] == contents[at(c.secret+"/ca.crt")] &&
			roots.AppendCertsFromPEM([]byte(contents[at(c.authority)])),
			"%s: its ca.crt is not %s", c.secret, c.authority)
		for _, usage := range c.usages {
			for _, name := range c.names {
				_, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots,
					KeyUsages: []x509.ExtKeyUsage{usage}})
				expect.NoError(t, err, "%s", c.secret)
			}
		}
		left := time.Until(pair.Leaf.NotAfter)
		expect.True(t, left >= 364*24*time.Hour && left <= 366*24*time.Hour, "%s is good for %v", c.secret, left)
	}
	file := contents[at("weir-access/access.yaml")]
	callers := must.Value(auth.Parse("access.yaml", []byte(file)))(t)
	const every = auth.RoleCheck | auth.RoleCharge | auth.RoleRefund | auth.RoleRead | auth.RoleTopology | auth.RoleAdmin | auth.RoleKeys | auth.RoleOverrides
	for name, roles := range map[string]auth.Role{"caller": auth.RoleCheck | auth.RoleTopology, "operator": every} {
		c, _ := callers.ByToken(contents[at("tokens/"+name)])
		expect.True(t, c != nil && c.Roles == roles && c.MayUsePolicy(auth.RoleCheck, "any") &&
			c.MayUseNamespace(auth.RoleCheck, "any"), "%s is %+v, want the roles %v", name, c, roles)
	}
	for _, token := range []string{"tokens/caller", "tokens/operator", "weir-metrics/token"} {
		expect.True(t, strings.Contains(file, auth.Hash(contents[at(token)])) &&
			!strings.Contains(file, contents[at(token)]), "the access file lacks the hash of %s, or has the token",
			token)
	}

	status, _, stderr = runSecrets(dir, "--force")
	expect.Equal(t, status, exitOK, "--force: %s", stderr)
	now, err := os.ReadFile(at("weir-cluster/secret"))
	expect.True(t, err == nil && string(now) != contents[at("weir-cluster/secret")],
		"--force leaves the secret as it was (%v)", err)
	for flag, value := range map[string]string{"--namespace": "a/b", "--service": "", "--days": "0",
		"--names": "a.example b.example", "--peer-tls-name": "a b"} {
		status, _, stderr := runSecrets(filepath.Join(t.TempDir(), "x"), flag, value)
		expect.True(t, status == exitError && strings.Contains(stderr, flag),
			"%s %q: status %d, %s", flag, value, status, stderr)
	}
}

func TestToken(t *testing.T) {
	var out strings.Builder
	must.Equal(t, run([]string{"token"}, &out, io.Discard), exitOK)
	fields := strings.Fields(out.String())
	expect.True(t, len(fields) == 4 && auth.Hash(fields[1]) == fields[3] && len(fields[1]) >= 40, "%q", fields)
	for _, c := range []struct{ args, want string }{
		{"check a --policy p --addr 192.0.2.1:1 --token-file " + testkit.WriteFile(t, "token", "x"),
			"--token-file: the token would be sent to 192.0.2.1:1 in plain text"},
		{"check a --policy p --token-file " + testkit.WriteFile(t, "token", "two tokens"), "must hold one token"},
		{"check a --policy p --token-file /none", "--token-file: open /none"},
		{"run --access-file /none", "--access-file: open /none"},
		{"token -o yaml", "--output: "},
	} {
		var errOut strings.Builder
		code := run(strings.Fields(c.args), io.Discard, &errOut)
		expect.True(t, code == exitError && strings.Contains(errOut.String(), c.want),
			"%s: %d %s", c.args, code, &errOut)
	}
}

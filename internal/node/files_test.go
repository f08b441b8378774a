package node

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

// swapForPipe puts a pipe, which nobody writes to, in the place of a file.
func swapForPipe(t *testing.T, file string) {
	t.Helper()
	must.NoError(t, os.Remove(file))
	must.NoError(t, syscall.Mkfifo(file, 0o600))
}

// TestFilesReplacedByPipes: every file that a node follows may become a pipe. It goes on with what it has, says so, takes the
// file that comes back, and stops.
func TestFilesReplacedByPipes(t *testing.T) {
	t.Parallel()
	var book testkit.Buffer
	ca := certstest.NewAuthority(t, "a")
	cfg := testConfig(t, "node")
	cfg.Logger = book.Logger()
	cfg.Security.useTLS(filesOf(t, ca, certstest.Leaf{DNS: []string{"localhost"}}))
	cfg.Security.usePeerTLS(filesOf(t, ca, certstest.Leaf{DNS: []string{"weir.test"}}), "weir.test")
	cfg.Security.AccessFile = testkit.WriteFile(t, "access.yaml", "callers:\n  - {name: a, identities: [\"cn:a\"], roles: [read]}\n")
	cfg.Security.GossipKeyFile = testkit.WriteFile(t, "keys", "MDEyMzQ1Njc4OWFiY2RlZg==\n")
	n := mustSettle(t, cfg)
	files := map[string]string{
		"policies": cfg.PolicyFile, "certificates": cfg.Security.TLSKeyFile, "peer_certificates": cfg.Security.PeerTLSCAFile,
		"access": cfg.Security.AccessFile, "gossip_keys": cfg.Security.GossipKeyFile,
	}
	must.True(t, len(n.files()) == len(files), "%d files are followed, %d tested", len(n.files()), len(files))
	for _, f := range n.files() {
		name := files[f.name]
		before := must.Value(os.ReadFile(name))(t)
		swapForPipe(t, name)
		n.Reload()
		testkit.Eventually(t, f.name+" to be reported", func() bool { return f.Err() != nil && errors.Is(f.Err(), reload.ErrNotRegular) })
		ready, detail := n.Ready()
		expect.True(t, ready && strings.Contains(detail, f.what+" rejected: ") && strings.Contains(detail, name),
			"ready: %t, %s", ready, detail)
		testkit.Eventually(t, "the log to say so", func() bool { return strings.Contains(book.String(), name+": not a regular file: its mode is prw") })
		must.NoError(t, os.Remove(name))
		must.NoError(t, os.WriteFile(name, before, 0o600))
		testkit.Eventually(t, f.name+" to be taken again", func() bool { return f.Err() == nil })
	}
	for _, name := range files {
		swapForPipe(t, name)
	}
	n.Reload()
	n.Stop() // which returns
}

// TestKeyFilesReadableByOthers: a node says which files with keys everybody on its host may read, when it starts and when one
// is replaced, and starts all the same.
func TestKeyFilesReadableByOthers(t *testing.T) {
	t.Parallel()
	var book testkit.Buffer
	ca := certstest.NewAuthority(t, "a")
	cfg := testConfig(t, "node")
	cfg.Logger = book.Logger()
	cfg.Security.useTLS(filesOf(t, ca, certstest.Leaf{DNS: []string{"localhost"}}))
	cfg.Security.usePeerTLS(filesOf(t, ca, certstest.Leaf{DNS: []string{"weir.test"}}), "weir.test")
	cfg.Security.GossipKeyFile = testkit.WriteFile(t, "keys", "MDEyMzQ1Njc4OWFiY2RlZg==\n")
	cfg.Security.ClusterSecretFile = testkit.WriteFile(t, "secret", "0123456789abcdef\n")
	keys := []string{cfg.Security.TLSKeyFile, cfg.Security.PeerTLSKeyFile, cfg.Security.GossipKeyFile, cfg.Security.ClusterSecretFile}
	modes := []os.FileMode{0o644, 0o640, 0o604, 0o600}
	for i, name := range keys {
		must.NoError(t, os.Chmod(name, modes[i]))
	}
	n := mustSettle(t, cfg)
	said := func(name string) int {
		return strings.Count(book.String(), `msg="key file readable by other users" file=`+name)
	}
	for i, name := range keys {
		want := int(modes[i] & 0o004 / 0o004)
		expect.True(t, said(name) == want, "%s, mode %v: said %d times, want %d", name, modes[i], said(name), want)
	}
	must.NoError(t, os.WriteFile(cfg.Security.GossipKeyFile, []byte("# changed\nMDEyMzQ1Njc4OWFiY2RlZg==\n"), 0o600))
	n.Reload()
	testkit.Eventually(t, "the changed file to be named again", func() bool { return said(cfg.Security.GossipKeyFile) == 2 })
}

package cli

import (
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// testConfig is a node on free loopback ports.
func testConfig(t *testing.T, name string) node.Config {
	return node.Config{
		Name: name, Bind: "127.0.0.1", HTTPPort: node.PortAny, GRPCPort: node.PortAny, GossipPort: node.PortAny,
		PeerPort: node.PortAny,
		Timeout:  10 * time.Second, Grace: 5 * time.Second, Logger: slog.New(slog.DiscardHandler),
		PolicyFile: testkit.WriteFile(t, "policies.yaml",
			"policies:\n  - {name: login, algorithm: sliding_log, limit: 5, window: 1m}\n"),
	}
}

// startReady starts a node, and waits until it is ready.
func startReady(t *testing.T, cfg node.Config) *node.Node {
	t.Helper()
	n := must.Value(node.Start(t.Context(), cfg))(t)
	t.Cleanup(n.Stop)
	select {
	case <-n.Settled():
	case <-n.Failed():
		t.Fatal(n.Err())
	case <-time.After(testkit.Patience):
		_, why := n.Ready()
		t.Fatalf("%s is not ready: %s", cfg.Name, why)
	}
	return n
}

// startSecured starts a node with an access file, and returns the tokens of a caller who may check by the policy login,
// and of one who may do everything.
func startSecured(t *testing.T, change func(*node.Config)) (n *node.Node, shop, all string) {
	t.Helper()
	shop, all = auth.NewToken(), auth.NewToken()
	cfg := testConfig(t, "node")
	cfg.Security.AccessFile = testkit.WriteFile(t, "access.yaml", fmt.Sprintf(`callers:
  - {name: shop, tokens: [%s], roles: [check], policies: [login]}
  - {name: everything, tokens: [%s], roles: [check, refund, read, topology, admin, keys], policies: ["*"], namespaces: ["*"]}
`, auth.Hash(shop), auth.Hash(all)))
	if change != nil {
		change(&cfg)
	}
	return startReady(t, cfg), shop, all
}

// TestReserveID: reserve -o id prints what commit takes and nothing else, and nothing at all when it is refused.
func TestReserveID(t *testing.T) {
	addr := startReady(t, testConfig(t, "a")).GRPCAddr()
	weir := func(args ...string) (int, string) {
		var out, errs strings.Builder
		code := run(append(args, "--policy", "login", "--addr", addr, "--timeout", "20s"), &out, &errs)
		return code, strings.TrimSuffix(out.String(), "\n") + errs.String()
	}
	code, id := weir("reserve", "alice", "--cost", "5", "-o", "id")
	must.True(t, code == exitOK && len(id) == 32 && strings.Trim(id, "0123456789abcdef") == "", "%d: %q", code, id)
	code, out := weir("reserve", "alice", "-o", "id")
	expect.True(t, code == exitNegative && out == "", "refused: %d: %q", code, out)
	code, out = weir("commit", "alice", "--reservation", id, "--cost", "2")
	expect.True(t, code == exitOK && strings.Contains(out, "refunded=3"), "%d: %q", code, out)
}

// TestOverride sets, lists and deletes overrides by the commands that an operator gives.
func TestOverride(t *testing.T) {
	n := startReady(t, testConfig(t, "node"))
	for _, c := range []struct {
		args     []string
		code     int
		out, err string // a part of it
	}{
		{[]string{"list"}, exitOK, "POLICY  FOR", ""},
		{[]string{"set", "login", "al\nice", `{"limit":500}`}, exitOK,
			"login key \"al\\nice\": {\"limit\":500}\n1 of 1 members have it, 0 on disk\n", ""},
		{[]string{"set", "login", "al\nice", `{"blocked":true}`}, exitOK, `{"blocked":true}, was {"limit":500}`, ""},
		{[]string{"set", "--prefix", "login", "vip-", `{"unlimited":true}`, "-o", "json"}, exitOK, `"prefix": "vip-"`,
			""},
		{[]string{"list", "--policy", "login"}, exitOK, `login   prefix "vip-"  {"unlimited":true}  `, ""},
		{[]string{"list", "-o", "json"}, exitOK, `"version": "2@node"`, ""},
		{[]string{"set", "login", "k", `{"limit":0}`}, exitError, "", "settings.limit: must be from 1 to"},
		{[]string{"set", "login", "k"}, exitError, "", "SETTINGS: is missing"},
		{[]string{"delete", "login", "al\nice"}, exitOK, "deleted, was", ""},
		{[]string{"delete", "login", "al\nice"}, exitError, "", "key: there is no override for it"},
		{[]string{"delete", "--prefix", "login", "vip-"}, exitOK, `login prefix "vip-": deleted`, ""},
	} {
		var out, errs strings.Builder
		code := run(append(append([]string{"override"}, c.args...), "--timeout=20s", "--addr", n.GRPCAddr()), &out,
			&errs)
		expect.True(t, code == c.code && strings.Contains(out.String(), c.out) &&
			strings.Contains(errs.String(), c.err) && (c.err == "") == (errs.String() == ""),
			"%q: exit status %d\n%s\n%s", c.args, code, &out, &errs)
	}
}

// TestGossipKeys changes the key of a node by the commands that an operator gives.
func TestGossipKeys(t *testing.T) {
	const oldKey, newKey = "MDEyMzQ1Njc4OWFiY2RlZg==", "ZmVkY2JhOTg3NjU0MzIxMA=="
	oldID, newID := cluster.KeyID([]byte("0123456789abcdef")), cluster.KeyID([]byte("fedcba9876543210"))
	cfg := testConfig(t, "node")
	cfg.Security.GossipKeyFile = testkit.WriteFile(t, "gossip.keys", oldKey+"\n")
	n := startReady(t, cfg)
	for _, c := range []struct {
		args    []string
		code    int
		out     string // parts, in order, separated by blanks
		message string
	}{
		{[]string{"list"}, exitOK, "MEMBER node " + oldID + " yes yes", ""},
		{[]string{"use", newID}, exitError, "", "does not have it: it would be cut off"},
		{[]string{"remove", oldID}, exitError, "", "uses it: it would be cut off"},
		{[]string{"add", testkit.WriteFile(t, "bad.key", "no key")}, exitError, "", "is not one key in base64"},
		{[]string{"add", testkit.WriteFile(t, "short.key", "AAAA")}, exitError, "", "it must have 16, 24 or 32"},
		{[]string{"add", testkit.WriteFile(t, "new.key", newKey)}, exitOK, oldID + " yes yes " + newID + " - -", ""},
		{[]string{"use", newID}, exitOK, newID + " yes -", ""},
		{[]string{"remove", oldID}, exitOK, newID + " yes -", ""},
		{[]string{"list", "-o", "json"}, exitOK, newID + " true false", ""},
	} {
		var out, errs strings.Builder
		code := run(append(append([]string{"gossip-keys"}, c.args...), "--addr", n.GRPCAddr()), &out, &errs)
		rest := out.String()
		for part := range strings.FieldsSeq(c.out) {
			_, after, ok := strings.Cut(rest, part)
			if !ok {
				t.Errorf("%s: %s, want %s", c.args, &out, c.out)
				break
			}
			rest = after
		}
		expect.True(t, code == c.code && strings.Contains(errs.String(), c.message) &&
			(c.message == "") == (errs.String() == ""), "%s: exit status %d, %s", c.args, code, &errs)
	}
	// A key may be typed: the time to wait for the node begins when it has been read.
	root := newRoot()
	root.SetArgs([]string{"gossip-keys", "add", "-", "--timeout", "1s", "--addr", n.GRPCAddr()})
	root.SetIn(&typed{text: strings.NewReader(oldKey)})
	root.SetOut(io.Discard)
	expect.NoError(t, root.ExecuteContext(t.Context()), "a key that is typed slowly")
}

// typed is a text that takes a while to begin.
type typed struct {
	text  io.Reader
	begun bool
}

// Read implements io.Reader.
func (r *typed) Read(p []byte) (int, error) {
	if !r.begun {
		time.Sleep(1100 * time.Millisecond)
		r.begun = true
	}
	return r.text.Read(p)
}

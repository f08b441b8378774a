package cli

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// testConfig is a node on free loopback ports.
func testConfig(t *testing.T, name string) node.Config {
	return node.Config{
		Name: name, Bind: "127.0.0.1", HTTPPort: node.PortAny, GRPCPort: node.PortAny, GossipPort: node.PortAny, PeerPort: node.PortAny,
		Timeout: 10 * time.Second, Grace: 5 * time.Second, Logger: slog.New(slog.DiscardHandler),
		PolicyFile: testkit.WriteFile(t, "policies.yaml", "policies:\n  - {name: login, algorithm: sliding_log, limit: 5, window: 1m}\n"),
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

// startSecured starts a node with an access file, and returns the tokens of a caller who may check by the policy login, and of one who
// may do everything.
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

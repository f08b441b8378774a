package main

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/node"
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
	n, err := node.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
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

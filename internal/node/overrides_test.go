package node

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/internal/control"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

// changed is the answer to a change.
type changed struct {
	Members []struct {
		Name         string
		Has, Durable bool
		Error        string
	}
}

// override sets one, and returns how many members have it, and how many on disk.
func override(t *testing.T, n *Node, body string) (has, durable int) {
	t.Helper()
	resp, text := send(t, n, "PUT", "/v1/overrides", "", body)
	must.True(t, resp.StatusCode == http.StatusOK, "PUT %s: %d %s", body, resp.StatusCode, text)
	var c changed
	must.NoError(t, json.Unmarshal([]byte(text), &c))
	for _, m := range c.Members {
		if m.Has {
			has++
		}
		if m.Durable {
			durable++
		}
	}
	return has, durable
}

// TestOverridesOfACluster: what is set on one node is in force on all when it is answered, for keys that any of them
// owns; a node that joins has it before it is ready; a reload of the file leaves it in force; what the file does not
// suit is kept and shown as inactive.
func TestOverridesOfACluster(t *testing.T) {
	t.Parallel()
	awaitTurn(t)
	file := testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(onePolicy, 5))
	start := func(name string, join ...string) *Node {
		cfg := testConfig(t, name)
		cfg.PolicyFile, cfg.Join = file, join
		if name != "c" {
			cfg.DataDir = filepath.Join(t.TempDir(), "data")
		}
		return mustStart(t, cfg)
	}
	a := start("a")
	awaitSettled(t, a)
	seed := a.GossipAddr()
	b := start("b", seed)
	awaitSettled(t, b)
	testkit.Eventually(t, "a sees b", func() bool { return len(a.view().Members) == 2 })
	limits := func(n *Node, prefix string, want int64) {
		t.Helper()
		for i := range 8 {
			if d := check(t, n, fmt.Sprint(prefix, i)); d.Limit != want || d.Degraded || d.FailedOpen {
				t.Fatalf("%s decides %s%d by %d, want %d", n.cfg.Name, prefix, i, d.Limit, want)
			}
		}
	}
	limits(a, "vip-", 5)
	has, durable := override(t, a, `{"policy":"login","prefix":"vip-","settings":{"limit":50}}`)
	expect.True(t, has == 2 && durable == 2, "%d have it, %d on disk", has, durable)
	limits(a, "vip-", 50)
	limits(b, "vip-", 50)
	c := start("c", seed)
	awaitSettled(t, c)
	expect.Equal(t, c.overrides.book.Digest(), a.overrides.book.Digest(),
		"c is ready, and has not the others' overrides")
	limits(c, "vip-", 50)
	testkit.Eventually(t, "all see c", func() bool { return len(a.view().Members) == 3 && len(b.view().Members) == 3 })
	has, durable = override(t, c, `{"policy":"login","prefix":"vip-","settings":{"limits":["60/1m"]}}`)
	expect.True(t, has == 3 && durable == 2, "%d have it, %d on disk", has, durable)
	for _, n := range []*Node{a, b, c} {
		limits(n, "vip-", 60)
	}

	// The file changes under it: to another limit, and to leases, which a rate does not suit.
	for _, change := range []struct{ policies, inactive string }{
		{fmt.Sprintf(onePolicy, 9), ""},
		{"policies:\n  - {name: login, algorithm: concurrency, limit: 3, ttl: 1m}\n", "settings.limits"},
		{"policies: []\n", "policy: there is no policy"},
		{fmt.Sprintf(onePolicy, 7), ""},
	} {
		must.NoError(t, os.WriteFile(file, []byte(change.policies), 0o600))
		set := must.Value(policy.Parse(file, []byte(change.policies)))(t)
		for _, n := range []*Node{a, b, c} {
			n.Reload()
			testkit.Eventually(t, "the file is in force", func() bool { return n.filePolicies().Hash() == set.Hash() })
		}
		resp, list := send(t, b, "GET", "/v1/overrides?policy=login&prefix=vip-", "", "")
		expect.True(t, resp.StatusCode == 200 && strings.Contains(list, "inactive") == (change.inactive != "") &&
			strings.Contains(list, change.inactive) && strings.Contains(list, `"limits":["60/1m"]`),
			"%s: %d %s", change.policies, resp.StatusCode, list)
		got := b.inactiveOverrides()
		expect.Equal(t, (got == 1), change.inactive != "", "%s: %d inactive", change.policies, got)
	}
	limits(a, "vip-", 60)
	limits(a, "other-", 7)
	resp, text := send(t, b, "DELETE", "/v1/overrides?policy=login&prefix=vip-", "", "")
	expect.True(t, resp.StatusCode == 200 && strings.Contains(text, `"before":`),
		"DELETE: %d %s", resp.StatusCode, text)
	for _, n := range []*Node{a, b, c} {
		limits(n, "vip-", 7)
	}
	resp, _ = send(t, a, "DELETE", "/v1/overrides?policy=login&prefix=vip-", "", "")
	expect.Equal(t, resp.StatusCode, 404, "another DELETE")
}

// TestOverridesByRole: who has the role for a policy changes and sees its overrides, and each change is in the audit
// log.
func TestOverridesByRole(t *testing.T) {
	t.Parallel()
	shop, ops, reader := auth.NewToken(), auth.NewToken(), auth.NewToken()
	cfg := testConfig(t, "a")
	cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml",
		fmt.Sprintf(onePolicy, 5)+"  - {name: partner-x, algorithm: sliding_log, limit: 1, window: 1m}\n")
	cfg.Security.AccessFile = testkit.WriteFile(t, "access.yaml", fmt.Sprintf(`
callers:
  - {name: shop, tokens: [%s], roles: [check, keys, admin], policies: ["*"]}
  - {name: ops, tokens: [%s], roles: [overrides], policies: ["partner-*"]}
  - {name: reader, tokens: [%s], roles: [read]}
`, auth.Hash(shop), auth.Hash(ops), auth.Hash(reader)))
	cfg.Security.AuditLog = filepath.Join(t.TempDir(), "audit.log")
	n := mustSettle(t, cfg)
	for _, c := range []struct {
		method, path, token, body string
		status                    int
	}{
		{"PUT", "", shop, `{"policy":"partner-x","key":"k","settings":{"limit":2}}`, 403},
		{"GET", "", shop, "", 403},
		{"GET", "", "", "", 401},
		{"PUT", "", ops, `{"policy":"login","key":"k","settings":{"limit":2}}`, 403},
		{"GET", "?policy=login", ops, "", 403},
		{"DELETE", "?policy=login&key=k", ops, "", 403},
		{"PUT", "", ops, `{"policy":"partner-x","key":"k\nx","settings":{"limit":2}}`, 200},
		{"PUT", "", ops, `{"policy":"partner-x","key":"k\nx","settings":{"limit":3}}`, 200},
		{"DELETE", "?policy=partner-x&key=k%0Ax", ops, "", 200},
		{"DELETE", "?policy=partner-x&key=k%0Ax", ops, "", 404},
	} {
		if resp, text := send(t, n, c.method, "/v1/overrides"+c.path, c.token, c.body); resp.StatusCode != c.status {
			t.Errorf("%s %s %s: %d %s, want %d", c.method, c.path, c.body, resp.StatusCode, text, c.status)
		}
	}
	secret := control.Step{Change: &control.Entry{ID: control.ID{Policy: "login", Key: "secret"},
		Settings: `{"limit":1}`, At: time.Now()}}
	n.overrides.book.Commit("a", &secret)
	must.NoError(t, secret.Err)
	_, page := send(t, n, "GET", "/metrics", reader, "")
	expect.True(t, strings.Contains(page, `weir_access_denied_total{listener="http",reason="wrong_policy"} 3`),
		"three denials that are not counted")
	_, list := send(t, n, "GET", "/v1/overrides", ops, "")
	expect.True(t, !strings.Contains(list, "secret"), "ops sees another policy's: %s", list)
	n.Stop()
	log := must.Value(os.ReadFile(cfg.Security.AuditLog))(t)
	for _, want := range []string{
		`"msg":"override","caller":"ops","credential":"token","listener":"http"`,
		`"policy":"partner-x","key":"k\nx","what":"set {\"limit\":2}"}`,
		`"policy":"partner-x","key":"k\nx","what":"set {\"limit\":3}, was {\"limit\":2}"}`,
		`"policy":"partner-x","key":"k\nx","what":"delete, was {\"limit\":3}"}`,
		`"what":"delete","error":"key: there is no override for it"}`,
		`"msg":"denied","caller":"ops","credential":"token","listener":"http"`,
		`"policy":"login","reason":"wrong_policy","what":"ops may not use the policy \"login\" in the role overrides"`,
	} {
		expect.True(t, strings.Contains(string(log), want), "the audit log lacks %s:\n%s", want, log)
	}
}

// TestOverridesByClient sets and lists overrides by the Go client, over more than one page.
func TestOverridesByClient(t *testing.T) {
	t.Parallel()
	n := mustSettle(t, testConfig(t, "a"))
	c := must.Value(client.Dial(t.Context(), n.GRPCAddr()))(t)
	defer c.Close()
	var many []control.Entry
	for i := range 1500 {
		id := control.ID{Policy: "login", Key: fmt.Sprintf("k%04d", i)}
		many = append(many, control.Entry{ID: id, Version: control.Version{Counter: 1, Node: "z"},
			Settings: `{"limit":1}`, At: time.UnixMilli(5)})
	}
	merge := control.Step{Merge: many}
	n.overrides.book.Commit("a", &merge)
	must.NoError(t, merge.Err)
	change, err := c.SetOverride(t.Context(), client.Override{Policy: "login", Key: "k0000", Settings: `{"limit": 7}`})
	expect.True(t, err == nil && change.Before != nil && change.Before.Settings == `{"limit":1}` &&
		change.Override.Settings == `{"limit":7}` && change.Override.Version == "2@a" && len(change.Members) == 1 &&
		change.Members[0].Has, "%+v %v", change, err)
	seen := 0
	for o, err := range c.Overrides(t.Context(), "login") {
		must.True(t, err == nil && o.Key == fmt.Sprintf("k%04d", seen), "%d: %+v %v", seen, o, err)
		seen++
	}
	expect.Equal(t, seen, 1500, "overrides")
	change, err = c.DeleteOverride(t.Context(), client.Override{Policy: "login", Key: "k0000"})
	expect.True(t, err == nil && change.Override.Settings == "", "%+v %v", change, err)
	_, err = c.DeleteOverride(t.Context(), client.Override{Policy: "login", Key: "k0000"})
	expect.ErrorIs(t, err, client.ErrNotFound)
	var wrong *client.Error
	_, err = c.SetOverride(t.Context(), client.Override{Policy: "login", Key: "k", Settings: "{}"})
	expect.True(t, errors.As(err, &wrong) && wrong.Kind == client.ErrInvalid && wrong.Field == "settings", "%v", err)
	for _, err := range c.Overrides(t.Context(), "no policy") {
		expect.ErrorIs(t, err, client.ErrInvalid)
	}
	own := client.New(n.limiter, func() {})
	defer own.Close()
	_, err = own.SetOverride(t.Context(), client.Override{Policy: "login", Key: "k", Settings: `{"limit":1}`})
	expect.ErrorIs(t, err, client.ErrInvalid)
}

// TestDataDirOfTwo: a second node does not start in the directory of another that runs.
func TestDataDirOfTwo(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "a")
	cfg.GossipPort, cfg.PeerPort, cfg.DataDir = PortOff, PortOff, t.TempDir()
	n := mustStart(t, cfg)
	cfg.Name = "b"
	_, err := Start(t.Context(), cfg)
	expect.True(t, err != nil && strings.HasPrefix(err.Error(), "data-dir: ") &&
		strings.Contains(err.Error(), "another node"), "the second: %v", err)
	n.Stop()
	mustStart(t, cfg).Stop()
}

// gossipKey is a key for tests, and gossipText how files have it.
func gossipKey(b byte) []byte { return slices.Repeat([]byte{b}, 32) }

func gossipText(keys ...byte) string {
	text := ""
	for _, b := range keys {
		text += base64.StdEncoding.EncodeToString(gossipKey(b)) + "\n"
	}
	return text
}

// encryptedCluster starts three nodes whose gossip is encrypted with key 1, and that prove themselves to each other.
func encryptedCluster(t *testing.T, log *slog.Logger) []*Node {
	t.Helper()
	return secureCluster(t, log, certstest.NewAuthority(t, "a"), func(_ int, cfg *Config) {
		cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(onePolicy, 1_000_000))
		cfg.Security.GossipKeyFile = testkit.WriteFile(t, "gossip.keys", gossipText(1))
	})
}

// askAll sends checks through all nodes until stop is called, which waits; one that is not decided by its owner fails
// the test. count is how many there were.
func askAll(t *testing.T, nodes []*Node) (count *atomic.Int64, stop func()) {
	t.Helper()
	count = new(atomic.Int64)
	done := make(chan struct{})
	var load sync.WaitGroup
	for i, n := range nodes {
		load.Go(func() {
			// Paced, so that the nodes have the processor time without which they take each other for dead.
			tick := time.NewTicker(time.Millisecond)
			defer tick.Stop()
			for j := 0; ; j++ {
				select {
				case <-done:
					return
				case <-tick.C:
				}
				r, err := n.limiter.Check(t.Context(),
					[]limit.Check{{Target: limit.Target{Policy: "login", Key: fmt.Sprint(i, "-", j%1000)}, Cost: 1}})
				if err != nil || r[0].Err != nil || !r[0].Allowed || r[0].FailedOpen {
					t.Errorf("%+v %v", r, err)
					return
				}
				count.Add(1)
			}
		})
	}
	return count, func() { close(done); load.Wait() }
}

// keysOf are the ids of a node's keys, the used one first.
func keysOf(n *Node) []string {
	var ids []string
	for _, k := range n.cluster.Keys() {
		if k.Used {
			ids = slices.Insert(ids, 0, k.ID)
		} else {
			ids = append(ids, k.ID)
		}
	}
	return ids
}

// TestRotateByCommand changes the key of three nodes under load, by the calls of weir gossip-keys. No check fails, all
// are members in the end, and each step that would cut somebody off is refused.
func TestRotateByCommand(t *testing.T) {
	t.Parallel()
	var book testkit.Buffer
	nodes := encryptedCluster(t, book.Logger())
	count, stop := askAll(t, nodes)
	one, two := cluster.KeyID(gossipKey(1)), cluster.KeyID(gossipKey(2))
	admin := weirv1.NewAdminClient(dialed(t, nodes[1]))
	step := func(action weirv1.KeyAction, id string, key []byte) (string, error) {
		t.Helper()
		from := count.Load()
		resp, err := admin.GossipKeys(t.Context(), &weirv1.GossipKeysRequest{Action: action, Id: id, Key: key})
		for _, m := range resp.GetMembers() {
			expect.Equal(t, m.Error, "", "%v: %s", action, m.Name)
		}
		testkit.Eventually(t, "more checks", func() bool { return count.Load() > from+100 || t.Failed() })
		return fmt.Sprint(resp), err
	}
	done := func(action weirv1.KeyAction, id string, key []byte) string {
		t.Helper()
		out, err := step(action, id, key)
		must.NoError(t, err, "%v", action)
		return out
	}
	rejected := func(part string, action weirv1.KeyAction, id string, key []byte) {
		t.Helper()
		_, err := step(action, id, key)
		expect.ErrorContains(t, err, part, "%v", action)
	}
	const list, add, use, remove = weirv1.KeyAction_KEY_ACTION_LIST, weirv1.KeyAction_KEY_ACTION_ADD,
		weirv1.KeyAction_KEY_ACTION_USE, weirv1.KeyAction_KEY_ACTION_REMOVE
	out := done(list, "", nil)
	expect.True(t, strings.Count(out, one) == 3 && !strings.Contains(out, two), "list: %s", out)
	rejected("does not have it", use, two, nil)
	rejected("uses it", remove, one, nil)
	rejected("it must have 16, 24 or 32", add, "", []byte("abc"))

	// One node alone has the new key: using it would cut the others off.
	must.NoError(t, nodes[1].cluster.AddKey(gossipKey(2)))
	rejected("node-0 does not have it: it would be cut off", use, two, nil)
	out = done(add, "", gossipKey(2))
	expect.Equal(t, strings.Count(out, two), 3, "add: %s", out)
	done(use, two, nil)
	rejected("uses it", remove, two, nil)
	done(remove, one, nil)
	for _, n := range nodes {
		got := keysOf(n)
		expect.True(t, slices.Equal(got, []string{two}), "%s has %v", n.cfg.Name, got)
	}
	out = done(list, "", nil)
	expect.True(t, !strings.Contains(out, one) && !strings.Contains(out, "in_file:true"), "list: %s", out)

	// A node with the new key is let in, and gets its share; one with the old key says what is wrong and ends.
	join := func(name, keys string) *Node {
		cfg := nodes[0].cfg
		cfg.Name, cfg.Join = name, []string{nodes[0].view().Self.GossipAddr}
		cfg.Security.GossipKeyFile = testkit.WriteFile(t, "gossip.keys", keys)
		return mustStart(t, cfg)
	}
	late := join("late", gossipText(2))
	awaitSettled(t, late)
	expect.Equal(t, len(late.view().Members), 4, "members that the late one sees")
	cfg := nodes[0].cfg
	cfg.Name, cfg.Join = "old", []string{nodes[0].view().Self.GossipAddr}
	cfg.Security.GossipKeyFile = testkit.WriteFile(t, "gossip.keys", gossipText(1))
	old := must.Value(Start(t.Context(), cfg))(t)
	defer old.Stop()
	refusedAt(t, nodes[0], "gossip", cluster.OtherKey)
	// It is not left outside for good: it reads its file again.
	must.NoError(t, os.WriteFile(cfg.Security.GossipKeyFile, []byte(gossipText(2)), 0o600))
	awaitSettled(t, old)
	testkit.Eventually(t, "five members", func() bool { return len(old.view().Members) == 5 })
	stop()
	for _, n := range nodes {
		testkit.Eventually(t, n.cfg.Name+" sees five members", func() bool { return len(n.view().Members) == 5 })
	}
	text := book.String()
	for _, secret := range []string{strings.TrimSpace(gossipText(1)), strings.TrimSpace(gossipText(2))} {
		expect.True(t, !strings.Contains(text, secret), "the log has a key")
	}
	expect.True(t, strings.Contains(text, "step=remove key="+one), "log:\n%s", text)
}

// TestAKeyOfTheOperators: what the file once said of a key is forgotten with the key: one that an operator adds again
// stays when the file changes.
func TestAKeyOfTheOperators(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "node")
	cfg.Security.GossipKeyFile = testkit.WriteFile(t, "gossip.keys", gossipText(1))
	n := mustSettle(t, cfg)
	id := func(b byte) string { return cluster.KeyID(gossipKey(b)) }
	becomes := func(text string, want ...string) {
		t.Helper()
		must.NoError(t, os.WriteFile(cfg.Security.GossipKeyFile, []byte(text), 0o600))
		slices.Sort(want)
		testkit.Eventually(t, fmt.Sprint("keys ", want),
			func() bool { return slices.Equal(slices.Sorted(slices.Values(keysOf(n))), want) })
	}
	becomes(gossipText(2), id(2))
	must.NoError(t, n.cluster.AddKey(gossipKey(1)))
	becomes(gossipText(2, 3), id(1), id(2), id(3))
	becomes(gossipText(3), id(1), id(3))
}

// TestKeysInPlainText: a key is not taken where it could have been read on its way, and strangers on a port between
// nodes change none.
func TestKeysInPlainText(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "node")
	cfg.Security.GossipKeyFile = testkit.WriteFile(t, "gossip.keys", gossipText(1))
	n := mustSettle(t, cfg)
	from := func(ip string) context.Context {
		return peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP(ip), Port: 1}})
	}
	add := &weirv1.GossipKeysRequest{Action: weirv1.KeyAction_KEY_ACTION_ADD, Key: gossipKey(2)}
	_, err := n.keys.GossipKeys(from("192.0.2.1"), add)
	expect.True(t, status.Code(err) == codes.FailedPrecondition, "an operator from afar: %v", err)
	_, err = n.keys.Apply(from("192.0.2.1"), add)
	expect.True(t, status.Code(err) == codes.PermissionDenied, "a peer from afar: %v", err)
	refusedAt(t, n, "peer", "keys_in_plain_text")
	got := n.cluster.Keys()
	expect.Equal(t, len(got), 1, "keys %v", got)
	_, err = n.keys.GossipKeys(from("127.0.0.1"), add)
	expect.True(t, err == nil && len(n.cluster.Keys()) == 2, "an operator on the host: %v", err)
	_, err = n.keys.GossipKeys(from("127.0.0.1"), &weirv1.GossipKeysRequest{})
	expect.True(t, status.Code(err) == codes.InvalidArgument, "no action: %v", err)

	// And where there is nothing to change.
	plain := mustStart(t, testConfig(t, "plain"))
	_, err = weirv1.NewAdminClient(dialed(t, plain)).GossipKeys(t.Context(),
		&weirv1.GossipKeysRequest{Action: weirv1.KeyAction_KEY_ACTION_LIST})
	expect.True(t, status.Code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), "plain text"),
		"without keys: %v", err)
}

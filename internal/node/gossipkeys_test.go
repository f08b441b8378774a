package node

import (
	"context"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

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

// askAll sends checks through all nodes until stop is called, which waits; one that is not decided by its owner fails the
// test. count is how many there were.
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
				r, err := n.limiter.Check(t.Context(), []limit.Check{{Target: limit.Target{Policy: "login", Key: fmt.Sprint(i, "-", j%1000)}, Cost: 1}})
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

// TestRotateByCommand changes the key of three nodes under load, by the calls of weir gossip-keys. No check fails, all are
// members in the end, and each step that would cut somebody off is refused.
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
	const list, add, use, remove = weirv1.KeyAction_KEY_ACTION_LIST, weirv1.KeyAction_KEY_ACTION_ADD, weirv1.KeyAction_KEY_ACTION_USE, weirv1.KeyAction_KEY_ACTION_REMOVE
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
	n := len(late.view().Members)
	expect.True(t, n == 4, "the late one sees %d members", n)
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

// TestRotateByFile replaces the key in the nodes' files, one after the other and in one go, as a Secret does that reaches
// pods at different times. Nobody is cut off: each node waits until the others are as far.
func TestRotateByFile(t *testing.T) {
	t.Parallel()
	var book testkit.Buffer
	nodes := encryptedCluster(t, book.Logger())
	_, stop := askAll(t, nodes)
	one, two := cluster.KeyID(gossipKey(1)), cluster.KeyID(gossipKey(2))
	replace := func(n *Node, text string) {
		t.Helper()
		must.NoError(t, os.WriteFile(n.cfg.Security.GossipKeyFile, []byte(text), 0o600))
	}
	for i, n := range nodes[:2] {
		replace(n, gossipText(2))
		testkit.Eventually(t, "the key to be added", func() bool { return slices.Equal(keysOf(n), []string{one, two}) })
		waits := fmt.Sprintf("node-%d does not have it", []int{1, 2}[i])
		testkit.Eventually(t, "a word about who is waited for", func() bool { return strings.Contains(book.String(), waits) })
	}
	replace(nodes[2], "no key\n") // a mistake changes nothing
	testkit.Eventually(t, "the mistake to be told", func() bool { return strings.Contains(book.String(), "not base64") })
	for _, n := range nodes[:2] {
		got := keysOf(n)
		expect.True(t, slices.Equal(got, []string{one, two}), "%s went ahead: %v", n.cfg.Name, got)
	}
	replace(nodes[2], gossipText(2))
	for _, n := range nodes {
		testkit.Eventually(t, "the new key alone", func() bool { return slices.Equal(keysOf(n), []string{two}) })
	}
	stop()
	text := book.String()
	expect.True(t, !strings.Contains(text, strings.TrimSpace(gossipText(2))), "log:\n%s", text)
	for _, n := range nodes {
		testkit.Eventually(t, n.cfg.Name+" sees three members", func() bool { return len(n.view().Members) == 3 })
	}
}

// TestAKeyOfTheOperators: what the file once said of a key is forgotten with the key: one that an operator adds again stays when
// the file changes.
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
		testkit.Eventually(t, fmt.Sprint("keys ", want), func() bool { return slices.Equal(slices.Sorted(slices.Values(keysOf(n))), want) })
	}
	becomes(gossipText(2), id(2))
	must.NoError(t, n.cluster.AddKey(gossipKey(1)))
	becomes(gossipText(2, 3), id(1), id(2), id(3))
	becomes(gossipText(3), id(1), id(3))
}

// TestKeysInPlainText: a key is not taken where it could have been read on its way, and strangers on a port between nodes
// change none.
func TestKeysInPlainText(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "node")
	cfg.Security.GossipKeyFile = testkit.WriteFile(t, "gossip.keys", gossipText(1))
	n := mustSettle(t, cfg)
	from := func(ip string) context.Context {
		return peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP(ip), Port: 1}})
	}
	add := &weirv1.GossipKeysRequest{Action: weirv1.KeyAction_KEY_ACTION_ADD, Key: gossipKey(2)}
	if _, err := n.keys.GossipKeys(from("192.0.2.1"), add); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("an operator from afar: %v", err)
	}
	if _, err := n.keys.Peers().Apply(from("192.0.2.1"), add); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a peer from afar: %v", err)
	}
	refusedAt(t, n, "peer", "keys_in_plain_text")
	got := n.cluster.Keys()
	expect.Equal(t, len(got), 1, "keys %v", got)
	if _, err := n.keys.GossipKeys(from("127.0.0.1"), add); err != nil || len(n.cluster.Keys()) != 2 {
		t.Errorf("an operator on the host: %v", err)
	}
	if _, err := n.keys.GossipKeys(from("127.0.0.1"), &weirv1.GossipKeysRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("no action: %v", err)
	}

	// And where there is nothing to change.
	plain := mustStart(t, testConfig(t, "plain"))
	_, err := weirv1.NewAdminClient(dialed(t, plain)).GossipKeys(t.Context(), &weirv1.GossipKeysRequest{Action: weirv1.KeyAction_KEY_ACTION_LIST})
	expect.True(t, status.Code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), "plain text"),
		"without keys: %v", err)
}

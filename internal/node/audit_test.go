package node

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/peer"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

// auditLines are the lines of an audit log, without their times.
func auditLines(t *testing.T, name string) (lines []string) {
	t.Helper()
	data := must.Value(os.ReadFile(name))(t)
	for line := range strings.Lines(string(data)) {
		fields := make(map[string]any)
		must.NoError(t, json.Unmarshal([]byte(line), &fields), "%q", line)
		from, _ := fields["from"].(string)
		expect.True(t, strings.HasPrefix(from, "127.0.0.1:"), "%q does not say from where", line)
		lines = append(lines, fmt.Sprint(fields["msg"], " ", fields["caller"], " ", fields["credential"], " ", fields["listener"], " ", fields["policy"], " ", fields["key"], " ", fields["reason"]))
	}
	return lines
}

// TestAuditLog: every refund, reset and denied call is on record, with who, what and from where, and checks are not.
func TestAuditLog(t *testing.T) {
	name := filepath.Join(t.TempDir(), "audit.log")
	n, shop, all, _ := withAccess(t, func(cfg *Config) {
		cfg.Security.AuditLog = name
		cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(onePolicy, 3))
	})
	for _, c := range []struct {
		path, token, body string
		status            int
	}{
		{"/v1/check", all, `{"policy": "login", "key": "alice"}`, 200},
		{"/v1/refund", all, `{"policy": "login", "key": "alice", "cost": 1}`, 200},
		{"/v1/reset", all, `{"policy": "login", "key": "alice"}`, 200},
		{"/v1/reset", all, `{"policy": "none", "key": "alice"}`, 404},
		{"/v1/refund", shop, `{"policy": "login", "key": "alice", "cost": 1}`, 403},
		{"/v1/check", shop, `{"policy": "payout", "key": "alice"}`, 403},
		{"/v1/check", "", `{"policy": "login", "key": "alice"}`, 401},
		{"/v1/check", "weir_wrong", `{"policy": "login", "key": "alice"}`, 401},
	} {
		resp, text := send(t, n, "POST", c.path, c.token, c.body)
		expect.True(t, resp.StatusCode == c.status, "%s %s: %d %s", c.path, c.body, resp.StatusCode, text)
	}
	want := []string{
		"refund everything token http login alice <nil>",
		"reset everything token http login alice <nil>",
		"reset everything token http none alice <nil>",
		"denied shop token http <nil> <nil> wrong_role",
		"denied shop token http payout <nil> wrong_policy",
		"denied  none http <nil> <nil> no_credentials",
		"denied  token http <nil> <nil> bad_token",
	}
	if got := auditLines(t, name); strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	// And a key is counted to the caller who has made it.
	send(t, n, "POST", "/v1/check", all, `{"policy": "login", "key": "bob"}`)
	_, _, callers := n.limiter.Shares()
	expect.True(t, len(callers) == 1 && callers[0].Name == "everything" && callers[0].Keys == 1, "%+v", callers)
	data := must.Value(os.ReadFile(name))(t)
	expect.True(t, !strings.Contains(string(data), shop) && !strings.Contains(string(data), all) &&
		!strings.Contains(string(data), "weir_wrong"), "the audit log has a token")
}

// TestAuditLogWithoutAccessFile: refunds are on record although everybody may.
func TestAuditLogWithoutAccessFile(t *testing.T) {
	t.Parallel()
	name := filepath.Join(t.TempDir(), "audit.log")
	cfg := testConfig(t, "node")
	cfg.Security.AuditLog = name
	cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(onePolicy, 3))
	n := mustSettle(t, cfg)
	send(t, n, "POST", "/v1/refund", "", `{"policy": "login", "key": "alice", "cost": 1}`)
	got := auditLines(t, name)
	expect.Equal(t, strings.Join(got, "\n"), "refund everybody none http login alice <nil>", "%q", got)
	_, _, callers := n.limiter.Shares()
	expect.True(t, len(callers) == 0 || callers[0].Name == "", "%+v", callers)
}

// TestAuditOfGossipKeys: a step by command is on record on the node that was asked, with who, and on the others; one by a file too.
func TestAuditOfGossipKeys(t *testing.T) {
	t.Parallel()
	names := make(map[string]string)
	dir := t.TempDir()
	nodes := secureCluster(t, slog.New(slog.DiscardHandler), certstest.NewAuthority(t, "a"), func(_ int, cfg *Config) {
		cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(onePolicy, 3))
		cfg.Security.GossipKeyFile = testkit.WriteFile(t, "gossip.keys", gossipText(1))
		names[cfg.Name] = filepath.Join(dir, cfg.Name)
		cfg.Security.AuditLog = names[cfg.Name]
	})
	local := peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}})
	step := func(action weirv1.KeyAction) {
		t.Helper()
		_, err := nodes[0].keys.GossipKeys(local, &weirv1.GossipKeysRequest{Action: action, Key: gossipKey(2)})
		must.NoError(t, err)
	}
	step(weirv1.KeyAction_KEY_ACTION_LIST)
	step(weirv1.KeyAction_KEY_ACTION_ADD)
	for i, n := range nodes {
		data := must.Value(os.ReadFile(names[n.cfg.Name]))(t)
		listener := `"listener":"peer"`
		if i == 0 {
			listener = `"listener":"grpc"`
		}
		text := string(data)
		expect.True(t, strings.Count(text, "\n") == 1 && strings.Contains(text, `"msg":"gossip_key"`) &&
			strings.Contains(text, `"what":"add `) && strings.Contains(text, listener), "%s: %s", n.cfg.Name, text)
	}
}

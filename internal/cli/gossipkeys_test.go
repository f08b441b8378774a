package cli

import (
	"strings"
	"testing"

	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/testkit"
)

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
}

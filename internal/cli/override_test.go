package cli

import (
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

// TestOverride sets, lists and deletes overrides by the commands that an operator gives.
func TestOverride(t *testing.T) {
	n := startReady(t, testConfig(t, "node"))
	for _, c := range []struct {
		args     []string
		code     int
		out, err string // a part of it
	}{
		{[]string{"list"}, exitOK, "POLICY  FOR", ""},
		{[]string{"set", "login", "al\nice", `{"limit":500}`}, exitOK, "login key \"al\\nice\": {\"limit\":500}\n1 of 1 members have it, 0 on disk\n", ""},
		{[]string{"set", "login", "al\nice", `{"blocked":true}`}, exitOK, `{"blocked":true}, was {"limit":500}`, ""},
		{[]string{"set", "--prefix", "login", "vip-", `{"unlimited":true}`, "-o", "json"}, exitOK, `"prefix": "vip-"`, ""},
		{[]string{"list", "--policy", "login"}, exitOK, `login   prefix "vip-"  {"unlimited":true}  `, ""},
		{[]string{"list", "-o", "json"}, exitOK, `"version": "2@node"`, ""},
		{[]string{"set", "login", "k", `{"limit":0}`}, exitError, "", "settings.limit: must not be zero"},
		{[]string{"set", "login", "k"}, exitError, "", "SETTINGS: is missing"},
		{[]string{"delete", "login", "al\nice"}, exitOK, "deleted, was", ""},
		{[]string{"delete", "login", "al\nice"}, exitError, "", "key: there is no override for it"},
		{[]string{"delete", "--prefix", "login", "vip-"}, exitOK, `login prefix "vip-": deleted`, ""},
	} {
		var out, errs strings.Builder
		code := run(append(append([]string{"override"}, c.args...), "--timeout=20s", "--addr", n.GRPCAddr()), &out, &errs)
		expect.True(t, code == c.code && strings.Contains(out.String(), c.out) &&
			strings.Contains(errs.String(), c.err) && (c.err == "") == (errs.String() == ""),
			"%q: exit status %d\n%s\n%s", c.args, code, &out, &errs)
	}
}

package cli

import (
	"io"
	"strings"
	"testing"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

func TestToken(t *testing.T) {
	var out strings.Builder
	must.Equal(t, run([]string{"token"}, &out, io.Discard), exitOK)
	fields := strings.Fields(out.String())
	expect.True(t, len(fields) == 4 && auth.Hash(fields[1]) == fields[3] && len(fields[1]) >= 40, "%q", fields)
	for _, c := range []struct{ args, want string }{
		{"check a --policy p --addr 192.0.2.1:1 --token-file " + testkit.WriteFile(t, "token", "x"), "--token-file: the token would be sent to 192.0.2.1:1 in plain text"},
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

// TestStatusWithToken: a command presents the token that it is given.
func TestStatusWithToken(t *testing.T) {
	n, _, all := startSecured(t, nil)
	var out, errOut strings.Builder
	file := testkit.WriteFile(t, "token", all+"\n")
	code := run([]string{"status", "--addr", n.GRPCAddr(), "--token-file", file}, &out, &errOut)
	expect.True(t, code == exitOK, "status: %d %s", code, &errOut)
	code = run([]string{"status", "--addr", n.GRPCAddr()}, &out, &errOut)
	expect.True(t, code == exitError && strings.Contains(errOut.String(), "authenticate with a token"),
		"status without a token: %d %s", code, &errOut)
}

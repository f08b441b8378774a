package node

import (
	"crypto/tls"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

// TestRESPSecured: over the Redis protocol a certificate or a token will do, as over the others, and neither none.
func TestRESPSecured(t *testing.T) {
	a := certstest.NewAuthority(t, "a")
	n, shop, _, _ := withAccess(t, func(cfg *Config) {
		cfg.Security.useTLS(filesOf(t, a, testLeaf))
		cfg.RESPPort = PortAny
	})
	want := " resp=" + addrOf(n.listeners.resp)
	expect.True(t, strings.HasSuffix(n.ReadyLine(), want), "the ready line is %q", n.ReadyLine())
	ask := func(in string, pairs ...tls.Certificate) (string, error) {
		conn, err := tls.Dial("tcp", addrOf(n.listeners.resp), &tls.Config{RootCAs: a.Pool(), Certificates: pairs})
		if err != nil {
			return "", err
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, in+"QUIT\n"); err != nil {
			return "", err
		}
		out, err := io.ReadAll(conn)
		return string(out), err
	}
	const check = "WEIR.PEEK login a\n"
	for _, c := range []struct {
		name, in, want string
		pairs          []tls.Certificate
	}{
		{"neither", check, "-NOAUTH ", nil},
		{"a token", "AUTH " + shop + "\n" + check, "+OK\r\n*", nil},
		{"another's name", "AUTH nobody " + shop + "\n" + check, "-WRONGPASS ", nil},
		{"a wrong token", "AUTH x\n" + check, "-WRONGPASS ", nil},
		{"a certificate", check, "*", []tls.Certificate{a.Pair(certstest.Leaf{DNS: []string{"shop.test"}})}},
		{"a certificate of nobody", check, "-NOAUTH ", []tls.Certificate{a.Pair(certstest.Leaf{DNS: []string{"x.test"}})}},
		{"another policy", "AUTH " + shop + "\nWEIR.PEEK other a\n", "+OK\r\n-NOPERM ", nil},
	} {
		got, err := ask(c.in, c.pairs...)
		expect.True(t, err == nil && strings.HasPrefix(got, c.want), "%s: %q, %v", c.name, got, err)
	}
	got, err := ask(check, a.Pair(certstest.Leaf{DNS: []string{"shop.test"}, Expired: true}))
	expect.True(t, err != nil, "with an expired certificate: %q", got)
	plain := must.Value(net.Dial("tcp", addrOf(n.listeners.resp)))(t)
	defer plain.Close()
	_, _ = io.WriteString(plain, check) // the read tells
	out, _ := io.ReadAll(plain)
	expect.True(t, !strings.Contains(string(out), "allowed"), "in plain text: %q", out)
	for _, reason := range []string{"no_credentials", "bad_token", "unknown_identity", "wrong_policy", "certificate_expired", "plain_text_on_tls_port"} {
		refusedAt(t, n, "resp", reason)
	}
}

package node

import (
	"net/http"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestDNSRebinding: a page under a name of its own gets nothing from a node on loopback, whatever it asks; names that are
// configured are answered for, there and elsewhere.
func TestDNSRebinding(t *testing.T) {
	t.Parallel()
	ask := func(n *Node, path, host string) int {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addrOf(n.listeners.http)+path, nil)
		must.NoError(t, err)
		r.Host = host
		resp := must.Value(http.DefaultClient.Do(r))(t)
		resp.Body.Close()
		typ := resp.Header.Get("Content-Type")
		expect.True(t, resp.StatusCode != http.StatusMisdirectedRequest || typ == "application/problem+json",
			"answered as %s", typ)
		return resp.StatusCode
	}
	n := mustSettle(t, testConfig(t, "a"))
	named := testConfig(t, "b")
	named.HTTPHosts = []string{"Limits.example.com"}
	b := mustSettle(t, named)
	for host, want := range map[string]int{
		"127.0.0.1": 200, "127.0.0.1:8080": 200, "[::1]:8080": 200, "[::1]": 200, "localhost": 200, "LocalHost:8080": 200, "localhost.": 200, "192.0.2.1": 200,
		"evil.example": 421, "evil.example:8080": 421, "localhost.evil.example": 421, "127.0.0.1.evil.example": 421,
	} {
		for _, path := range []string{"/", "/metrics", "/v1/status", "/healthz"} {
			expect.Equal(t, ask(n, path, host), want, "%s for %s", path, host)
		}
		expect.Equal(t, ask(b, "/", host), want, "with names, for %s", host)
	}
	for host, want := range map[string]int{"limits.example.com": 200, "limits.example.com:80": 200, "LIMITS.example.com.": 200, "example.com": 421} {
		expect.Equal(t, ask(b, "/", host), want, "with names, for %s", host)
	}
	expect.True(t, hostCheck("0.0.0.0", nil) == nil,
		"a node that others reach does not know all of its names, and is to answer for any")
	check := hostCheck("0.0.0.0", []string{"a.example"})
	expect.True(t, !check("b.example") && check("a.example"), "names that are given count everywhere")
	for _, bad := range []string{"", "a:80", "*.example.com", "http://a", "a."} {
		expect.ErrorContains(t, checkHosts([]string{bad}), "is not a host name", "%q", bad)
	}
}

// TestForwardAuthFlags: what keys may be taken from is checked before anything is opened.
func TestForwardAuthFlags(t *testing.T) {
	t.Parallel()
	cfg := Config{ForwardAuthHeaders: []string{"x-api-key"}, TrustedProxies: []string{"10.0.0.0/8", "2001:db8::1"}}
	f, err := cfg.forwardAuth()
	expect.True(t, err == nil && f.Headers[0] == "X-Api-Key" && len(f.TrustedProxies) == 2, "%+v, %v", f, err)
	for _, c := range []struct{ header, proxy, flag string }{
		{"X Api", "10.0.0.0/8", "forward-auth-headers: "}, {"Host", "10.0.0.0/8", "forward-auth-headers: "},
		{"X-Api", "10.0.0.1/8", "trusted-proxies: "}, {"X-Api", "gateway", "trusted-proxies: "},
	} {
		cfg := testConfig(t, "a")
		cfg.ForwardAuthHeaders, cfg.TrustedProxies = []string{c.header}, []string{c.proxy}
		n, err := Start(t.Context(), cfg)
		if err == nil {
			n.Stop()
		}
		expect.True(t, err != nil && strings.HasPrefix(err.Error(), c.flag), "%+v: %v", c, err)
	}
}

package node

import (
	"net/http"
	"strings"
	"testing"
)

// TestDNSRebinding: a page under a name of its own gets nothing from a node on loopback, whatever it asks; names that are
// configured are answered for, there and elsewhere.
func TestDNSRebinding(t *testing.T) {
	ask := func(n *Node, path, host string) int {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addrOf(n.listeners.http)+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = host
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if typ := resp.Header.Get("Content-Type"); resp.StatusCode == http.StatusMisdirectedRequest && typ != "application/problem+json" {
			t.Errorf("answered as %s", typ)
		}
		return resp.StatusCode
	}
	n := mustStart(t, testConfig(t, "a"))
	awaitSettled(t, n)
	named := testConfig(t, "b")
	named.HTTPHosts = []string{"Limits.example.com"}
	b := mustStart(t, named)
	awaitSettled(t, b)
	for host, want := range map[string]int{
		"127.0.0.1": 200, "127.0.0.1:8080": 200, "[::1]:8080": 200, "[::1]": 200, "localhost": 200, "LocalHost:8080": 200, "localhost.": 200, "192.0.2.1": 200,
		"evil.example": 421, "evil.example:8080": 421, "localhost.evil.example": 421, "127.0.0.1.evil.example": 421,
	} {
		for _, path := range []string{"/", "/metrics", "/v1/status", "/healthz"} {
			if got := ask(n, path, host); got != want {
				t.Errorf("%s for %s: %d, want %d", path, host, got, want)
			}
		}
		if got := ask(b, "/", host); got != want {
			t.Errorf("with names, for %s: %d, want %d", host, got, want)
		}
	}
	for host, want := range map[string]int{"limits.example.com": 200, "limits.example.com:80": 200, "LIMITS.example.com.": 200, "example.com": 421} {
		if got := ask(b, "/", host); got != want {
			t.Errorf("with names, for %s: %d, want %d", host, got, want)
		}
	}
	if hostCheck("0.0.0.0", nil) != nil {
		t.Error("a node that others reach does not know all of its names, and is to answer for any")
	}
	if check := hostCheck("0.0.0.0", []string{"a.example"}); check("b.example") || !check("a.example") {
		t.Error("names that are given count everywhere")
	}
	for _, bad := range []string{"", "a:80", "*.example.com", "http://a", "a."} {
		if err := checkHosts([]string{bad}); err == nil || !strings.Contains(err.Error(), "is not a host name") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// TestForwardAuthFlags: what keys may be taken from is checked before anything is opened.
func TestForwardAuthFlags(t *testing.T) {
	cfg := Config{ForwardAuthHeaders: []string{"x-api-key"}, TrustedProxies: []string{"10.0.0.0/8", "2001:db8::1"}}
	if f, err := cfg.forwardAuth(); err != nil || f.Headers[0] != "X-Api-Key" || len(f.TrustedProxies) != 2 {
		t.Errorf("%+v, %v", f, err)
	}
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
		if err == nil || !strings.HasPrefix(err.Error(), c.flag) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

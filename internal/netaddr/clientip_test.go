package netaddr

import (
	"net"
	"net/http"
	"net/netip"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func TestKey(t *testing.T) {
	trusted := must.Value(ParsePrefixes([]string{"10.0.0.0/8", "192.0.2.9", "fd00::/8"}))(t)
	for name, c := range map[string]struct {
		trusted []netip.Prefix
		bits    int
		remote  string
		forward []string
		want    string
	}{
		"peer":                {nil, 0, "192.0.2.1:5000", nil, "192.0.2.1"},
		"a stranger's header": {trusted, 0, "192.0.2.1:5000", []string{"203.0.113.5"}, "192.0.2.1"},
		"nobody is trusted":   {nil, 0, "10.0.0.1:5000", []string{"203.0.113.5"}, "10.0.0.1"},
		"one proxy":           {trusted, 0, "10.0.0.1:5000", []string{"203.0.113.5"}, "203.0.113.5"},
		"two proxies":         {trusted, 0, "10.0.0.1:5000", []string{"203.0.113.5, 10.2.3.4"}, "203.0.113.5"},
		"two proxies, two lines": {trusted, 0, "10.0.0.1:5000", []string{"203.0.113.5", "192.0.2.9"},
			"203.0.113.5"},
		"a forged first hop":          {trusted, 0, "10.0.0.1:5000", []string{"1.1.1.1, 203.0.113.5, 10.2.3.4"}, "203.0.113.5"},
		"all are trusted":             {trusted, 0, "10.0.0.1:5000", []string{"10.9.9.9,10.2.3.4"}, "10.9.9.9"},
		"no header":                   {trusted, 0, "10.0.0.1:5000", nil, "10.0.0.1"},
		"an empty header":             {trusted, 0, "10.0.0.1:5000", []string{""}, "10.0.0.1"},
		"garbage":                     {trusted, 0, "10.0.0.1:5000", []string{"203.0.113.5, unknown"}, "10.0.0.1"},
		"garbage behind two":          {trusted, 0, "10.0.0.1:5000", []string{"unknown, 10.2.3.4"}, "10.2.3.4"},
		"garbage before":              {trusted, 0, "10.0.0.1:5000", []string{"x\r\ny, 203.0.113.5"}, "203.0.113.5"},
		"a hop with a port":           {trusted, 0, "10.0.0.1:5000", []string{"203.0.113.5:1234"}, "203.0.113.5"},
		"IPv6":                        {nil, 0, "[2001:db8:1:2:3:4:5:6]:5000", nil, "2001:db8:1:2::/64"},
		"IPv6 by 48":                  {nil, 48, "[2001:db8:1:2:3:4:5:6]:5000", nil, "2001:db8:1::/48"},
		"IPv6 whole":                  {nil, 128, "[2001:db8::6]:5000", nil, "2001:db8::6"},
		"IPv6 hop in brackets":        {trusted, 0, "[fd00::1]:5000", []string{"[2001:db8::6]:99"}, "2001:db8::/64"},
		"IPv6 hop in brackets, short": {trusted, 0, "[fd00::1]:5000", []string{"[2001:db8::6]"}, "2001:db8::/64"},
		"IPv4 in IPv6": {trusted, 0, "[::ffff:10.0.0.1]:5000", []string{"::ffff:203.0.113.5"},
			"203.0.113.5"},
		"a zone":     {nil, 0, "[fe80::1%eth0]:5000", nil, "fe80::/64"},
		"no address": {trusted, 0, "@", []string{"203.0.113.5"}, ""},
	} {
		r := Resolver{Trusted: c.trusted, IPv6Bits: c.bits}
		h := http.Header{}
		if c.forward != nil {
			h["X-Forwarded-For"] = c.forward
		}
		expect.Equal(t, r.Key(c.remote, h), c.want, "%s", name)
		unnamed := map[string]bool{"no header": true, "an empty header": true, "garbage": true,
			"garbage behind two": true, "no address": true}
		_, named := r.Caller(c.remote, h)
		expect.True(t, named != unnamed[name], "%s: named is %t", name, named)
	}
}

func TestParsePrefixes(t *testing.T) {
	for _, bad := range []string{"", "x", "10.0.0.1/8", "10.0.0.0/33", "fe80::1%eth0"} {
		_, err := ParsePrefixes([]string{bad})
		expect.True(t, err != nil, "%q is accepted", bad)
	}
}

func FuzzKey(f *testing.F) {
	f.Add("10.0.0.1:1", "1.1.1.1, 2001:db8::1,,")
	r := Resolver{Trusted: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}
	f.Fuzz(func(t *testing.T, remote, forwarded string) {
		key := r.Key(remote, http.Header{"X-Forwarded-For": {forwarded}})
		if key == "" {
			return
		}
		if _, err := netip.ParseAddr(key); err != nil {
			_, err := netip.ParsePrefix(key)
			expect.NoError(t, err, "%q is no address", key)
		}
	})
}

func TestHost(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "127.0.0.1": true, "127.8.9.10": true, "::1": true, "::ffff:127.0.0.1": true,
		"": false, "0.0.0.0": false, "::": false, "192.0.2.1": false, "::ffff:192.0.2.1": false, "::2": false,
		"128.0.0.1":             false,
		"127.0.0.1.example.com": false, "localhost.example.com": false, "127.0.0.1:80": false, "[::1]": false,
		"127.1": false,
	} {
		expect.Equal(t, LoopbackHost(host), want, "Host(%q)", host)
	}
}

func TestHostPort(t *testing.T) {
	for address, want := range map[string]bool{
		"localhost:80": true, "127.0.0.1:80": true, "[::1]:80": true, "[::ffff:127.0.0.1]:80": true,
		"": false, ":80": false, "127.0.0.1": false, "localhost": false, "192.0.2.1:80": false, "::1:80": false,
		"@": false,
	} {
		expect.Equal(t, LoopbackHostPort(address), want, "HostPort(%q)", address)
	}
}

func TestAddr(t *testing.T) {
	expect.True(t, !LoopbackAddr(nil), "nil is an address of this host")
	expect.True(t, LoopbackAddr(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80}) &&
		!LoopbackAddr(&net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 80}), "an IPv4 address is taken for another")
	expect.True(t, LoopbackAddr(&net.TCPAddr{IP: net.IPv6loopback, Port: 80}) &&
		!LoopbackAddr(&net.UnixAddr{Name: "/run/weir", Net: "unix"}),
		"an IPv6 address or a socket's name is taken for another")
}

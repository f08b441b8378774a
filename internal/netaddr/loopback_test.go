package netaddr

import (
	"net"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

func TestHost(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "127.0.0.1": true, "127.8.9.10": true, "::1": true, "::ffff:127.0.0.1": true,
		"": false, "0.0.0.0": false, "::": false, "192.0.2.1": false, "::ffff:192.0.2.1": false, "::2": false, "128.0.0.1": false,
		"127.0.0.1.example.com": false, "localhost.example.com": false, "127.0.0.1:80": false, "[::1]": false, "127.1": false,
	} {
		expect.Equal(t, LoopbackHost(host), want, "Host(%q)", host)
	}
}

func TestHostPort(t *testing.T) {
	for address, want := range map[string]bool{
		"localhost:80": true, "127.0.0.1:80": true, "[::1]:80": true, "[::ffff:127.0.0.1]:80": true,
		"": false, ":80": false, "127.0.0.1": false, "localhost": false, "192.0.2.1:80": false, "::1:80": false, "@": false,
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

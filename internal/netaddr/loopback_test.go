package netaddr

import (
	"net"
	"testing"
)

func TestHost(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "127.0.0.1": true, "127.8.9.10": true, "::1": true, "::ffff:127.0.0.1": true,
		"": false, "0.0.0.0": false, "::": false, "192.0.2.1": false, "::ffff:192.0.2.1": false, "::2": false, "128.0.0.1": false,
		"127.0.0.1.example.com": false, "localhost.example.com": false, "127.0.0.1:80": false, "[::1]": false, "127.1": false,
	} {
		if got := LoopbackHost(host); got != want {
			t.Errorf("Host(%q) is %t", host, got)
		}
	}
}

func TestHostPort(t *testing.T) {
	for address, want := range map[string]bool{
		"localhost:80": true, "127.0.0.1:80": true, "[::1]:80": true, "[::ffff:127.0.0.1]:80": true,
		"": false, ":80": false, "127.0.0.1": false, "localhost": false, "192.0.2.1:80": false, "::1:80": false, "@": false,
	} {
		if got := LoopbackHostPort(address); got != want {
			t.Errorf("HostPort(%q) is %t", address, got)
		}
	}
}

func TestAddr(t *testing.T) {
	if LoopbackAddr(nil) {
		t.Error("nil is an address of this host")
	}
	if !LoopbackAddr(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80}) || LoopbackAddr(&net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 80}) {
		t.Error("an IPv4 address is taken for another")
	}
	if !LoopbackAddr(&net.TCPAddr{IP: net.IPv6loopback, Port: 80}) || LoopbackAddr(&net.UnixAddr{Name: "/run/weir", Net: "unix"}) {
		t.Error("an IPv6 address or a socket's name is taken for another")
	}
}

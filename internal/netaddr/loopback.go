package netaddr

import (
	"net"
	"net/netip"
)

// LoopbackHost reports whether host, an IP address without a port or a name, is localhost or an address of the loopback
// interface.
func LoopbackHost(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// LoopbackHostPort is LoopbackHost for an address with a port, such as localhost:8081.
func LoopbackHostPort(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && LoopbackHost(host)
}

// LoopbackAddr is LoopbackHostPort for the address of a connection; false for nil.
func LoopbackAddr(addr net.Addr) bool {
	return addr != nil && LoopbackHostPort(addr.String())
}

// Package loopback tells which addresses lead to this host only, so that nobody else reads what is sent there. Names are not
// resolved: of all names only localhost is one of these (RFC 6761, section 6.3), whatever others resolve to.
package loopback

import (
	"net"
	"net/netip"
)

// Host reports whether host, an IP address without a port or a name, is localhost or an address of the loopback interface. What is
// neither an address nor a name is not.
func Host(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// HostPort is Host of an address with a port, as in localhost:8081.
func HostPort(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && Host(host)
}

// Addr is HostPort of an end of a connection; false of nil.
func Addr(addr net.Addr) bool {
	return addr != nil && HostPort(addr.String())
}

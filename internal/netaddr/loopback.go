package netaddr

import (
	"net"
	"net/netip"
)

// LoopbackHost reports whether host, an IP address without a port or a name, is localhost or an address of the loopback interface. What is
// neither an address nor a name is not.
func LoopbackHost(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// LoopbackHostPort is LoopbackHost of an address with a port, as in localhost:8081.
func LoopbackHostPort(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && LoopbackHost(host)
}

// LoopbackAddr is LoopbackHostPort of an end of a connection; false of nil.
func LoopbackAddr(addr net.Addr) bool {
	return addr != nil && LoopbackHostPort(addr.String())
}

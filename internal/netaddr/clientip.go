// Package netaddr finds the address to limit a caller by (its own, or the one for which trusted proxies ask), and the
// addresses that lead to this host only.
//
// An address need not stand for one person. IPv6 callers own a whole prefix, so the prefix is limited. Names are not
// resolved: of all names only localhost is loopback (RFC 6761, section 6.3).
package netaddr

import (
	"cmp"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// DefaultIPv6Bits is the length of the prefix by which IPv6 callers are limited: a site gets at least that (RFC 6177).
const DefaultIPv6Bits = 64

// Resolver finds the address of a caller. The zero value trusts no proxy: the caller is the peer of the connection. It
// must not change while it is in use; then it is safe for concurrent use.
type Resolver struct {
	// Trusted are the addresses of proxies that append the address of their peer to X-Forwarded-For. Its addresses are
	// believed from the last one backwards, while the proxies that added them are trusted.
	Trusted []netip.Prefix
	// IPv6Bits is the length of the prefix of IPv6 addresses, 1 to 128; 0 stands for DefaultIPv6Bits.
	IPv6Bits int
}

// ParsePrefixes parses prefixes such as 10.0.0.0/8, or single addresses such as 192.0.2.1.
func ParsePrefixes(texts []string) ([]netip.Prefix, error) {
	var list []netip.Prefix
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			a, addrErr := netip.ParseAddr(text)
			if addrErr != nil || a.Zone() != "" {
				return nil, fmt.Errorf("%q is neither an address nor a prefix such as 10.0.0.0/8", text)
			}
			p = netip.PrefixFrom(a, a.BitLen())
		}
		if p != p.Masked() {
			return nil, fmt.Errorf("%q has bits beyond its prefix: write %s", text, p.Masked())
		}
		list = append(list, p)
	}
	return list, nil
}

// Key returns the address to limit a request by, such as "192.0.2.1" or "2001:db8::/64". It is empty if remoteAddr is
// no address, as in no request from a network.
func (r *Resolver) Key(remoteAddr string, header http.Header) string {
	key, _ := r.Caller(remoteAddr, header)
	return key
}

// Caller is Key. named is false if the key is the address of a trusted proxy because X-Forwarded-For has no address
// before it: it is empty, or has something else in its place.
func (r *Resolver) Caller(remoteAddr string, header http.Header) (key string, named bool) {
	from, named := parse(remoteAddr)
	if !named {
		return "", false
	}
	if r.trusts(from) {
		named = false
		for hops := strings.Join(header["X-Forwarded-For"], ","); hops != ""; {
			last := strings.LastIndexByte(hops, ',')
			a, ok := parse(strings.TrimSpace(hops[last+1:]))
			hops = hops[:max(last, 0)]
			if named = ok; !ok {
				break // the address before it is not known
			}
			if from = a; !r.trusts(a) {
				break
			}
		}
	}
	if from.Is4() {
		return from.String(), named
	}
	bits := cmp.Or(r.IPv6Bits, DefaultIPv6Bits)
	p, err := from.Prefix(bits)
	if err != nil || bits == 128 {
		return from.String(), named
	}
	return p.String(), named
}

// Trusts reports whether an address, with or without a port, is that of a trusted proxy.
func (r *Resolver) Trusts(remoteAddr string) bool {
	a, ok := parse(remoteAddr)
	return ok && r.trusts(a)
}

func (r *Resolver) trusts(a netip.Addr) bool {
	return slices.ContainsFunc(r.Trusted, func(p netip.Prefix) bool { return p.Contains(a) })
}

// parse parses an address with or without a port and brackets. It drops the zone, which is a name of an interface of
// this host.
func parse(s string) (netip.Addr, bool) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap.Addr().Unmap().WithZone(""), true
	}
	a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]"))
	if err != nil {
		return a, false
	}
	return a.Unmap().WithZone(""), true
}

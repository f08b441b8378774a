// Package netaddr judges network addresses: which one to limit a caller by, its own or the one that trusted proxies say they act for,
// and which ones lead to this host only.
//
// It does not promise that an address is one person's. IPv6 callers own a whole prefix, so they are limited by it. Names are not resolved:
// of all names only localhost is loopback (RFC 6761, section 6.3), whatever others resolve to.
package netaddr

import (
	"cmp"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// DefaultIPv6Bits is the prefix of an IPv6 address that a caller is limited by: what one site gets at least (RFC 6177).
const DefaultIPv6Bits = 64

// Resolver says whose word is taken. The zero value takes nobody's: a caller is the peer of its connection. It must not change
// while in use, and is safe for concurrent use then.
type Resolver struct {
	// Trusted are the addresses of proxies that append the address of their peer to X-Forwarded-For. Forwarded addresses are
	// believed from the last backwards, as far as those who added them are trusted.
	Trusted []netip.Prefix
	// IPv6Bits is the length of the prefix of IPv6 addresses, 1 to 128; 0 stands for DefaultIPv6Bits.
	IPv6Bits int
}

// ParsePrefixes reads prefixes, or single addresses, such as 10.0.0.0/8 and 192.0.2.1.
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

// Key returns what to limit a request by, such as "192.0.2.1" or "2001:db8::/64". It is empty when the request has no address,
// which no request from a network has.
func (r *Resolver) Key(remoteAddr string, header http.Header) string {
	key, _ := r.Caller(remoteAddr, header)
	return key
}

// Caller is Key. named is false where that is the address of a trusted proxy because the proxy names nobody: it has sent no address, or
// what stands in its place is none.
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
				break // the proxy that let this through is as far as it can be known
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

// parse reads an address with or without a port and brackets. A zone is dropped: it is this host's name of an interface.
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

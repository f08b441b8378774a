package node

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/weirlimit/weir/internal/netaddr"
)

// hostCheck returns which names in a Host header stand for a node that is bound to an address; nil for any. A page that a
// browser shows can have a name of its own lead to whatever address its author likes (DNS rebinding), and what is only
// guarded by being on loopback, or in a network of its own, then answers to that page. Addresses and localhost are no
// names that an author has.
func hostCheck(bind string, names []string) func(host string) bool {
	if len(names) == 0 && !netaddr.LoopbackHost(bind) {
		return nil
	}
	names = slices.Clone(names)
	for i := range names {
		names[i] = strings.ToLower(names[i])
	}
	return func(host string) bool {
		host = strings.ToLower(strings.TrimSuffix(host, "."))
		if host == "" || host == "localhost" || slices.Contains(names, host) { // without one it was no browser
			return true
		}
		_, err := netip.ParseAddr(host)
		return err == nil
	}
}

// checkHosts says what is wrong with names for a Host header.
func checkHosts(names []string) error {
	for _, name := range names {
		if name == "" || strings.ContainsAny(name, "/:*[] ") || strings.HasSuffix(name, ".") {
			return fmt.Errorf("%q is not a host name: give names as in limits.example.com, without a port or wildcard", name)
		}
	}
	return nil
}

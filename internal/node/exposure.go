package node

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/weirlimit/weir/internal/netaddr"
)

// forCallers reports whether there is a port for callers.
func (cfg *Config) forCallers() bool {
	return cfg.HTTPPort != PortOff || cfg.GRPCPort != PortOff || cfg.RESPPort != PortOff
}

// exposed lists what keeps strangers out of the ports that others can reach, and is not given: nothing on loopback.
func (cfg *Config) exposed() (missing []string) {
	if netaddr.LoopbackHost(cfg.Bind) {
		return nil
	}
	s := cfg.Security
	if cfg.forCallers() && s.AccessFile == "" && s.TLSClientCAFile == "" {
		missing = append(missing, "access-file or tls-client-ca-file (whoever reaches a port for callers may do everything)")
	}
	if cfg.PeerPort != PortOff && s.PeerTLSCertFile == "" {
		missing = append(missing, "peer-tls-cert-file, peer-tls-key-file, peer-tls-ca-file and peer-tls-name (whoever reaches the peer port is a node)")
	}
	if cfg.GossipPort != PortOff && s.GossipKeyFile == "" {
		missing = append(missing, "gossip-key-file (whoever reaches the gossip port may say who is a member)")
	}
	if cfg.GossipPort != PortOff && s.ClusterSecretFile == "" {
		missing = append(missing, "cluster-secret-file (whoever sends keys can aim them at one node)")
	}
	return missing
}

// checkExposure reports ports that others reach without what keeps strangers out, unless Insecure allows that.
func (cfg *Config) checkExposure() error {
	missing := cfg.exposed()
	if len(missing) == 0 || cfg.Security.Insecure {
		return nil
	}
	return fmt.Errorf("bind: %s is reached from other hosts, and this is not given: %s. \"weir secrets DIRECTORY\" makes all of them; the setting insecure does without",
		cfg.Bind, strings.Join(missing, "; "))
}

// warn says once, at the start, what an operator may not have meant.
func (s *security) warn(cfg Config) {
	if netaddr.LoopbackHost(cfg.Bind) {
		return
	}
	open := cfg.exposed()
	if s.callers == nil && cfg.forCallers() {
		open = append(open, "tls-cert-file and tls-key-file (callers are answered in plain text, where tokens can be read on their way)")
	}
	if len(open) > 0 {
		s.log.Warn("node listens beyond loopback unprotected", "bind", cfg.Bind, "without", strings.Join(open, "; "))
	}
}

// hostCheck returns which names in a Host header stand for a node that is bound to an address; nil for any. A page that a
// browser shows can have a name of its own lead to whatever address its author likes (DNS rebinding), and what is only
// guarded by being on loopback, or in a network of its own, then answers to that page. Addresses and localhost are no
// names that an author has.
func hostCheck(bind string, names []string) func(host string) bool {
	if len(names) == 0 && !netaddr.LoopbackHost(bind) {
		return nil
	}
	return func(host string) bool {
		host = strings.TrimSuffix(host, ".")
		is := func(name string) bool { return strings.EqualFold(name, host) }
		_, err := netip.ParseAddr(host)
		return host == "" || err == nil || is("localhost") || slices.ContainsFunc(names, is) // without one it was no browser
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

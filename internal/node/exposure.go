package node

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/weirlimit/weir/internal/netaddr"
)

// forCallers reports whether the node has a port for callers.
func (cfg *Config) forCallers() bool {
	return cfg.HTTPPort != PortOff || cfg.GRPCPort != PortOff || cfg.RESPPort != PortOff
}

// exposed returns the settings that keep strangers out of ports that other hosts can reach, and are not given. On
// loopback it returns nothing.
func (cfg *Config) exposed() (missing []string) {
	if netaddr.LoopbackHost(cfg.Bind) {
		return nil
	}
	s := cfg.Security
	if cfg.forCallers() && s.AccessFile == "" && s.TLSClientCAFile == "" {
		missing = append(missing, "access-file or tls-client-ca-file (every caller may do everything)")
	}
	if cfg.PeerPort != PortOff && s.PeerTLSCertFile == "" {
		missing = append(missing,
			"peer-tls-cert-file, peer-tls-key-file, peer-tls-ca-file and peer-tls-name (any process can be a node)")
	}
	if cfg.GossipPort != PortOff && s.GossipKeyFile == "" {
		missing = append(missing, "gossip-key-file (any process can say who is a member)")
	}
	if cfg.GossipPort != PortOff && s.ClusterSecretFile == "" {
		missing = append(missing, "cluster-secret-file (any caller can aim keys at one node)")
	}
	return missing
}

// checkExposure returns an error if exposed returns settings, unless Insecure is set.
func (cfg *Config) checkExposure() error {
	missing := cfg.exposed()
	if len(missing) == 0 || cfg.Security.Insecure {
		return nil
	}
	return fmt.Errorf("bind: %s is reached from other hosts, and this is not given: %s. \"weir secrets DIRECTORY\" makes all of them; the setting insecure does without",
		cfg.Bind, strings.Join(missing, "; "))
}

// warn logs once, at the start, which protection is missing.
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

// hostCheck returns a function that reports whether a name in a Host header stands for this node; nil: any name does. A
// web page can make its own name lead to any address (DNS rebinding), and a node that only its address protects
// (loopback, a private network) would then answer the page's requests. IP addresses and localhost are safe: a page
// cannot have them as its name.
func hostCheck(bind string, names []string) func(host string) bool {
	if len(names) == 0 && !netaddr.LoopbackHost(bind) {
		return nil
	}
	return func(host string) bool {
		host = strings.TrimSuffix(host, ".")
		is := func(name string) bool { return strings.EqualFold(name, host) }
		_, err := netip.ParseAddr(host)
		// without a Host header the caller is no browser
		return host == "" || err == nil || is("localhost") || slices.ContainsFunc(names, is)
	}
}

// checkHosts returns an error for a name that cannot be in a Host header.
func checkHosts(names []string) error {
	for _, name := range names {
		if name == "" || strings.ContainsAny(name, "/:*[] ") || strings.HasSuffix(name, ".") {
			return fmt.Errorf("%q is not a host name: give names as in limits.example.com, without a port or wildcard",
				name)
		}
	}
	return nil
}

package cluster

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/memberlist"
)

// Config says who a node is and how it finds the others. The zero value of everything but Name and
// SettingsFingerprint is usable: a cluster of one on the loopback address.
type Config struct {
	// Name is the ring name, stable over restarts and unique in the cluster: 1 to 63 of a-z A-Z 0-9 . _ -
	Name string
	// Bind is the IP address to listen on for gossip, TCP and UDP. Empty: 127.0.0.1.
	Bind string
	// GossipPort is the port for both. 0 picks a free one, which View().Self.GossipAddr then tells.
	GossipPort int
	// Advertise is the IP address or host name at which others reach all ports of this node; a name is resolved once,
	// by Start. Empty: Bind, or when that is 0.0.0.0 a private address of this host.
	Advertise string
	// PeerPort, HTTPPort and GRPCPort are the ports that the node listens on, told to the others. 0: none.
	PeerPort, HTTPPort, GRPCPort int
	// Join lists seeds as HOST:PORT, members to begin with. Names are resolved afresh for each attempt, and all their
	// addresses count. The node itself may be among them; it is no answer. Empty: the node does not look for others.
	Join []string
	// SettingsFingerprint is ring.SettingsFingerprint of the cluster's hash key.
	SettingsFingerprint uint64
	// Keys encrypts the gossip: AES keys of 16, 24 or 32 bytes, all good for reading, the first for writing. Empty:
	// plain.
	Keys [][]byte
	// Voters are the names of the nodes that grant what strict policies need, in any order. A node with another list is
	// rejected: two lists can have majorities without a voter in common.
	Voters []string
	// MaxMembers bounds the processes that are members at a time, this one included. 0: 256.
	MaxMembers int
	// Identify asks the process behind a peer address, HOST:PORT, who it is: see Cluster.Identity. It returns an error
	// when no process answers there that can prove to be a node of this cluster. A process that gossip names counts
	// only once it has answered. Start requires it. It is called by several goroutines.
	Identify func(ctx context.Context, addr string) (Identity, error)
	// PolicyHash is shown to the others; see SetPolicyHash.
	PolicyHash uint32
	// EnvoyHash is shown to the others; see SetEnvoyHash.
	EnvoyHash uint32
	// Logger gets what an operator wants to know. Nil: slog.Default().
	Logger *slog.Logger
	// Rejected, when set, is told each time that a process is rejected, by one of the Reasons below; it is called by
	// several goroutines and must return at once. What there is to say is logged already.
	Rejected func(reason string)

	// ProbeInterval paces the failure detection: a crash is seen after 5 to 11 times as long, and
	// a second later where nothing refuses connections.
	// 0: 300 ms. Shorter ones take a pause of the process (or a busy machine) for a crash.
	ProbeInterval time.Duration
	// Settle is how long no member may have come or gone before a joining node becomes active; at the latest it does so
	// after SeedTimeout. 0: 500 ms.
	Settle time.Duration
	// SeedTimeout is how long a joining node waits for a first answer before it goes on alone, from when a seed's name
	// has first stood for an address. 0: 15 s.
	SeedTimeout time.Duration
	// RejoinInterval is the mean time between attempts to reach seeds that are not members. 0: 5 s; a tenth while
	// joining.
	RejoinInterval time.Duration
	// ConflictTimeout is how long another process may go on using this node's name before that is fatal: longer than
	// the failure detection takes. 0: 20 times ProbeInterval.
	ConflictTimeout time.Duration

	// wrapTransport lets tests cut the network.
	wrapTransport func(memberlist.NodeAwareTransport) memberlist.NodeAwareTransport
}

// The reasons that Config.Rejected is given.
const (
	OtherKey     = "gossip_key"    // what arrived cannot be read with the keys of this node, or is in plain text
	OtherCluster = "other_cluster" // a node that cannot be a member, such as one with another secret
	Unverified   = "unverified"    // a process that gossip names, and that has not answered on its peer port
	TooMany      = "too_many"      // a connection or a member beyond what is allowed at a time
	Malformed    = "malformed"     // what no node sends
)

// DefaultMaxMembers is Config.MaxMembers where nothing is said.
const DefaultMaxMembers = 256

// withDefaults returns c with every zero replaced by its default.
func (c Config) withDefaults() Config {
	c.Bind = cmp.Or(c.Bind, "127.0.0.1")
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.Rejected == nil {
		c.Rejected = func(string) {}
	}
	c.MaxMembers = cmp.Or(c.MaxMembers, DefaultMaxMembers)
	c.ProbeInterval = cmp.Or(c.ProbeInterval, 300*time.Millisecond)
	c.Settle = cmp.Or(c.Settle, 500*time.Millisecond)
	c.SeedTimeout = cmp.Or(c.SeedTimeout, 15*time.Second)
	c.RejoinInterval = cmp.Or(c.RejoinInterval, 5*time.Second)
	c.ConflictTimeout = cmp.Or(c.ConflictTimeout, 20*c.ProbeInterval)
	return c
}

// Validate reports the first thing that is wrong, named as the command line names it. Start calls it.
func (c Config) Validate() error {
	c = c.withDefaults()
	if err := CheckName(c.Name); err != nil {
		return fmt.Errorf("name: %w", err)
	}
	bind, err := netip.ParseAddr(c.Bind)
	if err != nil || bind.Zone() != "" {
		return fmt.Errorf("bind: %q is not an IP address", c.Bind)
	}
	if strings.ContainsAny(c.Advertise, "/ []") || strings.Count(c.Advertise, ":") == 1 {
		return fmt.Errorf("advertise: %q is not an IP address or host name (it takes no port: others use the ports this node listens on)", c.Advertise)
	}
	if bind == netip.IPv6Unspecified() && c.Advertise == "" {
		return errors.New("advertise: needed where bind is ::, to say which address others reach this node at")
	}
	if a, err := netip.ParseAddr(c.Advertise); err == nil && a.IsUnspecified() {
		return fmt.Errorf("advertise: others cannot reach %s; give an address of this host", c.Advertise)
	}
	for _, p := range []struct {
		flag string
		port int
	}{{"gossip-port", c.GossipPort}, {"peer-port", c.PeerPort}, {"http-port", c.HTTPPort}, {"grpc-port", c.GRPCPort}} {
		if p.port < 0 || p.port > 65535 {
			return fmt.Errorf("%s: %d is not a port, 0 to 65535", p.flag, p.port)
		}
	}
	if c.MaxMembers < 1 || c.MaxMembers > 10_000 {
		return fmt.Errorf("max-members: %d is not a number of members, 1 to 10000", c.MaxMembers)
	}
	for _, s := range c.Join {
		if _, _, err := splitSeed(s); err != nil {
			return fmt.Errorf("join: %w", err)
		}
	}
	for i, k := range c.Keys {
		if err := checkKey(k); err != nil {
			return fmt.Errorf("gossip-key-file: key %d: %w", i+1, err)
		}
	}
	return nil
}

// CheckName says what is wrong with a ring name, if anything.
func CheckName(name string) error {
	if name == "" || len(name) > 63 {
		return fmt.Errorf("%q must have 1 to 63 characters", name)
	}
	for _, c := range []byte(name) {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-') {
			return fmt.Errorf("%q must consist of a-z A-Z 0-9 . _ -", name)
		}
	}
	return nil
}

// splitSeed takes a seed apart.
func splitSeed(seed string) (host string, port uint16, err error) {
	host, digits, err := net.SplitHostPort(seed)
	if err != nil {
		return "", 0, fmt.Errorf("%q is not HOST:PORT", seed)
	}
	if host == "" || strings.ContainsAny(host, "/ ") {
		return "", 0, fmt.Errorf("%q names no host", seed)
	}
	n, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || n == 0 {
		return "", 0, fmt.Errorf("%q: %q is not a port, 1 to 65535", seed, digits)
	}
	return host, uint16(n), nil
}

func checkKey(key []byte) error {
	switch len(key) {
	case 16, 24, 32:
		return nil
	}
	return fmt.Errorf("has %d bytes; it must have 16, 24 or 32", len(key))
}

// ParseKeys reads gossip keys: one a line, in base64, of 16, 24 or 32 bytes; the first is used for writing. Empty lines
// and lines that begin with # are skipped. file is the content's name in errors, which hold nothing of a key.
func ParseKeys(file string, text []byte) ([][]byte, error) {
	var keys [][]byte
	for i, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		key, err := base64.StdEncoding.DecodeString(line)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: not base64; make a key with: openssl rand -base64 32", file, i+1)
		}
		if err := checkKey(key); err != nil {
			return nil, fmt.Errorf("%s:%d: the key %w", file, i+1, err)
		}
		keys = append(keys, key)
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("%s holds no key; make one with: openssl rand -base64 32", file)
	}
	if len(keys) > MaxKeys {
		return nil, fmt.Errorf("%s holds %d keys, at most %d make sense: each is tried on what arrives", file,
			len(keys), MaxKeys)
	}
	return keys, nil
}

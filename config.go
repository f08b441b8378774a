package weir

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/policy"
)

// AnyPort, as a port of Config, stands for any free port: see Node.Addresses.
const AnyPort = -1

// Config configures a Node. Only Name is required. With nothing else, the node never joins others and listens on no
// port. The caller must not change what a field refers to while the node runs.
//
// The command weir run has the same settings under other names: GossipPort is --gossip-port. Documents, logs and
// metrics use the names of the flags.
type Config struct {
	// Name is the node's name, stable over restarts and unique in the cluster: 1 to 63 of a-z A-Z 0-9 . _ - Required.
	Name string
	// Bind is the IP address that all ports listen on. Empty: 127.0.0.1. Beyond loopback the node starts only with
	// authentication and encryption, or with Security.Insecure.
	Bind string
	// Advertise is the IP address or host name by which other nodes reach this one. Empty: Bind, or, if that is
	// 0.0.0.0, a private address of this host.
	Advertise string

	// GossipPort, TCP and UDP, and PeerPort, TCP, are for the other members: 1 to 65535, or AnyPort. Both 0: a node
	// that never joins others.
	GossipPort, PeerPort int
	// HTTPPort, GRPCPort and RESPPort, for the Redis protocol, are for callers in other processes: 1 to 65535, or
	// AnyPort. 0: off.
	HTTPPort, GRPCPort, RESPPort int

	// Join has addresses of members, HOST:PORT of their gossip. Names are resolved again for each attempt, and all
	// their addresses are used. Empty: the node joins no other member; others may join it.
	Join []string
	// Voters are the names of the 1, 3 or 5 members whose majority grants what strict policies need, the same on all
	// members. Empty: strict policies are an error.
	Voters []string
	// MaxMembers bounds the members of the cluster, 1 to 10,000. 0: 256.
	MaxMembers int

	// Policies is the content of a policy file (YAML), the same on all members. Empty: PolicyFile.
	Policies []byte
	// PolicyFile is the name of a policy file, which is read again when it changes. Empty: no policies but Policies.
	PolicyFile string
	// DataDir is the directory, of this member alone, that keeps the overrides that operators set while members run,
	// and the counters of policies with persist: true, which require it. Empty: overrides are lost when no member runs.
	DataDir string
	// NoInline rejects inline limits: limits that are sent along with a check.
	NoInline bool
	// InlineMaxWindow is the longest window of an inline limit, and the longest time in which its bucket may refill,
	// the same on all members. 0: 366 days; -1: no bound.
	InlineMaxWindow time.Duration

	// Timeout bounds how long a check waits for the member that decides, 1 ms to 1 min; then its policy's on_error
	// answers. 0: 1 s.
	Timeout time.Duration
	// Grace bounds how long Stop hands over and waits for callers of the ports, whatever its context says. 0: 10 s.
	Grace time.Duration

	// Memory is how many of the process's bytes the node may use, 64 MiB or more. It is divided among counters, copies
	// of other members' counters, connections and requests in flight. 0: a quarter of what the process may use, by its
	// control group, the machine and GOMEMLIMIT. The program sets the runtime's own limit.
	Memory int64
	// MaxKeys bounds the keys with live state. 0: 10,000,000; -1: no bound but Memory.
	MaxKeys int64

	// HTTPHosts are names in Host headers that the HTTP port accepts besides IP addresses and localhost. Empty: no
	// others if Bind is a loopback address, otherwise any name.
	HTTPHosts []string
	// NoConsole serves no page at /console of the HTTP port.
	NoConsole bool

	// Security configures authentication and encryption.
	Security Security

	// Logger gets the node's log. Nil: slog.Default().
	Logger *slog.Logger
	// Registerer gets the node's metrics while it runs, without those of the process. Several nodes of one process need
	// different labels: see prometheus.WrapRegistererWith. Nil: only the HTTP port shows the metrics.
	Registerer prometheus.Registerer
}

// Security configures authentication and encryption. All fields but Insecure and AuditLog are names of files. They are
// read when the node starts and, if the field does not say otherwise, again when they change. Empty: none.
type Security struct {
	// TLSCertFile (PEM, with its chain) and TLSKeyFile (PEM) are for the ports of callers. Both empty: plain text.
	TLSCertFile, TLSKeyFile string
	// TLSClientCAFile has the authorities (PEM) of callers' certificates. A caller must then present a certificate or,
	// if there is an AccessFile, a token.
	TLSClientCAFile string
	// PeerTLSCertFile, PeerTLSKeyFile and PeerTLSCAFile are for mutual TLS between members. PeerTLSName is the name
	// (DNS or URI) that all their certificates have. All four, or none: plain text.
	PeerTLSCertFile, PeerTLSKeyFile, PeerTLSCAFile, PeerTLSName string
	// AccessFile says which callers may do what over the ports (YAML). Empty: every caller may do everything. The
	// program itself may do everything in both cases.
	AccessFile string
	// GossipKeyFile has the keys that encrypt gossip: base64, one a line, the first for sending.
	GossipKeyFile string
	// ClusterSecretFile has the cluster's secret, the same on all members, 16 bytes or more; it is not read again.
	ClusterSecretFile string
	// Insecure allows ports beyond loopback without authentication and encryption.
	Insecure bool
	// AuditLog is the file for the audit log: refunds, resets, changes of overrides and of gossip keys, and denied
	// calls, as lines of JSON.
	AuditLog string
}

// minMemory is the least memory into which all parts of a node fit.
const minMemory = 64 << 20

// Validate returns the first mistake that it finds without opening a file or port. The error begins with the name of
// the field; mistakes in Policies have one line each, with line and column.
func (c *Config) Validate() error {
	_, err := c.node()
	return err
}

// node returns the configuration of the node, and validates it.
func (c *Config) node() (node.Config, error) {
	out := node.Config{
		Name: c.Name, Version: version(), Bind: cmp.Or(c.Bind, "127.0.0.1"), Advertise: c.Advertise,
		GossipPort: node.Port(c.GossipPort), PeerPort: node.Port(c.PeerPort),
		HTTPPort: node.Port(c.HTTPPort), GRPCPort: node.Port(c.GRPCPort), RESPPort: node.Port(c.RESPPort),
		Join: c.Join, Voters: c.Voters, MaxMembers: c.MaxMembers,
		PolicyFile: c.PolicyFile, DataDir: c.DataDir, NoInline: c.NoInline, InlineMaxWindow: c.InlineMaxWindow,
		Timeout: c.Timeout, Grace: c.Grace, MaxKeys: c.MaxKeys, HTTPHosts: c.HTTPHosts, NoConsole: c.NoConsole,
		Security: node.Security(c.Security), Logger: c.Logger, Registerer: c.Registerer,
	}
	if out.Logger == nil {
		out.Logger = slog.Default()
	}
	usable := admission.OwnBudget().Usable / 4
	if c.Memory != 0 {
		usable = c.Memory
	}
	if c.Memory != 0 && usable < minMemory {
		return out, fieldError(fmt.Errorf("memory: %d bytes are fewer than a node needs, %d", usable, minMemory))
	}
	out.Memory = admission.Divide(usable)
	if c.Security.AuditLog == observe.AuditStderr {
		return out, fieldError(errors.New("audit-log: standard error is the program's: give the name of a file"))
	}
	if len(c.Policies) > 0 {
		if c.PolicyFile != "" {
			return out, fmt.Errorf("%s: goes without %s", "Policies", "PolicyFile")
		}
		var err error
		if out.Policies, err = policy.Parse("Policies", c.Policies); err != nil {
			return out, err
		}
	}
	return out, fieldError(out.Validate())
}

// version returns the version of this module in the program.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range append(info.Deps, &info.Main) {
			if m.Path == "github.com/weirlimit/weir" && m.Version != "" {
				return m.Version
			}
		}
	}
	return "devel"
}

// configError is an error of a node with the names of fields in place of the names of settings.
type configError struct {
	text string
	err  error
}

// Error implements error.
func (e *configError) Error() string { return e.text }

// Unwrap returns the node's error.
func (e *configError) Unwrap() error { return e.err }

// settings matches the names of settings at the beginning of a line of an error.
var settings = regexp.MustCompile(`(?m)^[a-z]+(?:-[a-z]+)*(?:, [a-z]+(?:-[a-z]+)*)*: `)

// fieldError returns an error of a node with the names of fields in place of the names of settings.
func fieldError(err error) error {
	if err == nil {
		return nil
	}
	fields := map[string]string{"policies": "PolicyFile"}
	for _, t := range []reflect.Type{reflect.TypeFor[Config](), reflect.TypeFor[Security]()} {
		for _, f := range reflect.VisibleFields(t) {
			if name := strings.ToLower(f.Name); fields[name] == "" {
				fields[name] = f.Name
			}
		}
	}
	text := settings.ReplaceAllStringFunc(err.Error(), func(found string) string {
		list := strings.Split(strings.TrimSuffix(found, ": "), ", ")
		for i, name := range list {
			if list[i] = fields[strings.ReplaceAll(name, "-", "")]; list[i] == "" {
				return found
			}
		}
		return strings.Join(list, ", ") + ": "
	})
	return &configError{text, err}
}

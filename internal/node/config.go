package node

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirlimit/weir/cluster"
	httpapi "github.com/weirlimit/weir/gateway/http"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
)

// Port is a port to listen on: 1 to 65535, or one of these.
type Port int

const (
	PortOff Port = 0  // none: the service is off
	PortAny Port = -1 // any free one
)

// Config configures a node. Its tags are described with Setting. If the comment of a field does not say otherwise, its
// zero value means none, or, for a number other than a Port, the default. The caller must not change what its fields
// point to while the node runs.
//
// Errors begin with the name of the flag: http-port for HTTPPort.
type Config struct {
	// required
	Name string `flag:"name" help:"the node's name, stable over restarts and unique in the cluster (default: the host name)"`
	// required
	Bind      string `flag:"bind" default:"127.0.0.1" help:"IP address that all ports listen on"`
	Advertise string `flag:"advertise" help:"IP address or host name that other nodes reach this one at (default: the one it binds)"`

	HTTPPort   Port `flag:"http-port" default:"8080" help:"port for HTTP"`
	GRPCPort   Port `flag:"grpc-port" default:"8081" help:"port for gRPC"`
	GossipPort Port `flag:"gossip-port" default:"7946" help:"port for gossip, TCP and UDP; empty: a node alone for good"`
	PeerPort   Port `flag:"peer-port" default:"7947" help:"port for gRPC between nodes"`
	RESPPort   Port `flag:"resp-port" help:"port for the Redis protocol (CL.THROTTLE, WEIR.CHECK), 6380 by convention; empty: off"`
	DebugPort  Port `flag:"debug-port" help:"port for profiles (/debug/pprof/), on 127.0.0.1 whatever --bind says; empty: off"`

	HTTPHosts          []string `flag:"http-hosts" help:"host names that HTTP requests may be for besides IP addresses and localhost, separated by commas; empty: only these where --bind is a loopback address, and any name elsewhere"`
	ForwardAuthHeaders []string `flag:"forward-auth-headers" help:"header fields whose values may be keys at /v1/forward-auth (key_header=NAME), separated by commas; empty: none"`
	TrustedProxies     []string `flag:"trusted-proxies" help:"addresses or prefixes of the gateways that ask /v1/forward-auth, and of proxies before them, whose X-Forwarded-For is believed (key_ip=true), separated by commas; empty: none"`

	Join       []string `flag:"join" help:"nodes to join, HOST:PORT of their gossip, separated by commas; a name with several addresses counts as all of them"`
	MaxMembers int      `flag:"max-members" default:"256" range:"1..10000" help:"largest number of nodes in the cluster, 1 to 10000; gossip about more is ignored"`
	Voters     []string `flag:"voters" help:"names of the 1, 3 or 5 nodes whose majority grants what strict policies need, the same on all nodes; ordinals:3 stands for the first three pods of a StatefulSet"`

	PolicyFile  string        `flag:"policies" help:"policy file (YAML), read again when it changes"`
	DataDir     string        `flag:"data-dir" help:"directory, of this node alone, that keeps overrides set while nodes run and the counters of policies with persist: true; empty: both are lost when no member of the cluster runs"`
	RestoreWait time.Duration `flag:"restore-wait" default:"10s" range:"1ms..1h" help:"how long a node that starts with counters on its disk waits for the members of the cluster that it knew, whose disks may have newer ones"`
	KeepNothing bool          // policies with persist: true are allowed without a data directory, and kept in memory

	Timeout time.Duration `flag:"timeout" default:"1s" range:"1ms..1m" help:"longest time for a check that another node decides"`
	Grace   time.Duration `flag:"grace" default:"10s" range:"1ns.." help:"longest time for a graceful stop"`

	NoInline        bool          `flag:"no-inline" help:"reject inline limits: limits sent along with a request"`
	InlineMaxWindow time.Duration `flag:"inline-max-window" default:"8784h0m0s" zero:"none" help:"longest window of an inline limit, and longest time in which its bucket refills, the same on all nodes; 0: no bound"`
	InlineMaxKeys   int64         `flag:"inline-max-keys" default:"0" help:"keys of one namespace of inline limits at most; 0: no bound but the fair part"`
	InlineMaxMemory int64         `flag:"inline-max-memory" unit:"size" default:"0" range:"64KiB..1PiB" help:"memory for state of one namespace of inline limits at most; 0: no bound but the fair part"`
	NoConsole       bool          `flag:"no-console" help:"serve no console at /console"`

	Envoy    Envoy
	Security Security
	Limits   Limits

	MaxKeys            int64 `flag:"max-keys" default:"10000000" zero:"none" help:"keys with live state at most; 0: no bound"`
	MaxMemory          int64 `flag:"max-memory" unit:"memory" default:"auto" zero:"none" help:"memory for state at most: bytes (512MiB), a share of what the process may use (50%), or auto: what the other parts of a node leave; 0: no bound"`
	MaxReservations    int   `flag:"max-reservations" default:"200000" zero:"none" help:"pending reservations of all keys, copies of other nodes' included; 0: none"`
	MaxKeyReservations int   `flag:"max-key-reservations" default:"2000" zero:"none" help:"pending reservations of one key, each extension counted; 0: none"`
	MaxRequestIDs      int   `flag:"max-request-ids" default:"10000" zero:"none" help:"request ids remembered per partition (of 4093); 0: none"`

	OTLPEndpoint    string  `flag:"otlp-endpoint" help:"collector for traces, OTLP over gRPC: http://HOST:PORT, or https://HOST:PORT for TLS; empty: no traces"`
	TraceSample     float64 `flag:"trace-sample" default:"0" help:"share of calls traced, 0 to 1, of those whose callers do not say whether to (W3C traceparent)"`
	TraceCallerRate float64 `flag:"trace-caller-rate" default:"10" help:"calls traced a second at most at their callers' request (the sampled flag of a traceparent); 0: none"`

	// The fields below have no flag.

	// Version is the program's version.
	Version string
	// AnyPortIfTaken has a port that is taken replaced by any free one.
	AnyPortIfTaken bool
	// Policies are in force if PolicyFile is empty.
	Policies *policy.Set
	// UnknownPolicy is the answer to a check of a policy that does not exist. Zero: an error.
	UnknownPolicy limiter.Unknown
	// Memory is the budget of the node. Zero: that of the whole process.
	Memory admission.Budget
	// Logger gets the node's log. Required.
	Logger *slog.Logger
	// LogDropped returns how many lines of the log were dropped. Nil: no line is dropped.
	LogDropped func() uint64
	// Stderr is the writer of an audit log to stderr.
	Stderr io.Writer
	// Registerer, if set, gets the node's metrics while it runs, besides the node's own page.
	Registerer prometheus.Registerer
	// Now returns the time by which certificates expire. Nil: time.Now.
	Now func() time.Time

	probeInterval time.Duration // see cluster.Config: for tests, whose nodes may get no processor time for seconds
}

// Security configures authentication and encryption. Its files are read again when they change, except
// ClusterSecretFile. An empty field means none. weir.Security has the same fields.
type Security struct {
	TLSCertFile       string `flag:"tls-cert-file" help:"certificate (PEM, with its chain) for callers over HTTP, gRPC and the Redis protocol, read again when it changes; empty: plain text"`
	TLSKeyFile        string `flag:"tls-key-file" help:"private key (PEM) of --tls-cert-file"`
	TLSClientCAFile   string `flag:"tls-client-ca-file" help:"authorities (PEM) of callers' certificates, which are then required; with --access-file a token will do instead"`
	PeerTLSCertFile   string `flag:"peer-tls-cert-file" help:"certificate (PEM, with its chain) that this node presents to other nodes, as server and as client; empty: plain text between nodes"`
	PeerTLSKeyFile    string `flag:"peer-tls-key-file" help:"private key (PEM) of --peer-tls-cert-file"`
	PeerTLSCAFile     string `flag:"peer-tls-ca-file" help:"authorities (PEM) of the other nodes' certificates"`
	PeerTLSName       string `flag:"peer-tls-name" help:"name (DNS or URI) that must be among the alternative names of every node's certificate"`
	AccessFile        string `flag:"access-file" help:"who may do what (YAML): tokens and certificates of callers, their roles and policies, read again when it changes; empty: every caller may do everything"`
	GossipKeyFile     string `flag:"gossip-key-file" help:"file with the keys that encrypt gossip, base64, one a line, the first for sending; read again when it changes"`
	ClusterSecretFile string `flag:"cluster-secret-file" help:"file with the cluster's secret, the same on all nodes, 16 bytes or more: the hash of keys depends on it, so that outsiders cannot aim keys at one partition"`
	Insecure          bool   `flag:"insecure" help:"listen beyond loopback without mutual TLS between nodes, gossip keys, a cluster secret and authentication of callers"`
	AuditLog          string `flag:"audit-log" help:"file for the audit log, or stderr: refunds, resets, changes of overrides and of gossip keys, and denied calls, with caller and address, as lines of JSON; empty: none"`
}

// tls returns the certificate files for callers. CA has the authorities of callers' certificates.
func (c *Security) tls() reload.CertFiles {
	return reload.CertFiles{Cert: c.TLSCertFile, Key: c.TLSKeyFile, CA: c.TLSClientCAFile}
}

// peerTLS returns the certificate files for other nodes.
func (c *Security) peerTLS() reload.CertFiles {
	return reload.CertFiles{Cert: c.PeerTLSCertFile, Key: c.PeerTLSKeyFile, CA: c.PeerTLSCAFile}
}

// Limits bounds what callers can hold of a node, at each listener.
type Limits struct {
	MaxConnections          int           `flag:"max-connections" default:"auto" zero:"none" help:"connections of authenticated callers at a time at each port; more are closed; 0: no bound; auto: by the available memory"`
	MaxConnectionsPerSource int           `flag:"max-connections-per-source" default:"0" help:"such connections from one source, an IPv4 address or an IPv6 /64; 0: half of --max-connections"`
	MaxAnonymousConnections int           `flag:"max-anonymous-connections" default:"auto" range:"1.." help:"connections at a time at each port that are not authenticated; more wait, and sources take turns; auto: by the available memory"`
	MaxConnectionAge        time.Duration `flag:"max-connection-age" default:"1h0m0s" range:"1s.." zero:"none" help:"age at which a caller or node is asked to reconnect; keep it below half of the lifetime of client certificates; 0: no bound"`
	IdleTimeout             time.Duration `flag:"idle-timeout" default:"10m0s" range:"1s.." zero:"none" help:"how long a connection of gRPC or the Redis protocol may stay without calls; 0: no bound"`
	MaxStreams              int           `flag:"max-streams" default:"auto" range:"1.." help:"calls at a time on one connection of gRPC or HTTP/2; more wait at the caller; auto: by the available memory"`
	MaxMessageSize          int64         `flag:"max-message-size" unit:"size" default:"auto" range:"1KiB..1GiB" help:"largest body of a request, HTTP or gRPC; auto: 4MiB, or less where there is little memory"`
	MaxHeaderSize           int64         `flag:"max-header-size" unit:"size" default:"32KiB" range:"1KiB..1MiB" help:"largest header of a request, HTTP or gRPC"`
	MaxInFlight             int           `flag:"max-in-flight" default:"auto" range:"1.." help:"checks that wait at a time for other nodes or for copies; more are answered by on_error; auto: by the available memory"`
	FirstMessageTimeout     time.Duration `flag:"first-message-timeout" default:"10s" range:"100ms.." help:"longest time between the headers and the first message of a gRPC call, and for receiving a command of the Redis protocol"`
	WriteTimeout            time.Duration `flag:"write-timeout" default:"30s" range:"100ms.." help:"longest time that a gRPC connection, or a stream on it, waits for a caller that does not read"`
	MaxUnread               int64         `flag:"max-unread" unit:"size" default:"auto" range:"1MiB..1TiB" help:"unread answers of all streams of checks; beyond it streams with more than their share are ended; auto: by the available memory"`
}

// Validate returns the first mistake that it finds without opening a file or port. Start calls it.
func (c *Config) Validate() error {
	if c.Bind == "" {
		// net.Listen takes an empty address for all addresses of the host.
		return errors.New("bind: is empty: give an IP address; 0.0.0.0 stands for all of this host")
	}
	if err := checkNumbers(Settings(c)); err != nil {
		return err
	}
	if err := c.cluster().Validate(); err != nil {
		return err
	}
	if err := checkHosts(c.HTTPHosts); err != nil {
		return fmt.Errorf("http-hosts: %w", err)
	}
	if _, err := c.forwardAuth(); err != nil {
		return err
	}
	if err := c.validateCluster(); err != nil {
		return err
	}
	if err := c.checkExposure(); err != nil {
		return err
	}
	if err := c.Security.validate(); err != nil {
		return err
	}
	if c.PolicyFile == "" {
		if err := c.checkPolicies(c.Policies); err != nil {
			return err
		}
	}
	return c.traces().Check()
}

// validateCluster returns a mistake in the settings of the cluster.
func (c *Config) validateCluster() error {
	if err := checkVoters(c.Voters); err != nil {
		return fmt.Errorf("voters: %w", err)
	}
	switch {
	case c.GossipPort == PortOff && len(c.Join) > 0:
		return errors.New("join: needs a gossip port")
	case c.GossipPort == PortOff && len(c.Voters) > 0 && !slices.Equal(c.Voters, []string{c.Name}):
		return errors.New("voters: a node without gossip reaches no other voter: give it a gossip port, or its own name alone as voter")
	case c.GossipPort != PortOff && c.PeerPort == PortOff:
		return errors.New("peer-port: nodes that gossip forward to one another: give it, or no gossip port either")
	}
	return nil
}

func (c *Config) traces() *observe.TracingConfig {
	return &observe.TracingConfig{Endpoint: c.OTLPEndpoint, Sample: c.TraceSample, CallerRate: c.TraceCallerRate,
		Node: c.Name, Version: c.Version, Logger: c.Logger}
}

// cluster returns the cluster's configuration. The ports are added once they are open.
func (c *Config) cluster() cluster.Config {
	return cluster.Config{
		Name: c.Name, Bind: c.Bind, GossipPort: int(max(c.GossipPort, 0)), Advertise: c.Advertise,
		Join: c.Join, Logger: c.Logger, MaxMembers: c.MaxMembers, ProbeInterval: c.probeInterval,
	}
}

// forwardAuth parses the settings of /v1/forward-auth.
func (c *Config) forwardAuth() (f httpapi.ForwardAuth, err error) {
	if f.Headers, err = httpapi.ParseKeyHeaders(c.ForwardAuthHeaders); err != nil {
		return f, fmt.Errorf("forward-auth-headers: %w", err)
	}
	if f.TrustedProxies, err = netaddr.ParsePrefixes(c.TrustedProxies); err != nil {
		return f, fmt.Errorf("trusted-proxies: %w", err)
	}
	return f, nil
}

// checkPolicies rejects strict policies on a node without voters, which could never decide them, and persistent
// policies on a node without a data directory.
func (c *Config) checkPolicies(set *policy.Set) error {
	if strict := set.NeedVoters(); len(c.Voters) == 0 && len(strict) > 0 {
		return strict
	}
	if persistent := set.NeedDirectory(); c.DataDir == "" && !c.KeepNothing && len(persistent) > 0 {
		return persistent
	}
	return nil
}

// withDefaults returns c with defaults for zeros, except those that depend on the memory.
func (c Config) withDefaults() Config {
	setDefaults(Settings(&c))
	if c.Memory == (admission.Budget{}) {
		c.Memory = admission.OwnBudget()
	}
	return c
}

// withDefaults returns c with defaults for zeros.
func (c Limits) withDefaults(m admission.Budget) Limits {
	setDefaults(Settings(&c))
	c.MaxConnections = cmp.Or(c.MaxConnections, m.Clients())
	c.MaxConnectionsPerSource = cmp.Or(c.MaxConnectionsPerSource, max(c.MaxConnections/2, min(c.MaxConnections, 1), 0))
	c.MaxAnonymousConnections = cmp.Or(c.MaxAnonymousConnections, m.MaxAnonymous)
	c.MaxStreams = cmp.Or(c.MaxStreams, m.StreamsEach)
	c.MaxMessageSize = cmp.Or(c.MaxMessageSize, m.MaxMessage)
	c.MaxInFlight = cmp.Or(c.MaxInFlight, m.MaxInFlight)
	c.MaxUnread = cmp.Or(c.MaxUnread, m.Unread)
	return c
}

// callerSettings and peerSettings have the flags of the certificate files for callers, and for other nodes.
var (
	callerSettings = reload.CertFiles{Cert: "tls-cert-file", Key: "tls-key-file", CA: "tls-client-ca-file"}
	peerSettings   = reload.CertFiles{Cert: "peer-tls-cert-file", Key: "peer-tls-key-file", CA: "peer-tls-ca-file"}
)

// validate returns the first setting that contradicts another one.
func (c *Security) validate() error {
	if c.TLSClientCAFile != "" && c.TLSCertFile == "" && c.TLSKeyFile == "" {
		return errors.New("tls-client-ca-file: callers present certificates over TLS only: give tls-cert-file and tls-key-file")
	}
	if err := c.tls().Validate(callerSettings); err != nil {
		return err
	}
	peer := []struct{ flag, value string }{
		{peerSettings.Cert, c.PeerTLSCertFile}, {peerSettings.Key, c.PeerTLSKeyFile},
		{peerSettings.CA, c.PeerTLSCAFile}, {"peer-tls-name", c.PeerTLSName},
	}
	for _, given := range peer {
		for _, missing := range peer {
			if given.value != "" && missing.value == "" {
				return fmt.Errorf("%s: goes with %s: nodes prove to each other who they are with all four of peer-tls-…, or talk in plain text without any", given.flag, missing.flag)
			}
		}
	}
	return nil
}

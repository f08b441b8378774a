package node

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
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
	"github.com/weirlimit/weir/store"
)

// Port is a port to listen on: 1 to 65535, or one of these.
type Port int

const (
	PortOff Port = 0  // none: the service is off
	PortAny Port = -1 // any free one
)

// What holds where Config says nothing, and the usual Grace.
const (
	DefaultGrace              = 10 * time.Second
	DefaultMaxKeys            = 10_000_000
	DefaultMaxRequestIDs      = store.DefaultRequestIDs
	DefaultMaxReservations    = store.DefaultReservations
	DefaultMaxKeyReservations = store.DefaultKeyReservations
)

// Config is what a node is started with. Of a field that says nothing of it, the zero value stands for none. What it points to must
// not change while the node runs.
//
// Errors begin with the setting that is to blame, under the name that operators know it by: of HTTPPort, http-port.
type Config struct {
	// Name is the node's name, stable over restarts and unique in the cluster: 1 to 63 of a-z A-Z 0-9 . _ - Required.
	Name string
	// Version is that of the program, as the node tells it.
	Version string
	// Bind is the IP address that all ports but the debug port listen on. Required.
	Bind string
	// Advertise is the IP address or host name that other nodes reach this one at. Empty: Bind, or when that is 0.0.0.0 a private
	// address of this host.
	Advertise string

	// HTTPPort, GRPCPort and RESPPort are for callers.
	HTTPPort, GRPCPort, RESPPort Port
	// GossipPort, TCP and UDP, and PeerPort are for other nodes: both, or the node is alone for good.
	GossipPort, PeerPort Port
	// DebugPort is for profiles, on loopback.
	DebugPort Port
	// AnyPortIfTaken takes any free port in place of one that is taken.
	AnyPortIfTaken bool

	// Join are nodes to join: HOST:PORT of their gossip.
	Join []string
	// Voters are the names of the nodes whose majority grants what strict policies need, the same on all nodes: none, 1, 3 or 5.
	Voters []string
	// MaxMembers bounds the nodes of the cluster. 0: cluster.DefaultMaxMembers.
	MaxMembers int

	// PolicyFile holds the policies, and is read again when it changes. Empty: Policies.
	PolicyFile string
	Policies   *policy.Set
	// DataDir is the directory that overrides are kept in which operators set while the node runs; no other node may have the same. Empty:
	// they are lost when no member runs.
	DataDir string
	// UnknownPolicy is the answer to a check of a policy that does not exist. Zero: an error.
	UnknownPolicy limiter.Unknown
	// Timeout is the longest time for a check that another node decides, 1 ms to 1 min. Required.
	Timeout time.Duration
	// Grace is the longest time for stopping in good order. Required.
	Grace time.Duration

	// NoInline rejects inline limits; the other three are as in limiter.Config, but for InlineMaxWindow 0:
	// limiter.DefaultInlineMaxWindow, and -1: no bound.
	NoInline                       bool
	InlineMaxWindow                time.Duration
	InlineMaxKeys, InlineMaxMemory int64

	// HTTPHosts are names in Host headers, besides addresses and localhost. Empty: only these where Bind is a loopback address, and any
	// name elsewhere.
	HTTPHosts []string
	// ForwardAuthHeaders are the header fields whose values may be keys at /v1/forward-auth.
	ForwardAuthHeaders []string
	// TrustedProxies are prefixes or addresses of proxies whose X-Forwarded-For is believed.
	TrustedProxies []string
	NoConsole      bool
	Envoy          Envoy

	Security Security
	Limits   Limits

	// Memory divides what the node may use. Zero: what the process may use.
	Memory admission.Budget
	// MaxMemory bounds the bytes for state. 0: as Memory says; -1: no bound.
	MaxMemory int64
	// MaxKeys bounds the keys with live state. 0: DefaultMaxKeys; -1: no bound.
	MaxKeys int64
	// MaxRequestIDs, MaxReservations and MaxKeyReservations are as in store.Config.
	MaxRequestIDs, MaxReservations, MaxKeyReservations int

	// OTLPEndpoint is the URL of a collector for traces, TraceSample the share, 0 to 1, of calls traced whose callers do not say, and
	// TraceCallerRate how many a second are traced at most because their callers say so.
	OTLPEndpoint                 string
	TraceSample, TraceCallerRate float64

	// Logger is told what an operator wants to know. Required.
	Logger *slog.Logger
	// LogDropped returns how many lines of the log were dropped. Nil: none ever are.
	LogDropped func() uint64
	// Registerer, when not nil, is where the node's metrics are registered while it runs, besides its own page.
	Registerer prometheus.Registerer
}

// Security is what keeps a node to those it is meant for. All of it is files, which are read again when they change
// unless something else is said; empty stands for none.
type Security struct {
	TLS           reload.CertFiles // for callers; CA: whose certificates callers may present
	PeerTLS       reload.CertFiles // between nodes
	PeerName      string           // name in every node's certificate
	AccessFile    string           // who may do what; empty: everybody everything
	GossipKeyFile string           // empty: gossip in plain text
	SecretFile    string           // the cluster's secret; read once
	Insecure      bool             // beyond loopback, too, whoever reaches a port may do what it is for
	AuditLog      string           // file of the audit log, or observe.AuditStderr; empty: none
	Stderr        io.Writer        // that the audit log may go to

	Now func() time.Time // tells when certificates expire; nil: time.Now
}

// Limits bounds what callers can hold on to, at each listener. A zero stands for the default: of most, what the memory that there is
// leaves room for.
type Limits struct {
	MaxConnections          int           // of authenticated callers at a time, at each listener; -1: any number
	MaxConnectionsPerSource int           // of them, those of one source, an IPv4 address or an IPv6 /64; -1: any number; 0: half of MaxConnections
	MaxAnonymousConnections int           // connections that are not authenticated, at a time, at each listener
	MaxConnectionAge        time.Duration // of a connection, 1 s or more; -1: any; 0: DefaultMaxAge
	IdleTimeout             time.Duration // of a connection over gRPC without calls, 1 s or more; -1: any; 0: DefaultIdleTimeout
	MaxStreams              int           // calls at a time on one connection of HTTP/2, which gRPC is
	MaxMessageSize          int64         // bytes of a request's body
	MaxHeaderSize           int64         // bytes of a request's header fields; 0: DefaultMaxHeader
	FirstMessageTimeout     time.Duration // for the first message of a call over gRPC, 100 ms or more; 0: DefaultFirstMessage
	WriteTimeout            time.Duration // for a caller who does not read, 100 ms or more; 0: DefaultWriteTimeout
	MaxUnread               int64         // bytes of answers that wait for callers of streams to read, about
	MaxInFlight             int           // checks that wait for other nodes or for copies
}

// Validate reports the first thing that is wrong, of what can be told without opening a file or port. Start calls it.
func (c *Config) Validate() error {
	if c.Bind == "" {
		// Listeners would take it for all addresses of the host.
		return errors.New("bind: is empty: give an IP address; 0.0.0.0 stands for all of this host")
	}
	for _, p := range []struct {
		setting string
		port    Port
	}{{"http-port", c.HTTPPort}, {"grpc-port", c.GRPCPort}, {"resp-port", c.RESPPort}, {"gossip-port", c.GossipPort}, {"peer-port", c.PeerPort}, {"debug-port", c.DebugPort}} {
		if p.port < PortAny || p.port > math.MaxUint16 {
			return fmt.Errorf("%s: %d is not a port, 1 to %d", p.setting, p.port, math.MaxUint16)
		}
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
	if c.Timeout < time.Millisecond || c.Timeout > time.Minute {
		return fmt.Errorf("timeout: %v is not a time to wait from 1ms to 1m", c.Timeout)
	}
	if c.Grace <= 0 {
		return fmt.Errorf("grace: %v is not a time to wait", c.Grace)
	}
	for _, b := range []struct {
		setting string
		value   int64
		least   int64
	}{
		{"max-keys", c.MaxKeys, -1}, {"max-memory", c.MaxMemory, -1}, {"inline-max-window", int64(c.InlineMaxWindow), -1},
		{"inline-max-keys", c.InlineMaxKeys, 0}, {"inline-max-memory", c.InlineMaxMemory, 0},
	} {
		if b.value < b.least {
			return fmt.Errorf("%s: is negative", b.setting)
		}
	}
	if err := c.Limits.validate(); err != nil {
		return err
	}
	return c.validateTraces()
}

// validateCluster reports what is wrong with a node's place in its cluster.
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

func (c *Config) validateTraces() error {
	if c.OTLPEndpoint == "" {
		if c.TraceSample != 0 {
			return errors.New("trace-sample: needs a collector: give otlp-endpoint")
		}
		return c.traces().CheckRates() // a wrong rate is a mistake although it has no effect here
	}
	return c.traces().Check()
}

func (c *Config) traces() *observe.TracingConfig {
	return &observe.TracingConfig{Endpoint: c.OTLPEndpoint, Sample: c.TraceSample, CallerRate: c.TraceCallerRate, Node: c.Name, Version: c.Version, Logger: c.Logger}
}

// cluster is what a node says to its cluster of itself, before it has opened a port.
func (c *Config) cluster() cluster.Config {
	return cluster.Config{
		Name: c.Name, Bind: c.Bind, GossipPort: int(max(c.GossipPort, 0)), Advertise: c.Advertise,
		Join: c.Join, Logger: c.Logger, MaxMembers: c.MaxMembers,
	}
}

// forwardAuth reads what says where /v1/forward-auth may take keys from.
func (c *Config) forwardAuth() (f httpapi.ForwardAuth, err error) {
	if f.Headers, err = httpapi.ParseKeyHeaders(c.ForwardAuthHeaders); err != nil {
		return f, fmt.Errorf("forward-auth-headers: %w", err)
	}
	if f.TrustedProxies, err = netaddr.ParsePrefixes(c.TrustedProxies); err != nil {
		return f, fmt.Errorf("trusted-proxies: %w", err)
	}
	return f, nil
}

// checkPolicies rejects strict policies on a node without voters: none of their checks could ever be decided.
func (c *Config) checkPolicies(set *policy.Set) error {
	if strict := set.NeedVoters(); len(c.Voters) == 0 && len(strict) > 0 {
		return strict
	}
	return nil
}

// withDefaults returns c with every zero replaced by its default, but for Limits and Memory.
func (c Config) withDefaults() Config {
	c.MaxKeys = max(cmp.Or(c.MaxKeys, DefaultMaxKeys), 0)
	c.InlineMaxWindow = max(cmp.Or(c.InlineMaxWindow, limiter.DefaultInlineMaxWindow), 0)
	if c.Memory == (admission.Budget{}) {
		c.Memory = admission.OwnBudget()
	}
	return c
}

// validate reports the first limit that makes no sense.
func (c *Limits) validate() error {
	for _, l := range []struct {
		setting      string
		value, least int64
	}{
		{"max-connections", int64(c.MaxConnections), -1},
		{"max-connections-per-source", int64(c.MaxConnectionsPerSource), -1},
		{"max-anonymous-connections", int64(c.MaxAnonymousConnections), 0},
		{"max-streams", int64(c.MaxStreams), 0},
		{"max-message-size", c.MaxMessageSize, 0},
		{"max-header-size", c.MaxHeaderSize, 0},
		{"max-unread", c.MaxUnread, 0},
		{"max-in-flight", int64(c.MaxInFlight), 0},
	} {
		if l.value < l.least {
			return fmt.Errorf("%s: %d is negative", l.setting, l.value)
		}
	}
	for _, l := range []struct {
		setting  string
		d, least time.Duration
		any      bool // -1 stands for no bound
	}{
		{"max-connection-age", c.MaxConnectionAge, time.Second, true},
		{"idle-timeout", c.IdleTimeout, time.Second, true},
		{"first-message-timeout", c.FirstMessageTimeout, 100 * time.Millisecond, false},
		{"write-timeout", c.WriteTimeout, 100 * time.Millisecond, false},
	} {
		if l.d != 0 && l.d < l.least && !(l.any && l.d == -1) {
			return fmt.Errorf("%s: %v is too short: give %v or more", l.setting, l.d, l.least)
		}
	}
	return nil
}

// withDefaults returns c with every zero replaced by its default.
func (c Limits) withDefaults(m admission.Budget) Limits {
	c.MaxConnections = cmp.Or(c.MaxConnections, m.Clients())
	c.MaxConnectionsPerSource = cmp.Or(c.MaxConnectionsPerSource, max(c.MaxConnections/2, min(c.MaxConnections, 1), 0))
	c.MaxAnonymousConnections = cmp.Or(c.MaxAnonymousConnections, m.MaxAnonymous)
	c.MaxConnectionAge = cmp.Or(c.MaxConnectionAge, DefaultMaxAge)
	c.IdleTimeout = cmp.Or(c.IdleTimeout, DefaultIdleTimeout)
	c.MaxStreams = cmp.Or(c.MaxStreams, m.StreamsEach)
	c.MaxMessageSize = cmp.Or(c.MaxMessageSize, m.MaxMessage)
	c.MaxHeaderSize = cmp.Or(c.MaxHeaderSize, DefaultMaxHeader)
	c.MaxInFlight = cmp.Or(c.MaxInFlight, m.MaxInFlight)
	c.FirstMessageTimeout = cmp.Or(c.FirstMessageTimeout, DefaultFirstMessage)
	c.WriteTimeout = cmp.Or(c.WriteTimeout, DefaultWriteTimeout)
	c.MaxUnread = cmp.Or(c.MaxUnread, m.Unread)
	return c
}

// callerSettings are the settings of the files for callers.
var callerSettings = reload.CertFiles{Cert: "tls-cert-file", Key: "tls-key-file", CA: "tls-client-ca-file"}

// validate reports the first thing that is wrong with what is given together.
func (c *Security) validate() error {
	if c.TLS.CA != "" && c.TLS.Cert == "" && c.TLS.Key == "" {
		return errors.New("tls-client-ca-file: callers present certificates over TLS only: give tls-cert-file and tls-key-file")
	}
	if err := c.TLS.Validate(callerSettings); err != nil {
		return err
	}
	peer := []struct{ flag, value string }{
		{"peer-tls-cert-file", c.PeerTLS.Cert}, {"peer-tls-key-file", c.PeerTLS.Key}, {"peer-tls-ca-file", c.PeerTLS.CA}, {"peer-tls-name", c.PeerName},
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

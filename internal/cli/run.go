package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/limiter"
)

// runFlags are the settings of one node, and what the command line writes otherwise than node.Config.
type runFlags struct {
	node.Config
	unknownPolicy, maxMemory, logFormat, logLevel, config string
}

func newRun() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run one node",
		Long: `Run one node. Without flags: a node alone, on loopback, without policies; inline limits work.

Every flag can be given in the environment (WEIR_HTTP_PORT=8080) or in the file of --config (http-port: 8080).
A flag has precedence over the environment, the environment over the file. Port 0 picks a free one, an empty port turns
the service off. Signals: SIGTERM and SIGINT hand everything over and stop, a second one ends
the process at once, SIGHUP reads the policy file, certificates and keys again.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := fillFlags(cmd.Flags(), os.LookupEnv); err != nil {
				return err
			}
			return f.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), unknownVariables(cmd.Flags(), os.Environ()))
		},
	}
	f.register(cmd.Flags())
	return cmd
}

func (f *runFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.Name, "name", "", "the node's name, stable over restarts and unique in the cluster (default: the host name)")
	fs.StringVar(&f.Bind, "bind", "127.0.0.1", "IP address that all ports listen on")
	fs.StringVar(&f.Advertise, "advertise", "", "IP address or host name that other nodes reach this one at (default: the one it binds)")
	fs.Var(settingVar(&f.HTTPPort, parsePort, "port", "8080"), "http-port", "port for HTTP")
	fs.Var(settingVar(&f.GRPCPort, parsePort, "port", "8081"), "grpc-port", "port for gRPC")
	fs.Var(settingVar(&f.GossipPort, parsePort, "port", "7946"), "gossip-port", "port for gossip, TCP and UDP; empty: a node alone for good")
	fs.Var(settingVar(&f.PeerPort, parsePort, "port", "7947"), "peer-port", "port for gRPC between nodes")
	fs.Var(settingVar(&f.RESPPort, parsePort, "port", ""), "resp-port", "port for the Redis protocol (CL.THROTTLE, WEIR.CHECK), 6380 by convention; empty: off")
	fs.Var(settingVar(&f.DebugPort, parsePort, "port", ""), "debug-port", "port for profiles (/debug/pprof/), on 127.0.0.1 whatever --bind says; empty: off")
	fs.StringSliceVar(&f.HTTPHosts, "http-hosts", nil, "host names that HTTP requests may be for besides IP addresses and localhost, separated by commas; empty: only these where --bind is a loopback address, and any name elsewhere")
	fs.StringSliceVar(&f.ForwardAuthHeaders, "forward-auth-headers", nil, "header fields whose values may be keys at /v1/forward-auth (key_header=NAME), separated by commas; empty: none")
	fs.StringSliceVar(&f.TrustedProxies, "trusted-proxies", nil, "addresses or prefixes of the gateways that ask /v1/forward-auth, and of proxies before them, whose X-Forwarded-For is believed (key_ip=true), separated by commas; empty: none")
	fs.StringSliceVar(&f.Join, "join", nil, "nodes to join, HOST:PORT of their gossip, separated by commas; a name with several addresses counts as all of them")
	fs.Var(settingVar(&f.MaxMembers, parseNumber(1), "int", strconv.Itoa(cluster.DefaultMaxMembers)), "max-members", "largest number of nodes in the cluster, 1 to 10000; gossip about more is ignored")
	fs.StringSliceVar(&f.Voters, "voters", nil, "names of the 1, 3 or 5 nodes whose majority grants what strict policies need, the same on all nodes; ordinals:3 stands for the first three pods of a StatefulSet")
	fs.StringVar(&f.PolicyFile, "policies", "", "policy file (YAML), read again when it changes")
	fs.StringVar(&f.DataDir, "data-dir", "", "directory, of this node alone, that keeps overrides set while nodes run; empty: they are lost when no member of the cluster runs")
	registerEnvoy(fs, &f.Envoy)
	registerSecurity(fs, &f.Security)
	registerLimits(fs, &f.Limits)
	fs.StringVar(&f.unknownPolicy, "unknown-policy", "error", "answer to a check of a policy that does not exist: error, allow or deny")
	fs.Var(settingVar(&f.MaxKeys, orNone(parseKeys), "int", strconv.Itoa(node.DefaultMaxKeys)), "max-keys", "keys with live state at most; 0: no bound")
	fs.StringVar(&f.maxMemory, "max-memory", auto, "memory for state at most: bytes (512MiB), a share of what the process may use (50%), or auto: what the other parts of a node leave; 0: no bound")
	count := orNone(parseNumber(0))
	fs.Var(settingVar(&f.MaxReservations, count, "int", strconv.Itoa(node.DefaultMaxReservations)), "max-reservations", "pending reservations of all keys, copies of other nodes' included; 0: none")
	fs.Var(settingVar(&f.MaxKeyReservations, count, "int", strconv.Itoa(node.DefaultMaxKeyReservations)), "max-key-reservations", "pending reservations of one key, each extension counted; 0: none")
	fs.Var(settingVar(&f.MaxRequestIDs, count, "int", strconv.Itoa(node.DefaultMaxRequestIDs)), "max-request-ids", "request ids remembered per partition (of 4093); 0: none")
	fs.BoolVar(&f.NoInline, "no-inline", false, "reject inline limits: limits sent along with a request")
	fs.BoolVar(&f.NoConsole, "no-console", false, "serve no console at /console")
	fs.Var(settingVar(&f.InlineMaxWindow, orNone(parseBound), "duration", limiter.DefaultInlineMaxWindow.String()), "inline-max-window", "longest window of an inline limit, and longest time in which its bucket refills, the same on all nodes; 0: no bound")
	fs.Var(settingVar(&f.InlineMaxKeys, parseKeys, "int", "0"), "inline-max-keys", "keys of one namespace of inline limits at most; 0: no bound but the fair part")
	fs.Var(settingVar(&f.InlineMaxMemory, parseInlineMemory, "size", "0"), "inline-max-memory", "memory for state of one namespace of inline limits at most; 0: no bound but the fair part")
	fs.DurationVar(&f.Timeout, "timeout", limiter.DefaultTimeout, "longest time for a check that another node decides")
	fs.DurationVar(&f.Grace, "grace", node.DefaultGrace, "longest time for a graceful stop")
	fs.StringVar(&f.logFormat, "log-format", "text", "format of the log on standard error: text or json")
	fs.StringVar(&f.logLevel, "log-level", "info", "least important messages logged: debug, info, warn or error")
	fs.StringVar(&f.OTLPEndpoint, "otlp-endpoint", "", "collector for traces, OTLP over gRPC: http://HOST:PORT, or https://HOST:PORT for TLS; empty: no traces")
	fs.Float64Var(&f.TraceSample, "trace-sample", 0, "share of calls traced, 0 to 1, of those whose callers do not say whether to (W3C traceparent)")
	fs.Float64Var(&f.TraceCallerRate, "trace-caller-rate", 10, "calls traced a second at most at their callers' request (the sampled flag of a traceparent); 0: none")
	fs.StringVar(&f.config, "config", "", "YAML file with settings, under the names of the flags")
}

// flushTimeout is how long a node that has stopped waits for who reads its log and its standard output, at most.
const flushTimeout = time.Second

// run runs a node until it is told to stop. unknown are variables in the environment that look like settings and are not.
func (f *runFlags) run(ctx context.Context, stdout, stderr io.Writer, unknown []string) error {
	var logger *slog.Logger
	out := observe.NewLogQueue(stdout, observe.LogQueueConfig{MaxBytes: admission.LogQueue})
	log := observe.NewLogQueue(stderr, observe.LogQueueConfig{MaxBytes: admission.LogQueue, OnDropped: func(lines uint64) {
		logger.Warn("log lines dropped", "count", lines, "hint", "whoever reads the log does not keep up")
	}})
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
		defer cancel()
		_, _ = out.Close(ctx), log.Close(ctx) // what their readers have not taken by then is lost
	}()
	cfg, err := f.nodeConfig(log)
	if err != nil {
		return err
	}
	logger, cfg.LogDropped = cfg.Logger, log.Dropped
	cfg.Security.Stderr = stderr // the audit log has a queue of its own
	if len(unknown) > 0 {
		cfg.Logger.Warn("environment has unknown settings", "variables", unknown)
	}
	admission.LimitProcess(cfg.Logger)
	outliveLog()
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP) // before the node starts: unhandled, the signal would end it
	defer signal.Stop(hup)
	n, err := node.Start(ctx, cfg)
	if err != nil {
		return err
	}
	ready := n.Settled()
	for {
		select {
		case <-ready:
			fmt.Fprintln(out, n.ReadyLine())
			ready = nil
		case <-hup:
			n.Reload()
		case <-n.Failed():
			return errors.Join(n.Err(), stopNode(n, cfg.Grace, cfg.Logger))
		case <-ctx.Done():
			return stopNode(n, cfg.Grace, cfg.Logger)
		}
	}
}

// stopNode has a node hand everything over and end. A signal that comes meanwhile aborts that, which is the error.
func stopNode(n *node.Node, grace time.Duration, log *slog.Logger) error {
	again := make(chan os.Signal, 1)
	signal.Notify(again, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(again)
	log.Info("node stopping", "grace", grace, "hint", "another SIGTERM or SIGINT ends the process at once")
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		n.Stop()
	}()
	select {
	case <-stopped:
		return nil
	case s := <-again:
		// The process is about to end, and the goroutine with it.
		log.Warn("stop aborted by another signal", "signal", s.String())
		return fmt.Errorf("%v while stopping: ended at once, without handing over what was left", s)
	}
}

// outliveLog has a node go on when whoever reads its log or its standard output is gone. Otherwise the next line would end
// it with SIGPIPE, and nothing would be handed over.
func outliveLog() { signal.Ignore(syscall.SIGPIPE) }

// nodeConfig turns flags into a node's configuration, which the node validates.
func (f *runFlags) nodeConfig(log io.Writer) (node.Config, error) {
	cfg := f.Config
	cfg.Version = version()
	var err error
	if cfg.Name == "" {
		if cfg.Name, err = os.Hostname(); err != nil {
			return cfg, fmt.Errorf("name: the host has no name (%w): set it", err)
		}
	}
	if cfg.Voters, err = node.ParseVoters(cfg.Voters, cfg.Name); err != nil {
		return cfg, fmt.Errorf("voters: %w", err)
	}
	switch f.unknownPolicy {
	case "error":
	case "allow":
		cfg.UnknownPolicy = limiter.UnknownAllow
	case "deny":
		cfg.UnknownPolicy = limiter.UnknownDeny
	default:
		return cfg, fmt.Errorf("unknown-policy: %q is not one of error, allow and deny", f.unknownPolicy)
	}
	if cfg.MaxMemory, err = admission.ParseMemory(f.maxMemory); err != nil {
		return cfg, fmt.Errorf("max-memory: %w", err)
	}
	cfg.Logger, err = newLogger(log, f.logFormat, f.logLevel)
	return cfg, err
}

// parsePort reads a port: empty is off, 0 any free one.
func parsePort(s string) (node.Port, error) {
	if s == "" {
		return node.PortOff, nil
	}
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("%q is not a port, 0 to 65535, or empty to turn it off", s)
	}
	if n == 0 {
		return node.PortAny, nil
	}
	return node.Port(n), nil
}

// registerLimits registers the bounds on callers.
func registerLimits(fs *pflag.FlagSet, l *node.Limits) {
	positive := autoOr(parseNumber(1))
	fs.Var(settingVar(&l.MaxConnections, autoOr(orNone(parseNumber(0))), "int", auto), "max-connections", "connections of authenticated callers at a time at each port; more are closed; 0: no bound; auto: by the available memory")
	fs.Var(settingVar(&l.MaxConnectionsPerSource, parseNumber(0), "int", "0"), "max-connections-per-source", "such connections from one source, an IPv4 address or an IPv6 /64; 0: half of --max-connections")
	fs.Var(settingVar(&l.MaxAnonymousConnections, positive, "int", auto), "max-anonymous-connections", "connections at a time at each port that are not authenticated; more wait, and sources take turns; auto: by the available memory")
	fs.Var(settingVar(&l.MaxConnectionAge, orNone(parseBound), "duration", node.DefaultMaxAge.String()), "max-connection-age", "age at which a caller or node is asked to reconnect; keep it below half of the lifetime of client certificates; 0: no bound")
	fs.Var(settingVar(&l.IdleTimeout, orNone(parseBound), "duration", node.DefaultIdleTimeout.String()), "idle-timeout", "how long a connection of gRPC or the Redis protocol may stay without calls; 0: no bound")
	fs.Var(settingVar(&l.MaxStreams, positive, "int", auto), "max-streams", "calls at a time on one connection of gRPC or HTTP/2; more wait at the caller; auto: by the available memory")
	fs.Var(settingVar(&l.MaxMessageSize, autoOr(parseSize(1<<10, 1<<30)), "size", auto), "max-message-size", "largest body of a request, HTTP or gRPC; auto: 4MiB, or less where there is little memory")
	fs.Var(settingVar(&l.MaxHeaderSize, parseSize(1<<10, 1<<20), "size", "32KiB"), "max-header-size", "largest header of a request, HTTP or gRPC")
	fs.Var(settingVar(&l.MaxInFlight, positive, "int", auto), "max-in-flight", "checks that wait at a time for other nodes or for copies; more are answered by on_error; auto: by the available memory")
	fs.Var(settingVar(&l.FirstMessageTimeout, parseWait, "duration", node.DefaultFirstMessage.String()), "first-message-timeout", "longest time between the headers and the first message of a gRPC call, and for receiving a command of the Redis protocol")
	fs.Var(settingVar(&l.WriteTimeout, parseWait, "duration", node.DefaultWriteTimeout.String()), "write-timeout", "longest time that a gRPC connection, or a stream on it, waits for a caller that does not read")
	fs.Var(settingVar(&l.MaxUnread, autoOr(parseSize(1<<20, 1<<40)), "size", auto), "max-unread", "unread answers of all streams of checks; beyond it streams with more than their share are ended; auto: by the available memory")
}

// registerSecurity registers the settings of authentication and encryption.
func registerSecurity(fs *pflag.FlagSet, s *node.Security) {
	fs.StringVar(&s.TLS.Cert, "tls-cert-file", "", "certificate (PEM, with its chain) for callers over HTTP, gRPC and the Redis protocol, read again when it changes; empty: plain text")
	fs.StringVar(&s.TLS.Key, "tls-key-file", "", "private key (PEM) of --tls-cert-file")
	fs.StringVar(&s.TLS.CA, "tls-client-ca-file", "", "authorities (PEM) of callers' certificates, which are then required; with --access-file a token will do instead")
	fs.StringVar(&s.PeerTLS.Cert, "peer-tls-cert-file", "", "certificate (PEM, with its chain) that this node presents to other nodes, as server and as client; empty: plain text between nodes")
	fs.StringVar(&s.PeerTLS.Key, "peer-tls-key-file", "", "private key (PEM) of --peer-tls-cert-file")
	fs.StringVar(&s.PeerTLS.CA, "peer-tls-ca-file", "", "authorities (PEM) of the other nodes' certificates")
	fs.StringVar(&s.PeerName, "peer-tls-name", "", "name (DNS or URI) that must be among the alternative names of every node's certificate")
	fs.StringVar(&s.AccessFile, "access-file", "", "who may do what (YAML): tokens and certificates of callers, their roles and policies, read again when it changes; empty: every caller may do everything")
	fs.StringVar(&s.GossipKeyFile, "gossip-key-file", "", "file with the keys that encrypt gossip, base64, one a line, the first for sending; read again when it changes")
	fs.BoolVar(&s.Insecure, "insecure", false, "listen beyond loopback without mutual TLS between nodes, gossip keys, a cluster secret and authentication of callers")
	fs.StringVar(&s.AuditLog, "audit-log", "", "file for the audit log, or stderr: refunds, resets, changes of overrides and of gossip keys, and denied calls, with caller and address, as lines of JSON; empty: none")
	fs.StringVar(&s.SecretFile, "cluster-secret-file", "", "file with the cluster's secret, the same on all nodes, 16 bytes or more: the hash of keys depends on it, so that outsiders cannot aim keys at one partition")
}

// registerEnvoy registers the front end for Envoy.
func registerEnvoy(fs *pflag.FlagSet, e *node.Envoy) {
	fs.StringVar(&e.Dir, "envoy-config", "", "directory with files (*.yaml, *.yml) in the format of envoyproxy/ratelimit, read again when they change: serves Envoy's rate limit service on the gRPC port and POST /json; empty: off")
	fs.BoolVar(&e.MergeDomains, "envoy-merge-domains", false, "let several files of --envoy-config describe one domain")
	fs.BoolVar(&e.Headers, "envoy-response-headers", false, "have Envoy add RateLimit-Limit, RateLimit-Remaining and RateLimit-Reset to responses")
	fs.BoolVar(&e.Metadata, "envoy-dynamic-metadata", false, "add dynamic metadata to answers to Envoy: what was asked, and the metadata of limits that were not exceeded")
	fs.BoolVar(&e.Shadow, "envoy-shadow", false, "answer OK to every request of Envoy's, whatever its limits say")
}

// newLogger returns a logger in a format, text or json, for messages of a level and above.
func newLogger(w io.Writer, format, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log-level: %q is not one of debug, info, warn and error", level)
	}
	opts := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	}
	return nil, fmt.Errorf("log-format: %q is not one of text and json", format)
}

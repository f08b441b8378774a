package main

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
	"github.com/weirlimit/weir/internal/logqueue"
	"github.com/weirlimit/weir/internal/memory"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/internal/settings"
	"github.com/weirlimit/weir/internal/tracing"
	"github.com/weirlimit/weir/limiter"
)

// runFlags are the settings of one node as the command line writes them.
type runFlags struct {
	name, bind, advertise                       string
	httpPort, grpcPort, gossipPort, peer, debug settings.Value[node.Port]
	resp                                        settings.Value[node.Port]
	join, voters, httpHosts                     []string
	forwardAuthHeaders, trustedProxies          []string
	maxMembers                                  int
	policies, unknownPolicy                     string
	envoy                                       envoyFlags
	security                                    securityFlags
	limits                                      limitsFlags
	maxKeys                                     settings.Value[int64]
	maxMemory                                   string
	maxRequestIDs                               int
	maxReservations, maxKeyReservations         int
	noInline, noConsole                         bool
	timeout, grace                              time.Duration
	logFormat, logLevel                         string
	inlineMaxWindow                             time.Duration
	inlineMaxKeys, inlineMaxMemory              settings.Value[int64]
	otlpEndpoint                                string
	traceSample, traceCallerRate                float64
	config                                      string
}

func newRun() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run one node",
		Long: `Run one node. Without flags: a node alone, on loopback, without policies; limits sent along with a request work.

Every flag can be given in the environment (WEIR_HTTP_PORT=8080) or in the file of --config (http-port: 8080).
A flag counts before the environment, the environment before the file. Port 0 picks a free one, an empty port turns
the service off. Signals: SIGTERM and SIGINT hand everything over and stop, another one while that goes
on ends the process at once, SIGHUP reads the policy file, certificates and keys again.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := settings.Fill(cmd.Flags(), os.LookupEnv); err != nil {
				return err
			}
			return f.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), settings.Unknown(cmd.Flags(), os.Environ()))
		},
	}
	f.register(cmd.Flags())
	return cmd
}

func (f *runFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.name, "name", "", "the node's name, stable over restarts and unique in the cluster (default: the host name)")
	fs.StringVar(&f.bind, "bind", "127.0.0.1", "IP address that all ports listen on")
	fs.StringVar(&f.advertise, "advertise", "", "IP address or host name that other nodes reach this one at (default: the one it binds)")
	fs.Var(f.httpPort.Of(parsePort, "port", "8080"), "http-port", "port for HTTP")
	fs.Var(f.grpcPort.Of(parsePort, "port", "8081"), "grpc-port", "port for gRPC")
	fs.Var(f.gossipPort.Of(parsePort, "port", "7946"), "gossip-port", "port for gossip, TCP and UDP; empty: a node alone for good")
	fs.Var(f.peer.Of(parsePort, "port", "7947"), "peer-port", "port for gRPC between nodes")
	fs.Var(f.resp.Of(parsePort, "port", ""), "resp-port", "port for the Redis protocol (CL.THROTTLE, WEIR.CHECK), 6380 by convention; empty: off")
	fs.Var(f.debug.Of(parsePort, "port", ""), "debug-port", "port for profiles (/debug/pprof/), on 127.0.0.1 whatever --bind says; empty: off")
	fs.StringSliceVar(&f.httpHosts, "http-hosts", nil, "host names that HTTP requests may be for besides IP addresses and localhost, separated by commas; empty: only these where --bind is a loopback address, and any name elsewhere")
	fs.StringSliceVar(&f.forwardAuthHeaders, "forward-auth-headers", nil, "header fields whose values may be keys at /v1/forward-auth (key_header=NAME), separated by commas; empty: none")
	fs.StringSliceVar(&f.trustedProxies, "trusted-proxies", nil, "addresses or prefixes of the gateways that ask /v1/forward-auth, and of proxies before them, whose X-Forwarded-For is believed (key_ip=true), separated by commas; empty: none")
	fs.StringSliceVar(&f.join, "join", nil, "nodes to join, HOST:PORT of their gossip, separated by commas; a name with several addresses counts as all of them")
	fs.IntVar(&f.maxMembers, "max-members", cluster.DefaultMaxMembers, "nodes of the cluster at most: what gossip tells of more is not taken in")
	fs.StringSliceVar(&f.voters, "voters", nil, "names of the 1, 3 or 5 nodes whose majority grants what strict policies need, the same on all nodes; ordinals:3 stands for the first three pods of a StatefulSet")
	fs.StringVar(&f.policies, "policies", "", "policy file (YAML), read again when it changes")
	f.envoy.register(fs)
	f.security.register(fs)
	f.limits.register(fs)
	fs.StringVar(&f.unknownPolicy, "unknown-policy", "error", "answer to a check of a policy that does not exist: error, allow or deny")
	fs.Var(f.maxKeys.Of(settings.ParseKeys, "int", "10000000"), "max-keys", "keys with live state at most; 0: no bound")
	fs.StringVar(&f.maxMemory, "max-memory", settings.Auto, "memory for state at most: bytes (512MiB), a share of what the process may use (50%), or auto: what the other parts of a node leave of it; 0: no bound")
	fs.IntVar(&f.maxReservations, "max-reservations", node.DefaultMaxReservations, "pending reservations of all keys, copies of other nodes' included; 0: none")
	fs.IntVar(&f.maxKeyReservations, "max-key-reservations", node.DefaultMaxKeyReservations, "pending reservations of one key, each extension counted; 0: none")
	fs.IntVar(&f.maxRequestIDs, "max-request-ids", 10_000, "request ids remembered per partition (of 4093); 0: none")
	fs.BoolVar(&f.noInline, "no-inline", false, "refuse limits sent along with a request")
	fs.BoolVar(&f.noConsole, "no-console", false, "serve no console at /console")
	fs.DurationVar(&f.inlineMaxWindow, "inline-max-window", limiter.DefaultInlineMaxWindow, "longest window of a limit sent along, and longest time for a bucket of one to come back, the same on all nodes; 0: no bound")
	fs.Var(f.inlineMaxKeys.Of(settings.ParseKeys, "int", "0"), "inline-max-keys", "keys of one namespace of limits sent along at most; 0: no bound but the fair part")
	fs.Var(f.inlineMaxMemory.Of(settings.ParseInlineMemory, "size", "0"), "inline-max-memory", "memory for state of one namespace of limits sent along at most; 0: no bound but the fair part")
	fs.DurationVar(&f.timeout, "timeout", limiter.DefaultTimeout, "longest time for a check that another node decides")
	fs.DurationVar(&f.grace, "grace", 10*time.Second, "longest time for stopping in good order")
	fs.StringVar(&f.logFormat, "log-format", "text", "format of the log on standard error: text or json")
	fs.StringVar(&f.logLevel, "log-level", "info", "least important messages logged: debug, info, warn or error")
	fs.StringVar(&f.otlpEndpoint, "otlp-endpoint", "", "collector for traces, OTLP over gRPC: http://HOST:PORT, or https://HOST:PORT for TLS; empty: no traces")
	fs.Float64Var(&f.traceSample, "trace-sample", 0, "share of calls traced, 0 to 1, of those whose callers do not say whether to (W3C traceparent)")
	fs.Float64Var(&f.traceCallerRate, "trace-caller-rate", 10, "calls traced a second at most because their callers say so (the sampled flag of a traceparent); 0: none")
	fs.StringVar(&f.config, "config", "", "YAML file with settings, under the names of the flags")
}

// flushTimeout is how long a node that has stopped waits for who reads its log and its standard output, at most.
const flushTimeout = time.Second

// run runs a node until it is told to stop. unknown are variables in the environment that look like settings and are not.
func (f *runFlags) run(ctx context.Context, stdout, stderr io.Writer, unknown []string) error {
	var logger *slog.Logger
	out := logqueue.New(stdout, logqueue.Config{MaxBytes: memory.LogQueue})
	log := logqueue.New(stderr, logqueue.Config{MaxBytes: memory.LogQueue, OnDropped: func(lines uint64) {
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
	memory.LimitProcess(cfg.Logger)
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
		case err := <-n.Failed():
			return errors.Join(err, stopNode(n, cfg.Grace, cfg.Logger))
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

// nodeConfig turns flags into a node's configuration.
func (f *runFlags) nodeConfig(log io.Writer) (node.Config, error) {
	cfg := node.Config{
		Version: version(),
		Name:    f.name, Bind: f.bind, Advertise: f.advertise, Join: f.join, MaxMembers: f.maxMembers,
		HTTPHosts: f.httpHosts, ForwardAuthHeaders: f.forwardAuthHeaders, TrustedProxies: f.trustedProxies, PolicyFile: f.policies, Envoy: f.envoy.Envoy, Security: f.security.Security, NoInline: f.noInline, NoConsole: f.noConsole, Timeout: f.timeout, Grace: f.grace,
		MaxReservations: f.maxReservations, MaxKeyReservations: f.maxKeyReservations,
		MaxRequestIDs: f.maxRequestIDs, MaxKeys: f.maxKeys.Value,
		InlineMaxWindow: f.inlineMaxWindow, InlineMaxKeys: f.inlineMaxKeys.Value, InlineMaxMemory: f.inlineMaxMemory.Value,
		OTLPEndpoint: f.otlpEndpoint, TraceSample: f.traceSample, TraceCallerRate: f.traceCallerRate,
		HTTPPort: f.httpPort.Value, GRPCPort: f.grpcPort.Value, GossipPort: f.gossipPort.Value, PeerPort: f.peer.Value,
	}
	if f.debug.Value != node.PortOff {
		cfg.DebugPort = &f.debug.Value
	}
	if f.resp.Value != node.PortOff {
		cfg.RESPPort = &f.resp.Value
	}
	var err error
	if cfg.Name == "" {
		if cfg.Name, err = os.Hostname(); err != nil {
			return cfg, fmt.Errorf("name: the host has no name (%w): set it", err)
		}
	}
	if cfg.Voters, err = node.ParseVoters(f.voters, cfg.Name); err != nil {
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
	if cfg.MaxMemory, err = memory.Parse(f.maxMemory); err != nil {
		return cfg, fmt.Errorf("max-memory: %w", err)
	}
	if f.maxRequestIDs < 0 {
		return cfg, fmt.Errorf("max-request-ids: %d is negative", f.maxRequestIDs)
	}
	for flag, n := range map[string]int{"max-reservations": f.maxReservations, "max-key-reservations": f.maxKeyReservations} {
		if n < 0 {
			return cfg, fmt.Errorf("%s: %d is negative", flag, n)
		}
	}
	for _, n := range []*int{&cfg.MaxRequestIDs, &cfg.MaxReservations, &cfg.MaxKeyReservations} {
		if *n == 0 {
			*n = -1 // none, where 0 would stand for the default
		}
	}
	if cfg.Limits, err = f.limits.config(); err != nil {
		return cfg, err
	}
	if f.inlineMaxWindow < 0 {
		return cfg, fmt.Errorf("inline-max-window: %v is negative", f.inlineMaxWindow)
	}
	if f.timeout < time.Millisecond || f.timeout > time.Minute {
		return cfg, fmt.Errorf("timeout: %v is not a time to wait from 1ms to 1m", f.timeout)
	}
	if f.grace <= 0 {
		return cfg, fmt.Errorf("grace: %v is not a time to wait", f.grace)
	}
	if err := f.checkTraces(); err != nil {
		return cfg, err
	}
	cfg.Logger, err = settings.NewLogger(log, f.logFormat, f.logLevel)
	return cfg, err
}

// checkTraces says what is wrong with the settings of traces.
func (f *runFlags) checkTraces() error {
	if f.otlpEndpoint == "" {
		if f.traceSample != 0 {
			return errors.New("trace-sample: needs a collector: give --otlp-endpoint")
		}
		return nil
	}
	traces := tracing.Config{Endpoint: f.otlpEndpoint, Sample: f.traceSample, CallerRate: f.traceCallerRate}
	return traces.Check()
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
	return node.Port(n), nil
}

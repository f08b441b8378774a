// Package node assembles a node: it builds what listens and what decides from one configuration, runs it, tells when it is ready,
// reads files again that have changed, and hands everything over before it stops.
//
// It does not read flags, the environment or signals, and does not set what belongs to the process, such as its memory limit.
package node

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/cluster/runner"
	"github.com/weirlimit/weir/gateway/console"
	grpcapi "github.com/weirlimit/weir/gateway/grpc"
	httpapi "github.com/weirlimit/weir/gateway/http"
	"github.com/weirlimit/weir/gateway/resp"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/control"
	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/rpc/peer"
	"github.com/weirlimit/weir/rpc/replica"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/store"
)

// node is one running node: everything that listens, and what it stands on.
type Node struct {
	cfg      Config
	limits   Limits
	log      *slog.Logger
	started  time.Time
	hashKey  ring.HashKey // zero in a cluster without a secret
	settings uint64       // fingerprint of the ring's settings

	listeners     struct{ http, grpc, peer, resp, debug *admission.Listener } // nil where off
	cluster       *cluster.Cluster                                            // nil: a node alone for good
	limiter       *limiter.Limiter
	clock         func() algo.Instant // of decisions
	recorder      *activityRecorder
	console       *console.Console // nil: off
	runner        *runner.Runner
	readiness     *readiness
	peers         *peer.Forwarder
	messenger     *replica.Messenger
	keys          *control.GossipKeys
	watcher       *policy.Watcher // nil without a policy file
	overrides     overriding
	envoy         envoyFrontEnd
	metrics       *observe.Metrics
	unregister    func()          // nil: metrics are registered nowhere
	tracer        *observe.Tracer // nil: no traces
	security      *security
	forwardAuth   httpapi.ForwardAuth
	buffers       *admission.Buffers              // of callers' connections
	callersMemory *fairshare.Places               // bytes of their connections and streams
	kept          *fairshare.Places               // bytes that callers have the node keep besides counters
	calls         atomic.Pointer[admission.Calls] // of callers over gRPC; nil: none are served yet
	health        *health.Server

	httpServer  *http.Server
	callers     *grpcapi.Server
	grpcServer  *grpc.Server
	peerServer  *grpc.Server
	peerService *peer.Server // of peerServer
	respServer  *resp.Server
	debugServer *http.Server

	failed   chan struct{} // closed by fail, after failure was set
	failure  error
	failOnce sync.Once
	ctx      context.Context
	cancel   context.CancelFunc
	work     sync.WaitGroup
	stopOnce sync.Once
	stopErr  error // what was not done in good order
}

// Start starts a node. It returns once every port is open and served; Settled tells when it is ready for traffic. An
// error names the flag that is to blame, and leaves nothing running.
func Start(ctx context.Context, cfg Config) (n *Node, err error) {
	n = &Node{
		log: cfg.Logger, started: time.Now(),
		failed: make(chan struct{}), health: health.NewServer(),
	}
	n.openReadiness()
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			n.Stop()
		}
	}()
	if err := cfg.Validate(); err != nil {
		return n, err
	}
	cfg = cfg.withDefaults()
	n.cfg = cfg
	fitted, over, err := cfg.Limits.fitted(cfg.Memory, cfg.MaxMemory)
	if err != nil {
		return n, err
	}
	if n.cfg.Memory = fitted; cfg.MaxMemory == 0 {
		n.cfg.MaxMemory = fitted.State
	}
	if len(over) > 0 {
		n.log.Warn("memory bounds exceed the limit", "settings", over, "sum_bytes", fitted.Sum(), "limit_bytes", fitted.Limit)
	}
	n.limits, n.kept = cfg.Limits.withDefaults(fitted), fairshare.New(int(fitted.Kept))
	n.callersMemory = callersMemory(&n.limits, fitted.Callers)
	if n.forwardAuth, err = cfg.forwardAuth(); err != nil {
		return n, err
	}
	if n.security, err = openSecurity(cfg.Security, n.log); err != nil {
		return n, err
	}
	policies := cfg.Policies
	if cfg.PolicyFile != "" {
		n.watcher, err = policy.NewWatcher(cfg.PolicyFile, policy.WatchConfig{
			Check: n.cfg.checkPolicies, OnChange: n.policiesChanged, OnError: n.policiesRejected,
		})
		if err != nil {
			return n, fmt.Errorf("policies: %w", err)
		}
		policies = n.watcher.Current()
	}
	if policies, err = n.openOverrides(policies); err != nil {
		return n, err
	}
	if err := n.openEnvoy(); err != nil {
		return n, err
	}
	switch {
	case cfg.Security.SecretFile != "":
		if n.hashKey, err = readSecret(cfg.Security.SecretFile); err != nil {
			return n, err
		}
	case cfg.GossipPort == PortOff:
		n.hashKey = ring.RandomHashKey() // no other node has to have the same
	}
	n.settings = ring.SettingsFingerprint(n.hashKey)
	n.buffers = admission.NewBuffers(n.cfg.Memory.Buffers, 2*(n.limits.MaxAnonymousConnections+max(n.limits.MaxConnections, 0)), func(from net.Addr) {
		n.security.denials.note("callers", "memory", from, "it holds more than others of what connections may take of memory")
	})
	for _, l := range []struct {
		setting string
		port    Port
		to      **admission.Listener
	}{
		{"http-port", cfg.HTTPPort, &n.listeners.http},
		{"grpc-port", cfg.GRPCPort, &n.listeners.grpc},
		{"peer-port", cfg.PeerPort, &n.listeners.peer},
		{"resp-port", cfg.RESPPort, &n.listeners.resp},
	} {
		if *l.to, err = n.listen(l.setting, l.port); err != nil {
			return n, err
		}
	}
	if n.listeners.debug, err = listenDebug(cfg.DebugPort); err != nil {
		return n, err
	}
	n.security.warn(cfg)
	if cfg.GossipPort != PortOff {
		if n.cluster, err = n.join(policies); err != nil {
			return n, err
		}
	}
	if n.tracer, err = n.trace(); err != nil {
		return n, err
	}
	clock, leases := clocks()
	n.clock = clock
	if n.recorder, err = newActivityRecorder(); err != nil {
		return n, err
	}
	hops, inbox := observe.NewHops(), runner.NewInbox(ring.Partitions)
	states := limiter.NewStore(store.Config{
		MaxKeys: cfg.MaxKeys, MaxBytes: max(n.cfg.MaxMemory, 0), MaxRequestIDs: cfg.MaxRequestIDs, Urgent: inbox.Urgent,
		Changed:         inbox.Changed,
		MaxReservations: cfg.MaxReservations, MaxKeyReservations: cfg.MaxKeyReservations, Copies: n.cluster != nil,
	}, false)
	n.peers = peer.NewForwarder(peer.ForwarderConfig{Config: n.transport(), Observe: hops.Forwarded})
	n.messenger = replica.NewMessenger(replica.MessengerConfig{Config: n.transport(), Partitions: ring.Partitions, Receive: inbox.Receive})
	n.runner = runner.New(runner.Config{
		Core:   ownership.Config{Self: n.self(), Partitions: ring.Partitions, Data: states, Voters: cfg.Voters},
		Sender: n.messenger, Inbox: inbox, Now: clock, Boot: leases, Version: states.Version, Logger: n.log,
	})
	work := limiter.Config{
		Self: n.self(), Member: n.memberOf,
		Store: states, Ownership: n.runner, Peers: n.peers, Clock: clock, BootClock: leases, Recorder: n.recorder, Members: n.members,
		Policies: policies, UnknownPolicy: cfg.UnknownPolicy, NoInline: cfg.NoInline,
		InlineMaxWindow: cfg.InlineMaxWindow, InlineMaxKeys: cfg.InlineMaxKeys, InlineMaxMemory: cfg.InlineMaxMemory,
		Timeout: cfg.Timeout, HashKey: n.hashKey, MaxInFlight: n.limits.MaxInFlight, Logger: n.log,
		Panicked: func(p *panics.Error) { n.panicked("background")("work behind an answer", p) },
	}
	if n.tracer != nil {
		work.Tracer = n.tracer
	}
	n.limiter = limiter.New(work)
	n.openReplicator()
	n.recorder.follow(n.limiter)
	if err := n.openConsole(); err != nil {
		return n, err
	}
	n.metrics = observe.NewMetrics(observe.MetricsConfig{
		Limiter: n.limiter, View: n.view, Ready: n.readiness.Settled, Ownership: n.runner.Status,
		Happened: n.runner.Stats, Files: n.fileStates, Version: n.cfg.Version, Logger: n.log,
		Collectors:  append(append(append(n.envoyCollectors(), n.security.metrics, hops), n.roomCollectors()...), control.OverrideMetrics(n.overrides.book, n.inactiveOverrides, n.overrides.replicator)...),
		LogsDropped: n.logsDropped(),
	})
	if cfg.Registerer != nil {
		if n.unregister, err = n.metrics.Register(cfg.Registerer); err != nil {
			return n, fmt.Errorf("registerer: %w", err)
		}
	}
	if n.watcher != nil {
		n.watcher.Watch()
	}
	if n.envoy.files != nil {
		n.envoy.files.Watch()
	}
	n.openKeys()
	n.serve()
	n.work.Go(func() { n.overrides.replicator.Run(n.ctx) })
	n.work.Go(func() { n.readiness.Settle(n.ctx) })
	if n.cluster != nil {
		n.work.Go(n.follow)
		n.work.Go(func() { steer(n.ctx, n.cluster.View, (*cluster.View).Replaced, n.runner.SetView) })
		n.work.Go(func() { n.keys.Follow(n.ctx, n.security.keysChanged) })
	} else {
		n.runner.SetView(aloneView(n.self()))
	}
	return n, nil
}

// listen opens a TCP port.
func (n *Node) listen(setting string, p Port) (*admission.Listener, error) {
	if p == PortOff {
		return nil, nil
	}
	l, err := net.Listen("tcp", net.JoinHostPort(n.cfg.Bind, strconv.Itoa(int(max(p, 0)))))
	if err != nil && n.cfg.AnyPortIfTaken && p != PortAny {
		return n.listen(setting, PortAny)
	}
	switch {
	case err == nil:
		name := strings.TrimSuffix(setting, "-port")
		if name != "peer" {
			l = n.buffers.Listener(l)
		}
		return admission.NewListener(l, n.limits.listener(name, n.security, n.callersMemory)), nil
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s: %w: give another port, or 0 for any free one", setting, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, fmt.Errorf("bind: %w: give an address of this host; 0.0.0.0 stands for all of them", err)
	}
	return nil, fmt.Errorf("%s: %w", setting, err)
}

// identify asks the process at a peer address who it is.
func (n *Node) identify(ctx context.Context, addr string) (cluster.Identity, error) {
	r, err := peer.Identify(ctx, addr, n.security.peerClient())
	if err != nil {
		return cluster.Identity{}, err
	}
	return cluster.Identity{
		Name: r.Name, Boot: r.Boot, State: cluster.State(r.State), Settings: r.RingSettings, Voters: r.Voters,
		GossipPort: uint16(r.GossipPort), HTTPPort: uint16(r.HttpPort), GRPCPort: uint16(r.GrpcPort),
	}, nil
}

// identity tells who this node is, to others that ask. A node alone for good is nobody's member.
func (n *Node) identity() *peerv1.IdentifyResponse {
	if n.cluster == nil {
		return &peerv1.IdentifyResponse{}
	}
	id := n.cluster.Identity()
	return &peerv1.IdentifyResponse{
		Name: id.Name, Boot: id.Boot, State: uint32(id.State), RingSettings: id.Settings, Voters: id.Voters,
		GossipPort: uint32(id.GossipPort), HttpPort: uint32(id.HTTPPort), GrpcPort: uint32(id.GRPCPort),
	}
}

// join starts the gossip.
func (n *Node) join(policies *policy.Set) (*cluster.Cluster, error) {
	c := n.cfg.cluster()
	c.PeerPort, c.HTTPPort, c.GRPCPort = portOf(n.listeners.peer), portOf(n.listeners.http), portOf(n.listeners.grpc)
	c.SettingsFingerprint, c.Keys, c.PolicyHash, c.Voters = n.settings, n.security.fileKeys(), shortHash(policies), n.cfg.Voters
	c.EnvoyHash = n.envoyHash()
	c.Rejected = func(reason string) { n.security.metrics.Denied("gossip", reason) }
	c.Identify = n.identify
	return cluster.Start(c)
}

func portOf(l *admission.Listener) int {
	if l == nil {
		return 0
	}
	return l.Addr().(*net.TCPAddr).Port
}

// shortHash is the policies' hash as gossip carries it.
func shortHash(s *policy.Set) uint32 {
	b, err := hex.DecodeString(s.Hash())
	if err != nil || len(b) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

// serve starts everything that listens.
func (n *Node) serve() {
	// A server that stops waits for callers that have begun to connect: gRPC's own bound is 2 min.
	handshake := grpc.ConnectionTimeout(5 * time.Second)
	budget := n.cfg.Memory
	requests := admission.NewGate(budget.Requests)
	if n.listeners.peer != nil {
		calls := admission.NewCalls(admission.CallsConfig{
			FirstMessage: n.limits.FirstMessageTimeout, MaxAge: n.limits.streamAge(), Panicked: n.panicked("peer"),
		})
		n.peerServer = grpc.NewServer(append(slices.Concat(calls.Options(), n.security.peerServer(), n.limits.peerServer(n.cfg.Memory)),
			grpc.MaxRecvMsgSize(8<<20), grpc.MaxSendMsgSize(8<<20), grpc.WaitForHandlers(true), handshake, grpc.ForceServerCodecV2(transport.Codec()))...)
		services := calls.Registrar(n.peerServer)
		n.peerService = peer.NewServer(peer.ServerConfig{
			Config: n.transport(), MaxReplies: budget.Replies, Receiver: n.limiter, Inspect: n.inspect, Identify: n.identity,
			Activity: n.activity, Describe: n.describe,
			Panicked: func(p *panics.Error) { n.panicked("peer")("handing a batch on", p) },
		})
		peerv1.RegisterPeerServer(services, n.peerService)
		peerv1.RegisterOwnershipServer(services, n.messenger)
		peerv1.RegisterGossipKeysServer(services, n.keys.Peers())
		peerv1.RegisterOverridesServer(services, n.overrides.replicator)
		n.work.Go(func() { n.served("peer", n.peerServer.Serve(n.listeners.peer)) })
	}
	if n.listeners.grpc != nil {
		n.callers = grpcapi.NewServer(grpcapi.ServerConfig{
			Service: n.security.auth.Service("grpc", n.limiter), Lender: n.security.auth.Lender("grpc", n.limiter), Caller: n.security.callerName(), Kept: n.callersMemory,
			Status: n.Status, TopKeys: n.TopKeys, Topology: n.topology, Ready: n.readiness.Follow, Observe: n.metrics.Streamed,
			WriteTimeout: n.limits.WriteTimeout, MaxUnread: n.limits.MaxUnread, Trace: n.traceStreamed(), Requests: requests,
			Panicked: n.panicked("grpc"),
		})
		calls := admission.NewCalls(admission.CallsConfig{
			Authorize: n.security.auth.GRPC, MaxAnonymous: n.limits.MaxAnonymousConnections, FirstMessage: n.limits.FirstMessageTimeout,
			MaxAge: n.limits.streamAge(), Panicked: n.panicked("grpc"),
			MaxCalls: budget.MaxCalls, Memory: n.callersMemory, StreamBytes: admission.PerStream, Caller: n.security.caller,
		})
		n.calls.Store(calls)
		n.grpcServer = grpc.NewServer(append(slices.Concat(calls.Options(n.security.auth.Stream), n.security.grpcServer(), n.limits.grpcServer(n.cfg.Memory)),
			grpc.WaitForHandlers(true), grpc.NumStreamWorkers(streamWorkers), handshake, grpc.ForceServerCodecV2(wire.ServerCodec(n.buffers, budget.MaxParts)), experimental.BufferPool(n.buffers),
			// Callers may look every 10 s whether the node is still there, as the Go client does. gRPC's own bound of 5
			// minutes would cut them off for it.
			grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
			grpc.ChainStreamInterceptor(n.endWithNode, n.callers.EndUnread), grpc.ChainUnaryInterceptor(n.unaryInterceptors()...),
		)...)
		services := calls.Registrar(n.grpcServer)
		n.callers.Register(services)
		others := grpcapi.Admitted(services, requests)
		weirv1.RegisterAdminServer(others, n.keys)
		n.overrides.service.Register(others)
		n.gubernatorService("grpc").Register(others)
		if s := n.envoyService("grpc"); s != nil {
			s.Register(others)
			n.quotaService(requests).Register(others)
		}
		healthv1.RegisterHealthServer(others, n.health)
		reflection.Register(n.grpcServer)
		n.setHealth(false)
		n.work.Go(func() { n.served("grpc", n.grpcServer.Serve(n.listeners.grpc)) })
	}
	if n.listeners.http != nil {
		n.httpServer = n.limits.httpServer(httpapi.NewServer(n.observed(httpapi.New(httpapi.Config{
			Service: n.security.auth.Service("http", n.limiter), Authorize: n.security.authorizeHTTP, HasRole: n.security.auth.HasRole, Ready: n.Ready,
			Host: hostCheck(n.cfg.Bind, n.cfg.HTTPHosts), ForwardAuth: n.forwardAuth,
			Policies: n.listPolicies, Metrics: n.metrics.Handler(), Routes: n.routes(), Console: n.consolePath(),
			Status:  func(ctx context.Context) (*weirv1.StatusResponse, error) { return n.Status(ctx), nil },
			TopKeys: n.TopKeys, Describe: n.Describe, Overrides: n.overrides.service,
			NoInline: n.cfg.NoInline, Logger: n.log, Problem: n.metrics.Problem, MaxBody: n.limits.MaxMessageSize, Requests: requests, Buffers: n.buffers,
		})), n.log))
		n.work.Go(func() { n.served("http", n.security.serveHTTP(n.httpServer, n.listeners.http)) })
	}
	if n.listeners.resp != nil {
		n.respServer = resp.New(resp.Config{
			Service: n.security.auth.Service("resp", n.limiter), Authenticate: n.security.authenticateRESP, Current: n.security.current, Tokens: n.security.access != nil, Caller: n.security.callerName(),
			Handshake: n.security.respHandshake(), IdleTimeout: max(n.limits.IdleTimeout, 0), CommandTimeout: n.limits.FirstMessageTimeout,
			Requests: requests, Buffers: n.buffers,
			Version: n.cfg.Version, Decided: n.metrics.RESP, Failed: n.metrics.RESPFailed, Panicked: n.panicked("resp"),
			Suspicious: func(from net.Addr) {
				n.security.denials.note("resp", "http_on_resp_port", from, "HTTP where the Redis protocol is spoken")
			},
		})
		n.work.Go(func() { n.served("resp", n.respServer.Serve(n.listeners.resp)) })
	}
	if n.listeners.debug != nil {
		n.serveDebug()
	}
}

// endWithNode has streams end when the node does: whoever watches its health would otherwise keep it from stopping until
// the grace time is over.
func (n *Node) endWithNode(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	defer context.AfterFunc(n.ctx, cancel)()
	return handle(srv, streamUntil{stream, ctx})
}

// streamUntil is a stream with another context.
type streamUntil struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s streamUntil) Context() context.Context { return s.ctx }

// served reports that a server ended, unless it was told to.
func (n *Node) served(what string, err error) {
	if err != nil && n.ctx.Err() == nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) {
		n.fail(fmt.Errorf("%s server: %w", what, err))
	}
}

// fail notes why the node cannot go on. One reason is enough.
func (n *Node) fail(err error) {
	n.failOnce.Do(func() {
		n.failure = err
		close(n.failed)
	})
}

// Failed is closed when the node cannot go on, for the reason that Err gives.
func (n *Node) Failed() <-chan struct{} { return n.failed }

// Err is why the node cannot go on; nil as long as it can.
func (n *Node) Err() error {
	select {
	case <-n.failed:
		return n.failure
	default:
		return nil
	}
}

// Settled is closed once the node has become ready.
func (n *Node) Settled() <-chan struct{} { return n.readiness.Became() }

// openReadiness makes what tells when the node is ready: once it is a member, every other member sees the ring as it does, and the
// partitions that are its own have come, and it has exchanged overrides with them; and a voter once it votes again, because who restarts nodes one by one waits for each to be
// ready, and without a majority strict policies are decided nowhere.
func (n *Node) openReadiness() {
	n.readiness = newReadiness(readinessConfig{
		Joined: n.joined,
		Conditions: []condition{
			{What: "waiting for the partitions that are to move", Holds: func(context.Context) bool { return n.runner.Settled() }},
			{What: "waiting until this voter votes again", Holds: func(context.Context) bool { return n.votes() }},
			{What: "waiting until all members see the same ring", Holds: n.inStep},
			{What: "waiting for the overrides of other members", Holds: func(context.Context) bool { return n.overrides.replicator.Met() }},
		},
		Held: func() int {
			st, _ := n.runner.Status()
			return st.Held
		},
		Now: time.Now,
		Became: func() {
			n.setHealth(true)
			n.log.Info("node ready", "name", n.cfg.Name)
		},
		Logger: n.log,
	})
}

// votes reports whether this node does what others need it for as a voter, as far as it ever will: a voter that has
// started first lets all that it may have granted before run out, which takes three seconds. Without strict policies
// nobody needs it, and without a majority of the voters there is nothing to wait for.
func (n *Node) votes() bool {
	if len(n.limiter.Policies().NeedVoters()) == 0 || !slices.Contains(n.cfg.Voters, n.cfg.Name) {
		return true
	}
	present := 0
	for _, name := range n.cfg.Voters {
		if v := n.view(); v == nil || v.Member(name) != nil {
			present++
		}
	}
	st, ok := n.runner.Status()
	return !ok || st.Voting || present <= len(n.cfg.Voters)/2
}

// joined reports whether this node is an active member, or why not.
func (n *Node) joined() (bool, string) {
	if n.cluster == nil {
		return true, ""
	}
	return n.cluster.Ready()
}

// inStep reports whether all other active members have the same ring as this node.
func (n *Node) inStep(ctx context.Context) bool {
	v := n.view()
	return v == nil || n.agreed(ctx, v)
}

// agreed reports whether all other active members of a view have its ring, and this node has it still.
func (n *Node) agreed(ctx context.Context, v *cluster.View) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	want := v.Ring.Fingerprint()
	active := func(m *cluster.Member) bool { return m.State == cluster.Active }
	for _, answer := range n.inspectOthers(ctx, v, active) {
		if answer.response == nil || answer.response.Ring != want {
			return false
		}
	}
	return n.view().Ring.Fingerprint() == want
}

// follow keeps the connections to peers in step with the membership until the node stops.
func (n *Node) follow() {
	for {
		v := n.cluster.View()
		lives := func(p ownership.Node) bool { return process(v, p) != nil }
		n.peers.Retain(lives)
		n.messenger.Retain(lives)
		select {
		case <-v.Replaced():
		case err := <-n.cluster.Fatal():
			n.fail(err)
			return
		case <-n.ctx.Done():
			return
		}
	}
}

// setHealth answers gRPC's health protocol.
func (n *Node) setHealth(serving bool) {
	status := healthv1.HealthCheckResponse_NOT_SERVING
	if serving {
		status = healthv1.HealthCheckResponse_SERVING
	}
	n.health.SetServingStatus("", status)
	n.health.SetServingStatus(weirv1.Limiter_ServiceDesc.ServiceName, status)
	n.health.SetServingStatus("ratelimit", status) // the name that callers of envoyproxy/ratelimit ask for
}

// Stop is StopWithin with the grace time alone. What was not done in good order is in the log.
func (n *Node) Stop() { _ = n.StopWithin(context.Background()) }

// StopWithin leaves the cluster, hands over what the node holds and ends everything: until ctx is done, within the grace time, and
// what it takes to say goodbye, some seconds at most. It may be called more than once, and returns when all has ended. The error says what
// was not done in good order.
func (n *Node) StopWithin(ctx context.Context) error {
	n.stopOnce.Do(func() { n.stopErr = n.stop(ctx) })
	return n.stopErr
}

func (n *Node) stop(ctx context.Context) (err error) {
	n.readiness.Stop()
	n.health.Shutdown() // for good: readiness may be about to say that all is well
	ctx, done := context.WithTimeout(ctx, n.cfg.Grace)
	defer done()
	if n.cluster != nil {
		if n.limiter != nil {
			n.limiter.ReturnLoans(ctx) // which others may want, and would have to wait for
		}
		// Before anything else, so that the others stop sending while this node still answers.
		err = n.leave(ctx)
	}
	if n.runner != nil && n.cluster != nil {
		err = errors.Join(err, n.handOver(ctx))
	}
	n.cancel()
	if n.console != nil {
		n.console.Close() // whose streams would last as long as somebody looks
	}
	var servers sync.WaitGroup // side by side, so that neither uses up the other's time
	if n.httpServer != nil {
		servers.Go(func() {
			defer n.listeners.http.CloseSilent().Stop()
			if err := n.httpServer.Shutdown(ctx); err != nil {
				n.log.Warn("requests aborted", "error", err)
				_ = n.httpServer.Close() // what is left is cut off, as said
			}
		})
	}
	if n.grpcServer != nil {
		servers.Go(func() {
			defer n.listeners.grpc.CloseSilent().Stop()
			defer context.AfterFunc(ctx, n.grpcServer.Stop)()
			n.grpcServer.GracefulStop()
			n.callers.Close()
		})
	}
	if n.respServer != nil {
		servers.Go(func() {
			_ = n.listeners.resp.Close() // an error shows when the server ends
			if err := n.respServer.Shutdown(ctx); err != nil {
				n.log.Warn("connections aborted", "listener", "resp", "error", err)
			}
		})
	}
	servers.Wait()
	for _, s := range n.envoy.services {
		s.Close()
	}
	if n.peerService != nil {
		n.peerService.Drain(ctx) // what was handed on for other nodes, while it was this one's
	}
	if n.messenger != nil {
		n.messenger.Close()
	}
	if n.peers != nil {
		n.peers.Close() // before the server, whose handlers may wait for what they handed on
	}
	if n.peerServer != nil {
		silent := n.listeners.peer.CloseSilent()
		n.peerServer.Stop() // streams between nodes never end by themselves
		silent.Stop()
	}
	closeFiles(n.files(), n.log)
	if n.runner != nil {
		n.runner.Close()
	}
	if n.limiter != nil {
		n.limiter.Close()
	}
	n.closeTracer()
	if n.cluster != nil {
		if err := n.cluster.Close(); err != nil {
			n.log.Warn("gossip close failed", "error", err)
		}
	}
	if n.unregister != nil {
		n.unregister()
	}
	if n.security != nil {
		n.security.closeAudit()
	}
	if n.debugServer != nil {
		_ = n.debugServer.Close() // last, so that stopping can be looked at
	}
	n.work.Wait()
	if n.overrides.directory != nil {
		if err := n.overrides.directory.Close(); err != nil {
			n.log.Warn("data directory not closed", "error", err)
		}
	}
	for _, l := range []*admission.Listener{n.listeners.http, n.listeners.grpc, n.listeners.peer, n.listeners.resp, n.listeners.debug} {
		if l != nil {
			_ = l.Close() // for a node that never came to serve; otherwise closed already
		}
	}
	return err
}

// agreeFor bounds how long a node that leaves stays because others have not heard of that.
const agreeFor = 3 * time.Second

// leave takes this node out of the ring, and waits a little until the others have done so too: what they still send
// until then would go unanswered.
func (n *Node) leave(ctx context.Context) error {
	active, _ := n.joined()
	if err := n.cluster.Leave(ctx); err != nil {
		n.log.Warn("cluster leave failed", "error", err)
		return err
	}
	if !active {
		return nil // nobody sends to a node that never was in the ring
	}
	ctx, cancel := context.WithTimeout(ctx, agreeFor)
	defer cancel()
	for !n.inStep(ctx) && pause(ctx) {
	}
	return nil
}

// logsDropped are the metrics of logs that drop lines.
func (n *Node) logsDropped() map[string]func() uint64 {
	logs := map[string]func() uint64{"log": func() uint64 { return 0 }}
	if n.cfg.LogDropped != nil {
		logs["log"] = n.cfg.LogDropped
	}
	if n.security.audit != nil {
		logs["audit"] = n.security.audit.Dropped
	}
	return logs
}

// Reload reads the policy file, and those that access depends on, again at once.
func (n *Node) Reload() {
	for _, f := range n.files() {
		f.Reload()
	}
	n.security.reopenAudit()
}

// policiesChanged puts the policies of a changed file into force.
func (n *Node) policiesChanged(set *policy.Set) {
	n.setPolicies(set)
	n.metrics.Reloaded(true)
	if n.cluster != nil {
		n.cluster.SetPolicyHash(shortHash(set))
	}
	n.log.Info("policies changed", "policies", len(set.Policies()), "hash", set.Hash())
}

// policiesRejected reports that a changed file cannot be taken.
func (n *Node) policiesRejected(err error) {
	n.metrics.Reloaded(false)
	n.log.Error("policy file rejected", "error", err, "hint", "the previous policies stay in force")
}

// policyError says why the policy file as it is now is not in force, or is empty.
func (n *Node) policyError() string {
	if n.watcher == nil || n.watcher.Err() == nil {
		return ""
	}
	return n.watcher.Err().Error()
}

// view is the membership, nil for a node alone for good.
func (n *Node) view() *cluster.View {
	if n.cluster == nil {
		return nil
	}
	return n.cluster.View()
}

// members is the number of active members, at least one.
func (n *Node) members() int {
	if v := n.view(); v != nil {
		return max(len(v.Ring.Members()), 1)
	}
	return 1
}

func (n *Node) self() ownership.Node {
	if v := n.view(); v != nil {
		return nodeOf(v.Self)
	}
	return ownership.Node{Name: n.cfg.Name}
}

// memberNodes are all members, this one included, by name, and what is closed when they change; nil: they never do.
func (n *Node) memberNodes() (all []ownership.Node, replaced <-chan struct{}) {
	v := n.view()
	if v == nil {
		return []ownership.Node{n.self()}, nil
	}
	for i := range v.Members {
		all = append(all, nodeOf(&v.Members[i]))
	}
	return all, v.Replaced()
}

// memberOf is the member that a boot is of.
func (n *Node) memberOf(boot uint64) (ownership.Node, bool) {
	if v := n.view(); v != nil {
		for i := range v.Members {
			if m := &v.Members[i]; m.Boot == boot {
				return nodeOf(m), true
			}
		}
	}
	return ownership.Node{}, false
}

// transport is what the streams between nodes need to know of this one.
func (n *Node) transport() transport.Config {
	return transport.Config{
		Self: n.self(), RingSettings: n.settings, Address: n.peerAddress, Logger: n.log, Credentials: n.security.peerClient(), Window: n.cfg.Memory.PeerWindow,
	}
}

func (n *Node) peerAddress(p ownership.Node) (string, bool) {
	m := process(n.cluster.View(), p)
	if m == nil || m.PeerAddr == "" {
		return "", false
	}
	return m.PeerAddr, true
}

// process is a process among the members of a view; nil where it is none, or another one has its name.
func process(v *cluster.View, p ownership.Node) *cluster.Member {
	if m := v.Member(p.Name); m != nil && m.Boot == p.Boot {
		return m
	}
	return nil
}

// Ready tells whether the node is ready for traffic, why not, or what an operator should know all the same.
func (n *Node) Ready() (bool, string) {
	ready, detail := n.readiness.Ready()
	var details []string
	if detail != "" {
		details = append(details, detail)
	}
	for _, f := range n.files() {
		if err := f.Err(); err != nil {
			details = append(details, f.what()+" rejected: "+err.Error())
		}
	}
	return ready, strings.Join(details, "; ")
}

// GossipAddr, PeerAddr, HTTPAddr, GRPCAddr and RESPAddr are the addresses that the node has, with the ports that it really listens on; empty where
// one is off.
func (n *Node) GossipAddr() string {
	if v := n.view(); v != nil {
		return v.Self.GossipAddr
	}
	return ""
}

// HTTPAddr is described with GossipAddr.
func (n *Node) HTTPAddr() string { return addrOf(n.listeners.http) }

// GRPCAddr is described with GossipAddr.
func (n *Node) GRPCAddr() string { return addrOf(n.listeners.grpc) }

// RESPAddr is described with GossipAddr.
func (n *Node) RESPAddr() string { return addrOf(n.listeners.resp) }

// PeerAddr is described with GossipAddr.
func (n *Node) PeerAddr() string { return addrOf(n.listeners.peer) }

// Service answers questions of this process, to which no access file applies.
func (n *Node) Service() limit.Service { return n.limiter }

// Policies are those in force.
func (n *Node) Policies() *policy.Set { return n.limiter.Policies() }

// Name is the node's name.
func (n *Node) Name() string { return n.cfg.Name }

// ReadyLine is what a node prints when it is up, with the ports it really has.
func (n *Node) ReadyLine() string {
	line := fmt.Sprintf("weir ready name=%s http=%s grpc=%s gossip=%s peer=%s",
		n.cfg.Name, n.HTTPAddr(), n.GRPCAddr(), n.GossipAddr(), n.PeerAddr())
	if n.listeners.resp != nil {
		line += " resp=" + n.RESPAddr()
	}
	return line
}

func addrOf(l *admission.Listener) string {
	if l == nil {
		return ""
	}
	return l.Addr().String()
}

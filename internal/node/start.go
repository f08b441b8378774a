package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/health"

	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/cluster/runner"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/control"
	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/rpc/peer"
	"github.com/weirlimit/weir/rpc/replica"
	"github.com/weirlimit/weir/rpc/transport"
)

// Start starts a node. It returns once every port is open and served; Settled says when the node is ready for traffic.
// An error names the flag that is wrong, and leaves nothing running.
//
// Each step opens one part of the node and calls closing with the function that ends the part. A part uses only parts
// of earlier steps, so stop ends them in the reverse order.
func Start(ctx context.Context, cfg Config) (n *Node, err error) {
	n = &Node{cfg: cfg, log: cfg.Logger, started: time.Now(), health: health.NewServer()}
	n.failing, n.fail = context.WithCancelCause(context.Background())
	n.openReadiness()
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	for _, open := range []func() error{
		n.cfg.Validate, n.divideMemory, n.openSecurity, n.openPolicies, n.openEnvoy, n.openHashKey, n.openStates,
		n.openListeners, n.join, n.openTracer,
		n.openLimiter, n.openConsole, n.openMetrics, n.openKeys, n.serve, n.follow,
	} {
		if err := open(); err != nil {
			n.Stop()
			return n, err
		}
	}
	return n, nil
}

// closing has stop call end, before the functions that were given to closing earlier.
func (n *Node) closing(end func(context.Context)) { n.closers = append(n.closers, end) }

// Stop is StopWithin without a bound besides the grace time. The log has what it did not complete.
func (n *Node) Stop() { _ = n.StopWithin(context.Background()) }

// StopWithin leaves the cluster, hands over what the node holds and ends everything. It takes until ctx is done or the
// grace time is over, and then some seconds at most to close connections. A second call waits for the first. The error
// says what was not completed.
func (n *Node) StopWithin(ctx context.Context) error {
	n.stopOnce.Do(func() { n.stopErr = n.stop(ctx) })
	return n.stopErr
}

func (n *Node) stop(ctx context.Context) (err error) {
	n.readiness.Stop()
	n.health.Shutdown() // for good: readiness may set it again otherwise
	ctx, done := context.WithTimeout(ctx, n.cfg.Grace)
	defer done()
	if n.cluster != nil {
		err = n.leave(ctx)
	}
	n.cancel()
	for _, end := range slices.Backward(n.closers) {
		end(ctx)
	}
	return err
}

// leave hands everything of this node over to the other members.
func (n *Node) leave(ctx context.Context) error {
	if n.limiter != nil {
		n.limiter.ReturnLoans(ctx) // others may need the units, and would have to wait for them
	}
	// leaveRing comes before the servers end, so that the others stop sending while this node still answers.
	err := n.leaveRing(ctx)
	if n.runner != nil {
		err = errors.Join(err, n.handOver(ctx))
	}
	return err
}

// agreeFor bounds how long a leaving node waits for the other members.
const agreeFor = 3 * time.Second

// leaveRing takes this node out of the ring, and waits until the others have done so too, for agreeFor at most: what
// they send to a stopped node would stay unanswered.
func (n *Node) leaveRing(ctx context.Context) error {
	active, _ := n.joined()
	if err := n.cluster.Leave(ctx); err != nil {
		n.log.Warn("cluster leave failed", "error", err)
		return err
	}
	if !active {
		return nil // no node sends to one that was never in the ring
	}
	ctx, cancel := context.WithTimeout(ctx, agreeFor)
	defer cancel()
	for !n.inStep(ctx) && pause(ctx) {
	}
	return nil
}

// divideMemory divides the memory of the node among its parts.
func (n *Node) divideMemory() error {
	cfg := n.cfg.withDefaults()
	fitted, over, err := cfg.Limits.fitted(cfg.Memory, cfg.MaxMemory)
	if err != nil {
		return err
	}
	if cfg.Memory = fitted; cfg.MaxMemory == 0 {
		cfg.MaxMemory = fitted.State
	}
	if len(over) > 0 {
		n.log.Warn("memory bounds exceed the limit", "settings", over, "sum_bytes", fitted.Sum(), "limit_bytes",
			fitted.Limit)
	}
	n.cfg, n.limits, n.kept = cfg, cfg.Limits.withDefaults(fitted), fairshare.New(int(fitted.Kept))
	if n.limits.MaxConnections < 0 {
		fitted.Callers = 0 // no bound
	}
	n.callersMemory, n.requests = fairshare.New(int(fitted.Callers)), admission.NewGate(fitted.Requests)
	n.forwardAuth, err = cfg.forwardAuth()
	return err
}

// openSecurity reads the files of authentication and encryption, and watches them.
func (n *Node) openSecurity() (err error) {
	if n.security, err = openSecurity(&n.cfg); err != nil {
		return err
	}
	n.closing(func(context.Context) { n.security.close() })
	return nil
}

// openPolicies reads the policy file and the overrides that operators have set.
func (n *Node) openPolicies() (err error) {
	policies := n.cfg.Policies
	if n.cfg.PolicyFile != "" {
		n.watcher, err = reload.Open([]string{n.cfg.PolicyFile}, reload.Config[*policy.Set]{
			Parse: n.parsePolicies, OnChange: n.policiesChanged, OnError: n.policiesRejected,
			MaxSize: strictyaml.MaxFile,
		})
		if err != nil {
			return fmt.Errorf("policies: %w", err)
		}
		policies = n.watcher.Current()
		n.ownFiles = append(n.ownFiles, followedFile{n.watcher, "policies", "policy file"})
	}
	n.closing(n.closeFiles)
	return n.openOverrides(policies)
}

// parsePolicies parses the policy file, and checks that this node has what its policies need.
func (n *Node) parsePolicies(contents [][]byte) (*policy.Set, error) {
	set, err := policy.Parse(n.cfg.PolicyFile, contents[0])
	if err == nil {
		err = n.checkReload(set)
	}
	return set, err
}

// openHashKey derives the hash key from the cluster's secret. A node without gossip and secret gets a random one.
func (n *Node) openHashKey() (err error) {
	switch {
	case n.cfg.Security.ClusterSecretFile != "":
		n.hashKey, err = readSecret(n.cfg.Security.ClusterSecretFile)
	case n.cfg.GossipPort == PortOff:
		n.hashKey = ring.RandomHashKey() // no other node needs the same key
	}
	n.settings = ring.SettingsFingerprint(n.hashKey)
	return err
}

// openListeners opens the ports.
func (n *Node) openListeners() (err error) {
	most := 2 * (n.limits.MaxAnonymousConnections + max(n.limits.MaxConnections, 0))
	full := func(listener string) func(net.Addr) {
		return func(from net.Addr) {
			n.security.denials.note(listener, "memory", from, "it holds more of the connections' memory than others")
		}
	}
	n.buffers = admission.NewBuffers(n.cfg.Memory.Buffers, most, full("callers"))
	n.peerBuffers = admission.NewBuffers(n.cfg.Memory.PeerBuffers(transport.MaxMessage), most, full("peer"))
	for _, l := range []struct {
		setting string
		port    Port
		to      **admission.Listener
	}{
		{"http-port", n.cfg.HTTPPort, &n.listeners.http},
		{"grpc-port", n.cfg.GRPCPort, &n.listeners.grpc},
		{"peer-port", n.cfg.PeerPort, &n.listeners.peer},
		{"resp-port", n.cfg.RESPPort, &n.listeners.resp},
	} {
		if *l.to, err = n.listen(l.setting, l.port); err != nil {
			return err
		}
		if *l.to != nil {
			n.closing(func(context.Context) { _ = (*l.to).Close() }) // fails if its server has closed it
		}
	}
	n.security.warn(n.cfg)
	return n.openDebug()
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
		buffers := n.buffers
		if name == "peer" {
			buffers = n.peerBuffers
		}
		return admission.NewListener(buffers.Listener(l), n.limits.listener(name, n.security, n.callersMemory)), nil
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s: %w: give another port, or 0 for any free one", setting, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, fmt.Errorf("bind: %w: give an address of this host; 0.0.0.0 stands for all of them", err)
	}
	return nil, fmt.Errorf("%s: %w", setting, err)
}

// join starts gossip, unless it is off.
func (n *Node) join() (err error) {
	if n.cfg.GossipPort == PortOff {
		return nil
	}
	c := n.cfg.cluster()
	c.PeerPort, c.HTTPPort, c.GRPCPort = portOf(n.listeners.peer), portOf(n.listeners.http), portOf(n.listeners.grpc)
	c.SettingsFingerprint, c.Keys, c.Voters = n.settings, n.security.fileKeys(), n.cfg.Voters
	c.PolicyHash, c.EnvoyHash = shortHash(n.filePolicies()), n.envoyHash()
	c.Rejected = func(reason string) { n.security.metrics.Denied("gossip", reason) }
	c.Identify = n.identify
	if n.cluster, err = cluster.Start(c); err != nil {
		return err
	}
	n.closing(func(context.Context) {
		if err := n.cluster.Close(); err != nil {
			n.log.Warn("gossip close failed", "error", err)
		}
	})
	return nil
}

func portOf(l *admission.Listener) int {
	if l == nil {
		return 0
	}
	return l.Addr().(*net.TCPAddr).Port
}

// shortHash returns the first 32 bits of the policies' hash, for gossip.
func shortHash(s *policy.Set) uint32 {
	hash, _ := strconv.ParseUint(s.Hash()[:8], 16, 32) // Hash returns hexadecimal digits
	return uint32(hash)
}

// openLimiter opens the ownership of partitions, the streams to other nodes, and the limiter, which uses them and the
// store.
func (n *Node) openLimiter() (err error) {
	if n.recorder, err = newActivityRecorder(); err != nil {
		return err
	}
	cfg, self, states := &n.cfg, n.self(), n.states
	n.hops = observe.NewHops()
	n.peers = peer.NewForwarder(peer.ForwarderConfig{Config: n.transport(), Observe: n.hops.Forwarded})
	n.messenger = replica.NewMessenger(replica.MessengerConfig{Config: n.transport(), Partitions: ring.Partitions,
		Receive: n.inbox.Receive})
	run := runner.Config{
		Core: ownership.Config{Self: self, Partitions: ring.Partitions, Data: states, Voters: cfg.Voters,
			Restore: n.restore},
		Sender: n.messenger, Inbox: n.inbox, Now: n.clock, Boot: n.bootClock, Version: states.Version, Logger: n.log,
	}
	if n.disk != nil {
		run.Disk = n.disk
	}
	n.runner = runner.New(run)
	work := limiter.Config{
		Self: self, Member: n.memberOf,
		Store: states, Ownership: n.runner, Peers: n.peers, Clock: n.clock, BootClock: n.bootClock,
		Recorder: n.recorder, Members: n.members,
		Policies: n.effective(), UnknownPolicy: cfg.UnknownPolicy, NoInline: cfg.NoInline, Disk: n.disk != nil,
		InlineMaxWindow: max(cfg.InlineMaxWindow, 0), InlineMaxKeys: cfg.InlineMaxKeys,
		InlineMaxMemory: cfg.InlineMaxMemory,
		Timeout:         cfg.Timeout, HashKey: n.hashKey, MaxInFlight: n.limits.MaxInFlight, Logger: n.log,
		Panicked: func(p *panics.Error) { n.panicked("background")("work behind an answer", p) },
	}
	if n.tracer != nil {
		work.Tracer = n.tracer
	}
	n.limiter = limiter.New(work)
	n.openReplicator()
	n.recorder.follow(n.limiter)
	n.closing(func(context.Context) { n.limiter.Close() })
	n.closing(func(context.Context) { n.runner.Close() })
	if n.disk != nil {
		n.closing(n.saveAll)
	}
	n.closing(n.closePeers)
	return nil
}

// openMetrics opens the metrics, and then begins to watch the files: a change of a file is counted in the metrics.
func (n *Node) openMetrics() error {
	collectors := append(n.envoyCollectors(), n.security.metrics, n.hops, observe.Reading(n.readRoom),
		observe.Reading(n.readDisk),
		control.OverrideMetrics(n.overrides.book, n.inactiveOverrides, n.overrides.replicator))
	n.metrics = observe.NewMetrics(observe.MetricsConfig{
		Limiter: n.limiter, View: n.view, Ready: n.readiness.Settled, Ownership: n.runner.Status,
		Happened: n.runner.Stats, Files: n.fileStates, Version: n.cfg.Version, Logger: n.log,
		Collectors: collectors, LogsDropped: n.logsDropped(),
	})
	if n.cfg.Registerer != nil {
		unregister, err := n.metrics.Register(n.cfg.Registerer)
		if err != nil {
			return fmt.Errorf("registerer: %w", err)
		}
		n.closing(func(context.Context) { unregister() })
	}
	if n.watcher != nil {
		n.watcher.Watch()
	}
	if n.envoy.files != nil {
		n.envoy.files.Watch()
	}
	n.closing(n.closeFiles) // before the limiter ends, which a changed file is applied to
	return nil
}

// follow starts the goroutines that follow the cluster; without gossip, the node holds all partitions.
func (n *Node) follow() error {
	n.work.Go(func() { n.overrides.replicator.Run(n.ctx) })
	n.work.Go(func() { n.readiness.Settle(n.ctx) })
	if n.cluster == nil {
		n.runner.SetView(aloneView(n.self()))
		return nil
	}
	n.work.Go(n.retainMembers)
	if n.disk != nil {
		n.work.Go(n.keepMembers)
	}
	n.work.Go(func() { steer(n.ctx, n.cluster.View, (*cluster.View).Replaced, n.runner.SetView) })
	n.work.Go(func() { n.keys.Follow(n.ctx, n.security.keysChanged) })
	return nil
}

package main

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"

	"github.com/weirlimit/weir/cluster"
	httpapi "github.com/weirlimit/weir/gateway/http"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/metrics"
	"github.com/weirlimit/weir/policy"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/rpc"
)

// port is a port to listen on.
type port int

const (
	portAny port = 0  // any free one
	portOff port = -1 // none: the service is off
)

// nodeConfig is what a node is started with.
type nodeConfig struct {
	Name, Bind, Advertise                    string
	HTTPPort, GRPCPort, GossipPort, PeerPort port
	AnyPortIfTaken                           bool // take any free port in place of one that is taken
	Join                                     []string
	PolicyFile                               string // empty: Policies
	Policies                                 *policy.Set
	GossipKeyFile                            string // empty: gossip in plain text
	UnknownPolicy                            limiter.Unknown
	MaxKeys, MaxMemory                       int64
	MaxRequestIDs                            int
	NoInline                                 bool
	Timeout, Grace                           time.Duration
	Logger                                   *slog.Logger
}

// node is one running node: everything that listens, and what it stands on.
type node struct {
	cfg      nodeConfig
	log      *slog.Logger
	started  time.Time
	settings uint64 // fingerprint of the ring's settings

	listeners struct{ http, grpc, peer net.Listener } // nil where off
	cluster   *cluster.Cluster                        // nil: a node alone for good
	limiter   *limiter.Limiter
	peers     *rpc.Peers
	watcher   *policy.Watcher // nil without a policy file
	metrics   *metrics.Metrics
	health    *health.Server

	httpServer *http.Server
	grpcServer *grpc.Server
	peerServer *grpc.Server

	built    chan struct{} // closed once the fields above are set
	settled  chan struct{} // closed once the node has been ready for the first time
	isReady  atomic.Bool   // has settled, and is not stopping
	failed   chan error
	ctx      context.Context
	cancel   context.CancelFunc
	work     sync.WaitGroup
	stopping sync.Once
}

// startNode starts a node. It returns once every port is open and served; Settled tells when it is ready for traffic. An
// error names the flag that is to blame, and leaves nothing running.
func startNode(ctx context.Context, cfg nodeConfig) (n *node, err error) {
	n = &node{
		cfg: cfg, log: cfg.Logger, started: time.Now(),
		built: make(chan struct{}), settled: make(chan struct{}), failed: make(chan error, 1), health: health.NewServer(),
	}
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			n.Stop()
		}
	}()
	if cfg.GossipPort == portOff && len(cfg.Join) > 0 {
		return n, errors.New("--join: needs a gossip port: give --gossip-port")
	}
	if cfg.GossipPort != portOff && cfg.PeerPort == portOff {
		return n, errors.New("--peer-port: nodes that gossip forward to one another: give it, or turn --gossip-port off too")
	}
	policies := cfg.Policies
	if cfg.PolicyFile != "" {
		n.watcher, err = policy.Watch(cfg.PolicyFile, policy.WatchConfig{OnChange: n.policiesChanged, OnError: n.policiesRefused})
		if err != nil {
			return n, fmt.Errorf("--policies: %w", err)
		}
		policies = n.watcher.Current()
	}
	var keys [][]byte
	if cfg.GossipKeyFile != "" {
		if keys, err = cluster.LoadKeyFile(cfg.GossipKeyFile); err != nil {
			return n, err
		}
	}
	seed := hashSeed(keys)
	n.settings = ring.SettingsFingerprint(seed)
	for _, l := range []struct {
		flag string
		port port
		to   *net.Listener
	}{
		{"--http-port", cfg.HTTPPort, &n.listeners.http},
		{"--grpc-port", cfg.GRPCPort, &n.listeners.grpc},
		{"--peer-port", cfg.PeerPort, &n.listeners.peer},
	} {
		if *l.to, err = n.listen(l.flag, l.port); err != nil {
			return n, err
		}
	}
	if cfg.GossipPort != portOff {
		n.cluster, err = n.join(keys, policies)
		if err != nil {
			return n, err
		}
	}
	n.peers = rpc.NewPeers(rpc.PeersConfig{
		Self: n.self(), RingSettings: n.settings, Address: n.peerAddress, Logger: n.log,
		Observe: func(took time.Duration, answered bool) { n.metrics.Forwarded(took, answered) },
	})
	n.limiter = limiter.New(limiter.Config{
		Ownership: n, Peers: n.peers, Policies: policies, UnknownPolicy: cfg.UnknownPolicy, NoInline: cfg.NoInline,
		Timeout: cfg.Timeout, HashSeed: seed, MaxKeys: cfg.MaxKeys, MaxMemory: cfg.MaxMemory,
		MaxRequestIDs: cfg.MaxRequestIDs, Logger: n.log,
	})
	n.metrics = metrics.New(metrics.Config{
		Limiter: n.limiter, View: n.view, Ready: n.isReady.Load, Version: version(), Logger: n.log,
	})
	close(n.built)
	n.serve()
	n.work.Go(n.settle)
	if n.cluster != nil {
		n.work.Go(n.follow)
	}
	return n, nil
}

// hashSeed is the seed of key hashes: from the cluster's gossip key where there is one, so that outsiders cannot work out
// which keys share a partition. All nodes with the same key file have the same seed.
func hashSeed(keys [][]byte) uint64 {
	if len(keys) == 0 {
		return 0
	}
	d := xxhash.New()
	_, _ = d.WriteString("weir hash seed")
	_, _ = d.Write(keys[0])
	return d.Sum64()
}

// listen opens a TCP port.
func (n *node) listen(flag string, p port) (net.Listener, error) {
	if p == portOff {
		return nil, nil
	}
	l, err := net.Listen("tcp", net.JoinHostPort(n.cfg.Bind, strconv.Itoa(int(p))))
	if err != nil && n.cfg.AnyPortIfTaken && p != portAny {
		return n.listen(flag, portAny)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	return l, nil
}

// join starts the gossip.
func (n *node) join(keys [][]byte, policies *policy.Set) (*cluster.Cluster, error) {
	return cluster.Start(cluster.Config{
		Name: n.cfg.Name, Bind: n.cfg.Bind, GossipPort: int(n.cfg.GossipPort), Advertise: n.cfg.Advertise,
		PeerPort: portOf(n.listeners.peer), HTTPPort: portOf(n.listeners.http), GRPCPort: portOf(n.listeners.grpc),
		Join: n.cfg.Join, SettingsFingerprint: n.settings, Keys: keys, PolicyHash: shortHash(policies), Logger: n.log,
	})
}

func portOf(l net.Listener) int {
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
func (n *node) serve() {
	options := []grpc.ServerOption{grpc.MaxRecvMsgSize(4 << 20), grpc.MaxConcurrentStreams(10_000)}
	if n.listeners.peer != nil {
		n.peerServer = grpc.NewServer(grpc.MaxRecvMsgSize(8<<20), grpc.MaxSendMsgSize(8<<20))
		peerv1.RegisterPeerServer(n.peerServer, rpc.NewPeerServer(rpc.PeerServerConfig{
			Self: n.self(), RingSettings: n.settings, Receiver: n.limiter, Inspect: n.inspect, Logger: n.log,
		}))
		n.work.Go(func() { n.served("peer", n.peerServer.Serve(n.listeners.peer)) })
	}
	if n.listeners.grpc != nil {
		n.grpcServer = grpc.NewServer(options...)
		rpc.NewServer(n.limiter, n.Status).Register(n.grpcServer)
		healthv1.RegisterHealthServer(n.grpcServer, n.health)
		reflection.Register(n.grpcServer)
		n.setHealth(false)
		n.work.Go(func() { n.served("grpc", n.grpcServer.Serve(n.listeners.grpc)) })
	}
	if n.listeners.http != nil {
		n.httpServer = httpapi.NewServer(httpapi.New(httpapi.Config{
			Service: n.limiter, Ready: n.Ready, Policies: n.listPolicies, Metrics: n.metrics.Handler(),
			Status:   func(ctx context.Context) (*weirv1.StatusResponse, error) { return n.Status(ctx), nil },
			NoInline: n.cfg.NoInline, Logger: n.log,
		}), n.log)
		n.work.Go(func() { n.served("http", n.httpServer.Serve(n.listeners.http)) })
	}
}

// served reports that a server ended, unless it was told to.
func (n *node) served(what string, err error) {
	if err != nil && n.ctx.Err() == nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) {
		n.fail(fmt.Errorf("%s server: %w", what, err))
	}
}

func (n *node) fail(err error) {
	select {
	case n.failed <- err:
	default: // one reason to stop is enough
	}
}

// Failed tells why the node cannot go on.
func (n *node) Failed() <-chan error { return n.failed }

// Settled is closed once the node has become ready for the first time.
func (n *node) Settled() <-chan struct{} { return n.settled }

// settle makes the node ready once it is a member and every other member sees the ring as it does: until then a check
// sent to one node and a check sent to another could be decided by different owners.
func (n *node) settle() {
	const pause = 25 * time.Millisecond
	// A member that cannot be asked, or keeps another view, must not hold this node up for ever.
	deadline := time.Now().Add(10 * time.Second)
	inStep := false
	for !inStep {
		if active, _ := n.joined(); active {
			if inStep = n.inStep(); !inStep && time.Now().After(deadline) {
				n.log.Warn("other members see another ring than this node; going on")
				inStep = true
			}
		} else {
			deadline = time.Now().Add(10 * time.Second)
		}
		if !inStep {
			select {
			case <-time.After(pause):
			case <-n.ctx.Done():
				return
			}
		}
	}
	n.isReady.Store(true)
	n.setHealth(true)
	close(n.settled)
	n.log.Info("ready", "name", n.cfg.Name)
}

// joined reports whether this node is an active member, or why not.
func (n *node) joined() (bool, string) {
	if n.cluster == nil {
		return true, ""
	}
	return n.cluster.Ready()
}

// inStep reports whether all other active members have the same ring as this node.
func (n *node) inStep() bool {
	v := n.view()
	if v == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(n.ctx, time.Second)
	defer cancel()
	want := v.Ring.Fingerprint()
	for _, answer := range n.inspectAll(ctx, v) {
		if answer.member.State == cluster.Active && (answer.response == nil || answer.response.Ring != want) {
			return false
		}
	}
	return n.view().Ring.Fingerprint() == want
}

// follow keeps the connections to peers in step with the membership until the node stops.
func (n *node) follow() {
	for {
		v := n.cluster.View()
		n.peers.Retain(func(p rpc.Node) bool {
			m := v.Member(p.Name)
			return m != nil && m.Boot == p.Boot
		})
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
func (n *node) setHealth(serving bool) {
	status := healthv1.HealthCheckResponse_NOT_SERVING
	if serving {
		status = healthv1.HealthCheckResponse_SERVING
	}
	n.health.SetServingStatus("", status)
	n.health.SetServingStatus(weirv1.Limiter_ServiceDesc.ServiceName, status)
}

// Stop leaves the cluster and ends everything, within the grace time. It may be called more than once.
func (n *node) Stop() {
	n.stopping.Do(n.stop)
}

func (n *node) stop() {
	n.isReady.Store(false)
	n.setHealth(false)
	ctx, done := context.WithTimeout(context.WithoutCancel(n.ctx), n.cfg.Grace)
	defer done()
	if n.cluster != nil {
		// First of all, so that the others stop sending while this node still answers.
		if err := n.cluster.Leave(ctx); err != nil {
			n.log.Warn("leaving the cluster", "error", err)
		}
	}
	n.cancel()
	if n.httpServer != nil {
		if err := n.httpServer.Shutdown(ctx); err != nil {
			n.log.Warn("requests cut off", "error", err)
			_ = n.httpServer.Close() // what is left is cut off, as said
		}
	}
	if n.grpcServer != nil {
		cut := context.AfterFunc(ctx, n.grpcServer.Stop)
		n.grpcServer.GracefulStop()
		cut()
	}
	if n.peerServer != nil {
		n.peerServer.Stop() // streams between nodes never end by themselves
	}
	if n.peers != nil {
		n.peers.Close()
	}
	if n.watcher != nil {
		n.watcher.Close()
	}
	if n.limiter != nil {
		n.limiter.Close()
	}
	if n.cluster != nil {
		if err := n.cluster.Close(); err != nil {
			n.log.Warn("closing the gossip", "error", err)
		}
	}
	n.work.Wait()
	for _, l := range []net.Listener{n.listeners.http, n.listeners.grpc, n.listeners.peer} {
		if l != nil {
			_ = l.Close() // for a node that never came to serve; otherwise closed already
		}
	}
}

// ReloadPolicies reads the policy file again at once.
func (n *node) ReloadPolicies() {
	if n.watcher != nil {
		n.watcher.Reload()
	}
}

// policiesChanged and policiesRefused are called by the watcher, whose goroutine is there before what they work on.
func (n *node) policiesChanged(set *policy.Set) {
	if !n.isBuilt() {
		return
	}
	n.limiter.SetPolicies(set)
	n.metrics.Reloaded(true)
	if n.cluster != nil {
		n.cluster.SetPolicyHash(shortHash(set))
	}
	n.log.Info("policies changed", "policies", len(set.Policies()), "hash", set.Hash())
}

func (n *node) policiesRefused(err error) {
	if !n.isBuilt() {
		return
	}
	n.metrics.Reloaded(false)
	n.log.Error("policy file not taken, the policies in force stay", "error", err)
}

// isBuilt waits until the node is built, and reports whether it ever was.
func (n *node) isBuilt() bool {
	select {
	case <-n.built:
		return true
	case <-n.ctx.Done():
		return false
	}
}

// policyError says why the policy file as it is now is not in force, or is empty.
func (n *node) policyError() string {
	if n.watcher == nil || n.watcher.Err() == nil {
		return ""
	}
	return n.watcher.Err().Error()
}

// view is the membership, nil for a node alone for good.
func (n *node) view() *cluster.View {
	if n.cluster == nil {
		return nil
	}
	return n.cluster.View()
}

func (n *node) self() rpc.Node {
	v := n.view()
	if v == nil {
		return rpc.Node{Name: n.cfg.Name}
	}
	return rpc.Node{Name: v.Self.Name, Boot: v.Self.Boot}
}

// Holder implements limiter.Ownership by the ring: the present rule, until tokens say who decides.
func (n *node) Holder(partition int) limiter.Holder {
	v := n.view()
	if v == nil {
		return limiter.Holder{Self: true}
	}
	m := v.Owner(partition)
	if m == nil {
		return limiter.Holder{}
	}
	return limiter.Holder{Self: m == v.Self, Name: m.Name, Boot: m.Boot}
}

func (n *node) peerAddress(p rpc.Node) (string, bool) {
	m := n.cluster.View().Member(p.Name)
	if m == nil || m.Boot != p.Boot || m.PeerAddr == "" {
		return "", false
	}
	return m.PeerAddr, true
}

// Ready tells whether the node is ready for traffic, why not, or what an operator should know all the same.
func (n *node) Ready() (bool, string) {
	joined, detail := n.joined()
	ready := n.isReady.Load()
	var details []string
	if detail != "" {
		details = append(details, detail)
	} else if !ready {
		details = append(details, "waiting until all members see the same ring, or stopping")
	}
	if e := n.policyError(); e != "" {
		details = append(details, "policy file not taken: "+e)
	}
	return joined && ready, strings.Join(details, "; ")
}

// ReadyLine is what a node prints when it is up, with the ports it really has.
func (n *node) ReadyLine() string {
	gossip := ""
	if v := n.view(); v != nil {
		gossip = v.Self.GossipAddr
	}
	return fmt.Sprintf("weir ready name=%s http=%s grpc=%s gossip=%s peer=%s",
		n.cfg.Name, addrOf(n.listeners.http), addrOf(n.listeners.grpc), gossip, addrOf(n.listeners.peer))
}

func addrOf(l net.Listener) string {
	if l == nil {
		return ""
	}
	return l.Addr().String()
}

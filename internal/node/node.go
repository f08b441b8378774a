// Package node assembles a node: it builds what listens and what decides from one configuration, runs it, tells when it is ready,
// reads files again that have changed, and hands everything over before it stops.
//
// It does not read flags, the environment or signals, and does not set what belongs to the process, such as its memory limit.
package node

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/cluster/runner"
	"github.com/weirlimit/weir/gateway/console"
	httpapi "github.com/weirlimit/weir/gateway/http"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/control"
	"github.com/weirlimit/weir/internal/disk"
	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/rpc/peer"
	"github.com/weirlimit/weir/rpc/replica"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/store"
)

// Node is one running node.
type Node struct {
	cfg      Config
	limits   Limits
	log      *slog.Logger
	started  time.Time
	hashKey  ring.HashKey // zero in a cluster without a secret
	settings uint64       // fingerprint of the ring's settings

	listeners     struct{ http, grpc, peer, resp *admission.Listener } // nil where off
	debugAddr     string                                               // that profiles are served at; empty: off
	cluster       *cluster.Cluster                                     // nil: a node alone for good
	limiter       *limiter.Limiter
	states        *store.Store
	inbox         *runner.Inbox
	disk          *disk.Disk // nil: no policy was persistent when the node started
	restore       ownership.RestoreConfig
	clock         func() algo.Instant // of decisions
	bootClock     func() int64
	recorder      *activityRecorder
	console       *console.Console // nil: off
	runner        *runner.Runner
	readiness     *readiness
	peers         *peer.Forwarder
	messenger     *replica.Messenger
	keys          *control.GossipKeys
	watcher       *policy.Watcher // nil without a policy file
	ownFiles      []followedFile  // the files that decide
	overrides     overriding
	envoy         envoyFrontEnd
	metrics       *observe.Metrics
	hops          *observe.Hops
	tracer        *observe.Tracer // nil: no traces
	security      *security
	forwardAuth   httpapi.ForwardAuth
	buffers       *admission.Buffers              // of callers' connections
	callersMemory *fairshare.Places               // bytes of their connections and streams
	kept          *fairshare.Places               // bytes that callers have the node keep besides counters
	requests      *admission.Gate                 // bytes of requests that are being answered
	calls         atomic.Pointer[admission.Calls] // of callers over gRPC; nil: none are served yet
	health        *health.Server

	grpcServer  *grpc.Server // for callers; nil: off
	peerServer  *grpc.Server // for other nodes; nil: off
	peerService *peer.Server // of peerServer

	failing  context.Context // ends when the node cannot go on, for its cause
	fail     context.CancelCauseFunc
	ctx      context.Context
	cancel   context.CancelFunc
	work     sync.WaitGroup
	closers  []func(context.Context) // end what runs, the last one first
	stopOnce sync.Once
	stopErr  error // what was not done in good order
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

// Failed is closed when the node cannot go on, for the reason that Err gives.
func (n *Node) Failed() <-chan struct{} { return n.failing.Done() }

// Err is why the node cannot go on; nil as long as it can.
func (n *Node) Err() error { return context.Cause(n.failing) }

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

// retainMembers keeps the connections to peers in step with the membership until the node stops.
func (n *Node) retainMembers() {
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
	if err := n.security.audit.Reopen(); err != nil {
		n.log.Error("audit log not reopened", "error", err)
	}
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

// memberNodes are all members, this one included, by name.
func (n *Node) memberNodes() (all []ownership.Node) {
	v := n.view()
	if v == nil {
		return []ownership.Node{n.self()}
	}
	for i := range v.Members {
		all = append(all, nodeOf(&v.Members[i]))
	}
	return all
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
			details = append(details, f.what+" rejected: "+err.Error())
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
func (n *Node) Service() limit.Preparer { return n.limiter }

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

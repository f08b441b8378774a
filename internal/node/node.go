// Package node assembles a node: it builds the listeners, the limiter and all other parts from one configuration, runs
// them, says when the node is ready, applies files that change, and hands everything over before the node stops.
// start.go has the order in which the parts are opened.
//
// The package does not read flags, the environment or signals. It does not set properties of the process, such as its
// memory limit.
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
	"github.com/weirlimit/weir/internal/reload"
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
	hashKey  ring.HashKey // zero if the cluster has no secret
	settings uint64       // fingerprint of the ring's settings

	listeners     struct{ http, grpc, peer, resp *admission.Listener } // nil: the port is off
	debugAddr     string                                               // the address of the profiles; empty: off
	cluster       *cluster.Cluster                                     // nil: the node is alone, without gossip
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
	watcher       *reload.Watcher[*policy.Set] // nil: no policy file
	ownFiles      []followedFile               // the policy file and Envoy's files
	overrides     overriding
	envoy         envoyFrontEnd
	metrics       *observe.Metrics
	hops          *observe.Hops
	tracer        *observe.Tracer // nil: no traces
	security      *security
	forwardAuth   httpapi.ForwardAuth
	buffers       *admission.Buffers              // of connections of callers
	peerBuffers   *admission.Buffers              // of connections of other nodes
	callersMemory *fairshare.Places               // bytes of callers' connections and streams
	kept          *fairshare.Places               // bytes that the node keeps for callers besides counters
	requests      *admission.Gate                 // bytes of requests in progress
	calls         atomic.Pointer[admission.Calls] // of callers over gRPC; nil: not served yet
	health        *health.Server

	grpcServer  *grpc.Server // for callers; nil: off
	peerServer  *grpc.Server // for other nodes; nil: off
	peerService *peer.Server // of peerServer

	failing  context.Context // ends when the node cannot go on; its cause says why
	fail     context.CancelCauseFunc
	ctx      context.Context
	cancel   context.CancelFunc
	work     sync.WaitGroup
	closers  []func(context.Context) // end the parts, the last one first
	stopOnce sync.Once
	stopErr  error // what stop did not complete
}

// identify asks the process at a peer address for its identity.
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

// identity returns this node's identity, for other processes that ask. A node without gossip has none.
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

// Failed returns a channel that is closed when the node cannot go on. Err says why.
func (n *Node) Failed() <-chan struct{} { return n.failing.Done() }

// Err returns why the node cannot go on, or nil while it can.
func (n *Node) Err() error { return context.Cause(n.failing) }

// Settled returns a channel that is closed once the node has become ready.
func (n *Node) Settled() <-chan struct{} { return n.readiness.Became() }

// openReadiness makes readiness. A node is ready once it is a member, its own partitions have come, all other members
// have the same ring, and it has exchanged overrides with them. A voter must vote again as well: a rolling restart
// waits for each node to be ready, and without a majority of voters no strict policy is decided.
func (n *Node) openReadiness() {
	n.readiness = newReadiness(readinessConfig{
		Joined: n.joined,
		Conditions: []condition{
			{What: "waiting for the partitions that are to move",
				Holds: func(context.Context) bool { return n.runner.Settled() }},
			{What: "waiting until this voter votes again", Holds: func(context.Context) bool { return n.votes() }},
			{What: "waiting until all members see the same ring", Holds: n.inStep},
			{What: "waiting for the overrides of other members",
				Holds: func(context.Context) bool { return n.overrides.replicator.Met() }},
		},
		Held: func() int {
			st, _ := n.runner.Status()
			return st.Held
		},
		Became: func() {
			n.setHealth(true)
			n.log.Info("node ready", "name", n.cfg.Name)
		},
		Logger: n.log,
	})
}

// votes reports whether readiness need not wait for this node's vote. A voter that has started waits three seconds
// before it votes, until all that it may have granted before has run out. The node need not wait without strict
// policies, or if most voters are not members.
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

// agreed reports whether all other active members of v have v's ring, and this node still has it.
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

// retainMembers drops the connections to peers that are no longer members, until the node stops.
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

// setHealth sets the answers of gRPC's health protocol.
func (n *Node) setHealth(serving bool) {
	status := healthv1.HealthCheckResponse_NOT_SERVING
	if serving {
		status = healthv1.HealthCheckResponse_SERVING
	}
	n.health.SetServingStatus("", status)
	n.health.SetServingStatus(weirv1.Limiter_ServiceDesc.ServiceName, status)
	n.health.SetServingStatus("ratelimit", status) // the name that callers of envoyproxy/ratelimit use
}

// logsDropped returns, for each log, a function that returns how many lines it has dropped.
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

// Reload reads all followed files again at once, and reopens the audit log.
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

// policiesRejected logs that a changed file is invalid.
func (n *Node) policiesRejected(err error) {
	n.metrics.Reloaded(false)
	n.log.Error("policy file rejected", "error", err, "hint", "the previous policies stay in force")
}

// policyError returns why the current policy file is not in force, or "".
func (n *Node) policyError() string {
	if n.watcher == nil || n.watcher.Err() == nil {
		return ""
	}
	return n.watcher.Err().Error()
}

// view returns the membership, or nil for a node without gossip.
func (n *Node) view() *cluster.View {
	if n.cluster == nil {
		return nil
	}
	return n.cluster.View()
}

// members returns the number of active members, at least one.
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

// memberNodes returns all members, this one included, in order of name.
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

// memberOf returns the member with this boot number.
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

// transport returns the configuration of the streams to other nodes.
func (n *Node) transport() transport.Config {
	return transport.Config{
		Self: n.self(), RingSettings: n.settings, Address: n.peerAddress, Logger: newPaced(n.log),
		Credentials: n.security.peerClient(), Window: n.cfg.Memory.PeerWindow,
	}
}

func (n *Node) peerAddress(p ownership.Node) (string, bool) {
	m := process(n.cluster.View(), p)
	if m == nil || m.PeerAddr == "" {
		return "", false
	}
	return m.PeerAddr, true
}

// process returns the member of v that is this process, or nil: the process is no member, or another process has its
// name.
func process(v *cluster.View, p ownership.Node) *cluster.Member {
	if m := v.Member(p.Name); m != nil && m.Boot == p.Boot {
		return m
	}
	return nil
}

// Ready reports whether the node is ready for traffic. The text says why not, or what else an operator should know.
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

// GossipAddr, PeerAddr, HTTPAddr, GRPCAddr and RESPAddr return the node's addresses, with the ports that it really
// listens on; empty: the port is off.
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

// Service returns the limiter, for callers in this process. No access file applies to it.
func (n *Node) Service() limit.Preparer { return n.limiter }

// Policies returns the policies in force.
func (n *Node) Policies() *policy.Set { return n.limiter.Policies() }

// Name is the node's name.
func (n *Node) Name() string { return n.cfg.Name }

// ReadyLine returns the line that a node prints when it is up, with the ports that it really listens on.
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

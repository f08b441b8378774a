package client

import (
	"cmp"
	"context"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/fifo"
)

// This file lists the cluster's nodes and picks one for each check. A client has one connection and one stream to each
// node that is wanted: to one node at first (renewLocked), to the owners of keys as these are asked for (ifReady), to
// one more while none is ready (widen), and to all if the nodes do not send the ring (connectAll). A host name is
// looked up again only while a node cannot be reached; otherwise the ring tells of new nodes.
//
// Words:
//
//	given    the addresses behind the address that the program gave
//	ring     the cluster's own list of nodes, with the owner of each key
//	member   a node that is given, in the ring, or both (member.go, which also has the states of a node)
//	wanted   of a member: it is to be connected; set once, for good
//
// The path of a check to its node:
//
//	lookUp        finds the given addresses of a host name; learned (topology.go) gets those of the ring
//	renewLocked   makes a member of each, which connects when it is first wanted
//	owners        has the owner of a key, if it is ready (topology.go)
//	pick          returns the least busy ready node if the owner is not known or not ready, and connects nodes while
//	              none is ready
//	send          queues the check for that node (member.go); CheckTo (remote.go) waits for the answer, or asks another
//	              node
//
// Other files must keep: list is replaced under mu and never modified. A member's state is set by become, which wakes
// pick. Only heard and onAnswer change it between ready and hung without become.

const (
	// maxTries bounds the nodes that one try of a call is sent to (attempt, decide.go), the first one included.
	maxTries = 3
	// widenAfter is how long a connection may take before the next node is tried beside it.
	widenAfter = 250 * time.Millisecond
	// lookUpPause is the time between two look-ups of a host name.
	lookUpPause = 2 * time.Second
)

// nodes is the limit.Service of a cluster. It sends each check over gRPC, to the owner of the check's key first
// (remote.go). Its errors are *Error, or wrap a gRPC status that no node should answer with (AlreadyExists,
// FailedPrecondition, OutOfRange, Unimplemented or DataLoss, see codeError). Inline limits must not change while a call
// uses them.
type nodes struct {
	address  address
	dial     []grpc.DialOption // for each connection
	requests sync.Pool         // of *request
	timeout  time.Duration     // of a call
	cooldown time.Duration     // from a call that a node left unanswered to the probe of that node

	ctx       context.Context // ends with close
	cancel    context.CancelFunc
	now       func() time.Duration
	turn      atomic.Uint64 // pick adds 1, and then starts at list[turn], modulo the list's length
	running   sync.WaitGroup
	loans     *loans      // nil: none
	unreached fifo.Signal // set when a node or the resolver cannot be reached; lookUp then looks up the host name again

	mu      sync.Mutex
	wide    bool          // set by connectAll: all nodes are to be connected, not only those that are asked
	widened time.Duration // when widen last connected one more node; other calls of want do not count
	given   []string
	list    []*member     // the members; replaced, never modified
	err     error         // of the last look-up, or of connect; list may have nodes all the same
	changed chan struct{} // closed, and replaced, by change: when the list, err or a state (become) has changed
	ring    *topology     // nil: not known

	owners atomic.Pointer[owners] // by ring; nil: not known
	source atomic.Pointer[member] // the member that sends the topology; nil: the next one that is connected
}

// newNodes returns the nodes behind an address. The caller must close them.
func newNodes(a address, o options) (*nodes, error) {
	ns := &nodes{
		address: a, dial: dialSettings(&o), timeout: o.timeout, cooldown: o.cooldown, now: stopwatch(),
		requests: sync.Pool{New: func() any { return newRequest() }}, changed: make(chan struct{}),
		unreached: fifo.NewSignal(),
	}
	ns.turn.Store(rand.Uint64()) // so that not all clients begin with the same node
	if ns.cooldown <= 0 {
		ns.cooldown = DefaultBreakerCooldown
	}
	ns.ctx, ns.cancel = context.WithCancel(context.Background())
	// This tries the options, because a look-up would report an invalid one too late.
	conn, err := ns.connect("localhost:1")
	if err != nil {
		return nil, err
	}
	if o.loans {
		ns.loans = newLoans(ns, systemClocks())
		ns.running.Go(func() { ns.loans.run(ns.ctx) })
	}
	if a.host == "" {
		ns.setGiven(a.nodes, nil)
	} else {
		ns.running.Go(ns.lookUp)
	}
	return ns, conn.Close()
}

// connect returns a connection to an address. gRPC connects when the connection is first used.
func (ns *nodes) connect(addr string) (*grpc.ClientConn, error) {
	dial := ns.dial
	if !slices.Contains(ns.address.nodes, addr) {
		// TLS checks the node's certificate against the name in the program's address, because this address came from
		// the ring or a look-up.
		dial = slices.Concat([]grpc.DialOption{grpc.WithAuthority(ns.address.name)}, dial)
	} else if ns.address.target {
		return grpc.NewClient(addr, dial...)
	}
	return grpc.NewClient("passthrough:///"+addr, dial...)
}

// close returns loans, ends the calls in flight and closes the connections.
func (ns *nodes) close() {
	ns.loans.returnAll()
	ns.change(ns.cancel)
	ns.running.Wait()
}

// lookUp looks up the nodes of a host name, and again, after lookUpPause, whenever a node or the resolver cannot be
// reached.
func (ns *nodes) lookUp() {
	for ns.ctx.Err() == nil {
		hosts, err := net.DefaultResolver.LookupHost(ns.ctx, ns.address.host)
		addrs := make([]string, len(hosts))
		for i, h := range hosts {
			addrs[i] = net.JoinHostPort(h, ns.address.port)
		}
		ns.setGiven(addrs, err)
		if err != nil {
			ns.unreached.Set()
		}
		select {
		case <-ns.unreached:
		case <-ns.ctx.Done():
		}
		select {
		case <-time.After(lookUpPause):
		case <-ns.ctx.Done():
		}
	}
}

// setGiven sets the nodes behind the address. If err is not nil, the former ones stay.
func (ns *nodes) setGiven(addrs []string, err error) {
	ns.change(func() {
		ns.err = err
		if err == nil {
			ns.given = addrs
			ns.renewLocked()
		}
	})
}

// change calls f under the lock, and wakes the callers that wait for a node.
func (ns *nodes) change(f func()) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	f()
	close(ns.changed)
	ns.changed = make(chan struct{})
}

// renewLocked makes the list of members from the addresses of given and of the ring.
func (ns *nodes) renewLocked() {
	if ns.ctx.Err() != nil {
		return
	}
	addrs := ns.given
	if ns.ring != nil {
		addrs = slices.Concat(addrs, ns.ring.addresses)
	}
	var list []*member
	for _, addr := range addrs {
		if addr == "" || memberAt(list, addr) != nil {
			continue
		}
		m := memberAt(ns.list, addr)
		if m == nil {
			conn, err := ns.connect(addr)
			if err != nil {
				ns.err = err
				continue
			}
			m = newMember(ns, addr, conn)
			ns.running.Go(m.run)
		}
		list = append(list, m)
		if ns.wide {
			m.want()
		}
	}
	for _, m := range ns.list {
		if !slices.Contains(list, m) {
			// The node may still answer: perhaps the host name only lost its address. So cancel, which ends m.run and
			// closes the connection, waits until calls in flight have ended.
			time.AfterFunc(ns.timeout, m.cancel)
			ns.unfollow(m, list)
		}
	}
	if len(list) > 0 && ns.source.Load() == nil {
		list[ns.turn.Load()%uint64(len(list))].want() // so that often the ring is known before the first check
	}
	ns.list = list
	ns.owners.Store(ns.ring.owners(list))
}

// memberAt returns the member at an address, or nil.
func memberAt(list []*member, addr string) *member {
	if i := slices.IndexFunc(list, func(m *member) bool { return m.addr == addr }); i >= 0 {
		return list[i]
	}
	return nil
}

// members returns the list of nodes, the channel that the next change closes, and the error of the last look-up.
func (ns *nodes) members() ([]*member, <-chan struct{}, error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	return ns.list, ns.changed, ns.err
}

// pick returns the node to ask: the ready one with the fewest outstanding calls, and in turn among equals. So a node
// that hangs, and still counts as ready, gets a check from pick only while no other ready node has fewer.
//
// If no node is ready and some are connecting (member.go) or not wanted yet, pick connects one more (widen), and
// another one whenever that fails or takes longer than widenAfter, and waits for them until ctx ends. If all are hung,
// unready or failed, pick returns a hung one, which may answer again, else an unready one, which answers as well as it
// can, else a failed one: send then fails, unless its connection stands.
func (ns *nodes) pick(ctx context.Context) (*member, error) {
	for {
		list, changed, err := ns.members()
		if len(list) == 0 && err != nil {
			return nil, status.Error(codes.Unavailable, "cannot resolve the address: "+err.Error())
		}
		turn := ns.turn.Add(1)
		best := ns.best(list, turn)
		if best[ready] != nil {
			return best[ready], nil
		}
		if best[connecting] == nil && len(list) > 0 {
			return cmp.Or(best[hung], best[unready], best[failed]), nil
		}
		ns.widen(list, turn)
		wait := widenAfter
		if at, ok := ctx.Deadline(); ok {
			wait = min(time.Until(at), wait)
		}
		switch {
		case ctx.Err() != nil:
			return nil, status.FromContextError(ctx.Err()).Err()
		case wait <= 0:
			return nil, status.Error(codes.DeadlineExceeded, "not connected to any node in time")
		}
		select {
		case <-changed:
		case <-time.After(wait):
		case <-ctx.Done():
		case <-ns.ctx.Done():
			return nil, status.FromContextError(ns.ctx.Err()).Err()
		}
	}
}

// best returns, for each state, the member with the fewest outstanding calls, the first in turn among equals; nil if
// there is none.
func (ns *nodes) best(list []*member, turn uint64) (best [failed + 1]*member) {
	for i := range list {
		m := list[(turn+uint64(i))%uint64(len(list))]
		state := m.state.Load()
		if best[state] == nil || m.outstanding.Load() < best[state].outstanding.Load() {
			best[state] = m
		}
	}
	return best
}

// widen connects one more node, if one is not wanted yet: at once if none is connecting, otherwise widenAfter after
// widen has last done so. The node that renewLocked connected does not count: a client that is older than widenAfter
// when it gets its first check connects a second node at once.
func (ns *nodes) widen(list []*member, turn uint64) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	var spare *member // the last in turn that is not wanted yet
	trying := false
	for i := range list {
		m := list[(turn+uint64(i))%uint64(len(list))]
		if !m.wanted.Load() {
			spare = m
		} else if m.state.Load() == connecting {
			trying = true
		}
	}
	now := ns.now()
	if spare != nil && (!trying || now-ns.widened >= widenAfter) {
		ns.widened = now
		spare.want()
	}
}

// connectAll connects all nodes, later ones too: without the ring, any node gets checks.
func (ns *nodes) connectAll() {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.wide = true
	for _, m := range ns.list {
		m.want()
	}
}

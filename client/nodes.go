package client

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

const (
	// maxTries is how many nodes are asked when the first could not carry out a check.
	maxTries = 3
	// widenAfter is how long a connection may take before the next node is tried beside it.
	widenAfter = 250 * time.Millisecond
	// lookUpPause is the time between two look-ups of a host name.
	lookUpPause = 2 * time.Second
)

// nodes is the limit.Service of a cluster: the nodes behind an address, and those of the ring that they tell. It asks them over gRPC, the
// owner of a key first (remote.go). Its errors are *Error, or a gRPC status that no node should answer with. Limits sent along must not
// change while a call uses them.
type nodes struct {
	address  address
	dial     []grpc.DialOption // for each connection
	requests sync.Pool         // of *request
	timeout  time.Duration     // of a call
	cooldown time.Duration     // from a failure of a node to the probe whether it answers again

	ctx       context.Context // ends with close
	cancel    context.CancelFunc
	now       func() time.Duration
	next      atomic.Uint64 // the turn
	running   sync.WaitGroup
	loans     *loans      // nil: none
	unreached fifo.Signal // set when a node cannot be reached: perhaps the host name stands for others

	mu      sync.Mutex
	wide    bool          // all nodes are to be connected, not only those that are asked
	widened time.Duration // when a node was connected last because no other one could be asked
	named   []string      // the addresses of the nodes behind address
	list    []*member     // of named, and of the ring; replaced, never modified
	err     error         // why nothing is in list; nil while that is being found out
	changed chan struct{} // closed, and replaced, when list, err or the state of a node has changed
	ring    *topology     // nil: not known

	owners atomic.Pointer[owners] // by ring; nil: not known
	teller atomic.Pointer[member] // tells the topology; nil: the next one that is connected
}

// newNodes returns the nodes behind an address. Close them when done.
func newNodes(a address, o options) (*nodes, error) {
	ns := &nodes{
		address: a, dial: dialSettings(&o), timeout: o.timeout, cooldown: o.cooldown, now: stopwatch(),
		requests: sync.Pool{New: func() any { return newRequest() }}, changed: make(chan struct{}), unreached: fifo.NewSignal(),
	}
	if o.loans {
		ns.loans = newLoans(ns, systemClocks())
	}
	ns.next.Store(rand.Uint64()) // so that not all clients begin with the same node
	if ns.cooldown <= 0 {
		ns.cooldown = DefaultBreakerCooldown
	}
	ns.ctx, ns.cancel = context.WithCancel(context.Background())
	// Options that cannot be are to be found out now, not once a name is resolved.
	conn, err := ns.connect("localhost:1")
	if err != nil {
		return nil, err
	}
	if o.loans {
		ns.running.Go(func() { ns.loans.run(ns.ctx) })
	}
	if a.host == "" {
		ns.find(a.nodes, nil)
	} else {
		ns.running.Go(ns.lookUp)
	}
	return ns, conn.Close()
}

// connect returns a connection to an address, which is not made before it is used.
func (ns *nodes) connect(addr string) (*grpc.ClientConn, error) {
	dial := ns.dial
	if !slices.Contains(ns.address.nodes, addr) {
		// Its certificate is checked against the name that it was called by.
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

// lookUp finds the nodes that a host name stands for, again and again while one of them cannot be reached.
func (ns *nodes) lookUp() {
	for ns.ctx.Err() == nil {
		hosts, err := net.DefaultResolver.LookupHost(ns.ctx, ns.address.host)
		addrs := make([]string, len(hosts))
		for i, h := range hosts {
			addrs[i] = net.JoinHostPort(h, ns.address.port)
		}
		ns.find(addrs, err)
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

// find takes in which nodes there are behind the address, or why none was found. Those that were found before stay then.
func (ns *nodes) find(addrs []string, err error) {
	ns.change(func() {
		if ns.err = err; err == nil {
			ns.named = addrs
			ns.renewLocked()
		}
	})
}

// change changes what is guarded by the lock, and tells those that wait for a node.
func (ns *nodes) change(f func()) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	f()
	close(ns.changed)
	ns.changed = make(chan struct{})
}

// renewLocked makes the list of what the address and the ring name.
func (ns *nodes) renewLocked() {
	if ns.ctx.Err() != nil {
		return
	}
	wanted := ns.named
	if ns.ring != nil {
		wanted = slices.Concat(wanted, ns.ring.addresses)
	}
	var list []*member
	for _, addr := range wanted {
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
			m = &member{
				nodes: ns, addr: addr, conn: conn, start: make(chan struct{}), wake: fifo.NewSignal(), hurry: fifo.NewSignal(),
				breaker: breaker{threshold: 1, cooldown: ns.cooldown}, err: errNoStream,
			}
			m.ctx, m.cancel = context.WithCancel(ns.ctx)
			ns.running.Go(m.run)
		}
		if list = append(list, m); ns.wide {
			m.want()
		}
	}
	for _, m := range ns.list {
		if !slices.Contains(list, m) {
			// Calls in flight, when it was only the name that lost this address, are given the time they have.
			time.AfterFunc(ns.timeout, m.cancel)
			ns.unfollow(m, list)
		}
	}
	if len(list) > 0 && ns.teller.Load() == nil {
		list[ns.next.Load()%uint64(len(list))].want() // so that the ring is known, and the first check finds a node
	}
	ns.list = list
	ns.owners.Store(ns.ring.owners(list))
}

// memberAt returns the member at an address, or nil.
func memberAt(list []*member, addr string) *member {
	if i := slices.IndexFunc(list, func(m *member) bool { return m.addr == addr }); i >= 0 && addr != "" {
		return list[i]
	}
	return nil
}

// members returns the nodes, and what is closed at the next change.
func (ns *nodes) members() ([]*member, <-chan struct{}, error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	return ns.list, ns.changed, ns.err
}

// count returns how many nodes there are, and how many of them are well.
func (ns *nodes) count() (all, well int) {
	list, _, _ := ns.members()
	for _, m := range list {
		if m.usable() {
			well++
		}
	}
	return len(list), well
}

// pick returns the node to ask: the ready one with the fewest calls in flight, and in turn among equals. So a node that
// hangs gets at most one call more than each other node until its first call times out.
//
// If no node is ready and some have not been tried, pick connects one more, and another one whenever that fails or takes long, and waits
// for them until ctx's Deadline. If all have been tried, pick returns a hung node, else an unready one, else a failed one: its error says
// why.
func (ns *nodes) pick(ctx context.Context) (*member, error) {
	left := widenAfter
	for {
		list, changed, err := ns.members()
		if len(list) == 0 && err != nil {
			return nil, status.Error(codes.Unavailable, "cannot resolve the address: "+err.Error())
		}
		turn := ns.next.Add(1)
		best := ns.best(list, turn)
		if best[ready] != nil {
			return best[ready], nil
		}
		if best[untold] == nil && len(list) > 0 {
			return cmp.Or(best[hung], best[unready], best[failed]), nil
		}
		ns.widen(list, turn)
		if at, ok := ctx.Deadline(); ok {
			left = min(time.Until(at), widenAfter)
		}
		if left <= 0 || ctx.Err() != nil {
			return nil, status.Error(codes.DeadlineExceeded, "not connected to any node in time")
		}
		select {
		case <-changed:
		case <-time.After(left):
		case <-ctx.Done():
		case <-ns.ctx.Done():
			return nil, status.FromContextError(ns.ctx.Err()).Err()
		}
	}
}

// best returns the nodes to ask, the one in turn first among equals, by what is known of them.
func (ns *nodes) best(list []*member, turn uint64) (best [failed + 1]*member) {
	for i := range list {
		m := list[(turn+uint64(i))%uint64(len(list))]
		state := m.state.Load()
		if state == ready {
			probe, ok := m.breaker.allow(ns.now())
			if probe {
				ns.probe(m)
			}
			if probe || !ok {
				state = hung
			}
		}
		if best[state] == nil || m.out.Load() < best[state].out.Load() {
			best[state] = m
		}
	}
	return best
}

// widen connects one more node, if there is one: at once where no other one is being tried, otherwise if the last one takes long.
func (ns *nodes) widen(list []*member, turn uint64) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	var spare *member
	trying := false
	for i := range list {
		if m := list[(turn+uint64(i))%uint64(len(list))]; !m.wanted.Load() {
			spare = m
		} else if m.state.Load() == untold {
			trying = true
		}
	}
	if now := ns.now(); spare != nil && (!trying || now-ns.widened >= widenAfter) {
		ns.widened = now
		spare.want()
	}
}

// connectAll connects all nodes, now and in the future: without the ring, all nodes share the load.
func (ns *nodes) connectAll() {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.wide = true
	for _, m := range ns.list {
		m.want()
	}
}

// probe finds out whether m, whose breaker let this probe through, answers again. No caller waits for that.
func (ns *nodes) probe(m *member) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if ns.ctx.Err() != nil {
		return
	}
	ns.running.Go(func() {
		ctx, cancel := context.WithTimeout(ns.ctx, ns.timeout)
		defer cancel()
		o := answered
		if _, err := weirv1.NewLimiterClient(m.conn).Status(ctx, &weirv1.StatusRequest{}); unavailable(statusError(err)) {
			o = unanswered
		}
		m.breaker.done(ns.now(), true, o)
	})
}

// preferring makes unary calls about targets, to the node that owns the most of them, or to one that pick returns.
type preferring struct {
	*nodes
	targets []limit.Target
}

// Invoke makes a call to a node.
func (p preferring) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	ctx = withTrace(ctx)
	for tries := 1; ; tries++ {
		m := p.owners.Load().of(p.targets...)
		if m == nil {
			var err error
			if m, err = p.pick(ctx); err != nil {
				return err
			}
		}
		var trailer metadata.MD
		var at peer.Peer
		sent, state := p.now(), m.state.Load()
		m.out.Add(1)
		err := m.conn.Invoke(ctx, method, args, reply, slices.Concat(opts, []grpc.CallOption{grpc.Trailer(&trailer), grpc.Peer(&at)})...)
		m.out.Add(-1)

		// What a node itself says comes with a trailer.
		rejected, o := overloaded(err), answered
		silent := rejected || status.Code(err) == codes.Unavailable && len(trailer) == 0
		if silent {
			o = unanswered
		}
		m.heard(ctx, err, o, p.now()-sent)
		// A call that was not sent, because the connection broke after it was picked, or that the node did not read, is safe to repeat at
		// another node.
		if silent && (rejected || at.Addr == nil) && state != failed && ctx.Err() == nil && tries < maxTries {
			continue
		}
		return err
	}
}

// NewStream implements grpc.ClientConnInterface. Streams are the members' own.
func (preferring) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, errors.ErrUnsupported
}

// heard reports the outcome of a call, which took so long, to the node's breaker. A call that ran out of time counts as unanswered only if
// it had a tenth of the client's timeout, since the caller's own deadline may have been short.
func (m *member) heard(ctx context.Context, err error, o outcome, took time.Duration) {
	if err != nil && (status.Code(err) == codes.DeadlineExceeded || ctx.Err() != nil) {
		// The time may have been a hurried caller's, but others are better off with another node, so that a part of
		// what a caller without a deadline has is enough to tell. It is more than a node that is well takes, which
		// answers before the deadline it is told even when the owner it asks does not.
		o = unknown
		if took >= m.nodes.timeout/10 {
			o = unanswered
		}
	}
	m.breaker.done(m.nodes.now(), false, o)
}

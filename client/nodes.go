package client

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/serviceconfig"
	"google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// nodes are the nodes behind an address, each with a connection and a breaker of its own: gRPC's round_robin would go on
// asking one that hangs until its keepalive finds out. It is a grpc.ClientConnInterface, which sends each call to a node
// that answers, as far as there is one.
type nodes struct {
	authority string            // of a node without a name of its own
	dial      []grpc.DialOption // for each connection
	timeout   time.Duration     // of a call
	cooldown  time.Duration     // from a failure of a node to the probe whether it answers again

	ctx     context.Context // ends with close
	cancel  context.CancelFunc
	next    atomic.Uint64 // the turn
	running sync.WaitGroup
	loans   *loans // nil: none

	mu       sync.Mutex
	wide     bool                // all nodes are to be connected, not only those that are asked
	widened  time.Duration       // when a node was connected last because no other one could be asked
	resolver resolver.Resolver   // nil until it is built
	named    []resolver.Endpoint // what it found
	list     []*member           // of named, and of the ring; replaced, never modified
	err      error               // why nothing is in list; nil while that is being found out
	changed  chan struct{}       // closed, and replaced, when list, err or the state of a connection has changed
	ring     *topology           // nil: not known

	owners atomic.Pointer[owners] // by ring, as far as they are in list; nil: not known
	now    func() time.Duration
}

// member is one node. It is connected once it is asked, and from then on.
type member struct {
	nodes    *nodes
	endpoint resolver.Endpoint
	conn     *grpc.ClientConn
	gone     context.CancelFunc // the resolver does not name it any more
	link     *link
	wanted   atomic.Bool  // it has been asked
	fresh    atomic.Bool  // the connection is new: that the node is ready closes the breaker
	state    atomic.Int32 // what is known of it: one of the constants below
	out      atomic.Int64 // calls and checks in flight
	breaker  breaker      // opens with the first failure: others can be asked
	barred   atomic.Int64 // by the clock of loans: until when it is told nothing of them
}

// What is known of a node by its stream.
const (
	untold int32 = iota // nothing yet
	ready               // it is ready
	failed              // it is not ready, or its stream has ended
)

// want connects a node.
func (m *member) want() {
	if !m.wanted.Load() && m.wanted.CompareAndSwap(false, true) {
		m.conn.Connect()
	}
}

// opening implements listener.
func (m *member) opening() { m.state.CompareAndSwap(failed, untold) }

// readied implements listener.
func (m *member) readied(is bool, err error) {
	if is {
		if m.fresh.Swap(false) {
			m.breaker.done(false, answered)
		}
		m.state.Store(ready)
	} else {
		m.state.Store(failed)
	}
	if err != nil {
		m.nodes.loans.lost(m, overloaded(err))
	}
	m.nodes.mu.Lock()
	m.nodes.wakeLocked()
	m.nodes.mu.Unlock()
}

// lent implements listener.
func (m *member) lent(out *weirv1.BorrowResponse, rejected *weirv1.Error) {
	if rejected != nil {
		m.nodes.loans.rejected(m, rejected)
	} else {
		m.nodes.loans.answered(m, out)
	}
}

// newNodes returns the nodes that builder resolves target to. Close them when done.
func newNodes(builder resolver.Builder, target resolver.Target, dial []grpc.DialOption, o options) (*nodes, error) {
	start := time.Now()
	ns := &nodes{
		authority: target.Endpoint(), dial: dial, timeout: o.timeout, cooldown: o.cooldown, changed: make(chan struct{}),
		now: func() time.Duration { return time.Since(start) },
	}
	if o.loans {
		ns.loans = newLoans(ns, systemClocks())
	}
	ns.next.Store(rand.Uint64()) // so that not all clients begin with the same node
	if ns.cooldown <= 0 {
		ns.cooldown = DefaultBreakerCooldown
	}
	if a, ok := builder.(resolver.AuthorityOverrider); ok {
		ns.authority = a.OverrideAuthority(target)
	}
	ns.ctx, ns.cancel = context.WithCancel(context.Background())
	// Options that cannot be are to be found out now, not once a name is resolved.
	conn, err := ns.connect(resolver.Endpoint{})
	if err == nil {
		err = conn.Close()
	}
	var r resolver.Resolver
	if err == nil {
		r, err = builder.Build(target, ns, resolver.BuildOptions{DisableServiceConfig: true, Authority: ns.authority})
	}
	if err != nil {
		ns.close()
		return nil, err
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.resolver = r
	return ns, nil
}

// connect returns a connection to e, which is not made before Connect.
func (ns *nodes) connect(e resolver.Endpoint) (*grpc.ClientConn, error) {
	name := ns.authority
	if len(e.Addresses) > 0 && e.Addresses[0].ServerName != "" {
		name = e.Addresses[0].ServerName
	}
	r := staticResolver{e}
	target := url.URL{Scheme: r.Scheme(), Path: "/" + name}
	addr := name
	if len(e.Addresses) > 0 {
		addr = e.Addresses[0].Addr
	}
	return grpc.NewClient(target.String(), slices.Concat([]grpc.DialOption{grpc.WithResolvers(r)}, paced(addr), ns.dial)...)
}

// close ends the calls in flight and closes the connections.
func (ns *nodes) close() {
	ns.mu.Lock()
	ns.cancel()
	r := ns.resolver
	ns.mu.Unlock()
	if r != nil {
		r.Close()
	}
	ns.running.Wait()
}

// UpdateState takes in what the resolver found.
func (ns *nodes) UpdateState(s resolver.State) error {
	endpoints := s.Endpoints
	if len(endpoints) == 0 {
		for _, a := range s.Addresses {
			endpoints = append(endpoints, resolver.Endpoint{Addresses: []resolver.Address{a}})
		}
	}
	if len(endpoints) == 0 {
		err := errors.New("no addresses")
		ns.ReportError(err)
		return err
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.named = endpoints
	ns.err = ns.renewLocked()
	return ns.err
}

// renewLocked makes the list of what the resolver and the ring name.
func (ns *nodes) renewLocked() (failed error) {
	wanted := slices.Clone(ns.named)
	if ns.ring != nil {
		for _, addr := range ns.ring.addresses {
			if addr != "" && !slices.ContainsFunc(ns.named, func(e resolver.Endpoint) bool { return at(e, addr) }) {
				wanted = append(wanted, resolver.Endpoint{Addresses: []resolver.Address{{Addr: addr}}})
			}
		}
	}
	var list []*member
	for _, e := range wanted {
		same := func(m *member) bool {
			return slices.EqualFunc(m.endpoint.Addresses, e.Addresses, resolver.Address.Equal)
		}
		if slices.ContainsFunc(list, same) {
			continue // named twice
		}
		if i := slices.IndexFunc(ns.list, same); i >= 0 {
			list = append(list, ns.list[i])
			continue
		}
		conn, err := ns.connect(e)
		if err != nil {
			failed = err
			continue
		}
		ctx, gone := context.WithCancel(ns.ctx)
		m := &member{nodes: ns, endpoint: e, conn: conn, gone: gone, breaker: breaker{threshold: 1, cooldown: ns.cooldown}}
		m.link = newLink(weirv1.NewLimiterClient(conn), ns.now, func() bool { return conn.GetState() == connectivity.Ready }, m)
		list = append(list, m)
		if ns.wide {
			m.want()
		}
		ns.running.Go(func() { ns.watch(ctx, m) })
	}
	for _, m := range ns.list {
		if !slices.Contains(list, m) {
			m.gone()
		}
	}
	ns.list = list
	ns.owners.Store(ns.ring.owners(list))
	ns.wakeLocked()
	return failed
}

// at tells whether an endpoint is the one at an address.
func at(e resolver.Endpoint, addr string) bool {
	return slices.ContainsFunc(e.Addresses, func(a resolver.Address) bool { return a.Addr == addr })
}

// ReportError takes in why the resolver found nothing. What it found before stays.
func (ns *nodes) ReportError(err error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.err = err
	ns.wakeLocked()
}

// NewAddress is the old form of UpdateState.
func (ns *nodes) NewAddress(as []resolver.Address) { _ = ns.UpdateState(resolver.State{Addresses: as}) }

// ParseServiceConfig refuses: what a resolver says about how to call is not followed.
func (ns *nodes) ParseServiceConfig(string) *serviceconfig.ParseResult {
	return &serviceconfig.ParseResult{Err: errors.New("client: service configurations are not supported")}
}

func (ns *nodes) wakeLocked() {
	close(ns.changed)
	ns.changed = make(chan struct{})
}

// watch keeps m connected once it is wanted, and tells of every change, until ctx ends. Then it closes the connection.
func (ns *nodes) watch(ctx context.Context, m *member) {
	defer m.conn.Close()
	defer m.link.close()
	for state := m.conn.GetState(); ; state = m.conn.GetState() {
		switch {
		case state == connectivity.Idle && m.wanted.Load():
			m.conn.Connect()
		case state == connectivity.Ready:
			m.fresh.Store(true)
			m.link.greet()
		}
		ns.mu.Lock()
		ns.wakeLocked()
		r := ns.resolver
		ns.mu.Unlock()
		if r != nil && state == connectivity.TransientFailure {
			r.ResolveNow(resolver.ResolveNowOptions{}) // perhaps it has moved
		}
		if !m.conn.WaitForStateChange(ctx, state) {
			break
		}
	}
	// Calls in flight, when it was only the name that lost this address, are given the time they have.
	select {
	case <-time.After(ns.timeout):
	case <-ns.ctx.Done():
	}
}

// count returns how many nodes there are, and how many of them are well.
func (ns *nodes) count() (all, well int) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	for _, m := range ns.list {
		if m.usable() {
			well++
		}
	}
	return len(ns.list), well
}

// changes returns a channel that is closed at the next change.
func (ns *nodes) changes() <-chan struct{} {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	return ns.changed
}

// usable tells whether a node is ready, and has not failed lately.
func (m *member) usable() bool { return m.state.Load() == ready && !m.breaker.trouble.Load() }

// widenAfter is how long a connection may take before the next node is tried beside it.
const widenAfter = 250 * time.Millisecond

// pick returns the node to ask: of those that are connected, well, and did not fail lately, the one with the fewest calls
// in flight, and in turn among equals. The fewest, because a node that hangs then draws one call more than the others
// have, not its whole share, until the first of them has told.
//
// When all of them failed lately the same goes for those, and connected is true as well. When not one is well it connects one more,
// and another one whenever that has failed or takes long, and waits for them; if all failed, asking any tells the reason.
func (ns *nodes) pick(ctx context.Context) (m *member, connected bool, err error) {
	for {
		m, connected, changed, err := ns.choose()
		if m != nil || err != nil {
			return m, connected, err
		}
		select {
		case <-changed:
		case <-time.After(widenAfter):
		case <-ctx.Done():
			return nil, false, status.Error(status.FromContextError(ctx.Err()).Code(), "not connected to any node in time")
		case <-ns.ctx.Done():
			return nil, false, status.FromContextError(ns.ctx.Err()).Err()
		}
	}
}

// choose is pick without waiting: when there is nothing to return yet, changed tells when to look again.
func (ns *nodes) choose() (m *member, connected bool, changed <-chan struct{}, err error) {
	ns.mu.Lock()
	list, err, changed := ns.list, ns.err, ns.changed
	ns.mu.Unlock()
	if len(list) == 0 && err != nil {
		return nil, false, nil, status.Error(codes.Unavailable, "cannot resolve the address: "+err.Error())
	}
	var well, hung, broken, spare *member
	trying := len(list) == 0
	turn := ns.next.Add(1)
	for i := range list {
		m := list[(turn+uint64(i))%uint64(len(list))]
		switch m.reach() {
		case ready:
		case failed:
			broken = m
			continue
		default:
			if trying = trying || m.wanted.Load(); !m.wanted.Load() {
				spare = m
			}
			continue
		}
		probe, ok := m.breaker.allow()
		if probe {
			ns.probe(m)
		}
		switch {
		case ok && !probe:
			if well == nil || m.out.Load() < well.out.Load() {
				well = m
			}
		case hung == nil || m.out.Load() < hung.out.Load():
			hung = m
		}
	}
	if well != nil {
		return well, true, nil, nil
	}
	trying = ns.widen(spare, trying) || trying
	switch {
	case trying:
		return nil, false, changed, nil
	case hung != nil:
		return hung, true, nil, nil
	}
	return broken, false, nil, nil
}

// reach tells whether a node can be asked: ready, failed, or untold while it is being connected, or if nothing has needed it yet.
func (m *member) reach() int32 {
	switch m.conn.GetState() {
	case connectivity.Ready:
		return m.state.Load()
	case connectivity.TransientFailure: // gRPC stays in this state until a connection is ready
		return failed
	default:
		return untold
	}
}

// widen connects one more node, at once where no other one is being tried, otherwise if the last one takes long. It reports whether
// there is one that is worth waiting for.
func (ns *nodes) widen(spare *member, trying bool) bool {
	if spare == nil {
		return false
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if now := ns.now(); !trying || now-ns.widened >= widenAfter {
		ns.widened = now
		spare.want()
	}
	return true
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
		_, err := weirv1.NewLimiterClient(m.conn).Status(ctx, &weirv1.StatusRequest{})
		switch status.Code(err) {
		case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
			m.breaker.done(true, unanswered)
		default:
			m.breaker.done(true, answered)
		}
	})
}

// Invoke makes a call to a node.
func (ns *nodes) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	return ns.invoke(ctx, func() *member { return nil }, method, args, reply, opts)
}

// preferring makes calls like nodes do, but to the node that prefer names, if any, as long as it is well.
type preferring struct {
	*nodes
	prefer func() *member
}

// Invoke makes a call to a node.
func (p preferring) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	return p.invoke(ctx, p.prefer, method, args, reply, opts)
}

func (ns *nodes) invoke(ctx context.Context, prefer func() *member, method string, args, reply any, opts []grpc.CallOption) error {
	ctx = withTrace(ctx)
	for tries := 1; ; tries++ {
		m, connected := prefer(), true
		if m == nil {
			var err error
			if m, connected, err = ns.pick(ctx); err != nil {
				return err
			}
		}
		var trailer metadata.MD
		var at peer.Peer
		sent := time.Now()
		m.out.Add(1)
		err := m.conn.Invoke(ctx, method, args, reply, slices.Concat(opts, []grpc.CallOption{grpc.Trailer(&trailer), grpc.Peer(&at)})...)
		m.out.Add(-1)

		rejected := overloaded(err)
		silent := rejected || status.Code(err) == codes.Unavailable && len(trailer) == 0
		m.heard(ctx, err, silent, time.Since(sent))

		// A call that was not sent, because the connection broke after it was picked, or that the node did not read, is safe to repeat at
		// another node.
		if silent && connected && (rejected || at.Addr == nil) && ctx.Err() == nil && tries < maxTries {
			continue
		}
		return err
	}
}

// heard tells the breaker of a node how a call ended that took so long. silent says that no answer of the node's ended it: the connection
// broke, or the node had no room. What a node itself says comes with a trailer.
func (m *member) heard(ctx context.Context, err error, silent bool, took time.Duration) {
	o := answered
	switch {
	case err != nil && (status.Code(err) == codes.DeadlineExceeded || ctx.Err() != nil):
		// The time may have been a hurried caller's, but others are better off with another node, so that a part of
		// what a caller without a deadline has is enough to tell. It is more than a node that is well takes, which
		// answers before the deadline it is told even when the owner it asks does not.
		o = unknown
		if took >= m.nodes.timeout/10 {
			o = unanswered
		}
	case silent:
		o = unanswered
	}
	m.breaker.done(false, o)
}

// NewStream opens a stream to a node.
func (ns *nodes) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	m, _, err := ns.pick(ctx)
	if err != nil {
		return nil, err
	}
	return m.conn.NewStream(ctx, desc, method, opts...)
}

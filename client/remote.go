package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// Dial returns a Client of the cluster at address: the host:port of a node's gRPC listener, several of them separated by
// commas, or a target in gRPC's own syntax, such as "dns:///weir:8081" or "unix:/run/weir.sock". A single host name may
// stand for many nodes.
//
// From one of them the Client learns the ring, and asks the node that owns a key about it. Where the nodes do not tell the
// ring, or the owner cannot be reached from here, says that it is not ready, or left a call unanswered a moment ago, the Client
// asks the node with the fewest checks in flight: any node can answer any check. The owners' addresses are those that the
// nodes advertise, with the port of their gRPC listener. The Client keeps a connection, with one stream, to each node that it has asked.
//
// Dial does not wait for a connection, and an address at which there is no node is no error of Dial's: while no node answers the
// fail policy does, from the first check on, and by default that admits everything. The Client logs a warning with the reason then
// (WithLogger), Stats counts it, and every such Decision has FailedOpen or FailedClosed set. A program that would rather not start
// calls Ready first. Credentials that the nodes reject are errors of every call, ErrUnauthenticated and ErrDenied. ctx bounds what Dial itself has to wait for, at present nothing. The errors are *Error of kind
// ErrInvalid, which names the option or "address".
func Dial(ctx context.Context, address string, opts ...Option) (*Client, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	o, err := dialOptions(opts)
	if err != nil {
		return nil, err
	}
	r, err := newRemote(address, o)
	if err != nil {
		return nil, err
	}
	c := newClient(r, o)
	c.loans = r.loans
	c.counter, c.observer = new(Counter), o.observer
	return c, nil
}

// remote asks the nodes of a cluster over gRPC.
type remote struct {
	nodes *nodes
	api   weirv1.LimiterClient
	sets  sync.Pool // of *request
	loans *loans    // nil: none
}

// serviceConfig is that of the connection to one node. round_robin, of one, is what connects again by itself.
const serviceConfig = `{"loadBalancingConfig": [{"round_robin": {}}]}`

func newRemote(address string, o options) (*remote, error) {
	creds := insecure.NewCredentials()
	if o.tls != nil {
		creds = credentials.NewTLS(o.tls)
	}
	dial := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithDefaultServiceConfig(serviceConfig),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wire.Codec())),
		// A node that comes back is found within seconds; gRPC's default would be minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 3 * time.Second},
			MinConnectTimeout: 3 * time.Second,
		}),
		// A node that hangs, or a network that swallows packets, is asked no more once it left a question unanswered; this
		// ends the connection, which TCP would go on trying to use for a quarter of an hour. Ten seconds is the shortest
		// that gRPC accepts.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
	}
	address, err := dialTarget(address)
	if err != nil {
		return nil, err
	}
	if err := checkToken(&o, address); err != nil {
		return nil, err
	}
	if o.token != "" {
		dial = append(dial, grpc.WithPerRPCCredentials(bearer{token: o.token, plain: o.tls == nil}))
	}
	builder, target := lookup(address)
	ns, err := newNodes(builder, target, append(dial, o.dial...), o)
	if err != nil {
		return nil, &Error{ErrInvalid, "address", err.Error()}
	}
	r := &remote{nodes: ns, api: weirv1.NewLimiterClient(ns), sets: sync.Pool{New: func() any { return newRequest() }}, loans: ns.loans}
	if o.loans {
		ns.running.Go(func() { ns.loans.run(ns.ctx) })
	}
	ns.running.Go(func() { ns.learn(ns.ctx) })
	return r, nil
}

// lookup returns what finds the nodes of an address that dialTarget returned.
func lookup(address string) (resolver.Builder, resolver.Target) {
	if u, err := url.Parse(address); err == nil {
		if b := resolver.Get(u.Scheme); b != nil {
			return b, resolver.Target{URL: *u}
		}
	}
	list := strings.Split(address, ",")
	if len(list) == 1 {
		return resolver.Get("dns"), resolver.Target{URL: url.URL{Scheme: "dns", Path: "/" + address}}
	}
	var r staticResolver
	for _, a := range list {
		// Each node's certificate is checked against the name it was called by.
		r = append(r, resolver.Endpoint{Addresses: []resolver.Address{{Addr: a, ServerName: a}}})
	}
	return r, resolver.Target{URL: url.URL{Scheme: r.Scheme(), Path: "/" + list[0]}}
}

// dialTarget checks address and returns it without the spaces that a list may have.
func dialTarget(address string) (string, error) {
	switch scheme, _, _ := strings.Cut(address, ":"); {
	case resolver.Get(scheme) != nil:
		return address, nil
	case strings.Contains(address, "://"):
		return "", &Error{ErrInvalid, "address", fmt.Sprintf("must be host:port, without %q", scheme+"://")}
	}
	list := strings.Split(address, ",")
	for i, a := range list {
		list[i] = strings.TrimSpace(a)
		host, port, err := net.SplitHostPort(list[i])
		if err != nil || host == "" {
			return "", &Error{ErrInvalid, "address", fmt.Sprintf("must be host:port, or several separated by commas, not %q", a)}
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", &Error{ErrInvalid, "address", fmt.Sprintf("the port must be 1 to 65535, not %q", port)}
		}
	}
	return strings.Join(list, ","), nil
}

// staticResolver resolves any target to the same endpoints. Their host names are looked up on connecting.
type staticResolver []resolver.Endpoint

func (s staticResolver) Scheme() string { return "weir" }

func (s staticResolver) Build(_ resolver.Target, cc resolver.ClientConn, _ resolver.BuildOptions) (resolver.Resolver, error) {
	return s, cc.UpdateState(resolver.State{Endpoints: s})
}

func (s staticResolver) ResolveNow(resolver.ResolveNowOptions) {}

func (s staticResolver) Close() {}

// check asks the owners of the keys, side by side.
func (r *remote) check(ctx context.Context, qs []question, answers []Result, within time.Duration) error {
	until := r.nodes.now() + within
	if len(qs) == 1 {
		return r.checkOne(ctx, &qs[0], &answers[0], until)
	}
	clear(answers)
	open := make([]int, len(qs)) // places of what is to be asked
	for i := range open {
		open[i] = i
	}
	for tries := 1; len(open) > 0; tries++ {
		sets, err := r.sendAll(ctx, qs, open, until)
		if err != nil {
			for _, i := range open {
				answers[i].Err = statusError(err)
			}
			break
		}
		open = open[:0]
		for _, f := range sets {
			err, again := r.await(ctx, f.to, f.request, until)
			for j, i := range f.places {
				switch {
				case err == nil:
					answers[i] = f.answers[j]
				case again && tries < maxTries:
					open = append(open, i)
				default:
					answers[i].Err = statusError(err)
				}
			}
		}
	}
	for i := range answers {
		if answers[i].Err == nil {
			return nil
		}
	}
	return answers[0].Err
}

// checkOne is check for the most frequent case.
func (r *remote) checkOne(ctx context.Context, q *question, a *Result, until time.Duration) error {
	for tries := 1; ; tries++ {
		m, connected, err := r.route(ctx, q, until)
		if err != nil {
			return statusError(err)
		}
		f := r.sets.Get().(*request)
		f.one.q[0], f.one.a[0] = *q, Result{}
		f.one.q[0].ownLimit()
		f.one.q[0].trace = traceOf(ctx)
		f.qs, f.answers, f.until = f.one.q[:], f.one.a[:], until
		if !m.link.send(f) {
			r.put(f)
			return statusError(errFull)
		}
		m.out.Add(1)
		err, again := r.await(ctx, m, f, until)
		if err == nil {
			*a = f.one.a[0]
			r.put(f)
			return a.Err
		}
		if !again || !connected || tries >= maxTries {
			return statusError(err)
		}
	}
}

var errFull = status.Error(codes.Unavailable, "too many questions wait for this node")

// put keeps a request that has ended, or never left, for the next question.
func (r *remote) put(f *request) {
	f.state.Store(unended)
	f.qs, f.answers, f.err, f.unsent, f.alone = nil, nil, nil, false, false
	f.one.q[0], f.one.a[0] = question{}, Result{}
	r.sets.Put(f)
}

// route returns the node to ask about q: the owner of its key, if that is known and well.
func (r *remote) route(ctx context.Context, q *question, until time.Duration) (m *member, connected bool, err error) {
	if m := r.nodes.owners.Load().of(&q.target); m != nil {
		return m, true, nil
	}
	m, connected, _, err = r.nodes.choose()
	if m != nil || err != nil {
		return m, connected, err
	}
	ctx, cancel := context.WithTimeout(ctx, until-r.nodes.now())
	defer cancel()
	return r.nodes.pick(ctx)
}

// sentSet is a request that was sent to a node, and which of several questions are in it.
type sentSet struct {
	*request
	to     *member
	places []int
}

// sendAll sends questions to the nodes that are to be asked.
func (r *remote) sendAll(ctx context.Context, qs []question, open []int, until time.Duration) ([]sentSet, error) {
	var sets []sentSet
	trace := traceOf(ctx)
	for _, i := range open {
		m, _, err := r.route(ctx, &qs[i], until)
		if err != nil {
			return nil, err
		}
		at := slices.IndexFunc(sets, func(f sentSet) bool { return f.to == m })
		if at < 0 {
			at = len(sets)
			f := newRequest()
			f.until = until
			sets = append(sets, sentSet{f, m, nil})
		}
		f := &sets[at]
		f.places = append(f.places, i)
		f.qs = append(f.qs, qs[i])
		f.qs[len(f.qs)-1].ownLimit()
		f.qs[len(f.qs)-1].trace = trace
	}
	for _, f := range sets {
		f.answers = make([]Result, len(f.qs))
		if !f.to.link.send(f.request) {
			f.err = errFull
			f.end()
			continue
		}
		f.to.out.Add(int64(len(f.qs)))
	}
	return sets, nil
}

// await waits for a request, and tells the node's breaker. Of an error, again says that nothing was carried out, so that
// another node may be asked.
func (r *remote) await(ctx context.Context, m *member, f *request, until time.Duration) (err error, again bool) {
	n := int64(len(f.qs))
	sent := r.nodes.now()
	f.timer.Reset(until - sent)
	select {
	case <-f.done:
	case <-f.timer.C:
		err = status.Error(codes.DeadlineExceeded, "no answer in time")
	case <-ctx.Done():
		err = status.FromContextError(ctx.Err()).Err()
	}
	f.timer.Stop()
	if err != nil && !m.link.abandon(f) {
		<-f.done // it has ended meanwhile
		err = nil
	}
	m.out.Add(-n)
	waited := r.nodes.now() - sent
	if err == nil {
		err, again = f.err, f.unsent
	}
	var gone brokenError
	switch code := status.Code(err); {
	case err == nil:
		m.breaker.done(false, answered)
	case code == codes.DeadlineExceeded || ctx.Err() != nil:
		// The time may have been a hurried caller's, but others are better off with another node, so that a part of what a
		// caller without a deadline has is enough to tell. It is more than a node that is well takes, which answers before
		// the deadline it is told even when the owner it asks does not.
		if waited >= r.nodes.timeout/10 {
			m.breaker.done(false, unanswered)
		}
	case again || errors.As(err, &gone):
		m.breaker.done(false, unanswered)
	}
	return err, again
}

// at makes calls about what t names: its owner is asked first.
func (r *remote) at(t *limit.Target) weirv1.LimiterClient {
	return weirv1.NewLimiterClient(preferring{r.nodes, func() *member { return r.nodes.owners.Load().of(&target{Target: *t}) }})
}

// atMost makes calls about n targets: the node that has the fewest of them to ask others about is asked first.
func (r *remote) atMost(n int, at func(i int) *limit.Target) weirv1.LimiterClient {
	return weirv1.NewLimiterClient(preferring{r.nodes, func() *member { return r.nodes.owners.Load().ofMost(n, at) }})
}

// decided is a node's decision, or its error.
func decided(d *weirv1.Decision, err error) (Decision, error) {
	if err != nil {
		return Decision{}, statusError(err)
	}
	return wire.Decision(d), nil
}

// CheckAll and the methods after it are those of a limit.Service.
func (r *remote) CheckAll(ctx context.Context, checks []limit.Check) (AllDecision, error) {
	req := &weirv1.CheckRequest{Checks: make([]*weirv1.Check, len(checks)), Atomic: true}
	for i := range checks {
		c := &checks[i]
		req.Checks[i] = &weirv1.Check{Target: wire.ProtoTarget(c.Target), Cost: &c.Cost, Partial: c.Partial, RequestId: c.RequestID}
	}
	resp, err := r.atMost(len(checks), func(i int) *limit.Target { return &checks[i].Target }).Check(ctx, req)
	if err != nil {
		return AllDecision{}, statusError(err)
	}
	if len(resp.GetResults()) != len(checks) {
		return AllDecision{}, fmt.Errorf("client: a node answered %d checks with %d results", len(checks), len(resp.GetResults()))
	}
	all := AllDecision{Allowed: resp.GetAllowed(), Delay: time.Duration(resp.GetDelayNs()), Decisions: make([]Decision, len(checks))}
	for i, res := range resp.GetResults() {
		d := res.GetDecision()
		if d == nil {
			return AllDecision{}, fmt.Errorf("client: a node left checks[%d] without a decision", i)
		}
		all.Decisions[i] = wire.Decision(d)
	}
	return all, nil
}

func (r *remote) Acquire(ctx context.Context, a limit.Acquire) (Decision, error) {
	return decided(r.at(&a.Target).Acquire(ctx, &weirv1.AcquireRequest{
		Target: wire.ProtoTarget(a.Target), Cost: &a.Cost, TtlNs: int64(a.TTL), RequestId: a.RequestID,
	}))
}

func (r *remote) Renew(ctx context.Context, t limit.Target, id string, ttl time.Duration) (time.Duration, error) {
	resp, err := r.at(&t).Renew(ctx, &weirv1.RenewRequest{Target: wire.ProtoTarget(t), LeaseId: id, TtlNs: int64(ttl)})
	return time.Duration(resp.GetExpiresInNs()), statusError(err)
}

func (r *remote) Release(ctx context.Context, t limit.Target, id string) (bool, error) {
	resp, err := r.at(&t).Release(ctx, &weirv1.ReleaseRequest{Target: wire.ProtoTarget(t), LeaseId: id})
	return resp.GetReleased(), statusError(err)
}

// costOf is a cost as messages have it: absent beside a usage.
func costOf(a *limit.Amount) *int64 {
	if a.Usage != nil {
		return nil
	}
	return &a.Cost
}

func protoReserve(r *limit.Reserve) *weirv1.ReserveRequest {
	out := &weirv1.ReserveRequest{
		Target: wire.ProtoTarget(r.Target), Cost: costOf(&r.Amount), Usage: r.Usage, Class: r.Class, TtlNs: int64(r.TTL), RequestId: r.RequestID,
	}
	if r.Estimate {
		out.Cost = nil
	}
	return out
}

func (r *remote) Reserve(ctx context.Context, ask limit.Reserve) (Decision, error) {
	return decided(r.at(&ask.Target).Reserve(ctx, protoReserve(&ask)))
}

func (r *remote) ReserveAll(ctx context.Context, asks []limit.Reserve) (AllDecision, error) {
	req := &weirv1.ReserveAllRequest{}
	for i := range asks {
		req.Reserves = append(req.Reserves, protoReserve(&asks[i]))
	}
	resp, err := r.atMost(len(asks), func(i int) *limit.Target { return &asks[i].Target }).ReserveAll(ctx, req)
	if err != nil {
		return AllDecision{}, statusError(err)
	}
	if len(resp.GetDecisions()) != len(asks) {
		return AllDecision{}, fmt.Errorf("client: a node answered %d reservations with %d decisions", len(asks), len(resp.GetDecisions()))
	}
	all := AllDecision{Allowed: resp.GetAllowed(), Delay: time.Duration(resp.GetDelayNs())}
	for _, d := range resp.GetDecisions() {
		all.Decisions = append(all.Decisions, wire.Decision(d))
	}
	return all, nil
}

func (r *remote) Extend(ctx context.Context, e limit.Extend) (Decision, error) {
	return decided(r.at(&e.Target).Extend(ctx, &weirv1.ExtendRequest{
		Target: wire.ProtoTarget(e.Target), ReservationId: e.ReservationID, Cost: costOf(&e.Amount), Usage: e.Usage, TtlNs: int64(e.TTL), RequestId: e.RequestID,
	}))
}

func (r *remote) Commit(ctx context.Context, c limit.Commit) (Settled, error) {
	got, err := r.at(&c.Target).Commit(ctx, protoCommit(&c))
	return settledOf(got), statusError(err)
}

func protoCommit(c *limit.Commit) *weirv1.CommitRequest {
	return &weirv1.CommitRequest{
		Target: wire.ProtoTarget(c.Target), ReservationId: c.ReservationID, Cost: costOf(&c.Amount), Usage: c.Usage, Class: c.Class,
	}
}

func settledOf(got *weirv1.CommitResponse) Settled {
	return Settled{Refunded: got.GetRefunded(), Excess: got.GetExcess(), Over: got.GetOverLimit()}
}

func (r *remote) CommitEach(ctx context.Context, cs []limit.Commit) ([]SettledResult, error) {
	req := &weirv1.CommitEachRequest{}
	for i := range cs {
		req.Commits = append(req.Commits, protoCommit(&cs[i]))
	}
	resp, err := r.atMost(len(cs), func(i int) *limit.Target { return &cs[i].Target }).CommitEach(ctx, req)
	if err != nil {
		return nil, statusError(err)
	}
	if len(resp.GetResults()) != len(cs) {
		return nil, fmt.Errorf("client: a node answered %d commits with %d results", len(cs), len(resp.GetResults()))
	}
	out := make([]SettledResult, len(cs))
	for i, res := range resp.GetResults() {
		out[i].Settled = settledOf(res.GetSettled())
		if e := res.GetError(); e != nil {
			out[i].Err = codeError(codes.Code(e.Code), e.Field, e.Message)
		}
	}
	return out, nil
}

func (r *remote) Charge(ctx context.Context, c limit.Charge) (Decision, error) {
	return decided(r.at(&c.Target).Charge(ctx, &weirv1.ChargeRequest{
		Target: wire.ProtoTarget(c.Target), Cost: costOf(&c.Amount), Usage: c.Usage, RequestId: c.RequestID,
	}))
}

func (r *remote) Refund(ctx context.Context, t limit.Target, units int64, requestID string) (int64, error) {
	resp, err := r.at(&t).Refund(ctx, &weirv1.RefundRequest{Target: wire.ProtoTarget(t), Cost: &units, RequestId: requestID})
	return resp.GetRefunded(), statusError(err)
}

func (r *remote) Reset(ctx context.Context, t limit.Target) error {
	_, err := r.at(&t).Reset(ctx, &weirv1.ResetRequest{Target: wire.ProtoTarget(t)})
	return statusError(err)
}

func (r *remote) ready(ctx context.Context) error {
	var last error
	for {
		changed := r.nodes.changes()
		// No checks are an error, which unlike a mere connection tells that a node of Weir listens there, and that this caller may
		// check. A node that hangs is not to keep the others from telling.
		try, cancel := context.WithTimeout(ctx, r.nodes.timeout)
		_, err := r.api.Check(try, &weirv1.CheckRequest{})
		cancel()
		if status.Code(err) == codes.InvalidArgument {
			return nil
		}
		err = statusError(err)
		if !errors.Is(err, ErrUnavailable) {
			return err
		}
		if last == nil || ctx.Err() == nil {
			last = err // not that ctx ended, if there is a better reason
		}
		select {
		case <-changed:
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		case <-r.nodes.ctx.Done():
		}
		if ctx.Err() != nil || r.nodes.ctx.Err() != nil {
			return last
		}
	}
}

func (r *remote) close() error {
	r.loans.returnAll()
	r.nodes.close()
	return nil
}

// statusError turns the error of a gRPC call into the client's.
func statusError(err error) error {
	if err == nil {
		return nil
	}
	s, _ := status.FromError(err)
	if overloaded(err) {
		return &Error{ErrUnavailable, "", s.Message()}
	}
	switch s.Code() {
	case codes.InvalidArgument, codes.NotFound, codes.ResourceExhausted:
		field, message := splitField(s.Message())
		return codeError(s.Code(), field, message)
	}
	return codeError(s.Code(), "", s.Message())
}

// overloaded tells whether a node has rejected a call or a stream as a whole, for want of room, before it read anything of it. What is
// too large has the same code, and names its field, or is found out by gRPC.
func overloaded(err error) bool {
	s, _ := status.FromError(err)
	if s.Code() != codes.ResourceExhausted {
		return false
	}
	field, message := splitField(s.Message())
	return field == "" && !strings.HasPrefix(message, "grpc: ")
}

// codeError turns a gRPC code with a message into the client's error.
func codeError(code codes.Code, field, message string) error {
	var kind error
	switch code {
	case codes.InvalidArgument:
		kind = ErrInvalid
	case codes.NotFound:
		kind = ErrNotFound
	case codes.ResourceExhausted:
		kind = ErrTooLarge
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Aborted, codes.Internal, codes.Unknown:
		// A node that is unwell counts as one that does not answer: a caller must not fail because its limiter does.
		kind = ErrUnavailable
	case codes.Unauthenticated: // it will not pass by itself, and the fail policy would hide it for ever; so with the others
		kind = ErrUnauthenticated
	case codes.PermissionDenied:
		kind = ErrDenied
	default:
		return fmt.Errorf("client: %w", status.Error(code, message))
	}
	return &Error{kind, wire.FieldOf(field), message}
}

// splitField parts a message that begins with a field's name, as weir.v1 has them, such as "checks[3].key: is empty".
// Those of gRPC itself begin with "grpc: ".
func splitField(s string) (field, message string) {
	field, message, ok := strings.Cut(s, ": ")
	if !ok || field == "" || field == "grpc" || strings.Trim(field, "abcdefghijklmnopqrstuvwxyz0123456789_.[]") != "" {
		return "", s
	}
	return field, message
}

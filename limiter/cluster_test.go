package limiter

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

var testKey, _ = ring.ParseHashKey([]byte("key of the tests"))

// testCluster is some Limiters in one process. Each has a view of who holds what, which tests change, and messages
// between them go through a wire, which tests tamper with. It lives in a synctest bubble: deadlines and pauses take
// virtual time, and a goroutine that outlives the test fails it.
type testCluster struct {
	t     *testing.T
	nodes []*testNode

	mono atomic.Int64 // the owners' clock

	mu      sync.Mutex
	wire    wire
	carried int // messages given to the wire, but for those of loans
	hops    int // the most that an operation arrived with
	gone    map[uint64]bool
}

// wire carries one message; deliver has the receiver carry it out, and the outcomes are the sender's when wire returns.
// What was not delivered is unreachable.
type wire func(ctx context.Context, from *testNode, to ownership.Node, ops []*Op, deliver func())

type testNode struct {
	*Limiter
	c    *testCluster
	name string
	view func(partition int) ownership.Route // guarded by c.mu
	rate atomic.Int64                        // by which its clock is fast, in thousandths
}

// inBubble runs f with n nodes whose views agree: partition p belongs to node p mod n.
func inBubble(t *testing.T, n int, cfg Config, f func(t *testing.T, c *testCluster)) {
	t.Helper()
	inBubbleWithin(t, n, store.Config{}, cfg, f)
}

// forEachRate runs f with three nodes for each policy of the text but those of concurrency.
func forEachRate(t *testing.T, text string, f func(t *testing.T, c *testCluster, p *policy.Policy)) {
	t.Helper()
	for _, p := range policies(t, text).Policies() {
		if p.Concurrency {
			continue
		}
		t.Run(p.Name, func(t *testing.T) {
			inBubble(t, 3, Config{Policies: policies(t, text)}, func(t *testing.T, c *testCluster) { f(t, c, p) })
		})
	}
}

// inBubbleWithin is inBubble with bounds on each node's store.
func inBubbleWithin(t *testing.T, n int, bounds store.Config, cfg Config, f func(t *testing.T, c *testCluster)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := &testCluster{t: t}
		c.mono.Store(int64(time.Hour))
		for i := range n {
			node := &testNode{c: c, name: fmt.Sprintf("n%d", i)}
			node.view = func(p int) ownership.Route { return c.holder(node, p%n) }
			own := cfg
			own.Store, own.Ownership, own.Peers = NewStore(bounds, false), node, node
			own.Self, own.Member = ownership.Node{Name: node.name, Boot: uint64(i + 1)}, c.member
			if own.HashKey == (ring.HashKey{}) {
				own.HashKey = testKey
			}
			own.Clock = func() algo.Instant {
				// Every process has a clock with an origin of its own.
				mono := c.mono.Load()
				return algo.Instant{Mono: mono + mono/1000*node.rate.Load() + int64(i)*int64(time.Hour),
					Wall: 1_800_000_000e9 + mono}
			}
			node.Limiter = New(own)
			for p := range ring.Partitions {
				node.store.Open(p) // the views say who decides
			}
			t.Cleanup(node.Close)
			c.nodes = append(c.nodes, node)
		}
		f(t, c)
	})
}

// member implements Config.Member.
func (c *testCluster) member(boot uint64) (ownership.Node, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if boot < 1 || boot > uint64(len(c.nodes)) || c.gone[boot] {
		return ownership.Node{}, false
	}
	return ownership.Node{Name: c.nodes[boot-1].name, Boot: boot}, true
}

// holder is node i as at sees it.
func (c *testCluster) holder(at *testNode, i int) ownership.Route {
	name := fmt.Sprintf("n%d", i)
	if name == at.name {
		return ownership.Route{Standing: ownership.Owned}
	}
	return ownership.Route{Standing: ownership.Elsewhere, Node: ownership.Node{Name: name, Boot: uint64(i + 1)}}
}

func (c *testCluster) advance(d time.Duration) { c.mono.Add(int64(d)) }

// tamper sets the wire.
func (c *testCluster) tamper(w wire) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wire = w
}

// see changes what a node takes for the truth.
func (c *testCluster) see(n *testNode, view func(partition int) ownership.Route) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n.view = view
}

func (c *testCluster) setPolicies(text string) {
	for _, n := range c.nodes {
		n.SetPolicies(policies(c.t, text))
	}
}

// owned returns the i-th key of a scope that falls to node n.
func (c *testCluster) owned(scope string, n, i int) string {
	for k := 0; ; k++ {
		key := fmt.Sprintf("key-%d", k)
		if ring.Partition(ring.Hash(testKey, scope, key))%len(c.nodes) == n {
			if i == 0 {
				return key
			}
			i--
		}
	}
}

// Route implements Ownership.
func (n *testNode) Route(p int) *ownership.Route {
	n.c.mu.Lock()
	view := n.view
	n.c.mu.Unlock()
	r := view(p)
	return &r
}

// Await implements Ownership: views change when a test says so, and it is looked again then and now.
func (n *testNode) Await(ctx context.Context, p int, old *ownership.Route) *ownership.Route {
	for *n.Route(p) == *old && ctx.Err() == nil {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
		}
	}
	return n.Route(p)
}

// AwaitProgress implements Ownership.
func (n *testNode) AwaitProgress(context.Context, int, uint64, bool) (degraded, ok bool) {
	return true, true
}

// Forward implements Peers: what arrives is what a wire would carry, and what comes back too.
func (n *testNode) Forward(ctx context.Context, to ownership.Node, ops []*Op) {
	c := n.c
	c.mu.Lock()
	wire := c.wire
	if ops[0].Extra == nil || ops[0].Loan == nil {
		c.carried++
	}
	for _, op := range ops {
		c.hops = max(c.hops, int(op.Hops))
	}
	c.mu.Unlock()
	answered := false
	deliver := func() {
		there := sent(n.cfg.Self, ops)
		var target *testNode
		for _, node := range c.nodes {
			if node.name == to.Name {
				target = node
			}
		}
		if rest := target.Receive(there); rest != nil {
			rest(ctx)
		}
		bringBack(ops, there)
		answered = true
	}
	if wire == nil {
		deliver()
	} else {
		wire(ctx, n, to, ops, deliver)
	}
	if !answered {
		for _, op := range ops {
			if op.Outcome.NotHolder == nil {
				op.Outcome = Outcome{Unreachable: true}
			}
		}
	}
}

// sent is operations as messages carry them, in the name of the node that sends them.
func sent(from ownership.Node, ops []*Op) []*Op {
	list := make([]*Op, len(ops))
	for i, op := range ops {
		list[i] = NewOp(op.Kind, *op.Check, Extra{})
		list[i].Hops = op.Hops
		if op.Extra == nil {
			continue
		}
		*list[i].Extra = Extra{LeaseID: op.LeaseID, TTL: op.TTL, Reservation: op.Reservation, Atomic: op.Atomic,
			Exact: op.Exact}
		if op.Loan != nil {
			loan := LoanCall{Report: op.Loan.Report, Recall: op.Loan.Recall, Forwarded: op.Loan.Forwarded}
			if !loan.Forwarded {
				loan.Report.ID.Borrower = from.Boot
			}
			list[i].Loan = &loan
		}
	}
	return list
}

// bringBack is the answer to operations as messages carry it.
func bringBack(ops, there []*Op) {
	for i, op := range ops {
		out := &there[i].Outcome
		op.Outcome = Outcome{Err: out.Err, NotHolder: out.NotHolder, Lease: out.Lease, Unreachable: out.Unreachable}
		*op.Decision = *there[i].Decision
		if op.Extra == nil {
			continue
		}
		op.Reply = there[i].Reply
		if loan := there[i].Loan; loan != nil {
			op.Loan.Known, op.Loan.Lent = loan.Known, loan.Lent
			if op.Kind == OpRecall {
				op.Loan.Report = loan.Report
			}
		}
	}
}

// started is a node alone, which ends with the test.
func started(t testing.TB, cfg Config) *Limiter {
	l := New(cfg)
	t.Cleanup(l.Close)
	return l
}

// unanswered is what becomes of operations whose answer is lost.
func unanswered(ops []*Op) {
	for _, op := range ops {
		op.Outcome = Outcome{Unreachable: true}
	}
}

// Wires that fail in different ways.
func refused(context.Context, *testNode, ownership.Node, []*Op, func()) {}

func lost(ctx context.Context, _ *testNode, _ ownership.Node, _ []*Op, _ func()) { <-ctx.Done() }

func policies(t testing.TB, text string) *policy.Set {
	t.Helper()
	set := must.Value(policy.Parse("test.yaml", []byte(text)))(t)
	return set
}

var loanID = algo.LoanID{Borrower: 1, Number: 1}

func onPolicy(policy, key string) limit.Target { return limit.Target{Policy: policy, Key: key} }

func inlineTarget(l algo.Limit, key string) limit.Target { return limit.Target{Limit: &l, Key: key} }

func named(policy, key string, cost int64) limit.Check {
	return limit.Check{Target: onPolicy(policy, key), Cost: cost}
}

// check asks one question and expects a decision.
func (n *testNode) check(t testing.TB, q limit.Check) limit.Decision {
	t.Helper()
	got := must.Value(n.Check(t.Context(), []limit.Check{q}))(t)
	must.NoError(t, got[0].Err)
	return got[0].Decision
}

// checkError asks one question and expects an error of this kind and field, of the batch or of the check.
func (n *testNode) checkError(t testing.TB, q limit.Check, kind limit.Kind, field string) {
	t.Helper()
	got, err := n.Check(t.Context(), []limit.Check{q})
	if err == nil {
		err = got[0].Err
	}
	wantError(t, err, kind, field)
}

func wantError(t testing.TB, err error, kind limit.Kind, field string) {
	t.Helper()
	e, ok := err.(*limit.Error)
	expect.True(t, ok && e.Kind == kind && e.Field == field && e.Message != "",
		"error %#v, want kind %d about %q", err, kind, field)
}

// stats sums the nodes' counters of a policy.
func (c *testCluster) stats(policy string) PolicyStats {
	sum := PolicyStats{Policy: policy}
	for _, n := range c.nodes {
		for _, s := range n.ReadStats() {
			if s.Policy == policy {
				sum.Allowed += s.Allowed
				sum.Refused += s.Refused
				sum.Remembered += s.Remembered
				sum.Borrowed += s.Borrowed
				sum.NearLimit += s.NearLimit
				sum.Banned += s.Banned
				sum.Bans += s.Bans
				sum.Shadowed += s.Shadowed
				sum.FailedOpen += s.FailedOpen
				sum.FailedClosed += s.FailedClosed
				sum.Errors += s.Errors
				sum.CandidateAllowed += s.CandidateAllowed
				sum.CandidateRefused += s.CandidateRefused
				sum.CandidateDisagreed += s.CandidateDisagreed
				sum.PeakCount = max(sum.PeakCount, s.PeakCount)
				sum.PeakUtilization = max(sum.PeakUtilization, s.PeakUtilization)
			}
		}
	}
	return sum
}

func (c *testCluster) wantStats(want PolicyStats) {
	c.t.Helper()
	got := c.stats(want.Policy)
	got.PeakCount, got.PeakUtilization = want.PeakCount, want.PeakUtilization
	if want.Remembered == 0 {
		got.Remembered = 0 // how many refusals were answered from memory is for the tests that say so
	}
	if want.Borrowed == 0 {
		got.Borrowed = 0
	}
	expect.Equal(c.t, got, want, "counted")
}

package limiter

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// pass lets time pass: that of timers and that of the nodes' clocks.
func (c *testCluster) pass(d time.Duration) {
	for ; d > 0; d -= time.Millisecond {
		time.Sleep(time.Millisecond)
		c.advance(time.Millisecond)
		synctest.Wait()
	}
}

// heat has a node ask for a key until it has a loan of it, and returns how many units that took.
func (c *testCluster) heat(n *testNode, q limit.Check) (used int64) {
	c.t.Helper()
	for range 1000 {
		must.True(c.t, n.check(c.t, q).Allowed, "refused")
		used += q.Cost
		if n.borrowing.book.Loans() > 0 {
			c.pass(5 * time.Millisecond)
			return used
		}
		if used%(8*q.Cost) == 0 {
			c.pass(time.Millisecond)
		}
	}
	c.t.Fatal("nothing was borrowed")
	return 0
}

// onLoan is what is on loan of a policy's key, at its owner.
func (c *testCluster) onLoan(n *testNode, policy, key string) int64 {
	c.t.Helper()
	is, holds, err := n.Describe(new(onPolicy(policy, key)))
	must.True(c.t, err == nil && holds, "%v %v", holds, err)
	return is.OnLoan
}

const borrowPolicies = `policies:
  - {name: p, algorithm: sliding_log, limit: 10000, window: 1h}
  - {name: kept, algorithm: sliding_log, limit: 10000, window: 1h, lend: false}
  - {name: shadow, algorithm: sliding_log, limit: 10000, window: 1h, shadow: true}
  - {name: small, algorithm: sliding_log, limit: 1000, window: 1h}
`

// TestNodeBorrows: a node that does not hold a hot key answers from a loan. What it admits is counted once; what must
// not come from a loan is asked for; what is left is returned when the node stops.
func TestNodeBorrows(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, borrowPolicies)}, func(t *testing.T, c *testCluster) {
		owner, node := c.nodes[0], c.nodes[1]
		key := c.owned("p", 0, 0)
		used := c.heat(node, named("p", key, 2))
		n := c.messages(func() {
			for range 20 {
				d := node.check(t, named("p", key, 2))
				must.True(t, d.Allowed && d.Granted == 2 && d.Policy == "p" && d.Limit == 10000 &&
					d.Window == time.Hour && d.Remaining == 10000-used-2, "%+v after %d", d, used)
				used += 2
			}
		})
		expect.Equal(t, n, 0, "messages for 20 checks from a loan")
		checks, results := []limit.Check{named("p", key, 1)}, make([]limit.Result, 1)
		singles := int64(0) // checks that cost 1
		var allocated float64
		for range 10 { // who reports what is spent allocates, and may do so meanwhile
			c.pass(30 * time.Millisecond)
			allocated = testing.AllocsPerRun(5,
				func() { _ = node.CheckTo(t.Context(), checks, nil, results); singles++ }) -
				testing.AllocsPerRun(5, func() { node.Route(0) })
			if allocated == 0 {
				break
			}
		}
		expect.True(t, allocated <= 0, "%v allocations", allocated)
		used += singles
		n = c.messages(func() {
			for _, q := range []limit.Check{
				{Cost: 0}, {Cost: 1, Always: true}, {Cost: 1, RequestID: "r"},
			} {
				q.Target = onPolicy("p", key)
				node.check(t, q)
				used += q.Cost
			}
		})
		expect.Equal(t, c.messages(func() {
			expect.Equal(t, node.check(t, limit.Check{Target: onPolicy("p", key), Cost: 1, Partial: true}).Granted, 1)
			used++
		}), 0,
			"messages for a partial check that the loan covers")
		expect.Equal(t, n, 3, "messages for 3 checks that are not answered from loans")
		c.pass(100 * time.Millisecond)
		singles += 3
		s := c.stats("p")
		expect.True(t, s.Allowed == uint64((used-singles)/2+singles) && s.Borrowed >= 26, "%+v for %d units", s, used)
		expect.True(t, !node.heatsNothing(c, "kept") && !node.heatsNothing(c, "shadow"),
			"units are borrowed of policies that are not lent")
		node.heatsNothing(c, "p") // a loan to return
		returned := make(chan struct{})
		go func() {
			defer close(returned)
			node.ReturnLoans(t.Context())
		}()
		c.pass(250 * time.Millisecond)
		<-returned
		if n := c.onLoan(owner, "p", key); n != 0 || node.borrowing.book.Loans() != 0 {
			t.Errorf("%d are on loan after the node has stopped", n)
		}
		d := node.check(t, named("p", key, 0))
		expect.Equal(t, d.Remaining, 10000-used, "%+v, want %d used", d, used)
	})
}

// TestWhoObeysIsAdmittedBesideLoans: who was refused more than what is free passes after retry_after, whatever the node
// that was asked has spent of a loan: what it had not reported by then is asked for before the refusal, and after what
// it spends later it asks again.
func TestWhoObeysIsAdmittedBesideLoans(t *testing.T) {
	const set = "policies: [{name: p, algorithm: sliding_log, limit: 1000, window: 2s}]"
	for name, between := range map[string]func(c *testCluster, n *testNode, small limit.Check,
		large *limit.Check) limit.Decision{
		"spent before": func(c *testCluster, n *testNode, small limit.Check, large *limit.Check) limit.Decision {
			large.Cost = 990 // for which nearly all that is in use has to go
			return n.check(c.t, *large)
		},
		"spent after": func(c *testCluster, n *testNode, small limit.Check, large *limit.Check) limit.Decision {
			d := n.check(c.t, *large)
			must.True(c.t, !d.Allowed && d.RememberFor != 0, "%+v", d)
			for range 1000 {
				if c.pass(time.Millisecond); c.onLoan(c.nodes[1], "p", large.Key) > 60 {
					break
				}
			}
			c.wantMessages(0, "checks from a loan", func() {
				for range 60 {
					n.check(c.t, small)
				}
			})
			return n.check(c.t, *large)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, 2, Config{Policies: policies(t, set)}, func(t *testing.T, c *testCluster) {
				key, n := c.owned("p", 1, 0), c.nodes[0]
				small, large := named("p", key, 1), named("p", key, 930)
				c.nodes[1].check(t, named("p", key, 500))
				c.pass(1200 * time.Millisecond)
				c.heat(n, small)
				for range 40 {
					n.check(c.t, small)
					c.pass(time.Millisecond)
				}
				for range 10 {
					n.check(c.t, small)
				}
				d := between(c, n, small, &large)
				must.True(t, !d.Allowed && !d.RetryAfterEstimated && d.RetryAfter > 0 && d.RetryAfter <= 2*time.Second,
					"%+v", d)
				c.pass(d.RetryAfter / time.Millisecond * time.Millisecond)
				c.advance(d.RetryAfter % time.Millisecond)
				again := n.check(t, large)
				expect.True(t, again.Allowed, "refused again: %+v\nat first %+v", again, d)
			})
		})
	}
}

// heatsNothing asks often for a key of a policy of the first node's, and reports whether the node has more loans then.
func (n *testNode) heatsNothing(c *testCluster, policy string) bool {
	before := n.borrowing.book.Loans()
	key := c.owned(policy, 0, 1)
	for range 200 {
		n.check(c.t, named(policy, key, 1))
	}
	return n.borrowing.book.Loans() > before
}

// TestBorrowingInANodesName is an attack: another process has reported to the owner, under the boot of a node that
// borrows and the number of its first loan, that it was lent 10⁹ units, and has returned them. The node takes no more
// than it has asked for, so no more is admitted than the limit.
func TestBorrowingInANodesName(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t,
		"policies: [{name: p, algorithm: sliding_log, limit: 2000, window: 1h}]")}, func(t *testing.T, c *testCluster) {
		owner, node := c.nodes[0], c.nodes[1]
		q := named("p", c.owned("p", 0, 0), 1)
		forged := limit.Borrow{Target: q.Target, ID: algo.LoanID{Borrower: node.cfg.Self.Boot, Number: 1},
			Totals: algo.Totals{Granted: 1e9, Returned: 1e9}, Want: 16}
		must.Value(owner.Lend(t.Context(), []limit.Borrow{forged}, make([]limit.Lent, 1)))(t)
		admitted := c.heat(node, q)
		for range 10_000 {
			if d := node.check(t, q); d.Allowed {
				admitted++
			}
			if admitted%20 == 0 {
				c.pass(time.Millisecond)
			}
		}
		expect.Equal(t, admitted, 2000, "were admitted of 2000")
	})
}

// TestRecallsLendNothing: a node that is asked for what it has is lent nothing, whatever it answers.
func TestRecallsLendNothing(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, borrowPolicies)}, func(t *testing.T, c *testCluster) {
		owner, node := c.nodes[0], c.nodes[1]
		key := c.owned("p", 0, 0)
		id := algo.LoanID{Borrower: node.cfg.Self.Boot, Number: 7}
		lent(t, owner.Limiter, limit.Borrow{Target: onPolicy("p", key), ID: id, Want: 16})
		c.tamper(func(_ context.Context, _ *testNode, _ ownership.Node, ops []*Op, deliver func()) {
			deliver()
			ops[0].Loan.Known, ops[0].Loan.Report = true,
				limit.Borrow{Totals: algo.Totals{Granted: 16, Spent: 4}, Want: 100}
		})
		op := &Op{Check: new(named("p", key, 1))}
		must.Equal(t, owner.plan(owner.table.Load(), op), nil)
		owner.askNode(node.cfg.Self, op.subject, op.Target, []algo.Loan{{ID: id, Totals: algo.Totals{Granted: 16}}})
		expect.Equal(t, c.onLoan(owner, "p", key), 12, "are on loan after 4 of 16 were told of")
	})
}

// TestPartialRecalls: of what is left, and may be asked for in part, nothing is missing because it is on loan.
func TestPartialRecalls(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, borrowPolicies)}, func(t *testing.T, c *testCluster) {
		key := c.owned("small", 0, 0)
		used := c.heat(c.nodes[1], named("small", key, 1)) + c.heat(c.nodes[2], named("small", key, 1))
		c.pass(20 * time.Millisecond)
		onLoan := c.onLoan(c.nodes[0], "small", key)
		must.True(t, onLoan != 0, "nothing is on loan")
		all := limit.Check{Target: onPolicy("small", key), Cost: 5000, Partial: true}
		part := all
		part.Cost = 1000 - used - onLoan - 10 // less than is free
		d := c.nodes[0].check(t, part)
		expect.True(t, d.Granted == part.Cost && c.onLoan(c.nodes[0], "small", key) == onLoan, "of what is free: %+v",
			d)
		if d := c.nodes[2].check(t, all); !d.Allowed || d.Granted != onLoan+10 || d.Remaining != 0 {
			t.Errorf("%d of %d were used and %d on loan: %+v", used+part.Cost, 1000, onLoan, d)
		}
		d = c.nodes[1].check(t, all)
		expect.True(t, !d.Allowed && d.Granted == 0, "more than the limit: %+v", d)
	})
}

// TestAllFromLoans: atomic checks of one key make it one that a node borrows, and are answered from its loan if that
// covers all of them. The owners are asked about those of several keys, and what is on loan stays.
func TestAllFromLoans(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, borrowPolicies)}, func(t *testing.T, c *testCluster) {
		node := c.nodes[2]
		a, b := c.owned("small", 0, 0), c.owned("p", 1, 0)
		one := []limit.Check{named("small", a, 1), named("small", a, 1)}
		var admitted int64
		ask := func(checks ...limit.Check) (ok bool) {
			t.Helper()
			all := node.all(t, checks...)
			for i, d := range all.Decisions {
				must.True(t, !d.FailedOpen && d.Policy == checks[i].Policy && (!all.Allowed || d.Granted == 1),
					"%+v", all)
				if d.Granted == 1 && d.Policy == "small" {
					admitted++
				}
			}
			return all.Allowed
		}
		for node.borrowing.book.Loans() == 0 {
			for range 8 {
				must.True(t, ask(one...), "refused")
			}
			c.pass(time.Millisecond)
		}
		c.pass(10 * time.Millisecond)
		n := c.messages(func() {
			for range 5 {
				must.True(t, ask(one...), "refused")
			}
		})
		expect.Equal(t, n, 0, "messages for atomic checks that a loan covers")
		onLoan := c.onLoan(c.nodes[0], "small", a)
		n = c.messages(func() { must.True(t, ask(one[0], named("p", b, 1)), "refused") })
		expect.True(t, n != 0 && c.onLoan(c.nodes[0], "small", a) == onLoan,
			"of several keys: %d messages, and on loan are %d after %d", n, c.onLoan(c.nodes[0], "small", a), onLoan)
		for refused := 0; refused < 3; {
			if !ask(one...) {
				refused++
			}
			if admitted%7 == 0 {
				c.pass(time.Millisecond)
			}
		}
		expect.True(t, admitted == 999 || admitted == 1000, "%d were admitted of 1000, two at a time", admitted)
		c.pass(2 * time.Second) // in which all is returned
		expect.Equal(t, node.check(t, named("small", a, 0)).Remaining, 1000-admitted)
		s := c.stats("small")
		expect.True(t, s.Borrowed != 0, "%+v", s)
	})
}

// TestInlineLimitsAreLent: checks with limits of their own are answered from a node's loan, in batches and atomic
// checks, too.
func TestInlineLimitsAreLent(t *testing.T) {
	inBubble(t, 2, Config{}, func(t *testing.T, c *testCluster) {
		node := c.nodes[1]
		check := func() limit.Check { // as it is parsed anew each time
			l := algo.Limit{Algorithm: algo.SlidingLog, Limit: 10000, Window: time.Hour}
			return limit.Check{Target: limit.Target{Limit: &l, Namespace: "n",
				Key: c.owned(limit.InlineScope("n", &l), 0, 0)}, Cost: 1}
		}
		c.heat(node, check())
		expect.Equal(t, c.messages(func() {
			got, err := node.Check(t.Context(), []limit.Check{check(), check()})
			expect.True(t, err == nil && got[0].Allowed && got[1].Allowed && got[1].Policy == "inline" &&
				got[1].Limit == 10000, "%+v, %v", got, err)
			expect.True(t, node.all(t, check(), check()).Allowed, "refused")
		}), 0, "messages for checks that a loan covers")
	})
}

// TestSeveralLimitsAreLent: a decision from a loan under several limits says of each what its owner would, also which
// is the tightest and whether any of them is near.
func TestSeveralLimitsAreLent(t *testing.T) {
	const several = "policies: [{name: p, algorithm: sliding_log, warn_at: 0.5, limits: [2000/1h, 200/1s]}]"
	for spent, near := range map[int]bool{3: false, 8: true} {
		inBubble(t, 2, Config{Policies: policies(t, several)}, func(t *testing.T, c *testCluster) {
			owner, node := c.nodes[0], c.nodes[1]
			key := c.owned("p", 0, 0)
			used := int64(0)
			for range spent {
				must.True(t, owner.check(t, named("p", key, 140)).Allowed, "refused")
				used += 140
				c.pass(1100 * time.Millisecond)
			}
			lately := c.heat(node, named("p", key, 1))
			used += lately
			n := c.messages(func() {
				for range 10 {
					used, lately = used+1, lately+1
					d := node.check(t, named("p", key, 1))
					must.True(t, d.Allowed && d.Granted == 1 && d.Policy == "p" && d.Limit == 200 &&
						d.Window == time.Second && d.Remaining == 200-lately && d.NearLimit == near &&
						len(d.Limits) == 2, "%+v after %d", d, used)
					for i, want := range []limit.LimitStatus{{Limit: 2000, Window: time.Hour, Remaining: 2000 - used},
						{Limit: 200, Window: time.Second, Remaining: 200 - lately}} {
						got := d.Limits[i]
						expect.True(t, got.ResetAfter > 0, "%+v", got)
						got.ResetAfter = 0
						must.Equal(t, got, want)
					}
				}
			})
			expect.Equal(t, n, 0, "messages for checks from a loan")
			d := node.check(t, named("p", key, 200-lately+1))
			expect.True(t, !d.Allowed && d.Limits[0].RetryAfter == 0 && d.Limits[1].RetryAfter != 0,
				"more than the second limit: %+v", d)
			expect.True(t, node.check(t, named("p", key, 200-lately)).Allowed, "all that is left of it")
		})
	}
}

// TestReportsToANodeThatIsCutOff: three reports of a loan at most are in flight while its holder cannot be reached.
func TestReportsToANodeThatIsCutOff(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, borrowPolicies)}, func(t *testing.T, c *testCluster) {
		node := c.nodes[1]
		var keys []string
		for i := range 12 {
			keys = append(keys, c.owned("p", 0, i))
			for node.borrowing.book.Loans() <= i {
				node.check(t, named("p", keys[i], 1))
			}
			c.pass(5 * time.Millisecond)
		}
		take := func(key string) bool {
			_, _, ok := node.borrowing.book.Take(loanKey{state: state{"p", key}}, 1, node.borrowing.clock)
			return ok
		}
		under, most := map[string]int{}, 0
		count := func(ops []*Op, n int) {
			c.mu.Lock()
			defer c.mu.Unlock()
			for _, op := range ops {
				under[op.Key] += n
				most = max(most, under[op.Key])
			}
		}
		c.tamper(func(ctx context.Context, _ *testNode, _ ownership.Node, ops []*Op, _ func()) {
			count(ops, 1)
			<-ctx.Done()
			count(ops, -1)
		})
		for range 10 {
			for _, key := range keys {
				for take(key) {
				}
				c.pass(10 * time.Millisecond) // one after the other they are to be renewed
			}
		}
		expect.Equal(t, most, 3, "reports of one loan were in flight at once")
	})
}

// TestLoansOverMoves: a borrower that takes another node for the holder of a key is told who holds it, or asks again
// soon; so nothing that it has on loan ends, and all that it has admitted is counted once, while the key moves to and
// fro.
func TestLoansOverMoves(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, borrowPolicies)}, func(t *testing.T, c *testCluster) {
		key := c.owned("p", 0, 0)
		part := ring.Partition(ring.Hash(testKey, "p", key))
		borrower := c.nodes[1]
		used := c.heat(borrower, named("p", key, 1))
		// see has each node take a node for the holder; -1 is nobody. Who takes another one than holder for it goes by
		// the ring, and knows of no term.
		term := uint64(0)
		see := func(holder int, by ...int) {
			term++
			for i, n := range c.nodes {
				c.see(n, func(p int) ownership.Route {
					switch {
					case p != part:
						return c.holder(n, p%3)
					case by[i] < 0:
						return ownership.Route{Standing: ownership.Unclaimed}
					}
					r := c.holder(n, by[i])
					if by[i] == holder {
						r.Term.N = term
					}
					return r
				})
			}
		}
		spend := func(what string, span time.Duration) {
			t.Helper()
			for ; span > 0; span -= 5 * time.Millisecond {
				d := borrower.check(t, named("p", key, 1))
				must.True(t, d.Allowed && !d.FailedOpen, "%s: %+v", what, d)
				used++
				c.pass(5 * time.Millisecond)
			}
		}
		// n2 has just come back: who borrows takes it for the holder, and it knows better.
		see(0, 0, 2, 0)
		spend("the ring's owner does not hold it yet", 3*time.Second)
		see(-1, 2, 2, -1)
		spend("the last instants of the move", 30*time.Millisecond)
		move(t, c.nodes[0].Limiter, c.nodes[2].Limiter, part)
		see(2, 2, 2, 2)
		spend("moved", 2*time.Second)
		// n2 leaves, and all but itself see n0 hold what it still has.
		see(2, 2, 0, 2)
		spend("the leaving node still holds it", 3*time.Second)
		move(t, c.nodes[2].Limiter, c.nodes[0].Limiter, part)
		see(0, 0, -1, 0)
		spend("who borrows knows of nobody", 30*time.Millisecond)
		see(0, 0, 0, 0)
		spend("back", time.Second)
		for i, n := range c.nodes {
			s := n.Loans()
			expect.True(t, s.Expired <= 0, "n%d has charged %d units of loans that ended", i, s.Expired)
		}
		c.pass(time.Second)
		expect.Equal(t, c.onLoan(c.nodes[0], "p", key), 0, "are on loan")
		d := c.nodes[0].check(t, named("p", key, 0))
		expect.Equal(t, d.Remaining, 10000-used, "%+v, want %d used", d, used)
		s := c.stats("p")
		expect.True(t, s.Borrowed >= uint64(used)*9/10, "%+v of %d", s, used)
	})
}

// TestReportsAreForwarded: a client that has no way to who holds its key tells another node. The holder takes that in,
// lends nothing more, and learns what comes back in the same way.
func TestReportsAreForwarded(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, borrowPolicies)}, func(t *testing.T, c *testCluster) {
		key := c.owned("p", 0, 0)
		lend := func(n int, b limit.Borrow) limit.Lent {
			t.Helper()
			b.Target, b.ID = onPolicy("p", key), algo.LoanID{Borrower: 77, Number: 1}
			return lent(t, c.nodes[n].Limiter, b)
		}
		a := lend(1, limit.Borrow{Want: 16})
		expect.True(t, a.Unheard && a.Holder == "n0", "borrowed where nothing is held: %+v", a)
		a = lend(0, limit.Borrow{Want: 16})
		must.True(t, a.Granted == 16 && a.Term != 0, "borrowed from the holder: %+v", a)
		a = lend(1, limit.Borrow{Totals: algo.Totals{Granted: 16, Spent: 5}, Want: 16})
		expect.True(t, !a.Unheard && !a.Ended && a.Granted == 16 && a.Spent == 5 && a.Term == 0 && a.Holder == "n0",
			"told another node: %+v", a)
		expect.Equal(t, c.onLoan(c.nodes[0], "p", key), 11, "are on loan")
		a = lend(2, limit.Borrow{Totals: algo.Totals{Granted: 16, Spent: 5, Returned: 11}, Known: 5})
		expect.True(t, !a.Unheard && a.Term == 0, "returned through another node: %+v", a)
		expect.Equal(t, c.onLoan(c.nodes[0], "p", key), 0, "are on loan")
		c.pass(2 * time.Second)
		s := c.nodes[0].Loans()
		expect.True(t, s.Expired <= 0, "%d units of loans that ended were charged", s.Expired)
		d := c.nodes[0].check(t, named("p", key, 0))
		expect.Equal(t, d.Remaining, 10000-5, "%+v, want 5 used", d)
		// Nobody can be told: the client asks again.
		c.see(c.nodes[1], func(int) ownership.Route { return ownership.Route{Standing: ownership.Unclaimed} })
		expect.True(t, lend(1, limit.Borrow{Totals: algo.Totals{Granted: 16}}).Unheard, "nobody holds the key")
	})
}

// TestReportsAreNotHandedOn: a report says something of its sender's loan, and nothing of a loan of whoever hands it
// on.
func TestReportsAreNotHandedOn(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, borrowPolicies)}, func(t *testing.T, c *testCluster) {
		key := c.owned("p", 0, 0)
		op := NewOp(OpBorrow, limit.Check{Target: onPolicy("p", key)},
			Extra{Loan: &LoanCall{Report: limit.Borrow{Want: 16}}})
		op.Hops = 1
		if rest := c.nodes[1].Receive([]*Op{op}); rest != nil {
			rest(t.Context())
		}
		expect.True(t, op.Outcome.NotHolder != nil && op.Outcome.NotHolder.Node.Name == "n0" &&
			op.Loan.Lent.Granted == 0, "%+v, %+v", op.Outcome, op.Loan)
		expect.Equal(t, c.onLoan(c.nodes[0], "p", key), 0, "are on loan")
	})
}

// move moves a partition's states, as a planned move does.
func move(t *testing.T, from, to *Limiter, part int) {
	t.Helper()
	from.store.Shut(part)
	from.store.Attach(part, ownership.Target, true)
	to.store.Stage(part)
	for more := true; more; {
		var chunk []byte
		chunk, _, more = from.store.Drain(part, ownership.Target, from.clock(), 1<<20)
		must.NoError(t, to.store.Apply(part, true, to.clock(), chunk))
	}
	to.store.Shut(part)
	to.store.Promote(part)
	to.store.Open(part)
}

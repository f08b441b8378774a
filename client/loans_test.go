package client

import (
	"context"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

const loanPolicies = `policies:
  - {name: hot, algorithm: sliding_log, limit: 300000, window: 1h, warn_at: 0.5}
  - {name: asked, algorithm: sliding_log, limit: 30000, window: 1h, lend: false}
`

// another returns one more client of a cluster.
func another(t *testing.T, addr string, opts ...Option) *Client {
	t.Helper()
	c := must.Value(Dial(t.Context(), addr, append(opts, WithTimeout(time.Minute))...))(t)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// spend has many callers ask for a key until it is refused, and returns how many units were admitted.
func spend(t *testing.T, limiters []*Limiter, key string, callers int) int64 {
	t.Helper()
	var admitted atomic.Int64
	var asking sync.WaitGroup
	for _, l := range limiters {
		for range callers {
			asking.Go(func() {
				for t.Context().Err() == nil {
					d, err := l.Allow(t.Context(), key)
					if err != nil || d.FailedOpen || d.FailedClosed {
						t.Error(d, err)
						return
					}
					if half := d.Policy == "hot" && d.Limit-d.Remaining >= d.Limit/2; d.NearLimit != half {
						t.Errorf("of a policy that warns at one half: %+v", d)
						return
					}
					if !d.Allowed {
						return
					}
					admitted.Add(1)
				}
			})
		}
	}
	asking.Wait()
	return admitted.Load()
}

// decided is how many checks the nodes have admitted themselves.
func (c *cluster) decided(policy string) (n uint64) {
	for _, l := range c.nodes {
		for _, s := range l.ReadStats() {
			if s.Policy == policy {
				n += s.Allowed - s.Borrowed
			}
		}
	}
	return n
}

// lost is how many units borrowers have taken after their loans' end, and how many of the loans that have ended without
// them were charged: more than is lost, for some had been spent.
func (c *cluster) lost(borrowers ...*Client) (late, expired int64) {
	for _, b := range borrowers {
		late += b.loans.book.Late()
	}
	for _, l := range c.nodes {
		expired += int64(l.Loans().Expired)
	}
	return late, expired
}

// TestLoans has three clients use up one key: all of its units, and none twice, nearly all without asking.
func TestLoans(t *testing.T) {
	const limit, asked = 300_000, 30_000 // many enough that the key is lent before most are used, on a busy machine too
	c, client := newCluster(t, 3, loanPolicies)
	second, third := another(t, c.addrs[1]), another(t, c.addrs[2])
	asker := another(t, c.addrs[0], WithoutLoans(), WithoutMemory())
	for _, other := range []*Client{second, third, asker} {
		reaches(t, other, c.addrs...)
	}
	// of which no unit comes back meanwhile
	inline := algo.Limit{Algorithm: algo.TokenBucket, Limit: limit, Window: algo.MaxWindow}
	for name, of := range map[string]func(*Client) *Limiter{
		"policy": func(c *Client) *Limiter { return c.Policy("hot") },
		"inline": func(c *Client) *Limiter { return c.Inline("n", inline) },
	} {
		t.Run(name, func(t *testing.T) {
			lateBefore, expiredBefore := c.lost(client, second, third)
			got := spend(t, []*Limiter{of(client), of(second), of(third)}, "k", 8)
			// What was refused in haste, because some borrower was slow to answer, is there when all has been returned,
			// but for what nobody can have: where there is no CPU to spare units may be taken after their loan's end,
			// and loans end before they are returned.
			late, expired := c.lost(client, second, third)
			for until := time.Now().Add(10 * time.Second); got+late-lateBefore < limit &&
				time.Now().Before(until); late, expired = c.lost(client, second, third) {
				got += spend(t, []*Limiter{of(asker)}, "k", 1)
			}
			late, expired = late-lateBefore, expired-expiredBefore
			expect.True(t, got+late <= limit && got+late+expired >= limit,
				"%d were admitted of %d, %d taken too late, %d at most in loans that have ended", got, limit, late,
				expired)
		})
	}
	n := c.decided("hot")
	expect.True(t, n <= limit/2, "the nodes were asked for %d of %d", n, limit)
	if got := spend(t, []*Limiter{client.Policy("asked")}, "k", 8); got != asked || c.decided("asked") != asked {
		t.Errorf("of a policy that is not lent %d were admitted, %d by nodes", got, c.decided("asked"))
	}
}

// A key is borrowed of who holds it, whoever the ring says should.
func TestLoansOfAHolder(t *testing.T) {
	c, client := newCluster(t, 3, loanPolicies)
	l, until := client.Policy("hot"), time.Now().Add(time.Minute)
	// Renewed: it is known who holds it, and who does hears it. On a busy machine a loan may expire first: another key.
	for i, expires := 0, true; expires; i++ {
		key := c.key("hot", 0, i)
		c.away.Store(&away{ring.Partition(ring.Hash(testKey, "hot", key)), 1})
		before := c.nodes[1].Loans()
		for c.nodes[1].Loans().Granted < before.Granted+5 {
			d, err := l.Allow(t.Context(), key)
			must.True(t, err == nil && d.Allowed && !d.FailedOpen, "%v %v", d, err)
			must.True(t, !time.Now().After(until), "nothing is borrowed, or every loan expires")
		}
		expires = c.nodes[1].Loans().Expired > before.Expired
	}
	for _, i := range []int{0, 2} {
		expect.True(t, c.nodes[i].Loans().Granted <= 0, "node %d: %+v", i, c.nodes[i].Loans())
	}
}

// A client that is closed leaves nothing on loan.
func TestLoansGoHome(t *testing.T) {
	const limit = 300_000
	c, _ := newCluster(t, 3, loanPolicies)
	other := another(t, c.addrs[0])
	reaches(t, other, c.addrs...)
	l := other.Policy("hot")
	used := int64(0)
	for l.c.loans.book.Loans() == 0 || c.decided("hot")+100 > uint64(used) {
		d, err := l.Allow(t.Context(), "k")
		must.True(t, err == nil && d.Allowed, "%v %v", d, err)
		used++
	}
	must.NoError(t, other.Close())
	asker := another(t, c.addrs[1], WithoutLoans())
	reaches(t, asker, c.addrs...)
	d, err := asker.Policy("hot").Peek(t.Context(), "k")
	for until := time.Now().Add(5 * time.Second); err == nil && d.Remaining != limit-used && time.Now().Before(until); {
		d, err = asker.Policy("hot").Peek(t.Context(), "k")
	}
	expect.True(t, err == nil && d.Remaining == limit-used, "%d were used of %d; %+v, %v", used, limit, d, err)
}

// cable is the way of a Client to its nodes. While it is cut nothing that is sent arrives, and nobody is told.
type cable struct{ cut atomic.Bool }

type cableConn struct {
	net.Conn
	of *cable
}

func (c *cable) dial(ctx context.Context, addr string) (net.Conn, error) {
	if c.cut.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return cableConn{conn, c}, nil
}

func (c cableConn) Read(b []byte) (int, error) {
	for {
		n, err := c.Conn.Read(b)
		if err != nil || !c.of.cut.Load() {
			return n, err
		}
	}
}

func (c cableConn) Write(b []byte) (int, error) {
	if c.of.cut.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

const cutOffPolicies = `policies: [{name: p, algorithm: sliding_log, limit: 100000, window: 1h}]`

// TestLoanOfAClientThatIsCutOff: a client that reaches no node admits from its loan; once that is used up, or its term
// is over with units left, by its fail policy. All that was on loan is charged by its owner.
func TestLoanOfAClientThatIsCutOff(t *testing.T) {
	for name, onError := range map[string]OnError{"open": FailOpen, "closed": FailClosed} {
		for _, usedUp := range []bool{true, false} {
			until := "over"
			if usedUp {
				until = "used up"
			}
			t.Run(name+", until the loan is "+until, func(t *testing.T) {
				c, _ := newCluster(t, 2, cutOffPolicies)
				key := c.key("p", 0, 0)
				of := limit.Target{Policy: "p", Key: key}
				state := func() (free, held int64) {
					t.Helper()
					got, err := c.nodes[0].Check(t.Context(), []limit.Check{{Target: of}})
					must.True(t, err == nil && got[0].Err == nil, "%v %v", got, err)
					is, _, err := c.nodes[0].Describe(&of)
					must.NoError(t, err)
					return got[0].Remaining, is.OnLoan
				}
				for range 20 {
					way := new(cable)
					client := must.Value(Dial(t.Context(), c.addrs[0], WithTimeout(20*time.Millisecond),
						WithBreaker(0, time.Hour), WithOnError(onError),
						WithDialOptions(grpc.WithContextDialer(way.dial))))(t)
					t.Cleanup(func() {
						way.cut.Store(false) // nobody has to wait for it
						_ = client.Close()
					})
					reaches(t, client, c.addrs...)
					l := client.Policy("p")
					ask := func() (d Decision, lent bool) {
						t.Helper()
						d, err := l.Allow(t.Context(), key)
						must.True(t, err == nil && (!d.FailedOpen || !d.FailedClosed) && d.Allowed != d.FailedClosed,
							"%+v, %v", d, err)
						return d, d.Allowed && !d.FailedOpen
					}
					testkit.Eventually(t, "units are borrowed", func() bool {
						ask()
						_, held := state()
						return held > 50
					})
					way.cut.Store(true)
					free, held := state()
					var n int64
					d, lent := ask()
					for ; lent; d, lent = ask() {
						n++
						must.True(t, n <= held, "%d were admitted of %d on loan", n, held)
						if !usedUp {
							const pause = 50 * time.Millisecond // so that its term is over first
							if time.Sleep(pause); time.Duration(n)*pause > algo.LoanTerm+5*pause {
								t.Fatalf("%d were admitted, the last long after the term was over", n)
							}
						}
					}
					must.True(t, d.FailedOpen == (onError == FailOpen) && d.FailedClosed == (onError == FailClosed),
						"%+v", d)
					_, lent = ask()
					must.True(t, !lent, "admitted as of a loan that there is not any more")
					testkit.Eventually(t, "nothing is on loan", func() bool {
						_, held := state()
						return held == 0
					})
					left, _ := state()
					must.True(t, left <= free, "%d are left, and were %d beside %d on loan", left, free, held)
					if n > 0 && (usedUp || n < held) {
						return
					}
					// its term was over before, or what was left was less than it seemed
					t.Logf("%d were admitted of %d on loan: again", n, held)
					must.NoError(t, client.Close())
				}
				t.Fatal("it was never seen")
			})
		}
	}
}

// lendingNode lends as much of every key as it is told to, and keeps what borrowers report.
type lendingNode struct {
	granted int64

	mu      sync.Mutex
	recall  func(limit.Recall)
	reports []limit.Borrow
}

func (n *lendingNode) Lend(_ context.Context, in []limit.Borrow, out []limit.Lent) (func(), error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.reports = append(n.reports, in...)
	for i, r := range in {
		out[i] = limit.Lent{Granted: max(r.Totals.Granted, n.granted), Spent: r.Totals.Spent, Term: algo.LoanTerm,
			Limit: 1 << 30}
	}
	return nil, nil
}

func (n *lendingNode) OpenBorrower(_ uint64, recall func(limit.Recall)) func() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.recall = recall
	return func() {}
}

// reported returns whether a report is as f says.
func (n *lendingNode) reported(f func(limit.Borrow) bool) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.ContainsFunc(n.reports, f)
}

// lent dials a node that lends, and returns how to ask for its key, and the number of the loan, of which the client has
// spent some.
func lent(t *testing.T, n *lendingNode) (ask func(), number uint64) {
	t.Helper()
	addr, _ := serve(t, nodeOver(newBook(), n))
	c := dial(t, addr, WithTimeout(time.Minute))
	must.NoError(t, c.Ready(t.Context()))
	l := c.Inline("n", algo.Limit{Algorithm: algo.TokenBucket, Limit: 1 << 30, Window: time.Hour})
	ask = func() {
		d, err := l.Allow(t.Context(), "k")
		must.True(t, err == nil && d.Allowed && !d.FailedOpen, "%v %v", d, err)
	}
	testkit.Eventually(t, "a loan of which some is spent", func() bool {
		ask()
		return n.reported(func(r limit.Borrow) bool { number = r.ID.Number; return r.Totals.Spent > 0 })
	})
	return ask, number
}

// TestRecall: a client whose loan is recalled returns what it has left at once, although its key is asked about all the
// time, and what the recall says was granted besides.
func TestRecall(t *testing.T) {
	const granted, besides = 1 << 20, 1000
	n := &lendingNode{granted: granted}
	ask, number := lent(t, n)
	n.mu.Lock()
	recall := n.recall
	n.mu.Unlock()
	recall(limit.Recall{Number: number, Granted: granted + besides})
	testkit.Eventually(t, "all of it to be returned", func() bool {
		ask()
		return n.reported(func(r limit.Borrow) bool {
			return r.ID.Number == number && r.Totals.Returned > 0 && r.Totals.Returned+r.Totals.Spent == granted+besides
		})
	})
}

// TestKnown: a report says what the answers have confirmed, so that who holds the key next knows what was counted.
func TestKnown(t *testing.T) {
	n := &lendingNode{granted: 1 << 20}
	ask, number := lent(t, n)
	testkit.Eventually(t, "a report of what is known", func() bool {
		ask()
		return n.reported(func(r limit.Borrow) bool { return r.ID.Number == number && r.Known > 0 && r.Known <= r.Totals.Spent })
	})
}

// TestLoanOverASuspension: nothing is spent of a loan whose term passed while the machine was suspended: Go's monotonic
// clock does not tell, the wall clock does.
func TestLoanOverASuspension(t *testing.T) {
	mono, wall := int64(time.Hour), int64(time.Hour)
	l := newLoans(nil, func() (int64, int64) { return mono, wall })
	key := loanKey{of: "p", key: "k"}
	holds(t, l, key)
	wall += int64(2 * algo.LoanTerm)
	_, _, ok := l.book.Take(key, 1, l.clock)
	expect.True(t, !ok, "a unit was spent after its term, which passed while the machine was suspended")
}

// TestAllFromLoans: checks that are allowed together are so from loans only if those have the units for all of them.
func TestAllFromLoans(t *testing.T) {
	l := newLoans(nil, systemClocks())
	holds(t, l, loanKey{of: "p", key: "k"})
	check := func(key string, n int64) limit.Check {
		return limit.Check{Target: limit.Target{Policy: "p", Key: key}, Cost: n}
	}
	for _, test := range []struct {
		cs   []limit.Check
		want bool
	}{
		{[]limit.Check{check("k", 60), check("k", 60)}, false},
		{[]limit.Check{check("k", 1), check("other", 1)}, false},
		{[]limit.Check{check("k", 5), check("k", 4)}, true},
	} {
		var all AllDecision
		expect.True(t, l.allOf(test.cs, &all) == test.want && all.Allowed == test.want, "%+v: %+v", test.cs, all)
	}
}

// holds has l borrow 100 units of key and spend one.
func holds(t *testing.T, l *loans, key loanKey) {
	t.Helper()
	lendable := Decision{Allowed: true, Limit: 1000}
	for l.book.Loans() == 0 {
		l.missed(key, 1, &lendable, true)
	}
	reports, _ := l.book.Report(l.clock())
	l.book.Answered(l.clock(), l.clock(),
		[]lend.Answer[*member]{{Number: reports[0].Number, Lent: limit.Lent{Granted: 100, Term: algo.LoanTerm}}})
	_, _, ok := l.book.Take(key, 1, l.clock)
	must.True(t, ok, "nothing is lent")
}

// TestReconnectStorm: a client that a node lets in, over HTTP/2, and turns out again at once, does not come back more
// often than every few seconds; after a connection that lasted it comes back at once.
func TestReconnectStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		accepted := make(chan net.Conn, 10_000)
		dial := func(context.Context, string) (net.Conn, error) {
			ours, theirs := net.Pipe()
			accepted <- theirs
			return ours, nil
		}
		c := must.Value(Dial(t.Context(), "127.0.0.1:1", WithDialOptions(grpc.WithContextDialer(dial)),
			WithLogger(slog.New(slog.DiscardHandler))))(t)
		lasts := time.Duration(0)
		n := 0
		serve := func(until time.Duration) { // as a node that speaks as much of HTTP/2 as it takes, and hangs up
			end := time.After(until)
			for {
				select {
				case c := <-accepted:
					n++
					go func() {
						for b := make([]byte, 1<<16); ; {
							if _, err := c.Read(b); err != nil {
								return
							}
						}
					}()
					_, _ = c.Write([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0}) // SETTINGS
					synctest.Wait()                                   // the client is connected
					time.Sleep(lasts)
					_ = c.Close()
				case <-end:
					return
				}
			}
		}
		serve(time.Minute)
		expect.True(t, n >= 3 && n <= 20, "%d connections in a minute", n)
		lasts, n = 2*minLife, 0
		serve(time.Minute)
		expect.True(t, n >= 3, "%d connections in a minute of connections that last", n)
		must.NoError(t, c.Close())
	})
}

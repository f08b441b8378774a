package client

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
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

// lost is how many units borrowers have taken after their loans' end, and how many of the loans that have ended without them were charged: more
// than is lost, for some had been spent.
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
	inline := algo.Limit{Algorithm: algo.TokenBucket, Limit: limit, Window: algo.MaxWindow} // of which no unit comes back meanwhile
	for name, of := range map[string]func(*Client) *Limiter{
		"policy": func(c *Client) *Limiter { return c.Policy("hot") },
		"inline": func(c *Client) *Limiter { return c.Inline("n", inline) },
	} {
		t.Run(name, func(t *testing.T) {
			lateBefore, expiredBefore := c.lost(client, second, third)
			got := spend(t, []*Limiter{of(client), of(second), of(third)}, "k", 8)
			// What was refused in haste, because some borrower was slow to answer, is there when all has been returned, but for what nobody can
			// have: where there is no CPU to spare units may be taken after their loan's end, and loans end before they are returned.
			late, expired := c.lost(client, second, third)
			for until := time.Now().Add(10 * time.Second); got+late-lateBefore < limit && time.Now().Before(until); late, expired = c.lost(client, second, third) {
				got += spend(t, []*Limiter{of(asker)}, "k", 1)
			}
			late, expired = late-lateBefore, expired-expiredBefore
			expect.True(t, got+late <= limit && got+late+expired >= limit,
				"%d were admitted of %d, %d taken too late, %d at most in loans that have ended", got, limit, late, expired)
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
	key := c.key("hot", 0, 0)
	c.away.Store(&away{ring.Partition(ring.Hash(testKey, "hot", key)), 1})
	l := client.Policy("hot")
	// Renewed: it is known who holds it, and who does hears it.
	for until := time.Now().Add(time.Minute); c.nodes[1].Loans().Granted < 5; {
		d, err := l.Allow(t.Context(), key)
		must.True(t, err == nil && d.Allowed && !d.FailedOpen, "%v %v", d, err)
		must.True(t, !time.Now().After(until), "nothing is borrowed")
	}
	for i, n := range c.nodes {
		s := n.Loans()
		expect.True(t, s.Expired <= 0 && (i == 1 || s.Granted <= 0), "node %d: %+v", i, s)
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

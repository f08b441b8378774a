package client

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

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

// TestLoanOfAClientThatIsCutOff: a client that reaches no node admits from its loan; once that is used up, or its term is over with units left, by its
// fail policy. All that was on loan is charged by its owner.
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
					client := must.Value(Dial(t.Context(), c.addrs[0], WithTimeout(20*time.Millisecond), WithBreaker(0, time.Hour), WithOnError(onError),
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
					t.Logf("%d were admitted of %d on loan: again", n, held) // its term was over before, or what was left was less than it seemed
					must.NoError(t, client.Close())
				}
				t.Fatal("it was never seen")
			})
		}
	}
}

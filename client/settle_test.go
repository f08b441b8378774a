package client

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// settler returns a reservation for ttl of a Client whose commits are answered by f, at an instant since its beginning.
func settler(t *testing.T, ttl time.Duration, f func(at time.Duration, cost int64) error) (*Client, *Reservation) {
	t.Helper()
	s, _ := refusedBy(full)
	began := time.Now()
	s.commit = func(_ context.Context, _ string, cost int64) (int64, error) { return 0, f(time.Since(began), cost) }
	c := scripted(t, s)
	r, _, err := c.Policy("p").ReserveN(t.Context(), "a", 3, ttl)
	must.NoError(t, err)
	return c, r
}

var errDown = &limit.Error{Kind: limit.Unavailable, Message: "down"}

// TestSettlesInTheBackground: a commit that no node answers is repeated until one does, with the same cost.
func TestSettlesInTheBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var done []time.Duration
		c, r := settler(t, time.Minute, func(at time.Duration, cost int64) error {
			expect.Equal(t, cost, 2, "a commit of")
			if at < 10*time.Second {
				return errDown
			}
			done = append(done, at)
			return nil
		})
		expect.NoError(t, r.Commit(2))
		expect.Equal(t, c.settling.now.Load(), 1, "are being settled")
		expect.NoError(t, r.Commit(1)) // the first one counts
		_, err := r.Extend(t.Context(), 1, 0)
		expect.ErrorIs(t, err, ErrNotFound, "extended while it is settled")
		time.Sleep(15 * time.Second)
		synctest.Wait()
		expect.True(t, len(done) == 1 && done[0] <= 12*time.Second && c.settling.now.Load() == 0 &&
			c.settling.unsettled.Load() == 0, "settled at %v; %d are being settled, %d given up", done,
			c.settling.now.Load(), c.settling.unsettled.Load())
	})
}

// TestSettlesUntilTheTTL: nothing is asked about a reservation that has run out, and that it was given up is counted.
func TestSettlesUntilTheTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var last time.Duration
		c, r := settler(t, 5*time.Second, func(at time.Duration, _ int64) error {
			last = at
			return errDown
		})
		expect.NoError(t, r.Cancel())
		time.Sleep(time.Minute)
		synctest.Wait()
		expect.True(t, last >= 3*time.Second && last <= 5*time.Second && c.settling.now.Load() == 0 &&
			c.settling.unsettled.Load() == 1, "asked until %v; %d are being settled, %d given up", last,
			c.settling.now.Load(), c.settling.unsettled.Load())
	})
}

// TestCloseDrains: Close has what is not settled tried once more, and waits for a second at most.
func TestCloseDrains(t *testing.T) {
	for _, answers := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			up := false
			c, r := settler(t, time.Minute, func(time.Duration, int64) error {
				if up {
					return nil
				}
				return errDown
			})
			expect.NoError(t, r.Commit(2))
			time.Sleep(10 * time.Second)
			synctest.Wait()
			up = answers
			began := time.Now()
			expect.NoError(t, c.Close())
			took := time.Since(began)
			given := c.settling.unsettled.Load()
			expect.True(t, (!answers || took <= 100*time.Millisecond && given == 0) && took <= 2*settleTimeout &&
				(answers || given == 1), "nodes answer: %v; closed in %v, %d given up", answers, took, given)
		})
	}
}

// TestSettlingIsBounded: beyond so many the caller is told, and may try again.
func TestSettlingIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, r := settler(t, time.Minute, func(time.Duration, int64) error { return errDown })
		c.settling.now.Add(maxSettling)
		expect.ErrorIs(t, r.Commit(2), ErrUnavailable)
		c.settling.now.Add(-maxSettling)
		expect.NoError(t, r.Commit(2))
	})
}

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

// leased is a service that leases units for 30 s, whose renewals are answered by renew.
func leased(renew func() (time.Duration, error)) *script {
	return &script{
		acquire: func(_ context.Context, a limit.Acquire) (limit.Decision, error) {
			return limit.Decision{Allowed: true, Granted: a.Cost, Limit: 1, Window: 30 * time.Second, LeaseID: "id"},
				nil
		},
		renew:   func(context.Context, string, time.Duration) (time.Duration, error) { return renew() },
		release: func(context.Context, string) (bool, error) { return true, nil },
	}
}

func isLost(l *Lease) bool {
	select {
	case <-l.Lost():
		return true
	default:
		return false
	}
}

func acquire(t *testing.T, c *Client, ttl time.Duration) *Lease {
	t.Helper()
	l, d, err := c.Policy("jobs").AcquireN(t.Context(), "a", 1, ttl)
	must.True(t, err == nil && l != nil, "%v, %+v, %v", l, d, err)
	return l
}

func TestLeaseRenewsAtAThird(t *testing.T) {
	for _, tt := range []struct {
		name  string
		ttl   time.Duration // asked for
		found limit.Decision
		life  time.Duration // told by renewals
		first time.Duration // first renewal
		then  time.Duration // from renewal to renewal
	}{
		{name: "the policy's window", found: limit.Decision{Window: 30 * time.Second}, life: 30 * time.Second,
			first: 10 * time.Second, then: 10 * time.Second},
		{name: "shorter", ttl: 6 * time.Second, found: limit.Decision{Window: 30 * time.Second}, life: 6 * time.Second,
			first: 2 * time.Second, then: 2 * time.Second},
		{name: "longer than the window allows", ttl: time.Minute, found: limit.Decision{Window: 30 * time.Second},
			life: 30 * time.Second, first: 10 * time.Second, then: 10 * time.Second},
		{name: "several limits", found: limit.Decision{Window: time.Hour,
			Limits: []limit.LimitStatus{{Window: time.Hour}, {}, {Window: 3 * time.Second}}},
			life: time.Hour, first: time.Second, then: 20 * time.Minute},
		{name: "unknown", life: 30 * time.Second, first: time.Second / 3, then: 10 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var renewals []time.Duration
				var ttls []time.Duration
				start := time.Now()
				s := leased(nil)
				s.acquire = func(_ context.Context, a limit.Acquire) (limit.Decision, error) {
					ttls = append(ttls, a.TTL)
					d := tt.found
					d.Allowed, d.LeaseID = true, "id"
					return d, nil
				}
				s.renew = func(_ context.Context, _ string, ttl time.Duration) (time.Duration, error) {
					ttls = append(ttls, ttl)
					renewals = append(renewals, time.Since(start))
					return tt.life, nil
				}
				c := scripted(t, s)
				l := acquire(t, c, tt.ttl)
				time.Sleep(tt.first + 2*tt.then)
				synctest.Wait()
				expect.True(t, len(renewals) == 3 && renewals[0] == tt.first && renewals[1] == tt.first+tt.then &&
					renewals[2] == tt.first+2*tt.then,
					"renewed at %v, want %v and every %v", renewals, tt.first, tt.then)
				for _, ttl := range ttls {
					expect.Equal(t, ttl, tt.ttl, "sent times to live %v", ttls)
				}
				expect.NoError(t, l.Release())
				time.Sleep(time.Hour)
				expect.True(t, len(renewals) == 3 && !isLost(l), "%d renewals after release, lost %t", len(renewals)-3,
					isLost(l))
			})
		})
	}
}

func TestLeaseLost(t *testing.T) {
	gone := limit.NewError(limit.NotFound, "lease_id", "has ended")

	t.Run("gone", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			l := acquire(t, scripted(t, leased(func() (time.Duration, error) { return 0, gone })), 0)
			<-l.Lost()
			expect.Equal(t, time.Since(start), 10*time.Second, "lost after")
			expect.NoError(t, l.Release())
		})
	})

	t.Run("out of reach for longer than it lives", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			start, asked := time.Now(), 0
			c := scripted(t, leased(func() (time.Duration, error) { asked++; return 0, unreachable }))
			l := acquire(t, c, 0)
			<-l.Lost()
			expect.Equal(t, time.Since(start), 30*time.Second, "lost after")
			// Every renewal is asked for twice before it counts as failed.
			expect.True(t, asked >= 12 && asked <= 14, "asked %d times", asked)
		})
	})

	t.Run("hung for longer than it lives", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			s := leased(nil)
			s.renew = func(ctx context.Context, _ string, _ time.Duration) (time.Duration, error) {
				<-ctx.Done()
				return 0, unreachable
			}
			l := acquire(t, scripted(t, s), 0)
			<-l.Lost()
			expect.Equal(t, time.Since(start), 30*time.Second, "lost after")
		})
	})

	t.Run("out of reach for a while", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			l := acquire(t, scripted(t, leased(func() (time.Duration, error) {
				if time.Since(start) < 25*time.Second {
					return 0, unreachable
				}
				return 30 * time.Second, nil
			})), 0)
			time.Sleep(time.Hour)
			expect.True(t, !isLost(l), "lost")
			expect.NoError(t, l.Release())
		})
	})

	t.Run("the client is closed", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			c := scripted(t, leased(func() (time.Duration, error) { return 30 * time.Second, nil }))
			l := acquire(t, c, 0)
			expect.NoError(t, c.Close())
			expect.True(t, isLost(l), "not lost")
			expect.Equal(t, l.Release(), ErrClosed, "Release")
		})
	})
}

// The life of a lease is reckoned from before the question, however long its answer took.
func TestLeaseCountsFromTheQuestion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := leased(func() (time.Duration, error) { return 0, unreachable })
		grant := s.acquire
		s.acquire = func(ctx context.Context, a limit.Acquire) (limit.Decision, error) {
			time.Sleep(20 * time.Second)
			return grant(ctx, a)
		}
		c := scripted(t, s, WithTimeout(time.Minute))
		start := time.Now()
		l := acquire(t, c, 0)
		<-l.Lost()
		expect.Equal(t, time.Since(start), 30*time.Second, "lost after")
	})
}

func TestRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down, releases := true, 0
		s := leased(func() (time.Duration, error) { return 30 * time.Second, nil })
		s.release = func(context.Context, string) (bool, error) {
			releases++
			if down {
				return false, unreachable
			}
			return true, nil
		}
		c := scripted(t, s)
		l := acquire(t, c, 0)
		expect.ErrorIs(t, l.Release(), ErrUnavailable, "out of reach")
		down = false
		for range 3 {
			expect.NoError(t, l.Release())
		}
		expect.Equal(t, releases, 3, "releases, want a failed one with its repetition and one more")
	})
	var none *Lease
	err := none.Release()
	expect.True(t, err == nil && none.Lost() == nil, "a nil lease does something")
}

// A failed-open lease holds nothing: no goroutine, nothing to release.
func TestLeaseFailedOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := scripted(t, &script{acquire: func(context.Context, limit.Acquire) (limit.Decision, error) {
			return limit.Decision{}, unreachable
		}})
		l, d, err := c.Policy("jobs").Acquire(t.Context(), "a")
		must.True(t, err == nil && l != nil && d.FailedOpen, "%v, %+v, %v", l, d, err)
		time.Sleep(time.Hour)
		expect.True(t, !isLost(l), "lost")
		expect.NoError(t, l.Release())
	})
}

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

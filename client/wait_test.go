package client

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// script is a limiter.Service whose answers are functions. Methods without one must not be called.
type script struct {
	limit.Service
	check   func(ctx context.Context, ck limit.Check) (limit.Decision, error)
	acquire func(ctx context.Context, a limit.Acquire) (limit.Decision, error)
	renew   func(ctx context.Context, id string, ttl time.Duration) (time.Duration, error)
	release func(ctx context.Context, id string) (bool, error)
	reserve func(ctx context.Context, r limit.Reserve) (limit.Decision, error)
	commit  func(ctx context.Context, id string, cost int64) (int64, error)
	refund  func(ctx context.Context, units int64) (int64, error)
	reset   func(ctx context.Context) error
}

// CheckTo is ended by ctx's Deadline, as that of a cluster.
func (s *script) CheckTo(ctx context.Context, checks []limit.Check, _ limit.Denials,
	results []limit.Result) (err error) {
	ctx, cancel := timed(ctx)
	defer cancel()
	for i, ck := range checks {
		results[i] = limit.Result{}
		if results[i].Decision, err = s.check(ctx, ck); err != nil {
			return err
		}
	}
	return nil
}

// Prepare implements limit.Preparer: it has no handles.
func (s *script) Prepare(*limit.Target, limit.Prepared) limit.Prepared { return nil }

// timed returns a context that ends at its Deadline.
func timed(ctx context.Context) (context.Context, context.CancelFunc) {
	if at, ok := ctx.Deadline(); ok {
		return context.WithDeadline(ctx, at)
	}
	return ctx, func() {}
}

func (s *script) Acquire(ctx context.Context, a limit.Acquire) (limit.Decision, error) {
	return s.acquire(ctx, a)
}

func (s *script) Renew(ctx context.Context, _ limit.Target, id string, ttl time.Duration) (time.Duration, error) {
	ctx, cancel := timed(ctx)
	defer cancel()
	return s.renew(ctx, id, ttl)
}

func (s *script) Release(ctx context.Context, _ limit.Target, id string) (bool, error) {
	return s.release(ctx, id)
}

func (s *script) Reserve(ctx context.Context, r limit.Reserve) (limit.Decision, error) {
	return s.reserve(ctx, r)
}

func (s *script) Commit(ctx context.Context, c limit.Commit) (limit.Settled, error) {
	n, err := s.commit(ctx, c.ReservationID, c.Cost)
	return limit.Settled{Refunded: n}, err
}

func (s *script) Refund(ctx context.Context, _ limit.Target, units int64, _ string) (int64, error) {
	return s.refund(ctx, units)
}

func (s *script) Reset(ctx context.Context, _ limit.Target) error { return s.reset(ctx) }

// scripted returns a Client of s with the options of Dial.
func scripted(t *testing.T, s *script, opts ...Option) *Client {
	t.Helper()
	o := must.Value(dialOptions(opts))(t)
	c := newClient(s, func() {}, o)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// answers returns a check function that gives each of ds in turn, and the instants at which it was asked.
func answers(ds ...limit.Decision) (check func(context.Context,
	limit.Check) (limit.Decision, error), asked *[]time.Duration) {
	start := time.Now()
	asked = new([]time.Duration)
	return func(context.Context, limit.Check) (limit.Decision, error) {
		*asked = append(*asked, time.Since(start))
		d := ds[0]
		if len(ds) > 1 {
			ds = ds[1:]
		}
		return d, nil
	}, asked
}

var (
	admitted = limit.Decision{Allowed: true, Granted: 1}
	in10s    = limit.Decision{RetryAfter: 10 * time.Second}
)

func TestWait(t *testing.T) {
	for _, tt := range []struct {
		name     string
		answers  []limit.Decision
		deadline time.Duration // 0: none
		want     error
		asked    int           // questions
		min, max time.Duration // how long it takes
	}{
		{name: "at once", answers: []limit.Decision{admitted}, asked: 1},
		{name: "after one refusal", answers: []limit.Decision{in10s, admitted}, asked: 2,
			min: 10 * time.Second, max: 10*time.Second + maxSpread},
		{name: "after two", answers: []limit.Decision{in10s, in10s, admitted}, asked: 3,
			min: 20 * time.Second, max: 20*time.Second + 2*maxSpread},
		{name: "no busy loop", answers: []limit.Decision{{RetryAfter: 1}, {RetryAfter: 0}, admitted}, asked: 3,
			min: 2 * minSleep, max: 2 * (minSleep + minSleep/8)},
		{name: "never", answers: []limit.Decision{{RetryAfter: Never}}, want: ErrNever, asked: 1},
		{name: "within the deadline", answers: []limit.Decision{in10s, admitted}, deadline: 10*time.Second + 1,
			asked: 2,
			min:   10 * time.Second, max: 10 * time.Second},
		{name: "beyond the deadline", answers: []limit.Decision{in10s}, deadline: 10*time.Second - 1, want: ErrDeadline,
			asked: 1},
		{name: "refused again, then beyond the deadline", answers: []limit.Decision{in10s}, deadline: 15 * time.Second,
			want: ErrDeadline, asked: 2, min: 10 * time.Second, max: 10*time.Second + maxSpread},
		{name: "queue", answers: []limit.Decision{in10s, {Allowed: true, Delay: 5 * time.Second}}, asked: 2,
			min: 15 * time.Second, max: 15*time.Second + maxSpread},
		{name: "the cluster fails open", answers: []limit.Decision{{Allowed: true, FailedOpen: true}}, asked: 1},
		{name: "the cluster fails closed for a while",
			answers: []limit.Decision{{FailedClosed: true, RetryAfter: Never}, {FailedClosed: true}, admitted},
			asked:   3, min: 2 * failedRetry, max: 2 * (failedRetry + maxSpread)},
		{name: "the cluster fails closed until the deadline", answers: []limit.Decision{{FailedClosed: true}},
			deadline: 2*failedRetry + failedRetry/2,
			want:     ErrUnavailable, asked: 3, min: 2 * failedRetry, max: 2 * (failedRetry + maxSpread)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				check, asked := answers(tt.answers...)
				c := scripted(t, &script{check: check})
				ctx := t.Context()
				if tt.deadline != 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.deadline)
					defer cancel()
				}
				start := time.Now()
				d, err := c.Policy("p").Wait(ctx, "a")
				took := time.Since(start)
				expect.ErrorIs(t, err, tt.want)
				last := tt.answers[len(tt.answers)-1]
				expect.True(t, d.Allowed == last.Allowed && d.Delay == last.Delay &&
					d.FailedClosed == last.FailedClosed, "the decision is %+v, want %+v", d, last)
				expect.True(t, len(*asked) == tt.asked, "asked at %v, want %d times", *asked, tt.asked)
				expect.True(t, took >= tt.min && took <= tt.max, "took %v, want %v to %v", took, tt.min, tt.max)
			})
		})
	}
}

// A place in the queue that comes too late is given back at once.
func TestWaitGivesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		check, _ := answers(limit.Decision{Allowed: true, Granted: 3, Delay: 10 * time.Second})
		var refunds []int64
		refund := func(_ context.Context, units int64) (int64, error) {
			refunds = append(refunds, units)
			return units, nil
		}
		c := scripted(t, &script{check: check, refund: refund})
		ctx, cancel := context.WithTimeout(t.Context(), 9*time.Second)
		defer cancel()
		start := time.Now()
		d, err := c.Policy("p").WaitN(ctx, "a", 3)
		expect.True(t, errors.Is(err, ErrDeadline) && d.Delay == 10*time.Second, "%+v, %v", d, err)
		expect.True(t, len(refunds) == 1 && refunds[0] == 3, "refunded %v, want 3 once", refunds)
		expect.Equal(t, time.Since(start), 0, "took")
	})
}

// Whatever Wait is doing, it ends when its context does and when the client is closed.
func TestWaitEnds(t *testing.T) {
	sleeping := func(context.Context, limit.Check) (limit.Decision, error) { return in10s, nil }
	queued := func(context.Context, limit.Check) (limit.Decision, error) {
		return limit.Decision{Allowed: true, Granted: 1, Delay: 10 * time.Second}, nil
	}
	asking := func(ctx context.Context, _ limit.Check) (limit.Decision, error) {
		<-ctx.Done()
		return limit.Decision{}, ctx.Err()
	}
	for name, check := range map[string]func(context.Context, limit.Check) (limit.Decision, error){
		"sleeping": sleeping, "queued": queued, "asking": asking,
	} {
		t.Run(name+" when ctx ends", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := scripted(t, &script{check: check}, WithTimeout(time.Minute))
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(time.Second, cancel)
				start := time.Now()
				_, err := c.Policy("p").Wait(ctx, "a")
				expect.Equal(t, err, context.Canceled)
				expect.Equal(t, time.Since(start), time.Second, "took")
			})
		})
	}
	for name, check := range map[string]func(context.Context, limit.Check) (limit.Decision, error){
		"sleeping": sleeping, "queued": queued,
	} {
		t.Run(name+" when the client is closed", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := scripted(t, &script{check: check})
				time.AfterFunc(time.Second, func() { _ = c.Close() })
				_, err := c.Policy("p").Wait(t.Context(), "a")
				expect.Equal(t, err, ErrClosed)
			})
		})
	}
}

// Many waiters share what a limit gives, and each gets through.
func TestWaitersShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const every, waiters = 100 * time.Millisecond, 20
		var mu sync.Mutex
		next, asked := time.Now(), 0
		c := scripted(t, &script{check: func(context.Context, limit.Check) (limit.Decision, error) {
			mu.Lock()
			defer mu.Unlock()
			asked++
			if now := time.Now(); now.Before(next) {
				return limit.Decision{RetryAfter: next.Sub(now)}, nil
			}
			next = time.Now().Add(every)
			return admitted, nil
		}})
		start := time.Now()
		var wg sync.WaitGroup
		for range waiters {
			wg.Go(func() {
				_, err := c.Policy("p").Wait(t.Context(), "a")
				expect.NoError(t, err)
			})
		}
		wg.Wait()
		if took, least := time.Since(start), (waiters-1)*every; took < least || took > least*5/4 {
			t.Errorf("%d waiters took %v, want %v and a little", waiters, took, least)
		}
		most := waiters * (waiters + 1) / 2
		expect.True(t, asked <= most, "asked %d times, want at most %d", asked, most)
	})
}

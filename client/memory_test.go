package client

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// refusedBy answers every check with a refusal that may be remembered, and counts them.
func refusedBy(d limit.Decision) (*script, *int) {
	asked := 0
	return &script{
		check: func(context.Context, limit.Check) (limit.Decision, error) {
			asked++
			return d, nil
		},
		refund: func(context.Context, int64) (int64, error) { return 1, nil },
		reset:  func(context.Context) error { return nil },
		commit: func(context.Context, string, int64) (int64, error) { return 1, nil },
		reserve: func(_ context.Context, r limit.Reserve) (limit.Decision, error) {
			return limit.Decision{Allowed: true, Granted: r.Cost, ReservationID: "r"}, nil
		},
	}, &asked
}

var full = limit.Decision{Policy: "p", Limit: 5, Remaining: 1, RetryAfter: 3 * time.Second,
	ResetAfter: 500 * time.Millisecond, RememberFor: time.Second,
	Limits: []limit.LimitStatus{{Limit: 5, RetryAfter: 3 * time.Second, ResetAfter: 8 * time.Second},
		{Limit: 4, ResetAfter: time.Second}}}

func TestARefusalIsRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, asked := refusedBy(full)
		p := scripted(t, s).Policy("p")
		want := func(n int, cost int64, left time.Duration) {
			t.Helper()
			d, err := p.AllowN(t.Context(), "a", cost)
			expect.True(t, err == nil && !d.Allowed && d.Remaining == 1 && d.Limit == 5, "%+v, %v", d, err)
			// Clocks may disagree by a five hundredth, in favour of waiting longer.
			expect.True(t, d.RetryAfter >= left && d.RetryAfter <= left+2*time.Millisecond &&
				d.Limits[0].RetryAfter == d.RetryAfter && d.Limits[1].RetryAfter == 0,
				"retry after %v, %+v; want %v", d.RetryAfter, d.Limits, left)
			expect.True(t, *asked == n, "asked %d times, want %d", *asked, n)
		}
		want(1, 2, 3*time.Second)
		time.Sleep(300 * time.Millisecond)
		want(1, 2, 2700*time.Millisecond)
		want(2, 4, 3*time.Second) // of more: its retry_after is another one
		want(2, 4, 3*time.Second)
		time.Sleep(690 * time.Millisecond)
		want(2, 2, 2010*time.Millisecond)
		want(2, 4, 2310*time.Millisecond)
		want(3, 1, 3*time.Second) // of less
		want(3, 2, 2010*time.Millisecond)
		d, _ := p.AllowN(t.Context(), "b", 2)
		expect.True(t, !d.Allowed && *asked == 4, "another key: %+v, asked %d times", d, *asked)
		time.Sleep(time.Second)
		want(5, 2, 3*time.Second)
	})
}

// TestAdmittedFromALoanIsAskedAgain: who was refused more has to wait for longer when the client admits from a loan.
func TestAdmittedFromALoanIsAskedAgain(t *testing.T) {
	for name, admit := range map[string]func(c *Client) (bool, error){
		"alone": func(c *Client) (bool, error) {
			d, err := c.Policy("p").Allow(t.Context(), "a")
			return d.Allowed, err
		},
		"of a batch": func(c *Client) (bool, error) {
			r, err := c.Check(t.Context(), []Check{{Policy: "p", Key: "a", Cost: 1}})
			return err == nil && r[0].Allowed, err
		},
		"all": func(c *Client) (bool, error) {
			all, err := c.All(t.Context(), []Check{{Policy: "p", Key: "a", Cost: 1}})
			return all.Allowed, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, asked := refusedBy(full)
			c := scripted(t, s)
			c.loans = newLoans(nil, systemClocks())
			key := loanKey{of: "p", key: "a"}
			for c.loans.book.Loans() == 0 {
				c.loans.missed(key, 1, &Decision{Allowed: true, Limit: 5}, true)
			}
			now := c.loans.clock()
			for _, r := range first(c.loans.book.Report(now)) {
				c.loans.book.Answered(now, now,
					[]lend.Answer[*member]{{Number: r.Number, Lent: limit.Lent{Granted: 10, Term: time.Hour}}})
			}
			p := c.Policy("p")
			for range 2 {
				d, err := p.AllowN(t.Context(), "a", 20)
				must.True(t, err == nil && !d.Allowed && *asked == 1, "%+v, %v, asked %d times", d, err, *asked)
			}
			ok, err := admit(c)
			must.True(t, err == nil && ok && *asked == 1, "%v, %v, asked %d times", ok, err, *asked)
			d, err := p.AllowN(t.Context(), "a", 20)
			must.True(t, err == nil && !d.Allowed && *asked == 2, "%+v, %v, asked %d times", d, err, *asked)
		})
	}
}

func first[A, B any](a A, _ B) A { return a }

// TestARefusalIsRememberedFromTheQuestion counts from when it was sent: the answer may be old when it comes.
func TestARefusalIsRememberedFromTheQuestion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, asked := refusedBy(full)
		check := s.check
		s.check = func(ctx context.Context, ck limit.Check) (limit.Decision, error) {
			time.Sleep(400 * time.Millisecond)
			return check(ctx, ck)
		}
		p := scripted(t, s).Policy("p")
		for i, want := range []int{1, 1, 2} {
			_, err := p.Allow(t.Context(), "a")
			expect.NoError(t, err)
			expect.True(t, *asked == want, "question %d: asked %d times, want %d", i, *asked, want)
			time.Sleep(500 * time.Millisecond)
		}
	})
}

func TestWhatIsAskedAgain(t *testing.T) {
	small := &algo.Limit{Algorithm: algo.SlidingLog, Limit: 1, Window: time.Minute}
	large := &algo.Limit{Algorithm: algo.SlidingLog, Limit: 2, Window: time.Minute}
	not := full
	not.RememberFor = 0
	shadow := full
	shadow.Allowed, shadow.Shadow = true, true
	ask := func(ck Check) func(*testing.T, *Client) {
		return func(t *testing.T, c *Client) {
			_, err := c.Check(t.Context(), []Check{ck})
			expect.NoError(t, err)
		}
	}
	plain := Check{Policy: "p", Key: "a"}
	for _, tt := range []struct {
		name   string
		answer limit.Decision
		opts   []Option
		first  Check
		do     func(*testing.T, *Client)
		asked  int
	}{
		{name: "a plain one is not", answer: full, first: plain, do: ask(plain), asked: 1},
		{name: "an inline one is not", answer: full, first: Check{Limit: small, Key: "a"},
			do: ask(Check{Limit: small, Key: "a"}), asked: 1},
		{name: "with WithRetry it is not", answer: full, opts: []Option{WithRetry()}, first: plain, do: ask(plain),
			asked: 1},
		{name: "one under the caller's id, asked again without", answer: full,
			first: Check{Policy: "p", Key: "a", RequestID: "r"}, do: ask(plain), asked: 1},
		{name: "WithoutMemory", answer: full, opts: []Option{WithoutMemory()}, first: plain, do: ask(plain), asked: 2},
		{name: "what may not be remembered", answer: not, first: plain, do: ask(plain), asked: 2},
		{name: "shadow", answer: shadow, first: plain, do: ask(plain), asked: 2},
		{name: "partial", answer: full, first: Check{Policy: "p", Key: "a", Partial: true}, do: ask(plain), asked: 2},
		{name: "asked partially", answer: full, first: plain, do: ask(Check{Policy: "p", Key: "a", Partial: true}),
			asked: 2},
		{name: "peek", answer: full, first: plain, do: ask(Check{Policy: "p", Key: "a", Peek: true}), asked: 2},
		{name: "request id", answer: full, first: plain, do: ask(Check{Policy: "p", Key: "a", RequestID: "r"}),
			asked: 2},
		{name: "another limit", answer: full, first: Check{Limit: small, Key: "a"},
			do: ask(Check{Limit: large, Key: "a"}), asked: 2},
		{name: "refund", answer: full, first: plain, asked: 2, do: func(t *testing.T, c *Client) {
			_, err := c.Policy("p").Refund(t.Context(), "a", 1)
			expect.NoError(t, err)
			ask(plain)(t, c)
		}},
		{name: "refund under another limit", answer: full, first: Check{Limit: small, Key: "a"}, asked: 2,
			do: func(t *testing.T, c *Client) {
				_, err := c.Inline("", *large).Refund(t.Context(), "a", 1)
				expect.NoError(t, err)
				ask(Check{Limit: small, Key: "a"})(t, c)
			}},
		{name: "reset", answer: full, first: plain, asked: 2, do: func(t *testing.T, c *Client) {
			expect.NoError(t, c.Policy("p").Reset(t.Context(), "a"))
			ask(plain)(t, c)
		}},
		{name: "cancel", answer: full, first: plain, asked: 2, do: func(t *testing.T, c *Client) {
			r, _, err := c.Policy("p").Reserve(t.Context(), "a")
			expect.True(t, err == nil && r.Cancel() == nil, "%v", err)
			ask(plain)(t, c)
		}},
		{name: "a batch of which all are known", answer: full, first: plain, asked: 1,
			do: func(t *testing.T, c *Client) {
				rs, err := c.Check(t.Context(), []Check{plain, plain})
				expect.True(t, err == nil && len(rs) == 2 && rs[1].RetryAfter != 0, "%+v, %v", rs, err)
			}},
		{name: "a batch of which one is not", answer: full, first: plain, asked: 2, do: func(t *testing.T, c *Client) {
			rs, err := c.Check(t.Context(), []Check{plain, {Policy: "p", Key: "b"}})
			expect.True(t, err == nil && len(rs) == 2 && rs[0].RetryAfter != 0, "%+v, %v", rs, err)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, asked := refusedBy(tt.answer)
				c := scripted(t, s, tt.opts...)
				ask(tt.first)(t, c)
				tt.do(t, c)
				expect.True(t, *asked == tt.asked, "asked %d times, want %d", *asked, tt.asked)
			})
		})
	}
}

// One hash for all that is remembered: each refusal answers what it was about, and nothing else.
func TestRefusalsOfEqualHashes(t *testing.T) {
	limit := &algo.Limit{Algorithm: algo.SlidingLog, Limit: 1, Window: time.Minute}
	synctest.Test(t, func(t *testing.T) {
		s, asked := refusedBy(full)
		c := scripted(t, s)
		c.memory.hash = func([3]string) uint64 { return 7 }
		for i, ck := range []Check{
			{Policy: "p", Key: "a"}, {Policy: "p", Key: "b"}, {Policy: "q", Key: "a"},
			{Limit: limit, Key: "a"}, {Limit: limit, Key: "b"}, {Limit: limit, Namespace: "p", Key: "a"},
		} {
			for range 2 { // the second time from memory
				_, err := c.Check(t.Context(), []Check{ck})
				expect.NoError(t, err)
			}
			expect.True(t, *asked == i+1, "%+v: asked %d times, want %d", ck, *asked, i+1)
		}
	})
}

func TestARefusalInFlightIsNotRememberedPastARefund(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, asked := refusedBy(full)
		c := scripted(t, s)
		check := s.check
		s.check = func(ctx context.Context, ck limit.Check) (limit.Decision, error) {
			defer func() { s.check = check }()
			_, err := c.Policy("p").Refund(ctx, "a", 1)
			expect.NoError(t, err)
			return check(ctx, ck)
		}
		for range 2 {
			_, err := c.Policy("p").Allow(t.Context(), "a")
			expect.NoError(t, err)
		}
		expect.True(t, *asked == 2, "asked %d times", *asked)
	})
}

// TestMemoryOverTheWire has a real service refuse over gRPC: the node says for how long.
func TestMemoryOverTheWire(t *testing.T) {
	l := limiter.New(limiter.Config{})
	t.Cleanup(l.Close)
	n := nodeOver(l)
	addr, _ := serve(t, n)
	c := dial(t, addr)
	five := c.Inline("", algo.Limit{Algorithm: algo.SlidingLog, Limit: 5, Window: time.Hour})
	for i := range 50 {
		d, err := five.Allow(t.Context(), "a")
		must.True(t, err == nil && d.Allowed == (i < 5), "%d: %+v, %v", i, d, err)
	}
	asked := n.asked.Load()
	expect.True(t, asked >= 6 && asked <= 10, "asked %d times", asked)
}

func TestReservationsThatAreNotAnswered(t *testing.T) {
	down := &limit.Error{Kind: limit.Unavailable, Message: "down"}
	gone := limit.NewError(limit.NotFound, "reservation_id", "is not pending")
	for _, tt := range []struct {
		name    string
		answers []error       // of each attempt
		before  time.Duration // passes before the first
		calls   []error       // what each Commit returns
	}{
		{name: "at once", answers: []error{nil}, calls: []error{nil, nil}},
		{name: "run out", answers: []error{gone, gone}, calls: []error{ErrNotFound, ErrNotFound}},
		{name: "the first call did it", answers: []error{down, down, gone}, calls: []error{nil, nil}},
		{name: "perhaps it has run out", answers: []error{down, gone}, before: time.Minute,
			calls: []error{ErrNotFound}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, _ := refusedBy(full)
				left := tt.answers
				s.commit = func(context.Context, string, int64) (int64, error) {
					err := left[0]
					left = left[1:]
					return 0, err
				}
				r, _, err := scripted(t, s).Policy("p").ReserveN(t.Context(), "a", 3, 0)
				must.NoError(t, err)
				time.Sleep(tt.before)
				for i, want := range tt.calls {
					if err := r.Commit(2); !errors.Is(err, want) || want == nil && err != nil {
						t.Errorf("call %d: %v, want %v", i, err, want)
					}
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				expect.True(t, len(left) == 0, "%d attempts too few", len(left))
			})
		})
	}
}

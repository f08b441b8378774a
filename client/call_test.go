package client

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/limit"
)

// unreachable is what a node that cannot be reached answers.
var unreachable = &limit.Error{Kind: limit.Unavailable, Message: "unreachable"}

// hang is a node that never answers.
func hang(ctx context.Context, _ limit.Check) (limit.Decision, error) {
	<-ctx.Done()
	return limit.Decision{}, &limit.Error{Kind: limit.Unavailable, Message: ctx.Err().Error()}
}

func TestDeadlines(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts []Option
		left time.Duration // of the context; 0: no deadline
		took time.Duration
	}{
		{name: "default", took: DefaultTimeout},
		{name: "own", opts: []Option{WithTimeout(300 * time.Millisecond)}, took: 300 * time.Millisecond},
		{name: "the context's is later", left: time.Hour, took: DefaultTimeout},
		{name: "the context's is sooner", left: 100 * time.Millisecond, took: 90 * time.Millisecond},
		{name: "with retry", opts: []Option{WithRetry()}, took: DefaultTimeout},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := scripted(t, &script{check: hang}, tt.opts...)
				ctx := t.Context()
				if tt.left != 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.left)
					defer cancel()
				}
				start := time.Now()
				d, err := c.Policy("p").AllowN(ctx, "a", 2)
				if err != nil || !d.Allowed || !d.FailedOpen || d.Granted != 2 || d.Policy != "p" {
					t.Errorf("%+v, %v", d, err)
				}
				if took := time.Since(start); took != tt.took {
					t.Errorf("took %v, want %v", took, tt.took)
				}
			})
		})
	}
}

func TestFailClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{
			check: func(context.Context, limit.Check) (limit.Decision, error) { return limit.Decision{}, unreachable },
			acquire: func(context.Context, limit.Acquire) (limit.Decision, error) {
				return limit.Decision{}, unreachable
			},
		}
		c := scripted(t, s, WithOnError(FailClosed))
		want := func(d Decision, err error) {
			t.Helper()
			if err != nil || d.Allowed || d.Granted != 0 || !d.FailedClosed || d.FailedOpen || d.RetryAfter != failedRetry {
				t.Errorf("%+v, %v", d, err)
			}
		}
		want(c.Policy("p").Allow(t.Context(), "a"))
		want(c.Policy("p").Peek(t.Context(), "a"))
		l, d, err := c.Policy("p").Acquire(t.Context(), "a")
		want(d, err)
		if l != nil {
			t.Error("a lease from nobody")
		}
	})
}

func TestRetry(t *testing.T) {
	// First is what a node does with the first question; the second is answered.
	first := map[string]func(context.Context, limit.Check) (limit.Decision, error){
		"unreachable": func(context.Context, limit.Check) (limit.Decision, error) { return limit.Decision{}, unreachable },
		"hung":        hang,
	}
	for name, first := range first {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var ids []string
				check := func(ctx context.Context, ck limit.Check) (limit.Decision, error) {
					ids = append(ids, ck.RequestID)
					if len(ids) == 1 {
						return first(ctx, ck)
					}
					return admitted, nil
				}
				c := scripted(t, &script{check: check}, WithRetry())
				d, err := c.Policy("p").Allow(t.Context(), "a")
				if err != nil || !d.Allowed || d.FailedOpen {
					t.Errorf("%+v, %v", d, err)
				}
				if len(ids) != 2 || ids[0] != ids[1] || ids[0] == "" || len(ids[0]) > limit.MaxRequestID {
					t.Errorf("request ids %q, want the same one twice", ids)
				}
				if _, err := c.Policy("p").Allow(t.Context(), "a"); err != nil || ids[2] == ids[0] {
					t.Errorf("%q, %v: another question has the same id", ids, err)
				}
				if _, err := c.Policy("p").Peek(t.Context(), "a"); err != nil || ids[3] != "" {
					t.Errorf("%q, %v: a peek has an id", ids, err)
				}
			})
		})
	}

	t.Run("off", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var ids []string
			c := scripted(t, &script{check: func(_ context.Context, ck limit.Check) (limit.Decision, error) {
				ids = append(ids, ck.RequestID)
				return limit.Decision{}, unreachable
			}})
			if d, err := c.Policy("p").Allow(t.Context(), "a"); err != nil || !d.FailedOpen {
				t.Errorf("%+v, %v", d, err)
			}
			if len(ids) != 1 || ids[0] != "" {
				t.Errorf("request ids %q, want one question without", ids)
			}
		})
	})

	t.Run("a refund is not repeated, a reset is", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			refunds, resets := 0, 0
			c := scripted(t, &script{
				refund: func(context.Context, int64) (int64, error) { refunds++; return 0, unreachable },
				reset:  func(context.Context) error { resets++; return unreachable },
			})
			if _, err := c.Policy("p").Refund(t.Context(), "a", 1); !errors.Is(err, ErrUnavailable) || refunds != 1 {
				t.Errorf("%d refunds, %v", refunds, err)
			}
			if err := c.Policy("p").Reset(t.Context(), "a"); !errors.Is(err, ErrUnavailable) || resets != 2 {
				t.Errorf("%d resets, %v", resets, err)
			}
		})
	})
}

func TestBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, down := 0, true
		c := scripted(t, &script{check: func(ctx context.Context, ck limit.Check) (limit.Decision, error) {
			asked++
			if down {
				return hang(ctx, ck)
			}
			return admitted, nil
		}}, WithBreaker(3, 10*time.Second))
		p := c.Policy("p")
		allow := func(what string, failed bool, took time.Duration, questions int) {
			t.Helper()
			start, before := time.Now(), asked
			d, err := p.Allow(t.Context(), "a")
			if err != nil || !d.Allowed || d.FailedOpen != failed || time.Since(start) != took || asked-before != questions {
				t.Errorf("%s: %+v, %v in %v with %d questions", what, d, err, time.Since(start), asked-before)
			}
		}
		for range 3 {
			allow("closed", true, time.Second, 1)
		}
		allow("open", true, 0, 0)
		time.Sleep(10*time.Second - 1)
		allow("still open", true, 0, 0)
		time.Sleep(time.Nanosecond)

		// One question finds out whether a node answers; the others do not wait for it.
		probed := make(chan struct{})
		go func() {
			defer close(probed)
			allow("probe", true, time.Second, 1)
		}()
		synctest.Wait()
		allow("beside the probe", true, 0, 0)
		<-probed
		allow("open again", true, 0, 0)

		down = false
		time.Sleep(10 * time.Second)
		allow("successful probe", false, 0, 1)
		for range 3 {
			allow("closed again", false, 0, 1)
		}

		// Only failures in a row count.
		for range 5 {
			down = true
			allow("failure", true, time.Second, 1)
			allow("failure", true, time.Second, 1)
			down = false
			allow("success", false, 0, 1)
		}
	})
}

// Callers in a hurry, callers that go away and requests at fault tell nothing of the cluster.
func TestBreakerIgnores(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answer := hang
		c := scripted(t, &script{check: func(ctx context.Context, ck limit.Check) (limit.Decision, error) {
			return answer(ctx, ck)
		}}, WithBreaker(1, time.Hour))
		p := c.Policy("p")
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			if d, err := p.Allow(ctx, "a"); err != nil || !d.FailedOpen {
				t.Errorf("hurried: %+v, %v", d, err)
			}
			cancel()
			ctx, cancel = context.WithCancel(t.Context())
			time.AfterFunc(time.Millisecond, cancel)
			if _, err := p.Allow(ctx, "a"); err != context.Canceled {
				t.Errorf("cancelled: %v", err)
			}
		}
		answer = func(context.Context, limit.Check) (limit.Decision, error) {
			return limit.Decision{}, limit.NewError(limit.NotFound, "policy", "unknown")
		}
		if _, err := p.Allow(t.Context(), "a"); !errors.Is(err, ErrNotFound) {
			t.Errorf("not found: %v", err)
		}
		answer = func(context.Context, limit.Check) (limit.Decision, error) { return admitted, nil }
		if d, err := p.Allow(t.Context(), "a"); err != nil || d.FailedOpen {
			t.Errorf("the breaker is open: %+v, %v", d, err)
		}
	})
}

// A probe whose caller goes away leaves the next one to try.
func TestBreakerProbeAbandoned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker{threshold: 1, cooldown: time.Second}
		if probe, ok := b.allow(); probe || !ok {
			t.Fatal("closed")
		}
		b.done(false, unanswered)
		if _, ok := b.allow(); ok {
			t.Error("open")
		}
		time.Sleep(time.Second)
		for range 3 {
			if probe, ok := b.allow(); !probe || !ok {
				t.Error("no probe")
			}
			b.done(true, unknown)
		}
		// A late answer to a question from before is as good as a probe's.
		b.done(false, answered)
		if probe, ok := b.allow(); probe || !ok {
			t.Error("still open")
		}
	})
}

func TestOptions(t *testing.T) {
	for name, opt := range map[string]Option{
		"WithTimeout": WithTimeout(0),
		"WithOnError": WithOnError(7),
		"WithBreaker": WithBreaker(-1, time.Second),
	} {
		if _, err := Dial(t.Context(), "localhost:1", opt); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Dial(t.Context(), "localhost:1", WithBreaker(1, 0)); !errors.Is(err, ErrInvalid) {
		t.Errorf("no cooldown: %v", err)
	}
}

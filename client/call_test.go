package client

import (
	"context"
	"crypto/tls"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
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
				expect.True(t, err == nil && d.Allowed && d.FailedOpen && d.Granted == 2 && d.Policy == "p",
					"%+v, %v", d, err)
				expect.Equal(t, time.Since(start), tt.took, "took")
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
			expect.True(t, err == nil && !d.Allowed && d.Granted == 0 && d.FailedClosed && !d.FailedOpen &&
				d.RetryAfter == failedRetry, "%+v, %v", d, err)
		}
		want(c.Policy("p").Allow(t.Context(), "a"))
		want(c.Policy("p").Peek(t.Context(), "a"))
		l, d, err := c.Policy("p").Acquire(t.Context(), "a")
		want(d, err)
		expect.Equal(t, l, nil, "a lease from nobody")
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
				expect.True(t, err == nil && d.Allowed && !d.FailedOpen, "%+v, %v", d, err)
				expect.True(t, len(ids) == 2 && ids[0] == ids[1] && ids[0] != "" && len(ids[0]) <= limit.MaxRequestID,
					"request ids %q, want the same one twice", ids)
				_, err = c.Policy("p").Allow(t.Context(), "a")
				expect.True(t, err == nil && ids[2] != ids[0], "%q, %v: another question has the same id", ids, err)
				_, err = c.Policy("p").Peek(t.Context(), "a")
				expect.True(t, err == nil && ids[3] == "", "%q, %v: a peek has an id", ids, err)
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
			d, err := c.Policy("p").Allow(t.Context(), "a")
			expect.True(t, err == nil && d.FailedOpen, "%+v, %v", d, err)
			expect.True(t, len(ids) == 1 && ids[0] == "", "request ids %q, want one question without", ids)
		})
	})

	t.Run("a refund is not repeated, a reset is", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			refunds, resets := 0, 0
			c := scripted(t, &script{
				refund: func(context.Context, int64) (int64, error) { refunds++; return 0, unreachable },
				reset:  func(context.Context) error { resets++; return unreachable },
			})
			_, err := c.Policy("p").Refund(t.Context(), "a", 1)
			expect.True(t, errors.Is(err, ErrUnavailable) && refunds == 1, "%d refunds, %v", refunds, err)
			err = c.Policy("p").Reset(t.Context(), "a")
			expect.True(t, errors.Is(err, ErrUnavailable) && resets == 2, "%d resets, %v", resets, err)
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
			expect.True(t, err == nil && d.Allowed && d.FailedOpen == failed && time.Since(start) == took &&
				asked-before == questions,
				"%s: %+v, %v in %v with %d questions", what, d, err, time.Since(start), asked-before)
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
			d, err := p.Allow(ctx, "a")
			expect.True(t, err == nil && d.FailedOpen, "hurried: %+v, %v", d, err)
			cancel()
			ctx, cancel = context.WithCancel(t.Context())
			time.AfterFunc(time.Millisecond, cancel)
			_, err = p.Allow(ctx, "a")
			expect.Equal(t, err, context.Canceled, "cancelled")
		}
		answer = func(context.Context, limit.Check) (limit.Decision, error) {
			return limit.Decision{}, limit.NewError(limit.NotFound, "policy", "unknown")
		}
		_, err := p.Allow(t.Context(), "a")
		expect.ErrorIs(t, err, ErrNotFound, "not found")
		answer = func(context.Context, limit.Check) (limit.Decision, error) { return admitted, nil }
		d, err := p.Allow(t.Context(), "a")
		expect.True(t, err == nil && !d.FailedOpen, "the breaker is open: %+v, %v", d, err)
	})
}

// A probe whose caller goes away leaves the next one to try.
func TestBreakerProbeAbandoned(t *testing.T) {
	b := breaker{threshold: 1, cooldown: time.Second}
	allow := func(now time.Duration, wantProbe, want bool, what string) {
		t.Helper()
		probe, ok := b.allow(now)
		expect.True(t, probe == wantProbe && ok == want, "%s: probe %v, ok %v", what, probe, ok)
	}
	allow(0, false, true, "closed")
	b.done(1, false, unanswered)
	allow(time.Second, false, false, "open")
	for range 3 {
		allow(time.Second+1, true, true, "cooled down")
		allow(time.Second+1, false, false, "beside a probe")
		b.done(time.Second+1, true, unknown)
	}
	// A late answer to a question from before is as good as a probe's.
	b.done(time.Second+1, false, answered)
	allow(time.Second+1, false, true, "answered")
}

func TestOptions(t *testing.T) {
	for name, opt := range map[string]Option{
		"WithTimeout": WithTimeout(0),
		"WithOnError": WithOnError(7),
		"WithBreaker": WithBreaker(-1, time.Second),
	} {
		_, err := Dial(t.Context(), "localhost:1", opt)
		expect.ErrorIs(t, err, ErrInvalid, "%s", name)
	}
	_, err := Dial(t.Context(), "localhost:1", WithBreaker(1, 0))
	expect.ErrorIs(t, err, ErrInvalid, "no cooldown")
}

// TestWithoutTLSConfig: a nil configuration does not turn encryption off.
func TestWithoutTLSConfig(t *testing.T) {
	o := must.Value(dialOptions([]Option{WithTLS(nil)}))(t)
	expect.True(t, o.tls != nil, "a nil configuration stands for plain text")
}

// TestCommitWhileClosing: a node's answer counts, even if the Client is closed meanwhile.
func TestCommitWhileClosing(t *testing.T) {
	var c *Client
	s := &script{
		reserve: func(context.Context, limit.Reserve) (limit.Decision, error) {
			return limit.Decision{Allowed: true, Granted: 3, ReservationID: "r"}, nil
		},
		commit: func(context.Context, string, int64) (int64, error) {
			c.cancel() // as Close does
			return 2, nil
		},
	}
	c = scripted(t, s)
	r, _, err := c.Policy("p").ReserveN(t.Context(), "a", 3, 0)
	must.NoError(t, err)
	got, err := r.CommitCost(1)
	expect.True(t, err == nil && got.Refunded == 2, "%+v, %v", got, err)
}

// TestTokenNeedsTLS: a token goes to other hosts over TLS only.
func TestTokenNeedsTLS(t *testing.T) {
	for _, c := range []struct {
		address, token string
		tls            *tls.Config
		ok             bool
	}{
		{"127.0.0.1:8081", "t", nil, true},
		{"[::1]:8081,localhost:8082", "t", nil, true},
		{"unix:/run/weir.sock", "t", nil, true},
		{"weir:8081", "t", nil, false},
		{"127.0.0.1:8081,192.0.2.1:8081", "t", nil, false},
		{"dns:///127.0.0.1:8081", "t", nil, true},
		{"dns://192.0.2.1/127.0.0.1:8081", "t", nil, false}, // whatever it leads to
		{"weir:8081", "t", &tls.Config{}, true},
		{"weir:8081", "", nil, true},
		{"127.0.0.1:8081", "two words", nil, false},
		{"127.0.0.1:8081", "line\n", nil, false},
	} {
		opts := []Option{WithToken(c.token)}
		if c.tls != nil {
			opts = append(opts, WithTLS(c.tls))
		}
		cl, err := Dial(t.Context(), c.address, opts...)
		expect.True(t, (err == nil) == c.ok && (err == nil || errors.Is(err, ErrInvalid)),
			"%s with %q: %v", c.address, c.token, err)
		if err == nil {
			cl.Close()
		}
	}
}

// FuzzAnswers: whatever a node answers to a message on a stream, each question in it has its answer, an error, or is
// asked again, once; and what is no answer ends the stream.
func FuzzAnswers(f *testing.F) {
	for _, m := range []*weirv1.CheckStreamResponse{
		{Sequence: 1, Flags: []uint32{1}, Granted: []int64{1}}, {Sequence: 1, More: true, Checks: []uint32{1}},
		{Sequence: 1, More: true}, {Sequence: 1, Checks: []uint32{0, 1, 2}},
		{Sequence: 1, Checks: []uint32{0, 0}}, {Sequence: 2}, {Sequence: 1, Flags: []uint32{1, 2}},
		{Sequence: 1, Error: &weirv1.Error{Code: 3, Field: "define[3].limit"}},
		{Sequence: 1, Errors: []*weirv1.StreamError{{Check: 2, Error: &weirv1.Error{Code: 99}}}},
		{Sequence: 1, Errors: []*weirv1.StreamError{{Check: 1 << 31}}},
		{Sequence: 1, Limits: []*weirv1.StreamLimits{{Check: 2, Limits: []*weirv1.LimitStatus{{}, {Limit: -1}}}}},
	} {
		data := must.Value(m.MarshalVT())(f)
		f.Add(data, data)
	}
	f.Fuzz(func(t *testing.T, first, second []byte) {
		l := talking()
		m := &message{sequence: 1}
		var sets []*request
		for range 3 {
			fl := newRequest()
			fl.checks, fl.answers, fl.open = []limit.Check{{Target: limit.Target{Policy: "p"}}}, make([]Result, 1), 1
			sets = append(sets, fl)
			m.add(fl)
		}
		l.sent[1] = m
		l.waiting, l.inFlight = len(m.checks), len(m.checks)
		for _, data := range [][]byte{first, second} {
			out := new(weirv1.CheckStreamResponse)
			if out.UnmarshalVT(data) != nil {
				break
			}
			if l.received(out) != nil {
				break
			}
		}
		expect.True(t, l.inFlight >= 0 && l.waiting >= 0, "%d in flight, %d waiting", l.inFlight, l.waiting)
		if _, left := l.sent[1]; left {
			m.fail(errOddAnswer, false) // as the end of the stream does
		}
		for i, fl := range sets {
			select {
			case <-fl.done:
			default:
				t.Errorf("question %d stays without an answer", i)
			}
		}
	})
}

// talking returns a member as it is while its stream is open.
func talking() *member {
	ns := &nodes{changed: make(chan struct{}), now: func() time.Duration { return 0 }}
	return &member{nodes: ns, wake: fifo.NewSignal(), hurry: fifo.NewSignal(), greeted: true, follows: true,
		sent: make(map[uint64]*message)}
}

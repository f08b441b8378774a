// Package middleware is what httplimit and grpclimit have in common, and what a middleware for another protocol needs: it checks the key,
// asks the limiter, answers where there is no decision, counts, and logs.
//
// It does not know how an answer is written, and does not promise a log line for each request.
package middleware

import (
	"cmp"
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/limit"
)

// logEvery is the time between two log lines about requests that got no decision.
const logEvery = 10 * time.Second

// AllDecider decides several checks together.
type AllDecider interface {
	All(ctx context.Context, checks []client.Check) (client.AllDecision, error)
}

// Config says how requests of a type R are limited: R is *http.Request in httplimit, Call in grpclimit.
type Config[R any] struct {
	// Limiter decides. Required, unless Choose or Checks is set.
	Limiter client.Decider
	// Choose returns what decides about a request, in place of Limiter, such as the policy of its route or method. Nil from it: the
	// request is not limited.
	Choose func(R) client.Decider
	// Key returns what a request is limited by; nil stands for the address of the caller. A request whose key is empty or not UTF-8 is
	// rejected whatever OnError says (HTTP status 400, INVALID_ARGUMENT), so that nobody passes by what it leaves out or sends. A value that
	// is too long for a key is limited by its beginning and its SHA-256.
	Key func(R) string
	// Cost returns the units that a request takes, at least 1; nil stands for 1.
	Cost func(R) int64
	// Checks, with All, returns several checks for a request: all are charged, or the request is refused. They take the place of Limiter,
	// Choose, Key and Cost. A request without checks is not limited. Header fields and trailers tell of the tightest of the limits.
	Checks func(R) []client.Check
	// All decides Checks: a *client.Client.
	All AllDecider
	// Skip, when set, tells of requests that are not limited, such as those of health checks.
	Skip func(R) bool
	// OnError says what happens when there is no decision: the policy is unknown, the caller is denied, the Client is closed.
	// The zero value, client.FailOpen, serves the request; client.FailClosed rejects it (HTTP status 503, UNAVAILABLE). That no node can be
	// reached is a decision, by the fail policy of the cluster and the Client.
	OnError client.OnError
	// Logger is told of requests that no node has decided about, in at most one line each 10 seconds. Nil stands for slog.Default().
	Logger *slog.Logger
}

// Gate asks for decisions about requests. New makes one. It is safe for concurrent use.
type Gate[R any] struct {
	cfg     Config[R]
	counter client.Counter
	logged  atomic.Int64 // when the last line was, in nanoseconds since 1970
	silent  atomic.Int64 // requests without a decision since then
}

// Verdict is what is to become of a request.
type Verdict struct {
	client.Decision
	// BadKey says what is wrong with the key, which is the caller's mistake; nil where there is a Decision. FailedOpen and FailedClosed
	// are set where there is none.
	BadKey *limit.Error
	// Gone is set when the caller's context has ended: nobody waits for an answer.
	Gone bool
}

// New returns a Gate, with key in place of a Key that is nil. It panics when cfg has nothing that decides.
func New[R any](cfg Config[R], key func(R) string) *Gate[R] {
	switch {
	case cfg.Checks != nil && cfg.All == nil:
		panic("middleware: Config.Checks needs Config.All")
	case cfg.Limiter == nil && cfg.Choose == nil && cfg.Checks == nil:
		panic("middleware: Config.Limiter is nil")
	case cfg.Key == nil:
		cfg.Key = key
	}
	return &Gate[R]{cfg: cfg}
}

// Ask asks about a request, and waits for the Delay of one that is admitted. limited is false for one that is not limited.
func (g *Gate[R]) Ask(ctx context.Context, r R) (v Verdict, limited bool) {
	c := &g.cfg
	if c.Skip != nil && c.Skip(r) {
		return v, false
	}
	if c.Checks != nil {
		checks := c.Checks(r)
		if len(checks) == 0 {
			return v, false
		}
		return g.askAll(ctx, checks), true
	}
	limiter := c.Limiter
	if c.Choose != nil {
		if limiter = c.Choose(r); limiter == nil {
			return v, false
		}
	}
	cost := int64(1)
	if c.Cost != nil {
		cost = max(c.Cost(r), 1)
	}
	key, bad := keyOf(c.Key(r))
	if bad != nil {
		return g.refuse(bad), true
	}
	d, err := limiter.AllowN(ctx, key, cost)
	return g.decided(ctx, d, err), true
}

// askAll asks for all of several checks, or none. Its Decision is that of the limit that has the least left, or, when it refuses, of
// the one that refuses for the longest time.
func (g *Gate[R]) askAll(ctx context.Context, checks []client.Check) Verdict {
	for i := range checks {
		key, bad := keyOf(checks[i].Key)
		if bad != nil {
			return g.refuse(bad.In(i, len(checks)))
		}
		checks[i].Key = key
	}
	all, err := g.cfg.All.All(ctx, checks)
	return g.decided(ctx, all.Tightest(), err)
}

// keyOf returns the key for what a request brings, or says why that is none.
func keyOf(value string) (string, *limit.Error) {
	value = limit.KeyOf(value)
	return value, limit.ValidKey(value)
}

func (g *Gate[R]) refuse(bad *limit.Error) Verdict {
	g.counter.Count(nil, bad)
	return Verdict{BadKey: bad}
}

// decided turns an error into the answer of OnError. It waits for the moment that a leaky_bucket has given a request.
func (g *Gate[R]) decided(ctx context.Context, d client.Decision, err error) Verdict {
	if err != nil && ctx.Err() != nil {
		return Verdict{Gone: true}
	}
	if err != nil {
		d = client.Decision{Allowed: g.cfg.OnError != client.FailClosed}
		d.FailedOpen, d.FailedClosed = d.Allowed, !d.Allowed
	}
	g.counter.Count(&d, err)
	if d.FailedOpen || d.FailedClosed {
		g.log(ctx, &d, err)
	}
	if d.Allowed && d.Delay > 0 {
		select {
		case <-time.After(d.Delay):
		case <-ctx.Done():
			return Verdict{Gone: true}
		}
	}
	return Verdict{Decision: d}
}

// log writes a line about requests without a decision, unless there was one lately.
func (g *Gate[R]) log(ctx context.Context, d *client.Decision, err error) {
	n := g.silent.Add(1)
	now, last := time.Now().UnixNano(), g.logged.Load()
	if now-last < int64(logEvery) || !g.logged.CompareAndSwap(last, now) {
		return
	}
	g.silent.Add(-n)
	log := cmp.Or(g.cfg.Logger, slog.Default())
	on := "open"
	if d.FailedClosed {
		on = "closed"
	}
	if err != nil {
		log.ErrorContext(ctx, "rate limit decision failed", "error", err, "on_error", on, "requests", n)
		return
	}
	log.WarnContext(ctx, "rate limit not decided by a node", "on_error", on, "requests", n)
}

// Counts returns what Ask has answered. Errors are requests for which there was no decision, or no key.
func (g *Gate[R]) Counts() client.Counts { return g.counter.Counts() }

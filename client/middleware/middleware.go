// Package middleware has what httplimit and grpclimit share, and what a middleware for another protocol needs: it
// checks the key, asks the limiter, answers if there is no decision, counts, and logs. The protocol's own package
// writes the answer. It logs at most one line in 10 s.
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

// logEvery is the least time between two log lines about requests without a decision.
const logEvery = 10 * time.Second

// AllDecider decides several checks together.
type AllDecider interface {
	All(ctx context.Context, checks []client.Check) (client.AllDecision, error)
}

// Config configures a Gate for requests of type R: *http.Request in httplimit, Call in grpclimit.
type Config[R any] struct {
	// Limiter decides. Required, unless Choose or Checks is set.
	Limiter client.Decider
	// Choose returns the Decider for a request, in place of Limiter, such as the policy of its route or method. If it
	// returns nil, the request is not limited.
	Choose func(R) client.Decider
	// Key returns the key that a request is limited by. Nil: the address of the caller. A request whose key is empty or
	// not UTF-8 is rejected (HTTP status 400, INVALID_ARGUMENT), whatever OnError says, so that no caller avoids the
	// limit by such a key. A key that is too long is replaced by its beginning and its SHA-256.
	Key func(R) string
	// Cost returns the units that a request takes, at least 1. Nil: 1.
	Cost func(R) int64
	// Checks, with All, returns several checks for a request: all are charged, or the request is refused. It replaces
	// Limiter, Choose, Key and Cost. A request without checks is not limited. Header fields and trailers describe the
	// tightest of the limits.
	Checks func(R) []client.Check
	// All decides Checks: a *client.Client.
	All AllDecider
	// Skip, if set, reports whether a request is not limited, such as a health check.
	Skip func(R) bool
	// OnError is the answer if there is no decision: the policy is unknown, the caller is denied, or the Client is
	// closed. The zero value, client.FailOpen, serves the request; client.FailClosed rejects it (HTTP status 503,
	// UNAVAILABLE). If no node answers, there is a decision, by the fail policy of the Client.
	OnError client.OnError
	// Logger gets at most one line in 10 seconds about requests that no node has decided. Nil: slog.Default().
	Logger *slog.Logger
}

// Gate asks for decisions about requests. Use New. It is safe for concurrent use.
type Gate[R any] struct {
	cfg     Config[R]
	counter client.Counter
	logged  atomic.Int64 // when the last line was logged, in nanoseconds since 1970
	silent  atomic.Int64 // requests without a decision since the last line
}

// Verdict is the result of Ask.
type Verdict struct {
	client.Decision
	// BadKey says what is wrong with the request's key; nil if there is a Decision. The Decision has FailedOpen or
	// FailedClosed set if no node has decided.
	BadKey *limit.Error
	// Gone is set if the caller's context has ended: the caller has gone, or a deadline of the server has passed.
	Gone bool
}

// New returns a Gate. key replaces a nil cfg.Key. New panics if cfg has no Limiter, Choose or Checks, or Checks without
// All.
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

// Ask asks for a decision about a request. If it is admitted, Ask waits for its Delay. limited is false if the request
// is not limited.
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

// askAll asks for all of several checks, or none. Its Decision is that of the limit with the least left or, if it
// refuses, of the limit that refuses for the longest time.
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

// keyOf returns the key for a value of a request, or an error.
func keyOf(value string) (string, *limit.Error) {
	value = limit.KeyOf(value)
	return value, limit.ValidKey(value)
}

func (g *Gate[R]) refuse(bad *limit.Error) Verdict {
	g.counter.Count(nil, bad)
	return Verdict{BadKey: bad}
}

// decided turns an error into the answer of OnError. It waits for the Delay of a leaky_bucket.
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

// log writes a line about requests without a decision, unless it wrote one within logEvery.
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

// Counts returns the numbers of what Ask has answered. Errors are requests without a decision or a key.
func (g *Gate[R]) Counts() client.Counts { return g.counter.Counts() }

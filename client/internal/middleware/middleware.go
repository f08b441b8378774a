// Package middleware is what the middlewares of net/http and gRPC have in common: it checks the key, asks the limiter, answers where
// there is no decision, counts, and logs.
//
// It does not know how an answer is written, and does not promise a log line for each request.
package middleware

import (
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

// Gate asks for decisions. It is safe for concurrent use.
type Gate struct {
	OnError client.OnError
	Logger  *slog.Logger // nil: slog.Default()

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

// Ask asks for n units of a key.
func (g *Gate) Ask(ctx context.Context, l client.Decider, key string, n int64) Verdict {
	key, bad := keyOf(key)
	if bad != nil {
		return g.refuse(bad)
	}
	d, err := l.AllowN(ctx, key, max(n, 1))
	return g.decided(ctx, d, err)
}

// AskAll asks for all of several checks, or none. Its Decision is that of the limit that has the least left, or, when it refuses, of
// the one that refuses for the longest time.
func (g *Gate) AskAll(ctx context.Context, l AllDecider, checks []client.Check) Verdict {
	for i := range checks {
		key, bad := keyOf(checks[i].Key)
		if bad != nil {
			return g.refuse(bad.In(i, len(checks)))
		}
		checks[i].Key = key
	}
	all, err := l.All(ctx, checks)
	return g.decided(ctx, all.Tightest(), err)
}

// keyOf returns the key for what a request brings, or says why that is none.
func keyOf(value string) (string, *limit.Error) {
	value = limit.KeyOf(value)
	return value, limit.ValidKey(value)
}

func (g *Gate) refuse(bad *limit.Error) Verdict {
	g.counter.Count(nil, bad)
	return Verdict{BadKey: bad}
}

// decided turns an error into the answer of OnError.
func (g *Gate) decided(ctx context.Context, d client.Decision, err error) Verdict {
	if err != nil && ctx.Err() != nil {
		return Verdict{Gone: true}
	}
	if err != nil {
		d = client.Decision{Allowed: g.OnError != client.FailClosed}
		d.FailedOpen, d.FailedClosed = d.Allowed, !d.Allowed
	}
	g.counter.Count(&d, err)
	if d.FailedOpen || d.FailedClosed {
		g.log(ctx, &d, err)
	}
	return Verdict{Decision: d}
}

// log writes a line about requests without a decision, unless there was one lately.
func (g *Gate) log(ctx context.Context, d *client.Decision, err error) {
	n := g.silent.Add(1)
	now, last := time.Now().UnixNano(), g.logged.Load()
	if now-last < int64(logEvery) || !g.logged.CompareAndSwap(last, now) {
		return
	}
	g.silent.Add(-n)
	log := g.Logger
	if log == nil {
		log = slog.Default()
	}
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

// Counts returns what Ask and AskAll have answered. Errors are requests for which there was no decision, or no key.
func (g *Gate) Counts() client.Counts { return g.counter.Counts() }

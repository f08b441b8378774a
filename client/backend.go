package client

import (
	"context"
	"time"

	"github.com/weirlimit/weir/limit"
)

// target names the state that a call is about.
type target struct {
	limit.Target
	scope string // of the limit sent along: see limit.InlineScope; empty: not worked out yet
}

// question is a Check in the form in which it is sent.
type question struct {
	target
	cost      int64 // 0 peeks
	partial   bool
	requestID string
	trace     string // the ids of a sampled trace and of a span in it; empty: none
}

// reserving is what a Reserve says besides its question.
type reserving struct {
	usage    Usage
	class    string
	estimate bool // the cost is not known
	ttl      time.Duration
}

// settling is how a reservation is to end.
type settling struct {
	cost  int64
	usage Usage
	class string
	exact bool
}

// backend is what decides: a cluster, or a limiter in this process. Its methods are safe for concurrent use and honour
// ctx. Their errors are *Error; a node that does not answer in time is one of kind ErrUnavailable.
type backend interface {
	// check answers each of qs in the element of answers beside it, within a time; 0: as long as it takes. It fails when
	// one is malformed, and with the first one's error when not one could be decided; what is in answers then is void.
	check(ctx context.Context, qs []question, answers []Result, within time.Duration) error
	// checkAll answers qs together: all are charged, or none is admitted. It fails when one cannot be decided.
	checkAll(ctx context.Context, qs []question) (AllDecision, error)
	acquire(ctx context.Context, q question, ttl time.Duration) (Decision, error)
	renew(ctx context.Context, t target, id string, ttl time.Duration) (time.Duration, error)
	release(ctx context.Context, t target, id string) error
	reserve(ctx context.Context, q question, r *reserving) (Decision, error)
	// reserveAll makes one reservation of several questions: all are charged, or none is.
	reserveAll(ctx context.Context, qs []question, rs []reserving) (AllDecision, error)
	// extend adds to a reservation.
	extend(ctx context.Context, q question, id string, use Usage, ttl time.Duration) (Decision, error)
	// settle ends a reservation.
	settle(ctx context.Context, t target, id string, s *settling) (Settled, error)
	// charge adds a cost that has already happened.
	charge(ctx context.Context, q question, use Usage) (Decision, error)
	refund(ctx context.Context, t target, units int64, requestID string) (int64, error)
	reset(ctx context.Context, t target) error
	// ready waits until a call can be answered.
	ready(ctx context.Context) error
	// close ends the calls in progress and frees what the backend holds.
	close() error
}

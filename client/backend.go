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

// backend is what decides: a cluster, or a limiter in this process. Its methods are safe for concurrent use and honour
// ctx. Their errors are *Error or *limit.Error; a node that does not answer in time is an *Error of kind ErrUnavailable.
type backend interface {
	// check answers each of qs in the element of answers beside it, within a time; 0: as long as it takes. It fails when
	// one is malformed, and with the first one's error when not one could be decided; what is in answers then is void.
	check(ctx context.Context, qs []question, answers []Result, within time.Duration) error
	operations
	// ready waits until a call can be answered.
	ready(ctx context.Context) error
	// close ends the calls in flight and frees what the backend holds.
	close() error
}

// operations are those of a limit.Service but for Check, and for Cancel, which is a Commit of 0.
type operations interface {
	CheckAll(ctx context.Context, checks []limit.Check) (AllDecision, error)
	Acquire(ctx context.Context, a limit.Acquire) (Decision, error)
	Renew(ctx context.Context, t limit.Target, leaseID string, ttl time.Duration) (time.Duration, error)
	Release(ctx context.Context, t limit.Target, leaseID string) (bool, error)
	Reserve(ctx context.Context, r limit.Reserve) (Decision, error)
	ReserveAll(ctx context.Context, rs []limit.Reserve) (AllDecision, error)
	Extend(ctx context.Context, e limit.Extend) (Decision, error)
	Commit(ctx context.Context, c limit.Commit) (Settled, error)
	CommitEach(ctx context.Context, cs []limit.Commit) ([]SettledResult, error)
	Charge(ctx context.Context, c limit.Charge) (Decision, error)
	Refund(ctx context.Context, t limit.Target, units int64, requestID string) (int64, error)
	Reset(ctx context.Context, t limit.Target) error
}

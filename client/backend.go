package client

import (
	"context"
	"time"

	"github.com/weirlimit/weir/algo"
)

// target names the state that a call is about.
type target struct {
	policy    string      // or
	limit     *algo.Limit // with a namespace, perhaps empty
	namespace string
	key       string
}

// question is a Check in the form in which it is sent.
type question struct {
	target
	cost      int64 // 0 peeks
	partial   bool
	requestID string
}

// lease is what a backend's acquire was given.
type lease struct {
	Decision
	id string // empty when refused, and when nobody could be asked
}

// backend is what decides: a cluster, or a limiter in this process. Its methods are safe for concurrent use and honour
// ctx. Their errors are *Error; a node that does not answer in time is one of kind ErrUnavailable.
type backend interface {
	// check answers each of qs, in order. It fails when one is malformed, and with the first one's error when not one
	// could be decided.
	check(ctx context.Context, qs []question) ([]Result, error)
	acquire(ctx context.Context, q question, ttl time.Duration) (lease, error)
	renew(ctx context.Context, t target, id string, ttl time.Duration) (time.Duration, error)
	release(ctx context.Context, t target, id string) error
	refund(ctx context.Context, t target, units int64) (int64, error)
	reset(ctx context.Context, t target) error
	// ready waits until a call can be answered.
	ready(ctx context.Context) error
	// close ends the calls in progress and frees what the backend holds.
	close() error
}

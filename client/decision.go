package client

import (
	"context"
	"fmt"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/rpc/wire"
)

const (
	// Never is the RetryAfter of a request that can never pass.
	Never = algo.Never
	// Unlimited is the Limit of a Decision if no limit applied to the check.
	Unlimited = algo.Unlimited
)

// Decision is the answer to a check. All durations count from the moment of the decision. The zero value is a refusal.
// Policy is empty if the fail policy of the Client answered a check of an inline limit. LeaseID and ReservationID are
// used by the Lease and the Reservation that come with the Decision.
type Decision = limit.Decision

// LimitStatus is one limit in the Decision of a policy that has several.
type LimitStatus = limit.LimitStatus

// AllDecision is the answer to Client.All.
type AllDecision = limit.AllDecision

// Result is the answer to one Check of a batch: a Decision, or an Err that concerns this check alone: the error that a
// call with only this check would have returned.
type Result = limit.Result

// Decider answers whether n units of a key may go ahead now. A *Limiter is a Decider.
type Decider interface {
	AllowN(ctx context.Context, key string, n int64) (Decision, error)
}

// Waiter waits until n units of a key may go ahead. A *Limiter is a Waiter.
type Waiter interface {
	WaitN(ctx context.Context, key string, n int64) (Decision, error)
}

// Check is one check of a batch. Policy or Limit, and Key, are required.
type Check struct {
	Policy string // the name of a policy, or
	// Limit is a limit sent along; see Client.Inline.
	Limit *algo.Limit
	// Namespace separates the inline limits of different users; empty stands for "default". Only together with Limit.
	Namespace string
	// Key is what is limited: 1 to 1024 bytes of UTF-8.
	Key string
	// Cost is the number of units asked for, at most 2^53; 0 stands for 1. To ask without a charge, set Peek.
	Cost int64
	// Peek asks whether a cost of 1 would pass now and charges nothing. Cost must then be 0.
	Peek bool
	// Partial grants min(Cost, units left), where otherwise all of Cost is granted or nothing.
	Partial bool
	// RequestID makes it safe to ask again: charges with the same id, policy and key are made once. At most 128 bytes.
	// Empty: none, or, with WithRetry, an id that the Client makes.
	RequestID string
}

// check returns ck in the form of package limit, or an *Error. It copies ck's Limit, which the caller may change
// afterwards.
func (ck *Check) check() (limit.Check, *Error) {
	c := limit.Check{
		Target: limit.Target{Policy: ck.Policy, Limit: ck.Limit, Namespace: ck.Namespace, Key: ck.Key},
		Cost:   ck.Cost, Partial: ck.Partial, RequestID: ck.RequestID,
	}
	switch {
	case !ck.Peek && c.Cost == 0:
		c.Cost = 1
	case ck.Peek && c.Cost != 0:
		return c, invalid("cost", "must be 0 when peeking")
	}
	if ck.Limit != nil {
		own := *ck.Limit
		c.Limit = &own
	}
	return c, valid(&c)
}

// atomic returns an error if ck has a field that an atomic check may not have.
func (ck *Check) atomic() *Error {
	switch {
	case ck.Partial:
		return invalid("partial", "must not be set in an atomic check")
	case ck.Peek:
		return invalid("cost", "must not be 0 in an atomic check: it cannot peek")
	case ck.RequestID != "":
		return invalid("request_id", "must not be given in an atomic check")
	}
	return nil
}

// valid returns an error for a check that no node would accept. Such a check costs no call, and does not make its whole
// batch fail at a node.
func valid(c *limit.Check) *Error {
	err := c.ValidCost()
	if err == nil {
		err = c.Valid()
	}
	if err == nil && c.Limit != nil {
		own := *c.Limit
		own.MaxLog = 0 // MaxLog is not sent: the nodes set it
		if err = limit.ValidLimit(&own); err == nil && own.Zone != nil {
			_, err = wire.Zone(own.Zone.String())
		}
	}
	return err
}

// checksOf returns checks in the form of package limit. allowed, if not nil, returns a further error of a check.
func checksOf(checks []Check, allowed func(*Check) *Error) ([]limit.Check, error) {
	if len(checks) > limit.MaxBatch {
		return nil, limit.NewError(ErrTooLarge, "checks",
			fmt.Sprintf("%d are too many; at most %d fit one call", len(checks), limit.MaxBatch))
	}
	out := make([]limit.Check, len(checks))
	for i := range checks {
		c, err := checks[i].check()
		if err == nil && allowed != nil {
			err = allowed(&checks[i])
		}
		if err != nil {
			return nil, err.In(i, len(checks))
		}
		out[i] = c
	}
	return out, nil
}

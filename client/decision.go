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
	// Unlimited is the Limit of a decision that no limit applied to.
	Unlimited = algo.Unlimited
)

// Decision is the answer to a check. All durations count from the moment of the decision. The zero value is a refusal. Its
// Policy is empty when the client itself answered because no node did and the limit was sent along. LeaseID and ReservationID are
// for the Lease and the Reservation that come with it.
type Decision = limit.Decision

// LimitStatus is one limit of a policy that has several, as part of a Decision.
type LimitStatus = limit.LimitStatus

// AllDecision is the answer to Client.All.
type AllDecision = limit.AllDecision

// Result is the answer to one Check of a batch: a Decision, or an error that concerns this check alone, which is what a call with
// this check alone would have returned.
type Result = limit.Result

// Decider answers whether n units of a key may go ahead now: a *Limiter is one.
type Decider interface {
	AllowN(ctx context.Context, key string, n int64) (Decision, error)
}

// Waiter waits until they may: a *Limiter is one.
type Waiter interface {
	WaitN(ctx context.Context, key string, n int64) (Decision, error)
}

// Check is one check of a batch. Policy or Limit, and Key, are required.
type Check struct {
	Policy string // the name of a policy, or
	// Limit is a limit sent along; see Client.Inline.
	Limit *algo.Limit
	// Namespace parts the inline limits of different users; empty stands for "default". Only together with Limit.
	Namespace string
	// Key is what is limited: 1 to 1024 bytes of UTF-8.
	Key string
	// Cost is the number of units asked for, at most 2^53; 0 stands for 1. To ask without taking, set Peek.
	Cost int64
	// Peek asks whether a cost of 1 would pass now and charges nothing. Cost must then be 0.
	Peek bool
	// Partial grants min(Cost, what is left) in place of all or nothing.
	Partial bool
	// RequestID makes asking again safe: a charge under the same id, policy and key is not made twice. It is at most
	// 128 bytes long. Empty stands for none, or with WithRetry for one of the client's own.
	RequestID string
}

// check returns ck as nodes are asked it, or an *Error. It keeps nothing of ck's Limit, which the caller may change afterwards.
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

// atomic says what an atomic check may not have.
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

// valid refuses what no node would accept, so that it costs no call, and nothing of what is sent along with it.
func valid(c *limit.Check) *Error {
	err := c.ValidCost()
	if err == nil {
		err = c.Valid()
	}
	if err == nil && c.Limit != nil {
		own := *c.Limit
		own.MaxLog = 0 // which is the nodes' to set
		if err = limit.ValidLimit(&own); err == nil && own.Zone != nil {
			_, err = wire.Zone(own.Zone.String())
		}
	}
	return err
}

// checksOf returns checks as nodes are asked them. allowed, if not nil, says what else is wrong with one.
func checksOf(checks []Check, allowed func(*Check) *Error) ([]limit.Check, error) {
	if len(checks) > limit.MaxBatch {
		return nil, limit.NewError(ErrTooLarge, "checks", fmt.Sprintf("%d are too many; at most %d fit one call", len(checks), limit.MaxBatch))
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

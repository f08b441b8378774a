package client

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

const (
	// Never is the RetryAfter of a request that can never pass.
	Never = algo.Never
	// Unlimited is the Limit of a decision that no limit applied to.
	Unlimited = algo.Unlimited
)

// Decision is the answer to a question. All durations count from the moment of the decision. The zero value is a
// refusal.
type Decision struct {
	// Policy is the policy's name, or "inline" for a limit sent along. It is empty when the client itself answered
	// because no node did and the limit was sent along.
	Policy string
	// Allowed tells whether the caller may go ahead.
	Allowed bool
	// Granted is the number of units charged: the cost, less when Check.Partial allows it, 0 when refused or peeking.
	Granted int64
	// Limit is the limit that decided (a bucket's capacity): Unlimited when there is none, 0 for a key that is blocked
	// and when no node answered.
	Limit int64
	// Window is the length of that limit's window; 0 when it has none (calendar periods, unlimited).
	Window time.Duration
	// Remaining is the number of units that would pass now, after this decision.
	Remaining int64
	// RetryAfter is 0 when allowed. Otherwise the same request passes when sent that much later, if nothing else is
	// admitted before, or it is Never.
	RetryAfter time.Duration
	// ResetAfter is the time until the key's state is as new.
	ResetAfter time.Duration
	// Delay is how long an admitted caller of a leaky_bucket must wait before it goes ahead. Wait does that waiting.
	Delay time.Duration

	Shadow       bool // the policy would have refused, but is in shadow mode
	Degraded     bool // decided with less protection than the policy asks for
	FailedOpen   bool // the key's owner could not be asked: admitted by a fail policy, the cluster's or the client's
	FailedClosed bool // the key's owner could not be asked: refused by a fail policy, the cluster's or the client's

	// Limits lists every limit of a policy that has several; nil otherwise.
	Limits []LimitStatus
}

// LimitStatus is one limit of a policy that has several, as part of a Decision.
type LimitStatus struct {
	Limit      int64 // Unlimited when there is none
	Window     time.Duration
	Remaining  int64
	RetryAfter time.Duration // 0 when this limit would let the request pass; Never
	ResetAfter time.Duration
}

// AllDecision is the answer to Client.All.
type AllDecision struct {
	// Allowed tells whether the caller may go ahead: every check passed, and all of them are charged. Otherwise none is.
	Allowed bool
	// Delay is how long an admitted caller must wait before it goes ahead: the largest of the Decisions'.
	Delay time.Duration
	// Decisions has one for each check, in order. When the whole is refused, each tells whether that check was refused or
	// would have passed by itself; Granted is 0 in all of them.
	Decisions []Decision
}

// Check is one question of a batch. Policy or Limit, and Key, are required.
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

// Result is the answer to one Check of a batch: a Decision, or an error that concerns this check alone.
type Result struct {
	Decision
	Err error // nil, or what a call with this check alone would have returned
}

package limit

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// KeyState is the state of a key, for operators.
type KeyState struct {
	Node   string        // the node that decides for it
	Banned time.Duration // how long the policy's ban still refuses the key; 0: no ban
	OnLoan int64         // units that borrowers hold
	Limits []LimitState  // of the key's rule; empty when the key is unlimited or blocked
}

// LimitState is the state of a key under one limit.
type LimitState struct {
	Algorithm        algo.Algorithm
	Limit, Remaining int64 // for buckets Limit is the capacity
	Window           time.Duration
	Returns          []algo.Return // the next times at which units in use come back; see algo.Limits.Returns
}

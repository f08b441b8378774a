package limit

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// KeyState is how a key stands.
type KeyState struct {
	Node   string        // that decides for it
	Banned time.Duration // for how long the key is refused by its policy's ban; 0: it is not banned
	OnLoan int64         // units that borrowers may admit by themselves
	Limits []LimitState  // of the rule for the key; none where that needs no state: it is unlimited, or blocked
}

// LimitState is how a key stands under one limit.
type LimitState struct {
	Algorithm        algo.Algorithm
	Limit, Remaining int64 // Limit is the capacity for buckets
	Window           time.Duration
	Returns          []algo.Return // when what is in use can be used again, the first of them; see algo.Limits.Returns
}

package limit

import (
	"context"
	"time"

	"github.com/weirlimit/weir/algo"
)

// Prepared is a prepared handle: what a policy's name, or an inline limit, stands for under one set of policies, worked out for
// callers that ask one question at a time and need little of the answer. It is safe for concurrent use.
type Prepared interface {
	// Check asks for cost units of a key as Service.Check does; Count is to follow. It returns false, and has charged nothing,
	// where there is more to do or to say: the handle no longer holds, the call is not acceptable or too late, or the key is not
	// known yet. Service.Check answers then.
	Check(ctx context.Context, key string, cost int64) (Brief, bool)
	// Count counts what Check has answered; it is to be called once for each answer.
	Count(b Brief, cost int64)
}

// Brief is what a Prepared answers: all there is to say of a check of a policy with a single limit.
type Brief struct {
	algo.Decision // but for Lease and Tightest
	Window        time.Duration
	Shadow        bool
	NearLimit     bool
}

// Preparer is a Service with prepared handles.
type Preparer interface {
	Service
	// CheckTo is Check with the answers in results, which has a place for each of checks, whatever they held. Checks that are in
	// denied are not looked at but answered by its errors.
	CheckTo(ctx context.Context, checks []Check, denied Denials, results []Result) error
	// Prepare returns the handle to a target, whatever its key: last, which may be nil, where that still holds. It is nil where
	// no handle can be had.
	Prepare(t *Target, last Prepared) Prepared
}

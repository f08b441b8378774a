package limit

import (
	"context"
	"time"

	"github.com/weirlimit/weir/algo"
)

// Prepared is a handle for the policy or inline limit of a target under one set of policies, resolved in advance. It is
// for callers that make one check at a time and need little of the answer. It is safe for concurrent use.
type Prepared interface {
	// Check decides cost units of a key as Service.Check does. After true the caller must call Count. False means that
	// nothing was charged and Service.Check must be called instead: the policies have changed, the call is invalid or
	// too late, the key is new, or the answer needs more than a Brief.
	Check(ctx context.Context, key string, cost int64) (Brief, bool)
	// Count counts an answer of Check. It must be called once for each.
	Count(b Brief, cost int64)
}

// Brief is the answer of a Prepared: all of a decision under a policy with one limit.
type Brief struct {
	algo.Decision // without Lease and Tightest
	Window        time.Duration
	Shadow        bool
	NearLimit     bool
}

// Preparer is a Service with prepared handles.
type Preparer interface {
	Service
	// CheckTo is Check with the answers in results, which must have the length of checks; its contents are overwritten.
	// Checks in denied are not decided but answered with those errors.
	CheckTo(ctx context.Context, checks []Check, denied Denials, results []Result) error
	// Prepare returns a handle for a target with any key. It returns last, which may be nil, if that is still valid,
	// and nil if there can be no handle.
	Prepare(t *Target, last Prepared) Prepared
}

package limiter

import (
	"context"

	"github.com/weirlimit/weir/limit"
)

// BatchService is a Service that puts answers where its caller wants them, and takes batches in two steps. A Limiter is
// one.
type BatchService interface {
	limit.Service
	// CheckTo is Check with the answers in results, which has a place for each of checks, whatever they held.
	CheckTo(ctx context.Context, checks []limit.Check, denied limit.Denials, results []limit.Result) error
	// Begin answers what can be answered at once, and Finish the rest; see Limiter.
	Begin(ctx context.Context, b *Batch) (open []int, err *limit.Error)
	Finish(ctx context.Context, b *Batch, open []int)
}

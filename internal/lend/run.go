package lend

import (
	"context"
	"time"

	"github.com/weirlimit/weir/internal/fifo"
)

// gap is the shortest time between two calls of Report by Run.
const gap = time.Millisecond

// Run calls report with an instant of clock and the reports that Report returned for it, of which there may be none,
// until ctx ends. It does so when kick is set, and when Report has said. The Book's wake must set kick.
func (b *Book[K, N]) Run(ctx context.Context, kick fifo.Signal, clock func() int64,
	report func(now int64, reports []Report[K, N])) {
	tick := time.NewTimer(time.Hour)
	defer tick.Stop()
	for next := time.Duration(0); ; {
		tick.Stop()
		if next > 0 {
			tick.Reset(next)
		}
		select {
		case <-kick:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		now := clock()
		var reports []Report[K, N]
		reports, next = b.Report(now)
		report(now, reports)
		select {
		case <-time.After(gap):
		case <-ctx.Done():
			return
		}
	}
}

// Return closes the Book, and waits until all loans have been returned or ctx ends. Run must be running.
func (b *Book[K, N]) Return(ctx context.Context) {
	b.Close()
	for b.Loans() > 0 {
		select {
		case <-time.After(gap):
		case <-ctx.Done():
			return
		}
	}
}

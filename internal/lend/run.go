package lend

import (
	"context"
	"time"

	"github.com/weirlimit/weir/internal/fifo"
)

// gap is the shortest time between two looks at what is to be reported.
const gap = time.Millisecond

// Run has report called with what is to be reported, until ctx ends: with an instant of clock and what Report returns for it, which may be
// nothing. It looks when kick is set, which is to be done by the wake that the Book was made with, and when Report is due again.
func (b *Book[K, N]) Run(ctx context.Context, kick fifo.Signal, clock func() int64, report func(now int64, reports []Report[K, N])) {
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

// Return closes the Book, and waits until all loans have been returned, which Run reports, or ctx ends.
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

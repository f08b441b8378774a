package asker

import (
	"context"
	"errors"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/load"
)

// BoundOf is what a limit lets through in its window at most; nil for none.
func BoundOf(l *algo.Limit) (*load.Bound, error) {
	if l == nil {
		return nil, nil
	}
	b := &load.Bound{Units: l.Limit, Window: l.Window}
	switch l.Algorithm {
	case algo.Concurrency:
		return nil, errors.New("algorithm: concurrency takes leases, not checks")
	case algo.SlidingLog, algo.SlidingWindow:
	default: // across a boundary, or a full bucket and what comes back meanwhile
		b.Units *= 2
	}
	return b, nil
}

// Learn returns the bound for a policy, from what a node tells of the limit of a key: whatever its algorithm, no more than twice the limit
// passes in a window. It is nil where no node tells that.
func (c Config) Learn(ctx context.Context, key string) *load.Bound {
	c.Cost, c.Connections = 0, 1 // a peek
	askers, closeAll, err := Open(c)
	if err != nil {
		return nil
	}
	defer closeAll()
	within, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	a, err := askers[0].Ask(within, key)
	if err != nil || a.FailedOpen || a.FailedClosed || a.Limit <= 0 || a.Window <= 0 {
		return nil
	}
	return &load.Bound{Units: 2 * a.Limit, Window: a.Window}
}

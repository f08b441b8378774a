package admission

import (
	"context"

	"golang.org/x/sync/semaphore"
)

// Gate bounds the bytes that work in progress takes. Work that finds no room waits, in the order of its coming. A nil Gate has
// room for everything. It is safe for concurrent use.
type Gate struct {
	most  int64
	bytes *semaphore.Weighted
}

// NewGate returns a Gate for so many bytes.
func NewGate(most int64) *Gate { return &Gate{most, semaphore.NewWeighted(most)} }

// Enter waits for room for work that takes so many bytes, and returns how many to Leave with: no more than there are. The error
// is that of ctx.
func (g *Gate) Enter(ctx context.Context, bytes int64) (taken int64, err error) {
	if g == nil {
		return 0, nil
	}
	bytes = min(bytes, g.most)
	if err := g.bytes.Acquire(ctx, bytes); err != nil {
		return 0, err
	}
	return bytes, nil
}

// Leave gives room back.
func (g *Gate) Leave(bytes int64) {
	if g != nil && bytes > 0 {
		g.bytes.Release(bytes)
	}
}

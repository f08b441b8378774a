package admission

import (
	"context"

	"golang.org/x/sync/semaphore"
)

// Gate bounds the bytes that work in progress takes. Work that finds no room waits, in the order in which it called
// Enter. A nil Gate has room for everything. It is safe for concurrent use.
type Gate struct {
	most  int64
	bytes *semaphore.Weighted
}

// NewGate returns a Gate for most bytes.
func NewGate(most int64) *Gate { return &Gate{most, semaphore.NewWeighted(most)} }

// Enter waits until the Gate has room for work of this many bytes. Work of more bytes than the Gate has takes all of
// them. The caller must pass the bytes that Enter returns to Leave. The error is that of ctx.
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

// Leave gives back bytes that Enter has taken.
func (g *Gate) Leave(bytes int64) {
	if g != nil && bytes > 0 {
		g.bytes.Release(bytes)
	}
}

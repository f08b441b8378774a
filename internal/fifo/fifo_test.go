package fifo

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestQueue holds a queue to a list, whatever is done to it.
func TestQueue(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var q Queue[*int]
	var want []*int
	for step := range 200_000 {
		switch what := random.IntN(20); {
		case what < 9+step/10_000%3: // long phases of growing, and of shrinking
			n := new(int)
			*n = step
			q.Push(n)
			want = append(want, n)
		case what < 18 && len(want) > 0:
			if first, got := q.First(), q.Pop(); got != want[0] || first != got {
				t.Fatalf("step %d: got %d, first %d, want %d", step, *got, *first, *want[0])
			}
			want = want[1:]
		case what == 18:
			n := random.IntN(len(want)/4 + 1)
			q.Drop(n)
			want = want[n:]
		}
		must.True(t, q.Len() == len(want), "step %d: %d items, want %d", step, q.Len(), len(want))
		must.True(t, step%1000 != 0 || slices.Equal(q.Items(), want), "step %d: other items", step)
	}
	for _, n := range q.items[:cap(q.items)][len(q.items):] {
		must.Equal(t, n, nil, "what was taken is kept alive")
	}
}

// TestQueueKeepsLittleRoom: neither does a queue that is never empty grow without end, nor does an empty one keep much.
func TestQueueKeepsLittleRoom(t *testing.T) {
	var q Queue[int]
	q.Push(0)
	for i := range 100_000 {
		q.Push(i)
		q.Pop()
	}
	n := cap(q.items)
	expect.True(t, n <= 8, "room for %d where two waited at most", n)
	for i := range 2 * keep {
		q.Push(i)
	}
	for q.Len() > 0 {
		q.Pop()
	}
	n = cap(q.items)
	expect.True(t, n <= keep, "an empty queue keeps room for %d", n)
}

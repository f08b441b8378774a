// Package fifo is what one goroutine hands another: a [Queue] in one array that is used again, and a [Signal] that wakes its reader.
//
// It does not promise one wake-up for each item: a reader that wakes looks at all of them.
package fifo

import "slices"

// keep is for how many items an empty queue keeps room.
const keep = 4096

// Queue holds items in the order in which they came. The zero value is an empty queue. It is not safe for concurrent use, and does not
// bound its items: its owner does both. The oldest item is taken from a head that moves, and items are moved to the front where there is no
// room behind the newest.
type Queue[T any] struct {
	items []T // from head on
	head  int
}

// Len returns the number of items.
func (q *Queue[T]) Len() int { return len(q.items) - q.head }

// Cap returns the number of items that its array has room for.
func (q *Queue[T]) Cap() int { return cap(q.items) }

// Grow makes room for n more items.
func (q *Queue[T]) Grow(n int) { q.items = slices.Grow(q.items, n) }

// Items returns the items, the oldest first. They are the queue's: good until it is changed, and not to be changed.
func (q *Queue[T]) Items() []T { return q.items[q.head:] }

// Push adds an item.
func (q *Queue[T]) Push(item T) {
	if len(q.items) == cap(q.items) && q.head > len(q.items)/2 {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, item)
}

// First returns the oldest item. There must be one.
func (q *Queue[T]) First() T { return q.items[q.head] }

// Pop takes the oldest item. There must be one.
func (q *Queue[T]) Pop() T {
	item := q.items[q.head]
	q.Drop(1)
	return item
}

// Drop forgets the n oldest items. There must be so many.
func (q *Queue[T]) Drop(n int) {
	clear(q.items[q.head:][:n]) // the array lives on, the items need not
	if q.head += n; q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
		if cap(q.items) > keep {
			q.items = nil
		}
	}
}

// Package fifo has two ways to pass items from one goroutine to another: a [Queue] in one array that is reused, and a
// [Signal] that wakes its reader. There may be fewer wake-ups than items, so the reader must look at all items.
package fifo

import "slices"

// keep is how many items an empty Queue keeps room for.
const keep = 4096

// Queue holds items in the order in which they came. The zero value is an empty Queue. It is not safe for concurrent
// use, and does not bound its items: its owner must do both. Pop moves the head forward, and items move to the front of
// the array only when there is no room behind the newest.
type Queue[T any] struct {
	items []T // from head on
	head  int
}

// Len returns the number of items.
func (q *Queue[T]) Len() int { return len(q.items) - q.head }

// Cap returns how many items its array has room for.
func (q *Queue[T]) Cap() int { return cap(q.items) }

// Grow makes room for n more items.
func (q *Queue[T]) Grow(n int) { q.items = slices.Grow(q.items, n) }

// Items returns the items, the oldest first. The caller must not modify them, and may use them until the Queue changes.
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

// Drop removes the n oldest items. There must be n.
func (q *Queue[T]) Drop(n int) {
	clear(q.items[q.head:][:n]) // so that the array does not keep the items alive
	if q.head += n; q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
		if cap(q.items) > keep {
			q.items = nil
		}
	}
}

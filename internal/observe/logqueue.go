package observe

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/weirlimit/weir/internal/fifo"
)

// Errors of lines that are not written.
var (
	ErrFull   = errors.New("logqueue: the writer does not keep up: line dropped")
	ErrClosed = errors.New("logqueue: closed")
)

// LogQueue is a bounded queue of lines before a writer. Its methods are safe for concurrent use.
//
// A writer that stalls (a pipe without a reader, a mount that does not answer) does not stall the goroutines that log:
// a line without room is dropped and counted. Lines in the queue are lost when the process ends. The goroutine of a
// write that never returns is never ended.
type LogQueue struct {
	w        io.Writer
	maxBytes int
	done     chan struct{} // closed once the queue's goroutine has ended

	mu      sync.Mutex
	changed *sync.Cond // run has something to do
	lines   fifo.Queue[queued]
	bytes   int // of lines, and of the line that is being written
	dropped uint64
	stalled bool // a WriteThrough has timed out, and no line was written since
	closed  bool
}

// queued is a line, and a channel that is closed once the line is written.
type queued struct {
	text    []byte
	written chan struct{}
}

// NewLogQueue returns a LogQueue that writes each line to w with one call of Write. maxBytes bounds the bytes of lines
// in the queue, including the line that is being written. The caller must call Close.
func NewLogQueue(w io.Writer, maxBytes int) *LogQueue {
	q := &LogQueue{w: w, maxBytes: maxBytes, done: make(chan struct{})}
	q.changed = sync.NewCond(&q.mu)
	go q.run()
	return q
}

// Write queues a copy of a line. It never waits for the writer. The error is ErrFull or ErrClosed.
func (q *LogQueue) Write(line []byte) (int, error) {
	if _, err := q.add(line); err != nil {
		return 0, err
	}
	return len(line), nil
}

// WriteThrough queues a line and waits until it is written, for patience at most. While the writer is stalled it does
// not wait: of several calls one after the other, only the first waits.
func (q *LogQueue) WriteThrough(line []byte) (int, error) {
	written, err := q.add(line)
	if err != nil {
		return 0, err
	}
	if written == nil {
		return len(line), nil
	}
	select {
	case <-written:
	case <-time.After(patience):
		q.mu.Lock()
		defer q.mu.Unlock()
		select {
		case <-written:
		default:
			q.stalled = true
		}
	}
	return len(line), nil
}

// add queues a line, and returns the channel that is closed once the line is written; nil: the writer is stalled.
func (q *LogQueue) add(line []byte) (written chan struct{}, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.closed:
		err = ErrClosed
	case q.bytes+len(line) > q.maxBytes:
		err = ErrFull
	}
	if err != nil {
		q.dropped++
		return nil, err
	}
	l := queued{bytes.Clone(line), make(chan struct{})}
	q.lines.Push(l)
	q.bytes += len(line)
	q.changed.Signal()
	if q.stalled {
		return nil, nil
	}
	return l.written, nil
}

// run writes lines until the queue is closed and empty.
func (q *LogQueue) run() {
	defer close(q.done)
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		switch {
		case q.lines.Len() > 0:
			q.write(q.lines.Pop())
		case q.closed:
			return
		default:
			q.changed.Wait()
		}
	}
}

// write writes a line. The caller must hold mu, which write releases meanwhile.
func (q *LogQueue) write(l queued) {
	q.mu.Unlock()
	_, err := q.w.Write(l.text)
	q.mu.Lock()
	q.bytes -= len(l.text)
	q.stalled = false
	if err != nil {
		q.dropped++
	}
	close(l.written)
}

// Dropped returns how many lines have been dropped or could not be written.
func (q *LogQueue) Dropped() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.dropped
}

// Close accepts no more lines, and waits until the queue is empty. If ctx is done before, it returns ctx's error.
func (q *LogQueue) Close(ctx context.Context) error {
	q.mu.Lock()
	q.closed = true
	q.changed.Signal()
	q.mu.Unlock()
	select {
	case <-q.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

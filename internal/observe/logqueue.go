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

// LogQueueConfig configures a LogQueue. MaxBytes is required.
type LogQueueConfig struct {
	// MaxBytes bounds the bytes of lines in the queue, including the line that is being written.
	MaxBytes int
	// Wait bounds how long WriteThrough waits for its line to be written.
	Wait time.Duration
	// OnDropped, if set, is called with the number of lines that were dropped or could not be written, once the writer
	// works again and the queue is empty. The queue's goroutine calls it: it may call Write, and must not call
	// WriteThrough or Close.
	OnDropped func(lines uint64)
}

// LogQueue is a bounded queue of lines before a writer. Its methods are safe for concurrent use.
//
// A writer that stalls (a pipe without a reader, a mount that does not answer) does not stall the goroutines that log:
// a line without room is dropped and counted. Lines in the queue are lost when the process ends. The goroutine of a
// write that never returns is never ended.
type LogQueue struct {
	w    io.Writer
	cfg  LogQueueConfig
	done chan struct{} // closed once the queue's goroutine has ended

	mu      sync.Mutex
	changed *sync.Cond // run has something to do
	lines   fifo.Queue[queued]
	bytes   int // of lines, and of the line that is being written
	dropped uint64
	told    uint64 // how many of dropped OnDropped was called for
	stalled bool   // a WriteThrough has timed out, and no line was written since
	closed  bool
}

// queued is a line, and a channel that is closed once the line is written.
type queued struct {
	text    []byte
	written chan struct{}
}

// NewLogQueue returns a LogQueue that writes each line to w with one call of Write. The caller must call Close.
func NewLogQueue(w io.Writer, cfg LogQueueConfig) *LogQueue {
	q := &LogQueue{w: w, cfg: cfg, done: make(chan struct{})}
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

// WriteThrough queues a line and waits until it is written, LogQueueConfig.Wait at most. While the writer is stalled it
// does not wait: of several calls one after the other, only the first waits.
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
	case <-time.After(q.cfg.Wait):
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
	case q.bytes+len(line) > q.cfg.MaxBytes:
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
		switch untold := q.dropped - q.told; {
		case q.lines.Len() > 0:
			q.write(q.lines.Pop())
		case q.closed:
			return
		case untold > 0 && q.cfg.OnDropped != nil:
			q.told = q.dropped
			q.mu.Unlock()
			q.cfg.OnDropped(untold)
			q.mu.Lock()
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
		q.told++ // a line about it would fail as well
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

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

// The errors of lines that are not written.
var (
	ErrFull   = errors.New("logqueue: the writer does not keep up: line dropped")
	ErrClosed = errors.New("logqueue: closed")
)

// LogQueueConfig says how a LogQueue behaves. MaxBytes is required.
type LogQueueConfig struct {
	// MaxBytes bounds the lines that wait, with the one that is being written.
	MaxBytes int
	// Wait is how long WriteThrough waits for a line to be written, at most.
	Wait time.Duration
	// OnDropped, when set, is told of lines that were dropped or could not be written, once the writer works again and nothing waits.
	// It is called by the goroutine that writes: it may Write, and must not WriteThrough or Close.
	OnDropped func(lines uint64)
}

// LogQueue is a bounded queue of lines before a writer. Its methods are safe for concurrent use.
//
// A writer that stalls (a pipe that nobody reads, a mount that does not answer) does not stall those who log: without room a line is dropped
// and counted. What is queued when the process ends is lost, and the goroutine of a write that never returns is left behind.
type LogQueue struct {
	w    io.Writer
	cfg  LogQueueConfig
	done chan struct{} // closed once the goroutine that writes has ended

	mu      sync.Mutex
	changed *sync.Cond // there is something to do
	lines   fifo.Queue[queued]
	bytes   int // of lines, and of the one that is being written
	dropped uint64
	told    uint64 // of dropped, those that OnDropped has been told of
	stalled bool   // somebody has waited in vain, and nothing has been written since
	closed  bool
}

// queued is a line, and what is closed once it has been written.
type queued struct {
	text    []byte
	written chan struct{}
}

// NewLogQueue returns a LogQueue that writes each line to w by one call of Write. Close ends it.
func NewLogQueue(w io.Writer, cfg LogQueueConfig) *LogQueue {
	q := &LogQueue{w: w, cfg: cfg, done: make(chan struct{})}
	q.changed = sync.NewCond(&q.mu)
	go q.run()
	return q
}

// Write queues a line, which it copies. It never waits for the writer. The error is ErrFull or ErrClosed.
func (q *LogQueue) Write(line []byte) (int, error) {
	if _, err := q.add(line); err != nil {
		return 0, err
	}
	return len(line), nil
}

// WriteThrough queues a line and waits until it has been written, LogQueueConfig.Wait at most. While the writer is stalled it waits no
// longer: of several that log one after the other only the first one waits.
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

// add queues a line, and returns what is closed once it has been written; nil while the writer is stalled.
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

// write writes a line, for a holder of mu, who lets go of it meanwhile.
func (q *LogQueue) write(l queued) {
	q.mu.Unlock()
	_, err := q.w.Write(l.text)
	q.mu.Lock()
	q.bytes -= len(l.text)
	q.stalled = false
	if err != nil {
		q.dropped++
		q.told++ // whoever is told would write another one that fails
	}
	close(l.written)
}

// Dropped returns how many lines have been dropped or could not be written.
func (q *LogQueue) Dropped() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.dropped
}

// Close takes no more lines and waits until those that are queued have been written, or ctx is done, whose error it returns then.
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

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

	mu       sync.Mutex
	wake     fifo.Signal   // set when there is something to do
	written  chan struct{} // closed, and made anew, when a line has been written
	lines    fifo.Queue[[]byte]
	bytes    int    // of lines, and of the one that is being written
	put, out uint64 // lines that were ever queued; of these, those that are no longer
	dropped  uint64
	told     uint64 // of dropped, those that OnDropped has been told of
	stalled  bool   // somebody has waited in vain, and nothing has been written since
	closed   bool
}

// NewLogQueue returns a LogQueue that writes each line to w by one call of Write. Close ends it.
func NewLogQueue(w io.Writer, cfg LogQueueConfig) *LogQueue {
	q := &LogQueue{w: w, cfg: cfg, done: make(chan struct{}), wake: fifo.NewSignal(), written: make(chan struct{})}
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
	turn, err := q.add(line)
	if err != nil {
		return 0, err
	}
	timeout := time.After(q.cfg.Wait)
	for {
		q.mu.Lock()
		written, over := q.written, q.out >= turn || q.stalled
		q.mu.Unlock()
		if over {
			return len(line), nil
		}
		select {
		case <-written:
		case <-timeout:
			q.mu.Lock()
			q.stalled = q.out < turn
			q.mu.Unlock()
		}
	}
}

func (q *LogQueue) add(line []byte) (turn uint64, err error) {
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
		return 0, err
	}
	q.lines.Push(bytes.Clone(line))
	q.bytes += len(line)
	q.put++
	q.wake.Set()
	return q.put, nil
}

// run writes lines until the queue is closed and empty.
func (q *LogQueue) run() {
	defer close(q.done)
	for range q.wake {
		for {
			line, dropped, ended := q.next()
			if ended {
				return
			}
			if dropped > 0 && q.cfg.OnDropped != nil {
				q.cfg.OnDropped(dropped)
				continue
			}
			if line == nil {
				break
			}
			_, err := q.w.Write(line)
			q.wrote(len(line), err)
		}
	}
}

// next returns the next line to be written, or where there is none, how many have been dropped.
func (q *LogQueue) next() (line []byte, dropped uint64, ended bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.lines.Len() > 0 {
		return q.lines.Pop(), 0, false
	}
	if q.closed {
		return nil, 0, true
	}
	dropped, q.told = q.dropped-q.told, q.dropped
	return nil, dropped, false
}

func (q *LogQueue) wrote(bytes int, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.bytes -= bytes
	q.out++
	q.stalled = false
	if err != nil {
		q.dropped++
		q.told++ // whoever is told would write another one that fails
	}
	close(q.written)
	q.written = make(chan struct{})
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
	q.wake.Set()
	q.mu.Unlock()
	select {
	case <-q.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

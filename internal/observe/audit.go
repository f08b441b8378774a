package observe

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/reload"
)

// The rate of lines about denied calls.
const (
	perSecond = 10
	burst     = 50
)

// AuditConfig says where an AuditLog goes.
type AuditConfig struct {
	// Name is the file, which is made when there is none and appended to, or AuditStderr.
	Name   string
	Stderr io.Writer // what is written to where Name is "stderr"
	// Now tells the time of day. Required.
	Now func() time.Time
	// MaxQueued bounds the bytes of lines that wait for a destination that stalls. Required.
	MaxQueued int
	// OnError is called when a line cannot be written, for the first one since a line could. It must not call the AuditLog nor wait. Required.
	OnError func(error)
}

// patience is how long who causes a line waits for it to be written, and how long Close waits for all of them.
const patience = time.Second

// maxText bounds what a line repeats of what a caller has sent, in bytes: as much as a key may have.
const maxText = 1024

// AuditStderr is the Name that stands for standard error.
const AuditStderr = "stderr"

// AuditLog is an audit log. Its methods are safe for concurrent use, and do nothing for a nil AuditLog: none is kept.
//
// It has one line of JSON for each refund, reset, change of an override or of a gossip key, and denied call, in a file of its own or on
// standard error. Denied calls are bounded in their rate, because strangers can make them; a line says how many were left out. The others
// are all written, unless the destination stalls: then the first writer waits for a second at most, lines are queued up to
// a bound, and beyond it dropped and counted. The file is not synced, and others may change it.
type AuditLog struct {
	cfg   AuditConfig
	lines slog.Handler
	queue *LogQueue
	out   *output

	mu      sync.Mutex
	denied  *rate.Limiter
	leftOut int // denied calls since the last line that says how many; above 0 only while flush is due
	closed  bool
}

// OpenAudit returns an AuditLog, whose file is there.
func OpenAudit(cfg AuditConfig) (*AuditLog, error) {
	out := &output{cfg: cfg, to: cfg.Stderr}
	if err := out.open(); err != nil {
		return nil, err
	}
	l := &AuditLog{cfg: cfg, out: out, denied: rate.NewLimiter(perSecond, burst)}
	l.queue = NewLogQueue(out, LogQueueConfig{MaxBytes: cfg.MaxQueued, Wait: patience, OnDropped: l.dropped})
	l.lines = slog.NewJSONHandler(writerFunc(l.queue.WriteThrough), nil)
	return l, nil
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// dropped writes how many lines there was no room for. The queue calls it.
func (l *AuditLog) dropped(lines uint64) {
	l.write(slog.NewJSONHandler(l.queue, nil), "lines dropped", slog.Uint64("count", lines))
}

// Dropped returns how many lines could not be written, or found no room because the destination stalls.
func (l *AuditLog) Dropped() uint64 { return l.queue.Dropped() }

// Reopen opens the file anew, after it has been moved away. When that fails, the file that is open stays in use. A file system that
// does not answer within reload.Timeout is an error.
func (l *AuditLog) Reopen() error {
	if l == nil {
		return nil
	}
	return l.out.open()
}

// Close writes what is left to be said, waiting for a second at most, and closes the file. Events after it are dropped.
func (l *AuditLog) Close() error {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.flushLocked()
	l.closed = true
	l.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := l.queue.Close(ctx); err != nil {
		return err // a write goes on that may never end
	}
	l.out.turn()
	return l.out.close()
}

// Record writes an event.
func (l *AuditLog) Record(e auth.Event) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	if e.Action == auth.ActionDenied && !l.denied.AllowN(l.cfg.Now(), 1) {
		if l.leftOut++; l.leftOut == 1 {
			time.AfterFunc(time.Second, l.flush)
		}
		return
	}
	l.write(l.lines, string(e.Action), attributes(&e)...)
}

// flush writes how many denied calls were left out.
func (l *AuditLog) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flushLocked()
}

func (l *AuditLog) flushLocked() {
	if l.leftOut > 0 {
		l.write(l.lines, "denied calls omitted", slog.Int("count", l.leftOut))
		l.leftOut = 0
	}
}

func (l *AuditLog) write(to slog.Handler, message string, attrs ...slog.Attr) {
	r := slog.NewRecord(l.cfg.Now(), slog.LevelInfo, message, 0)
	r.AddAttrs(attrs...)
	// The output reports errors itself, and the queue counts what it drops.
	_ = to.Handle(context.Background(), r)
}

// attributes are an event's fields that say something.
func attributes(e *auth.Event) (attrs []slog.Attr) {
	text := func(name, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(name, value[:min(len(value), maxText)]))
		}
	}
	attrs = append(attrs, slog.String("caller", e.Caller))
	text("credential", e.Credential)
	text("identities", e.Identities)
	text("listener", e.Listener)
	if e.From != nil {
		text("from", e.From.String())
	}
	text("policy", e.Target.Policy)
	if e.Target.Limit != nil {
		text("inline_namespace", cmp.Or(e.Target.Namespace, "default"))
	}
	text("key", e.Target.Key)
	if e.Action == auth.ActionRefund {
		attrs = append(attrs, slog.Int64("units", e.Units), slog.Int64("refunded", e.Result))
	}
	text("reason", e.Reason)
	text("what", e.What)
	if e.Err != nil {
		text("error", e.Err.Error())
	}
	return attrs
}

// output is the file, or standard error. One goroutine writes.
type output struct {
	cfg    AuditConfig
	to     io.Writer
	file   *os.File                // that to is; nil: standard error
	next   atomic.Pointer[os.File] // to be written from now on; nil: no other
	failed bool                    // the last write
}

// open opens the file anew. A write to the one that is open, which may not end, is not waited for.
func (o *output) open() error {
	if o.cfg.Name == AuditStderr {
		return nil
	}
	now, err := reload.OpenAppend(o.cfg.Name)
	if err != nil {
		return err
	}
	if unused := o.next.Swap(now); unused != nil {
		return unused.Close()
	}
	return nil
}

// turn turns to the file that was opened last.
func (o *output) turn() {
	if next := o.next.Swap(nil); next != nil {
		_ = o.close() // of the one before, which has all that was written to it
		o.to, o.file = next, next
	}
}

func (o *output) close() error {
	if o.file == nil {
		return nil
	}
	return o.file.Close()
}

// Write implements io.Writer.
func (o *output) Write(line []byte) (int, error) {
	o.turn()
	n, err := o.to.Write(line)
	if err != nil && !o.failed {
		o.cfg.OnError(fmt.Errorf("audit log: %w", err))
	}
	o.failed = err != nil
	return n, err
}

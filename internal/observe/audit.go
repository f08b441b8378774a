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

// Bounds on lines about denied calls: perSecond, and burst at once.
const (
	perSecond = 10
	burst     = 50
)

// AuditConfig configures an AuditLog.
type AuditConfig struct {
	// Name is the file, which is created if it does not exist and appended to, or AuditStderr.
	Name   string
	Stderr io.Writer // the destination if Name is AuditStderr
	// Now returns the time of day. Required.
	Now func() time.Time
	// MaxQueued bounds the bytes of lines that wait while the destination stalls. Required.
	MaxQueued int
	// OnError is called if a line cannot be written, for the first one after a line that could. It must not call the
	// AuditLog, and must not wait. Required.
	OnError func(error)
}

// patience is how long Record waits for its line to be written, and how long Close waits for all lines.
const patience = time.Second

// maxText bounds the bytes of a caller's text in a line: the longest key has as many.
const maxText = 1024

// AuditStderr is the Name for standard error.
const AuditStderr = "stderr"

// AuditLog is an audit log. Its methods are safe for concurrent use. Record, Reopen and Close do nothing for a nil
// *AuditLog.
//
// It has one line of JSON for each refund, reset, change of an override or of a gossip key, and denied call, in a file
// or on standard error. The rate of lines about denied calls is bounded, because strangers can cause them; a line says
// how many were left out. All other lines are written, unless the destination stalls: then the first Record waits for a
// second at most, and lines are queued up to MaxQueued; more are dropped and counted. The file is not synced, and other
// programs may change it.
type AuditLog struct {
	cfg   AuditConfig
	lines slog.Handler
	queue *LogQueue
	out   *output

	mu      sync.Mutex
	denied  *rate.Limiter
	leftOut int // denied calls since the last line about them; above 0 only while a flush is due
	closed  bool
}

// OpenAudit returns an AuditLog. Its file exists then.
func OpenAudit(cfg AuditConfig) (*AuditLog, error) {
	out := &output{cfg: cfg, to: cfg.Stderr}
	if err := out.open(); err != nil {
		return nil, err
	}
	l := &AuditLog{cfg: cfg, out: out, denied: rate.NewLimiter(perSecond, burst)}
	l.queue = NewLogQueue(out, cfg.MaxQueued)
	l.lines = slog.NewJSONHandler(writerFunc(l.queue.WriteThrough), nil)
	return l, nil
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// Dropped returns how many lines could not be written, or were dropped because the destination stalled.
func (l *AuditLog) Dropped() uint64 { return l.queue.Dropped() }

// Reopen opens the file again, after it was moved. If that fails, the open file stays in use. It fails if the file
// system does not answer within reload.Timeout.
func (l *AuditLog) Reopen() error {
	if l == nil {
		return nil
	}
	return l.out.open()
}

// Close writes what is queued, waiting for a second at most, and closes the file. It drops later events.
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
		return err // a write is in progress that may never end
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
	l.write(string(e.Action), attributes(&e)...)
}

// flush writes how many denied calls were left out.
func (l *AuditLog) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flushLocked()
}

func (l *AuditLog) flushLocked() {
	if l.leftOut > 0 {
		l.write("denied calls omitted", slog.Int("count", l.leftOut))
		l.leftOut = 0
	}
}

func (l *AuditLog) write(message string, attrs ...slog.Attr) {
	r := slog.NewRecord(l.cfg.Now(), slog.LevelInfo, message, 0)
	r.AddAttrs(attrs...)
	// output reports its errors itself, and the queue counts the lines that it drops.
	_ = l.lines.Handle(context.Background(), r)
}

// attributes returns the fields of an event that are not empty.
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

// output is the file, or standard error. Only the goroutine of the queue writes.
type output struct {
	cfg    AuditConfig
	to     io.Writer
	file   *os.File                // the file that to is; nil: standard error
	next   atomic.Pointer[os.File] // the file to write to from now on; nil: no change
	failed bool                    // the last write has failed
}

// open opens the file again. It does not wait for a write to the old file, which may never end.
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

// turn changes to the file that open opened last.
func (o *output) turn() {
	if next := o.next.Swap(nil); next != nil {
		_ = o.close() // the old file, which has all lines that were written to it
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

package node

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/weirlimit/weir/internal/observe"
)

// denials counts denied and rejected connections and requests. It logs the first of a kind, and then at most one in
// denialInterval, so that a denied caller cannot fill a disk.
type denials struct {
	log     *slog.Logger
	metrics *observe.Security
	now     func() time.Time

	mu   sync.Mutex
	last map[denialKind]*denialCount
}

// denialKind has only texts of the program, so that callers cannot make the map grow.
type denialKind struct{ listener, reason string }

type denialCount struct {
	logged   time.Time
	unlogged int // since logged
}

// denialInterval is the least time between two log lines of one kind.
const denialInterval = time.Second

// maxWhat bounds what a line says of a denial, in bytes: errors of TLS repeat what the other end has sent.
const maxWhat = 1024

func clipped(what string) string { return what[:min(len(what), maxWhat)] }

func newDenials(log *slog.Logger, m *observe.Security) *denials {
	return &denials{log: log, metrics: m, now: time.Now, last: make(map[denialKind]*denialCount)}
}

// note counts a denial or rejection, and may log it. what must hold no secret.
func (r *denials) note(listener, reason string, from net.Addr, what string) {
	r.metrics.Denied(listener, reason)
	unlogged, ok := r.turn(denialKind{listener, reason})
	if !ok {
		return
	}
	address := ""
	if from != nil {
		address = from.String()
	}
	r.log.Warn("access denied", "listener", listener, "reason", reason, "from", address, "what", clipped(what),
		"unlogged", unlogged)
}

// httpError logs an error of net/http about a caller, such as that it sent a GOAWAY.
func (r *denials) httpError(listener, what string) {
	if unlogged, ok := r.turn(denialKind{listener, "http_error"}); ok {
		r.log.Warn("http connection failed", "listener", listener, "what", clipped(what), "unlogged", unlogged)
	}
}

// turn reports whether an event of this kind is to be logged, and how many were not logged since the last one.
func (r *denials) turn(k denialKind) (unlogged int, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.last[k]
	if c == nil {
		c = new(denialCount)
		r.last[k] = c
	}
	now := r.now()
	if !c.logged.IsZero() && now.Sub(c.logged) < denialInterval {
		c.unlogged++
		return 0, false
	}
	unlogged = c.unlogged
	c.logged, c.unlogged = now, 0
	return unlogged, true
}

// paced is the log of the streams between nodes. A process that reaches the peer port can cause their lines as often as
// it likes, so they are written at 10 a second, 100 at once.
type paced struct {
	slog.Handler
	lines    *rate.Limiter
	unlogged atomic.Int64 // since the last line
}

func newPaced(log *slog.Logger) *slog.Logger {
	return slog.New(&paced{Handler: log.Handler(), lines: rate.NewLimiter(10, 100)})
}

// Handle implements slog.Handler.
func (p *paced) Handle(ctx context.Context, r slog.Record) error {
	if !p.lines.Allow() {
		p.unlogged.Add(1)
		return nil
	}
	if n := p.unlogged.Swap(0); n > 0 {
		r.AddAttrs(slog.Int64("unlogged", n))
	}
	return p.Handler.Handle(ctx, r)
}

// Package console serves a page that shows a cluster and tries checks: HTML, CSS and JavaScript that are part of the
// program, and a stream of server-sent events (WHATWG HTML, 9.2) with the data.
//
// One goroutine (collect) takes a snapshot of the cluster once a second for all open pages, and none while no page is
// open. Streams are bounded, in all and for each source. A stream ends when its browser disconnects or does not read.
//
// The package does not authorize: the code that mounts the handlers does, and Snapshot.Render decides what a caller
// sees. It does not promise that each snapshot reaches each stream: a slow stream skips to the newest.
package console

import (
	"cmp"
	"context"
	"embed"
	"io"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/netaddr"
)

// Path is the path of the page.
const Path = "/console"

// The default bounds on streams.
const (
	DefaultMaxStreams  = 64
	DefaultMaxOfSource = 8
)

const (
	every        = time.Second
	writeTimeout = 10 * time.Second // for writing one event
)

// Snapshot is what the page shows at one moment.
type Snapshot interface {
	// Render returns the JSON object of what the caller in ctx may see. ok is false when the caller may see nothing;
	// its stream ends.
	Render(ctx context.Context) (json []byte, ok bool)
}

// Config is what a Console needs. Collect, Caller and Logger are required.
type Config struct {
	// Collect takes a snapshot; nil: none can be had at the moment. One goroutine calls it.
	Collect func(context.Context) Snapshot
	// MaxStreams bounds all streams, MaxOfSource those of one caller at one address (IPv6: one /64); 0: the default.
	MaxStreams, MaxOfSource int
	// Source finds the address of a request's caller.
	Source netaddr.Resolver
	// Caller returns the name of the caller in a request's context; empty: no name. Once half of MaxStreams are in use,
	// a named caller gets a stream only while it has fewer than are free (fairshare.Places).
	Caller func(context.Context) string
	Logger *slog.Logger
}

// Console is the page with its streams. Its methods are safe for concurrent use.
type Console struct {
	cfg    Config
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup // the goroutine collect

	mu         sync.Mutex
	bySource   map[source]int
	streams    *fairshare.Places
	collecting bool
	newest     Snapshot      // nil before the first
	changed    chan struct{} // closed when newest changes
}

// source is the caller and address of a stream. It distinguishes callers behind one proxy, and one caller's hosts.
type source struct{ address, caller string }

// pageHeader is in the page's requests for events. A page of another site cannot send it: its browser would first ask
// the node (CORS preflight), which does not allow it.
const pageHeader = "Weir-Console"

//go:embed assets
var files embed.FS

// types has the Content-Type of files by extension.
var types = map[string]string{".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
	".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

// New returns a Console. The caller must Close it.
func New(cfg Config) *Console {
	cfg.MaxStreams, cfg.MaxOfSource = cmp.Or(cfg.MaxStreams, DefaultMaxStreams),
		cmp.Or(cfg.MaxOfSource, DefaultMaxOfSource)
	c := &Console{cfg: cfg, bySource: make(map[source]int), changed: make(chan struct{}),
		streams: fairshare.New(cfg.MaxStreams)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c
}

// Close ends all streams, and waits for collect.
func (c *Console) Close() {
	c.cancel()
	c.work.Wait()
}

// Paths returns the paths of the page and its files. They hold nothing secret.
func (c *Console) Paths() []string {
	paths := []string{Path}
	entries, _ := files.ReadDir("assets") // sorted by name; the files are embedded, so that it cannot fail
	for _, e := range entries {
		if e.Name() != page {
			paths = append(paths, Path+"/"+e.Name())
		}
	}
	return paths
}

// page is the file that Path serves.
const page = "index.html"

// policy is the page's content security policy: its own files and this node only, and no page may frame it.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// ServeAsset answers GET for one of Paths.
func (c *Console) ServeAsset(w http.ResponseWriter, r *http.Request) {
	name := cmp.Or(strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, Path), "/"), page)
	file, err := files.Open("assets/" + name)
	if err != nil {
		http.NotFound(w, r)
		return
	}
	h := w.Header()
	secure(h)
	h.Set("Content-Type", types[path.Ext(name)])
	h.Set("Cache-Control", "no-cache") // so that a page never runs with files of another version
	http.ServeContent(w, r, name, time.Time{}, file.(io.ReadSeeker))
}

// secure sets the headers that restrict what a browser lets the page do, and other sites do with it.
func secure(h http.Header) {
	h.Set("Content-Security-Policy", policy)
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}

func (c *Console) write(w http.ResponseWriter, body []byte) bool {
	if _, err := w.Write(body); err != nil {
		c.cfg.Logger.Debug("answer not written", "error", err)
		return false
	}
	return true
}

// enter takes a place for a stream, and starts collect for the first one.
func (c *Console) enter(from source) (place fairshare.Taken, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil || c.bySource[from] >= c.cfg.MaxOfSource {
		return place, false
	}
	if place = c.streams.Take(from.caller, 1); place.N == 0 {
		return place, false
	}
	c.bySource[from]++
	if !c.collecting {
		c.collecting = true
		c.work.Go(c.collect)
	}
	return place, true
}

func (c *Console) leave(from source, place fairshare.Taken) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streams.Give(place)
	if c.bySource[from]--; c.bySource[from] == 0 {
		delete(c.bySource, from)
	}
}

// collect takes snapshots until no stream is open.
func (c *Console) collect() {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		newest := c.cfg.Collect(c.ctx)
		c.mu.Lock()
		if taken, _ := c.streams.InUse(); taken == 0 || c.ctx.Err() != nil {
			// A later stream must not begin with an old snapshot.
			c.collecting, c.newest = false, nil
			c.mu.Unlock()
			return
		}
		c.newest = newest
		close(c.changed)
		c.changed = make(chan struct{})
		c.mu.Unlock()
		select {
		case <-tick.C:
		case <-c.ctx.Done():
		}
	}
}

// look returns the newest snapshot, and a channel that is closed when there is a newer one.
func (c *Console) look() (Snapshot, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.newest, c.changed
}

// ServeEvents answers GET for the stream: an event for each snapshot.
func (c *Console) ServeEvents(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	secure(h)
	if r.Header.Get(pageHeader) == "" {
		http.Error(w, "this stream is for the page at "+Path+": it needs the header "+pageHeader, http.StatusForbidden)
		return
	}
	from := source{c.cfg.Source.Key(r.RemoteAddr, r.Header), c.cfg.Caller(r.Context())}
	place, ok := c.enter(from)
	if !ok {
		h.Set("Retry-After", "5")
		http.Error(w, "too many pages of the console are open: close one, or try again later",
			http.StatusServiceUnavailable)
		return
	}
	defer c.leave(from, place)
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // otherwise nginx holds events back until its buffer is full
	control := http.NewResponseController(w)
	// The stream lasts longer than the server's time-outs for a request. send has a deadline for each event.
	_ = control.SetReadDeadline(time.Time{})
	w.WriteHeader(http.StatusOK)
	for {
		newest, changed := c.look()
		if newest != nil && !c.send(r.Context(), w, control, newest) {
			return
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		case <-c.ctx.Done():
			return
		}
	}
}

// send writes one event. It returns whether the stream goes on.
func (c *Console) send(ctx context.Context, w http.ResponseWriter, control *http.ResponseController, s Snapshot) bool {
	body, ok := s.Render(ctx)
	if !ok {
		return false
	}
	// If w does not support deadlines, the server's time-out ends the stream.
	_ = control.SetWriteDeadline(time.Now().Add(writeTimeout))
	// In three parts: a joined copy of the body would take memory for as long as the network takes.
	return c.write(w, []byte("event: snapshot\ndata: ")) && c.write(w, body) && c.write(w, []byte("\n\n")) &&
		control.Flush() == nil
}

// Package console serves a page on which people watch a cluster and try a check: HTML, CSS and JavaScript that are part of the
// program, and a stream of server-sent events (WHATWG HTML, 9.2) with what the page shows.
//
// The cluster is asked once a second for all open pages together, and not at all while none is open. Streams are bounded,
// in all and for each source; a browser that goes away frees its place, and one that does not read loses it.
//
// It authorizes nobody: whoever mounts the handlers does, and what is rendered for a caller is up to the Snapshot. What it does not
// promise: that every snapshot reaches every stream. A slow one gets the newest.
package console

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/netaddr"
)

// Path is where the page is.
const Path = "/console"

// Bounds on streams, unless Config says otherwise.
const (
	DefaultMaxStreams  = 64
	DefaultMaxOfSource = 8
)

const (
	every        = time.Second
	writeTimeout = 10 * time.Second // for an event, until the network has taken it
)

// Snapshot is what there is to be seen at a moment.
type Snapshot interface {
	// Render returns the JSON object of what the caller in ctx may see. ok is false when it may see nothing, any more.
	Render(ctx context.Context) (json []byte, ok bool)
}

// Config is what a Console needs.
type Config struct {
	// Collect takes a snapshot; nil: there is none at the moment. It is called by one goroutine.
	Collect func(context.Context) Snapshot
	// MaxStreams bounds the streams in all, and MaxOfSource those of one caller at one address (IPv6: at one /64); 0 stands for the defaults.
	MaxStreams, MaxOfSource int
	// Source finds the address of a request's sender.
	Source netaddr.Resolver
	// Caller returns the name of the caller in a request's context: once half of MaxStreams are taken, nobody has more than are free
	// (fairshare.Places). Empty: it is not told apart. Required, as Logger is.
	Caller func(context.Context) string
	Logger *slog.Logger
}

// Console is the page with its streams. Its methods are safe for concurrent use.
type Console struct {
	cfg    Config
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup // the collecting goroutine

	mu         sync.Mutex
	bySource   map[source]int
	streams    *fairshare.Places
	collecting bool
	newest     Snapshot      // nil before the first
	changed    chan struct{} // closed when there is a newer one
}

// source is whom a stream is for: callers behind one proxy are told apart, and so are the pages of one caller on several hosts.
type source struct{ address, caller string }

// pageHeader is in the page's requests for events. A browser sends it for no page of another site: it would have to ask the node first
// (CORS preflight), which does not allow it.
const pageHeader = "Weir-Console"

//go:embed assets
var files embed.FS

// types are those of the files, by their extensions.
var types = map[string]string{".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

// New returns a Console. Close ends it.
func New(cfg Config) *Console {
	cfg.MaxStreams, cfg.MaxOfSource = cmp.Or(cfg.MaxStreams, DefaultMaxStreams), cmp.Or(cfg.MaxOfSource, DefaultMaxOfSource)
	c := &Console{cfg: cfg, bySource: make(map[source]int), changed: make(chan struct{}), streams: fairshare.New(cfg.MaxStreams)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c
}

// Close ends all streams, and waits for the goroutine that collects.
func (c *Console) Close() {
	c.cancel()
	c.work.Wait()
}

// Paths are those of the page and its files, which hold nothing secret.
func (c *Console) Paths() []string {
	paths := []string{Path}
	entries, _ := files.ReadDir("assets") // which are part of the program, in the order of their names
	for _, e := range entries {
		if e.Name() != page {
			paths = append(paths, Path+"/"+e.Name())
		}
	}
	return paths
}

// page is the file at Path.
const page = "index.html"

// policy is the page's content security policy: nothing but its own files and this node, and no page around it.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// ServeAsset answers GET of one of Paths.
func (c *Console) ServeAsset(w http.ResponseWriter, r *http.Request) {
	name := cmp.Or(strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, Path), "/"), page)
	body, err := files.ReadFile("assets/" + name)
	if err != nil {
		http.NotFound(w, r)
		return
	}
	h := w.Header()
	secure(h)
	h.Set("Content-Type", types[path.Ext(name)])
	h.Set("Cache-Control", "no-cache") // ask whether it is the same, so that a page never meets another version's files
	sum := sha256.Sum256(body)
	h.Set("Etag", `"`+hex.EncodeToString(sum[:8])+`"`)
	http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(body))
}

// secure sets the headers that keep a browser from doing anything but showing the page.
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

// enter takes a place for a stream, and starts to collect for the first.
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

// collect takes snapshots until nobody looks any more.
func (c *Console) collect() {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		newest := c.cfg.Collect(c.ctx)
		c.mu.Lock()
		if taken, _ := c.streams.InUse(); taken == 0 || c.ctx.Err() != nil {
			// The next stream is not to begin with what is old by then.
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

// look returns the newest snapshot, and what is closed when there is a newer one.
func (c *Console) look() (Snapshot, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.newest, c.changed
}

// ServeEvents answers GET of the stream: an event for each snapshot.
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
		http.Error(w, "too many pages of the console are open: close one, or try again later", http.StatusServiceUnavailable)
		return
	}
	defer c.leave(from, place)
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // nginx would keep events until it has a buffer full
	control := http.NewResponseController(w)
	// The stream outlives the times that a request may take; instead each event has one.
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

// send writes one event, and reports whether the stream goes on.
func (c *Console) send(ctx context.Context, w http.ResponseWriter, control *http.ResponseController, s Snapshot) bool {
	body, ok := s.Render(ctx)
	if !ok {
		return false
	}
	// Where no deadline is supported the server's own time ends the stream.
	_ = control.SetWriteDeadline(time.Now().Add(writeTimeout))
	// In three parts, for a copy of the body would stay for as long as the network takes.
	return c.write(w, []byte("event: snapshot\ndata: ")) && c.write(w, body) && c.write(w, []byte("\n\n")) && control.Flush() == nil
}

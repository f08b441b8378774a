package console

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/test/expect"
)

// picture is a Snapshot that is the same for everybody, but for who may see nothing.
type picture struct {
	n      int64
	closed *atomic.Bool
}

func (p picture) Render(context.Context) ([]byte, bool) {
	return fmt.Appendf(nil, `{"n":%d}`, p.n), !p.closed.Load()
}

// stage is a Console whose snapshots are numbered.
type stage struct {
	*Console
	taken  atomic.Int64
	closed atomic.Bool // for everybody
}

func newStage(t *testing.T, cfg Config) *stage {
	t.Helper()
	s := new(stage)
	cfg.Logger = slog.New(slog.DiscardHandler)
	if cfg.Caller == nil {
		cfg.Caller = func(context.Context) string { return "" }
	}
	cfg.Collect = func(context.Context) Snapshot { return picture{s.taken.Add(1), &s.closed} }
	s.Console = New(cfg)
	return s
}

// viewer is somebody with the page open.
type viewer struct {
	*httptest.ResponseRecorder
	mu     sync.Mutex
	broken bool
	cancel context.CancelFunc
	done   chan struct{}
}

func (v *viewer) Write(p []byte) (int, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.broken {
		return 0, errors.New("the network has gone")
	}
	return v.ResponseRecorder.Write(p)
}

func (v *viewer) text() string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.Body.String()
}

func (v *viewer) ended() bool {
	select {
	case <-v.done:
		return true
	default:
		return false
	}
}

// watch opens a stream from an address, with headers besides.
func (s *stage) watch(t *testing.T, from string, headers ...string) *viewer {
	ctx, cancel := context.WithCancel(t.Context())
	v := &viewer{ResponseRecorder: httptest.NewRecorder(), cancel: cancel, done: make(chan struct{})}
	r := httptest.NewRequestWithContext(ctx, "GET", Path+"/events", nil)
	r.Header.Set(pageHeader, "page")
	for h := range slices.Chunk(headers, 2) {
		r.Header.Set(h[0], h[1])
	}
	r.RemoteAddr = from
	go func() {
		defer close(v.done)
		s.ServeEvents(v, r)
	}()
	synctest.Wait()
	return v
}

// However many look, the cluster is asked once a second, and not at all when nobody does.
func TestOneCollectorForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, Config{})
		defer s.Close()
		time.Sleep(5 * time.Second)
		expect.True(t, s.taken.Load() == 0, "%d snapshots for nobody", s.taken.Load())
		a := s.watch(t, "10.0.0.1:1")
		want := "event: snapshot\ndata: {\"n\":1}\n\n"
		expect.True(t, a.text() == want && a.Header().Get("Content-Type") == "text/event-stream" &&
			a.Header().Get("Cache-Control") == "no-store", "%q, %v, want %q at once", a.text(), a.Header(), want)
		b := s.watch(t, "10.0.0.2:1")
		expect.True(t, strings.Contains(b.text(), `{"n":1}`), "who comes later gets nothing at once: %q", b.text())
		time.Sleep(3*time.Second + time.Millisecond)
		synctest.Wait()
		n := s.taken.Load()
		expect.True(t, n == 4 && strings.Count(a.text(), "event: ") == 4 && strings.Count(b.text(), "event: ") == 4,
			"%d snapshots; %q; %q", n, a.text(), b.text())
		a.cancel()
		b.cancel()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		before := s.taken.Load()
		if time.Sleep(time.Minute); s.taken.Load() != before || !a.ended() || !b.ended() {
			t.Errorf("%d snapshots after all have gone", s.taken.Load()-before)
		}
		c := s.watch(t, "10.0.0.1:1")
		want = fmt.Sprintf(`{"n":%d}`, before+1)
		expect.True(t, strings.Contains(c.text(), want) && strings.Count(c.text(), "event: ") == 1,
			"who comes back sees %q, want %s only", c.text(), want)
	})
}

func TestBoundsOnStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, Config{MaxStreams: 4, MaxOfSource: 2})
		defer s.Close()
		taken := func(v *viewer) bool { return v.Code == http.StatusOK }
		first := s.watch(t, "10.0.0.1:1")
		expect.True(t, taken(first) && taken(s.watch(t, "10.0.0.1:2")), "two of one source are not taken")
		v := s.watch(t, "[::ffff:10.0.0.1]:3")
		expect.True(t, !taken(v) && v.Code == http.StatusServiceUnavailable && v.Header().Get("Retry-After") == "5" &&
			v.ended(), "the third of one source: %d %v", v.Code, v.Header())
		expect.True(t, taken(s.watch(t, "[2001:db8::1]:1")) && taken(s.watch(t, "[2001:db8::2]:1")),
			"two of another source are not taken")
		expect.True(t, !taken(s.watch(t, "[2001:db8::3]:1")) && !taken(s.watch(t, "[2001:db8:0:1::1]:1")),
			"there are more streams than there may be")
		first.cancel()
		synctest.Wait()
		expect.True(t, taken(s.watch(t, "10.0.0.1:4")), "a browser that has gone still has its place")
	})
}

// One caller leaves a quarter of the streams to others, from however many addresses it comes.
func TestOneCallerTakesNotAllStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		who := "greedy"
		s := newStage(t, Config{MaxStreams: 8, Caller: func(context.Context) string { return who }})
		defer s.Close()
		taken := 0
		for i := range 20 {
			if s.watch(t, fmt.Sprintf("10.0.0.%d:1", i)).Code == http.StatusOK {
				taken++
			}
		}
		expect.True(t, taken >= 4 && taken <= 6, "one caller has %d of 8 streams", taken)
		who = "modest"
		expect.Equal(t, s.watch(t, "10.0.1.1:1").Code, http.StatusOK, "another caller gets none")
	})
}

// A stream ends when its caller may not see anything any more, when the network has gone, and with the node.
func TestStreamsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, Config{})
		lost, denied := s.watch(t, "10.0.0.1:1"), s.watch(t, "10.0.0.2:1")
		lost.mu.Lock()
		lost.broken = true
		lost.mu.Unlock()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		expect.True(t, lost.ended() && !denied.ended(),
			"the stream of a network that has gone goes on, or the other does not")
		s.closed.Store(true)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		n := strings.Count(denied.text(), "event: ")
		expect.True(t, denied.ended() && n <= 4, "the stream of who may not see it goes on: %d", n)
		s.closed.Store(false)
		open := s.watch(t, "10.0.0.3:1")
		s.Close()
		synctest.Wait()
		expect.True(t, open.ended() && s.watch(t, "10.0.0.3:1").Code == http.StatusServiceUnavailable,
			"a stream outlives the node")
	})
}

// The page is made of its own files alone, and nothing in them asks the browser for what its policy denies.
func TestAssets(t *testing.T) {
	s := newStage(t, Config{})
	defer s.Close()
	get := func(path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		s.ServeAsset(w, httptest.NewRequest("GET", path, nil))
		return w
	}
	paths := s.Paths()
	if !slices.Equal(paths, []string{"/console", "/console/app.js", "/console/icon.svg", "/console/style.css"}) {
		t.Error(paths)
	}
	for _, path := range paths {
		w := get(path)
		h := w.Header()
		expect.True(t, w.Code == http.StatusOK && w.Body.Len() != 0 && h.Get("Content-Type") != "",
			"%s: %d %v", path, w.Code, h)
		csp := h.Get("Content-Security-Policy")
		expect.True(t, !strings.Contains(csp, "unsafe") && strings.Contains(csp, "default-src 'none'") &&
			strings.Contains(csp, "frame-ancestors 'none'") && h.Get("X-Content-Type-Options") == "nosniff" &&
			h.Get("Referrer-Policy") == "no-referrer", "%s: %v", path, h)
		expect.Equal(t, regexp.MustCompile(`(?i)(src|href|url)\s*[=(]\s*["']?(https?:)?//|@import`).FindString(
			w.Body.String()), "",
			"%s asks others", path)
	}
	page := get("/console").Body.Bytes()
	for _, bad := range []string{`<script>`, `<style`, ` style=`, ` on[a-z]+=`, `javascript:`} {
		found := regexp.MustCompile(bad).Find(page)
		expect.True(t, found == nil, "the page has %s", found)
	}
	for _, id := range regexp.MustCompile(`\$\("([a-z-]+)"\)`).FindAllSubmatch(get("/console/app.js").Body.Bytes(),
		-1) {
		expect.True(t, bytes.Contains(page, fmt.Appendf(nil, `id="%s"`, id[1])),
			"the script asks for #%s, which the page has not", id[1])
	}
	expect.Equal(t, regexp.MustCompile(`innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(`).FindString(
		get("/console/app.js").Body.String()), "", "the script makes HTML of text")
	w := get("/console/other.js")
	expect.Equal(t, w.Code, http.StatusNotFound, "another path")
}

// TestOtherSitesPages: a page of another site, in a browser that reaches the node, holds no stream: whatever it has the
// browser send without asking the node first lacks the header of the page's own requests.
func TestOtherSitesPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, Config{})
		defer s.Close()
		for what, header := range map[string]http.Header{
			"an image of a page in plain text": {},
			"an EventSource": {"Origin": {"http://evil.test"}, "Accept": {"text/event-stream"},
				"Sec-Fetch-Site": {"cross-site"}},
		} {
			w := httptest.NewRecorder()
			r := httptest.NewRequestWithContext(t.Context(), "GET", Path+"/events", nil)
			r.Header = header
			s.ServeEvents(w, r)
			expect.True(t, w.Code == http.StatusForbidden && s.taken.Load() == 0, "%s: %d %s", what, w.Code, w.Body)
		}
	})
}

// TestSourcesBehindAProxy: neither one host behind a trusted proxy nor one caller at an address takes the places of the
// others there.
func TestSourcesBehindAProxy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		who, from := "", ""
		s := newStage(t, Config{
			MaxOfSource: 2, Caller: func(context.Context) string { return who },
			Source: netaddr.Resolver{Trusted: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/32")}},
		})
		defer s.Close()
		open := func() int { return s.watch(t, "10.0.0.1:1", "X-Forwarded-For", from).Code }
		for _, c := range []struct{ who, from string }{{"", "192.0.2.1"}, {"", "192.0.2.2"}, {"greedy", "192.0.2.1"},
			{"modest", "192.0.2.1"}} {
			who, from = c.who, c.from
			for i, want := range []int{http.StatusOK, http.StatusOK, http.StatusServiceUnavailable} {
				expect.Equal(t, open(), want, "%+v, stream %d", c, i)
			}
		}
	})
}

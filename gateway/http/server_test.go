package httpapi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"
	"unicode/utf8"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
)

// serve puts the handler behind a real listener.
func serve(t *testing.T, h http.Handler) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(nil)
	s.Config = NewServer(h, slog.New(slog.DiscardHandler))
	s.Start()
	t.Cleanup(s.Close)
	return s
}

func TestOnTheWire(t *testing.T) {
	d := newAPI(t, &scripted.Service{Results: []limit.Result{{Decision: refused}}}, nil)
	s := serve(t, d.handler)
	conn := must.Value(net.Dial("tcp", s.Listener.Addr().String()))(t)
	defer conn.Close()
	const body = `{"policy":"login","key":"alice"}`
	io.WriteString(conn, "POST /v1/check HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nConnection: close\r\n"+
		"Transfer-Encoding: chunked\r\n\r\n5\r\n"+body[:5]+"\r\n1b\r\n"+body[5:]+"\r\n0\r\n\r\n")
	got := must.Value(io.ReadAll(bufio.NewReader(conn)))(t)
	for _, want := range []string{
		"HTTP/1.1 429 Too Many Requests\r\n", "\r\nContent-Type: application/json\r\n", "\r\nRetry-After: 37\r\n",
		"\r\nRateLimit-Policy: \"login\";q=5;w=60\r\n", "\r\nRateLimit: \"login\";r=0;t=37\r\n",
		"\r\nX-RateLimit-Limit: 5\r\n", "\r\nX-RateLimit-Remaining: 0\r\n", "\r\nX-RateLimit-Reset: 37\r\n", "\r\n\r\n" + refusedJSON,
	} {
		expect.True(t, strings.Contains(string(got), want), "no %q in\n%s", want, got)
	}
}

// TestBodyTooLarge sends bodies of unknown and of stated size that exceed the bound.
func TestBodyTooLarge(t *testing.T) {
	d := newAPI(t, new(scripted.Service), func(c *Config) { c.MaxBody = 1000 })
	s := serve(t, d.handler)
	for _, body := range []io.Reader{strings.NewReader(strings.Repeat(" ", 1001)), io.LimitReader(spaces{}, 1<<20)} {
		resp := must.Value(http.Post(s.URL+"/v1/check", "application/json", body))(t)
		wantProblem(t, resp, 413, "", "larger than 1000 bytes")
		resp.Body.Close()
	}
	// What is announced is not waited for.
	r := httptest.NewRequest(http.MethodPost, "/v1/check", iotest.ErrReader(errors.New("it was read")))
	r.Header.Set("Content-Type", "application/json")
	r.ContentLength = 1 << 40
	w := httptest.NewRecorder()
	d.handler.ServeHTTP(w, r)
	wantProblem(t, w.Result(), 413, "", "larger than 1000 bytes")
	expect.True(t, len(d.service.Calls()) == 0, "the service was asked")
}

type spaces struct{}

func (spaces) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

func TestBodyCutShort(t *testing.T) {
	d := newAPI(t, new(scripted.Service), nil)
	s := serve(t, d.handler)
	conn := must.Value(net.Dial("tcp", s.Listener.Addr().String()))(t)
	defer conn.Close()
	io.WriteString(conn, "POST /v1/check HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{}")
	conn.(*net.TCPConn).CloseWrite()
	resp := must.Value(http.ReadResponse(bufio.NewReader(conn), nil))(t)
	defer resp.Body.Close()
	wantProblem(t, resp, 400, "", "could not be read")
}

// blocking is a Service that waits for its caller to go away.
type blocking struct {
	scripted.Service
	started, ended chan struct{}
}

func (b *blocking) Check(ctx context.Context, _ []limit.Check) ([]limit.Result, error) {
	close(b.started)
	<-ctx.Done()
	close(b.ended)
	return nil, ctx.Err()
}

func TestCallerGoesAway(t *testing.T) {
	service := &blocking{started: make(chan struct{}), ended: make(chan struct{})}
	d := newAPI(t, &service.Service, func(c *Config) { c.Service = service })
	s := serve(t, d.handler)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-service.started
		cancel()
	}()
	r, err := http.NewRequestWithContext(ctx, "POST", s.URL+"/v1/check", strings.NewReader(`{"policy":"p","key":"k"}`))
	must.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	if resp, err := http.DefaultClient.Do(r); err == nil {
		resp.Body.Close()
		t.Error("there was an answer")
	}
	select {
	case <-service.ended:
	case <-time.After(10 * time.Second):
		t.Error("the service was not told that its caller has gone")
	}
}

// echo is a Service that puts what it was asked into its answer.
type echo struct{ limit.Service }

func (echo) Check(_ context.Context, checks []limit.Check) ([]limit.Result, error) {
	results := make([]limit.Result, len(checks))
	for i, c := range checks {
		results[i].Decision = limit.Decision{Policy: c.Key, Allowed: true, Granted: c.Cost, Limit: c.Cost, RequestID: c.RequestID}
	}
	return results, nil
}

// TestManyAtOnce would mix up requests if they shared memory that they must not share.
func TestManyAtOnce(t *testing.T) {
	d := newAPI(t, new(scripted.Service), func(c *Config) { c.Service = echo{} })
	quotaField := "RateLimit-Policy"
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for n := range 200 {
				key, cost := fmt.Sprintf("key-%d-%d", worker, n), int64(worker*1000+n+1)
				path, body := "/v1/check", fmt.Sprintf(`{"policy":"p","key":%q,"cost":%d,"request_id":%q}`, key, cost, key)
				if n%3 == 0 {
					path, body = "/v1/checks", `{"checks":[`+body+`]}`
				}
				r := httptest.NewRequest("POST", path, strings.NewReader(body))
				r.Header.Set("Content-Type", "application/json")
				w := httptest.NewRecorder()
				d.handler.ServeHTTP(w, r)
				want := string(appendDecision(nil, &limit.Decision{Policy: key, Allowed: true, Granted: cost, Limit: cost, RequestID: key}))
				quota := []string{fmt.Sprintf("%q;q=%d", key, cost)}
				if n%3 == 0 {
					want, quota = `{"allowed":true,"decisions":[`+want+`]}`, nil
				}
				if got := w.Body.String(); got != want || !slices.Equal(w.Header()[quotaField], quota) {
					t.Errorf("%s: %s %v", body, got, w.Header())
				}
			}
		})
	}
	wg.Wait()
}

func TestServerIsBounded(t *testing.T) {
	s := NewServer(http.NotFoundHandler(), slog.New(slog.DiscardHandler))
	expect.True(t, s.ReadHeaderTimeout > 0 && s.ReadTimeout > 0 && s.WriteTimeout > 0 && s.IdleTimeout > 0 &&
		s.MaxHeaderBytes > 0 && s.ErrorLog != nil, "%+v", s)
}

func wantSound(t *testing.T, c limit.Check) {
	t.Helper()
	expect.True(t, (c.Policy == "") != (c.Limit == nil) && (c.Namespace == "" || c.Limit != nil) &&
		len(c.Namespace) <= limit.MaxNamespace && c.Key != "" && len(c.Key) <= limit.MaxKey && c.Cost >= 0 &&
		c.Cost <= algo.MaxLimit && len(c.RequestID) <= limit.MaxRequestID, "the service was asked %+v", c)
	for _, s := range []string{c.Policy, c.Namespace, c.Key, c.RequestID} {
		expect.True(t, utf8.ValidString(s), "%q is not UTF-8", s)
	}
	if c.Limit != nil {
		expect.NoError(t, c.Limit.Validate(), "the service was asked for %+v", c.Limit)
	}
}

// fixed is a Service that answers without remembering.
type fixed struct {
	limit.Service
	results []limit.Result
}

func (f *fixed) Check(context.Context, []limit.Check) ([]limit.Result, error) { return f.results, nil }

// discard is a ResponseWriter that costs nothing.
type discard struct{ header http.Header }

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) WriteHeader(int)             {}
func (d *discard) Write(p []byte) (int, error) { return len(p), nil }

func BenchmarkCheck(b *testing.B) {
	for _, bb := range []struct{ name, body string }{
		{"policy", `{"policy":"login","key":"user:12345","cost":1}`},
		{"inline", `{"namespace":"api","limit":{"algorithm":"sliding_log","limit":100,"window":"60s"},"key":"user:12345"}`},
	} {
		b.Run(bb.name, func(b *testing.B) {
			d := newAPI(b, new(scripted.Service), func(c *Config) {
				c.Service = &fixed{results: []limit.Result{{Decision: admitted}}}
			})
			body := strings.NewReader(bb.body)
			r := httptest.NewRequest("POST", "/v1/check", body)
			r.Header.Set("Content-Type", "application/json")
			r.Body = io.NopCloser(body)
			w := &discard{make(http.Header)}
			b.ReportAllocs()
			for b.Loop() {
				body.Reset(bb.body)
				d.handler.ServeHTTP(w, r)
			}
		})
	}
}

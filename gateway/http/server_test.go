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
	"sync/atomic"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/admission"
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
		"\r\nX-RateLimit-Limit: 5\r\n", "\r\nX-RateLimit-Remaining: 0\r\n", "\r\nX-RateLimit-Reset: 37\r\n",
		"\r\n\r\n" + refusedJSON,
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

// echo is a Service that puts what it was asked into its answer.
type echo struct{ limit.Service }

func (echo) Check(_ context.Context, checks []limit.Check) ([]limit.Result, error) {
	results := make([]limit.Result, len(checks))
	for i, c := range checks {
		results[i].Decision = limit.Decision{Policy: c.Key, Allowed: true, Granted: c.Cost, Limit: c.Cost,
			RequestID: c.RequestID}
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
				path, body := "/v1/check",
					fmt.Sprintf(`{"policy":"p","key":%q,"cost":%d,"request_id":%q}`, key, cost, key)
				if n%3 == 0 {
					path, body = "/v1/checks", `{"checks":[`+body+`]}`
				}
				r := httptest.NewRequest("POST", path, strings.NewReader(body))
				r.Header.Set("Content-Type", "application/json")
				w := httptest.NewRecorder()
				d.handler.ServeHTTP(w, r)
				want := string(appendDecision(nil,
					&limit.Decision{Policy: key, Allowed: true, Granted: cost, Limit: cost, RequestID: key}))
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

// TestNoMemory: a request over HTTP/2 that finds no room is answered 503; one that does is counted until its caller has
// its answer.
func TestNoMemory(t *testing.T) {
	room, ended, token := true, 0, ""
	d := newAPI(t, new(scripted.Service), func(cfg *Config) {
		cfg.Begin = func(r *http.Request) (func(), bool) {
			token = r.Header.Get("Authorization")
			return func() { ended++ }, room
		}
	})
	ask := func(major int) *httptest.ResponseRecorder {
		r, w := httptest.NewRequest("GET", "/healthz", nil), httptest.NewRecorder()
		r.ProtoMajor = major
		d.handler.ServeHTTP(w, r)
		return w
	}
	w := ask(2)
	expect.True(t, w.Code == http.StatusOK && w.Flushed && ended == 1,
		"with room: %d, flushed %v, %d have ended", w.Code, w.Flushed, ended)
	room = false
	w = ask(2)
	expect.True(t, w.Code == http.StatusServiceUnavailable && w.Body.Len() == 0 && ended == 2,
		"without: %d %s, %d have ended", w.Code, w.Body, ended)
	w = ask(1)
	expect.True(t, w.Code == http.StatusOK && ended == 2, "over HTTP/1: %d, %d have ended", w.Code, ended)
	r := httptest.NewRequest("GET", forwardAuthPath, nil)
	r.ProtoMajor = 2
	r.Header.Set("Authorization", "of the gateway's caller")
	r.Header.Set(gatewayCredentials, "of the gateway")
	d.handler.ServeHTTP(httptest.NewRecorder(), r)
	expect.Equal(t, token, "of the gateway", "whose request a gateway's is")
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

// held counts as admission.Buffers does.
type held struct{ bytes int64 }

func (h *held) Hold(n int64)    { h.bytes += n }
func (h *held) Release(n int64) { h.bytes -= n }

// looking is a Service that looks around when it is asked.
type looking struct {
	*scripted.Service
	look func()
}

func (l looking) Check(ctx context.Context, checks []limit.Check) ([]limit.Result, error) {
	l.look()
	return l.Service.Check(ctx, checks)
}

// lookingWriter looks around when it is written to.
type lookingWriter struct {
	http.ResponseWriter
	look func()
}

func (l lookingWriter) Write(p []byte) (int, error) {
	l.look()
	return l.ResponseWriter.Write(p)
}

// TestAdmission: what a request takes is counted as being read, then as being carried out, then as being written, and
// no more when it is over; a light one's is not.
func TestAdmission(t *testing.T) {
	const most = 10 << 20
	batch := `{"checks":[` + strings.Repeat(`{"policy":"p","key":"k"},`, limit.MaxBatch-1) +
		`{"policy":"p","key":"k"}]}`
	for _, test := range []struct {
		what, path, body string
		status           int
		counted          bool
	}{
		{"a batch", "/v1/checks", batch, 200, true},
		{"a single check", "/v1/check", `{"policy":"p","key":"k"}`, 200, false},
		{"what is no JSON", "/v1/checks", strings.Repeat("x", 100_000), 400, true},
		{"too large a body", "/v1/checks", strings.Repeat("x", 200_000), 413, true},
	} {
		gate, buffers := admission.NewGate(most), new(held)
		taken := func(want bool) bool {
			patience := 10 * time.Second
			if want {
				patience = time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			n, err := gate.Enter(ctx, most)
			gate.Leave(n)
			return err != nil
		}
		asked, written, most := false, false, int64(0)
		service := looking{&scripted.Service{Results: []limit.Result{{Decision: limit.Decision{Allowed: true}}}},
			func() {
				asked = true
				expect.True(t, taken(test.counted) == test.counted && (buffers.bytes == 0 || !test.counted),
					"%s: while it is carried out: %d held", test.what, buffers.bytes)
			}}
		d := newAPI(t, service.Service, func(c *Config) {
			c.Service, c.Requests, c.Buffers, c.MaxBody = service, gate, buffers, 150_000
		})
		body := io.MultiReader(strings.NewReader(test.body), readFunc(func([]byte) (int, error) {
			most = buffers.bytes
			return 0, io.EOF
		}))
		r := httptest.NewRequest("POST", test.path, body)
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		d.handler.ServeHTTP(lookingWriter{w, func() {
			written = true
			expect.True(t, test.status != 200 || !taken(false) && test.counted == (buffers.bytes > 16<<10),
				"%s: while it is written: %d held", test.what, buffers.bytes)
		}}, r)
		expect.True(t, w.Code == test.status && asked == (test.status == 200) && written,
			"%s: %d %s", test.what, w.Code, w.Body)
		expect.True(t, test.status == 413 || most >= int64(len(test.body)),
			"%s: %d bytes are held of a body of %d", test.what, most, len(test.body))
		expect.True(t, !taken(false) && buffers.bytes == 0, "%s: when it is over: %d held", test.what, buffers.bytes)
	}
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

// TestForeignBodiesShareMemory is an attack: bodies of hundreds of kilobytes for another front end, which are decoded
// into fifty times as much, on many connections at once. As many are carried out at a time as there is room for; small
// ones go on, and so do others once the answer has begun, whether or not anybody reads it.
func TestForeignBodiesShareMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		large := strings.Repeat("{},", 80_000)
		var running, most, got atomic.Int64
		goOn, read := make(chan struct{}), make(chan struct{})
		gate := admission.NewGate(2 * int64(len(large)) * (perByte + perForeignByte))
		api := newAPI(t, &scripted.Service{}, func(cfg *Config) {
			cfg.Requests = gate
			cfg.Foreign = []Foreign{{"POST", "/json", auth.RoleCheck,
				func(_ context.Context, body []byte, err error) (int, string, []byte) {
					expect.NoError(t, err)
					got.Add(int64(len(body)))
					if n := running.Add(1); len(body) == len(large) && n > most.Load() {
						most.Store(n)
					}
					if len(body) > 100 {
						<-goOn
					}
					running.Add(-1)
					return http.StatusOK, "text/plain", []byte("x")
				}}}
		})
		done := make(chan struct{}, 20)
		ask := func(body string) {
			go func() {
				api.handler.ServeHTTP(unreadAnswer{httptest.NewRecorder(), read},
					httptest.NewRequest("POST", "/json", strings.NewReader(body)))
				done <- struct{}{}
			}()
		}
		for range 10 {
			ask(large)
		}
		synctest.Wait()
		expect.Equal(t, running.Load(), 2, "large requests are carried out, there is room for 2")
		for range 10 {
			ask("{}")
		}
		synctest.Wait()
		expect.True(t, got.Load() == int64(2*len(large)+10*len("{}")),
			"small requests wait: %d bytes have been read", got.Load())
		close(goOn)
		synctest.Wait() // nobody has read an answer
		expect.True(t, got.Load() == int64(10*len(large)+10*len("{}")),
			"requests wait for who does not read: %d bytes have been read", got.Load())
		close(read)
		for range 20 {
			<-done
		}
		taken, err := gate.Enter(t.Context(), 2*int64(len(large))*(perByte+perForeignByte))
		expect.True(t, err == nil && taken != 0, "not all has been given back")
	})
}

// unreadAnswer is a response that nobody reads before it is told to.
type unreadAnswer struct {
	*httptest.ResponseRecorder
	read <-chan struct{}
}

func (u unreadAnswer) Write(p []byte) (int, error) {
	<-u.read
	return u.ResponseRecorder.Write(p)
}

// TestForeignBodyTooLong: what is longer than the bound is not answered, and not waited for where it says how long it
// is.
func TestForeignBodyTooLong(t *testing.T) {
	api := newAPI(t, &scripted.Service{}, func(cfg *Config) {
		cfg.Foreign = []Foreign{{"POST", "/json", auth.RoleCheck,
			func(_ context.Context, _ []byte, err error) (int, string, []byte) {
				_, tooLong := errors.AsType[*http.MaxBytesError](err)
				expect.True(t, tooLong, "%v", err)
				return http.StatusTeapot, "text/plain", nil
			}}}
	})
	said := httptest.NewRequest("POST", "/json", iotest.ErrReader(errors.New("it was read")))
	said.ContentLength = 1 << 40
	unsaid := httptest.NewRequest("POST", "/json", strings.NewReader(strings.Repeat("x", maxForeignBody+1)))
	unsaid.ContentLength = -1
	for _, r := range []*http.Request{said, unsaid} {
		w := httptest.NewRecorder()
		api.handler.ServeHTTP(w, r)
		expect.Equal(t, w.Code, http.StatusTeapot)
	}
}

// TestForeignBodyCompressed: a compressed body is answered as by Weir's own routes.
func TestForeignBodyCompressed(t *testing.T) {
	asked := 0
	api := newAPI(t, &scripted.Service{}, func(cfg *Config) {
		cfg.Foreign = []Foreign{{"POST", "/json", auth.RoleCheck,
			func(context.Context, []byte, error) (int, string, []byte) {
				asked++
				return http.StatusBadRequest, "text/plain; charset=utf-8", []byte("asked")
			}}}
	})
	wantProblem(t, api.do("POST", "/json", "{}", "Content-Encoding", "identity", "Content-Encoding", "gzip"), 415, "",
		"compressed")
	expect.Equal(t, asked, 0)
	expect.Equal(t, api.do("POST", "/json", "{}", "Content-Encoding", "Identity").StatusCode, 400)
	expect.Equal(t, asked, 1)
}

// TestPagesOfOtherSites: a page can have a browser send text, a form or nothing to any address without asking first.
// What another front end's callers may send with any Content-Type is rejected where a browser says that it is for a
// page, and not carried out.
func TestPagesOfOtherSites(t *testing.T) {
	asked := 0
	api := newAPI(t, &scripted.Service{}, func(cfg *Config) {
		cfg.Foreign = []Foreign{{"POST", "/json", auth.RoleCheck,
			func(context.Context, []byte, error) (int, string, []byte) {
				asked++
				return http.StatusOK, "text/plain", nil
			}}}
	})
	for _, header := range [][2]string{{"Origin", "http://evil.test"}, {"Origin", "null"},
		{"Sec-Fetch-Site", "cross-site"}, {"Sec-Fetch-Mode", "no-cors"}, {"Accept", "*/*"}} {
		for _, kind := range []string{"", "text/plain", "text/plain;application/json",
			"application/x-www-form-urlencoded", "application/json", "application/json; charset=utf-8"} {
			r := httptest.NewRequest("POST", "/json", strings.NewReader("{}"))
			r.Header.Set(header[0], header[1])
			if kind != "" {
				r.Header.Set("Content-Type", kind)
			}
			want, code := 0, http.StatusUnsupportedMediaType
			if header[0] == "Accept" || strings.HasPrefix(kind, "application/json") {
				want, code = 1, http.StatusOK
			}
			w := httptest.NewRecorder()
			asked = 0
			if api.handler.ServeHTTP(w, r); asked != want || w.Code != code {
				t.Errorf("%s, %q: %d, carried out %d times", header, kind, w.Code, asked)
			}
		}
	}
}

package httpapi

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"testing/synctest"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/scripted"
)

// TestForeignBodiesShareMemory is an attack: bodies of hundreds of kilobytes for another front end, which are decoded into fifty times
// as much, on many connections at once. As many are carried out at a time as there is room for; small ones go on, and so do others
// once the answer has begun, whether or not anybody reads it.
func TestForeignBodiesShareMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		large := strings.Repeat("{},", 80_000)
		var running, most, got atomic.Int64
		goOn, read := make(chan struct{}), make(chan struct{})
		gate := admission.NewGate(2 * int64(len(large)) * (perByte + perForeignByte))
		api := newAPI(t, &scripted.Service{}, func(cfg *Config) {
			cfg.Requests = gate
			cfg.Foreign = []Foreign{{"POST", "/json", auth.RoleCheck, func(_ context.Context, body []byte, err error) (int, string, []byte) {
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
				api.handler.ServeHTTP(unreadAnswer{httptest.NewRecorder(), read}, httptest.NewRequest("POST", "/json", strings.NewReader(body)))
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

// TestForeignBodyTooLong: what is longer than the bound is not answered, and not waited for where it says how long it is.
func TestForeignBodyTooLong(t *testing.T) {
	api := newAPI(t, &scripted.Service{}, func(cfg *Config) {
		cfg.Foreign = []Foreign{{"POST", "/json", auth.RoleCheck, func(_ context.Context, _ []byte, err error) (int, string, []byte) {
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
		cfg.Foreign = []Foreign{{"POST", "/json", auth.RoleCheck, func(context.Context, []byte, error) (int, string, []byte) {
			asked++
			return http.StatusBadRequest, "text/plain; charset=utf-8", []byte("asked")
		}}}
	})
	wantProblem(t, api.do("POST", "/json", "{}", "Content-Encoding", "identity", "Content-Encoding", "gzip"), 415, "", "compressed")
	expect.Equal(t, asked, 0)
	expect.Equal(t, api.do("POST", "/json", "{}", "Content-Encoding", "Identity").StatusCode, 400)
	expect.Equal(t, asked, 1)
}

// TestPagesOfOtherSites: a page can have a browser send text, a form or nothing to any address without asking first. What another front
// end's callers may send with any Content-Type is rejected where a browser says that it is for a page, and not carried out.
func TestPagesOfOtherSites(t *testing.T) {
	asked := 0
	api := newAPI(t, &scripted.Service{}, func(cfg *Config) {
		cfg.Foreign = []Foreign{{"POST", "/json", auth.RoleCheck, func(context.Context, []byte, error) (int, string, []byte) {
			asked++
			return http.StatusOK, "text/plain", nil
		}}}
	})
	for _, header := range [][2]string{{"Origin", "http://evil.test"}, {"Origin", "null"}, {"Sec-Fetch-Site", "cross-site"}, {"Sec-Fetch-Mode", "no-cors"}, {"Accept", "*/*"}} {
		for _, kind := range []string{"", "text/plain", "text/plain;application/json", "application/x-www-form-urlencoded", "application/json", "application/json; charset=utf-8"} {
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

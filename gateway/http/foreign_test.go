package httpapi

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
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
			cfg.Routes = []Route{{"POST", "/json", auth.RoleCheck, func(w http.ResponseWriter, r *http.Request) {
				body, err := io.ReadAll(r.Body)
				expect.NoError(t, err)
				got.Add(int64(len(body)))
				if n := running.Add(1); len(body) == len(large) && n > most.Load() {
					most.Store(n)
				}
				if len(body) > 100 {
					<-goOn
				}
				running.Add(-1)
				w.WriteHeader(http.StatusOK)
				<-read
			}}}
		})
		done := make(chan struct{}, 20)
		ask := func(body string) {
			go func() {
				w := httptest.NewRecorder()
				api.handler.ServeHTTP(w, httptest.NewRequest("POST", "/json", strings.NewReader(body)))
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

// TestForeignBodyTooLong: what is longer than the bound is handed on with one byte more, and no further.
func TestForeignBodyTooLong(t *testing.T) {
	var got int
	api := newAPI(t, &scripted.Service{}, func(cfg *Config) {
		cfg.Routes = []Route{{"POST", "/json", auth.RoleCheck, func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			got = len(body)
		}}}
	})
	api.handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", "/json", strings.NewReader(strings.Repeat("x", 10*maxForeignBody))))
	expect.Equal(t, got, maxForeignBody+1, "bytes are handed on")
}

// TestPagesOfOtherSites: a page can have a browser send text, a form or nothing to any address without asking first. What another front
// end's callers may send with any Content-Type is rejected where a browser says that it is for a page, and not carried out.
func TestPagesOfOtherSites(t *testing.T) {
	asked := 0
	api := newAPI(t, &scripted.Service{}, func(cfg *Config) {
		cfg.Routes = []Route{{"POST", "/json", auth.RoleCheck, func(http.ResponseWriter, *http.Request) { asked++ }}}
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

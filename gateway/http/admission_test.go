package httpapi

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/scripted"
)

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

// TestAdmission: what a request takes is counted as being read, then as being carried out, then as being written, and no more when
// it is over; a light one's is not.
func TestAdmission(t *testing.T) {
	const most = 10 << 20
	batch := `{"checks":[` + strings.Repeat(`{"policy":"p","key":"k"},`, limit.MaxBatch-1) + `{"policy":"p","key":"k"}]}`
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
		service := looking{&scripted.Service{Results: []limit.Result{{Decision: limit.Decision{Allowed: true}}}}, func() {
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

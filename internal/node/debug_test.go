package node

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// The debug port shows profiles on loopback, and the port for callers does not.
func TestDebugPort(t *testing.T) {
	leavesNothing(t, func() {
		cfg := testConfig(t, "a")
		cfg.GossipPort, cfg.PeerPort, cfg.DebugPort = PortOff, PortOff, PortAny
		n := mustSettle(t, cfg)
		defer n.Stop()
		get := func(addr, path, host string) (int, string) {
			t.Helper()
			r := must.Value(http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+path, nil))(t)
			r.Host = host
			resp := must.Value(http.DefaultClient.Do(r))(t)
			defer resp.Body.Close()
			body := must.Value(io.ReadAll(resp.Body))(t)
			return resp.StatusCode, string(body)
		}
		addr := n.debugAddr
		expect.True(t, strings.HasPrefix(addr, "127.0.0.1:"), "listens on %s", addr)
		status, body := get(addr, "/debug/pprof/goroutine?debug=1", "")
		expect.True(t, status == http.StatusOK && strings.Contains(body, "goroutine profile"), "%d %.80s", status, body)
		for _, tt := range []struct {
			addr, path, host string
			want             int
		}{
			{addr, "/debug/pprof/", "localhost:1", http.StatusOK},
			{addr, "/debug/pprof/", "weir.example", http.StatusForbidden},
			{addr, "/debug/pprof/cmdline", "", http.StatusNotFound},
			{addr, "/debug/pprof/symbol", "", http.StatusNotFound},
			{addr, "/v1/policies", "", http.StatusNotFound},
			{addrOf(n.listeners.http), "/debug/pprof/", "", http.StatusNotFound},
		} {
			status, body := get(tt.addr, tt.path, tt.host)
			expect.True(t, status == tt.want, "%+v: %d %.80s", tt, status, body)
		}
	})
}

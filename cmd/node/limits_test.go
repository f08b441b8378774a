package main

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limiter"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// TestMaxConnections: one connection too many is closed at once and counted; there is room again when one ends.
func TestMaxConnections(t *testing.T) {
	cfg := testConfig(t, "node")
	cfg.Limits.MaxConnections = 2
	n := mustStart(t, cfg)
	awaitSettled(t, n)
	http.DefaultClient.CloseIdleConnections()
	for name, d := range map[string]*door{"http": n.listeners.http, "grpc": n.listeners.grpc, "peer": n.listeners.peer} {
		eventually(t, "nobody to be connected", func() bool { return d.open.Load() == 0 })
		dial := func() net.Conn {
			c, err := net.Dial("tcp", addrOf(d))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			return c
		}
		one := dial()
		dial()
		eventually(t, "both to be taken", func() bool { return d.open.Load() == 2 })
		if _, err := io.Copy(io.Discard, dial()); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: the third: %v", name, err)
		}
		refusedAt(t, n, name, "too_many_connections")
		one.Close()
		eventually(t, "room for one", func() bool { return d.open.Load() == 1 })
		dial()
		eventually(t, "it to be taken", func() bool { return d.open.Load() == 2 })
	}
}

// settingsOf reads what a server of HTTP/2 announces.
func settingsOf(t *testing.T, addr string) map[http2.SettingID]uint32 {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	f := http2.NewFramer(c, c)
	if err := f.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if s, ok := frame.(*http2.SettingsFrame); ok && !s.IsAck() {
			out := make(map[http2.SettingID]uint32)
			_ = s.ForeachSetting(func(one http2.Setting) error { out[one.ID] = one.Val; return nil })
			return out
		}
	}
}

// TestSizes: streams, bodies and headers beyond their bounds.
func TestSizes(t *testing.T) {
	cfg := testConfig(t, "node")
	cfg.Limits = limitsConfig{MaxStreams: 7, MaxMessage: 10_000, MaxHeader: 4096}
	n := mustStart(t, cfg)
	awaitSettled(t, n)
	got := settingsOf(t, addrOf(n.listeners.grpc))
	if got[http2.SettingMaxConcurrentStreams] != 7 || got[http2.SettingMaxHeaderListSize] != 4096 {
		t.Errorf("gRPC: %v", got)
	}
	if got := settingsOf(t, addrOf(n.listeners.peer)); got[http2.SettingMaxConcurrentStreams] != maxPeerStreams || got[http2.SettingMaxHeaderListSize] != 4096 {
		t.Errorf("between nodes: %v", got)
	}
	conn, err := grpc.NewClient(addrOf(n.listeners.grpc), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	long := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "login", Key: strings.Repeat("k", 20_000)}}}}
	if _, err := weirv1.NewLimiterClient(conn).Check(t.Context(), long); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "larger than max") {
		t.Errorf("a large message: %v", err)
	}
	ctx := metadata.AppendToOutgoingContext(t.Context(), "x-large", strings.Repeat("x", 5000))
	if _, err := weirv1.NewLimiterClient(conn).Status(ctx, &weirv1.StatusRequest{}); err == nil {
		t.Error("a large header is taken over gRPC")
	}
	resp, body := send(t, n, "POST", "/v1/check", "", `{"policy":"login","key":"`+strings.Repeat("k", 20_000)+`"}`)
	if resp.StatusCode != http.StatusRequestEntityTooLarge || !strings.Contains(body, "10000") {
		t.Errorf("a large body: %d %s", resp.StatusCode, body)
	}
	// net/http allows 4 KiB more than it is told. It hangs up on the rest, which may come before its answer.
	r, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+addrOf(n.listeners.http)+"/healthz", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Large", strings.Repeat("x", 10_000))
	if resp, err := http.DefaultClient.Do(r); err == nil {
		resp.Body.Close()
		if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("a large header: %d", resp.StatusCode)
		}
	}
	r.Header.Set("X-Large", strings.Repeat("x", 3000))
	if resp, err := http.DefaultClient.Do(r); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("a header that is not too large: %v", err)
	} else {
		resp.Body.Close()
	}
}

// pipeListener hands out one end of pipes.
type pipeListener struct{ conns chan net.Conn }

func (l pipeListener) Accept() (net.Conn, error) { return <-l.conns, nil }

func (pipeListener) Close() error { return nil }

func (pipeListener) Addr() net.Addr { return &net.TCPAddr{} }

// TestSlowReader: a caller who does not read has the time that is stated, from each write anew, and then the connection
// ends.
func TestSlowReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const slowest = 30 * time.Second
		l := pipeListener{make(chan net.Conn, 1)}
		here, there := net.Pipe()
		defer there.Close()
		l.conns <- here
		d := &door{Listener: l, slowest: slowest}
		c, err := d.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for range 3 { // slow, but reading
			go func() {
				time.Sleep(slowest - time.Second)
				_, _ = io.ReadFull(there, make([]byte, 3))
			}()
			if _, err := c.Write([]byte("abc")); err != nil {
				t.Fatal(err)
			}
		}
		begun := time.Now()
		if _, err := c.Write(bytes.Repeat([]byte{1}, 100)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%v", err)
		}
		if took := time.Since(begun); took != slowest {
			t.Errorf("after %v", took)
		}
	})
}

// TestLimitsByDefault: every node has bounds, whatever it is started with.
func TestLimitsByDefault(t *testing.T) {
	c := newLimits(limitsConfig{})
	if c.MaxConnections != defaultMaxConnections || c.MaxStreams != defaultMaxStreams || c.MaxMessage != defaultMaxMessage ||
		c.MaxHeader != defaultMaxHeader || c.WriteTimeout != defaultWriteTimeout || c.FirstMessage != defaultFirstMessage || c.MaxInFlight != limiter.DefaultMaxInFlight ||
		c.MaxUnread != defaultMaxUnread {
		t.Errorf("%+v", c)
	}
	var f limitsFlags
	cmd := newRun()
	f.register(newStatus().Flags())
	if got, err := f.config(); err != nil || got != c {
		t.Errorf("flags say %+v, %v", got, err)
	}
	d := &door{}
	none := newLimits(limitsConfig{MaxConnections: -1})
	none.doors(nil, d, nil, nil)
	if d.max != 0 {
		t.Errorf("no bound is %d", d.max)
	}
	for _, c := range []struct{ args, want string }{
		{"--max-connections -1", "--max-connections: "},
		{"--max-streams 0", "--max-streams: "},
		{"--max-message-size 1GB2", "max-message-size"},
		{"--max-message-size 10B", "max-message-size"},
		{"--max-header-size 1GiB", "max-header-size"},
		{"--write-timeout 1ms", "--write-timeout: "},
		{"--first-message-timeout 0", "--first-message-timeout: "},
		{"--max-in-flight -1", "--max-in-flight: "},
	} {
		var out strings.Builder
		if code := run(append([]string{"run"}, strings.Fields(c.args)...), io.Discard, &out); code != exitError || !strings.Contains(out.String(), c.want) {
			t.Errorf("%s: %d %s", c.args, code, &out)
		}
	}
	if cmd.Flags().Lookup("max-connections") == nil {
		t.Error("run has no --max-connections")
	}
}

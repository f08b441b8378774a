package node

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/internal/admission"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// TestMaxConnections: an authenticated connection too many is closed and counted, and one of a source with its share too; there is
// room again when one ends.
func TestMaxConnections(t *testing.T) {
	t.Parallel()
	for name, limits := range map[string]Limits{
		"of all": {MaxConnections: 2, MaxConnectionsPerSource: 100}, "of a source": {MaxConnections: 100, MaxConnectionsPerSource: 2},
	} {
		cfg := testConfig(t, "node")
		cfg.Limits = limits
		n := mustSettle(t, cfg)
		http.DefaultClient.CloseIdleConnections()
		known := func(l *admission.Listener) int {
			authenticated, _, _ := l.Connections()
			return authenticated
		}
		for listener, l := range map[string]*admission.Listener{"http": n.listeners.http, "grpc": n.listeners.grpc} {
			dial := func() (ask func() error, end func()) {
				if listener == "grpc" {
					conn := dialed(t, n)
					return func() error {
						_, err := weirv1.NewLimiterClient(conn).Status(t.Context(), &weirv1.StatusRequest{})
						return err
					}, func() { conn.Close() }
				}
				transport := new(http.Transport)
				return func() error {
					resp, err := (&http.Client{Transport: transport}).Get("http://" + addrOf(l) + "/v1/status")
					if err != nil {
						return err
					}
					defer resp.Body.Close()
					_, err = io.Copy(io.Discard, resp.Body) // the connection stays
					return err
				}, transport.CloseIdleConnections
			}
			first, end := dial()
			second, _ := dial()
			must.NoError(t, errors.Join(first(), second()))
			third, _ := dial()
			err := third()
			expect.True(t, err != nil, "%s, %s: a third connection is answered", name, listener)
			refusedAt(t, n, listener, "too_many_connections")
			expect.NoError(t, errors.Join(first(), second()), "%s, %s: those that were there first", name, listener)
			end()
			testkit.Eventually(t, "room for one", func() bool { return known(l) == 1 })
			testkit.Eventually(t, "it to be taken", func() bool { return third() == nil })
			expect.True(t, known(l) == 2, "%s, %s: %d are counted", name, listener, known(l))
		}
	}
}

// TestRejectedClient: the Go client of a node that has too many connections answers by its fail policy, says why, and does not come back
// all the time; the node's probes are answered meanwhile. Connections beyond those for probes are rejected before HTTP/2 is set up.
func TestRejectedClient(t *testing.T) {
	n, shop, _, _ := withAccess(t, func(cfg *Config) { cfg.Limits = Limits{MaxConnections: 1, MaxConnectionsPerSource: 100} })
	dial := func() *client.Client {
		c := must.Value(client.Dial(t.Context(), addrOf(n.listeners.grpc), client.WithToken(shop), client.WithTimeout(testkit.Patience), client.WithBreaker(0, 0)))(t)
		t.Cleanup(func() { c.Close() })
		return c
	}
	first := dial()
	must.NoError(t, first.Ready(t.Context()))
	second := dial()
	d, err := second.Policy("login").Allow(t.Context(), "k")
	expect.True(t, err == nil && d.FailedOpen, "the second client: %+v, %v", d, err)
	// Later attempts may find the connection closed before they are told why.
	testkit.Eventually(t, "the reason", func() bool {
		return strings.Contains(second.Stats().Reason, "this node has too many connections: max-connections")
	})
	d, err = first.Policy("login").Allow(t.Context(), "k")
	expect.True(t, err == nil && !d.FailedOpen, "the first client: %+v, %v", d, err)
	for _, line := range []string{`weir_connections{listener="grpc"} 1`, `weir_connections_max{listener="grpc"} 1`, `weir_calls{kind="unary"} 0`} {
		expect.True(t, strings.Contains(metricsOf(t, n), line+"\n"), "the metrics have no %s", line)
	}
	probe := dialed(t, n)
	_, err = healthv1.NewHealthClient(probe).Check(t.Context(), &healthv1.HealthCheckRequest{})
	expect.NoError(t, err, "a probe")
	told := make(chan string, 1)
	for range 50 {
		c := must.Value(net.Dial("tcp", addrOf(n.listeners.grpc)))(t)
		t.Cleanup(func() { c.Close() })
		go func() {
			f, err := http2.NewFramer(c, c).ReadFrame()
			if away, ok := f.(*http2.GoAwayFrame); ok && err == nil {
				select {
				case told <- string(away.DebugData()):
				default:
				}
			}
		}()
	}
	select {
	case why := <-told:
		expect.True(t, strings.Contains(why, "max-connections"), "a rejected connection is told %q", why)
	case <-time.After(testkit.Patience):
		t.Error("no connection is told why it is rejected")
	}
}

// settingsOf reads what a server of HTTP/2 announces.
func settingsOf(t *testing.T, addr string) map[http2.SettingID]uint32 {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	must.NoError(t, err)
	defer c.Close()
	_, err = io.WriteString(c, http2.ClientPreface)
	must.NoError(t, err)
	f := http2.NewFramer(c, c)
	must.NoError(t, f.WriteSettings())
	for {
		frame := must.Value(f.ReadFrame())(t)
		if s, ok := frame.(*http2.SettingsFrame); ok && !s.IsAck() {
			out := make(map[http2.SettingID]uint32)
			_ = s.ForeachSetting(func(one http2.Setting) error { out[one.ID] = one.Val; return nil })
			return out
		}
	}
}

// TestSizes: streams, bodies and headers beyond their bounds.
func TestSizes(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "node")
	cfg.Limits = Limits{MaxStreams: 7, MaxMessageSize: 10_000, MaxHeaderSize: 4096}
	n := mustSettle(t, cfg)
	got := settingsOf(t, addrOf(n.listeners.grpc))
	expect.True(t, got[http2.SettingMaxConcurrentStreams] == 7 && got[http2.SettingMaxHeaderListSize] == 4096,
		"gRPC: %v", got)
	got = settingsOf(t, addrOf(n.listeners.peer))
	expect.True(t, got[http2.SettingMaxConcurrentStreams] == maxPeerStreams &&
		got[http2.SettingMaxHeaderListSize] == 4096, "between nodes: %v", got)
	conn := dialed(t, n)
	long := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "login", Key: strings.Repeat("k", 20_000)}}}}
	_, err := weirv1.NewLimiterClient(conn).Check(t.Context(), long)
	expect.True(t, status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "larger than max"),
		"a large message: %v", err)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "x-large", strings.Repeat("x", 5000))
	_, err = weirv1.NewLimiterClient(conn).Status(ctx, &weirv1.StatusRequest{})
	expect.True(t, err != nil, "a large header is taken over gRPC")
	resp, body := send(t, n, "POST", "/v1/check", "", `{"policy":"login","key":"`+strings.Repeat("k", 20_000)+`"}`)
	expect.True(t, resp.StatusCode == http.StatusRequestEntityTooLarge && strings.Contains(body, "10000"),
		"a large body: %d %s", resp.StatusCode, body)
	// net/http allows 4 KiB more than it is told, and as much again on a connection that it has kept. It hangs up on the rest, which may
	// come before its answer.
	r, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+addrOf(n.listeners.http)+"/healthz", nil)
	must.NoError(t, err)
	r.Header.Set("X-Large", strings.Repeat("x", 15_000))
	if resp, err := http.DefaultClient.Do(r); err == nil {
		resp.Body.Close()
		expect.Equal(t, resp.StatusCode, http.StatusRequestHeaderFieldsTooLarge, "a large header")
	}
	r.Header.Set("X-Large", strings.Repeat("x", 3000))
	if resp, err := http.DefaultClient.Do(r); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("a header that is not too large: %v", err)
	} else {
		resp.Body.Close()
	}
}

// TestClientBeyondMemory: the Go client of a node that has no memory for its connection, or for its stream, is told that the node cannot
// take it, and answers by its fail policy: no caller takes it for its own mistake.
func TestClientBeyondMemory(t *testing.T) {
	t.Parallel()
	for what, test := range map[string]struct {
		free   int64
		reason string
	}{
		"a connection": {admission.PerConnection - 1, "this node has too many connections"},
		"a stream":     {admission.PerConnection + admission.PerStream - 1, "as it has memory for"},
	} {
		t.Run(what, func(t *testing.T) {
			n := mustSettle(t, testConfig(t, "node"))
			taken, most := n.callersMemory.InUse()
			n.callersMemory.Force(int(most - taken - test.free))
			c := must.Value(client.Dial(t.Context(), addrOf(n.listeners.grpc), client.WithTimeout(testkit.Patience), client.WithBreaker(0, 0)))(t)
			defer c.Close()
			d, err := c.Policy("login").Allow(t.Context(), "k")
			expect.True(t, err == nil && d.FailedOpen, "%+v, %v", d, err)
			// Later attempts may find the connection closed before they are told why.
			testkit.Eventually(t, "the reason", func() bool { return strings.Contains(c.Stats().Reason, test.reason) })
		})
	}
}

// TestLimitsByDefault: every node has bounds, whatever it is started with: those that take memory follow from what there is.
func TestLimitsByDefault(t *testing.T) {
	m := admission.Divide(512 << 20)
	c := (Limits{}).withDefaults(m)
	want := (Limits{
		MaxConnections: m.Clients(), MaxStreams: m.StreamsEach, MaxMessageSize: m.MaxMessage, MaxHeaderSize: 32 << 10,
		FirstMessageTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, MaxUnread: m.Unread, MaxInFlight: m.MaxInFlight,
		MaxConnectionsPerSource: m.Clients() / 2, MaxAnonymousConnections: m.MaxAnonymous, MaxConnectionAge: time.Hour, IdleTimeout: 10 * time.Minute,
	})
	expect.Equal(t, c, want)
	none := (Limits{MaxConnections: -1, MaxConnectionAge: -1, IdleTimeout: -1}).withDefaults(m)
	l := none.listener("http", &security{}, nil)
	expect.True(t, l.MaxConnections == 0 && l.MaxPerSource == 0 && none.streamAge() == 0, "no bound is %+v", l)
}

// TestMaxConnectionAge: connections that have reached their age are given up in good order: the caller is not told of an error.
func TestMaxConnectionAge(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "node")
	cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(onePolicy, 1_000_000))
	cfg.Limits.MaxConnectionAge = time.Second
	n := mustSettle(t, cfg)
	stream := must.Value(weirv1.NewLimiterClient(dialed(t, n)).CheckStream(t.Context()))(t)
	asked, answered := 0, 0
	ended := make(chan error, 1)
	go func() {
		for ; ; answered++ {
			if _, err := stream.Recv(); err != nil {
				ended <- err
				return
			}
		}
	}()
	c := must.Value(client.Dial(t.Context(), addrOf(n.listeners.grpc), client.WithOnError(client.FailClosed), client.WithTimeout(testkit.Patience)))(t)
	defer c.Close()
	unary, transport := dialed(t, n), new(http.Transport)
	defer transport.CloseIdleConnections()
	closed := false
	for open := true; open || !closed; {
		select {
		case err := <-ended:
			open = false
			expect.ErrorIs(t, err, io.EOF, "a stream")
		default:
		}
		if open && stream.Send(&weirv1.CheckStreamRequest{Define: []*weirv1.StreamTarget{{Policy: "login"}}, Keys: []byte("k"), KeyLengths: []uint32{1}}) == nil {
			asked++
		}
		if d, err := c.Check(t.Context(), []client.Check{{Policy: "login", Key: "k"}}); err != nil || !d[0].Allowed {
			t.Fatalf("by the client: %+v, %v", d, err)
		}
		if _, err := weirv1.NewLimiterClient(unary).Status(t.Context(), &weirv1.StatusRequest{}); err != nil {
			t.Fatal(err)
		}
		resp, err := (&http.Client{Transport: transport}).Get("http://" + addrOf(n.listeners.http) + "/v1/status")
		must.NoError(t, err)
		closed = closed || resp.Close
		_, _ = io.Copy(io.Discard, resp.Body) // so that the connection stays
		resp.Body.Close()
	}
	expect.True(t, answered != 0 && answered <= asked, "%d of %d requests on the stream are answered", answered, asked)
}

// TestChosenBounds: what is chosen by hand is taken from the memory for state; what cannot fit is an error that names the flag, and
// where all together do not fit, the flags are named.
func TestChosenBounds(t *testing.T) {
	m := admission.Divide(512 << 20)
	for _, test := range []struct {
		what   string
		limits Limits
		state  int64
		over   string
		err    string
	}{
		{what: "nothing"},
		{what: "less", limits: Limits{MaxConnections: 10, MaxUnread: 1 << 20, MaxInFlight: 10}, state: 50 << 20},
		{what: "some more", limits: Limits{MaxUnread: m.Unread + 50<<20}},
		{what: "state", state: m.State + 50<<20, over: "[max-memory]"},
		{what: "no bound of state", state: -1, over: "[max-memory]"},
		{what: "no bound of connections", limits: Limits{MaxConnections: -1}, over: "[max-connections]"},
		{what: "connections and checks", limits: Limits{MaxConnections: 100_000, MaxInFlight: 50_000}, over: "[max-connections max-in-flight]"},
		{what: "more state than there is", state: 512 << 20, err: "max-memory: 512 MiB do not fit"},
		{what: "more unread than there is", limits: Limits{MaxUnread: 1 << 30}, err: "max-unread: 1.0 GiB do not fit"},
		{what: "messages as large as it all", limits: Limits{MaxMessageSize: 256 << 20}, err: "max-message-size: 256 MiB do not fit"},
	} {
		got, over, err := test.limits.fitted(m, test.state)
		if err != nil || test.err != "" {
			expect.True(t, err != nil && test.err != "" && strings.Contains(err.Error(), test.err),
				"%s: %v", test.what, err)
			continue
		}
		expect.True(t, (over != nil || got.Sum() <= got.Limit) && (over == nil || fmt.Sprint(over) == test.over) &&
			(over != nil || test.over == ""), "%s: %v exceed: %d of %d", test.what, over, got.Sum(), got.Limit)
	}
}

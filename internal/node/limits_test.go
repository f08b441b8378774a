package node

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding/gzip"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/internal/admission"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/peer"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// TestRejectedClient: the Go client of a node that has too many connections answers by its fail policy, says why, and
// does not come back all the time; the node's probes are answered meanwhile. Connections beyond those for probes are
// rejected before HTTP/2 is set up.
func TestRejectedClient(t *testing.T) {
	n, shop, _, _ := withAccess(t,
		func(cfg *Config) { cfg.Limits = Limits{MaxConnections: 1, MaxConnectionsPerSource: 100} })
	dial := func() *client.Client {
		c := must.Value(client.Dial(t.Context(), addrOf(n.listeners.grpc), client.WithToken(shop),
			client.WithTimeout(testkit.Patience), client.WithBreaker(0, 0)))(t)
		t.Cleanup(func() { c.Close() })
		return c
	}
	first := dial()
	must.NoError(t, first.Ready(t.Context()))
	// A busy machine may close the connection before its caller has been told why.
	testkit.Eventually(t, "the reason", func() bool {
		second := dial()
		d, err := second.Policy("login").Allow(t.Context(), "k")
		expect.True(t, err == nil && d.FailedOpen, "the second client: %+v, %v", d, err)
		return strings.Contains(second.Stats().Reason, "this node has too many connections: max-connections")
	})
	d, err := first.Policy("login").Allow(t.Context(), "k")
	expect.True(t, err == nil && !d.FailedOpen, "the first client: %+v, %v", d, err)
	for _, line := range []string{`weir_connections{listener="grpc"} 1`, `weir_connections_max{listener="grpc"} 1`,
		`weir_calls{kind="unary"} 0`} {
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
	c := must.Value(net.Dial("tcp", addr))(t)
	defer c.Close()
	_, err := io.WriteString(c, http2.ClientPreface)
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
	long := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "login",
		Key: strings.Repeat("k", 20_000)}}}}
	_, err := weirv1.NewLimiterClient(conn).Check(t.Context(), long)
	expect.True(t, status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "larger than max"),
		"a large message: %v", err)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "x-large", strings.Repeat("x", 5000))
	_, err = weirv1.NewLimiterClient(conn).Status(ctx, &weirv1.StatusRequest{})
	expect.True(t, err != nil, "a large header is taken over gRPC")
	resp, body := send(t, n, "POST", "/v1/check", "", `{"policy":"login","key":"`+strings.Repeat("k", 20_000)+`"}`)
	expect.True(t, resp.StatusCode == http.StatusRequestEntityTooLarge && strings.Contains(body, "10000"),
		"a large body: %d %s", resp.StatusCode, body)
	// net/http allows 4 KiB more than it is told, and as much again on a connection that it has kept. It hangs up on
	// the rest, which may come before its answer.
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

// TestLimitsByDefault: every node has bounds, whatever it is started with: those that take memory follow from what
// there is.
func TestLimitsByDefault(t *testing.T) {
	m := admission.Divide(512 << 20)
	c := (Limits{}).withDefaults(m)
	want := (Limits{
		MaxConnections: m.Clients(), MaxStreams: m.StreamsEach, MaxMessageSize: m.MaxMessage, MaxHeaderSize: 32 << 10,
		FirstMessageTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, MaxUnread: m.Unread,
		MaxInFlight:             m.MaxInFlight,
		MaxConnectionsPerSource: m.Clients() / 2, MaxAnonymousConnections: m.MaxAnonymous, MaxConnectionAge: time.Hour,
		IdleTimeout: 10 * time.Minute,
	})
	expect.Equal(t, c, want)
	none := (Limits{MaxConnections: -1, MaxConnectionAge: -1, IdleTimeout: -1}).withDefaults(m)
	l := none.listener("http", &security{}, nil)
	expect.True(t, l.MaxConnections == 0 && l.MaxPerSource == 0 && none.streamAge() == 0, "no bound is %+v", l)
}

// TestMaxConnectionAge: connections that have reached their age are given up in good order: the caller is not told of
// an error.
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
	c := must.Value(client.Dial(t.Context(), addrOf(n.listeners.grpc), client.WithOnError(client.FailClosed),
		client.WithTimeout(testkit.Patience)))(t)
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
		if open && stream.Send(&weirv1.CheckStreamRequest{Define: []*weirv1.StreamTarget{{Policy: "login"}},
			Keys: []byte("k"), KeyLengths: []uint32{1}}) == nil {
			asked++
		}
		d, err := c.Check(t.Context(), []client.Check{{Policy: "login", Key: "k"}})
		must.True(t, err == nil && d[0].Allowed, "by the client: %+v, %v", d, err)
		_, err = weirv1.NewLimiterClient(unary).Status(t.Context(), &weirv1.StatusRequest{})
		must.NoError(t, err)
		resp, err := (&http.Client{Transport: transport}).Get("http://" + addrOf(n.listeners.http) + "/v1/status")
		must.NoError(t, err)
		closed = closed || resp.Close
		_, _ = io.Copy(io.Discard, resp.Body) // so that the connection stays
		resp.Body.Close()
	}
	expect.True(t, answered != 0 && answered <= asked, "%d of %d requests on the stream are answered", answered, asked)
}

// TestChosenBounds: what is chosen by hand is taken from the memory for state; what cannot fit is an error that names
// the flag, and where all together do not fit, the flags are named.
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
		{what: "connections and checks", limits: Limits{MaxConnections: 100_000, MaxInFlight: 50_000},
			over: "[max-connections max-in-flight]"},
		{what: "more state than there is", state: 512 << 20, err: "max-memory: 512 MiB do not fit"},
		{what: "more unread than there is", limits: Limits{MaxUnread: 1 << 30}, err: "max-unread: 1.0 GiB do not fit"},
		{what: "messages as large as it all", limits: Limits{MaxMessageSize: 256 << 20},
			err: "max-message-size: 256 MiB do not fit"},
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

// TestStolenNodeCertificate: who has a node's certificate and key, but neither the gossip key nor a token, is a node on
// the peer port, and nobody on the ports for callers; its process is no member.
func TestStolenNodeCertificate(t *testing.T) {
	t.Parallel()
	dir, other := filepath.Join(t.TempDir(), "made"), filepath.Join(t.TempDir(), "other")
	makeSecrets(t, dir, other)
	cfg := testConfig(t, "a")
	cfg.Security = made(dir)
	a := mustSettle(t, cfg)

	ctx := testkit.Within(t, 10*time.Second)
	_, err := peer.Identify(ctx, addrOf(a.listeners.peer), credentials.NewTLS(&tls.Config{InsecureSkipVerify: true}))
	expect.True(t, err != nil, "the peer port answers to nobody's certificate")
	id, err := peer.Identify(ctx, addrOf(a.listeners.peer), a.security.peerClient())
	expect.True(t, err == nil && id.Name == "a", "the peer port answers %v, %v to a node's certificate", id, err)

	conn, err := grpc.NewClient(addrOf(a.listeners.peer), grpc.WithTransportCredentials(a.security.peerClient()))
	must.NoError(t, err)
	defer conn.Close()
	for name, add := range map[string]*weirv1.GossipKeysRequest{
		"a key":        {Action: weirv1.KeyAction_KEY_ACTION_ADD, Key: gossipKey(9)},
		"no key":       {Action: weirv1.KeyAction_KEY_ACTION_REMOVE, Id: "0"},
		"another step": {Action: weirv1.KeyAction_KEY_ACTION_USE, Id: a.cluster.Keys()[0].ID},
	} {
		for _, proof := range []string{"", "guessed"} {
			ctx := metadata.AppendToOutgoingContext(ctx, "weir-gossip-proof-bin", proof)
			_, err := peerv1.NewGossipKeysClient(conn).Apply(ctx, add)
			expect.True(t, status.Code(err) == codes.PermissionDenied && len(a.cluster.Keys()) == 1,
				"the gossip keys, %s: %v, %v", name, err, a.cluster.Keys())
		}
	}
	refusedAt(t, a, "peer", "no_gossip_key")

	pair := must.Value(tls.LoadX509KeyPair(cfg.Security.PeerTLSCertFile, cfg.Security.PeerTLSKeyFile))(t)
	stolen := &tls.Config{InsecureSkipVerify: true,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &pair, nil // whichever authorities are asked for
		}}
	err = askStatus(t, a, credentials.NewTLS(stolen))
	expect.Equal(t, status.Code(err), codes.Unavailable, "over gRPC: %v", err)
	refusedAt(t, a, "grpc", "unknown_authority")
	transport := &http.Transport{TLSClientConfig: stolen, DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Get("https://" +
		addrOf(a.listeners.http) + "/v1/status")
	if err == nil {
		resp.Body.Close()
		t.Errorf("over HTTP: %s", resp.Status)
	}
	refusedAt(t, a, "http", "unknown_authority")

	cfg = testConfig(t, "thief")
	cfg.Security, cfg.Join = made(dir), []string{a.view().Self.GossipAddr}
	cfg.Security.GossipKeyFile = made(other).GossipKeyFile
	thief := mustStart(t, cfg)
	testkit.Eventually(t, "the thief's gossip to be denied", func() bool {
		return strings.Contains(metricsOf(t, a), `weir_access_denied_total{listener="gossip",reason="gossip_key"}`)
	})
	ready, _ := thief.Ready()
	expect.True(t, !ready && len(a.view().Members) == 1, "ready %v, members %+v", ready, a.view().Members)
	select {
	case <-a.Failed():
		t.Errorf("the node ended: %v", a.Err())
	default:
	}
}

// checkMethod is the name of the method that a caller without rights must not be able to have a request of read.
const checkMethod = weirv1.Limiter_Check_FullMethodName

// dialed connects to a node's gRPC port, in plain text.
func dialed(t *testing.T, n *Node, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	return testkit.Dial(t, addrOf(n.listeners.grpc), options...)
}

// allocated is how many bytes the process allocates while f runs.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// emptyChecks is a request of two million checks in 4 MiB, less than 5 KiB of which are left by compression.
var emptyChecks = bytes.Repeat([]byte{10, 0}, 4<<20/2-1)

// TestCompressedRequests: a stranger's requests of 4 KiB that hold 4 MiB, and two million checks, are not inflated; nor
// are those of a caller.
func TestCompressedRequests(t *testing.T) {
	n, shop, _, _ := startAccess(t, nil)
	conn := dialed(t, n,
		grpc.WithDefaultCallOptions(grpc.ForceCodec(testkit.RawCodec{}), grpc.UseCompressor(gzip.Name)))
	for _, ctx := range []context.Context{t.Context(), bearer(t, shop)} {
		took := allocated(func() {
			for range 4 {
				var out []byte
				err := conn.Invoke(ctx, checkMethod, &emptyChecks, &out)
				expect.Equal(t, status.Code(err), codes.Unimplemented, "a compressed request: %v", err)
			}
		})
		expect.True(t, took <= 64<<20,
			"four compressed requests took %d MiB", took>>20) // some 8 MiB of it are the client's, who compresses
	}
}

// TestDeniedBeforeRead: who may not call a method is told so before the request is read.
func TestDeniedBeforeRead(t *testing.T) {
	n, _, _, _ := withAccess(t, func(cfg *Config) { cfg.Limits.FirstMessageTimeout = time.Hour })
	conn := dialed(t, n)
	ctx := testkit.Within(t, 10*time.Second)
	for _, method := range []string{checkMethod, weirv1.Limiter_CheckStream_FullMethodName,
		weirv1.Limiter_Status_FullMethodName} {
		s := must.Value(conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method))(t)
		err := s.RecvMsg(&weirv1.CheckResponse{})
		expect.Equal(t, status.Code(err), codes.Unauthenticated, "%s: %v", method, err)
	}
}

// TestFirstMessage: a call ends whose first message does not come, whatever deadline it says it has.
func TestFirstMessage(t *testing.T) {
	n, _, all, _ := withAccess(t, func(cfg *Config) { cfg.Limits.FirstMessageTimeout = 100 * time.Millisecond })
	conn := dialed(t, n)
	ctx, cancel := context.WithTimeout(bearer(t, all), time.Hour)
	defer cancel()
	for _, method := range []string{
		checkMethod, weirv1.Limiter_CheckStream_FullMethodName, "/grpc.health.v1.Health/Check",
		"/grpc.health.v1.Health/Watch", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
	} {
		s := must.Value(conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method))(t)
		err := s.RecvMsg(&weirv1.CheckResponse{})
		expect.Equal(t, status.Code(err), codes.DeadlineExceeded, "%s: %v", method, err)
	}
}

// TestEveryMessageIsCounted is an attack on each method of each service that is registered, of callers and of nodes: a
// message of 4 MiB with millions of empty elements, in each list and map of the request at every depth. The elements
// are counted before they are decoded.
func TestEveryMessageIsCounted(t *testing.T) {
	n, _, all, _ := startAccess(t, func(cfg *Config) {
		cfg.Envoy.Dir = envoyDir(t, quotaFile)
		cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml",
			"policies:\n- {name: tenant, algorithm: sliding_log, limit: 300, window: 1h}\n")
	})
	ctx := bearer(t, all)
	for addr, server := range map[string]*grpc.Server{n.GRPCAddr(): n.grpcServer, n.PeerAddr(): n.peerServer} {
		conn := testkit.Dial(t, addr, grpc.WithDefaultCallOptions(grpc.ForceCodec(testkit.RawCodec{})))
		attacks := 0
		for service, info := range server.GetServiceInfo() {
			d := must.Value(protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service)))(t)
			for _, m := range info.Methods {
				request := d.(protoreflect.ServiceDescriptor).Methods().ByName(protoreflect.Name(m.Name)).Input()
				for field, body := range manyElements(request, 4<<20-100) {
					attacks++
					var err error
					took := allocated(func() { err = sendBody(ctx, conn, "/"+service+"/"+m.Name, m.IsClientStream || m.IsServerStream, body) })
					expect.ErrorContains(t, err, "elements of lists and maps",
						"%s/%s with many %s", service, m.Name, field)
					if took > 40<<20 { // 4 MiB at each end, some of it in more than one buffer
						t.Errorf("%s/%s with many %s took %d MiB", service, m.Name, field, took>>20)
					}
				}
			}
		}
		expect.True(t, attacks >= 10, "only %d attacks", attacks)
	}
}

// sendBody calls a method with a message that is bytes already.
func sendBody(ctx context.Context, conn *grpc.ClientConn, method string, stream bool, body []byte) error {
	var out []byte
	if !stream {
		return conn.Invoke(ctx, method, &body, &out)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return err
	}
	_ = s.SendMsg(&body) // RecvMsg tells what went wrong
	return s.RecvMsg(&out)
}

// manyElements returns messages of about that size, by the field that they repeat: each list and map that a message can
// have, at every depth, in each form.
func manyElements(d protoreflect.MessageDescriptor, size int) map[string][]byte {
	all := make(map[string][]byte)
	var visit func(d protoreflect.MessageDescriptor, path string, within []protoreflect.FieldDescriptor)
	visit = func(d protoreflect.MessageDescriptor, path string, within []protoreflect.FieldDescriptor) {
		for i := range d.Fields().Len() {
			f := d.Fields().Get(i)
			path := path + "." + string(f.Name())
			if f.IsList() || f.IsMap() {
				all[path] = wrapped(within, bytes.Repeat(emptyElement(f), size/len(emptyElement(f))))
			}
			if f.IsPacked() {
				all[path+" packed"] = wrapped(within, inBytes(f, make([]byte, size)))
			}
			if f.Message() != nil && len(within) < 6 {
				visit(f.Message(), path, append(within[:len(within):len(within)], f))
			}
		}
	}
	visit(d, "", nil)
	return all
}

// wrapped puts a message into those around it.
func wrapped(within []protoreflect.FieldDescriptor, body []byte) []byte {
	for i := len(within) - 1; i >= 0; i-- {
		body = inBytes(within[i], body)
	}
	return body
}

func inBytes(f protoreflect.FieldDescriptor, body []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, f.Number(), protowire.BytesType), body)
}

// emptyElement is the shortest element of a list that is not packed.
func emptyElement(f protoreflect.FieldDescriptor) []byte {
	switch f.Kind() {
	case protoreflect.MessageKind, protoreflect.StringKind, protoreflect.BytesKind:
		return inBytes(f, nil)
	case protoreflect.Fixed32Kind, protoreflect.Sfixed32Kind, protoreflect.FloatKind:
		return protowire.AppendFixed32(protowire.AppendTag(nil, f.Number(), protowire.Fixed32Type), 0)
	case protoreflect.Fixed64Kind, protoreflect.Sfixed64Kind, protoreflect.DoubleKind:
		return protowire.AppendFixed64(protowire.AppendTag(nil, f.Number(), protowire.Fixed64Type), 0)
	}
	return protowire.AppendVarint(protowire.AppendTag(nil, f.Number(), protowire.VarintType), 0)
}

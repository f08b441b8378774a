package node

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/reload"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

// testLeaf is what a certificate for a test's node is good for.
var testLeaf = certstest.Leaf{DNS: []string{"weir.test"}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}}

// filesOf has an authority make a certificate in a directory of its own.
func filesOf(t *testing.T, a *certstest.Authority, leaf certstest.Leaf) reload.CertFiles {
	t.Helper()
	cert, key, ca := a.Write(t.TempDir(), leaf)
	return reload.CertFiles{Cert: cert, Key: key, CA: ca}
}

// httpsGet asks a node over TLS; without pairs without a certificate.
func httpsGet(t *testing.T, n *Node, a *certstest.Authority, path string, pairs ...tls.Certificate) (int, error) {
	t.Helper()
	transport := &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: a.Pool(), Certificates: pairs},
		ForceAttemptHTTP2: true, DisableKeepAlives: true,
	}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Get("https://" +
		addrOf(n.listeners.http) + path)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	expect.Equal(t, resp.ProtoMajor, 2, "answered over %s", resp.Proto)
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

// askStatus asks a node over gRPC.
func askStatus(t *testing.T, n *Node, creds credentials.TransportCredentials, opts ...grpc.DialOption) error {
	t.Helper()
	conn, err := grpc.NewClient(addrOf(n.listeners.grpc), append(opts, grpc.WithTransportCredentials(creds))...)
	must.NoError(t, err)
	defer conn.Close()
	ctx := testkit.Within(t, 10*time.Second)
	_, err = weirv1.NewLimiterClient(conn).Status(ctx, &weirv1.StatusRequest{})
	return err
}

// refusedAt waits until the node has counted a refusal.
func refusedAt(t *testing.T, n *Node, listener, reason string) {
	t.Helper()
	want := fmt.Sprintf("weir_access_denied_total{listener=%q,reason=%q}", listener, reason)
	testkit.Eventually(t, want, func() bool { return strings.Contains(metricsOf(t, n), want) })
}

// metricsOf reads the node's metrics from within.
func metricsOf(t *testing.T, n *Node) string {
	t.Helper()
	w := httptest.NewRecorder()
	n.metrics.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return w.Body.String()
}

// TestTLS: callers over TLS, without certificates of their own.
func TestTLS(t *testing.T) {
	t.Parallel()
	a := certstest.NewAuthority(t, "a")
	cfg := testConfig(t, "node")
	cfg.Security.useTLS(filesOf(t, a, testLeaf))
	cfg.Security.TLSClientCAFile = ""
	var book testkit.Buffer
	cfg.Logger = book.Logger()
	n := mustSettle(t, cfg)
	code, err := httpsGet(t, n, a, "/v1/status")
	expect.True(t, code == http.StatusOK && err == nil, "HTTP: %d, %v", code, err)
	expect.NoError(t, askStatus(t, n, credentials.NewTLS(&tls.Config{RootCAs: a.Pool()})), "gRPC")

	// Plain text on the ports of TLS.
	resp := must.Value(http.Get("http://" + addrOf(n.listeners.http) + "/v1/status"))(t)
	resp.Body.Close()
	expect.Equal(t, resp.StatusCode, http.StatusBadRequest, "plain HTTP is answered")
	refusedAt(t, n, "http", "plain_text_on_tls_port")
	err = askStatus(t, n, insecure.NewCredentials())
	expect.Equal(t, status.Code(err), codes.Unavailable, "plain gRPC: %v", err)
	refusedAt(t, n, "grpc", "plain_text_on_tls_port")
	// An authority that the caller does not trust: the caller hangs up.
	_, err = httpsGet(t, n, certstest.NewAuthority(t, "b"), "/v1/status")
	expect.True(t, err != nil, "a node is trusted whose authority is not")
	refusedAt(t, n, "http", "handshake")
	if text := book.String(); !strings.Contains(text, "plain_text_on_tls_port") || strings.Contains(text, "PRIVATE") {
		t.Errorf("log:\n%s", text)
	}
	want := fmt.Sprintf(`weir_certificate_expiry_timestamp_seconds{use="callers"} %v`,
		float64(n.security.callers.Expiry().Unix()))
	page := metricsOf(t, n)
	expect.True(t, strings.Contains(page, want), "no %s in\n%s", want, page)
}

// TestTLSOnPlainPort: whoever begins with TLS where plain text is spoken is cut off, counted and logged.
func TestTLSOnPlainPort(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "node")
	var book testkit.Buffer
	cfg.Logger = book.Logger()
	n := mustSettle(t, cfg)
	for name, d := range map[string]*admission.Listener{"http": n.listeners.http, "grpc": n.listeners.grpc,
		"peer": n.listeners.peer} {
		conn, err := tls.Dial("tcp", addrOf(d), &tls.Config{InsecureSkipVerify: true})
		if err == nil {
			conn.Close()
			t.Errorf("%s: speaks TLS", name)
		}
		refusedAt(t, n, name, "tls_on_plain_port")
	}
	testkit.Eventually(t, "a line in the log",
		func() bool { return strings.Contains(book.String(), "reason=tls_on_plain_port") })
	code, _ := get(t, n, "/v1/status")
	expect.Equal(t, code, http.StatusOK, "in plain text")
}

// TestClientCertificates: without an access file callers must present a certificate, but for what is open to probes.
func TestClientCertificates(t *testing.T) {
	t.Parallel()
	a := certstest.NewAuthority(t, "a")
	cfg := testConfig(t, "node")
	cfg.Security.useTLS(filesOf(t, a, testLeaf))
	n := mustSettle(t, cfg)
	pair := a.Pair(certstest.Leaf{DNS: []string{"caller.test"}})
	for _, c := range []struct {
		name   string
		pairs  []tls.Certificate
		reason string
	}{
		{"a good one", []tls.Certificate{pair}, ""},
		{"none", nil, reload.NoCertificate},
	} {
		err := askStatus(t, n, credentials.NewTLS(&tls.Config{RootCAs: a.Pool(), Certificates: c.pairs}))
		expect.Equal(t, (err == nil), c.reason == "", "%s: %v", c.name, err)
		if c.reason != "" {
			refusedAt(t, n, "grpc", c.reason)
		}
	}
	code, err := httpsGet(t, n, a, "/v1/status")
	expect.True(t, code == http.StatusUnauthorized && err == nil, "without a certificate: %d, %v", code, err)
	refusedAt(t, n, "http", auth.NoCredentials)
	code, err = httpsGet(t, n, a, "/readyz")
	expect.True(t, code == http.StatusOK && err == nil, "a probe: %d, %v", code, err)
	code, err = httpsGet(t, n, a, "/v1/status", pair)
	expect.True(t, code == http.StatusOK && err == nil, "with a certificate: %d, %v", code, err)
}

// secureCluster starts three nodes that prove themselves to each other.
func secureCluster(t *testing.T, log *slog.Logger, a *certstest.Authority, change func(i int, cfg *Config)) []*Node {
	t.Helper()
	return startCluster(t, "node-0 node-1 node-2", func(i int, cfg *Config) {
		cfg.Security.usePeerTLS(filesOf(t, a, certstest.Leaf{URIs: []string{peerName}}), peerName)
		cfg.Logger = log.With("node", cfg.Name)
		if change != nil {
			change(i, cfg)
		}
	})
}

const peerName = "spiffe://weir.test/cluster"

// TestPeerTLS: nodes whose certificates are right are a cluster. One that comes with another name is none of it: it
// hears of the others by gossip, which certificates have no part in, but nothing moves to it and nobody asks it.
func TestPeerTLS(t *testing.T) {
	t.Parallel()
	a := certstest.NewAuthority(t, "a")
	nodes := secureCluster(t, slog.New(slog.DiscardHandler), a, nil)
	for i := range 20 {
		for _, n := range nodes {
			d := check(t, n, fmt.Sprint("key-", i))
			must.True(t, d.Allowed && !d.FailedOpen && d.Remaining >= 2, "%+v", d)
		}
	}
	for _, c := range []struct {
		reason string
		creds  credentials.TransportCredentials
	}{
		{"plain_text_on_tls_port", insecure.NewCredentials()},
		{reload.NoCertificate, credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})},
		{reload.WrongIdentity, credentials.NewTLS(&tls.Config{InsecureSkipVerify: true,
			Certificates: []tls.Certificate{a.Pair(certstest.Leaf{URIs: []string{"spiffe://weir.test/other"}})}})},
		{reload.Expired, credentials.NewTLS(&tls.Config{InsecureSkipVerify: true,
			Certificates: []tls.Certificate{a.Pair(certstest.Leaf{URIs: []string{peerName}, Expired: true})}})},
	} {
		conn := must.Value(grpc.NewClient(addrOf(nodes[0].listeners.peer), grpc.WithTransportCredentials(c.creds)))(t)
		err := conn.Invoke(t.Context(), "/weir.peer.v1.Peer/Inspect", &peerv1.InspectRequest{},
			&peerv1.InspectResponse{})
		expect.Equal(t, status.Code(err), codes.Unavailable, "%s: %v", c.reason, err)
		conn.Close()
		refusedAt(t, nodes[0], "peer", c.reason)
	}
}

// TestCertificatesUnderTraffic: certificates of callers and of nodes are replaced, and their authority with them when
// the connections between nodes have been replaced by age, while checks go on through all nodes. None fails, and none
// is answered by on_error.
func TestCertificatesUnderTraffic(t *testing.T) {
	t.Parallel()
	a, b := certstest.NewAuthority(t, "a"), certstest.NewAuthority(t, "b")
	var files []Security
	var books [3]testkit.Buffer
	nodes := secureCluster(t, slog.New(slog.DiscardHandler), a, func(i int, cfg *Config) {
		cfg.Logger, cfg.Limits.MaxConnectionAge = books[i].Logger(), 2*time.Second
		cfg.Security.useTLS(filesOf(t, a, testLeaf))
		cfg.Security.TLSClientCAFile = ""
		cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(onePolicy, 1_000_000))
		files = append(files, cfg.Security)
	})
	pool := a.Pool()
	pool.AppendCertsFromPEM(b.PEM)
	stop := make(chan struct{})
	var load sync.WaitGroup
	var asked atomic.Int64
	for i, n := range nodes {
		load.Go(func() {
			for j := 0; ; j++ {
				select {
				case <-stop:
					return
				default:
				}
				// A connection of its own each time, as callers do who come and go.
				conn, err := grpc.NewClient(addrOf(n.listeners.grpc),
					grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: pool})))
				if err != nil {
					t.Error(err)
					return
				}
				resp, err := weirv1.NewLimiterClient(conn).Check(t.Context(), &weirv1.CheckRequest{
					Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "login", Key: fmt.Sprint(i, "-", j)}}},
				})
				conn.Close()
				if err != nil || !resp.Allowed || resp.Results[0].GetDecision().GetFailedOpen() {
					t.Errorf("%v %v", resp, err)
					return
				}
				asked.Add(1)
			}
		})
	}
	atLeast := func(more int64) {
		t.Helper()
		from := asked.Load()
		testkit.Eventually(t, "more checks", func() bool { return asked.Load() >= from+more || t.Failed() })
	}
	atLeast(20)
	// First both authorities are trusted everywhere, then the certificates are replaced, then the old one is dropped.
	rewrite := func(content []byte) {
		for i, f := range files {
			before := taken(t, nodes[i], "peer_certificates")
			must.NoError(t, os.WriteFile(f.PeerTLSCAFile, content, 0o600))
			testkit.Eventually(t, "the authorities to be taken",
				func() bool { return taken(t, nodes[i], "peer_certificates") != before })
		}
	}
	rewrite(append(append([]byte{}, a.PEM...), b.PEM...))
	for i, f := range files {
		before, peersBefore := nodes[i].security.callers.Expiry(), nodes[i].security.peers.Expiry()
		soon := time.Now().Add(30 * time.Minute)
		replace(t, b, f.tls(), certstest.Leaf{IPs: testLeaf.IPs, NotAfter: soon})
		replace(t, b, f.peerTLS(), certstest.Leaf{URIs: []string{peerName}, NotAfter: soon})
		testkit.Eventually(t, "the certificates to be taken", func() bool {
			return !nodes[i].security.callers.Expiry().Equal(before) &&
				!nodes[i].security.peers.Expiry().Equal(peersBefore)
		})
		atLeast(5)
	}
	var marks [len(books)]int
	for i := range books {
		marks[i] = len(books[i].String())
	}
	testkit.Eventually(t, "all streams between nodes to end by age", func() bool {
		for i, mark := range marks {
			for j, to := range nodes {
				ended := `msg="peer stream broken" carries=operations peer=` + to.cfg.Name
				if i != j && !strings.Contains(books[i].String()[mark:], ended) {
					return t.Failed()
				}
			}
		}
		return true
	})
	rewrite(b.PEM)
	// New streams between nodes are under the new ones only.
	for _, n := range nodes {
		expect.NoError(t, askStatus(t, n, credentials.NewTLS(&tls.Config{RootCAs: b.Pool()})), "with the new authority")
	}
	atLeast(20)
	close(stop)
	load.Wait()
}

// replace puts a new certificate and key in the place of others; the authorities stay.
func replace(t *testing.T, a *certstest.Authority, f reload.CertFiles, leaf certstest.Leaf) {
	t.Helper()
	cert, key := a.Issue(leaf)
	for file, content := range map[string][]byte{f.Cert: cert, f.Key: key} {
		must.NoError(t, os.WriteFile(file, content, 0o600))
	}
}

// taken is the line of the metrics that counts how often files were taken.
func taken(t *testing.T, n *Node, file string) string {
	t.Helper()
	for line := range strings.Lines(metricsOf(t, n)) {
		if strings.HasPrefix(line, fmt.Sprintf(`weir_security_reloads_total{file=%q,result="taken"}`, file)) {
			return line
		}
	}
	t.Fatalf("no count of %s", file)
	return ""
}

// TestSecurityWarning: one line names what is missing beyond loopback. TestSecureBeyondLoopback tests what is missing.
func TestSecurityWarning(t *testing.T) {
	t.Parallel()
	files := filesOf(t, certstest.NewAuthority(t, "a"), testLeaf)
	for _, c := range []struct {
		bind  string
		files reload.CertFiles
		want  []string // parts of the one warning; nil: none
		plain bool     // it warns of plain text
	}{
		{"0.0.0.0", reload.CertFiles{}, []string{"access-file", "peer-tls-cert-file", "gossip-key-file"}, true},
		{"0.0.0.0", files, []string{"peer-tls-cert-file", "gossip-key-file"}, false},
		{"127.0.0.1", reload.CertFiles{}, nil, false},
	} {
		var book testkit.Buffer
		cfg := testConfig(t, "node")
		cfg.Bind, cfg.Logger = c.bind, book.Logger()
		cfg.Security.useTLS(c.files)
		s := must.Value(openSecurity(&cfg))(t)
		s.warn(cfg)
		s.close()
		text := book.String()
		expect.True(t, strings.Count(text, "beyond loopback") == min(len(c.want), 1) &&
			strings.Contains(text, "plain text") == c.plain, "%s: %s", c.bind, text)
		for _, part := range c.want {
			expect.True(t, strings.Contains(text, part), "no %s in %s", part, text)
		}
	}
}

// TestRejectedStreamsInTheLog: a process at the peer port that is rejected as often as it can does not fill the log.
func TestRejectedStreamsInTheLog(t *testing.T) {
	var log testkit.Buffer
	alone := testConfig(t, "a")
	alone.Logger = log.Logger()
	cfg := mustStart(t, alone).transport()
	for range 2000 {
		_, err := cfg.Accept(nil)
		must.True(t, err != nil, "a Hello that is missing was accepted")
	}
	lines := strings.Count(log.String(), "peer stream rejected")
	expect.True(t, lines >= 100 && lines <= 200, "%d lines", lines)
	testkit.Eventually(t, "the log to say how many lines it lacks", func() bool {
		_, _ = cfg.Accept(nil)
		return strings.Contains(log.String(), "unlogged=")
	})
}

// TestPeerCertificateThatOthersRefuse: a node does not start with one.
func TestPeerCertificateThatOthersRefuse(t *testing.T) {
	t.Parallel()
	var cfg Config
	cfg.Security.usePeerTLS(filesOf(t, certstest.NewAuthority(t, "a"), certstest.Leaf{DNS: []string{"another"}}),
		"weir.test")
	_, err := openSecurity(&cfg)
	expect.True(t, err != nil && strings.HasPrefix(err.Error(), "peer-tls-cert-file, ") &&
		strings.Contains(err.Error(), "peer-tls-ca-file"), "%v", err)
}

// recorder keeps what is written to a connection.
type recorder struct {
	net.Conn
	mu   sync.Mutex
	sent bytes.Buffer
}

func (r *recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	r.sent.Write(p)
	r.mu.Unlock()
	return r.Conn.Write(p)
}

func (r *recorder) recorded() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return bytes.Clone(r.sent.Bytes())
}

// TestReplay: what a node has said to another, recorded and said again, is worth nothing: the handshake fails.
func TestReplay(t *testing.T) {
	t.Parallel()
	a := certstest.NewAuthority(t, "a")
	cfg := testConfig(t, "node")
	cfg.Security.usePeerTLS(filesOf(t, a, certstest.Leaf{URIs: []string{peerName}}), peerName)
	n := mustSettle(t, cfg)
	addr := addrOf(n.listeners.peer)
	var sent *recorder
	conn := must.Value(grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(credentials.NewTLS(n.security.peers.Client(n.security.peerRules()))),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			raw, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
			sent = &recorder{Conn: raw}
			return sent, err
		})))(t)
	must.NoError(t, conn.Invoke(t.Context(), "/weir.peer.v1.Peer/Inspect", &peerv1.InspectRequest{},
		&peerv1.InspectResponse{}))
	conn.Close()
	raw := must.Value(net.Dial("tcp", addr))(t)
	defer raw.Close()
	_, err := raw.Write(sent.recorded())
	must.NoError(t, err)
	_, _ = io.Copy(io.Discard, raw) // until the node hangs up
	refusedAt(t, n, "peer", "handshake")
}

// TestGoAways: whoever makes net/http complain as often as it likes does not fill the log.
func TestGoAways(t *testing.T) {
	t.Parallel()
	a := certstest.NewAuthority(t, "a")
	cfg := testConfig(t, "node")
	cfg.Security.useTLS(filesOf(t, a, testLeaf))
	cfg.Security.TLSClientCAFile = ""
	var book testkit.Buffer
	cfg.Logger = book.Logger()
	n := mustSettle(t, cfg)
	at := time.Now()
	r := n.security.denials
	r.mu.Lock()
	r.now = func() time.Time { return at }
	r.mu.Unlock()
	var conns []net.Conn
	for range 30 {
		conn := must.Value(tls.Dial("tcp", addrOf(n.listeners.http),
			&tls.Config{RootCAs: a.Pool(), NextProtos: []string{"h2"}}))(t)
		_, err := io.WriteString(conn, http2.ClientPreface)
		must.NoError(t, err)
		f := http2.NewFramer(conn, conn)
		must.NoError(t, errors.Join(f.WriteSettings(), f.WriteGoAway(0, http2.ErrCodeEnhanceYourCalm, []byte("why"))))
		conns = append(conns, conn)
	}
	for _, conn := range conns {
		_, _ = io.Copy(io.Discard, conn) // until the server hangs up
		conn.Close()
	}
	expect.Equal(t, strings.Count(book.String(), "http connection failed"), 1, "lines for 30 GOAWAYs:\n%s", &book)
}

// TestLongDenials: an error that repeats what a stranger has sent is cut short in the log.
func TestLongDenials(t *testing.T) {
	t.Parallel()
	a := certstest.NewAuthority(t, "a")
	cfg := testConfig(t, "node")
	cfg.Security.useTLS(filesOf(t, a, testLeaf))
	var book testkit.Buffer
	cfg.Logger = book.Logger()
	n := mustSettle(t, cfg)
	for name, l := range map[string]*admission.Listener{"http": n.listeners.http, "grpc": n.listeners.grpc} {
		protocols := slices.Repeat([]string{strings.Repeat("\x01", 250)}, 100)
		conn, err := tls.Dial("tcp", addrOf(l), &tls.Config{RootCAs: a.Pool(), NextProtos: protocols})
		if err == nil {
			conn.Close()
		}
		refusedAt(t, n, name, "handshake")
		testkit.Eventually(t, "a line in the log",
			func() bool { return strings.Contains(book.String(), "listener="+name) })
	}
	for line := range strings.Lines(book.String()) {
		expect.True(t, len(line) < 3*maxWhat, "a line of %d bytes: %.300s", len(line), line)
	}
}

// TestUnreadAnswers: a stranger who asks over HTTP/2 and reads no answer has a few requests at a time, and its
// connection ends beyond; those of a caller take of the callers' memory.
func TestUnreadAnswers(t *testing.T) {
	t.Parallel()
	a := certstest.NewAuthority(t, "a")
	cfg := testConfig(t, "node")
	cfg.Security.useTLS(filesOf(t, a, testLeaf))
	cfg.Security.TLSClientCAFile = ""
	token := auth.NewToken()
	cfg.Security.AccessFile = testkit.WriteFile(t, "access.yaml",
		"callers:\n  - {name: shop, tokens: ["+auth.Hash(token)+"], roles: [read]}\n")
	h2 := &tls.Config{RootCAs: a.Pool(), NextProtos: []string{"h2"}}
	cfg.Limits.MaxConnections = 100 // which bounds the callers' memory
	n := mustSettle(t, cfg)
	ask := func(path, token string, requests int) (ended <-chan error) {
		conn := must.Value(tls.Dial("tcp", addrOf(n.listeners.http), h2))(t)
		sendUnread(t, conn, requests, nil, [][2]string{{":method", "GET"}, {":scheme", "https"}, {":path", path},
			{":authority", "localhost"}, {"authorization", token}})
		closed := make(chan error, 1)
		go func() {
			_, err := io.Copy(io.Discard, conn)
			closed <- err
		}()
		return closed
	}
	for _, path := range []string{"/healthz", "/openapi.yaml", "/console/app.js", "/v1/status", "/nothing"} {
		few := ask(path, "", 8)
		many := ask(path, "", 9)
		testkit.Eventually(t, path+": a connection of many requests is closed", func() bool { return len(many) == 1 })
		expect.Equal(t, len(few), 0, "%s: connections of few requests that are closed", path)
	}
	refusedAt(t, n, "http", "too_many_anonymous")
	before, _ := n.callersMemory.InUse()
	stays := ask("/v1/status", "Bearer "+token, 50)
	// the first may not have been known to be a caller's
	testkit.Eventually(t, "the memory of 49 requests", func() bool {
		taken, _ := n.callersMemory.InUse()
		return taken >= before+49*admission.PerStream
	})
	expect.Equal(t, len(stays), 0, "connections of a caller that are closed")
	const pages, least = 20, 8 << 10
	ask("/metrics", "Bearer "+token, pages)
	testkit.Eventually(t, "the bytes of unread pages", func() bool { return n.buffers.Used() > pages*least })
	for range 3 { // of pages that are open to all, on connections of which the caller has asked for nothing else
		ask("/openapi.yaml", "Bearer "+token, 250)
	}
	testkit.Eventually(t, "a request for which there is no memory", func() bool {
		return strings.Contains(metricsOf(t, n), `weir_call_errors_total{code="503",protocol="http"}`)
	})
	taken, all := n.callersMemory.InUse()
	expect.True(t, taken <= all/4*3, "one caller has taken %d of %d", taken, all)
}

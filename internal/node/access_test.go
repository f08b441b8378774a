package node

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	quotav3 "github.com/envoyproxy/go-control-plane/envoy/service/rate_limit_quota/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

const accessFile = `
callers:
  - {name: shop, tokens: [%s], identities: ["dns:shop.test"], roles: [check], policies: [login]}
  - {name: everything, tokens: [%s], roles: [check, charge, refund, read, topology, admin, keys, overrides], policies: ["*"], namespaces: ["*"]}
`

// withAccess has a test run beside others, with startAccess.
func withAccess(t *testing.T, change func(*Config)) (n *Node, shop, all string, book *testkit.Buffer) {
	t.Helper()
	t.Parallel()
	return startAccess(t, change)
}

// startAccess starts a node with an access file, and returns the tokens of shop and of everything.
func startAccess(t *testing.T, change func(*Config)) (n *Node, shop, all string, book *testkit.Buffer) {
	t.Helper()
	shop, all = auth.NewToken(), auth.NewToken()
	cfg := testConfig(t, "node")
	cfg.Security.AccessFile = testkit.WriteFile(t, "access.yaml",
		fmt.Sprintf(accessFile, auth.Hash(shop), auth.Hash(all)))
	book = new(testkit.Buffer)
	cfg.Logger = book.Logger()
	if change != nil {
		change(&cfg)
	}
	n = mustStart(t, cfg)
	awaitSettled(t, n)
	t.Cleanup(func() {
		for _, secret := range []string{shop, all, auth.Hash(shop), auth.Hash(all)} {
			expect.True(t, !strings.Contains(book.String(), secret), "the log has a token or its hash")
		}
	})
	return n, shop, all, book
}

// bearer is the context of calls over gRPC with a token, without one where it is empty.
func bearer(t *testing.T, token string) context.Context {
	if token == "" {
		return t.Context()
	}
	return metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+token)
}

// send sends a request over plain HTTP; headers are written as name, value, and those
// without a value are left out.
func send(t *testing.T, n *Node, method, path, token, body string, headers ...string) (*http.Response, string) {
	t.Helper()
	r := must.Value(http.NewRequestWithContext(t.Context(), method, "http://"+addrOf(n.listeners.http)+path,
		strings.NewReader(body)))(t)
	r.Header.Set("Content-Type", "application/json")
	if token != "" {
		field := "Authorization"
		if strings.HasPrefix(path, "/v1/forward-auth") {
			field = "Weir-Authorization" // the other is the gateway's caller's
		}
		r.Header.Set(field, "Bearer "+token)
	}
	for pair := range slices.Chunk(headers, 2) {
		if pair[1] != "" {
			r.Header.Set(pair[0], pair[1])
		}
	}
	resp := must.Value(http.DefaultClient.Do(r))(t)
	defer resp.Body.Close()
	text := must.Value(io.ReadAll(resp.Body))(t)
	return resp, string(text)
}

// TestEveryRoute: all but what is stated to be open wants to know who asks, over HTTP.
func TestEveryRoute(t *testing.T) {
	n, _, all, _ := withAccess(t, nil)
	_, index := send(t, n, "GET", "/", "", "")
	open := []string{"/console", "/console/app.js", "/console/icon.svg", "/console/style.css", "/", "/healthz",
		"/healthcheck", "/readyz", "/openapi.yaml", "/v1/LiveCheck"}
	seen := 0
	for line := range strings.Lines(index) {
		method, path, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok || !strings.HasPrefix(path, "/") {
			continue
		}
		seen++
		want := http.StatusUnauthorized
		if slices.Contains(open, path) {
			want = http.StatusOK
		}
		resp, body := send(t, n, method, path, "", "{}")
		expect.True(t, resp.StatusCode == want, "%s %s without a token: %d %s", method, path, resp.StatusCode, body)
		expect.True(t, want != http.StatusUnauthorized ||
			resp.Header.Get("WWW-Authenticate") == `Bearer realm="weir"` &&
				resp.Header.Get("Content-Type") == "application/problem+json", "%s %s: %v", method, path, resp.Header)
		if path == "/console/events" {
			continue // which goes on and on: see TestConsoleStream
		}
		resp, body = send(t, n, method, path, all, "{}")
		expect.True(t, resp.StatusCode != http.StatusUnauthorized && resp.StatusCode != http.StatusForbidden,
			"%s %s with all roles: %d %s", method, path, resp.StatusCode, body)
	}
	expect.True(t, seen >= 15, "only %d routes in:\n%s", seen, index)
	// Every route of another front end is one that openapi.yaml describes.
	_, spec := send(t, n, http.MethodGet, "/openapi.yaml", "", "")
	for _, r := range n.foreignRoutes() {
		expect.True(t, strings.Contains(spec, "\n  "+r.Path+":\n"), "openapi.yaml has no %s", r.Path)
	}
}

// TestReadinessDetail: why a node is not ready, or what is wrong with it, is for those who may read; anybody else
// learns whether it is ready, and asking is no offence.
func TestReadinessDetail(t *testing.T) {
	n, shop, all, _ := withAccess(t, nil)
	swapForPipe(t, n.cfg.PolicyFile)
	n.Reload()
	testkit.Eventually(t, "the file to be reported", func() bool { return n.policyError() != "" })
	for token, want := range map[string]bool{all: true, shop: false, "": false, "nonsense": false} {
		resp, body := send(t, n, "GET", "/readyz", token, "")
		expect.True(t, resp.StatusCode == http.StatusOK && strings.Contains(body, `"ready":true`) &&
			strings.Contains(body, "detail") == want, "%q: %d %s", token, resp.StatusCode, body)
	}
	page := metricsOf(t, n)
	expect.True(t, !strings.Contains(page, "weir_access_denied_total{"), "a probe counts as denied")
}

// TestEveryMethod: the same over gRPC, for every method of every service that is registered.
func TestEveryMethod(t *testing.T) {
	n, _, all, _ := withAccess(t, nil)
	conn := dialed(t, n)
	call := func(ctx context.Context, method string, stream bool) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if !stream {
			return conn.Invoke(ctx, method, &emptypb.Empty{}, &emptypb.Empty{})
		}
		s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
		if err != nil {
			return err
		}
		_ = s.SendMsg(&emptypb.Empty{}) // RecvMsg tells what went wrong
		_ = s.CloseSend()
		return s.RecvMsg(&emptypb.Empty{})
	}
	seen := 0
	for service, info := range n.grpcServer.GetServiceInfo() {
		for _, m := range info.Methods {
			seen++
			method := "/" + service + "/" + m.Name
			open := service == "grpc.health.v1.Health" || method == "/pb.gubernator.V1/LiveCheck"
			code := status.Code(call(t.Context(), method, m.IsServerStream || m.IsClientStream))
			expect.True(t, (code == codes.Unauthenticated) != open, "%s without a token: %v", method, code)
			code = status.Code(call(bearer(t, all), method, m.IsServerStream || m.IsClientStream))
			expect.True(t, code != codes.Unauthenticated && code != codes.PermissionDenied,
				"%s with all roles: %v", method, code)
		}
	}
	expect.True(t, seen >= 12, "only %d methods", seen)
}

// TestAccess: who may do what, over HTTP and gRPC, and what the operator hears of it.
func TestAccess(t *testing.T) {
	n, shop, all, book := withAccess(t, nil)
	login, other := `{"policy":"login","key":"a"}`, `{"policy":"other","key":"a"}`
	for _, c := range []struct {
		path, token, body string
		status            int
		want, reason      string
	}{
		{"/v1/check", shop, login, 200, `"allowed":true`, ""},
		{"/v1/check", "weir_wrong", login, 401,
			`"type":"https://github.com/weirlimit/weir/blob/main/gateway/http/PROBLEMS.md#unauthenticated"`,
			"bad_token"},
		{"/v1/check", "", login, 401, "authenticate with a token", "no_credentials"},
		{"/v1/check", shop, other, 403, `"field":"policy"`, "wrong_policy"},
		{"/v1/check", all, other, 404, "", ""},
		{"/v1/checks", shop, `{"checks":[` + login + `,` + other + `]}`, 200, `"status":403`, ""},
		{"/v1/checks", shop, `{"atomic":true,"checks":[` + login + `,` + other + `]}`, 403,
			`"field":"checks[1].policy"`, ""},
		{"/v1/check", shop, `{"namespace":"x","limit":{"algorithm":"sliding_log","limit":1,"window":"1m"},"key":"a"}`,
			403, `"field":"namespace"`, ""},
		{"/v1/reset", shop, login, 403, "#denied", "wrong_role"},
		{"/v1/reset", all, login, 200, "", ""},
	} {
		resp, body := send(t, n, "POST", c.path, c.token, c.body)
		expect.True(t, resp.StatusCode == c.status && strings.Contains(body, c.want),
			"%s %s: %d %s", c.path, c.body, resp.StatusCode, body)
		if c.reason != "" {
			refusedAt(t, n, "http", c.reason)
		}
		challenge := resp.Header.Get("WWW-Authenticate")
		expect.True(t, (c.reason != "bad_token" || challenge == `Bearer realm="weir", error="invalid_token"`) &&
			(c.reason != "wrong_role" || challenge == `Bearer realm="weir", error="insufficient_scope"`),
			"%s: %s", c.path, challenge)
	}
	text := book.String()
	expect.True(t, strings.Contains(text, "reason=wrong_policy") &&
		strings.Contains(text, "shop may not use the policy"), "log:\n%s", text)

	// Through the client, with the token and without.
	addr := addrOf(n.listeners.grpc)
	for _, c := range []struct {
		opts   []client.Option
		policy string
		want   error
	}{
		{[]client.Option{client.WithToken(shop)}, "login", nil},
		{[]client.Option{client.WithToken(shop)}, "other", client.ErrDenied},
		{[]client.Option{client.WithToken("weir_wrong")}, "login", client.ErrUnauthenticated},
		{nil, "login", client.ErrUnauthenticated},
	} {
		conn := must.Value(client.Dial(t.Context(), addr, c.opts...))(t)
		ready := c.want // the role check for some policy is enough
		if c.want == client.ErrDenied {
			ready = nil
		}
		expect.ErrorIs(t, conn.Ready(t.Context()), ready, "ready for %s", c.policy)
		// No permission is no reason to let anybody through: the fail policy has no part in it.
		_, err := conn.Policy(c.policy).Allow(t.Context(), "b")
		expect.ErrorIs(t, err, c.want, "%s", c.policy)
		if c.want == nil {
			expect.ErrorIs(t, conn.Policy(c.policy).Reset(t.Context(), "b"), client.ErrDenied, "reset")
		}
		conn.Close()
	}
	refusedAt(t, n, "grpc", "bad_token")
	refusedAt(t, n, "grpc", "wrong_policy")
}

// TestAccessReload: the file is read again when it changes; one with mistakes changes nothing, and says so.
func TestAccessReload(t *testing.T) {
	n, shop, _, book := withAccess(t, nil)
	login := `{"policy":"login","key":"a"}`
	write := func(text string) { must.NoError(t, os.WriteFile(n.cfg.Security.AccessFile, []byte(text), 0o600)) }
	write("callers: [{name: x}]")
	testkit.Eventually(t, "the mistake to be told",
		func() bool { return strings.Contains(book.String(), "has neither tokens nor identities") })
	line := fmt.Sprintf("weir_security_reloads_total{file=%q,result=%q} 1", "access", "rejected")
	expect.True(t, strings.Contains(metricsOf(t, n), line), "no %s", line)
	resp, body := send(t, n, "POST", "/v1/check", shop, login)
	expect.True(t, resp.StatusCode == http.StatusOK, "after a mistake: %d %s", resp.StatusCode, body)
	fresh := auth.NewToken()
	write(fmt.Sprintf(accessFile, auth.Hash(fresh), auth.Hash(auth.NewToken())))
	testkit.Eventually(t, "the old token to be nobody's", func() bool {
		resp, _ := send(t, n, "POST", "/v1/check", shop, login)
		return resp.StatusCode == http.StatusUnauthorized
	})
	resp, body = send(t, n, "POST", "/v1/check", fresh, `{"policy":"login","key":"b"}`)
	expect.True(t, resp.StatusCode == http.StatusOK, "with the new token: %d %s", resp.StatusCode, body)
}

// TestCertificateOrToken: with authorities of callers and an access file, either will do.
func TestCertificateOrToken(t *testing.T) {
	a := certstest.NewAuthority(t, "a")
	n, shop, _, _ := withAccess(t, func(cfg *Config) { cfg.Security.useTLS(filesOf(t, a, testLeaf)) })
	check := func(token string, pairs ...tls.Certificate) error {
		conn := must.Value(grpc.NewClient(addrOf(n.listeners.grpc),
			grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: a.Pool(), Certificates: pairs}))))(t)
		defer conn.Close()
		_, err := weirv1.NewLimiterClient(conn).Check(bearer(t, token),
			&weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "login", Key: "a"}}}})
		return err
	}
	for _, c := range []struct {
		name, token string
		pairs       []tls.Certificate
		want        codes.Code
	}{
		{"neither", "", nil, codes.Unauthenticated},
		{"a token", shop, nil, codes.OK},
		{"a certificate", "", []tls.Certificate{a.Pair(certstest.Leaf{DNS: []string{"shop.test"}})}, codes.OK},
		{"a certificate of nobody", "", []tls.Certificate{a.Pair(certstest.Leaf{DNS: []string{"x.test"}})},
			codes.PermissionDenied},
		{"a certificate of nobody, and a token", shop,
			[]tls.Certificate{a.Pair(certstest.Leaf{DNS: []string{"x.test"}})}, codes.OK},
		{"an expired certificate, and a token", shop,
			[]tls.Certificate{a.Pair(certstest.Leaf{DNS: []string{"shop.test"}, Expired: true})}, codes.Unavailable},
	} {
		err := check(c.token, c.pairs...)
		expect.Equal(t, status.Code(err), c.want, "%s: %v", c.name, err)
	}
}

// TestOneCallerTakesNotAllStreams is an attack: one caller opens streams until it gets no more. Another caller has its
// stream, and its calls are answered.
func TestOneCallerTakesNotAllStreams(t *testing.T) {
	n, shop, all, _ := withAccess(t, func(cfg *Config) {
		cfg.Memory = admission.Divide(128 << 20)
		cfg.Limits.MaxStreams, cfg.Limits.MaxConnections = 101, 200 // one more than it opens on a connection
	})
	_, bytes := n.callersMemory.InUse()
	most := int(bytes / admission.PerStream)
	open := func(conn *grpc.ClientConn, token string) error {
		stream, err := weirv1.NewLimiterClient(conn).CheckStream(bearer(t, token))
		if err != nil {
			return err
		}
		if err := stream.Send(&weirv1.CheckStreamRequest{Define: []*weirv1.StreamTarget{{Policy: "login"}},
			Keys: []byte("k"), KeyLengths: []uint32{1}}); err != nil && err != io.EOF {
			return err
		}
		_, err = stream.Recv()
		return err
	}
	held, first := 0, dialed(t, n)
	for full, conn := false, first; !full; conn = dialed(t, n) {
		for range 100 {
			if err := open(conn, shop); err != nil {
				must.Equal(t, status.Code(err), codes.Unavailable, "%v", err)
				full = true
				break
			}
			held++
		}
	}
	expect.True(t, held >= most/2 && held <= most/4*3+3, "one caller has %d of %d streams", held, most)
	expect.NoError(t, open(dialed(t, n), all), "while one caller has %d of %d streams, another one gets", held, most)
	_, err := weirv1.NewLimiterClient(first).Check(bearer(t, shop),
		&weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "login", Key: "k"}}}})
	expect.NoError(t, err, "a call of the same one")
}

// TestCheckDoesNotCharge: a caller who may check and not charge brings no key beyond its limit, whatever the protocol:
// Envoy's hits, and the reports of its quotas. Who may charge does.
func TestCheckDoesNotCharge(t *testing.T) {
	n, shop, all, _ := withAccess(t, func(cfg *Config) {
		cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml",
			"policies:\n- {name: login, algorithm: token_bucket, limit: 100, window: 1h}\n")
		cfg.Envoy.Dir = envoyDir(t, "domain: edge\ndescriptors:\n- {key: user, rate_limit: {policy: login}}\n"+
			"quota_buckets:\n- {bucket: {user: \"*\"}, policy: login, key: \"user={user}\"}\n")
	})
	hits := func(ctx context.Context, key string) {
		r := envoyRequest("user", key)
		r.Descriptors[0].HitsAddend = wrapperspb.UInt64(1 << 53)
		_, err := envoyClient(t, n).ShouldRateLimit(ctx, r)
		expect.NoError(t, err)
	}
	reports := func(ctx context.Context, key string) {
		stream := must.Value(quotav3.NewRateLimitQuotaServiceClient(dialed(t, n)).StreamRateLimitQuotas(ctx))(t)
		usage := &quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{
			BucketId: &quotav3.BucketId{Bucket: map[string]string{"user": key}}, NumRequestsAllowed: 1 << 53,
		}
		must.NoError(t, stream.Send(&quotav3.RateLimitQuotaUsageReports{Domain: "edge",
			BucketQuotaUsages: []*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{usage}}))
		_, err := stream.Recv()
		must.NoError(t, err) // the report was charged before
	}
	for name, attack := range map[string]func(ctx context.Context, key string){"hits": hits, "reports": reports} {
		for token, debt := range map[string]bool{shop: false, all: true} {
			key := fmt.Sprintf("%s-%t", name, debt)
			attack(bearer(t, token), key)
			got, err := n.limiter.Check(t.Context(),
				[]limit.Check{{Target: limit.Target{Policy: "login", Key: "user=" + key}, Cost: 1}})
			must.True(t, err == nil && got[0].Err == nil, "%v %v", err, got)
			d := got[0].Decision
			expect.True(t, !d.Allowed && d.ResetAfter > time.Hour == debt, "%s: %+v, want debt %t", key, d, debt)
		}
	}
}

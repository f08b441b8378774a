package auth

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
)

const (
	shop    = "weir_shop"
	support = "weir_support"
)

func parse(t *testing.T, extra string) *Callers {
	t.Helper()
	l := must.Value(Parse("a", fmt.Appendf(nil, `
callers:
  - {name: shop, tokens: [%s], identities: ["dns:shop.test"], roles: [check], policies: [login], namespaces: [shop]}
  - {name: support, tokens: [%s], roles: [refund, read], policies: ["*"]}
%s`, Hash(shop), Hash(support), extra)))(t)
	return l
}

// watched is an Authorizer under test and what it reported.
type watched struct {
	*Authorizer
	list *Callers
	told []string
}

func watch(t *testing.T) *watched {
	w := &watched{list: parse(t, "")}
	w.Authorizer = New(Config{
		Callers: func() *Callers { return w.list },
		Denied: func(listener, reason string, _ net.Addr, what string) {
			w.told = append(w.told, listener+" "+reason+" "+what)
		},
	})
	return w
}

// request is one over HTTP with a token, if there is one.
func request(t *testing.T, path string, authorization ...string) *http.Request {
	t.Helper()
	r := must.Value(http.NewRequestWithContext(t.Context(), http.MethodPost, path, nil))(t)
	r.RemoteAddr = "192.0.2.1:1234"
	if len(authorization) > 0 {
		r.Header["Authorization"] = authorization
	}
	return r
}

// certificate is what a listener has verified.
func certificate(leaf *x509.Certificate) *tls.ConnectionState {
	return &tls.ConnectionState{PeerCertificates: []*x509.Certificate{leaf}}
}

func TestHTTP(t *testing.T) {
	w := watch(t)
	ofShop := certificate(&x509.Certificate{DNSNames: []string{"shop.test"}})
	for _, c := range []struct {
		name  string
		tls   *tls.ConnectionState
		auth  []string
		role  Role
		want  string // the reason; empty: let in
		known bool
	}{
		{"nothing", nil, nil, RoleCheck, NoCredentials, false},
		{"TLS without a certificate", &tls.ConnectionState{}, nil, RoleCheck, NoCredentials, false},
		{"the right token", nil, []string{"Bearer " + shop}, RoleCheck, "", false},
		{"in lower case", nil, []string{"bearer  " + shop}, RoleCheck, "", false},
		{"another scheme", nil, []string{"Basic " + shop}, RoleCheck, BadToken, false},
		{"no scheme", nil, []string{shop}, RoleCheck, BadToken, false},
		{"nobody's token", nil, []string{"Bearer x"}, RoleCheck, BadToken, false},
		{"the hash", nil, []string{"Bearer " + Hash(shop)}, RoleCheck, BadToken, false},
		{"empty", nil, []string{"Bearer "}, RoleCheck, BadToken, false},
		{"two of them", nil, []string{"Bearer " + shop, "Bearer " + shop}, RoleCheck, BadToken, false},
		{"another role", nil, []string{"Bearer " + shop}, RoleRead, WrongRole, true},
		{"no admin", nil, []string{"Bearer " + support}, RoleAdmin, WrongRole, true},
		{"a certificate", ofShop, nil, RoleCheck, "", false},
		{"a certificate, another role", ofShop, nil, RoleRefund, WrongRole, true},
		{"a certificate of nobody", certificate(&x509.Certificate{Subject: pkix.Name{CommonName: "shop.test"}}), nil,
			RoleCheck, UnknownIdentity, true},
		{"the token counts before the certificate", ofShop, []string{"Bearer " + support}, RoleCheck, WrongRole, true},
		{"also when it is bad", ofShop, []string{"Bearer x"}, RoleCheck, BadToken, false},
	} {
		w.told = nil
		r := request(t, "/v1/check", c.auth...)
		r.TLS = c.tls
		ctx, denial := w.HTTP(r, c.role)
		expect.True(t, (denial == nil) == (c.want == "") &&
			(denial == nil || denial.Reason == c.want && denial.Authenticated == c.known && ctx == nil),
			"%s: %+v, want %s", c.name, denial, c.want)
		if told := strings.Join(w.told, ";"); (c.want == "") != (told == "") || !strings.HasPrefix(told+" ",
			strings.TrimSpace("http "+c.want)+" ") && c.want != "" || strings.Contains(told, "weir_") {
			t.Errorf("%s: told %q", c.name, told)
		}
	}
	_, denial := w.HTTP(request(t, "/metrics"), RoleRead)
	expect.True(t, denial != nil, "the metrics are open")
	w.list = parse(t, "metrics: open")
	_, denial = w.HTTP(request(t, "/metrics"), RoleRead)
	expect.Equal(t, denial, nil, "open metrics")
	_, denial = w.HTTP(request(t, "/v1/status"), RoleRead)
	expect.True(t, denial != nil, "more than the metrics is open")
}

// TestWithoutList: everybody may do everything; administering takes a certificate or this host.
func TestWithoutList(t *testing.T) {
	denied := func(string, string, net.Addr, string) {}
	open, mutual := New(Config{Denied: denied}), New(Config{Denied: denied, NeedCertificate: true})
	certified := certificate(&x509.Certificate{})
	for _, c := range []struct {
		name string
		auth *Authorizer
		from string
		tls  *tls.ConnectionState
		role Role
		want string
	}{
		{"open", open, "192.0.2.1:1", nil, RoleRefund, ""},
		{"open, admin from afar", open, "192.0.2.1:1", nil, RoleAdmin, WrongPlace},
		{"open, admin from nowhere", open, "", nil, RoleAdmin, WrongPlace},
		{"open, admin from here", open, "127.0.0.1:1", nil, RoleAdmin, ""},
		{"open, admin from here by IPv6", open, "[::1]:1", nil, RoleAdmin, ""},
		{"mutual, without", mutual, "127.0.0.1:1", nil, RoleCheck, NoCredentials},
		{"mutual, TLS without", mutual, "127.0.0.1:1", &tls.ConnectionState{}, RoleCheck, NoCredentials},
		{"mutual, with", mutual, "192.0.2.1:1", certified, RoleCheck, ""},
		{"mutual, admin", mutual, "192.0.2.1:1", certified, RoleAdmin, ""},
	} {
		r := request(t, "/v1/check")
		r.RemoteAddr, r.TLS = c.from, c.tls
		_, denial := c.auth.HTTP(r, c.role)
		expect.True(t, (denial == nil) == (c.want == "") && (denial == nil || denial.Reason == c.want),
			"%s: %v, want %s", c.name, denial, c.want)
	}
	svc := limiter.BatchService(&scripted.Service{})
	expect.Equal(t, open.Service("http", svc), svc, "without an access file a service is wrapped")
}

// last is the last call that reached a service, with the policies or namespaces and keys of its checks.
func last(s *scripted.Service) (c scripted.Call, checks string) {
	calls := s.Calls()
	if len(calls) == 0 {
		return c, ""
	}
	c = calls[len(calls)-1]
	for _, k := range c.Checks {
		checks += k.Policy + k.Namespace + "/" + k.Key + " "
	}
	return c, checks
}

// come lets somebody in, in a role, and returns the context.
func (w *watched) come(t *testing.T, token string, role Role) context.Context {
	t.Helper()
	ctx, denial := w.HTTP(request(t, "/v1/check", "Bearer "+token), role)
	must.Equal(t, denial, nil)
	return ctx
}

func isDenied(err error, field string) bool {
	var e *limit.Error
	return errors.As(err, &e) && e.Kind == limit.Denied && e.Field == field
}

func TestBatch(t *testing.T) {
	w := watch(t)
	next := &scripted.Service{}
	svc := w.Service("http", next)
	ctx := w.come(t, shop, RoleCheck)
	of := func(policy, key string) limit.Check {
		return limit.Check{Target: limit.Target{Policy: policy, Key: key}, Cost: 1}
	}
	sent := func(namespace, key string) limit.Check {
		return limit.Check{Target: limit.Target{Limit: &algo.Limit{}, Namespace: namespace, Key: key}, Cost: 1}
	}
	results, err := svc.Check(ctx,
		[]limit.Check{of("payout", "a"), of("login", "b"), sent("shop", "c"), sent("", "d"), of("login", "e")})
	_, asked := last(next)
	must.True(t, err == nil && asked == "login/b shop/c login/e ", "%v %v", asked, err)
	for i, field := range []string{"policy", "", "", "namespace", ""} {
		expect.True(t, field == "" == (results[i].Err == nil) && (field == "" || isDenied(results[i].Err, field)),
			"check %d: %v", i, results[i].Err)
	}
	expect.True(t, len(w.told) == 2 && strings.Contains(w.told[0],
		"http wrong_policy shop may not use the policy \"payout\""), "told %q", w.told)
	results, err = svc.Check(ctx, []limit.Check{of("payout", "a")})
	_, asked = last(next)
	expect.True(t, err == nil && isDenied(results[0].Err, "policy") && asked == "", "%v, %v, asked %v", results, err,
		asked)
	_, err = svc.CheckAll(ctx, []limit.Check{of("login", "a"), of("payout", "b")})
	expect.True(t, isDenied(err, "checks[1].policy") && len(next.Calls()) == 2, "%v, asked %v", err, next.Calls())
	// What is neither here nor there is for the service to refuse.
	_, err = svc.Check(ctx, []limit.Check{of("", "a")})
	_, asked = last(next)
	expect.True(t, err == nil && asked == "/a ", "%v, asked %v", err, asked)
}

// second is the error of a call.
func second[A any](_ A, err error) error { return err }

// TestOperations: every method of the service wants its role and the policy; and who came in as one thing may not do
// another.
func TestOperations(t *testing.T) {
	w := watch(t)
	next := &scripted.Service{}
	svc := w.Service("grpc", next)
	operations := map[string]struct {
		role Role
		do   func(context.Context, limit.Target) error
	}{
		"check": {RoleCheck, func(ctx context.Context, to limit.Target) error {
			results, err := svc.Check(ctx, []limit.Check{{Target: to}})
			if err != nil {
				return err
			}
			return results[0].Err
		}},
		"all": {RoleCheck, func(ctx context.Context, to limit.Target) error {
			return second(svc.CheckAll(ctx, []limit.Check{{Target: to}}))
		}},
		"acquire": {RoleCheck, func(ctx context.Context, to limit.Target) error {
			return second(svc.Acquire(ctx, limit.Acquire{Target: to}))
		}},
		"renew":   {RoleCheck, func(ctx context.Context, to limit.Target) error { return second(svc.Renew(ctx, to, "", 0)) }},
		"release": {RoleCheck, func(ctx context.Context, to limit.Target) error { return second(svc.Release(ctx, to, "")) }},
		"reserve": {RoleCheck, func(ctx context.Context, to limit.Target) error {
			return second(svc.Reserve(ctx, limit.Reserve{Target: to}))
		}},
		"reserve all": {RoleCheck, func(ctx context.Context, to limit.Target) error {
			return second(svc.ReserveAll(ctx, []limit.Reserve{{Target: to}}))
		}},
		"extend": {RoleCheck, func(ctx context.Context, to limit.Target) error {
			return second(svc.Extend(ctx, limit.Extend{Target: to}))
		}},
		"commit": {RoleCheck, func(ctx context.Context, to limit.Target) error {
			return second(svc.Commit(ctx, limit.Commit{Target: to}))
		}},
		"extend each": {RoleCheck, func(ctx context.Context, to limit.Target) error {
			return second(svc.ExtendEach(ctx, []limit.Extend{{Target: to}}))
		}},
		"commit each": {RoleCheck, func(ctx context.Context, to limit.Target) error {
			return second(svc.CommitEach(ctx, []limit.Commit{{Target: to}}))
		}},
		"charge": {RoleCharge, func(ctx context.Context, to limit.Target) error {
			return second(svc.Charge(ctx, limit.Charge{Target: to}))
		}},
		"charge all": {RoleCharge, func(ctx context.Context, to limit.Target) error {
			return second(svc.CheckAll(ctx, []limit.Check{{Target: to, Cost: 1, Always: true}}))
		}},
		"cancel": {RoleCheck, func(ctx context.Context, to limit.Target) error { return second(svc.Cancel(ctx, to, "")) }},
		"refund": {RoleRefund, func(ctx context.Context, to limit.Target) error { return second(svc.Refund(ctx, to, 1, "")) }},
		"reset":  {RoleRefund, func(ctx context.Context, to limit.Target) error { return svc.Reset(ctx, to) }},
	}
	w.list = parse(t, fmt.Sprintf(
		"  - {name: meter, tokens: [%s], roles: [charge], policies: [login], namespaces: [shop]}\n",
		Hash("weir_meter")))
	checker, supporter, meter := w.come(t, shop, RoleCheck), w.come(t, support, RoleRefund),
		w.come(t, "weir_meter", RoleCharge)
	for name, op := range operations {
		mine, other := checker, supporter
		switch op.role {
		case RoleRefund:
			mine, other = supporter, checker
		case RoleCharge:
			mine, other = meter, checker
		}
		expect.NoError(t, op.do(mine, limit.Target{Policy: "login", Key: "a"}), "%s", name)
		before := len(next.Calls())
		err := op.do(other, limit.Target{Policy: "login", Key: "a"})
		expect.True(t, isDenied(err, ""), "%s in another role: %v", name, err)
		if op.role != RoleRefund {
			of := ""
			if list := map[string]string{"reserve all": "reserves", "extend each": "extends",
				"commit each": "commits"}[name]; list != "" {
				of = list + "[0]."
			}
			err := op.do(mine, limit.Target{Policy: "payout", Key: "a"})
			expect.True(t, isDenied(err, of+"policy"), "%s of another's policy: %v", name, err)
			err = op.do(mine, limit.Target{Limit: &algo.Limit{}, Key: "a"})
			expect.True(t, isDenied(err, of+"namespace"), "%s in another's namespace: %v", name, err)
		}
		err = op.do(t.Context(), limit.Target{Policy: "login", Key: "a"})
		expect.True(t, isDenied(err, ""), "%s by nobody: %v", name, err)
		isAsked := func(c scripted.Call) bool { return c.Method != "Check" || len(c.Checks) > 0 }
		expect.True(t, !slices.ContainsFunc(next.Calls()[before:], isAsked), "%s: the service was asked", name)
	}
}

// TestRevoked: what a stream has begun with ends to count when the file changes.
func TestRevoked(t *testing.T) {
	w := watch(t)
	next := &scripted.Service{}
	svc := w.Service("grpc", next)
	ctx := w.come(t, shop, RoleCheck)
	login := []limit.Check{{Target: limit.Target{Policy: "login", Key: "a"}}}
	_, err := svc.Check(ctx, login)
	must.NoError(t, err)
	before := w.list
	empty, err := Parse("a", nil)
	must.NoError(t, err)
	w.list = empty
	_, err = svc.Check(ctx, login)
	expect.True(t, isDenied(err, "") && len(next.Calls()) == 1, "%v, asked %v", err, next.Calls())
	w.list = before
	expect.NoError(t, expect.Err(svc.Check(ctx, login)))
}

// TestExpiredToken: a token ends to count while it is used, with the next call or check, and the next message of a
// stream.
func TestExpiredToken(t *testing.T) {
	w := watch(t)
	day := time.Date(2027, 1, 31, 0, 0, 0, 0, time.UTC)
	now := day.Add(-1)
	w.Authorizer = New(Config{
		Callers: func() *Callers { return w.list }, Now: func() time.Time { return now },
		Denied: func(listener, reason string, _ net.Addr, what string) {
			w.told = append(w.told, listener+" "+reason+" "+what)
		},
	})
	w.list = parse(t, fmt.Sprintf(
		"  - {name: brief, tokens: [{hash: %s, expires: 2027-01-31}], roles: [check, read], policies: [login]}\n",
		Hash("weir_brief")))
	next := &scripted.Service{}
	svc := w.Service("grpc", next)
	ctx := w.come(t, "weir_brief", RoleCheck)
	login := []limit.Check{{Target: limit.Target{Policy: "login", Key: "a"}}}
	_, err := svc.Check(ctx, login)
	must.NoError(t, err)
	stream := &news{ctx: metadata.NewIncomingContext(t.Context(), metadata.Pairs("authorization", "Bearer weir_brief"))}
	err = w.Stream(nil, stream,
		&grpc.StreamServerInfo{FullMethod: "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
			IsServerStream: true}, func(_ any, s grpc.ServerStream) error {
			expect.NoError(t, s.SendMsg("first"))
			now = day
			return s.SendMsg("second")
		})
	expect.True(t, status.Code(err) == codes.Unauthenticated && len(stream.sent) == 1, "%v after %v", err, stream.sent)
	_, err = svc.Check(ctx, login)
	expect.True(t, isDenied(err, "") && len(next.Calls()) == 1, "%v, asked %v", err, next.Calls())
	_, denial := w.HTTP(request(t, "/v1/check", "Bearer weir_brief"), RoleCheck)
	expect.True(t, denial != nil && denial.Reason == ExpiredToken && !denial.Authenticated, "%+v", denial)
	expect.True(t, len(w.told) == 3 && strings.Contains(w.told[0], ExpiredToken), "%q", w.told)
}

// TestRolesPerPolicy: one token checks all and refunds one.
func TestRolesPerPolicy(t *testing.T) {
	w := watch(t)
	w.list = parse(t, fmt.Sprintf(
		"  - {name: both, tokens: [%s], roles: [check], policies: [\"*\"], grants: [{roles: [refund], policies: [login]}]}\n", Hash("weir_both")))
	svc := w.Service("http", &scripted.Service{})
	ctx := w.come(t, "weir_both", RoleRefund)
	expect.NoError(t, expect.Err(svc.Refund(ctx, limit.Target{Policy: "login", Key: "a"}, 1, "")))
	for what, err := range map[string]error{
		"refund": func() error { _, err := svc.Refund(ctx, limit.Target{Policy: "payout", Key: "a"}, 1, ""); return err }(),
		"reset":  svc.Reset(ctx, limit.Target{Policy: "payout", Key: "a"}),
	} {
		expect.True(t, isDenied(err, "policy"), "%s: %v", what, err)
	}
	_, err := svc.Check(ctx, []limit.Check{{Target: limit.Target{Policy: "payout", Key: "a"}, Cost: 1}})
	expect.NoError(t, err)
}

// TestRevokedOnAStreamOfNews takes a caller out of the file while a stream is open on which only the node speaks.
func TestRevokedOnAStreamOfNews(t *testing.T) {
	w := watch(t)
	w.list = parse(t, fmt.Sprintf("  - {name: router, tokens: [%s], roles: [read]}\n", Hash("weir_router")))
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("authorization", "Bearer weir_router"))
	stream := &news{ctx: ctx}
	info := &grpc.StreamServerInfo{FullMethod: "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
		IsServerStream: true}
	err := w.Stream(nil, stream, info, func(_ any, s grpc.ServerStream) error {
		expect.NoError(t, s.SendMsg("first"))
		w.list = parse(t, "")
		return s.SendMsg("second")
	})
	expect.True(t, status.Code(err) == codes.Unauthenticated && len(stream.sent) == 1, "%v after %v", err, stream.sent)
	expect.True(t, len(w.told) == 1 && strings.Contains(w.told[0], BadToken), "%q", w.told)
}

// news is a stream that keeps what is sent on it.
type news struct {
	grpc.ServerStream
	ctx  context.Context
	sent []any
}

func (n *news) Context() context.Context { return n.ctx }

func (n *news) SendMsg(m any) error {
	n.sent = append(n.sent, m)
	return nil
}

// TestBatchInSteps: checks of a batch that their caller may not ask are answered by errors and not decided; who is not
// known may ask nothing.
func TestBatchInSteps(t *testing.T) {
	w := watch(t)
	set := must.Value(policy.Parse("t",
		[]byte(`policies: [{name: login, algorithm: fixed_window, limit: 3, window: 1h}, {name: payout, algorithm: fixed_window, limit: 3, window: 1h}]`)))(t)
	next := limiter.New(limiter.Config{Policies: set})
	t.Cleanup(next.Close)
	svc := w.Service("grpc", next)
	var b limiter.Batch
	of := func(policy string) limit.Check {
		return limit.Check{Target: limit.Target{Policy: policy, Key: "k"}, Cost: 1}
	}
	ctx := w.come(t, shop, RoleCheck)
	for range 2 { // a batch is used again
		b.Reset()
		b.Checks = append(b.Checks, of("login"), of("payout"), of("login"))
		open, err := svc.Begin(ctx, &b)
		must.True(t, err == nil && len(open) == 0, "%v, %v", open, err)
		expect.True(t, b.Results[0].Err == nil && b.Results[2].Err == nil && isDenied(b.Results[1].Err, "policy"),
			"%+v", b.Results)
	}
	expect.True(t, b.Results[2].Remaining == 0 && !b.Results[2].Allowed, "%+v", b.Results[2])
	b.Reset()
	b.Checks = append(b.Checks, of("payout"))
	got, err := next.Check(t.Context(), b.Checks)
	expect.True(t, err == nil && got[0].Remaining == 2, "what was denied was charged: %+v, %v", got, err)
	if _, err := svc.Begin(t.Context(), &b); err == nil || err.Kind != limit.Denied {
		t.Errorf("%v", err)
	}
}

// TestCheckToAllocatesNothing: to look at who asks what costs a call that is in order no memory.
func TestCheckToAllocatesNothing(t *testing.T) {
	w := watch(t)
	svc := w.Service("grpc", &quiet{})
	ctx := w.come(t, shop, RoleCheck)
	checks := []limit.Check{{Target: limit.Target{Policy: "login", Key: "k"}, Cost: 1}}
	results := make([]limit.Result, 1)
	expect.Equal(t, testing.AllocsPerRun(100, func() {
		err := svc.CheckTo(ctx, checks, nil, results)
		must.NoError(t, err)
	}), 0, "allocations")
	// What a service in front has refused stays so.
	own := &limit.Error{Kind: limit.TooLarge}
	checks = append(checks, checks[0], limit.Check{Target: limit.Target{Policy: "payout", Key: "k"}, Cost: 1})
	results = make([]limit.Result, 3)
	next := &scripted.Service{}
	err := w.Service("grpc", next).CheckTo(ctx, checks, limit.Denials{1: own}, results)
	_, asked := last(next)
	must.True(t, err == nil && asked == "login/k ", "%v, asked %q", err, asked)
	expect.True(t, results[0].Err == nil && results[1].Err == own && isDenied(results[2].Err, "policy"), "%+v", results)
}

// quiet is a service that answers nothing.
type quiet struct{ limiter.BatchService }

func (quiet) CheckTo(context.Context, []limit.Check, limit.Denials, []limit.Result) error {
	return nil
}

// TestRefundsByChecks: a check that gives units back needs the role refund, for its policy, and is on record as a
// refund.
func TestRefundsByChecks(t *testing.T) {
	const both = "weir_both"
	w := watch(t)
	w.list = parse(t, fmt.Sprintf(
		"  - {name: both, tokens: [%s], roles: [check], policies: [login, payout], grants: [{roles: [refund], policies: [login]}]}\n", Hash(both)))
	var events []string
	w.cfg.Audit = func(e Event) {
		events = append(events, fmt.Sprint(e.Action, " ", e.Caller, " ", e.Target.Policy, " ", e.Units, " ", e.Result,
			" ", e.Err != nil))
	}
	set := must.Value(policy.Parse("t",
		[]byte(`policies: [{name: login, algorithm: fixed_window, limit: 9, window: 1h}, {name: payout, algorithm: fixed_window, limit: 9, window: 1h}]`)))(t)
	next := limiter.New(limiter.Config{Policies: set})
	t.Cleanup(next.Close)
	svc := w.Service("grpc", next)
	checks := func() []limit.Check {
		return []limit.Check{
			{Target: limit.Target{Policy: "login", Key: "k"}, Cost: 5, Always: true},
			{Target: limit.Target{Policy: "login", Key: "k"}, Cost: -2, Always: true},
			{Target: limit.Target{Policy: "payout", Key: "k"}, Cost: -2, Always: true},
		}
	}
	inSteps := func(ctx context.Context) []limit.Result {
		b := &limiter.Batch{Checks: checks()}
		open, err := svc.Begin(ctx, b)
		must.Equal(t, err, nil)
		svc.Finish(ctx, b, open)
		return b.Results
	}
	atOnce := func(ctx context.Context) []limit.Result {
		results := make([]limit.Result, 3)
		must.NoError(t, svc.CheckTo(ctx, checks(), nil, results))
		return results
	}
	for name, ask := range map[string]func(context.Context) []limit.Result{"in steps": inSteps, "at once": atOnce} {
		events = nil
		ctx := w.come(t, shop, RoleCheck)
		if got := ask(ctx); got[0].Err != nil || !isDenied(got[1].Err, "") || !isDenied(got[2].Err, "policy") {
			t.Errorf("%s: %+v", name, got)
		}
		events = nil
		got := ask(w.come(t, both, RoleCheck))
		expect.True(t, got[0].Err == nil && got[1].Err == nil && got[1].Granted == -2 && isDenied(got[2].Err, "policy"),
			"%s: %+v", name, got)
		want := []string{"denied both payout 0 0 false", "refund both login 2 2 false"}
		expect.Equal(t, strings.Join(events, "\n"), strings.Join(want, "\n"),
			"%s: on record is %q, want %q", name, events, want)
		must.NoError(t, next.Reset(t.Context(), limit.Target{Policy: "login", Key: "k"}))
	}
}

// TestCommitsAreBounded: who may charge a key may commit any excess to it, and have checks that charge always. Others
// are bounded: also those who may charge others only.
func TestCommitsAreBounded(t *testing.T) {
	w := watch(t)
	line := "  - {name: %s, tokens: [%s], roles: [check], policies: [login], namespaces: [shop], grants: [{roles: [charge], policies: [%s], namespaces: [%s]}]}\n"
	w.list = parse(t, fmt.Sprintf(
		"  - {name: check, tokens: [%s], roles: [check], policies: [login], namespaces: [shop]}\n", Hash("weir_check"))+
		fmt.Sprintf(line, "both", Hash("weir_both"), "login", "shop")+fmt.Sprintf(line, "apart", Hash("weir_apart"),
		"payout", "other"))
	next := &scripted.Service{}
	svc := w.Service("grpc", next)
	for token, bounded := range map[string]bool{"weir_check": true, "weir_both": false, "weir_apart": true} {
		ctx := w.come(t, token, RoleCheck)
		for _, to := range []limit.Target{{Policy: "login", Key: "a"},
			{Limit: &algo.Limit{}, Namespace: "shop", Key: "a"}} {
			// What the caller says of it is of no account.
			for _, says := range []bool{false, true} {
				_, err := svc.CommitEach(ctx, []limit.Commit{{Target: to, Bounded: says}})
				c, _ := last(next)
				expect.True(t, err == nil && c.Commits[0].Bounded == bounded, "%s, %+v: several, %v", token, to, err)
				_, err = svc.Commit(ctx, limit.Commit{Target: to, Bounded: says})
				c, _ = last(next)
				expect.True(t, err == nil && c.Commit.Bounded == bounded, "%s, %+v: one, %v", token, to, err)
				_, err = svc.Check(ctx, []limit.Check{{Target: to, Cost: 1, Always: true, Bounded: says}})
				c, _ = last(next)
				expect.True(t, err == nil && c.Checks[0].Bounded == bounded, "%s, %+v: a check that charges always, %v",
					token, to, err)
			}
		}
	}
}

// later is a Lender whose answers are there when they have been waited for.
type later struct{ limit.Lender }

func (later) Lend(_ context.Context, _ []limit.Borrow, out []limit.Lent) (wait func(), err error) {
	return func() {
		for i := range out {
			out[i].Granted = 7
		}
	}, nil
}

// TestLenderThatWaits: answers to loans that wait for copies are given to those who may borrow.
func TestLenderThatWaits(t *testing.T) {
	w := watch(t)
	in := []limit.Borrow{{Target: limit.Target{Policy: "login", Key: "k"}},
		{Target: limit.Target{Policy: "payout", Key: "k"}}}
	out := make([]limit.Lent, len(in))
	wait := must.Value(w.Lender("grpc", later{}).Lend(w.come(t, shop, RoleCheck), in, out))(t)
	wait()
	expect.True(t, out[0].Granted == 7 && out[1].Ended && out[1].Granted == 0, "%+v", out)
}

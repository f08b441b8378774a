package grpclimit

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/client/local"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

func open(t *testing.T) *client.Client {
	t.Helper()
	set := must.Value(policy.Parse("test.yaml",
		[]byte("policies: [{name: api, algorithm: sliding_log, limit: 2, window: 1m}]")))(t)
	c := local.New(set)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// dial serves health checks under cfg and returns a client of them.
func dial(t *testing.T, cfg Config, opts ...grpc.DialOption) healthv1.HealthClient {
	t.Helper()
	limits := New(cfg)
	register := func(r grpc.ServiceRegistrar) { healthv1.RegisterHealthServer(r, health.NewServer()) }
	addr := testkit.Serve(t, register, grpc.UnaryInterceptor(limits.Unary), grpc.StreamInterceptor(limits.Stream))
	return healthv1.NewHealthClient(testkit.Dial(t, addr, opts...))
}

func check(ctx context.Context, h healthv1.HealthClient) error {
	_, err := h.Check(ctx, &healthv1.HealthCheckRequest{})
	return err
}

func watch(ctx context.Context, h healthv1.HealthClient) error {
	s, err := h.Watch(ctx, &healthv1.HealthCheckRequest{})
	if err == nil {
		_, err = s.Recv()
	}
	return err
}

// retryIn is what a status' RetryInfo says; 0: it has none.
func retryIn(err error) time.Duration {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.RetryInfo); ok {
			return info.RetryDelay.AsDuration()
		}
	}
	return 0
}

func TestServer(t *testing.T) {
	h := dial(t, Config{Limiter: open(t).Policy("api"), Key: Metadata("x-api-key")})
	as := func(key string) context.Context {
		return metadata.AppendToOutgoingContext(t.Context(), "x-api-key", key)
	}
	expect.NoError(t, check(as("a"), h))
	expect.NoError(t, watch(as("a"), h))
	for name, call := range map[string]func(context.Context, healthv1.HealthClient) error{"unary": check,
		"stream": watch} {
		err := call(as("a"), h)
		if in := retryIn(err); status.Code(err) != codes.ResourceExhausted || in <= 0 || in > time.Minute {
			t.Errorf("%s: %v, again in %v", name, err, in)
		}
		err = call(t.Context(), h)
		expect.Equal(t, status.Code(err), codes.InvalidArgument, "%s without a key: %v", name, err)
	}
	expect.NoError(t, check(as("b"), h))
}

// TestTrailers: calls tell what the limit has decided and what is left, those that are admitted too.
func TestTrailers(t *testing.T) {
	h := dial(t, Config{Limiter: open(t).Policy("api"), Key: Metadata("x-api-key"), Skip: func(c Call) bool {
		md, _ := metadata.FromIncomingContext(c.Ctx)
		return len(md.Get("skip")) > 0
	}})
	for i, want := range []map[string]string{
		{"weir-result": "admitted", "ratelimit": `"api";r=1;t=60`, "x-ratelimit-remaining": "1"},
		{"weir-result": "admitted", "ratelimit": `"api";r=0;t=60`, "ratelimit-policy": `"api";q=2;w=60`},
		{"weir-result": "refused", "x-ratelimit-limit": "2"},
		{"weir-result": "bad_key", "ratelimit": ""},
		{"weir-result": "", "ratelimit": ""},
	} {
		key, skip := strings.Repeat("k", 3000), ""
		switch i {
		case 3:
			key = ""
		case 4:
			skip = "skip"
		}
		ctx := metadata.AppendToOutgoingContext(t.Context(), "x-api-key", key)
		if skip != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "skip", skip)
		}
		var md metadata.MD
		_, err := h.Check(ctx, &healthv1.HealthCheckRequest{}, grpc.Trailer(&md))
		expect.Equal(t, (err == nil), i < 2 || i == 4, "call %d: %v", i, err)
		for name, value := range want {
			expect.Equal(t, strings.Join(md.Get(name), "|"), value, "call %d: %s", i, name)
		}
	}
}

// TestAll: a call that one of several limits refuses takes nothing of the others, and what was served without a
// decision is counted.
func TestAll(t *testing.T) {
	c := open(t)
	i := New(Config{All: c, Checks: func(Call) []client.Check {
		return []client.Check{{Policy: "api", Key: "user"}, {Policy: "api", Key: "team", Cost: 2}}
	}})
	call := func() error {
		_, err := i.Unary(t.Context(), nil, &grpc.UnaryServerInfo{},
			func(context.Context, any) (any, error) { return nil, nil })
		return err
	}
	expect.NoError(t, call())
	err := call()
	expect.Equal(t, status.Code(err), codes.ResourceExhausted, "%v", err)
	d, err := c.Policy("api").Peek(t.Context(), "user")
	expect.True(t, err == nil && d.Remaining == 1, "%d left, %v", d.Remaining, err)
	must.NoError(t, c.Close())
	expect.NoError(t, call())
	want := (client.Counts{Admitted: 1, Refused: 1, Errors: 1})
	expect.True(t, i.Counts() == want, "%+v", i.Counts())
}

func TestPeers(t *testing.T) {
	cost := int64(2)
	h := dial(t, Config{Limiter: open(t).Policy("api"), Cost: func(c Call) int64 {
		expect.True(t, strings.HasPrefix(c.Method, "/grpc.health.v1.Health/"), "method %q", c.Method)
		return cost
	}})
	expect.NoError(t, check(t.Context(), h))
	err := check(t.Context(), h)
	expect.True(t, status.Code(err) == codes.ResourceExhausted && retryIn(err) != 0, "%v", err)
	cost = 3
	err = check(t.Context(), h)
	expect.True(t, status.Code(err) == codes.ResourceExhausted && retryIn(err) == 0, "a cost above the limit: %v", err)
}

func TestOnError(t *testing.T) {
	var log testkit.Buffer
	unknown := open(t).Policy("unknown")
	err := check(t.Context(), dial(t, Config{Limiter: unknown, Logger: log.Logger()}))
	expect.True(t, err == nil && strings.Contains(log.String(), "policy"), "%v; the log says %q", err, log.String())
	err = check(t.Context(), dial(t, Config{Limiter: unknown, OnError: client.FailClosed, Logger: log.Logger()}))
	expect.True(t, status.Code(err) == codes.Unavailable && retryIn(err) == time.Second, "%v", err)
	err = check(t.Context(), dial(t, Config{Limiter: answer{FailedClosed: true}}))
	expect.Equal(t, status.Code(err), codes.Unavailable, "%v", err)
	slow := dial(t, Config{Limiter: answer{Allowed: true, Delay: time.Hour}})
	ctx := testkit.Within(t, 50*time.Millisecond)
	err = check(ctx, slow)
	expect.Equal(t, status.Code(err), codes.DeadlineExceeded, "%v", err)
}

type answer client.Decision

func (a answer) AllowN(context.Context, string, int64) (client.Decision, error) {
	return client.Decision(a), nil
}

func TestClient(t *testing.T) {
	l := open(t).Policy("api")
	h := dial(t, Config{Limiter: answer{Allowed: true}}, grpc.WithUnaryInterceptor(UnaryClient(l, nil)),
		grpc.WithStreamInterceptor(StreamClient(l, Method)))
	ctx := testkit.Within(t, 10*time.Second)
	for range 2 {
		expect.NoError(t, check(ctx, h))
	}
	expect.ErrorContains(t, check(ctx, h), "deadline", "past the limit")
	expect.NoError(t, watch(ctx, h), "another method")
}

func TestNoLimiter(t *testing.T) {
	defer func() { expect.True(t, recover() != nil, "an interceptor without a Limiter") }()
	New(Config{})
}

package grpclimit

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/client/local"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/testkit"
)

func open(t *testing.T) *client.Client {
	t.Helper()
	set, err := policy.Parse("test.yaml", []byte("policies: [{name: api, algorithm: sliding_log, limit: 2, window: 1m}]"))
	if err != nil {
		t.Fatal(err)
	}
	c := local.New(set)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// dial serves health checks under cfg and returns a client of them.
func dial(t *testing.T, cfg Config, opts ...grpc.DialOption) healthv1.HealthClient {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.UnaryInterceptor(UnaryServer(cfg)), grpc.StreamInterceptor(StreamServer(cfg)))
	healthv1.RegisterHealthServer(server, health.NewServer())
	done := make(chan error, 1)
	go func() { done <- server.Serve(lis) }()
	t.Cleanup(func() {
		server.Stop()
		<-done
	})
	conn, err := grpc.NewClient(lis.Addr().String(), append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return healthv1.NewHealthClient(conn)
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
	if err := check(as("a"), h); err != nil {
		t.Error(err)
	}
	if err := watch(as("a"), h); err != nil {
		t.Error(err)
	}
	for name, call := range map[string]func(context.Context, healthv1.HealthClient) error{"unary": check, "stream": watch} {
		err := call(as("a"), h)
		if in := retryIn(err); status.Code(err) != codes.ResourceExhausted || in <= 0 || in > time.Minute {
			t.Errorf("%s: %v, again in %v", name, err, in)
		}
		if err := call(t.Context(), h); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s without a key: %v", name, err)
		}
	}
	if err := check(as("b"), h); err != nil {
		t.Error(err)
	}
}

// TestTrailers: calls tell what the limit has decided and what is left, those that are admitted too.
func TestTrailers(t *testing.T) {
	h := dial(t, Config{Limiter: open(t).Policy("api"), Key: Metadata("x-api-key"), Skip: func(ctx context.Context, _ string) bool {
		md, _ := metadata.FromIncomingContext(ctx)
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
		if (err == nil) != (i < 2 || i == 4) {
			t.Errorf("call %d: %v", i, err)
		}
		for name, value := range want {
			if got := strings.Join(md.Get(name), "|"); got != value {
				t.Errorf("call %d: %s is %q, want %q", i, name, got, value)
			}
		}
	}
}

// TestAll: a call that one of several limits refuses takes nothing of the others, and what was served without a decision is counted.
func TestAll(t *testing.T) {
	c := open(t)
	i := New(Config{All: c, Checks: func(context.Context, string) []client.Check {
		return []client.Check{{Policy: "api", Key: "user"}, {Policy: "api", Key: "team", Cost: 2}}
	}})
	call := func() error {
		_, err := i.Unary(t.Context(), nil, &grpc.UnaryServerInfo{}, func(context.Context, any) (any, error) { return nil, nil })
		return err
	}
	if err := call(); err != nil {
		t.Error(err)
	}
	if err := call(); status.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
	if d, err := c.Policy("api").Peek(t.Context(), "user"); err != nil || d.Remaining != 1 {
		t.Errorf("%d left, %v", d.Remaining, err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := call(); err != nil {
		t.Error(err)
	}
	if want := (client.Counts{Admitted: 1, Refused: 1, Errors: 1}); i.Counts() != want {
		t.Errorf("%+v", i.Counts())
	}
}

func TestPeers(t *testing.T) {
	cost := int64(2)
	h := dial(t, Config{Limiter: open(t).Policy("api"), Cost: func(_ context.Context, method string) int64 {
		if !strings.HasPrefix(method, "/grpc.health.v1.Health/") {
			t.Errorf("method %q", method)
		}
		return cost
	}})
	if err := check(t.Context(), h); err != nil {
		t.Error(err)
	}
	if err := check(t.Context(), h); status.Code(err) != codes.ResourceExhausted || retryIn(err) == 0 {
		t.Error(err)
	}
	cost = 3
	if err := check(t.Context(), h); status.Code(err) != codes.ResourceExhausted || retryIn(err) != 0 {
		t.Errorf("a cost above the limit: %v", err)
	}
}

func TestOnError(t *testing.T) {
	var log testkit.Buffer
	unknown := open(t).Policy("unknown")
	if err := check(t.Context(), dial(t, Config{Limiter: unknown, Logger: log.Logger()})); err != nil || !strings.Contains(log.String(), "policy") {
		t.Errorf("%v; the log says %q", err, log.String())
	}
	if err := check(t.Context(), dial(t, Config{Limiter: unknown, OnError: client.FailClosed, Logger: log.Logger()})); status.Code(err) != codes.Unavailable || retryIn(err) != time.Second {
		t.Error(err)
	}
	if err := check(t.Context(), dial(t, Config{Limiter: answer{FailedClosed: true}})); status.Code(err) != codes.Unavailable {
		t.Error(err)
	}
	slow := dial(t, Config{Limiter: answer{Allowed: true, Delay: time.Hour}})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := check(ctx, slow); status.Code(err) != codes.DeadlineExceeded {
		t.Error(err)
	}
}

type answer client.Decision

func (a answer) AllowN(context.Context, string, int64) (client.Decision, error) {
	return client.Decision(a), nil
}

func TestClient(t *testing.T) {
	l := open(t).Policy("api")
	h := dial(t, Config{Limiter: answer{Allowed: true}}, grpc.WithUnaryInterceptor(UnaryClient(l, nil)), grpc.WithStreamInterceptor(StreamClient(l, Method)))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for range 2 {
		if err := check(ctx, h); err != nil {
			t.Error(err)
		}
	}
	if err := check(ctx, h); err == nil || !strings.Contains(err.Error(), "deadline") {
		t.Errorf("past the limit: %v", err)
	}
	if err := watch(ctx, h); err != nil {
		t.Errorf("another method: %v", err)
	}
}

func TestNoLimiter(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("an interceptor without a Limiter")
		}
	}()
	UnaryServer(Config{})
}

package grpc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
	"github.com/weirlimit/weir/test/testkit"
)

func serveLimiter(t *testing.T, svc limiter.BatchService, opts ...grpc.ServerOption) (*grpc.ClientConn, weirv1.LimiterClient) {
	t.Helper()
	noLeaks(t)
	conn := connect(t, ServerConfig{Service: svc}, opts...)
	return conn, weirv1.NewLimiterClient(conn)
}

func localLimiter(t *testing.T) *limiter.Limiter {
	t.Helper()
	set := must.Value(policy.Parse("test.yaml", []byte(`policies:
  - {name: p, algorithm: sliding_log, limit: 10, window: 1m}
  - {name: c, algorithm: concurrency, limit: 10, ttl: 1m}`)))(t)
	l := limiter.New(limiter.Config{Policies: set})
	t.Cleanup(l.Close)
	return l
}

func wantStatus(t *testing.T, err error, code codes.Code, prefix string) {
	t.Helper()
	if s := status.Convert(err); s.Code() != code || !strings.HasPrefix(s.Message(), prefix) {
		t.Errorf("%v: %q, want %v: %q…", s.Code(), s.Message(), code, prefix)
	}
}

func TestEveryErrorHasItsCode(t *testing.T) {
	for _, test := range []struct {
		err  error
		code codes.Code
		text string
	}{
		{limit.NewError(limit.Invalid, "f", "m"), codes.InvalidArgument, "f: m"},
		{limit.NewError(limit.NotFound, "f", "m"), codes.NotFound, "f: m"},
		{limit.NewError(limit.TooLarge, "f", "m"), codes.ResourceExhausted, "f: m"},
		{&limit.Error{Kind: limit.Unavailable, Message: "m"}, codes.Unavailable, "m"},
		{fmt.Errorf("wrapped: %w", limit.NewError(limit.NotFound, "f", "m")), codes.NotFound, "f: m"},
		{context.DeadlineExceeded, codes.DeadlineExceeded, ""},
		{errors.New("odd"), codes.Unknown, "odd"},
	} {
		t.Run(test.text, func(t *testing.T) {
			_, c := serveLimiter(t, &scripted.Service{Err: test.err})
			ctx, to := t.Context(), &weirv1.Target{Policy: "p", Key: "k"}
			_, err := c.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: to}}})
			wantStatus(t, err, test.code, test.text)
			_, err = c.Reset(ctx, &weirv1.ResetRequest{Target: to})
			wantStatus(t, err, test.code, test.text)
		})
	}
}

func TestBatchErrors(t *testing.T) {
	notFound := limit.NewError(limit.NotFound, "policy", "unknown")
	two := &weirv1.CheckRequest{Checks: []*weirv1.Check{{}, {}}}
	t.Run("all", func(t *testing.T) {
		_, c := serveLimiter(t, &scripted.Service{Results: []limit.Result{{Err: notFound}, {Err: &limit.Error{Kind: limit.Invalid}}}})
		_, err := c.Check(t.Context(), two)
		wantStatus(t, err, codes.NotFound, "checks[0].target.policy: unknown")
		_, err = c.Check(t.Context(), &weirv1.CheckRequest{Checks: two.Checks[:1]})
		wantStatus(t, err, codes.NotFound, "target.policy: unknown") // no batch to speak of
	})
	t.Run("all, the first about no field", func(t *testing.T) {
		_, c := serveLimiter(t, &scripted.Service{Results: []limit.Result{{Err: &limit.Error{Kind: limit.Unavailable, Message: "nobody"}}, {Err: notFound}}})
		_, err := c.Check(t.Context(), two)
		wantStatus(t, err, codes.Unavailable, "nobody")
	})
}

// TestBadRequests: what no decoding finds wrong with a request; test/conformance has more.
func TestBadRequests(t *testing.T) {
	_, c := serveLimiter(t, localLimiter(t))
	ctx := t.Context()
	_, err := c.Check(ctx, &weirv1.CheckRequest{})
	wantStatus(t, err, codes.InvalidArgument, "checks: ")
	_, err = c.Check(ctx, &weirv1.CheckRequest{Checks: make([]*weirv1.Check, 1001)})
	wantStatus(t, err, codes.ResourceExhausted, "checks: ")
	_, err = c.Acquire(ctx, &weirv1.AcquireRequest{Target: &weirv1.Target{Policy: "c", Key: "k"}, TtlNs: -1})
	wantStatus(t, err, codes.InvalidArgument, "ttl_ns: ")
	target := &weirv1.Target{Policy: "p", Key: "k"}
	for want, reserves := range map[string][]*weirv1.ReserveRequest{
		"InvalidArgument reserves: ": {}, "ResourceExhausted reserves: ": make([]*weirv1.ReserveRequest, 1001),
		"InvalidArgument reserves[0].ttl_ns: ": {{Target: target, TtlNs: 1}}, "InvalidArgument reserves[1].target": {{Target: target}, nil},
	} {
		_, err := c.ReserveAll(t.Context(), &weirv1.ReserveAllRequest{Reserves: reserves})
		code, text, _ := strings.Cut(want, " ")
		expect.Equal(t, status.Code(err).String(), code, "%v", err)
		wantStatus(t, err, status.Code(err), text)
	}
	_, err = c.Commit(t.Context(), &weirv1.CommitRequest{Target: target, ReservationId: "1-2", Cost: new(int64), Overrun: 7})
	wantStatus(t, err, codes.InvalidArgument, "overrun: ")
}

func TestMalformedMessages(t *testing.T) {
	conn, c := serveLimiter(t, localLimiter(t))
	field := func(number protowire.Number, b []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), b)
	}
	target := append(field(1, []byte("p")), field(4, []byte("k\xff"))...)
	for _, bad := range [][]byte{
		{0xff}, {0x0a}, {0x0a, 0x7f, 1}, []byte("nonsense"), field(1, field(1, target)), field(1, []byte{0x10}),
	} {
		for _, method := range []string{"Check", "Acquire", "Renew", "Release", "Refund", "Reset"} {
			in, out := bad, []byte(nil)
			if method != "Check" && len(bad) > 0 && bad[0] == 0x0a && len(bad) > 10 {
				in = field(1, target)
			}
			err := conn.Invoke(t.Context(), "/weir.v1.Limiter/"+method, &in, &out, grpc.ForceCodec(testkit.RawCodec{}))
			wantStatus(t, err, codes.InvalidArgument, "")
		}
	}
	// Larger than the server takes.
	huge := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "p", Key: strings.Repeat("k", maxMessage)}}}}
	_, err := c.Check(t.Context(), huge)
	wantStatus(t, err, codes.ResourceExhausted, "")
	out, err := c.Check(t.Context(), &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "p", Key: "k"}, Cost: new(int64)}}})
	expect.True(t, err == nil && out.Results[0].GetDecision().GetRemaining() == 10, "%v, %v", out, err)
}

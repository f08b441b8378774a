package grpc

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// fakeService answers every call with the same error, and checks with given results.
type fakeService struct {
	results []limit.Result
	settled []limit.SettledResult
	all     limit.AllDecision
	err     error
}

func (f fakeService) Check(context.Context, []limit.Check) ([]limit.Result, error) {
	return f.results, f.err
}
func (f fakeService) Acquire(context.Context, limit.Acquire) (limit.Decision, error) {
	return limit.Decision{}, f.err
}
func (f fakeService) Renew(context.Context, limit.Target, string, time.Duration) (time.Duration, error) {
	return 0, f.err
}
func (f fakeService) Release(context.Context, limit.Target, string) (bool, error) {
	return false, f.err
}
func (f fakeService) CheckAll(context.Context, []limit.Check) (limit.AllDecision, error) {
	return f.all, f.err
}
func (f fakeService) Reserve(context.Context, limit.Reserve) (limit.Decision, error) {
	return limit.Decision{}, f.err
}
func (f fakeService) ReserveAll(context.Context, []limit.Reserve) (limit.AllDecision, error) {
	return f.all, f.err
}
func (f fakeService) Extend(context.Context, limit.Extend) (limit.Decision, error) {
	return limit.Decision{}, f.err
}
func (f fakeService) ExtendEach(_ context.Context, es []limit.Extend) ([]limit.Result, error) {
	return f.results, f.err
}
func (f fakeService) CommitEach(_ context.Context, cs []limit.Commit) ([]limit.SettledResult, error) {
	return f.settled, f.err
}
func (f fakeService) Charge(context.Context, limit.Charge) (limit.Decision, error) {
	return limit.Decision{}, f.err
}
func (f fakeService) Commit(context.Context, limit.Commit) (limit.Settled, error) {
	return limit.Settled{}, f.err
}
func (f fakeService) Cancel(context.Context, limit.Target, string) (int64, error) { return 0, f.err }
func (f fakeService) Refund(context.Context, limit.Target, int64, string) (int64, error) {
	return 0, f.err
}
func (f fakeService) Reset(context.Context, limit.Target) error { return f.err }

func (f fakeService) CheckTo(ctx context.Context, checks []limit.Check, _ limit.Denials, results []limit.Result) error {
	got, err := f.Check(ctx, checks)
	copy(results, got)
	return err
}

func (f fakeService) Begin(context.Context, *limiter.Batch) ([]int, *limit.Error) {
	return nil, &limit.Error{Kind: limit.Unavailable, Message: "not in this fake"}
}
func (f fakeService) Finish(context.Context, *limiter.Batch, []int) {}

func serveLimiter(t *testing.T, svc limiter.BatchService, opts ...grpc.ServerOption) (string, weirv1.LimiterClient) {
	t.Helper()
	noLeaks(t)
	s := NewServer(ServerConfig{
		Service: svc,
		Status:  func(context.Context) *weirv1.StatusResponse { return &weirv1.StatusResponse{Node: "me"} },
	})
	t.Cleanup(s.Close)
	addr := serve(t, s.Register, opts...)
	return addr, weirv1.NewLimiterClient(testkit.Dial(t, addr))
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
			_, c := serveLimiter(t, fakeService{err: test.err})
			ctx, to := t.Context(), &weirv1.Target{Policy: "p", Key: "k"}
			_, err := c.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: to}}})
			wantStatus(t, err, test.code, test.text)
			_, err = c.Acquire(ctx, &weirv1.AcquireRequest{Target: to})
			wantStatus(t, err, test.code, test.text)
			_, err = c.Renew(ctx, &weirv1.RenewRequest{Target: to})
			wantStatus(t, err, test.code, test.text)
			_, err = c.Release(ctx, &weirv1.ReleaseRequest{Target: to})
			wantStatus(t, err, test.code, test.text)
			_, err = c.Refund(ctx, &weirv1.RefundRequest{Target: to})
			wantStatus(t, err, test.code, test.text)
			_, err = c.Reset(ctx, &weirv1.ResetRequest{Target: to})
			wantStatus(t, err, test.code, test.text)
		})
	}
}

// TestFieldsAsSent: what is wrong with the length of a window names the field that the caller sent, in each call and element.
func TestFieldsAsSent(t *testing.T) {
	const long = "is longer than the longest that this node takes"
	l := limiter.New(limiter.Config{InlineMaxWindow: 24 * time.Hour})
	t.Cleanup(l.Close)
	_, c := serveLimiter(t, l)
	ctx := t.Context()
	short := &weirv1.Limit{Algorithm: weirv1.Algorithm_ALGORITHM_FIXED_WINDOW, Limit: 1, WindowNs: 1e9}
	for want, of := range map[string]*weirv1.Limit{
		"period":    {Algorithm: weirv1.Algorithm_ALGORITHM_FIXED_WINDOW, Limit: 1, Period: weirv1.Period_PERIOD_MONTH},
		"window_ns": {Algorithm: weirv1.Algorithm_ALGORITHM_FIXED_WINDOW, Limit: 1, Period: weirv1.Period_PERIOD_EPOCH, WindowNs: int64(48 * time.Hour)},
	} {
		fine, bad := &weirv1.Target{Limit: short, Key: "k"}, &weirv1.Target{Limit: of, Key: "k"}
		one := func(err error) { t.Helper(); wantStatus(t, err, codes.InvalidArgument, "target.limit."+want+": "+long) }
		for _, atomic := range []bool{false, true} {
			_, err := c.Check(ctx, &weirv1.CheckRequest{Atomic: atomic, Checks: []*weirv1.Check{{Target: bad}}})
			one(err)
			_, err = c.Check(ctx, &weirv1.CheckRequest{Atomic: atomic, Checks: []*weirv1.Check{{Target: fine}, {Target: bad}}})
			wantStatus(t, err, codes.InvalidArgument, "checks[1].target.limit."+want+": "+long)
		}
		_, err := c.Reset(ctx, &weirv1.ResetRequest{Target: bad})
		one(err)
		_, err = c.ReserveAll(ctx, &weirv1.ReserveAllRequest{Reserves: []*weirv1.ReserveRequest{{Target: fine}, {Target: bad}}})
		wantStatus(t, err, codes.InvalidArgument, "reserves[1].target.limit."+want+": "+long)
		in := streamed(1, "a", "b")
		in.Define = []*weirv1.StreamTarget{{Limit: short}, {Number: 1, Limit: of}}
		in.Targets = []uint32{0, 1}
		out := exchange(t, openStream(t, c), in)
		expect.True(t, len(out.Errors) == 1 && out.Errors[0].Check == 1 && out.Errors[0].Error.Field == "limit."+want,
			"%s: %v", want, out)
	}
}

// TestEachHasItsResult: of several extends and commits each has its answer or its error.
func TestEachHasItsResult(t *testing.T) {
	gone := limit.NewError(limit.NotFound, "reservation_id", "is not pending")
	_, c := serveLimiter(t, fakeService{
		results: []limit.Result{{Err: gone}, {Decision: limit.Decision{Allowed: true, Granted: 3}}},
		settled: []limit.SettledResult{{Settled: limit.Settled{Refunded: 1, Excess: 2, Over: true}}, {Err: gone}},
	})
	ctx, cost := t.Context(), int64(1)
	target := &weirv1.Target{Policy: "p", Key: "k"}
	extended, err := c.ExtendEach(ctx, &weirv1.ExtendEachRequest{Extends: []*weirv1.ExtendRequest{{Target: target}, {Target: target}}})
	expect.True(t, err == nil && extended.Results[0].GetError().GetCode() == int32(codes.NotFound) &&
		extended.Results[1].GetDecision().GetGranted() == 3, "%v, %v", extended, err)
	commit := &weirv1.CommitRequest{Target: target, Cost: &cost}
	committed, err := c.CommitEach(ctx, &weirv1.CommitEachRequest{Commits: []*weirv1.CommitRequest{commit, commit}})
	must.True(t, err == nil && committed.Results[1].GetError().GetField() == "reservation_id", "%v, %v", committed, err)
	s := committed.Results[0].GetSettled()
	expect.True(t, s.GetRefunded() == 1 && s.GetExcess() == 2 && s.GetOverLimit(), "%v", committed)
	_, err = c.CommitEach(ctx, &weirv1.CommitEachRequest{Commits: []*weirv1.CommitRequest{commit, {Target: target}}})
	wantStatus(t, err, codes.InvalidArgument, "commits[1].cost: is missing")
	_, err = c.CommitEach(ctx, &weirv1.CommitEachRequest{Commits: make([]*weirv1.CommitRequest, 1001)})
	wantStatus(t, err, codes.ResourceExhausted, "")
}

func TestBatchErrors(t *testing.T) {
	notFound := limit.NewError(limit.NotFound, "policy", "unknown")
	two := &weirv1.CheckRequest{Checks: []*weirv1.Check{{}, {}}}
	t.Run("one", func(t *testing.T) {
		_, c := serveLimiter(t, fakeService{results: []limit.Result{{Err: notFound}, {Decision: limit.Decision{Policy: "p", Allowed: true}}}})
		out, err := c.Check(t.Context(), two)
		must.True(t, err == nil && len(out.Results) == 2, "%v %v", out, err)
		if e := out.Results[0].GetError(); e.GetCode() != int32(codes.NotFound) || e.Field != "target.policy" || e.Message != "unknown" {
			t.Errorf("%v", out.Results[0])
		}
		if d := out.Results[1].GetDecision(); !d.GetAllowed() || d.RetryAfterNs == nil || *d.RetryAfterNs != 0 {
			t.Errorf("%v", out.Results[1])
		}
	})
	t.Run("all", func(t *testing.T) {
		_, c := serveLimiter(t, fakeService{results: []limit.Result{{Err: notFound}, {Err: &limit.Error{Kind: limit.Invalid}}}})
		_, err := c.Check(t.Context(), two)
		wantStatus(t, err, codes.NotFound, "checks[0].target.policy: unknown")
		_, err = c.Check(t.Context(), &weirv1.CheckRequest{Checks: two.Checks[:1]})
		wantStatus(t, err, codes.NotFound, "target.policy: unknown") // no batch to speak of
	})
	t.Run("all, the first about no field", func(t *testing.T) {
		_, c := serveLimiter(t, fakeService{results: []limit.Result{{Err: &limit.Error{Kind: limit.Unavailable, Message: "nobody"}}, {Err: notFound}}})
		_, err := c.Check(t.Context(), two)
		wantStatus(t, err, codes.Unavailable, "nobody")
	})
}

func TestCaller(t *testing.T) {
	_, c := serveLimiter(t, localLimiter(t))
	ctx := t.Context()
	to := &weirv1.Target{Policy: "p", Key: "k"}
	one := func(in *weirv1.Check) *weirv1.Decision {
		t.Helper()
		out := must.Value(c.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{in}}))(t)
		return out.Results[0].GetDecision()
	}
	// A missing cost is 1 and never a free peek; 0 peeks.
	if d := one(&weirv1.Check{Target: to}); d.Granted != 1 || d.Remaining != 9 {
		t.Errorf("%v", d)
	}
	if d := one(&weirv1.Check{Target: to, Cost: new(int64)}); d.Granted != 0 || d.Remaining != 9 {
		t.Errorf("%v", d)
	}
	if d := one(&weirv1.Check{Target: to, Cost: proto.Int64(20), Partial: true, RequestId: "r"}); d.Granted != 9 || d.RequestId != "r" {
		t.Errorf("%v", d)
	}
	if d := one(&weirv1.Check{Target: to, Cost: proto.Int64(11)}); d.Allowed || d.RetryAfterNs != nil {
		t.Errorf("never: %v", d)
	}
	if n, err := c.Refund(ctx, &weirv1.RefundRequest{Target: to}); err != nil || n.Refunded != 1 {
		t.Errorf("%v, %v", n, err)
	}
	if _, err := c.Reset(ctx, &weirv1.ResetRequest{Target: to}); err != nil {
		t.Error(err)
	}
	if d := one(&weirv1.Check{Target: to, Cost: new(int64)}); d.Remaining != 10 {
		t.Errorf("%v", d)
	}
	leases := &weirv1.Target{Policy: "c", Key: "k"}
	d, err := c.Acquire(ctx, &weirv1.AcquireRequest{Target: leases, TtlNs: int64(time.Second)})
	must.True(t, err == nil && d.Granted == 1 && d.LeaseId != "", "%v %v", d, err)
	r, err := c.Renew(ctx, &weirv1.RenewRequest{Target: leases, LeaseId: d.LeaseId})
	expect.True(t, err == nil && r.ExpiresInNs == int64(time.Minute), "%v, %v", r, err)
	for _, want := range []bool{true, false} {
		r, err := c.Release(ctx, &weirv1.ReleaseRequest{Target: leases, LeaseId: d.LeaseId})
		expect.True(t, err == nil && r.Released == want, "%v, %v", r, err)
	}
	s, err := c.Status(ctx, &weirv1.StatusRequest{})
	expect.True(t, err == nil && s.Node == "me", "%v, %v", s, err)

	inline := func(change func(*weirv1.Limit)) *weirv1.Target {
		l := &weirv1.Limit{Algorithm: weirv1.Algorithm_ALGORITHM_SLIDING_LOG, Limit: 10, WindowNs: int64(time.Minute)}
		change(l)
		return &weirv1.Target{Limit: l, Key: "k"}
	}
	for _, bad := range []struct {
		to   *weirv1.Target
		code codes.Code
		text string
	}{
		{nil, codes.InvalidArgument, "target.key: "},
		{&weirv1.Target{Key: "k"}, codes.InvalidArgument, "target.policy: "},
		{&weirv1.Target{Policy: "p", Key: strings.Repeat("k", 1025)}, codes.ResourceExhausted, "target.key: "},
		{&weirv1.Target{Policy: "nope", Key: "k"}, codes.NotFound, "target.policy: "},
		{inline(func(l *weirv1.Limit) { l.Algorithm = 99 }), codes.InvalidArgument, "target.limit.algorithm: "},
		{inline(func(l *weirv1.Limit) { l.Period = -9 }), codes.InvalidArgument, "target.limit.period: "},
		{inline(func(l *weirv1.Limit) { l.Limit = 0 }), codes.InvalidArgument, "target.limit.limit: "},
		{inline(func(l *weirv1.Limit) { l.Limit = math.MaxInt64 }), codes.InvalidArgument, "target.limit.limit: "},
		{inline(func(l *weirv1.Limit) { l.WindowNs = math.MinInt64 }), codes.InvalidArgument, "target.limit.window_ns: "},
		{inline(func(l *weirv1.Limit) { l.WindowNs = math.MaxInt64 }), codes.InvalidArgument, "target.limit.window_ns: "},
		{inline(func(l *weirv1.Limit) { l.Slots = math.MinInt32 }), codes.InvalidArgument, "target.limit.slots: "},
		{inline(func(l *weirv1.Limit) { l.Capacity = -1 }), codes.InvalidArgument, "target.limit.capacity: "},
		{inline(func(l *weirv1.Limit) { l.TimeZone = "nope" }), codes.InvalidArgument, "target.limit.time_zone: "},
	} {
		_, err := c.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: bad.to}}})
		wantStatus(t, err, bad.code, bad.text)
		if bad.code != codes.NotFound { // which concerns only itself
			_, err = c.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: to}, {Target: bad.to}}})
			wantStatus(t, err, bad.code, "checks[1]."+bad.text)
		}
		_, err = c.Acquire(ctx, &weirv1.AcquireRequest{Target: bad.to})
		wantStatus(t, err, bad.code, bad.text)
		_, err = c.Renew(ctx, &weirv1.RenewRequest{Target: bad.to, LeaseId: d.LeaseId})
		wantStatus(t, err, bad.code, bad.text)
		_, err = c.Release(ctx, &weirv1.ReleaseRequest{Target: bad.to, LeaseId: d.LeaseId})
		wantStatus(t, err, bad.code, bad.text)
		_, err = c.Refund(ctx, &weirv1.RefundRequest{Target: bad.to})
		wantStatus(t, err, bad.code, bad.text)
		_, err = c.Reset(ctx, &weirv1.ResetRequest{Target: bad.to})
		wantStatus(t, err, bad.code, bad.text)
	}
	_, err = c.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: to, Cost: proto.Int64(-1)}}})
	wantStatus(t, err, codes.InvalidArgument, "cost: ")
	_, err = c.Check(ctx, &weirv1.CheckRequest{})
	wantStatus(t, err, codes.InvalidArgument, "checks: ")
	_, err = c.Check(ctx, &weirv1.CheckRequest{Checks: make([]*weirv1.Check, 1001)})
	wantStatus(t, err, codes.ResourceExhausted, "checks: ")
	_, err = c.Acquire(ctx, &weirv1.AcquireRequest{Target: leases, TtlNs: -1})
	wantStatus(t, err, codes.InvalidArgument, "ttl_ns: ")
	_, err = c.Renew(ctx, &weirv1.RenewRequest{Target: leases, LeaseId: "x"})
	wantStatus(t, err, codes.InvalidArgument, "lease_id: ")
	d = one(&weirv1.Check{Target: to, Cost: new(int64)})
	expect.Equal(t, d.Remaining, 10, "something was charged: %v", d)
}

func TestMalformedMessages(t *testing.T) {
	addr, c := serveLimiter(t, localLimiter(t))
	conn := testkit.Dial(t, addr)
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

// What a call takes is used again, for calls of other sizes and kinds, by several callers at a time: nothing of one is in the answer to
// another.
func TestCallsUsedAgain(t *testing.T) {
	_, c := serveLimiter(t, localLimiter(t))
	var callers sync.WaitGroup
	for caller := range 4 {
		callers.Go(func() {
			for n := range 50 {
				key := fmt.Sprintf("%d %d", caller, n)
				in := &weirv1.CheckRequest{Atomic: n%5 == 4}
				for i := range 1 + n*7%9 {
					check := &weirv1.Check{Target: &weirv1.Target{Policy: "p", Key: key}, Cost: proto.Int64(1)}
					if n%3 == 0 && i == 1 && !in.Atomic {
						check.Target.Policy = "none"
					}
					in.Checks = append(in.Checks, check)
				}
				if n%4 == 1 {
					in.Checks[0].RequestId = key
				}
				out, err := c.Check(t.Context(), in)
				invalid := in.Atomic && in.Checks[0].RequestId != ""
				expect.True(t, invalid == (err != nil), "invalid %v: %v", invalid, err)
				if err != nil {
					continue
				}
				allowed, charged := true, int64(0)
				for i, check := range in.Checks {
					d := out.Results[i].GetDecision()
					if check.Target.Policy == "none" {
						allowed = false
						if e := out.Results[i].GetError(); e == nil || d != nil {
							t.Errorf("an unknown policy: %v", out.Results[i])
						}
						continue
					}
					if charged++; in.Atomic {
						charged = int64(len(in.Checks))
					}
					expect.True(t, d != nil && d.Allowed && d.Granted == 1 && d.Remaining == 10-charged &&
						d.Policy == "p" && d.RequestId == check.RequestId,
						"%d of %d, %d charged: %v", i, len(in.Checks), charged, d)
				}
				expect.True(t, out.Allowed == allowed && len(out.Results) == len(in.Checks),
					"%d checks, allowed %v: %v", len(in.Checks), allowed, out)
			}
		})
	}
	callers.Wait()
}

package gubernator

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	pb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
)

const (
	token = pb.Algorithm_TOKEN_BUCKET
	leaky = pb.Algorithm_LEAKY_BUCKET
	under = pb.Status_UNDER_LIMIT
	over  = pb.Status_OVER_LIMIT
)

// start is 10 s into a minute.
var start = time.Date(2026, 2, 3, 4, 5, 10, 0, time.UTC)

// bench is a Server on a node alone, whose clock the test sets.
type bench struct {
	*Server
	t    testing.TB
	wall time.Time
}

func newBench(t testing.TB, change ...func(*limiter.Config)) *bench {
	t.Helper()
	b := &bench{t: t, wall: start}
	cfg := limiter.Config{InlineMaxWindow: algo.MaxWindow, Clock: func() algo.Instant {
		return algo.Instant{Mono: b.wall.Sub(start).Nanoseconds(), Wall: b.wall.UnixNano()}
	}}
	for _, f := range change {
		f(&cfg)
	}
	l := limiter.New(cfg)
	t.Cleanup(l.Close)
	b.Server = New(Config{
		Service: l, Owner: func(context.Context) func(uint64) string { return nil }, Now: func() time.Time { return b.wall },
		Health: func() Health { return Health{Peers: 3, Address: "127.0.0.1:8081"} },
	})
	return b
}

func (b *bench) ask(requests ...*pb.RateLimitReq) []*pb.RateLimitResp {
	b.t.Helper()
	out := must.Value(b.GetRateLimits(context.Background(), &pb.GetRateLimitsReq{Requests: requests}))(b.t)
	must.True(b.t, len(out.Responses) == len(requests),
		"%d responses to %d requests", len(out.Responses), len(requests))
	return out.Responses
}

// step is one request, and what Gubernator answers to it.
type step struct {
	after     time.Duration // since the step before
	what      string
	change    func(*pb.RateLimitReq) // of the request of the steps before; nil: none
	hits      int64
	status    pb.Status
	remaining int64
	reset     int64 // milliseconds from now; -1: not looked at
}

func (b *bench) run(r *pb.RateLimitReq, steps []step) {
	b.t.Helper()
	for i, s := range steps {
		b.wall = b.wall.Add(s.after)
		if s.change != nil {
			s.change(r)
		}
		r.Hits = s.hits
		got := b.ask(r)[0]
		reset := got.ResetTime - b.wall.UnixMilli()
		expect.True(b.t, got.Error == "" && got.Status == s.status && got.Remaining == s.remaining &&
			got.Limit == r.Limit && (s.reset < 0 || reset == s.reset),
			"%s, step %d (%s): %v, reset in %d ms; want %v with %d left and reset in %d", b.t.Name(), i, s.what, got, reset, s.status, s.remaining, s.reset)
	}
}

func request(a pb.Algorithm, limit, duration int64) *pb.RateLimitReq {
	return &pb.RateLimitReq{Name: "requests", UniqueKey: "account:1", Algorithm: a, Limit: limit, Duration: duration}
}

func behavior(b pb.Behavior) func(*pb.RateLimitReq) {
	return func(r *pb.RateLimitReq) { r.Behavior = b }
}

// The rules beside the steps are those of algorithms.go in Gubernator v2.13.0.

func TestTokenBucket(t *testing.T) {
	newBench(t).run(request(token, 10, 60_000), []step{
		{0, "no hits: nothing is taken, and reset_time is a duration from now", nil, 0, under, 10, 60_000},
		{0, "the first hit opens the window", nil, 1, under, 9, 60_000},
		{time.Second, "reset_time stays that of the window", nil, 4, under, 5, 59_000},
		{time.Second, "more than is left: over, and nothing is taken", nil, 6, over, 5, 58_000},
		{0, "exactly what is left passes", nil, 5, under, 0, 58_000},
		{0, "over", nil, 1, over, 0, 58_000},
		{0, "no hits at 0: under", nil, 0, under, 0, 58_000},
		{0, "negative hits give back", nil, -2, under, 2, 58_000},
		{0, "and others take them", nil, 2, under, 0, 58_000},
		{57_999 * time.Millisecond, "a millisecond before the end", nil, 1, over, 0, 1},
		{time.Millisecond, "the window is over at its end", nil, 1, under, 9, 60_000},
	})
	newBench(t).run(request(token, 10, 60_000), []step{
		{0, "more than the limit: over, and all is left", nil, 11, over, 10, 60_000},
		{0, "all of it passes", nil, 10, under, 0, 60_000},
	})
}

// TestChanges: a changed limit keeps what is used, a changed duration counts from when the window opened.
func TestChanges(t *testing.T) {
	limit := func(n int64) func(*pb.RateLimitReq) { return func(r *pb.RateLimitReq) { r.Limit = n } }
	duration := func(n int64) func(*pb.RateLimitReq) { return func(r *pb.RateLimitReq) { r.Duration = n } }
	newBench(t).run(request(token, 100, 9000), []step{
		{0, "the first", nil, 1, under, 99, 9000},
		{0, "the second", nil, 1, under, 98, 9000},
		{0, "the difference is taken off what is left", limit(10), 1, under, 7, 9000},
		{0, "the new limit", nil, 1, under, 6, 9000},
		{0, "the difference is added to what is left", limit(200), 1, under, 195, 9000},
		{0, "never below 0", limit(3), 1, over, 0, 9000},
		{time.Second, "a longer duration, from when the window opened", duration(20_000), 0, under, 0, 19_000},
		{time.Second, "a shorter one that is over: a new window", duration(1500), 1, under, 2, 1500},
		{0, "another algorithm begins anew", func(r *pb.RateLimitReq) { r.Algorithm = leaky }, 1, under, 2, 500},
	})
}

func TestLeakyBucket(t *testing.T) {
	// 10 in 30 s: one comes back every 3 s, and reset_time is when all have.
	newBench(t).run(request(leaky, 10, 30_000), []step{
		{0, "first hit", nil, 1, under, 9, 3000},
		{time.Second, "no leak", nil, 1, under, 8, 6000},
		{time.Second, "no leak", nil, 1, under, 7, 9000},
		{1500 * time.Millisecond, "one came back 3 s after the first hit", nil, 0, under, 8, 6000},
		{3 * time.Second, "another one 3 s later", nil, 0, under, 9, 3000},
		{0, "all of them", nil, 9, under, 0, 30_000},
		{0, "over", nil, 1, over, 0, 30_000},
		{0, "no hits at 0: under", nil, 0, under, 0, 30_000},
		{3 * time.Second, "one came back", nil, 0, under, 1, 27_000},
		{0, "more than is left: over, and nothing is taken", nil, 5, over, 1, 27_000},
		{60 * time.Second, "no more than the limit", nil, 0, under, 10, 0},
		{0, "all of them", nil, 10, under, 0, 30_000},
		{29 * time.Second, "a second before the duration is over", nil, 9, under, 0, 30_000},
		{3 * time.Second, "one", nil, 1, under, 0, 30_000},
		{0, "negative hits give back", nil, -1, under, 1, 27_000},
		{0, "and never make more than there are", nil, -100, under, 10, 0},
	})
	// With a burst of 20 the rate is the same. reset_time counts from the limit.
	burst := request(leaky, 10, 30_000)
	burst.Burst = 20
	newBench(t).run(burst, []step{
		{0, "first hit", nil, 1, under, 19, -1},
		{time.Second, "no leak", nil, 1, under, 18, -1},
		{time.Second, "no leak", nil, 1, under, 17, -1},
		{1500 * time.Millisecond, "one came back", nil, 0, under, 18, -1},
		{3 * time.Second, "another one", nil, 0, under, 19, -1},
		{0, "all of them", nil, 19, under, 0, 30_000},
		{0, "over", nil, 1, over, 0, 30_000},
		{3 * time.Second, "one came back", nil, 0, under, 1, 27_000},
		{60 * time.Second, "no more than the burst", nil, 0, under, 20, -1},
		{0, "the time at which 10 were left has passed", nil, 5, under, 15, -1},
	})
	r := request(leaky, 10, 30_000)
	r.Burst = 20
	b := newBench(t)
	if got := b.ask(r)[0]; got.ResetTime != b.wall.UnixMilli()-30_000 {
		t.Errorf("reset_time of a full bucket of 20 with a limit of 10: %v", got)
	}
	// A rate above one a millisecond.
	newBench(t).run(request(leaky, 2000, 1000), []step{
		{0, "first hit", nil, 1, under, 1999, 1},
		{0, "a hundred", nil, 100, under, 1899, 51},
	})
}

// TestGregorian: the window ends with the interval of the calendar, and reset_time is its last millisecond.
func TestGregorian(t *testing.T) {
	r := request(token, 60, 0)
	r.Behavior = pb.Behavior_DURATION_IS_GREGORIAN
	newBench(t).run(r, []step{
		{0, "first", nil, 1, under, 59, 49_999},
		{0, "second", nil, 1, under, 58, 49_999},
		{0, "the rest", nil, 58, under, 0, 49_999},
		{0, "over", nil, 1, over, 0, 49_999},
		{61 * time.Second, "the next minute", nil, 0, under, 60, 48_999},
	})
	r = request(leaky, 60, 0)
	r.Behavior = pb.Behavior_DURATION_IS_GREGORIAN
	newBench(t).run(r, []step{
		{0, "first: one comes back each second", nil, 1, under, 59, 1000},
		{500 * time.Millisecond, "no leak", nil, 1, under, 58, 2000},
		{1200 * time.Millisecond, "one came back", nil, 1, under, 58, 2000},
	})
	for duration, end := range []time.Time{
		time.Date(2026, 2, 3, 4, 6, 0, 0, time.UTC), time.Date(2026, 2, 3, 5, 0, 0, 0, time.UTC), time.Date(2026, 2, 4, 0, 0, 0, 0, time.UTC),
		time.Date(2026, 2, 9, 0, 0, 0, 0, time.UTC), time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC), time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC),
	} {
		for _, a := range []pb.Algorithm{token, leaky} {
			r := request(a, 10, int64(duration))
			r.Behavior, r.Hits = pb.Behavior_DURATION_IS_GREGORIAN, 3
			b := newBench(t)
			got := b.ask(r)[0]
			want := end.UnixMilli() - 1
			if a == leaky { // three tenths of an interval, which for months is February's
				length, _ := interval(intervals[duration]).around(start)
				want = start.UnixMilli() + length.Milliseconds()*3/10
			}
			expect.True(t, got.Error == "" && got.Remaining == 7 && got.ResetTime == want,
				"%v of interval %d: %v, want a reset_time of %d", a, duration, got, want)
			b.wall = end
			if a == token {
				if got := b.ask(r)[0]; got.Remaining != 7 || got.Status != under {
					t.Errorf("%v in the next interval %d: %v", a, duration, got)
				}
			}
		}
	}
}

func TestBehaviors(t *testing.T) {
	drain := func(a pb.Algorithm) {
		newBench(t).run(request(a, 10, 30_000), []step{
			{0, "look", behavior(pb.Behavior_DRAIN_OVER_LIMIT), 0, under, 10, -1},
			{0, "first hit", nil, 1, under, 9, -1},
			{0, "over: what is left is used up", nil, 100, over, 0, -1},
			{0, "look", nil, 0, under, 0, -1},
		})
	}
	drain(token)
	drain(leaky)
	b := newBench(t)
	r := request(token, 100, 9000)
	b.run(r, []step{
		{0, "a hit", nil, 1, under, 99, -1},
		{0, "another", nil, 1, under, 98, -1},
		{0, "a reset ignores the hits", behavior(pb.Behavior_RESET_REMAINING), 1, under, 100, -1},
		{0, "a hit", behavior(0), 1, under, 99, -1},
	})
	r.Behavior = pb.Behavior_RESET_REMAINING
	got := b.ask(r)[0]
	expect.Equal(t, got.ResetTime, 0, "a reset has no reset_time: %v", got)
	newBench(t).run(request(leaky, 10, 30_000), []step{
		{0, "some hits", nil, 7, under, 3, -1},
		{0, "a reset fills the bucket, and then the hits count", behavior(pb.Behavior_RESET_REMAINING), 1, under, 9, 3000},
	})
	// How requests travel is no difference to the answer.
	newBench(t).run(request(token, 3, 30_000), []step{
		{0, "at once", behavior(pb.Behavior_NO_BATCHING), 1, under, 2, -1},
		{0, "global", behavior(pb.Behavior_GLOBAL), 1, under, 1, -1},
		{0, "of several regions", behavior(pb.Behavior_MULTI_REGION), 1, under, 0, -1},
		{0, "global, over", behavior(pb.Behavior_GLOBAL), 1, over, 0, -1},
	})
}

// TestBatch: requests are decided in their order, resets among them, and each error is one request's own.
func TestBatch(t *testing.T) {
	b := newBench(t)
	hit := func(change ...func(*pb.RateLimitReq)) *pb.RateLimitReq {
		r := request(token, 2, 60_000)
		r.Hits = 1
		for _, f := range change {
			f(r)
		}
		return r
	}
	got := b.ask(hit(), hit(), hit(), hit(func(r *pb.RateLimitReq) { r.UniqueKey = "" }), hit(behavior(pb.Behavior_RESET_REMAINING)), hit(),
		hit(func(r *pb.RateLimitReq) { r.Name = "" }))
	for i, want := range []struct {
		status    pb.Status
		remaining int64
		err       string
	}{
		{under, 1, ""}, {under, 0, ""}, {over, 0, ""}, {under, 0, "field 'unique_key' cannot be empty"}, {under, 2, ""}, {under, 1, ""},
		{under, 0, "field 'namespace' cannot be empty"},
	} {
		expect.True(t, got[i].Status == want.status && got[i].Remaining == want.remaining && got[i].Error == want.err,
			"%d: %v, want %+v", i, got[i], want)
	}
	out := b.ask()
	expect.Equal(t, len(out), 0, "nothing was asked: %v", out)
	_, err := b.GetRateLimits(t.Context(), &pb.GetRateLimitsReq{Requests: make([]*pb.RateLimitReq, 1001)})
	expect.True(t, status.Code(err) == codes.OutOfRange &&
		status.Convert(err).Message() == "Requests.RateLimits list too large; max size is '1000'",
		"1001 requests: %v", err)
	full := make([]*pb.RateLimitReq, 1000)
	for i := range full {
		full[i] = hit(func(r *pb.RateLimitReq) { r.UniqueKey = fmt.Sprint(i % 500) })
	}
	for i, r := range b.ask(full...) {
		must.Equal(t, r.Remaining, int64(1-i/500), "request %d of 1000: %v", i, r)
	}
}

// TestOddRequests: what Gubernator takes without an error has none here.
func TestOddRequests(t *testing.T) {
	for _, c := range []struct {
		what      string
		change    func(*pb.RateLimitReq)
		status    pb.Status
		remaining int64
		err       string
	}{
		{"a duration of 0 is over at once", func(r *pb.RateLimitReq) { r.Duration = 0 }, under, 9, ""},
		{"a negative one, too", func(r *pb.RateLimitReq) { r.Duration = -5 }, under, 9, ""},
		{"more hits than the limit in no time", func(r *pb.RateLimitReq) { r.Duration, r.Hits = 0, 11 }, over, 10, ""},
		{"more than a bucket holds in no time", func(r *pb.RateLimitReq) { r.Duration, r.Hits, r.Algorithm = 0, 11, leaky }, over, 0, ""},
		{"a burst in no time", func(r *pb.RateLimitReq) { r.Duration, r.Hits, r.Burst, r.Algorithm = 0, 11, 20, leaky }, under, 9, ""},
		{"a limit of 0 is over", func(r *pb.RateLimitReq) { r.Limit = 0 }, over, 0, ""},
		{"of a bucket, too", func(r *pb.RateLimitReq) { r.Limit, r.Algorithm = 0, leaky }, over, 0, ""},
		{"no hits at a limit of 0", func(r *pb.RateLimitReq) { r.Limit, r.Hits = 0, 0 }, under, 0, ""},
		{"a limit of 0 by the calendar", func(r *pb.RateLimitReq) {
			r.Limit, r.Duration, r.Behavior = 0, 2, pb.Behavior_DURATION_IS_GREGORIAN
		}, over, 0, ""},
		{"the largest limit", func(r *pb.RateLimitReq) { r.Limit = math.MaxInt64 }, under, math.MaxInt64 - 1, ""},
		{"the largest bucket", func(r *pb.RateLimitReq) { r.Limit, r.Algorithm = math.MaxInt64, leaky }, under, math.MaxInt64 - 1, ""},
		{"the most hits", func(r *pb.RateLimitReq) { r.Hits = math.MaxInt64 }, over, 10, ""},
		{"the fewest", func(r *pb.RateLimitReq) { r.Hits = math.MinInt64 }, under, 10, ""},
		{"created_at", func(r *pb.RateLimitReq) { r.CreatedAt = new(int64) }, under, 9, ""},
		{"a duration of years", func(r *pb.RateLimitReq) { r.Duration = math.MaxInt64 }, under, 0,
			"field 'duration' cannot be longer than 31622400000 milliseconds (366 days)"},
		{"no interval of the calendar", func(r *pb.RateLimitReq) { r.Duration, r.Behavior = 6, pb.Behavior_DURATION_IS_GREGORIAN }, under, 0,
			"behavior DURATION_IS_GREGORIAN is set; but `Duration` is not a valid gregorian interval"},
		{"neither", func(r *pb.RateLimitReq) { r.Duration, r.Behavior = -1, pb.Behavior_DURATION_IS_GREGORIAN }, under, 0,
			"behavior DURATION_IS_GREGORIAN is set; but `Duration` is not a valid gregorian interval"},
		{"an unknown algorithm", func(r *pb.RateLimitReq) { r.Algorithm = 7 }, under, 0, "invalid rate limit algorithm '7'"},
		{"a negative burst", func(r *pb.RateLimitReq) { r.Algorithm, r.Burst = leaky, -1 }, under, 0, "field 'burst' cannot be negative"},
		{"a burst that never comes back", func(r *pb.RateLimitReq) { r.Algorithm, r.Burst, r.Limit = leaky, 5, 0 }, under, 0,
			"field 'limit' cannot be 0 beside a 'burst', which would never come back"},
		{"a burst that takes for ever", func(r *pb.RateLimitReq) { r.Algorithm, r.Burst, r.Limit = leaky, math.MaxInt64, 1 }, under, 0,
			"field 'burst' takes too long to come back at this rate"},
		{"a long key", func(r *pb.RateLimitReq) { r.UniqueKey = strings.Repeat("k", 1025) }, under, 9, ""},
		{"a long name", func(r *pb.RateLimitReq) { r.Name = strings.Repeat("n", 246) }, under, 0, "field 'name' has 246 bytes, at most 245 are taken"},
		{"the longest name", func(r *pb.RateLimitReq) { r.Name = strings.Repeat("n", 245) }, under, 9, ""},
		{"a name that is no text", func(r *pb.RateLimitReq) { r.Name = "\xff" }, under, 0, "field 'name' is not valid UTF-8"},
	} {
		r := request(token, 10, 60_000)
		r.Hits = 1
		c.change(r)
		got := newBench(t).ask(r)[0]
		expect.True(t, got.Status == c.status && got.Remaining == c.remaining && got.Error == c.err &&
			(c.err != "" || got.Limit == r.Limit),
			"%s: %v, want %v with %d left and the error %q", c.what, got, c.status, c.remaining, c.err)
	}
	bounded := newBench(t, func(c *limiter.Config) { c.InlineMaxWindow = time.Hour })
	r := request(token, 10, 4)
	r.Behavior = pb.Behavior_DURATION_IS_GREGORIAN
	if got := bounded.ask(r)[0]; got.Error != "field 'duration' is longer than the longest that this node takes of an inline limit, 1h0m0s (inline-max-window)" {
		t.Errorf("a month where an hour is the longest: %v", got)
	}
	off := newBench(t, func(c *limiter.Config) { c.NoInline = true })
	got := off.ask(request(token, 10, 1000))[0]
	expect.True(t, strings.Contains(got.Error, "no-inline"), "without inline limits: %v", got)
}

// TestFailures: what nobody could decide is an error of its request, as with Gubernator, whose callers then decide themselves.
func TestFailures(t *testing.T) {
	s := new(scripted.Service)
	server := New(Config{Service: s, Owner: func(context.Context) func(uint64) string { return func(uint64) string { return "10.0.0.7:8081" } }, Now: time.Now, Health: func() Health { return Health{Problem: "alone"} }})
	ask := func(r ...*pb.RateLimitReq) ([]*pb.RateLimitResp, error) {
		out, err := server.GetRateLimits(t.Context(), &pb.GetRateLimitsReq{Requests: r})
		return out.GetResponses(), err
	}
	s.Results = []limit.Result{{Decision: limit.Decision{Allowed: true, Granted: 1, FailedOpen: true}}}
	out, err := ask(request(token, 5, 1000))
	expect.True(t, err == nil && out[0].Error == "the node that decides for 'requests_account:1' cannot be asked" &&
		out[0].Metadata == nil, "failed open: %v, %v", out, err)
	s.Results = []limit.Result{{Decision: limit.Decision{Allowed: true, Remaining: 4, Limit: 5}}}
	out, err = ask(request(token, 5, 1000))
	expect.True(t, err == nil && out[0].Metadata["owner"] == "10.0.0.7:8081" && out[0].Remaining == 4,
		"another node's: %v, %v", out, err)
	reset := request(token, 5, 1000)
	reset.Behavior = pb.Behavior_RESET_REMAINING
	s.Err = limit.NewError(limit.Unavailable, "", "the owner cannot be reached")
	before := len(s.Calls())
	out, err = ask(reset, reset, reset)
	expect.True(t, err == nil && out[2].Error == "the owner cannot be reached" && len(s.Calls()) == before+1,
		"resets that cannot be carried out: %v, %v, tried %d times", out, err, len(s.Calls())-before)
	s.Err = context.Canceled
	_, err = ask(reset)
	expect.Equal(t, status.Code(err), codes.Canceled, "a caller who is gone: %v", err)
	s.Err = limit.NewError(limit.Denied, "", "no")
	_, err = ask(request(token, 5, 1000))
	expect.Equal(t, status.Code(err), codes.PermissionDenied, "a caller without the role: %v", err)
	_, err = server.HealthCheck(t.Context(), nil)
	expect.Equal(t, status.Code(err), codes.Unavailable, "an unhealthy node: %v", err)
	_, err = server.LiveCheck(t.Context(), nil)
	expect.NoError(t, err, "it is alive")
}

// TestRules: limits are worked out once, and no more of them are kept than there may be.
func TestRules(t *testing.T) {
	r := rules{hashKey: ring.HashKey{}}
	in := request(leaky, 10, 1000)
	first, _ := r.of(in, start)
	again, _ := r.of(in, start)
	expect.Equal(t, again, first, "worked out twice")
	in.Limit = 11
	other, _ := r.of(in, start)
	expect.True(t, other != first && other.hash == first.hash, "another limit is not the same state")
	for i := range int64(maxRules + 10) {
		in.Limit = 100 + i
		r.of(in, start)
	}
	expect.True(t, len(r.by) <= maxRules, "%d are kept", len(r.by))
}

package envoy

import (
	"context"
	"strings"
	"testing"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/weirlimit/weir/gateway/envoy/kuadrantpb"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/testkit"
)

// TestKuadrant states beside each expectation what Limitador does (limitador-server/src/envoy_rls/kuadrant_service.rs).
func TestKuadrant(t *testing.T) {
	b := newBench(t, limits)
	var intercepted []string
	addr := testkit.Serve(t, b.Register, grpc.UnaryInterceptor(func(ctx context.Context, in any,
		info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
		intercepted = append(intercepted, info.FullMethod)
		return h(ctx, in)
	}))
	client := kuadrantpb.NewRateLimitServiceClient(testkit.Dial(t, addr))
	call := func(method string, in *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error) {
		if method == "Report" {
			return client.Report(t.Context(), in)
		}
		return client.CheckRateLimit(t.Context(), in)
	}
	answers := func(rule, method string, want ratelimitv3.RateLimitResponse_Code, domain string, hits uint32,
		descriptors ...*common.RateLimitDescriptor) {
		t.Helper()
		out, err := call(method, &ratelimitv3.RateLimitRequest{Domain: domain, HitsAddend: hits,
			Descriptors: descriptors})
		expect.True(t, err == nil && out.OverallCode == want, "%s: %v, %v, want %v", rule, out, err, want)
		expect.True(t, len(out.Statuses)+len(out.ResponseHeadersToAdd)+len(out.RequestHeadersToAdd) == 0 &&
			out.DynamicMetadata == nil, "%s: the original answers the code alone: %v", rule, out)
	}
	const check, report, none = "CheckRateLimit", "Report", ratelimitv3.RateLimitResponse_UNKNOWN
	minute := entriesOf("minute", "u")

	answers("an empty domain is answered UNKNOWN, not by an error", check, none, "", 1, minute)
	answers("an empty domain is answered UNKNOWN, not by an error", report, none, "", 1, minute)
	answers("where no limits apply the answer is OK", check, ok, "other", 1, minute)
	answers("where no limits apply the answer is OK", report, ok, "other", 1, minute)
	answers("where no limits apply the answer is OK", check, ok, "d", 1, entriesOf("nothing", "u"))
	answers("descriptors may be missing", check, ok, "d", 1)
	for range 20 {
		answers("a check counts nothing", check, ok, "d", 1, minute)
	}
	answers("the request's hits have no part in a check", check, ok, "d", 1000, minute)
	answers("a report counts, and 0 hits stand for 1", report, ok, "d", 0, minute)
	answers("a report counts the request's hits", report, ok, "d", 8, minute)
	answers("9 of 10 are used: one more passes", check, ok, "d", 1, minute)
	answers("a report is OK also where it goes over the limit", report, ok, "d", 5, minute)
	answers("14 of 10 are used: one more does not pass", check, over, "d", 1, minute)
	answers("the counters are those of ShouldRateLimit, and of the same descriptor", check, ok, "d", 1,
		entriesOf("minute", "v"))
	want(t, "the counters are those of ShouldRateLimit",
		b.ask(1, adding(entriesOf("minute", "u"), 0, false)).Statuses[0], over, 0)
	answers("any limit that is over makes the whole so", check, over, "d", 1, entriesOf("minute", "v"), minute)
	answers("a limit of 0 lets nothing pass", check, over, "d", 1, entriesOf("zero", "u"))
	answers("what is not limited passes", check, ok, "d", 1, entriesOf("free", "u"))
	answers("what is not limited passes", report, ok, "d", 7, entriesOf("free", "u"))
	answers("all descriptors of a report are counted", report, ok, "d", 10, entriesOf("minute", "v"),
		entriesOf("log", "v"))
	answers("all descriptors of a report are counted", check, over, "d", 1, entriesOf("minute", "v"))
	answers("all descriptors of a report are counted", check, over, "d", 1, entriesOf("log", "v"))
	answers("Weir's shadow_mode admits", report, ok, "d", 10, entriesOf("shadow", "v"))
	answers("Weir's shadow_mode admits", check, ok, "d", 1, entriesOf("shadow", "v"))
	b.past.Add(int64(50 * time.Second))
	answers("the excess is forgotten when the window turns", check, ok, "d", 1, minute)

	// Ours: Limitador charges the limits of a report one after the other, and stops at the first that its storage
	// fails.
	_, err := call(report, &ratelimitv3.RateLimitRequest{Domain: "d", HitsAddend: 10,
		Descriptors: []*common.RateLimitDescriptor{
			entriesOf("minute", "all"), entriesOf("log", "all"), entriesOf("lost", "all")}})
	expect.Equal(t, status.Code(err), codes.NotFound, "a report of which one limit is lost: %v", err)
	answers("of a report that fails nothing is counted", check, ok, "d", 1, entriesOf("minute", "all"),
		entriesOf("log", "all"))
	answers("a descriptor that is there twice counts twice", report, ok, "d", 5, entriesOf("minute", "twice"),
		entriesOf("minute", "twice"))
	answers("a descriptor that is there twice counts twice", check, over, "d", 1, entriesOf("minute", "twice"))

	// The descriptor is named by its place in the request, of which the first has no limit.
	kuadrant := &kuadrant{Service: b.Service}
	lost := []*common.RateLimitDescriptor{entriesOf("free", "u"), entriesOf("minute", "named"),
		entriesOf("lost", "named")}
	_, checked := kuadrant.CheckRateLimit(t.Context(), &ratelimitv3.RateLimitRequest{Domain: "d", Descriptors: lost})
	_, reported := kuadrant.Report(t.Context(), &ratelimitv3.RateLimitRequest{Domain: "d", Descriptors: lost})
	_, reserved := kuadrant.Reserve(t.Context(), &kuadrantpb.ReserveRequest{Domain: "d", Amount: 1, Descriptors: lost})
	_, committed := kuadrant.Commit(t.Context(),
		&kuadrantpb.CommitRequest{Domain: "d", ActualAmount: 1, Descriptors: lost})
	_, settled := kuadrant.Commit(t.Context(),
		&kuadrantpb.CommitRequest{Domain: "d", ActualAmount: 1, ReservationId: "no id", Descriptors: lost})
	for _, err := range []error{checked, reported, reserved, committed, settled} {
		message := status.Convert(err).Message()
		expect.True(t, strings.HasPrefix(message, "descriptors[2].policy: there is no policy named lost"), "%v", err)
	}

	// A policy as the limit: its state is what every other front end counts.
	answers("a policy", report, ok, "d", 9, entriesOf("shared", "u"))
	answers("a policy", check, over, "d", 1, entriesOf("shared", "u"))
	// Errors of the storage are UNAVAILABLE in the original, so that failure_mode_deny decides; ours name what is
	// wrong.
	for _, method := range []string{check, report} {
		_, err = call(method, &ratelimitv3.RateLimitRequest{Domain: "d",
			Descriptors: []*common.RateLimitDescriptor{entriesOf("lost", "u")}})
		expect.Equal(t, status.Code(err), codes.NotFound, "a policy that there is not: %v", err)
		_, err = call(method, &ratelimitv3.RateLimitRequest{Domain: "d",
			Descriptors: make([]*common.RateLimitDescriptor, 1001)})
		expect.Equal(t, status.Code(err), codes.ResourceExhausted, "%d descriptors: %v", 1001, err)
	}
	expect.True(t, b.hits["d.minute within_limit"] != 0 && len(intercepted) != 0,
		"hits %v; the interceptors have seen %d calls", b.hits, len(intercepted))
}

// reserving is a bench with Kuadrant's methods.
type reserving struct {
	*bench
	service *kuadrant
}

func newReserving(t *testing.T) *reserving {
	b := newBench(t, limits+`
  - key: quota
    quota_mode: true
    rate_limit: {unit: minute, requests_per_unit: 10}
`)
	return &reserving{b, &kuadrant{Service: b.Service}}
}

func (r *reserving) reserve(rule string, want ratelimitv3.RateLimitResponse_Code, amount uint64, ttl time.Duration,
	descriptors ...*common.RateLimitDescriptor) string {
	r.t.Helper()
	in := &kuadrantpb.ReserveRequest{Domain: "d", Amount: amount, Descriptors: descriptors}
	if ttl != 0 {
		in.Ttl = durationpb.New(ttl)
	}
	out, err := r.service.Reserve(r.t.Context(), in)
	expect.True(r.t, err == nil && out.Code == want && (want == ok || out.ReservationId == ""),
		"%s: %v, %v, want %v", rule, out, err, want)
	return out.GetReservationId()
}

func (r *reserving) commit(rule string, want bool, id string, amount uint64,
	descriptors ...*common.RateLimitDescriptor) {
	r.t.Helper()
	out, err := r.service.Commit(r.t.Context(),
		&kuadrantpb.CommitRequest{Domain: "d", ReservationId: id, ActualAmount: amount, Descriptors: descriptors})
	expect.True(r.t, err == nil && out.ReservationReleased == want,
		"%s: %v, %v, want released %v", rule, out, err, want)
}

// left is what remains of a minute's 10 units.
func (r *reserving) left(rule string, want uint32, d *common.RateLimitDescriptor) {
	r.t.Helper()
	got := r.ask(1, adding(d, 0, false)).Statuses[0]
	expect.True(r.t, got.LimitRemaining == want, "%s: %d left, want %d", rule, got.LimitRemaining, want)
}

// TestKuadrantReserve states beside each expectation what Limitador does (limitador-server/proto/kuadrantrls.proto,
// limitador/src/storage/local_reservations.rs, and RFC 0021 of Kuadrant/architecture).
func TestKuadrantReserve(t *testing.T) {
	r := newReserving(t)
	d := func(values ...string) *common.RateLimitDescriptor { return entriesOf(values...) }
	minute := func() *common.RateLimitDescriptor { return d("minute", "u") }

	id := r.reserve("6 of 10 are held", ok, 6, 0, minute())
	expect.True(t, id != "", "an id is set when the code is OK")
	r.reserve("0 + 6 held + 6 > 10", over, 6, 0, minute())
	r.left("what is held is not left to others", 4, minute())
	r.commit("the actual amount takes the place of what was held", true, id, 2, minute())
	r.left("2 of 10 are used", 8, minute())
	r.commit("repeated with its amount a commit counts nothing: the original counts it again", true, id, 2, minute())
	r.left("2 of 10 are used", 8, minute())
	r.commit("a reservation that has ended degrades to a report", false, id, 3, minute())
	r.left("which counts", 5, minute())
	r.commit("and so does one that never was", false, "never-reserved", 1, minute())
	r.commit("and so does an empty id", false, "", 1, minute())
	r.left("which count", 3, minute())
	r.reserve("10 - 3 are in use: 4 more have no room", over, 4, 0, minute())
	id = r.reserve("3 more have", ok, 3, 0, minute())
	r.commit("a commit counts whether or not there is room", true, id, 9, minute())
	r.left("16 of 10 are used", 0, minute())
	r.reserve("over the limit not even 0 has room", over, 0, 0, minute())
	expect.Equal(t, r.reserve("an amount of 0 passes up to the limit", ok, 0, 0, d("minute", "zero")), "",
		"an amount of 0 holds nothing")
	r.reserve("more than the limit never passes", over, 11, 0, d("minute", "most"))
	r.reserve("the largest amount there is", over, 1<<64-1, 0, d("minute", "most"))
	r.left("what is refused holds nothing", 10, d("minute", "most"))

	id = r.reserve("a commit of 0 releases what is held", ok, 10, 0, d("minute", "none"))
	r.commit("a commit of 0 releases what is held", true, id, 0, d("minute", "none"))
	r.left("and counts nothing", 10, d("minute", "none"))

	// All limits or none.
	id = r.reserve("a reservation holds under all limits", ok, 2, 0, d("minute", "many"), d("log", "many"),
		d("shared", "many"))
	r.reserve("one limit without room refuses the whole", over, 1, 0, d("minute", "many"), d("log", "many"))
	r.left("and then nothing is held", 8, d("minute", "many"))
	r.commit("one id settles all", true, id, 1, d("minute", "many"), d("log", "many"), d("shared", "many"))
	r.left("one id settles all", 9, d("minute", "many"))
	r.reserve("one id settles all", ok, 1, 0, d("log", "many"))
	id = r.reserve("a descriptor that is there twice is held twice (ours: the original has one counter)", ok, 3, 0,
		d("minute", "dup"), d("minute", "dup"))
	r.left("held twice", 4, d("minute", "dup"))
	r.commit("and committed twice", true, id, 1, d("minute", "dup"), d("minute", "dup"))
	r.left("and committed twice", 8, d("minute", "dup"))
	id = r.reserve("a limit that the request names at the commit alone", ok, 1, 0, d("minute", "one"))
	r.commit("is charged as by a report", true, id, 2, d("minute", "one"), d("minute", "other"))
	r.left("is charged as by a report", 8, d("minute", "other"))
	r.left("is charged as by a report", 8, d("minute", "one"))

	// Where nothing limits.
	for _, free := range []*common.RateLimitDescriptor{d("free", "u"), d("nothing", "u")} {
		expect.Equal(t, r.reserve("where no limits apply the answer is OK", ok, 1000, 0, free), "",
			"and nothing is held")
		r.commit("where no limits apply nothing is released", false, "", 1000, free)
	}
	r.reserve("without descriptors no limits apply", ok, 5, 0)
	r.reserve("a limit of 0 has room for nothing", over, 1, 0, d("zero", "u"))
	r.reserve("but for nothing", ok, 0, 0, d("zero", "u"))

	// Ours: modes that Limitador does not have.
	r.reserve("shadow_mode never refuses", ok, 50, 0, d("shadow", "u"))
	id = r.reserve("shadow_mode never refuses", ok, 5, 0, d("shadow", "u"), d("minute", "beside"))
	r.commit("shadow_mode is charged at the commit", true, id, 5, d("shadow", "u"), d("minute", "beside"))
	expect.Equal(t, r.hits["d.shadow within_limit"], 5, "shadow_mode is charged at the commit: %v", r.hits)
	r.reserve("quota_mode refuses when all quotas are over", over, 11, 0, d("quota", "u"))
	r.reserve("quota_mode refuses when all quotas are over", ok, 10, 0, d("quota", "u"))
	r.commit("quota_mode is charged at the commit", false, "", 10, d("quota", "u"))
	r.reserve("one quota with room is enough", ok, 1, 0, d("quota", "u"), d("quota", "v"))
	r.reserve("none has room", over, 1, 0, d("quota", "u"))

	// Requests without a domain, and what cannot be.
	if out, err := r.service.Reserve(t.Context(),
		&kuadrantpb.ReserveRequest{Amount: 1, Descriptors: []*common.RateLimitDescriptor{minute()}}); err != nil ||
		out.Code != codeUnknown || out.ReservationId != "" {
		t.Errorf("an empty domain is answered UNKNOWN: %v, %v", out, err)
	}
	if out, err := r.service.Commit(t.Context(), &kuadrantpb.CommitRequest{ReservationId: "some-id", ActualAmount: 1,
		Descriptors: []*common.RateLimitDescriptor{minute()}}); err != nil || out.ReservationReleased {
		t.Errorf("an empty domain releases nothing, and is no error: %v, %v", out, err)
	}
	for _, bad := range []struct {
		descriptors []*common.RateLimitDescriptor
		want        codes.Code
	}{
		{[]*common.RateLimitDescriptor{d("lost", "u")}, codes.NotFound},
		{make([]*common.RateLimitDescriptor, 1001), codes.ResourceExhausted},
	} {
		_, err := r.service.Reserve(t.Context(),
			&kuadrantpb.ReserveRequest{Domain: "d", Amount: 1, Descriptors: bad.descriptors})
		expect.Equal(t, status.Code(err), bad.want, "Reserve of %.100v: %v", bad.descriptors, err)
		_, err = r.service.Commit(t.Context(),
			&kuadrantpb.CommitRequest{Domain: "d", ActualAmount: 1, Descriptors: bad.descriptors})
		expect.Equal(t, status.Code(err), bad.want, "Commit of %.100v: %v", bad.descriptors, err)
	}
}

// TestKuadrantExpiry: Limitador: a reservation that is not committed expires without a cost, when its TTL is over; a
// TTL that is missing or negative is a minute.
func TestKuadrantExpiry(t *testing.T) {
	r := newReserving(t)
	pass := func(d time.Duration) { r.past.Add(int64(d)) }
	week := func(value string) *common.RateLimitDescriptor { return entriesOf("week", value) }
	held := func(values ...string) {
		t.Helper()
		for _, value := range values {
			r.reserve("still held", over, 1, 0, week(value))
		}
	}
	id := r.reserve("for 20 s", ok, 1, 20*time.Second, week("u"), entriesOf("minute", "u"))
	r.reserve("for 20 s, twice", ok, 5, 20*time.Second, entriesOf("minute", "twice"), entriesOf("minute", "twice"))
	r.reserve("for as long as nobody says", ok, 1, 0, week("default"))
	r.reserve("for less than no time", ok, 1, -time.Second, week("negative"))
	r.reserve("for longer than there is", ok, 1, 9*time.Hour, week("long"))
	committed := r.reserve("to be committed", ok, 1, 20*time.Second, week("committed"))
	r.commit("in time", true, committed, 1, week("committed"))
	pass(20*time.Second - time.Millisecond)
	held("u")
	r.left("still held", 0, entriesOf("minute", "twice"))
	pass(time.Millisecond)
	r.commit("too late", false, id, 1, entriesOf("minute", "u"))
	r.left("what has expired costs nothing, and the commit counts", 9, entriesOf("minute", "u"))
	r.left("what has expired costs nothing", 10, entriesOf("minute", "twice"))
	r.reserve("what has expired costs nothing", ok, 1, time.Hour, week("u"))
	pass(40*time.Second - time.Nanosecond)
	held("default", "negative", "committed")
	pass(time.Nanosecond)
	for _, value := range []string{"default", "negative"} {
		r.reserve("expired", ok, 1, time.Hour, week(value))
	}
	held("committed", "long")
	pass(time.Hour - time.Minute)
	r.reserve("no longer than an hour", ok, 1, 0, week("long"))
}

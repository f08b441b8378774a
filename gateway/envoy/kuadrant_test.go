package envoy

import (
	"context"
	"net"
	"testing"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// TestKuadrant states beside each expectation what Limitador does (limitador-server/src/envoy_rls/kuadrant_service.rs).
func TestKuadrant(t *testing.T) {
	b := newBench(t, limits)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var intercepted []string
	server := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, in any, info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
		intercepted = append(intercepted, info.FullMethod)
		return h(ctx, in)
	}))
	b.Register(server)
	go server.Serve(listener) //nolint:errcheck // Stop ends it
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	call := func(method string, in *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error) {
		out := new(ratelimitv3.RateLimitResponse)
		err := conn.Invoke(t.Context(), "/kuadrant.service.ratelimit.v1.RateLimitService/"+method, in, out)
		return out, err
	}
	answers := func(rule, method string, want ratelimitv3.RateLimitResponse_Code, domain string, hits uint32, descriptors ...*common.RateLimitDescriptor) {
		t.Helper()
		out, err := call(method, &ratelimitv3.RateLimitRequest{Domain: domain, HitsAddend: hits, Descriptors: descriptors})
		if err != nil || out.OverallCode != want {
			t.Errorf("%s: %v, %v, want %v", rule, out, err, want)
		}
		if len(out.Statuses)+len(out.ResponseHeadersToAdd)+len(out.RequestHeadersToAdd) > 0 || out.DynamicMetadata != nil {
			t.Errorf("%s: the original answers the code alone: %v", rule, out)
		}
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
	answers("the counters are those of ShouldRateLimit, and of the same descriptor", check, ok, "d", 1, entriesOf("minute", "v"))
	want(t, "the counters are those of ShouldRateLimit", b.ask(1, adding(entriesOf("minute", "u"), 0, false)).Statuses[0], over, 0)
	answers("any limit that is over makes the whole so", check, over, "d", 1, entriesOf("minute", "v"), minute)
	answers("a limit of 0 lets nothing pass", check, over, "d", 1, entriesOf("zero", "u"))
	answers("what is not limited passes", check, ok, "d", 1, entriesOf("free", "u"))
	answers("what is not limited passes", report, ok, "d", 7, entriesOf("free", "u"))
	answers("all descriptors of a report are counted", report, ok, "d", 10, entriesOf("minute", "v"), entriesOf("log", "v"))
	answers("all descriptors of a report are counted", check, over, "d", 1, entriesOf("minute", "v"))
	answers("all descriptors of a report are counted", check, over, "d", 1, entriesOf("log", "v"))
	answers("Weir's shadow_mode admits", report, ok, "d", 10, entriesOf("shadow", "v"))
	answers("Weir's shadow_mode admits", check, ok, "d", 1, entriesOf("shadow", "v"))
	b.wall = b.wall.Add(50 * time.Second)
	answers("the excess is forgotten when the window turns", check, ok, "d", 1, minute)

	// A policy as the limit: its state is what every other front end counts.
	answers("a policy", report, ok, "d", 9, entriesOf("shared", "u"))
	answers("a policy", check, over, "d", 1, entriesOf("shared", "u"))
	// Errors of the storage are UNAVAILABLE in the original, so that failure_mode_deny decides; ours name what is wrong.
	for _, method := range []string{check, report} {
		_, err = call(method, &ratelimitv3.RateLimitRequest{Domain: "d", Descriptors: []*common.RateLimitDescriptor{entriesOf("lost", "u")}})
		if status.Code(err) != codes.NotFound {
			t.Errorf("a policy that there is not: %v", err)
		}
		_, err = call(method, &ratelimitv3.RateLimitRequest{Domain: "d", Descriptors: make([]*common.RateLimitDescriptor, 1001)})
		if status.Code(err) != codes.ResourceExhausted {
			t.Errorf("%d descriptors: %v", 1001, err)
		}
	}
	if b.hits["d.minute within_limit"] == 0 || len(intercepted) == 0 {
		t.Errorf("hits %v; the interceptors have seen %d calls", b.hits, len(intercepted))
	}
}

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime/debug"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// serveCommand is the hidden subcommand of the floors' processes. A floor is a server that does no more than a
// transport needs.
const serveCommand = "serve-floor"

// roomyGC is the GOGC of the floors and of the callers. A process that holds no states has a small heap, so at the
// default of 100 it collects many times a second. An echo then costs more than Weir with its larger heap: 21 CPU
// seconds a million calls were measured, in place of 15. The systems that are compared run with their defaults.
const roomyGC = 400

// serveFloor is the process of a floor: it carries the same messages as Weir and decides nothing. It ends with its
// standard input, and so with the harness.
func serveFloor(args []string) error {
	fs := flag.NewFlagSet(serveCommand, flag.ContinueOnError)
	kind := fs.String("kind", "echo", "echo, forward or http")
	to := fs.String("to", "", "address that forward hands calls on to")
	if err := fs.Parse(args); err != nil {
		return err
	}
	debug.SetGCPercent(roomyGC)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	failed := make(chan error, 1)
	switch *kind {
	case "http":
		go func() { failed <- http.Serve(l, http.HandlerFunc(echoHTTP)) }()
	case "echo", "forward":
		s := grpc.NewServer()
		if *kind == "forward" {
			conns, _, err := (&system{nodes: []node{{grpc: *to}}}).dialAll()
			if err != nil {
				return err
			}
			f := new(forwardServer)
			for _, c := range conns[0] {
				f.clients = append(f.clients, weirv1.NewLimiterClient(c))
			}
			weirv1.RegisterLimiterServer(s, f)
		} else {
			weirv1.RegisterLimiterServer(s, newEchoServer())
			ratelimitv3.RegisterRateLimitServiceServer(s, newEnvoyEcho())
		}
		go func() { failed <- s.Serve(l) }()
	default:
		return fmt.Errorf("-kind: %q is not one of echo, forward and http", *kind)
	}
	fmt.Printf("serving %s\n", l.Addr())
	go func() {
		_, err := io.Copy(io.Discard, os.Stdin)
		failed <- err
	}()
	return <-failed
}

// echoServer answers every check with the same decision. Its responses are made in advance, so that it spends time on
// transport only.
type echoServer struct {
	weirv1.UnimplementedLimiterServer
	responses map[int]*weirv1.CheckResponse
}

func newEchoServer() *echoServer {
	e := &echoServer{responses: make(map[int]*weirv1.CheckResponse)}
	for _, n := range []int{1, batchSize, bigBatch} {
		e.responses[n] = echoResponse(n)
	}
	return e
}

// echoResponse returns Weir's answer to admitted checks, with numbers of the usual length.
func echoResponse(checks int) *weirv1.CheckResponse {
	resp := &weirv1.CheckResponse{}
	for range checks {
		resp.Results = append(resp.Results, &weirv1.Result{Outcome: &weirv1.Result_Decision{Decision: &weirv1.Decision{
			Policy: "bucket", Allowed: true, Granted: 1, Limit: limitUnits, Remaining: limitUnits - 2,
			RetryAfterNs: proto.Int64(0), ResetAfterNs: 114_123_456, WindowNs: int64(limitWindow),
		}}})
	}
	return resp
}

func (e *echoServer) Check(_ context.Context, req *weirv1.CheckRequest) (*weirv1.CheckResponse, error) {
	if resp := e.responses[len(req.Checks)]; resp != nil {
		return resp, nil
	}
	return echoResponse(len(req.Checks)), nil
}

// envoyEcho answers every request of Envoy with the same response.
type envoyEcho struct {
	ratelimitv3.UnimplementedRateLimitServiceServer
	response *ratelimitv3.RateLimitResponse
}

func newEnvoyEcho() *envoyEcho {
	const ok, hour = ratelimitv3.RateLimitResponse_OK, ratelimitv3.RateLimitResponse_RateLimit_HOUR
	return &envoyEcho{response: &ratelimitv3.RateLimitResponse{
		OverallCode: ok,
		Statuses: []*ratelimitv3.RateLimitResponse_DescriptorStatus{{
			Code: ok, LimitRemaining: 3_999_999_999, DurationUntilReset: &durationpb.Duration{Seconds: 1800},
			CurrentLimit: &ratelimitv3.RateLimitResponse_RateLimit{RequestsPerUnit: 4_000_000_000, Unit: hour},
		}},
	}}
}

func (e *envoyEcho) ShouldRateLimit(
	context.Context, *ratelimitv3.RateLimitRequest,
) (*ratelimitv3.RateLimitResponse, error) {
	return e.response, nil
}

// forwardServer forwards every call to another process, with as little code as gRPC allows.
type forwardServer struct {
	weirv1.UnimplementedLimiterServer
	clients []weirv1.LimiterClient
}

func (f *forwardServer) Check(ctx context.Context, req *weirv1.CheckRequest) (*weirv1.CheckResponse, error) {
	return f.clients[rand.IntN(len(f.clients))].Check(ctx, req)
}

// echoHTTPBody is Weir's answer over HTTP.
const echoHTTPBody = `{"allowed":true,"granted":1,"limit":1000,"remaining":998,"retry_after_ms":0,` +
	`"reset_after_ms":114,"delay_ms":0,"policy":"bucket",` +
	`"shadow":false,"degraded":false,"failed_open":false,"failed_closed":false}`

// echoHTTP reads a request, and answers with as many bytes and headers as Weir.
func echoHTTP(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("RateLimit", `"bucket";r=998;t=1`)
	h.Set("RateLimit-Policy", `"bucket";q=1000;w=60`)
	h.Set("X-RateLimit-Limit", "1000")
	h.Set("X-RateLimit-Remaining", "998")
	h.Set("X-RateLimit-Reset", "1")
	_, _ = io.WriteString(w, echoHTTPBody) // the caller may be gone
}

package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/gateway/envoy/kuadrantpb"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// A floor is a server that carries the same messages as Weir and decides nothing: what the transport alone costs.
type floor struct {
	address string
	servers []*process
	clients [][]weirv1.LimiterClient
}

// startFloor starts one of the servers of serveFloor as a child of this binary.
func (b *bench) startFloor(ctx context.Context, kind string, args ...string) (*floor, error) {
	p, err := b.kids.start("floor "+kind, b.self, append([]string{serveCommand, "-kind", kind}, args...), nil)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	address, err := p.line(ctx, "serving ")
	if err != nil {
		b.kids.stop(p)
		return nil, err
	}
	f := &floor{address: address, servers: []*process{p}}
	if kind == "echo" || kind == "forward" {
		clients, err := limiterClients(address)
		if err != nil {
			return nil, err
		}
		f.clients = [][]weirv1.LimiterClient{clients}
	}
	return f, nil
}

// startForward starts an echo and a server before it that hands every call on.
func (b *bench) startForward(ctx context.Context) (*floor, error) {
	behind, err := b.startFloor(ctx, "echo")
	if err != nil {
		return nil, err
	}
	f, err := b.startFloor(ctx, "forward", "-to", behind.address)
	if err != nil {
		return nil, err
	}
	f.servers = append(f.servers, behind.servers...)
	return f, nil
}

func limiterClients(address string) ([]weirv1.LimiterClient, error) {
	conns, err := dial(address, connections)
	if err != nil {
		return nil, err
	}
	var clients []weirv1.LimiterClient
	for _, c := range conns {
		clients = append(clients, weirv1.NewLimiterClient(c))
	}
	return clients, nil
}

// checkCaller returns callers that ask batch checks of a random node in each call, over weir.v1. It serves the floors
// and Weir alike, so that their callers are the same to the byte. pick chooses the keys.
func checkCaller(nodes [][]weirv1.LimiterClient, policy string, batch int, pick func(*rand.Rand) string) func(i int) caller {
	return func(i int) caller {
		random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
		req := newCheckRequest(policy, batch)
		return loop(func(ctx context.Context) (int, error) {
			for _, c := range req.Checks {
				c.Target.Key = pick(random)
			}
			node := nodes[random.IntN(len(nodes))]
			resp, err := node[i%len(node)].Check(ctx, req)
			if err != nil {
				return 0, err
			}
			_, err = countAllowed(resp, batch)
			return batch, err
		})
	}
}

func newCheckRequest(policy string, batch int) *weirv1.CheckRequest {
	req := &weirv1.CheckRequest{}
	for range batch {
		req.Checks = append(req.Checks, &weirv1.Check{Target: &weirv1.Target{Policy: policy}})
	}
	return req
}

// countAllowed returns how many checks were admitted, and an error unless all were decided by whoever should.
func countAllowed(resp *weirv1.CheckResponse, checks int) (int, error) {
	if len(resp.Results) != checks {
		return 0, fmt.Errorf("%d results for %d checks", len(resp.Results), checks)
	}
	allowed := 0
	for _, r := range resp.Results {
		d := r.GetDecision()
		switch {
		case d == nil:
			return 0, fmt.Errorf("not decided: %s", r.GetError().GetMessage())
		case d.FailedOpen || d.FailedClosed:
			return 0, errors.New("decided by on_error: the owner did not answer")
		case d.Allowed:
			allowed++
		}
	}
	return allowed, nil
}

// anyKey picks among all keys.
func (b *bench) anyKey(r *rand.Rand) string { return b.keys[r.IntN(len(b.keys))] }

// httpCaller asks one check a call over HTTP.
func httpCaller(client *http.Client, address, policy string, pick func(*rand.Rand) string) func(i int) caller {
	return func(i int) caller {
		random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
		return loop(func(ctx context.Context) (int, error) {
			_, err := checkHTTP(ctx, client, address, policy, pick(random))
			return 1, err
		})
	}
}

// checkHTTP asks POST /v1/check once.
func checkHTTP(ctx context.Context, client *http.Client, address, policy, key string) (allowed bool, err error) {
	body := `{"policy":"` + policy + `","key":"` + key + `"}`
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/v1/check", strings.NewReader(body))
	if err != nil {
		return false, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return false, err
	}
	switch resp.StatusCode {
	case http.StatusOK:
		return true, nil
	case http.StatusTooManyRequests:
		return false, nil
	}
	return false, fmt.Errorf("status %s", resp.Status)
}

// unaryMeasurements compare one node's unary calls, of one check and of many.
func (b *bench) unaryMeasurements() []measurement {
	both := func(work string, callers, batch int) []measurement {
		return []measurement{
			{work: work, system: "echo", run: func(ctx context.Context) (sample, error) {
				f, err := b.echo()
				if err != nil {
					return nil, err
				}
				return b.load(callers, f.servers...).drive(ctx, checkCaller(f.clients, "bucket", batch, b.anyKey))
			}},
			{work: work, system: "weir", run: func(ctx context.Context) (sample, error) {
				w, err := b.weirOne()
				if err != nil {
					return nil, err
				}
				return b.load(callers, w.servers...).drive(ctx, checkCaller(w.clients, "bucket", batch, b.anyKey))
			}},
			// Gubernator's client, and Weir answering it.
			{work: work, system: "weir-v1", run: func(ctx context.Context) (sample, error) {
				w, err := b.weirOne()
				if err != nil {
					return nil, err
				}
				v1 := new(gubCluster)
				if err := v1.dial(w.nodes[0].grpc); err != nil {
					return nil, err
				}
				return b.load(callers, w.servers...).drive(ctx, v1.caller(batch, b.anyKey))
			}},
			{work: work, system: "gubernator", run: func(ctx context.Context) (sample, error) {
				g, err := b.gubOne()
				if err != nil {
					return nil, err
				}
				return b.load(callers, g.servers...).drive(ctx, g.caller(batch, b.anyKey))
			}},
		}
	}
	all := both("unary", unaryCallers, 1)
	all = append(all, both("batch", batchCallers, batchSize)...)
	return append(all, measurement{work: "batch", system: "redis-script", run: func(ctx context.Context) (sample, error) {
		r, err := b.redis()
		if err != nil {
			return nil, err
		}
		return b.load(batchCallers, r.server).drive(ctx, r.pipelineCaller(batchSize, b.anyKey))
	}})
}

func (b *bench) httpMeasurements() []measurement {
	client := newHTTPClient()
	return []measurement{
		{work: "http", system: "echo", run: func(ctx context.Context) (sample, error) {
			f, err := b.echoHTTP()
			if err != nil {
				return nil, err
			}
			return b.load(unaryCallers, f.servers...).drive(ctx, httpCaller(client, f.address, "bucket", b.anyKey))
		}},
		{work: "http", system: "weir", run: func(ctx context.Context) (sample, error) {
			w, err := b.weirOne()
			if err != nil {
				return nil, err
			}
			return b.load(unaryCallers, w.servers...).drive(ctx, httpCaller(client, w.nodes[0].http, "bucket", b.anyKey))
		}},
		{work: "forward-auth", system: "echo", run: func(ctx context.Context) (sample, error) {
			f, err := b.echoHTTP()
			if err != nil {
				return nil, err
			}
			return b.load(unaryCallers, f.servers...).drive(ctx, gatewayCaller(client, f.address, b.anyKey))
		}},
		{work: "forward-auth", system: "weir", run: func(ctx context.Context) (sample, error) {
			w, err := b.weirOne()
			if err != nil {
				return nil, err
			}
			return b.load(unaryCallers, w.servers...).drive(ctx, gatewayCaller(client, w.nodes[0].http, b.anyKey))
		}},
	}
}

// gatewayCaller asks GET /v1/forward-auth as a gateway does, whose own caller's method and headers are not sent along.
func gatewayCaller(client *http.Client, address string, pick func(*rand.Rand) string) func(i int) caller {
	return func(i int) caller {
		random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
		return loop(func(ctx context.Context) (int, error) {
			_, err := askGateway(ctx, client, address, pick(random))
			return 1, err
		})
	}
}

// askGateway asks GET /v1/forward-auth once, and returns the headers of the answer.
func askGateway(ctx context.Context, client *http.Client, address, key string) (http.Header, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+forwardAuth+"?policy=bucket&key="+key, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Weir-Result") == "" {
		return nil, fmt.Errorf("status %s", resp.Status)
	}
	return resp.Header, nil
}

const forwardAuth = "/v1/forward-auth"

// serveCommand is the hidden subcommand of the floors' processes.
const serveCommand = "serve-floor"

// roomyGC is the GOGC of the floors and of the callers. A process that holds no states has so small a heap that at the
// default of 100 it collects many times a second, and an echo then costs more than Weir with its larger heap: measured,
// 21 CPU seconds a million calls in place of 15. A floor must not be hampered by having nothing to hold. The systems that
// are compared run as they come.
const roomyGC = 400

// serveFloor is a floor's process. It ends with its standard input, that is, with the harness.
func serveFloor(args []string) error {
	fs := flag.NewFlagSet(serveCommand, flag.ContinueOnError)
	kind := fs.String("kind", "echo", "echo, forward, http or tcp")
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
	case "tcp":
		go func() { failed <- serveTCP(l) }()
	case "echo", "forward":
		s := grpc.NewServer()
		if *kind == "forward" {
			clients, err := limiterClients(*to)
			if err != nil {
				return err
			}
			weirv1.RegisterLimiterServer(s, &forwardServer{clients: clients})
		} else {
			e := newEchoServer()
			weirv1.RegisterLimiterServer(s, e)
			s.RegisterService(echoService(), e)
			ratelimitv3.RegisterRateLimitServiceServer(s, newEnvoyEcho())
			kuadrantpb.RegisterRateLimitServiceServer(s, newKuadrantEcho())
		}
		go func() { failed <- s.Serve(l) }()
	default:
		return fmt.Errorf("-kind: %q is not one of echo, forward, http and tcp", *kind)
	}
	fmt.Printf("serving %s\n", l.Addr())
	go func() {
		_, err := io.Copy(io.Discard, os.Stdin)
		failed <- err
	}()
	return <-failed
}

// echoServer answers every check with the same decision. The responses are made beforehand: a floor spends nothing on
// what is not transport.
type echoServer struct {
	weirv1.UnimplementedLimiterServer
	responses map[int]*weirv1.CheckResponse
}

func newEchoServer() *echoServer {
	e := &echoServer{responses: make(map[int]*weirv1.CheckResponse)}
	for _, n := range []int{1, batchSize, overloadBatch} {
		e.responses[n] = echoResponse(n)
	}
	return e
}

// echoResponse is what Weir answers to checks that are admitted, with numbers of the usual length.
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

// echoService is the service that echoStream belongs to.
func echoService() *grpc.ServiceDesc {
	return &grpc.ServiceDesc{ServiceName: "weir.bench.Echo", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{*echoStream()}}
}

const echoStreamMethod = "/weir.bench.Echo/Stream"

// echoStream describes a stream of the same messages as the unary call, each answered by one. Weir's interface has none.
func echoStream() *grpc.StreamDesc {
	return &grpc.StreamDesc{
		StreamName: "Stream", ServerStreams: true, ClientStreams: true,
		Handler: func(srv any, stream grpc.ServerStream) error {
			req := new(weirv1.CheckRequest)
			for {
				if err := stream.RecvMsg(req); err != nil {
					if errors.Is(err, io.EOF) {
						return nil
					}
					return err
				}
				resp, err := srv.(*echoServer).Check(stream.Context(), req)
				if err != nil {
					return err
				}
				if err := stream.SendMsg(resp); err != nil {
					return err
				}
			}
		},
	}
}

// forwardServer hands every call on to another process, as simply as gRPC allows.
type forwardServer struct {
	weirv1.UnimplementedLimiterServer
	clients []weirv1.LimiterClient
}

func (f *forwardServer) Check(ctx context.Context, req *weirv1.CheckRequest) (*weirv1.CheckResponse, error) {
	return f.clients[rand.IntN(len(f.clients))].Check(ctx, req)
}

// echoHTTPBody is what Weir answers over HTTP.
const echoHTTPBody = `{"allowed":true,"granted":1,"limit":1000,"remaining":998,"retry_after_ms":0,"reset_after_ms":114,"delay_ms":0,` +
	`"policy":"bucket","shadow":false,"degraded":false,"failed_open":false,"failed_closed":false}`

// echoHTTP reads a request and answers with as many bytes as Weir does, in as many headers: to a gateway without a body.
func echoHTTP(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	h := w.Header()
	gateway := r.URL.Path == forwardAuth
	if gateway {
		h.Set("Cache-Control", "no-store")
		h.Set("Weir-Result", "admitted")
		h.Set("Weir-Status", "200")
	} else {
		h.Set("Content-Type", "application/json")
	}
	h.Set("RateLimit", `"bucket";r=998;t=1`)
	h.Set("RateLimit-Policy", `"bucket";q=1000;w=60`)
	h.Set("X-RateLimit-Limit", "1000")
	h.Set("X-RateLimit-Remaining", "998")
	h.Set("X-RateLimit-Reset", "1")
	if gateway {
		return
	}
	_, _ = io.Copy(w, bytes.NewReader([]byte(echoHTTPBody))) // a caller that is gone is its own affair
}

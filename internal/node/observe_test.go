package node

import (
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonv1 "go.opentelemetry.io/proto/otlp/common/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// collector is an OTLP collector that keeps what it gets.
type collector struct {
	collectorv1.UnimplementedTraceServiceServer
	mu    sync.Mutex
	spans []collected
}

// collected is a span and the node that sent it.
type collected struct {
	*tracev1.Span
	node       string
	attributes map[string]string
}

// Export implements collectorv1.TraceServiceServer.
func (c *collector) Export(_ context.Context, in *collectorv1.ExportTraceServiceRequest) (*collectorv1.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range in.ResourceSpans {
		node := texts(r.Resource.Attributes)["service.instance.id"]
		for _, scope := range r.ScopeSpans {
			for _, s := range scope.Spans {
				c.spans = append(c.spans, collected{s, node, texts(s.Attributes)})
			}
		}
	}
	return &collectorv1.ExportTraceServiceResponse{}, nil
}

func texts(attributes []*commonv1.KeyValue) map[string]string {
	out := make(map[string]string)
	for _, a := range attributes {
		out[a.Key] = a.Value.GetStringValue()
	}
	return out
}

// startCollector serves a collector until the test ends and returns its URL.
func startCollector(t *testing.T) (*collector, string) {
	t.Helper()
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	c := new(collector)
	server := grpc.NewServer()
	collectorv1.RegisterTraceServiceServer(server, c)
	var work sync.WaitGroup
	work.Go(func() { expect.NoError(t, server.Serve(l)) })
	t.Cleanup(func() { server.Stop(); work.Wait() })
	return c, "http://" + l.Addr().String()
}

// path follows a trace from one of its spans up to the caller: "decide b < forward a < decide a < …".
func (c *collector) path(t *testing.T, from collected, caller string) string {
	t.Helper()
	steps := []string{from.Name + " " + from.node}
	for s := from; hex.EncodeToString(s.ParentSpanId) != caller; {
		parent := -1
		for i := range c.spans {
			if string(c.spans[i].SpanId) == string(s.ParentSpanId) && string(c.spans[i].TraceId) == string(s.TraceId) {
				parent = i
			}
		}
		if parent < 0 {
			return strings.Join(append(steps, "nothing"), " < ")
		}
		s = c.spans[parent]
		steps = append(steps, s.Name+" "+s.node)
	}
	return strings.Join(append(steps, "caller"), " < ")
}

// post sends a check with a header, unless its value is empty.
func post(t *testing.T, n *Node, body, header, value string) *http.Response {
	t.Helper()
	r := must.Value(http.NewRequestWithContext(t.Context(), "POST", "http://"+addrOf(n.listeners.http)+"/v1/check", strings.NewReader(body)))(t)
	r.Header.Set("Content-Type", "application/json")
	if value != "" {
		r.Header.Set(header, value)
	}
	resp := must.Value(http.DefaultClient.Do(r))(t)
	resp.Body.Close()
	return resp
}

// TestTraceOverTwoNodes: one call makes one trace, from the API of the node that was asked to the decision of the owner,
// whichever protocol it came over; and it has arrived when the nodes have stopped.
func TestTraceOverTwoNodes(t *testing.T) {
	t.Parallel()
	c, url := startCollector(t)
	nodes := startCluster(t, "a b", func(_ int, cfg *Config) { cfg.OTLPEndpoint, cfg.TraceCallerRate = url, 1000 })
	a, b := nodes[0], nodes[1]
	conn := dialed(t, a)
	const (
		webTrace, web = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
		rpcTrace, rpc = "1af7651916cd43dd8448eb211c80319c", "c7ad6b7169203331"
		// Over a stream, where each check may belong to another trace.
		streamTrace, stream = "2af7651916cd43dd8448eb211c80319c", "d7ad6b7169203331"

		keys = 20
	)
	ids := must.Value(hex.DecodeString(streamTrace + stream))(t)
	checks := must.Value(weirv1.NewLimiterClient(conn).CheckStream(t.Context()))(t)
	// The same keys over both protocols of a, among them surely some of b's; and once without a trace.
	for k := range keys {
		key := fmt.Sprintf("secret-%d", k)
		ask := func(traceparent string) {
			resp := post(t, a, fmt.Sprintf(`{"policy":"login","key":%q}`, key), "Traceparent", traceparent)
			must.Equal(t, resp.StatusCode, http.StatusOK, "status")
		}
		ask("00-" + webTrace + "-" + web + "-01")
		ask("00-" + webTrace + "-" + web + "-00")
		ask("")
		ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+rpcTrace+"-"+rpc+"-01")
		question := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "login", Key: key}}}}
		if _, err := weirv1.NewLimiterClient(conn).Check(ctx, question); err != nil {
			t.Fatal(err)
		}
		err := checks.Send(&weirv1.CheckStreamRequest{
			Sequence: uint64(k), Define: []*weirv1.StreamTarget{{Policy: "login"}}, Keys: []byte(key + key),
			KeyLengths: []uint32{uint32(len(key)), uint32(len(key))}, TraceContexts: [][]byte{ids, nil},
		})
		for more := true; more; {
			var out *weirv1.CheckStreamResponse
			if err == nil {
				out, err = checks.Recv()
			}
			must.True(t, err == nil && out.Error == nil, "%v %v", out, err)
			more = out.More
		}
	}
	http.DefaultClient.CloseIdleConnections()
	b.Stop()
	a.Stop()

	c.mu.Lock()
	defer c.mu.Unlock()
	paths := make(map[string]int)
	for _, s := range c.spans {
		for name, value := range s.attributes {
			expect.True(t, !strings.Contains(value, "secret"), "%s of a span is %q", name, value)
		}
		caller := web
		if hex.EncodeToString(s.TraceId) == rpcTrace {
			caller = rpc
		} else if hex.EncodeToString(s.TraceId) == streamTrace {
			caller = stream
		}
		p := c.path(t, s, caller)
		paths[p]++
		expect.True(t, s.Name != "decide" || s.node != "b" || s.attributes["weir.policy"] == "login" &&
			s.attributes["weir.result"] == "allowed" && s.attributes["weir.term"] != "", "%s: %v", p, s.attributes)
		expect.True(t, s.Name != "forward" || s.attributes["weir.peer"] == "b", "%s: %v", p, s.attributes)
	}
	for _, call := range []string{"POST /v1/check a < caller", "weir.v1.Limiter/Check a < caller", "weir.v1.Limiter/CheckStream a < caller"} {
		remote := paths["decide b < forward a < decide a < "+call]
		expect.True(t, remote != 0 && remote != keys, "%d of %d keys were decided by b", remote, keys)
		expect.True(t, paths[call] == keys && paths["decide a < "+call] == keys &&
			paths["forward a < decide a < "+call] == remote, "under %s", call)
	}
	expect.True(t, len(paths) == 12 && !t.Failed(), "paths: %v", paths)
}

// TestCallErrors: an error over gRPC has an id, which the log has too, and is counted; none of it says the key.
func TestCallErrors(t *testing.T) {
	t.Parallel()
	var log testkit.Buffer
	cfg := testConfig(t, "a")
	cfg.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	n := mustSettle(t, cfg)
	conn := dialed(t, n)
	for given, kept := range map[string]bool{"my-id": true, "": false, "not sane": false} {
		ctx := t.Context()
		if given != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, requestIDKey, given)
		}
		var trailer metadata.MD
		question := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "none", Key: "secret"}}}}
		_, err := weirv1.NewLimiterClient(conn).Check(ctx, question, grpc.Trailer(&trailer))
		ids := trailer.Get(requestIDKey)
		must.True(t, status.Code(err) == codes.NotFound && len(ids) == 1 && (ids[0] == given) == kept,
			"%q: %v, ids %q", given, err, ids)
		line := "request_id=" + ids[0] + " method=/weir.v1.Limiter/Check code=NotFound"
		expect.True(t, strings.Contains(log.String(), line), "%q: no %q in the log", given, line)
	}
	expect.True(t, !strings.Contains(log.String(), "secret"), "the log says the key:\n%s", log.String())
	post(t, n, "{}", "X-Request-Id", "my-id")
	page := scrape(t, n)
	errors := page["weir_call_errors_total"]["code"]
	expect.True(t, errors["NotFound"] && errors["400"], "counted: %v", errors)
}

// TestNoCollector: a collector that is away holds nobody up.
func TestNoCollector(t *testing.T) {
	leavesNothing(t, func() {
		cfg := testConfig(t, "a")
		cfg.OTLPEndpoint, cfg.TraceSample = "http://127.0.0.1:1", 1
		n := mustSettle(t, cfg)
		resp := post(t, n, `{"policy":"login","key":"alice"}`, "Traceparent", "")
		expect.Equal(t, resp.StatusCode, http.StatusOK, "status")
		n.Stop()
	})
}

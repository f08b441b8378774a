package node

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonv1 "go.opentelemetry.io/proto/otlp/common/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
	"github.com/weirlimit/weir/test/testkit/certstest"
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
func (c *collector) Export(_ context.Context,
	in *collectorv1.ExportTraceServiceRequest) (*collectorv1.ExportTraceServiceResponse, error) {
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
	c := new(collector)
	return c, "http://" + testkit.Serve(t,
		func(r grpc.ServiceRegistrar) { collectorv1.RegisterTraceServiceServer(r, c) })
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

// TestTraceOverTwoNodes: one call makes one trace, from the API of the node that was asked to the decision of the
// owner, whichever protocol it came over; and it has arrived when the nodes have stopped.
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
			body := fmt.Sprintf(`{"policy":"login","key":%q}`, key)
			resp, _ := send(t, a, "POST", "/v1/check", "", body, "Traceparent", traceparent)
			must.Equal(t, resp.StatusCode, http.StatusOK, "status")
		}
		ask("00-" + webTrace + "-" + web + "-01")
		ask("00-" + webTrace + "-" + web + "-00")
		ask("")
		ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+rpcTrace+"-"+rpc+"-01")
		question := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "login", Key: key}}}}
		_, err := weirv1.NewLimiterClient(conn).Check(ctx, question)
		must.NoError(t, err)
		err = checks.Send(&weirv1.CheckStreamRequest{
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
	for _, call := range []string{"POST /v1/check a < caller", "weir.v1.Limiter/Check a < caller",
		"weir.v1.Limiter/CheckStream a < caller"} {
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
		question := &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "none",
			Key: "secret"}}}}
		_, err := weirv1.NewLimiterClient(conn).Check(ctx, question, grpc.Trailer(&trailer))
		ids := trailer.Get(requestIDKey)
		must.True(t, status.Code(err) == codes.NotFound && len(ids) == 1 && (ids[0] == given) == kept,
			"%q: %v, ids %q", given, err, ids)
		line := "request_id=" + ids[0] + " method=/weir.v1.Limiter/Check code=NotFound"
		expect.True(t, strings.Contains(log.String(), line), "%q: no %q in the log", given, line)
	}
	expect.True(t, !strings.Contains(log.String(), "secret"), "the log says the key:\n%s", log.String())
	send(t, n, "POST", "/v1/check", "", "{}", "X-Request-Id", "my-id")
	page := scrape(t, n)
	expect.True(t, page[`code="NotFound"`] && page[`code="400"`], "counted: %v", page)
}

// TestNoCollector: a collector that is away holds nobody up.
func TestNoCollector(t *testing.T) {
	leavesNothing(t, func() {
		cfg := testConfig(t, "a")
		cfg.OTLPEndpoint, cfg.TraceSample = "http://127.0.0.1:1", 1
		n := mustSettle(t, cfg)
		resp, _ := send(t, n, "POST", "/v1/check", "", `{"policy":"login","key":"alice"}`)
		expect.Equal(t, resp.StatusCode, http.StatusOK, "status")
		n.Stop()
	})
}

// auditLines are the lines of an audit log, without their times.
func auditLines(t *testing.T, name string) (lines []string) {
	t.Helper()
	data := must.Value(os.ReadFile(name))(t)
	for line := range strings.Lines(string(data)) {
		fields := make(map[string]any)
		must.NoError(t, json.Unmarshal([]byte(line), &fields), "%q", line)
		from, _ := fields["from"].(string)
		expect.True(t, strings.HasPrefix(from, "127.0.0.1:"), "%q does not say from where", line)
		lines = append(lines, fmt.Sprint(fields["msg"], " ", fields["caller"], " ", fields["credential"], " ",
			fields["listener"], " ", fields["policy"], " ", fields["key"], " ", fields["reason"]))
	}
	return lines
}

// TestAuditLog: every refund, reset and denied call is on record, with who, what and from where, and checks are not.
func TestAuditLog(t *testing.T) {
	name := filepath.Join(t.TempDir(), "audit.log")
	n, shop, all, _ := withAccess(t, func(cfg *Config) {
		cfg.Security.AuditLog = name
		cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(onePolicy, 3))
	})
	for _, c := range []struct {
		path, token, body string
		status            int
	}{
		{"/v1/check", all, `{"policy": "login", "key": "alice"}`, 200},
		{"/v1/refund", all, `{"policy": "login", "key": "alice", "cost": 1}`, 200},
		{"/v1/reset", all, `{"policy": "login", "key": "alice"}`, 200},
		{"/v1/reset", all, `{"policy": "none", "key": "alice"}`, 404},
		{"/v1/refund", shop, `{"policy": "login", "key": "alice", "cost": 1}`, 403},
		{"/v1/check", shop, `{"policy": "payout", "key": "alice"}`, 403},
		{"/v1/check", "", `{"policy": "login", "key": "alice"}`, 401},
		{"/v1/check", "weir_wrong", `{"policy": "login", "key": "alice"}`, 401},
	} {
		resp, text := send(t, n, "POST", c.path, c.token, c.body)
		expect.True(t, resp.StatusCode == c.status, "%s %s: %d %s", c.path, c.body, resp.StatusCode, text)
	}
	want := []string{
		"refund everything token http login alice <nil>",
		"reset everything token http login alice <nil>",
		"reset everything token http none alice <nil>",
		"denied shop token http <nil> <nil> wrong_role",
		"denied shop token http payout <nil> wrong_policy",
		"denied  none http <nil> <nil> no_credentials",
		"denied  token http <nil> <nil> bad_token",
	}
	if got := auditLines(t, name); strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	// And a key is counted to the caller who has made it.
	send(t, n, "POST", "/v1/check", all, `{"policy": "login", "key": "bob"}`)
	_, _, callers := n.limiter.Shares()
	expect.True(t, len(callers) == 1 && callers[0].Name == "everything" && callers[0].Keys == 1, "%+v", callers)
	data := must.Value(os.ReadFile(name))(t)
	expect.True(t, !strings.Contains(string(data), shop) && !strings.Contains(string(data), all) &&
		!strings.Contains(string(data), "weir_wrong"), "the audit log has a token")
}

// TestAuditLogWithoutAccessFile: refunds are on record although everybody may.
func TestAuditLogWithoutAccessFile(t *testing.T) {
	t.Parallel()
	name := filepath.Join(t.TempDir(), "audit.log")
	cfg := testConfig(t, "node")
	cfg.Security.AuditLog = name
	cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(onePolicy, 3))
	n := mustSettle(t, cfg)
	send(t, n, "POST", "/v1/refund", "", `{"policy": "login", "key": "alice", "cost": 1}`)
	got := auditLines(t, name)
	expect.Equal(t, strings.Join(got, "\n"), "refund everybody none http login alice <nil>", "%q", got)
	_, _, callers := n.limiter.Shares()
	expect.True(t, len(callers) == 0 || callers[0].Name == "", "%+v", callers)
}

// TestAuditOfGossipKeys: a step by command is on record on the node that was asked, with who, and on the others; one by
// a file too.
func TestAuditOfGossipKeys(t *testing.T) {
	t.Parallel()
	names := make(map[string]string)
	dir := t.TempDir()
	nodes := secureCluster(t, slog.New(slog.DiscardHandler), certstest.NewAuthority(t, "a"), func(_ int, cfg *Config) {
		cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(onePolicy, 3))
		cfg.Security.GossipKeyFile = testkit.WriteFile(t, "gossip.keys", gossipText(1))
		names[cfg.Name] = filepath.Join(dir, cfg.Name)
		cfg.Security.AuditLog = names[cfg.Name]
	})
	local := peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}})
	step := func(action weirv1.KeyAction) {
		t.Helper()
		_, err := nodes[0].keys.GossipKeys(local, &weirv1.GossipKeysRequest{Action: action, Key: gossipKey(2)})
		must.NoError(t, err)
	}
	step(weirv1.KeyAction_KEY_ACTION_LIST)
	step(weirv1.KeyAction_KEY_ACTION_ADD)
	for i, n := range nodes {
		data := must.Value(os.ReadFile(names[n.cfg.Name]))(t)
		listener := `"listener":"peer"`
		if i == 0 {
			listener = `"listener":"grpc"`
		}
		text := string(data)
		expect.True(t, strings.Count(text, "\n") == 1 && strings.Contains(text, `"msg":"gossip_key"`) &&
			strings.Contains(text, `"what":"add `) && strings.Contains(text, listener), "%s: %s", n.cfg.Name, text)
	}
}

package conformance

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/wrapperspb"

	gubernatorpb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	"github.com/weirlimit/weir/internal/node"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

func protocols(t *testing.T, nodes []*node.Node) []*protocol {
	conns := make(map[*node.Node]*grpc.ClientConn)
	for _, n := range nodes {
		conns[n] = testkit.Dial(t, n.GRPCAddr(), grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wire.Codec())))
	}
	g := &rpc{conns}
	return []*protocol{
		{name: "http", fields: map[string]string{"limit.period": "limit.window"}, ask: askHTTP},
		{name: "forward-auth", anyKey: true, ask: forwardAuth},
		{name: "grpc", fields: map[string]string{"limit.ttl": "limit.window"}, ask: g.unary},
		{name: "stream", ask: g.stream},
		{name: "resp", anyKey: true, noKinds: true, ask: askRESP},
		{name: "throttle", anyKey: true, noKinds: true, ask: askRESP},
		{name: "gubernator", anyKey: true, noKinds: true, ask: g.gubernator},
		{name: "gubernator-json", anyKey: true, noKinds: true, ask: gubernatorJSON},
		{name: "envoy", anyKey: true, noRest: true, ask: g.envoy},
		{name: "envoy-json", anyKey: true, noKinds: true, noRest: true, ask: envoyJSON},
	}
}

// kinds are those of errors, by the status of HTTP and by the code of gRPC.
var kinds = map[int]string{
	400: "invalid", 401: "unauthenticated", 403: "denied", 404: "not_found", 413: "too_large", 431: "too_large",
	int(codes.InvalidArgument): "invalid", int(codes.Unauthenticated): "unauthenticated",
	int(codes.PermissionDenied): "denied",
	int(codes.NotFound):         "not_found", int(codes.ResourceExhausted): "too_large",
}

// post sends JSON with a caller's token.
func post(t *testing.T, n *node.Node, path, as string, body []byte) (int, []byte) {
	t.Helper()
	r := must.Value(http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+n.HTTPAddr()+path,
		bytes.NewReader(body)))(t)
	r.Header.Set("Content-Type", "application/json")
	if token := tokens[as]; token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	resp := must.Value(http.DefaultClient.Do(r))(t)
	defer resp.Body.Close()
	return resp.StatusCode, must.Value(io.ReadAll(resp.Body))(t)
}

// operations are where a call goes: the path of HTTP, the method of gRPC, and the list that calls are elements of;
// empty: none.
var operations = map[string]struct{ path, method, list string }{
	"check": {"/v1/checks", "Check", "checks"}, "peek": {"/v1/checks", "Check", "checks"},
	"atomic":  {"/v1/checks", "Check", "checks"},
	"acquire": {"/v1/acquire", "Acquire", ""}, "renew": {"/v1/renew", "Renew", ""},
	"release": {"/v1/release", "Release", ""},
	"reserve": {"/v1/reserve", "Reserve", ""}, "extend": {"/v1/extend", "Extend", ""},
	"commit": {"/v1/commit", "Commit", ""},
	"cancel": {"/v1/cancel", "Cancel", ""}, "charge": {"/v1/charge", "Charge", ""},
	"refund": {"/v1/refund", "Refund", ""}, "reset": {"/v1/reset", "Reset", ""},
	"reserveall": {"/v1/reserves", "ReserveAll", "reserves"}, "extendall": {"/v1/extends", "ExtendEach", "extends"},
	"commitall": {"/v1/commits", "CommitEach", "commits"},
}

type object = map[string]any

// request is calls as one JSON object: of HTTP, or of a message of gRPC.
func request(calls []call, list string, message bool) object {
	if list == "" {
		return calls[0].object(message)
	}
	all := make([]object, len(calls))
	for i := range calls {
		all[i] = calls[i].object(message)
	}
	whole := object{list: all}
	if calls[0].op == "atomic" {
		whole["atomic"] = true
	}
	return whole
}

// object is a call as HTTP has it, or as weir.v1 has it in JSON. The key of HTTP is put in afterwards, for it need not
// be UTF-8.
func (c *call) object(message bool) object {
	o, target := object{}, object{"key": "KEY"}
	set := func(name string, value any, given bool) {
		if given {
			o[name] = value
		}
	}
	set("cost", c.amount(), c.cost != nil || c.op == "peek")
	set("usage", c.usage, c.usage != nil)
	set("partial", true, c.partial)
	set("request_id", c.rid, c.rid != "")
	set("class", c.class, c.class != "")
	set(map[bool]string{true: "lease_id", false: "reservation_id"}[c.op == "renew" || c.op == "release"], c.id,
		c.id != "")
	if c.policy != "" {
		target["policy"] = c.policy
	}
	if message {
		target["key"] = c.key
		if c.limit != nil {
			target["limit"] = c.limitMessage()
		}
		set("overrun", "OVERRUN_ERROR", c.exact)
		set("ttl_ns", c.ttl, c.ttl != 0)
		o["target"] = target
		return o
	}
	set("overrun", "error", c.exact)
	set("ttl", c.ttl.String(), c.ttl != 0)
	if c.limit != nil {
		window := map[bool]string{true: "ttl", false: "window"}[c.limit[0] == "concurrency"]
		limit := object{"algorithm": c.limit[0], "limit": json.Number(c.limit[1]), window: c.limit[2]}
		if c.limit[2] == "month" {
			limit["align"] = "calendar"
		}
		target["limit"] = limit
	}
	maps.Copy(o, target)
	return o
}

func (c *call) limitMessage() object {
	l := object{"algorithm": "ALGORITHM_" + strings.ToUpper(c.limit[0]), "limit": c.limit[1]}
	if c.limit[0] == "guess" {
		l["algorithm"] = 99
	}
	if window, err := time.ParseDuration(c.limit[2]); err == nil {
		l["window_ns"] = window
	} else {
		l["period"] = "PERIOD_" + strings.ToUpper(c.limit[2])
	}
	return l
}

// answers are what an object of HTTP or gRPC says: a decision, an error, what was given back, or a list of these.
func answers(o object) (all []answer) {
	for _, list := range []string{"decisions", "results"} {
		elements, _ := o[list].([]any)
		for _, e := range elements {
			all = append(all, answers(e.(object))...)
		}
	}
	if len(all) > 0 {
		return all
	}
	for _, outcome := range []string{"decision", "settled"} {
		if of, ok := o[outcome].(object); ok {
			return answers(of)
		}
	}
	// 0 where there is none
	number := func(name string) (n int64) { _, _ = fmt.Sscan(fmt.Sprint(o[name]), &n); return n }
	text := func(name string) string { s, _ := o[name].(string); return s }
	switch e, bad := o["error"].(object); {
	case bad:
		code, _ := strconv.Atoi(fmt.Sprint(cmp.Or(e["status"], e["code"])))
		return failed(kinds[code], wire.FieldOf(fmt.Sprint(e["field"])))
	case o["allowed"] != nil:
		return []answer{decided(o["allowed"].(bool), number("remaining"), text("lease_id")+text("reservation_id"))}
	case o["released"] != nil:
		return []answer{given(map[bool]int64{true: 1}[o["released"].(bool)], 0)}
	case o["refunded"] != nil:
		return []answer{given(number("refunded"), number("excess"))}
	}
	return []answer{{text: "ok"}}
}

func askHTTP(t *testing.T, n *node.Node, calls []call) []answer {
	c := &calls[0]
	to := operations[c.op]
	if len(calls) == 1 && (c.op == "check" || c.op == "peek") {
		to.path, to.list = "/v1/check", ""
	}
	body := must.Value(json.Marshal(request(calls, to.list, false)))(t)
	for i := range calls {
		body = bytes.Replace(body, []byte(`"KEY"`), []byte(`"`+calls[i].key+`"`), 1)
	}
	code, text := post(t, n, to.path, c.as, body)
	got := object{}
	must.NoError(t, json.Unmarshal(text, &got), "%s", text)
	if kind := kinds[code]; kind != "" {
		field, _ := got["field"].(string)
		return failed(kind, field)
	}
	return answers(got)
}

// forwardAuth asks as gateways do, about one call after the other.
func forwardAuth(t *testing.T, n *node.Node, calls []call) (all []answer) {
	for i := range calls {
		c := &calls[i]
		query := url.Values{"policy": {c.policy}, "key": {c.key}, "cost": {fmt.Sprint(c.amount())}}
		r := must.Value(http.NewRequestWithContext(t.Context(), http.MethodGet,
			"http://"+n.HTTPAddr()+"/v1/forward-auth?"+query.Encode(), nil))(t)
		if token := tokens[c.as]; token != "" {
			r.Header.Set("Weir-Authorization", "Bearer "+token)
		}
		resp := must.Value(http.DefaultClient.Do(r))(t)
		defer resp.Body.Close()
		if kind := kinds[resp.StatusCode]; kind != "" {
			var problem struct{ Field string }
			_ = json.NewDecoder(resp.Body).Decode(&problem) // net/http itself answers 431, in plain text
			all = append(all, failed(kind, problem.Field)...)
			continue
		}
		left := must.Value(strconv.ParseInt(resp.Header.Get("X-RateLimit-Remaining"), 10, 64))(t)
		all = append(all, decided(resp.StatusCode == http.StatusOK, left, ""))
	}
	return all
}

// rpc is what is asked over gRPC.
type rpc struct {
	conns map[*node.Node]*grpc.ClientConn
}

func (g *rpc) as(t *testing.T, c *call) context.Context {
	ctx := context.Context(t.Context())
	if token := tokens[c.as]; token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	return ctx
}

// rejected is the answer of a gRPC error.
func rejected(err error) []answer {
	s := status.Convert(err)
	field, _, named := strings.Cut(s.Message(), ": ")
	if !named || s.Code() == codes.Unauthenticated || field == "grpc" { // whose own errors begin with it
		field = ""
	}
	return failed(kinds[int(s.Code())], wire.FieldOf(field))
}

func (g *rpc) unary(t *testing.T, n *node.Node, calls []call) []answer {
	to := operations[calls[0].op]
	method := weirv1.File_weir_v1_limiter_proto.Services().ByName("Limiter").Methods().ByName(
		protoreflect.Name(to.method))
	message := func(d protoreflect.MessageDescriptor) proto.Message {
		return must.Value(protoregistry.GlobalTypes.FindMessageByName(d.FullName()))(t).New().Interface()
	}
	in, out := message(method.Input()), message(method.Output())
	body := must.Value(json.Marshal(request(calls, to.list, true)))(t)
	must.NoError(t, protojson.Unmarshal(body, in), "%s", body)
	if err := g.conns[n].Invoke(g.as(t, &calls[0]), "/weir.v1.Limiter/"+to.method, in, out); err != nil {
		return rejected(err)
	}
	got := object{}
	text := must.Value(protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(out))(t)
	must.NoError(t, json.Unmarshal(text, &got))
	return answers(got)
}

// one is the answer to a call that may have failed.
func one(err error, answers func() []answer) []answer {
	if err != nil {
		return rejected(err)
	}
	return answers()
}

// stream asks over CheckStream, each time on a new one.
func (g *rpc) stream(t *testing.T, n *node.Node, calls []call) []answer {
	ctx, cancel := context.WithCancel(g.as(t, &calls[0]))
	defer cancel()
	stream := must.Value(weirv1.NewLimiterClient(g.conns[n]).CheckStream(ctx))(t)
	in := new(weirv1.CheckStreamRequest)
	for i := range calls {
		c := &calls[i]
		in.Define = append(in.Define, &weirv1.StreamTarget{Number: uint32(i), Policy: c.policy})
		in.Targets, in.Costs = append(in.Targets, uint32(i)), append(in.Costs, c.amount())
		in.Partial, in.RequestIds = append(in.Partial, c.partial), append(in.RequestIds, c.rid)
		in.Keys, in.KeyLengths = append(in.Keys, c.key...), append(in.KeyLengths, uint32(len(c.key)))
	}
	_ = stream.Send(in) // Recv tells
	answers := make([]answer, len(calls))
	for more := true; more; {
		out, err := stream.Recv()
		if err != nil {
			return rejected(err)
		}
		if e := out.Error; e != nil {
			return failed(kinds[int(e.Code)], wire.FieldOf(e.Field))
		}
		more = out.More
		for j := range max(len(out.Checks), len(calls)) {
			i := j
			if len(out.Checks) > 0 || more {
				if j >= len(out.Checks) {
					break
				}
				i = int(out.Checks[j])
			}
			allowed := wire.At(out.Flags, j, 0)&uint32(weirv1.StreamFlag_STREAM_FLAG_ALLOWED) != 0
			answers[i] = decided(allowed, wire.At(out.Remaining, j, 0), "")
		}
		for _, e := range out.Errors {
			answers[e.Check] = failed(kinds[int(e.Error.Code)], wire.FieldOf(e.Error.Field))[0]
		}
	}
	return answers
}

// askRESP sends commands on a connection of their own, and reads all that is answered. For the policy five CL.THROTTLE
// has a bucket.
func askRESP(t *testing.T, n *node.Node, calls []call) (answers []answer) {
	conn := must.Value(net.Dial("tcp", n.RESPAddr()))(t)
	defer conn.Close()
	var in strings.Builder
	send := func(args ...string) {
		fmt.Fprintf(&in, "*%d\r\n", len(args))
		for _, a := range args {
			fmt.Fprintf(&in, "$%d\r\n%s\r\n", len(a), a)
		}
	}
	login := tokens[calls[0].as] != ""
	if login {
		send("AUTH", tokens[calls[0].as])
	}
	for i := range calls {
		c := &calls[i]
		cost := strconv.FormatInt(c.amount(), 10)
		switch {
		case strings.HasPrefix(t.Name(), "TestProtocols/throttle"):
			send("CL.THROTTLE", c.key, "4", "5", "3600", cost)
		case c.op == "peek":
			send("WEIR.PEEK", c.policy, c.key)
		default:
			send("WEIR.CHECK", c.policy, c.key, cost)
		}
	}
	go func() {
		_, _ = io.WriteString(conn, in.String()) // the answers tell
		_ = conn.(*net.TCPConn).CloseWrite()     // likewise
	}()
	out, _ := io.ReadAll(conn) // a connection that is closed with something unread is reset
	lines := strings.Split(strings.TrimSuffix(string(out), "\r\n"), "\r\n")
	if login && lines[0] == "+OK" {
		lines = lines[1:]
	}
	for len(lines) > 0 && len(answers) < len(calls) {
		switch number := func(i int) int64 { n, _ := strconv.ParseInt(lines[i][1:], 10, 64); return n }; lines[0] {
		case "*5":
			answers = append(answers, decided(number(1) == 0, number(3), ""))
			lines = lines[6:]
		case "*22":
			answers = append(answers, decided(number(3) == 1, number(9), "")) // lines of lengths and names, too
			lines = lines[1+3*11:]
		default:
			kind := map[string]string{"-NOPERM": "denied", "-NOAUTH": "unauthenticated",
				"-WRONGPASS": "unauthenticated"}[strings.Fields(lines[0])[0]]
			answers = append(answers, failed(kind, "")...)
			lines = lines[1:]
		}
	}
	return answers
}

// rateLimits is a request of Gubernator's, in which the policies are windows that the first hit opens.
func rateLimits(calls []call) *gubernatorpb.GetRateLimitsReq {
	in := new(gubernatorpb.GetRateLimitsReq)
	for i := range calls {
		c := &calls[i]
		r := &gubernatorpb.RateLimitReq{Name: c.policy, UniqueKey: c.key, Hits: c.amount(), Limit: 5,
			Duration: 3600_000}
		if c.partial {
			r.Behavior = gubernatorpb.Behavior_DRAIN_OVER_LIMIT
		}
		in.Requests = append(in.Requests, r)
	}
	return in
}

func rateLimited(list []*gubernatorpb.RateLimitResp) (answers []answer) {
	for _, r := range list {
		if r.Error == "" {
			answers = append(answers, decided(r.Status == gubernatorpb.Status_UNDER_LIMIT, r.Remaining, ""))
			continue
		}
		kind := ""
		if strings.Contains(r.Error, " may not ") {
			kind = "denied"
		}
		answers = append(answers, failed(kind, "")...)
	}
	return answers
}

func (g *rpc) gubernator(t *testing.T, n *node.Node, calls []call) []answer {
	out, err := gubernatorpb.NewV1Client(g.conns[n]).GetRateLimits(g.as(t, &calls[0]), rateLimits(calls))
	return one(err, func() []answer { return rateLimited(out.Responses) })
}

func gubernatorJSON(t *testing.T, n *node.Node, calls []call) []answer {
	body := must.Value(protojson.Marshal(rateLimits(calls)))(t)
	code, text := post(t, n, "/v1/GetRateLimits", calls[0].as, body)
	if code != http.StatusOK {
		return failed(kinds[code], "")
	}
	out := new(gubernatorpb.GetRateLimitsResp)
	must.NoError(t, protojson.Unmarshal(text, out))
	return rateLimited(out.Responses)
}

// descriptors are a request of Envoy's, in which a policy is a key.
func descriptors(calls []call) *ratelimitv3.RateLimitRequest {
	in := &ratelimitv3.RateLimitRequest{Domain: "edge"}
	for i := range calls {
		c := &calls[i]
		in.Descriptors = append(in.Descriptors, &common.RateLimitDescriptor{
			Entries:    []*common.RateLimitDescriptor_Entry{{Key: c.policy, Value: c.key}},
			HitsAddend: wrapperspb.UInt64(uint64(c.amount())),
		})
	}
	return in
}

func statuses(out *ratelimitv3.RateLimitResponse) (answers []answer) {
	for _, s := range out.Statuses {
		answers = append(answers, decided(s.Code == ratelimitv3.RateLimitResponse_OK, int64(s.LimitRemaining), ""))
	}
	return answers
}

func (g *rpc) envoy(t *testing.T, n *node.Node, calls []call) []answer {
	out, err := ratelimitv3.NewRateLimitServiceClient(g.conns[n]).ShouldRateLimit(g.as(t, &calls[0]),
		descriptors(calls))
	return one(err, func() []answer { return statuses(out) })
}

func envoyJSON(t *testing.T, n *node.Node, calls []call) []answer {
	code, text := post(t, n, "/json", calls[0].as, must.Value(protojson.Marshal(descriptors(calls)))(t))
	if code != http.StatusOK && code != http.StatusTooManyRequests {
		return failed(kinds[code], "")
	}
	out := new(ratelimitv3.RateLimitResponse)
	must.NoError(t, protojson.Unmarshal(text, out))
	return statuses(out)
}

package gubernator

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/algo"
	pb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
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
	past atomic.Int64 // nanoseconds since start
}

func (b *bench) now() time.Time { return start.Add(time.Duration(b.past.Load())) }

func newBench(t testing.TB, change ...func(*limiter.Config)) *bench {
	t.Helper()
	b := &bench{t: t}
	cfg := limiter.Config{InlineMaxWindow: algo.MaxWindow, Clock: func() algo.Instant {
		now := b.now()
		return algo.Instant{Mono: now.Sub(start).Nanoseconds(), Wall: now.UnixNano()}
	}}
	for _, f := range change {
		f(&cfg)
	}
	l := limiter.New(cfg)
	t.Cleanup(l.Close)
	b.Server = New(Config{
		Service: l, Owner: func(context.Context) func(uint64) string { return nil }, Now: b.now,
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

func request(a pb.Algorithm, limit, duration int64) *pb.RateLimitReq {
	return &pb.RateLimitReq{Name: "requests", UniqueKey: "account:1", Algorithm: a, Limit: limit, Duration: duration}
}

//go:embed testdata/steps.txt
var steps string

// TestSteps: each request of a case is answered as its line says.
func TestSteps(t *testing.T) {
	words := strings.NewReplacer("K1025", strings.Repeat("k", 1025), "N245", strings.Repeat("n", 245), "N246",
		strings.Repeat("n", 246))
	for _, text := range strings.Split(steps, "\n== ")[1:] {
		name, lines, _ := strings.Cut(text, "\n")
		t.Run(name, func(t *testing.T) {
			b, fields := fresh(t)
			for _, line := range strings.Split(strings.TrimSpace(lines), "\n") {
				step, _, _ := strings.Cut(line, " ; ")
				asked, want, _ := strings.Cut(words.Replace(step), " => ")
				for _, word := range strings.Fields(asked) {
					if after, passes := strings.CutPrefix(word, "+"); passes {
						b.past.Add(int64(must.Value(time.ParseDuration(after))(t)))
					} else if name, value, given := strings.Cut(word, ":"); given {
						fields[name] = value
					} else {
						b, fields = fresh(t)
					}
				}
				expect.Equal(t, b.answerTo(fields, strings.HasSuffix(want, " -")), want, line)
			}
		})
	}
}

// fresh is a node that knows nothing, and the fields of a request.
func fresh(t *testing.T) (*bench, map[string]string) {
	return newBench(t), map[string]string{"name": `"requests"`, "unique_key": `"account:1"`, "limit": "10",
		"duration": "60000"}
}

// answerTo is what a line says of the answer to a request.
func (b *bench) answerTo(fields map[string]string, anyReset bool) string {
	b.t.Helper()
	var text strings.Builder
	for name, value := range fields {
		text.WriteString(name + ":" + value + " ")
	}
	r := new(pb.RateLimitReq)
	must.NoError(b.t, prototext.Unmarshal([]byte(text.String()), r))
	got := b.ask(r)[0]
	if got.Error != "" {
		return "error " + got.Error
	}
	expect.Equal(b.t, got.Limit, r.Limit)
	status, reset := map[pb.Status]string{under: "under", over: "over"}[got.Status],
		fmt.Sprint(got.ResetTime-b.now().UnixMilli())
	if anyReset {
		reset = "-"
	} else if got.ResetTime == 0 {
		reset = "none"
	}
	return fmt.Sprint(status, " ", got.Remaining, " ", reset)
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
	got := b.ask(hit(), hit(), hit(), hit(func(r *pb.RateLimitReq) { r.UniqueKey = "" }),
		hit(func(r *pb.RateLimitReq) { r.Behavior = pb.Behavior_RESET_REMAINING }), hit(),
		hit(func(r *pb.RateLimitReq) { r.Name = "" }))
	for i, want := range []struct {
		status    pb.Status
		remaining int64
		err       string
	}{
		{under, 1, ""}, {under, 0, ""}, {over, 0, ""}, {under, 0, "field 'unique_key' cannot be empty"}, {under, 2, ""},
		{under, 1, ""},
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
}

// TestBoundsOfInlineLimits: a node's settings, and text that is none.
func TestBoundsOfInlineLimits(t *testing.T) {
	noText := request(token, 10, 1000)
	noText.Name = "\xff"
	got := newBench(t).ask(noText)[0]
	expect.True(t, got.Error == "field 'name' is not valid UTF-8", "a name that is no text: %v", got)
	bounded := newBench(t, func(c *limiter.Config) { c.InlineMaxWindow = time.Hour })
	r := request(token, 10, 4)
	r.Behavior = pb.Behavior_DURATION_IS_GREGORIAN
	got = bounded.ask(r)[0]
	expect.True(t,
		got.Error == "field 'duration' is longer than the longest that this node takes of an inline limit, 1h0m0s (inline-max-window)", "a month where an hour is the longest: %v", got)
	off := newBench(t, func(c *limiter.Config) { c.NoInline = true })
	for _, got := range off.ask(request(token, 10, 1000), request(token, 0, 1000), request(leaky, 10, 0)) {
		expect.True(t, strings.Contains(got.Error, "no-inline"), "without inline limits: %v", got)
	}
}

// TestFailures: what nobody could decide is an error of its request, as with Gubernator, whose callers then decide
// themselves.
func TestFailures(t *testing.T) {
	s := new(scripted.Service)
	server := New(Config{Service: s,
		Owner: func(context.Context) func(uint64) string { return func(uint64) string { return "10.0.0.7:8081" } },
		Now:   time.Now, Health: func() Health { return Health{Problem: "alone"} }})
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

// TestRules: another limit is of the same state, which has the same owner.
func TestRules(t *testing.T) {
	c := call{s: New(Config{}), owns: func(uint64) string { return "" }, now: start}
	in := request(leaky, 10, 1000)
	first, _ := c.ruleOf(in)
	in.Limit = 11
	other, _ := c.ruleOf(in)
	expect.True(t, other.limit.Limit == 11 && other.hash == first.hash, "another limit is not the same state")
}

// TestOwnerOfALongKey: it is the owner of the key under which a long unique_key is counted.
func TestOwnerOfALongKey(t *testing.T) {
	b := newBench(t)
	var asked []uint64
	b.cfg.Owner = func(context.Context) func(uint64) string {
		return func(hash uint64) string { asked = append(asked, hash); return "" }
	}
	in := request(token, 10, 1000)
	in.UniqueKey = strings.Repeat("k", limit.MaxKey+1)
	b.ask(in)
	in.Behavior = pb.Behavior_RESET_REMAINING
	b.ask(in)
	in.Behavior, in.UniqueKey = 0, limit.KeyOf(in.UniqueKey)
	b.ask(in)
	expect.True(t, len(asked) == 3 && asked[0] == asked[2] && asked[1] == asked[2], "%x", asked)
}

// BenchmarkGetRateLimits decides calls of 100 requests, decoding and encoding included.
func BenchmarkGetRateLimits(b *testing.B) {
	server := newBench(b)
	in := new(pb.GetRateLimitsReq)
	for i := range 100 {
		in.Requests = append(in.Requests, &pb.RateLimitReq{Name: "bucket", UniqueKey: fmt.Sprintf("account:%d", i),
			Hits: 1, Limit: 1000, Duration: 60_000})
	}
	data := must.Value(proto.Marshal(in))(b)
	b.ReportAllocs()
	for b.Loop() {
		in := new(pb.GetRateLimitsReq)
		err := proto.Unmarshal(data, in)
		must.NoError(b, err)
		out := must.Value(server.GetRateLimits(b.Context(), in))(b)
		_, err = proto.Marshal(out)
		must.NoError(b, err)
	}
}

func (b *bench) post(body string) (int, string) {
	code, contentType, answer := b.AnswerGetRateLimits(context.Background(), []byte(body), nil)
	expect.Equal(b.t, contentType, "application/json", "Content-Type")
	// protojson puts blanks where it likes.
	var compact bytes.Buffer
	expect.NoError(b.t, json.Compact(&compact, answer), "%q", answer)
	return code, compact.String()
}

// TestJSON. Gubernator's gateway: names as in the protocol, 64-bit numbers as strings, all fields, 200 whatever the
// status says; unknown fields are taken.
func TestJSON(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		in     string
		status int
		out    string
	}{
		{`{"requests":[{"name":"n","unique_key":"k","hits":"1","limit":"10","duration":"1000","more":1}]}`, 200,
			`{"responses":[{"status":"UNDER_LIMIT","limit":"10","remaining":"9","reset_time":"1770091511000","error":"","metadata":{}}]}`},
		{`{"requests":[{"name":"n","uniqueKey":"k","hits":9,"limit":10,"duration":1000,"algorithm":"TOKEN_BUCKET","behavior":"NO_BATCHING"}]}`, 200,
			`{"responses":[{"status":"UNDER_LIMIT","limit":"10","remaining":"0","reset_time":"1770091511000","error":"","metadata":{}}]}`},
		{`{"requests":[{"name":"n","unique_key":"k","hits":1,"limit":10,"duration":1000,"algorithm":0,"behavior":36}]}`,
			200,
			`{"responses":[{"status":"UNDER_LIMIT","limit":"0","remaining":"0","reset_time":"0","error":"behavior DURATION_IS_GREGORIAN is set; but ` + "`Duration`" + ` is not a valid gregorian interval","metadata":{}}]}`},
		{`{"requests":[{"name":"n","unique_key":"k","hits":1,"limit":10,"duration":1000}]}`, 200,
			`{"responses":[{"status":"OVER_LIMIT","limit":"10","remaining":"0","reset_time":"1770091511000","error":"","metadata":{}}]}`},
		{`{}`, 200, `{"responses":[]}`},
		{``, 200, `{"responses":[]}`}, // its gateway takes the end of the body for an empty request
		{"\n", 200, `{"responses":[]}`},
		{`{"requests":[null]}`, 400,
			`{"code":3,"message":"the body is not a GetRateLimitsReq in JSON: syntax error (line 1:14): unexpected token null","details":[]}`},
		{`{"requests":7}`, 400, `{"code":3,"message":"the body is not a GetRateLimitsReq in JSON: syntax error (line 1:13): unexpected token 7","details":[]}`},
		{`{"requests":[{"hits":"` + strings.Repeat("\u00e9", 300) + `"}]}`, 400,
			`{"code":3,"message":"the body is not a GetRateLimitsReq in JSON: (line 1:22): invalid value for int64 field hits: \"` + strings.Repeat("\u00e9", 75) + `…","details":[]}`},
		{"{\"more\":\"\xff\"}", 400, `{"code":3,"message":"the body is not valid UTF-8","details":[]}`},
		{`{"requests":[` + strings.Repeat("{},", 1000) + `{}]}`, 400,
			`{"code":11,"message":"Requests.RateLimits list too large; max size is '1000'","details":[]}`},
	} {
		code, out := b.post(c.in)
		expect.True(t, code == c.status && out == c.out, "%.80s: %d %s\nwant %d %s", c.in, code, out, c.status, c.out)
	}
	for err, want := range map[error]string{
		new(http.MaxBytesError): `413 {"code":8,"message":"the body is larger than 256 KiB","details":[]}`,
		io.ErrUnexpectedEOF:     `400 {"code":3,"message":"the body cannot be read","details":[]}`,
	} {
		code, _, answer := b.AnswerGetRateLimits(t.Context(), nil, err)
		expect.Equal(t, fmt.Sprint(code, " ", string(answer)), want)
	}
	code, _, answer := b.AnswerHealthCheck(t.Context(), nil, nil)
	expect.True(t, code == http.StatusOK && strings.Contains(string(answer), "peer_count"), "HealthCheck: %d %s", code,
		answer)
	code, _, answer = b.AnswerLiveCheck(t.Context(), nil, nil)
	expect.True(t, code == http.StatusOK && string(answer) == "{}", "LiveCheck: %d %s", code, answer)
}

// FuzzJSON: whatever is sent, each request has an answer.
func FuzzJSON(f *testing.F) {
	f.Add(`{"requests":[{"name":"n","unique_key":"k","hits":-1,"limit":9223372036854775807,"duration":-1,"algorithm":1,"behavior":63,"burst":3}]}`)
	f.Add(`{"requests":[{"name":"n","unique_key":"k\n\r","hits":5,"limit":2,"duration":4,"behavior":36}]}`)
	f.Add("\n")
	f.Fuzz(func(t *testing.T, body string) {
		b := newBench(t)
		code, _ := b.post(body)
		in := new(pb.GetRateLimitsReq)
		blank := strings.TrimSpace(body) == ""
		want := blank || read.Unmarshal([]byte(body), in) == nil && len(in.Requests) <= 1000
		expect.Equal(t, (code == 200), want, "%q: %d", body, code)
	})
}

// FuzzRequest: whatever a request says, it has an answer, which says no more is left than the limit or the burst.
func FuzzRequest(f *testing.F) {
	f.Add([]byte("\x0a\x01n\x12\x01k\x18\x01\x20\x0a\x28\xe8\x07"))
	f.Fuzz(func(t *testing.T, data []byte) {
		in := new(pb.RateLimitReq)
		if proto.Unmarshal(data, in) != nil {
			return
		}
		b := newBench(t)
		for range 3 {
			got := b.ask(in)[0]
			must.True(t, got.Error != "" || got.Remaining <= max(in.Limit, in.Burst, 0) && got.Remaining >= 0 &&
				got.Limit == in.Limit, "%v: %v", in, got)
		}
	})
}

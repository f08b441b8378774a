package gubernator

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func (b *bench) post(body string) (int, string) {
	code, contentType, answer := b.AnswerGetRateLimits(context.Background(), []byte(body), nil)
	expect.Equal(b.t, contentType, "application/json", "Content-Type")
	// protojson puts blanks where it likes.
	var compact bytes.Buffer
	expect.NoError(b.t, json.Compact(&compact, answer), "%q", answer)
	return code, compact.String()
}

// TestJSON. Gubernator's gateway: names as in the protocol, 64-bit numbers as strings, all fields, 200 whatever the status says; unknown
// fields are taken.
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
		{`{"requests":[{"name":"n","unique_key":"k","hits":1,"limit":10,"duration":1000,"algorithm":0,"behavior":36}]}`, 200,
			`{"responses":[{"status":"UNDER_LIMIT","limit":"0","remaining":"0","reset_time":"0","error":"behavior DURATION_IS_GREGORIAN is set; but ` + "`Duration`" + ` is not a valid gregorian interval","metadata":{}}]}`},
		{`{"requests":[{"name":"n","unique_key":"k","hits":1,"limit":10,"duration":1000}]}`, 200,
			`{"responses":[{"status":"OVER_LIMIT","limit":"10","remaining":"0","reset_time":"1770091511000","error":"","metadata":{}}]}`},
		{`{}`, 200, `{"responses":[]}`},
		{``, 200, `{"responses":[]}`}, // its gateway takes the end of the body for an empty request
		{"\n", 200, `{"responses":[]}`},
		{`{"requests":[null]}`, 400, `{"code":3,"message":"the body is not a GetRateLimitsReq in JSON: syntax error (line 1:14): unexpected token null","details":[]}`},
		{`{"requests":7}`, 400, `{"code":3,"message":"the body is not a GetRateLimitsReq in JSON: syntax error (line 1:13): unexpected token 7","details":[]}`},
		{`{"requests":[{"hits":"` + strings.Repeat("\u00e9", 300) + `"}]}`, 400, `{"code":3,"message":"the body is not a GetRateLimitsReq in JSON: (line 1:22): invalid value for int64 field hits: \"` + strings.Repeat("\u00e9", 75) + `…","details":[]}`},
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
	expect.True(t, code == http.StatusOK && strings.Contains(string(answer), "peer_count"), "HealthCheck: %d %s", code, answer)
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

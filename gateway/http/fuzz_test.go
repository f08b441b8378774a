package httpapi

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/scripted"
)

// FuzzBody sends any body to every endpoint that takes one: the answer is never a 5xx, and the service is asked if and only if it is
// 200, once.
func FuzzBody(f *testing.F) {
	paths := []string{
		"/v1/check", "/v1/checks", "/v1/acquire", "/v1/renew", "/v1/release", "/v1/reserve", "/v1/commit", "/v1/commits", "/v1/extends", "/v1/cancel", "/v1/refund", "/v1/reset",
		"/v1/reserves", "/v1/extend", "/v1/charge",
	}
	for i := range paths {
		for _, body := range []string{
			`{"policy":"login","key":"alice"}`,
			`{"checks":[{"policy":"login","key":"alice"}]}`,
			`{"policy":"login","key":"alice","cost":2,"ttl":"1s","request_id":"r"}`,
			`{"policy":"login","key":"alice","lease_id":"l","ttl":"10s"}`,
			`{"policy":"login","key":"alice","reservation_id":"r","cost":0}`,
			`{"policy":"login","key":"alice","reservation_id":"r","usage":{"input":3,"output":9223372036854775807},"overrun":"error","class":"m"}`,
			`{"reserves":[{"policy":"login","key":"alice","usage":{}},{"policy":"login","key":"alice","cost":9,"ttl":"1s","class":"m"}]}`,
			`{"commits":[{"policy":"login","key":"alice","reservation_id":"r","cost":3},{"policy":"login","key":"alice","reservation_id":"7","cost":0}]}`,
			`{"extends":[{"policy":"login","key":"alice","reservation_id":"r","cost":3,"ttl":"2s"}]}`,
			`{"policy":"login","key":"alice","usage":{"a":1.5}}`, `{"policy":"login","key":"alice","cost":1,"usage":{"a":null}}`, `{"reserves":[null]}`,
			`{"namespace":"n","limit":{"algorithm":"concurrency","limit":1,"ttl":"1s"},"key":"k","cost":-1}`,
			`{"policy":"login","key":"alice","cost":0,"partial":true,"request_id":"r"}`,
			`{"limit":{"algorithm":"fixed_window","limit":1,"window":"day","align":"calendar","time_zone":"Europe/Berlin"},"key":"k"}`,
			`{"limit":{"algorithm":"sliding_window","limit":-1,"window":"1d12h","slots":3,"count_denied":true},"key":"k"}`,
			`{"limit":{"algorithm":"token_bucket","limit":1,"window":"0.5d","capacity":9007199254740992},"key":"k"}`,
			`{"checks":[{"policy":"login","key":"alice"},{"policy":"login","key":"bob","cost":2}],"atomic":true}`, `{"checks":[{},{"key":"\ud800"}]}`,
			`{"policy":"login","key":"alice","key":"bob"}`, `{"policy":"login","key":"alice"}{}`, `null`, `{"\u0000":1}`,
			`{"policy":"login","key":"alice","ttl":"999999999h"}`, `{"ttl":1e400}`, `{"key":null}`, `[]`, ``, `{"a":{"a":{"a":`, "{\"key\":\"\xff\"}",
		} {
			f.Add(uint8(i), body)
		}
	}
	f.Fuzz(func(t *testing.T, route uint8, body string) {
		path := paths[int(route)%len(paths)]
		service := &scripted.Service{Results: []limit.Result{{Decision: admitted}}, Decision: admitted, Lives: time.Second}
		d := newAPI(t, service, func(c *Config) { c.MaxBody = 64 << 10 })
		resp := d.post(path, body)
		expect.True(t, resp.StatusCode < 500, "%s: %d %s", path, resp.StatusCode, bodyOf(t, resp))
		if asked := len(service.Calls()) == 1; asked != (resp.StatusCode == 200) || len(service.Calls()) > 1 {
			t.Errorf("%s: %d, with the service asked %d times", path, resp.StatusCode, len(service.Calls()))
		}
		for _, c := range service.Calls() {
			expect.True(t, len(c.Checks) <= limit.MaxBatch, "a batch of %d", len(c.Checks))
			for _, check := range c.Checks {
				wantSound(t, check)
			}
		}
	})
}

package httpapi

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/scripted"
)

func TestTopKeys(t *testing.T) {
	var asked *weirv1.TopKeysRequest
	d := newAPI(t, new(scripted.Service), func(c *Config) {
		c.TopKeys = func(_ context.Context, r *weirv1.TopKeysRequest) (*weirv1.TopKeysResponse, error) {
			asked = r
			if r.Limit > 256 {
				return nil, limit.NewError(limit.Invalid, "limit", "is above 256")
			}
			return &weirv1.TopKeysResponse{
				Node: "n0", Members: []string{"n0"}, CountedNs: int64(1999 * time.Microsecond), PoliciesCountedNs: int64(time.Second),
				Keys: []*weirv1.KeyUse{
					{Policy: "login", Key: "<img onerror=x>", Decisions: 5, DecisionsError: 1, Refused: 2, Algorithm: weirv1.Algorithm_ALGORITHM_SLIDING_LOG,
						WindowNs: int64(time.Minute), Limit: 4, Used: 0},
					{Namespace: "api", Key: "k", Decisions: 1, RefusedError: 3},
				},
				Policies: []*weirv1.PolicyUse{{Policy: "login", Allowed: 1, Refused: 2, Shadowed: 3, FailedOpen: 4, FailedClosed: 5, Errors: 6}},
			}, nil
		}
	})
	want := `{"node":"n0","order":"busiest","counted_ms":1,"policies_counted_ms":1000,"keys":[` +
		`{"policy":"login","key":"<img onerror=x>","decisions":5,"decisions_error":1,"refused":2,"refused_error":0,"algorithm":"sliding_log","window_ms":60000,"limit":4,"used":0,"utilization":0},` +
		`{"namespace":"api","key":"k","decisions":1,"decisions_error":0,"refused":0,"refused_error":3}],` +
		`"policies":[{"policy":"login","allowed":1,"refused":2,"shadowed":3,"failed_open":4,"failed_closed":5,"errors":6}],"members":["n0"],"unreachable":[]}`
	resp := d.do("GET", "/v1/keys/top", "")
	diff := cmp.Diff(want, bodyOf(t, resp))
	expect.True(t, diff == "" && resp.StatusCode == 200, "%d %s", resp.StatusCode, diff)
	for query, want := range map[string]*weirv1.TopKeysRequest{
		"":                                {Order: weirv1.KeyOrder_KEY_ORDER_BUSIEST},
		"?order=refused":                  {Order: weirv1.KeyOrder_KEY_ORDER_REFUSED},
		"?policy=p&limit=7&order=fullest": {Order: weirv1.KeyOrder_KEY_ORDER_FULLEST, Limit: 7, Policy: "p"},
		"?order=":                         nil,
		"?order=Busiest":                  nil,
		"?order=busiest&order=busiest":    nil,
		"?limit=0":                        nil,
		"?limit=257":                      nil,
		"?limit=-1":                       nil,
		"?limit=4294967296":               nil,
		"?policy=":                        nil,
		"?sort=busiest":                   nil,
		"?order=%zz":                      nil,
		"?limit=1;order=busiest":          nil,
	} {
		resp := d.do("GET", "/v1/keys/top"+query, "")
		if want == nil {
			expect.True(t, resp.StatusCode == 400, "%s: %d %s", query, resp.StatusCode, bodyOf(t, resp))
			continue
		}
		diff := cmp.Diff(want, asked, protocmp.Transform())
		expect.True(t, diff == "" && resp.StatusCode == 200, "%s: %d %s", query, resp.StatusCode, diff)
	}
}

func TestDescribe(t *testing.T) {
	d := newAPI(t, new(scripted.Service), func(c *Config) {
		c.Describe = func(_ context.Context, t *limit.Target) (*limit.KeyState, error) {
			if t.Policy == "gone" {
				return nil, limit.NewError(limit.NotFound, "policy", "there is no policy named gone")
			}
			return &limit.KeyState{Node: "n1", OnLoan: 7, Limits: []limit.LimitState{
				{Algorithm: algo.SlidingLog, Limit: 5, Remaining: 3, Window: time.Minute, Returns: []algo.Return{{Units: 2, After: 1}}},
				{Algorithm: algo.Concurrency, Limit: 5, Remaining: 5, Window: time.Minute},
			}}, nil
		}
	})
	want := `{"node":"n1","on_loan":7,"limits":[{"algorithm":"sliding_log","limit":5,"window_ms":60000,"remaining":3,"returns":[{"units":2,"after_ms":1}]},` +
		`{"algorithm":"concurrency","limit":5,"window_ms":60000,"remaining":5,"returns":[]}]}`
	resp := d.post("/v1/keys/describe", `{"policy":"p","key":"k"}`)
	diff := cmp.Diff(want, bodyOf(t, resp))
	expect.True(t, diff == "" && resp.StatusCode == 200, "%d %s", resp.StatusCode, diff)
	for body, status := range map[string]int{
		`{"policy":"gone","key":"k"}`:       404,
		`{"policy":"p"}`:                    400,
		`{"policy":"p","key":"k","cost":1}`: 400,
		`{}`:                                400,
	} {
		resp := d.post("/v1/keys/describe", body)
		expect.True(t, resp.StatusCode == status, "%s: %d %s, want %d", body, resp.StatusCode, bodyOf(t, resp), status)
	}
}

package httpapi

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/scripted"
)

// fakeOverrides notes what it is asked, and answers with err or with one override.
type fakeOverrides struct {
	asked proto.Message
	err   error
}

var fakeOverride = &weirv1.Override{
	Policy: "login", Key: "a\nb", Settings: `{"limit":500}`, Version: "12@n0", ChangedBy: "ops", ChangedAtUnixMs: 1_000, Inactive: "policy: there is none",
}

func (f *fakeOverrides) List(_ context.Context, req *weirv1.ListOverridesRequest) (*weirv1.ListOverridesResponse, error) {
	f.asked = req
	return &weirv1.ListOverridesResponse{Overrides: []*weirv1.Override{fakeOverride}, NextPageToken: "t"}, f.err
}

func (f *fakeOverrides) Set(_ context.Context, req *weirv1.SetOverrideRequest) (*weirv1.OverrideChange, error) {
	f.asked = req
	return &weirv1.OverrideChange{
		Override: fakeOverride, Members: []*weirv1.OverrideMember{{Name: "n0", Has: true, Durable: true}, {Name: "n1", Error: "away"}},
	}, f.err
}

func (f *fakeOverrides) Delete(_ context.Context, req *weirv1.DeleteOverrideRequest) (*weirv1.OverrideChange, error) {
	f.asked = req
	return &weirv1.OverrideChange{Override: &weirv1.Override{Policy: "login", Prefix: "a", Version: "13@n0"}, Before: fakeOverride}, f.err
}

func TestOverrides(t *testing.T) {
	fake := new(fakeOverrides)
	d := newAPI(t, new(scripted.Service), func(c *Config) { c.Overrides = fake })
	const stored = `{"policy":"login","key":"a\nb","settings":{"limit":500},"version":"12@n0","changed_by":"ops","changed_at":"1970-01-01T00:00:01Z","inactive":"policy: there is none"}`
	for _, c := range []struct {
		method, path, body string
		status             int
		asked              proto.Message
		answer             string
	}{
		{"PUT", "", `{"policy":"login","key":"a","settings":{"limit": 500}}`, 200,
			&weirv1.SetOverrideRequest{Override: &weirv1.Override{Policy: "login", Key: "a", Settings: `{"limit": 500}`}},
			`{"override":` + stored + `,"members":[{"name":"n0","has":true,"durable":true},{"name":"n1","has":false,"durable":false,"error":"away"}]}`},
		{"DELETE", "?policy=login&prefix=a%0Ab", "", 200, &weirv1.DeleteOverrideRequest{Policy: "login", Prefix: "a\nb"},
			`{"override":{"policy":"login","prefix":"a","version":"13@n0","changed_by":"","changed_at":"1970-01-01T00:00:00Z"},"before":` + stored + `,"members":[]}`},
		{"GET", "?policy=login&page_size=7&page_token=x", "", 200, &weirv1.ListOverridesRequest{Policy: "login", PageSize: 7, PageToken: "x"},
			`{"overrides":[` + stored + `],"next_page_token":"t"}`},
		{"GET", "", "", 200, &weirv1.ListOverridesRequest{}, ""},
		{"GET", "?policy=", "", 400, nil, ""},
		{"GET", "?page_size=0", "", 400, nil, ""},
		{"GET", "?page_size=-1", "", 400, nil, ""},
		{"GET", "?page_size=4294967296", "", 400, nil, ""},
		{"GET", "?sort=key", "", 400, nil, ""},
		{"GET", "?key=a&key=b", "", 400, nil, ""},
		{"GET", "?key=%zz", "", 400, nil, ""},
		{"DELETE", "?key=a;policy=b", "", 400, nil, ""},
		{"DELETE", "?policy=login&page_size=1", "", 400, nil, ""},
		{"PUT", "", `{"policy":"login","key":"a","settings":{"limit":null}}`, 400, nil, ""},
		{"PUT", "", `{"policy":"login","key":"a","settings":{"limit":1,"limit":2}}`, 400, nil, ""},
		{"PUT", "", `{"policy":"login","key":"a","limit":1}`, 400, nil, ""},
		{"PUT", "", `{"policy":1}`, 400, nil, ""},
		{"PUT", "", `[]`, 400, nil, ""},
		{"PUT", "", ``, 400, nil, ""},
		{"POST", "", `{}`, 405, nil, ""},
	} {
		fake.asked = nil
		resp := d.do(c.method, "/v1/overrides"+c.path, c.body, "Content-Type", "application/json")
		body := bodyOf(t, resp)
		if diff := cmp.Diff(c.asked, fake.asked, protocmp.Transform()); diff != "" || resp.StatusCode != c.status {
			t.Errorf("%s %s %s: %d %s\n%s", c.method, c.path, c.body, resp.StatusCode, body, diff)
		}
		expect.True(t, c.answer == "" || body == c.answer, "%s: %s", c.method, cmp.Diff(c.answer, body))
	}
	fake.err = limit.NewError(limit.NotFound, "policy", "there is none")
	for _, method := range []string{"DELETE", "PUT"} {
		resp := d.do(method, "/v1/overrides", "{}", "Content-Type", "application/json")
		expect.Equal(t, resp.StatusCode, 404, "%s", method)
	}
}

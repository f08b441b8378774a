package node

import (
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/auth"
	pb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestGubernatorAccess: the service is for callers with the role check and the namespace of the name; who gives back or resets needs
// refund. What is wrong with one request is said in its answer.
func TestGubernatorAccess(t *testing.T) {
	n, shop, all, _ := withAccess(t, nil)
	ask := func(token string, change func(*pb.RateLimitReq)) (string, codes.Code) {
		r := &pb.RateLimitReq{Name: "requests", UniqueKey: "k", Hits: 1, Limit: 10, Duration: 60_000}
		if change != nil {
			change(r)
		}
		out, err := pb.NewV1Client(dialed(t, n)).GetRateLimits(bearer(t, token), &pb.GetRateLimitsReq{Requests: []*pb.RateLimitReq{r}})
		if err != nil {
			return "", status.Code(err)
		}
		return out.Responses[0].Error, codes.OK
	}
	_, code := ask("", nil)
	expect.Equal(t, code, codes.Unauthenticated, "without a token")
	if text, code := ask(shop, nil); code != codes.OK || !strings.Contains(text, `field 'name' shop may not use inline limits of the namespace "gubernator/requests"`) {
		t.Errorf("without the namespace: %q, %v", text, code)
	}
	reset := func(r *pb.RateLimitReq) { r.Behavior = pb.Behavior_RESET_REMAINING }
	negative := func(r *pb.RateLimitReq) { r.Hits = -1 }
	for what, change := range map[string]func(*pb.RateLimitReq){"a reset": reset, "negative hits": negative} {
		text, code := ask(shop, change)
		expect.True(t, code == codes.OK && (strings.Contains(text, "may not") || strings.Contains(text, "role")),
			"%s without the role: %q, %v", what, text, code)
	}
	for what, change := range map[string]func(*pb.RateLimitReq){"a hit": nil, "a reset": reset, "negative hits": negative} {
		text, code := ask(all, change)
		expect.True(t, code == codes.OK && text == "", "%s with all rights: %q, %v", what, text, code)
	}
	const body = `{"requests":[{"name":"requests","unique_key":"k","hits":1,"limit":10,"duration":60000}]}`
	resp, _ := send(t, n, http.MethodPost, "/v1/GetRateLimits", "", body)
	expect.Equal(t, resp.StatusCode, http.StatusUnauthorized, "as JSON without a token")
	resp, text := send(t, n, http.MethodPost, "/v1/GetRateLimits", all, body)
	expect.True(t, resp.StatusCode == http.StatusOK && strings.Contains(text, "UNDER_LIMIT"),
		"as JSON: %d %s", resp.StatusCode, text)
	for path, want := range map[string]int{"/v1/LiveCheck": http.StatusOK, "/v1/HealthCheck": http.StatusUnauthorized} {
		resp, _ := send(t, n, http.MethodGet, path, "", "")
		expect.Equal(t, resp.StatusCode, want, "%s without a token", path)
	}
	// Every route of another front end is one that openapi.yaml describes.
	_, spec := send(t, n, http.MethodGet, "/openapi.yaml", all, "")
	for _, r := range n.foreignRoutes() {
		expect.True(t, strings.Contains(spec, "\n  "+r.Path+":\n"),
			"openapi.yaml has no %s", r.Path)
	}
}

// TestOwnersAreForTopology: which node decides for a key is told to callers with the role topology, and without an access file to
// everybody. Others could pick keys by it that all lie on one node.
func TestOwnersAreForTopology(t *testing.T) {
	n, shop, all, _ := withAccess(t, nil)
	open := mustStart(t, testConfig(t, "open"))
	for _, c := range []struct {
		who, token string
		at         *Node
		want       bool
	}{{"role check", shop, n, false}, {"all roles", all, n, true}, {"without an access file", "", open, true}} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://node/v1/GetRateLimits", http.NoBody)
		must.NoError(t, err)
		r.RemoteAddr = "127.0.0.1:1"
		if c.token != "" {
			r.Header.Set("Authorization", "Bearer "+c.token)
		}
		ctx, denial := c.at.security.auth.HTTP(r, auth.RoleCheck)
		must.Equal(t, denial, nil, "%s", c.who)
		expect.Equal(t, c.at.owners(ctx) != nil, c.want, "%s: owners are told", c.who)
	}
	expect.True(t, n.owners(t.Context()) == nil, "owners are told to nobody")
}

package httpapi

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/scripted"
)

type askerKey struct{}

// TestAuthorize: each route asks for its role, with the open ones nobody is asked; who is denied reaches no handler, and
// the answers are as openapi.yaml has them.
func TestAuthorize(t *testing.T) {
	roles := map[string]auth.Role{
		"POST /v1/check": auth.RoleCheck, "POST /v1/checks": auth.RoleCheck, "POST /v1/acquire": auth.RoleCheck, "POST /v1/renew": auth.RoleCheck,
		"POST /v1/release": auth.RoleCheck, "POST /v1/reserve": auth.RoleCheck, "POST /v1/commit": auth.RoleCheck, "POST /v1/cancel": auth.RoleCheck,
		"POST /v1/reserves": auth.RoleCheck, "POST /v1/extend": auth.RoleCheck, "POST /v1/extends": auth.RoleCheck, "POST /v1/commits": auth.RoleCheck, "POST /v1/charge": auth.RoleCharge,
		"POST /v1/refund": auth.RoleRefund, "POST /v1/reset": auth.RoleRefund,
		"GET /v1/forward-auth": auth.RoleCheck,
		"POST /json":           auth.RoleCheck, "POST /v1/GetRateLimits": auth.RoleCheck, "GET /v1/HealthCheck": auth.RoleCheck, "GET /v1/LiveCheck": auth.RoleOpen,
		"GET /v1/policies": auth.RoleRead, "GET /v1/status": auth.RoleRead, "GET /metrics": auth.RoleRead,
		"GET /v1/keys/top": auth.RoleKeys, "POST /v1/keys/describe": auth.RoleKeys,
		"GET /v1/overrides": auth.RoleOverrides, "PUT /v1/overrides": auth.RoleOverrides, "DELETE /v1/overrides": auth.RoleOverrides,
		"GET /healthz": auth.RoleOpen, "GET /readyz": auth.RoleOpen, "GET /healthcheck": auth.RoleOpen, "GET /openapi.yaml": auth.RoleOpen, "GET /": auth.RoleOpen,
	}
	var asked auth.Role
	denial := &auth.Denial{Reason: auth.NoCredentials, Message: "say who you are"}
	d := newAPI(t, new(scripted.Service), func(c *Config) {
		c.Authorize = func(_ *http.Request, role auth.Role) (context.Context, *auth.Denial) {
			asked = role
			return nil, denial
		}
	})
	for _, rt := range new(api).routesForTest() {
		name := rt.Method + " " + rt.Path
		want, listed := roles[name]
		if !listed {
			t.Errorf("%s is new: say here which role it takes", name)
			continue
		}
		for _, c := range []struct {
			denial    auth.Denial
			status    int
			challenge string
		}{
			{auth.Denial{Reason: auth.NoCredentials, Message: "say who you are"}, 401, `Bearer realm="weir"`},
			{auth.Denial{Reason: auth.BadToken, Message: "nobody's"}, 401, `Bearer realm="weir", error="invalid_token"`},
			{auth.Denial{Authenticated: true, Reason: auth.WrongRole, Message: "not yours"}, 403, `Bearer realm="weir", error="insufficient_scope"`},
		} {
			asked, *denial = auth.RoleOpen, c.denial
			resp := d.do(rt.Method, rt.Path, "{}", "Content-Type", "application/json")
			expect.Equal(t, asked, want, "%s asks for", name)
			if want == auth.RoleOpen {
				expect.Equal(t, resp.StatusCode, http.StatusOK, "%s", name)
				continue
			}
			expect.True(t, resp.StatusCode == c.status && resp.Header.Get("WWW-Authenticate") == c.challenge &&
				strings.Contains(bodyOf(t, resp), c.denial.Message), "%s: %d %v", name, resp.StatusCode, resp.Header)
		}
	}
	expect.True(t, len(d.service.Calls()) == 0, "the service was asked: %v", d.service.Calls())
}

// TestAuthorizedContext: the service is asked in the context that Authorize returned, and what it denies is a 403.
func TestAuthorizedContext(t *testing.T) {
	service := &contextual{}
	d := newAPI(t, new(scripted.Service), func(c *Config) {
		c.Service = service
		c.Authorize = func(r *http.Request, _ auth.Role) (context.Context, *auth.Denial) {
			return context.WithValue(r.Context(), askerKey{}, "shop"), nil
		}
	})
	resp := d.post("/v1/reset", `{"policy":"login","key":"a"}`)
	expect.True(t, service.asker == "shop" && resp.StatusCode == http.StatusForbidden &&
		strings.Contains(bodyOf(t, resp), `"field":"policy"`), "asked by %v, %d", service.asker, resp.StatusCode)
}

// contextual denies everything, and notes who asks.
type contextual struct {
	limit.Service
	asker any
}

func (c *contextual) Reset(ctx context.Context, _ limit.Target) error {
	c.asker = ctx.Value(askerKey{})
	return &limit.Error{Kind: limit.Denied, Field: "policy", Message: "is not yours"}
}

// routesForTest are the routes, of which no handler is called.
func (a *api) routesForTest() []Route {
	a.Service, a.Overrides, a.Metrics, a.Foreign = new(scripted.Service), new(fakeOverrides), http.NotFoundHandler(), foreignRoutes()
	return a.routes()
}

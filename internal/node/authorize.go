package node

import (
	"context"
	"net/http"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/limit"
)

// authorizeHTTP authorizes a request over HTTP before its body is read.
func (s *security) authorizeHTTP(r *http.Request, role auth.Role) (context.Context, *auth.Denial) {
	ctx, denial := s.auth.HTTP(r, role)
	if denial == nil && auth.Authenticated(ctx) && !admission.FromContext(ctx).Authenticated(s.nameOf(ctx)) {
		return nil, &auth.Denial{Message: "too many connections"} // the connection is closed already
	}
	return ctx, denial
}

// beginHTTP counts a request over HTTP/2 until end is called: to its caller also where the route is open to all.
func (s *security) beginHTTP(r *http.Request) (end func(), ok bool) {
	conn := admission.FromContext(r.Context())
	if conn == nil {
		return func() {}, true
	}
	anonymous := !conn.IsAuthenticated()
	if anonymous {
		ctx := s.auth.Peek(r)
		anonymous = !auth.Authenticated(ctx) || s.access != nil && !conn.Authenticated(auth.CallerName(ctx))
	}
	if end, ok = conn.Begin(anonymous); anonymous && !ok {
		defer end()
		panic(http.ErrAbortHandler) // the connection has been closed
	}
	return end, ok
}

// authenticateRESP authenticates a connection of the Redis protocol. Each command demands the role that it needs.
func (s *security) authenticateRESP(ctx context.Context, c auth.Credentials) (context.Context, *auth.Denial) {
	return s.auth.Authorize(ctx, "resp", auth.RoleOpen, c)
}

// current reports whether the access file in force still knows the caller in ctx.
func (s *security) current(ctx context.Context) bool {
	return s.auth.Demand(ctx, auth.RoleOpen, limit.Target{}) == nil
}

// nameOf returns the name of the authenticated caller in ctx, or "" if there is no access file.
func (s *security) nameOf(ctx context.Context) string {
	if s.access == nil {
		return ""
	}
	return auth.CallerName(ctx)
}

// caller returns the name of the caller in ctx, and whether the caller is authenticated.
func (s *security) caller(ctx context.Context) (name string, authenticated bool) {
	return s.nameOf(ctx), auth.Authenticated(ctx)
}

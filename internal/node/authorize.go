package node

import (
	"context"
	"net/http"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/ingress"
)

// authorizeGRPC authorizes a call over gRPC before its request is read.
func (s *security) authorizeGRPC(ctx context.Context, method string) (context.Context, error) {
	ctx, err := s.auth.GRPC(ctx, method)
	if err == nil {
		err = s.admit(ctx)
	}
	return ctx, err
}

// authorizeHTTP authorizes a request over HTTP before its body is read.
func (s *security) authorizeHTTP(r *http.Request, role auth.Role) (context.Context, *auth.Denial) {
	ctx, denial := s.auth.HTTP(r, role)
	if denial == nil && auth.Authenticated(ctx) && !ingress.FromContext(ctx).Authenticated(s.nameOf(ctx)) {
		return nil, &auth.Denial{Message: "too many connections"} // which is closed already
	}
	return ctx, denial
}

// authenticateRESP authenticates a connection of the Redis protocol. Its commands demand the roles that they need.
func (s *security) authenticateRESP(ctx context.Context, c auth.Credentials) (context.Context, *auth.Denial) {
	return s.auth.Authorize(ctx, "resp", auth.RoleOpen, c)
}

// callerName returns what tells callers apart by the context of their calls; nil without an access file, when all are one.
func (s *security) callerName() func(context.Context) string {
	if s.access == nil {
		return nil
	}
	return auth.CallerName
}

// nameOf returns the name of the caller who is authenticated in a context; empty where callers are not told apart.
func (s *security) nameOf(ctx context.Context) string {
	if s.access == nil {
		return ""
	}
	return auth.CallerName(ctx)
}

// admitStream is the interceptor of streams that auth.Authorizer's has authorized.
func (s *security) admitStream(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if err := s.admit(stream.Context()); err != nil {
		return err
	}
	return handle(srv, stream)
}

// admit has the connection of an authenticated caller count as such, if there is room for it.
func (s *security) admit(ctx context.Context) error {
	if p, ok := peer.FromContext(ctx); ok && auth.Authenticated(ctx) && !ingress.Of(p.Addr).Authenticated(s.nameOf(ctx)) {
		return errTooManyConnections
	}
	return nil
}

var errTooManyConnections = status.Error(codes.Unavailable, "too many connections")

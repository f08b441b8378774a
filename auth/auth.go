// Package auth authenticates callers and authorizes their calls. An access file, parsed strictly, names the callers:
// their tokens and the names in their certificates, their roles, and the policies and namespaces that they may use.
//
// Authorize and its relatives HTTP, GRPC and Stream authenticate a request or stream once, from its headers and its
// connection, and demand the role that its route or method needs. The context that they return has the caller. Service,
// Lender and Quotas authorize each operation in such a context by the access file in force at that moment. A caller
// that is removed from the file loses its rights at once, but keeps its connections.
//
// The package does not verify certificates (the listener does), does not hide which policies exist, and does not
// protect the ports between nodes, which have certificates of their own.
package auth

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/limit"
)

// Config configures an Authorizer.
type Config struct {
	// Callers returns the access file in force. Nil: there is none, and every caller has every role, but RoleAdmin and
	// RoleOverrides only from this host or with a certificate.
	Callers func() *Callers
	// Now returns the time of day, for the expiry of tokens. Nil: tokens do not expire.
	Now func() time.Time
	// NeedCertificate denies calls without a client certificate when there is no access file.
	NeedCertificate bool
	// Audit is called for each refund, reset and denied call. It must not block. Nil: there is no audit log.
	Audit func(Event)
	// Denied is called for each denied call. what is the Denial's message, and holds no secret. Required.
	Denied func(listener, reason string, from net.Addr, what string)
}

// Authorizer authenticates callers and authorizes their calls. It is safe for concurrent use.
type Authorizer struct {
	cfg   Config
	roles map[string]Role // by gRPC method
	all   *Caller
}

// New returns an Authorizer.
func New(cfg Config) *Authorizer {
	return &Authorizer{cfg: cfg, roles: methodRoles(), all: everybody()}
}

// methodRoles returns the role that each gRPC method needs. A method that is not listed is denied to every caller.
func methodRoles() map[string]Role {
	roles := make(map[string]Role)
	for service, methods := range map[string]map[string]Role{
		// Probes have neither a token nor a certificate.
		"grpc.health.v1.Health": {"Check": RoleOpen, "List": RoleOpen, "Watch": RoleOpen},
		"weir.v1.Limiter": {
			"Check": RoleCheck, "CheckStream": RoleCheck, "Acquire": RoleCheck, "Renew": RoleCheck,
			"Release": RoleCheck, "Reserve": RoleCheck, "ReserveAll": RoleCheck, "Extend": RoleCheck,
			"ExtendEach": RoleCheck,
			"Commit":     RoleCheck, "CommitEach": RoleCheck, "Cancel": RoleCheck,
			"Charge": RoleCharge, "Refund": RoleRefund, "Reset": RoleRefund, "Status": RoleRead, "TopKeys": RoleKeys,
		},
		"weir.v1.Overrides": {"ListOverrides": RoleOverrides, "SetOverride": RoleOverrides,
			"DeleteOverride": RoleOverrides},
		"weir.v1.Admin":                            {"GossipKeys": RoleAdmin},
		"grpc.reflection.v1.ServerReflection":      {"ServerReflectionInfo": RoleRead},
		"grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": RoleRead},
		// Negative hits need RoleRefund as well: see Service.
		"envoy.service.ratelimit.v3.RateLimitService":             {"ShouldRateLimit": RoleCheck},
		"envoy.service.rate_limit_quota.v3.RateLimitQuotaService": {"StreamRateLimitQuotas": RoleCheck},
		// Charges without a reservation need RoleCharge as well: see Service.
		"kuadrant.service.ratelimit.v1.RateLimitService": {
			"CheckRateLimit": RoleCheck, "Report": RoleCharge, "Reserve": RoleCheck, "Commit": RoleCheck,
		},
		// RESET_REMAINING and negative hits need RoleRefund as well: see Service.
		"pb.gubernator.V1": {"GetRateLimits": RoleCheck, "HealthCheck": RoleCheck, "LiveCheck": RoleOpen},
	} {
		for method, role := range methods {
			roles["/"+service+"/"+method] = role
		}
	}
	return roles
}

// Credentials are what a caller presents: the Authorization headers of a request and the state of its connection.
type Credentials struct {
	Authorization []string             // headers
	TLS           *tls.ConnectionState // verified by the listener; nil: plain text
	From          net.Addr             // nil: not known
}

// certified says whether the caller presented a certificate. The listener has verified it.
func (e *Credentials) certified() bool { return e.TLS != nil && len(e.TLS.PeerCertificates) > 0 }

// local says whether the caller, or the proxy in front of it, is on this host.
func (e *Credentials) local() bool { return netaddr.LoopbackAddr(e.From) }

// session is an authenticated request or stream. It is the context in which the request or stream is served, in one
// allocation. It keeps the caller as of the access file that was looked at last.
type session struct {
	context.Context
	listener    string // the name of the listener, for metrics and the audit log
	credentials Credentials
	known       atomic.Pointer[known]
	first       known // known points to it until the access file changes
}

// Value implements context.Context.
func (s *session) Value(key any) any {
	if key == (sessionKey{}) {
		return s
	}
	return s.Context.Value(key)
}

// known is the caller according to one access file.
type known struct {
	callers *Callers // nil: no access file
	caller  *Caller
	expires time.Time // when the caller's token expires; zero: never
}

type sessionKey struct{}

// callers returns the access file in force; nil: there is none.
func (a *Authorizer) callers() *Callers {
	if a.cfg.Callers == nil {
		return nil
	}
	return a.cfg.Callers()
}

// authenticate returns the caller with the credentials. expires is when its token expires; zero: never.
func (a *Authorizer) authenticate(e *Credentials, list *Callers) (caller *Caller, expires time.Time, denial *Denial) {
	if list == nil {
		if a.cfg.NeedCertificate && !e.certified() {
			return nil, expires, unauthenticated(NoCredentials, "present a client certificate")
		}
		return a.all, expires, nil
	}
	switch {
	case len(e.Authorization) > 0:
		// A token takes precedence: a certificate may be that of a proxy or of a whole host.
		scheme, token, ok := strings.Cut(e.Authorization[0], " ")
		if len(e.Authorization) > 1 || !ok || !strings.EqualFold(scheme, "Bearer") {
			return nil, expires, unauthenticated(BadToken, "authorization: must be one, Bearer and a token")
		}
		caller, expires := list.ByToken(strings.TrimLeft(token, " "))
		switch {
		case caller == nil:
			return nil, expires, unauthenticated(BadToken, "authorization: unknown token")
		case a.over(expires):
			return nil, expires, unauthenticated(ExpiredToken,
				"authorization: the token of "+caller.Name+" has expired")
		}
		return caller, expires, nil
	case e.certified():
		caller := list.ByIdentities(Identities(e.TLS.PeerCertificates[0]))
		if caller == nil {
			return nil, expires, forbidden(UnknownIdentity, "no caller has the names in this certificate")
		}
		return caller, expires, nil
	}
	return nil, expires, unauthenticated(NoCredentials,
		"authenticate with a token (Bearer TOKEN) or a client certificate")
}

// over says whether a token has expired.
func (a *Authorizer) over(expires time.Time) bool {
	return !expires.IsZero() && a.cfg.Now != nil && !a.cfg.Now().Before(expires)
}

// Authorize authenticates a request or stream by its credentials and demands a role. listener is the listener's name
// for metrics and logs. It does not need the request's body. The request must be served in the context that it returns,
// because Service finds the caller there.
func (a *Authorizer) Authorize(ctx context.Context, listener string, role Role,
	e Credentials) (context.Context, *Denial) {
	return a.authorize(&session{Context: ctx, listener: listener, credentials: e}, role)
}

// authorize is Authorize for a session. The context that it returns is that session.
func (a *Authorizer) authorize(s *session, role Role) (context.Context, *Denial) {
	denial := a.begin(s)
	if denial == nil {
		denial = a.demand(s.first.caller, s.first.callers, role, &s.credentials)
	}
	if denial != nil {
		a.denied(s.listener, denial, s.first.caller, &s.credentials, limit.Target{})
		return nil, denial
	}
	return s, nil
}

// begin authenticates a session by its credentials.
func (a *Authorizer) begin(s *session) (denial *Denial) {
	k := &s.first
	k.callers = a.callers()
	k.caller, k.expires, denial = a.authenticate(&s.credentials, k.callers)
	s.known.Store(k)
	return denial
}

// Authenticated says whether the caller of a request or stream with this context is authenticated. A caller of an open
// route or method is so only with valid credentials. Without an access file every caller is, if it has a certificate
// where NeedCertificate demands one.
func Authenticated(ctx context.Context) bool {
	_, ok := ctx.Value(sessionKey{}).(*session)
	return ok
}

// CallerName returns the name of the caller of a request or stream with this context; empty when the caller is not
// authenticated. The name is from the access file that was looked at last.
func CallerName(ctx context.Context) string {
	if s, ok := ctx.Value(sessionKey{}).(*session); ok {
		return s.known.Load().caller.Name
	}
	return ""
}

// Roles returns the roles that the caller in a context has by the access file in force now; none without
// authentication.
func (a *Authorizer) Roles(ctx context.Context) (roles Role) {
	s, ok := ctx.Value(sessionKey{}).(*session)
	if !ok {
		return 0
	}
	for i := range roleNames() {
		if _, denial := a.permit(s, 1<<i); denial == nil {
			roles |= 1 << i
		}
	}
	return roles
}

// MayUse returns a function for the caller in a context: whether it may use a policy in a role or, when the policy's
// name is empty, inline limits of a namespace. It is by the access file in force now. Without authentication the
// function returns false.
func (a *Authorizer) MayUse(ctx context.Context, role Role) func(policy, namespace string) bool {
	var caller *Caller
	if s, ok := ctx.Value(sessionKey{}).(*session); ok {
		if now, denial := a.permit(s, role); denial == nil {
			caller = now
		}
	}
	return func(policy, namespace string) bool {
		if policy != "" {
			return caller.MayUsePolicy(role, policy)
		}
		return caller.MayUseNamespace(role, namespace)
	}
}

// demand returns a Denial if the caller does not have the role.
func (a *Authorizer) demand(caller *Caller, list *Callers, role Role, e *Credentials) *Denial {
	switch {
	case !caller.Has(role):
		return forbidden(WrongRole, caller.Name+" does not have the role "+role.String())
	case list == nil && role&(RoleAdmin|RoleOverrides) != 0 && !e.certified() && !e.local():
		return forbidden(WrongPlace,
			"without an access file, the role "+role.String()+" is for this host, and for certificates")
	}
	return nil
}

// denied counts and audits a denied call. caller is nil when it is not authenticated; t is zero when the call has no
// target.
func (a *Authorizer) denied(listener string, d *Denial, caller *Caller, e *Credentials, t limit.Target) {
	event := Event{Action: ActionDenied, Listener: listener, Target: t, Reason: d.Reason, What: d.Message}
	event.present(e)
	if caller != nil {
		event.Caller = caller.Name
	}
	a.audit(event)
	a.cfg.Denied(listener, d.Reason, e.From, d.Message)
}

// current returns the caller of a session by the access file in force now.
func (a *Authorizer) current(s *session) (*Caller, *Denial) {
	list := a.callers()
	if k := s.known.Load(); k.callers == list && !a.over(k.expires) {
		return k.caller, nil
	}
	caller, expires, denial := a.authenticate(&s.credentials, list)
	if denial != nil {
		return nil, denial
	}
	s.known.Store(&known{list, caller, expires})
	return caller, nil
}

// permit is current, with a Denial if the caller does not have the role.
func (a *Authorizer) permit(s *session, role Role) (*Caller, *Denial) {
	caller, denial := a.current(s)
	if denial == nil {
		denial = a.demand(caller, a.callers(), role, &s.credentials)
	}
	return caller, denial
}

// HTTP authorizes an HTTP request by its headers and connection, as Authorize does.
func (a *Authorizer) HTTP(r *http.Request, role Role) (context.Context, *Denial) {
	if list := a.callers(); list != nil && list.MetricsOpen && r.URL.Path == "/metrics" {
		return r.Context(), nil
	}
	return a.Authorize(r.Context(), "http", role, httpCredentials(r))
}

// Peek returns the context of an HTTP request with its caller, if the caller is authenticated. Unlike HTTP it reports
// no denial: it is for open routes, and for parts of an open answer that only some callers may see.
func (a *Authorizer) Peek(r *http.Request) context.Context {
	return a.peek(&session{Context: r.Context(), listener: "http", credentials: httpCredentials(r)})
}

// HasRole says whether the caller of an HTTP request has a role, as Peek finds it.
func (a *Authorizer) HasRole(r *http.Request, role Role) bool { return a.Roles(a.Peek(r))&role != 0 }

// peek returns the session if its caller is authenticated, and otherwise the context that it began with.
func (a *Authorizer) peek(s *session) context.Context {
	if a.begin(s) != nil {
		return s.Context
	}
	return s
}

func httpCredentials(r *http.Request) Credentials {
	e := Credentials{Authorization: r.Header["Authorization"], TLS: r.TLS}
	if ap, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		e.From = net.TCPAddrFromAddrPort(ap)
	}
	return e
}

// GRPC authorizes a call of a gRPC method (its full name) by the headers and the connection in ctx, as Authorize does.
// The error is a gRPC status. It must be called before the message is read.
func (a *Authorizer) GRPC(ctx context.Context, method string) (context.Context, error) {
	role, listed := a.roles[method]
	s := &session{Context: ctx, listener: "grpc"}
	e := &s.credentials
	if p, ok := peer.FromContext(ctx); ok {
		e.From = p.Addr
		switch info := p.AuthInfo.(type) { // an if statement would allocate info for plain text too
		case credentials.TLSInfo:
			e.TLS = &info.State
		}
	}
	if !listed {
		// Deny by default: a service that is registered must be listed in methodRoles. A test checks that.
		a.denied("grpc", unauthenticated(WrongRole, "method without a role"), nil, e, limit.Target{})
		return nil, status.Error(codes.PermissionDenied, "this method is denied to everybody")
	}
	if a.cfg.Callers != nil { // only an access file needs it
		e.Authorization = metadata.ValueFromIncomingContext(ctx, "authorization")
	}
	if role == RoleOpen {
		return a.peek(s), nil
	}
	authorized, denial := a.authorize(s, role)
	if denial != nil {
		return nil, statusOf(denial)
	}
	return authorized, nil
}

func statusOf(d *Denial) error {
	if d.Authenticated {
		return status.Error(codes.PermissionDenied, d.Message)
	}
	return status.Error(codes.Unauthenticated, d.Message)
}

// Stream is the interceptor of streams: it authorizes the stream, and each message that is sent on it.
func (a *Authorizer) Stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo,
	handle grpc.StreamHandler) error {
	ctx, err := a.GRPC(stream.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	return handle(srv, &authorizedStream{stream, ctx, a, a.roles[info.FullMethod]})
}

// authorizedStream is a stream with an authenticated caller.
type authorizedStream struct {
	grpc.ServerStream
	ctx        context.Context
	authorizer *Authorizer
	role       Role
}

// Context implements grpc.ServerStream.
func (s *authorizedStream) Context() context.Context { return s.ctx }

// SendMsg implements grpc.ServerStream. It sends nothing to a caller that has lost the role of the method. It does not
// look at streams of RoleCheck, in which Service authorizes each check.
func (s *authorizedStream) SendMsg(m any) error {
	if from, ok := s.ctx.Value(sessionKey{}).(*session); ok && s.role != RoleCheck && s.role != RoleOpen {
		if caller, denial := s.authorizer.permit(from, s.role); denial != nil {
			s.authorizer.denied("grpc", denial, caller, &from.credentials, limit.Target{})
			return statusOf(denial)
		}
	}
	return s.ServerStream.SendMsg(m)
}

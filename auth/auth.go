// Package auth authenticates callers and authorizes their calls. An access file, parsed strictly, names the callers: their
// tokens and the names in their certificates, their roles, and the policies and namespaces that they may use.
//
// An Authorizer authenticates a request or a stream once, from its headers and its connection. Each message of a stream is
// authorized by the access file in force at that moment, so that a caller who is removed from the file loses its rights at
// once, though not its connections. The package does not verify certificates (the listener does), does not hide which
// policies exist, and does not protect the ports between nodes, which have certificates of their own.
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
	// Callers returns the access file in force. Nil: there is none, and every caller has every right, but RoleAdmin and RoleOverrides only from
	// this host or with a certificate.
	Callers func() *Callers
	// Now tells the time of day, by which tokens expire. Nil: they do not.
	Now func() time.Time
	// NeedCertificate denies calls without a client certificate where there is no access file.
	NeedCertificate bool
	// Audit is called for each refund, reset and denied call. It must not block. Nil: there is no audit log.
	Audit func(Event)
	// Denied is called for each denied call; what holds no secret. Required.
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

// methodRoles is the role that each gRPC method needs. A method that is not listed is denied to everybody.
func methodRoles() map[string]Role {
	roles := make(map[string]Role)
	for service, methods := range map[string]map[string]Role{
		// Probes present neither a token nor a certificate.
		"grpc.health.v1.Health": {"Check": RoleOpen, "List": RoleOpen, "Watch": RoleOpen},
		"weir.v1.Limiter": {
			"Check": RoleCheck, "CheckStream": RoleCheck, "Acquire": RoleCheck, "Renew": RoleCheck,
			"Release": RoleCheck, "Reserve": RoleCheck, "ReserveAll": RoleCheck, "Extend": RoleCheck, "ExtendEach": RoleCheck,
			"Commit": RoleCheck, "CommitEach": RoleCheck, "Cancel": RoleCheck,
			"Charge": RoleCharge, "Refund": RoleRefund, "Reset": RoleRefund, "Status": RoleRead, "TopKeys": RoleKeys,
		},
		"weir.v1.Overrides":                        {"ListOverrides": RoleOverrides, "SetOverride": RoleOverrides, "DeleteOverride": RoleOverrides},
		"weir.v1.Admin":                            {"GossipKeys": RoleAdmin},
		"grpc.reflection.v1.ServerReflection":      {"ServerReflectionInfo": RoleRead},
		"grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": RoleRead},
		// Negative hits need RoleRefund besides, see Service.
		"envoy.service.ratelimit.v3.RateLimitService":             {"ShouldRateLimit": RoleCheck},
		"envoy.service.rate_limit_quota.v3.RateLimitQuotaService": {"StreamRateLimitQuotas": RoleCheck},
		// What is not reserved needs RoleCharge besides, see Service.
		"kuadrant.service.ratelimit.v1.RateLimitService": {
			"CheckRateLimit": RoleCheck, "Report": RoleCharge, "Reserve": RoleCheck, "Commit": RoleCheck,
		},
		// RESET_REMAINING and negative hits need RoleRefund besides.
		"pb.gubernator.V1": {"GetRateLimits": RoleCheck, "HealthCheck": RoleCheck, "LiveCheck": RoleOpen},
	} {
		for method, role := range methods {
			roles["/"+service+"/"+method] = role
		}
	}
	return roles
}

// Credentials are what a caller presents: the authorization headers of a request and the state of its connection.
type Credentials struct {
	Authorization []string             // headers
	TLS           *tls.ConnectionState // verified by the listener; nil: plain text
	From          net.Addr             // nil: not known
}

// certified reports whether a certificate was presented. The listener has verified it before it reads anything.
func (e *Credentials) certified() bool { return e.TLS != nil && len(e.TLS.PeerCertificates) > 0 }

// local reports whether the caller is on this host, or behind a proxy on this host.
func (e *Credentials) local() bool { return netaddr.LoopbackAddr(e.From) }

// session is an authenticated request or stream, with the caller by the access file of the last look. It is the context to serve
// the request or stream in: each call has one, and it is one piece of memory.
type session struct {
	context.Context
	listener    string // where it came in, for metrics and the audit log
	credentials Credentials
	known       atomic.Pointer[known]
	first       known // which known points to until another is known
}

// Value implements context.Context.
func (s *session) Value(key any) any {
	if key == (sessionKey{}) {
		return s
	}
	return s.Context.Value(key)
}

// known is the caller by one access file.
type known struct {
	callers *Callers // nil: no access file
	caller  *Caller
	expires time.Time // when the caller's token does; zero: never
}

type sessionKey struct{}

// callers returns the access file in force, nil where there is none.
func (a *Authorizer) callers() *Callers {
	if a.cfg.Callers == nil {
		return nil
	}
	return a.cfg.Callers()
}

// authenticate returns the caller that has the credentials, and until when; zero: for ever.
func (a *Authorizer) authenticate(e *Credentials, list *Callers) (caller *Caller, expires time.Time, denial *Denial) {
	if list == nil {
		if a.cfg.NeedCertificate && !e.certified() {
			return nil, expires, unauthenticated(NoCredentials, "present a client certificate")
		}
		return a.all, expires, nil
	}
	switch {
	case len(e.Authorization) > 0:
		// A token takes precedence over a certificate, which may be that of a proxy or a whole host.
		scheme, token, ok := strings.Cut(e.Authorization[0], " ")
		if len(e.Authorization) > 1 || !ok || !strings.EqualFold(scheme, "Bearer") {
			return nil, expires, unauthenticated(BadToken, "authorization: must be one, Bearer and a token")
		}
		caller, expires := list.ByToken(strings.TrimLeft(token, " "))
		switch {
		case caller == nil:
			return nil, expires, unauthenticated(BadToken, "authorization: unknown token")
		case a.over(expires):
			return nil, expires, unauthenticated(ExpiredToken, "authorization: the token of "+caller.Name+" has expired")
		}
		return caller, expires, nil
	case e.certified():
		caller := list.ByIdentities(Identities(e.TLS.PeerCertificates[0]))
		if caller == nil {
			return nil, expires, forbidden(UnknownIdentity, "no caller has the names in this certificate")
		}
		return caller, expires, nil
	}
	return nil, expires, unauthenticated(NoCredentials, "authenticate with a token (Bearer TOKEN) or a client certificate")
}

// over reports whether the time has come.
func (a *Authorizer) over(expires time.Time) bool {
	return !expires.IsZero() && a.cfg.Now != nil && !a.cfg.Now().Before(expires)
}

// Authorize authenticates a request or stream by its credentials and demands a role. listener names the listener in metrics and
// logs. It needs no body. The context returned is the one to serve the request in: a service of Service finds the caller there.
func (a *Authorizer) Authorize(ctx context.Context, listener string, role Role, e Credentials) (context.Context, *Denial) {
	return a.authorize(&session{Context: ctx, listener: listener, credentials: e}, role)
}

// authorize is Authorize. The session returned is the one given, authenticated.
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

// Authenticated reports whether the caller of the request or stream with this context was authenticated. Callers of what is open
// to everybody are only if they present credentials. Without an access file every caller is whose certificate is as demanded.
func Authenticated(ctx context.Context) bool {
	_, ok := ctx.Value(sessionKey{}).(*session)
	return ok
}

// CallerName returns the name of the caller whose request or stream has this context, as the access file has it; empty where nobody is
// authenticated. It is the one of the last look at the access file.
func CallerName(ctx context.Context) string {
	if s, ok := ctx.Value(sessionKey{}).(*session); ok {
		return s.known.Load().caller.Name
	}
	return ""
}

// Roles returns the roles of the caller of the request or stream with this context, by the access file in force now; none for nobody.
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

// MayUse returns what tells whether the caller of the request or stream with this context may use a policy in a role or, where its
// name is empty, inline limits of a namespace. It is by the access file in force now, and denies everything to nobody.
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
		return forbidden(WrongPlace, "without an access file, the role "+role.String()+" is for this host, and for certificates")
	}
	return nil
}

// denied reports a denied call. caller is nil when it is not authenticated, and t empty when the call is about no target.
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

// permit returns the caller of a session by the access file in force now, and a Denial if it does not have the role.
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

// HasRole reports whether the sender of an HTTP request has a role. Unlike HTTP it tells nobody when not: it is for what a
// request that anybody may make shows to some.
func (a *Authorizer) HasRole(r *http.Request, role Role) bool {
	e, list := httpCredentials(r), a.callers()
	caller, _, denial := a.authenticate(&e, list)
	return denial == nil && a.demand(caller, list, role, &e) == nil
}

func httpCredentials(r *http.Request) Credentials {
	e := Credentials{Authorization: r.Header["Authorization"], TLS: r.TLS}
	if ap, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		e.From = net.TCPAddrFromAddrPort(ap)
	}
	return e
}

// GRPC authorizes a call of a gRPC method (its full name) by the headers and the connection in ctx, as Authorize does. The error
// is a status. It is to be called before the message is read.
func (a *Authorizer) GRPC(ctx context.Context, method string) (context.Context, error) {
	role, listed := a.roles[method]
	s := &session{Context: ctx, listener: "grpc"}
	e := &s.credentials
	if p, ok := peer.FromContext(ctx); ok {
		e.From = p.Addr
		switch info := p.AuthInfo.(type) { // an if would allocate it for plain text too
		case credentials.TLSInfo:
			e.TLS = &info.State
		}
	}
	if !listed {
		// Deny by default: who registers a service lists its methods in methodRoles, and a test checks it.
		a.denied("grpc", unauthenticated(WrongRole, "method without a role"), nil, e, limit.Target{})
		return nil, status.Error(codes.PermissionDenied, "this method is denied to everybody")
	}
	if a.cfg.Callers != nil { // who else looks at it
		e.Authorization = metadata.ValueFromIncomingContext(ctx, "authorization")
	}
	if role == RoleOpen {
		if a.begin(s) != nil {
			return ctx, nil
		}
		return s, nil
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

// Stream is the interceptor of streams.
func (a *Authorizer) Stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	ctx, err := a.GRPC(stream.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	return handle(srv, &authorizedStream{stream, ctx, a, a.roles[info.FullMethod]})
}

// authorizedStream is a stream whose caller is authenticated.
type authorizedStream struct {
	grpc.ServerStream
	ctx        context.Context
	authorizer *Authorizer
	role       Role
}

// Context implements grpc.ServerStream.
func (s *authorizedStream) Context() context.Context { return s.ctx }

// SendMsg implements grpc.ServerStream. It sends nothing to a caller who has lost the role since. Streams of checks are not
// looked at here: Service authorizes each check.
func (s *authorizedStream) SendMsg(m any) error {
	if from, ok := s.ctx.Value(sessionKey{}).(*session); ok && s.role != RoleCheck && s.role != RoleOpen {
		if caller, denial := s.authorizer.permit(from, s.role); denial != nil {
			s.authorizer.denied("grpc", denial, caller, &from.credentials, limit.Target{})
			return statusOf(denial)
		}
	}
	return s.ServerStream.SendMsg(m)
}

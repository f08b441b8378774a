// Package guard stands at the doors: it finds out who asks, by what an access file says of tokens and certificates, and
// lets them do what they may, with the policies that they may use.
//
// A door asks it once for each request or stream. What comes in on a stream is held to the access file in force at that
// moment, so that taking a caller out of the file ends what it may do, though not its connections. It does not promise to
// hide what policies there are, and it does not protect the ports between nodes, which have certificates of their own.
package guard

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/access"
)

// Config says what a Guard goes by.
type Config struct {
	// List returns the access file in force. Nil: there is none, and everybody may do everything, but Admin only from this
	// host or with a certificate.
	List func() *access.List
	// NeedCertificate has those refused who present no certificate, where there is no access file.
	NeedCertificate bool
	// Refused is told of everybody who is refused. what holds no secret. Required.
	Refused func(door, reason string, from net.Addr, what string)
}

// Guard is safe for concurrent use.
type Guard struct {
	cfg   Config
	roles map[string]access.Role // by gRPC method
	all   *access.Caller
}

// New returns a Guard.
func New(cfg Config) *Guard {
	return &Guard{cfg: cfg, roles: methodRoles(), all: access.Everybody()}
}

// methodRoles says which role a gRPC method takes. One that is not listed is for nobody.
func methodRoles() map[string]access.Role {
	roles := map[string]access.Role{
		// Probes have neither a token nor a certificate.
		"/grpc.health.v1.Health/Check": access.Open,
		"/grpc.health.v1.Health/List":  access.Open,
		"/grpc.health.v1.Health/Watch": access.Open,

		"/weir.v1.Admin/GossipKeys": access.Admin,

		"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo":      access.Read,
		"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": access.Read,
	}
	for method, role := range map[string]access.Role{
		"Check": access.Check, "CheckStream": access.Check, "Acquire": access.Check, "Renew": access.Check, "Release": access.Check,
		"Reserve": access.Check, "Commit": access.Check, "Cancel": access.Check,
		"Refund": access.Refund, "Reset": access.Refund,
		"Status": access.Read, "Topology": access.Topology,
	} {
		roles["/weir.v1.Limiter/"+method] = role
	}
	return roles
}

// evidence is what a caller has shown.
type evidence struct {
	authorization []string             // headers
	tls           *tls.ConnectionState // nil: plain text
	from          net.Addr             // nil: not known
}

// certified reports whether a certificate was presented. That it is a good one is the listener's to see to, before
// anything is read.
func (e *evidence) certified() bool { return e.tls != nil && len(e.tls.PeerCertificates) > 0 }

// local reports whether the caller is on this host, or seems to be because of what stands in between.
func (e *evidence) local() bool {
	if e.from == nil {
		return false
	}
	ap, err := netip.ParseAddrPort(e.from.String())
	return err == nil && ap.Addr().Unmap().IsLoopback()
}

// session is who asks, as the access file had it when it was last looked at.
type session struct {
	evidence evidence
	known    atomic.Pointer[known]
}

type known struct {
	list   *access.List // that it is according to
	caller *access.Caller
}

type sessionKey struct{}

// list is the access file in force, nil where there is none.
func (g *Guard) list() *access.List {
	if g.cfg.List == nil {
		return nil
	}
	return g.cfg.List()
}

// identify finds out whose evidence it is.
func (g *Guard) identify(e *evidence, list *access.List) (*access.Caller, *access.Denial) {
	if list == nil {
		if g.cfg.NeedCertificate && !e.certified() {
			return nil, &access.Denial{Reason: access.NoCredentials, Message: "present a client certificate"}
		}
		return g.all, nil
	}
	switch {
	case len(e.authorization) > 0:
		// A token counts before a certificate, which may be that of a proxy or a whole host.
		scheme, token, ok := strings.Cut(e.authorization[0], " ")
		if len(e.authorization) > 1 || !ok || !strings.EqualFold(scheme, "Bearer") {
			return nil, &access.Denial{Reason: access.BadToken, Message: "authorization: must be one, Bearer and a token"}
		}
		caller := list.ByToken(strings.TrimLeft(token, " "))
		if caller == nil {
			return nil, &access.Denial{Reason: access.BadToken, Message: "authorization: nobody has this token"}
		}
		return caller, nil
	case e.certified():
		leaf := e.tls.PeerCertificates[0]
		uris := make([]string, len(leaf.URIs))
		for i, u := range leaf.URIs {
			uris[i] = u.String()
		}
		caller := list.ByIdentities(access.Identities(leaf.DNSNames, uris, leaf.Subject.CommonName))
		if caller == nil {
			return nil, &access.Denial{Known: true, Reason: access.UnknownIdentity, Message: "no caller has the names in this certificate"}
		}
		return caller, nil
	}
	return nil, &access.Denial{Reason: access.NoCredentials, Message: "say who you are: with a token, as Authorization: Bearer TOKEN, or with a client certificate"}
}

// admit finds out who asks and whether they have a role.
func (g *Guard) admit(ctx context.Context, door string, role access.Role, e evidence) (context.Context, *access.Denial) {
	s := &session{evidence: e}
	list := g.list()
	caller, denial := g.identify(&s.evidence, list)
	if denial == nil {
		denial = g.mayTake(caller, list, role, &s.evidence)
	}
	if denial != nil {
		g.refused(door, denial, caller, e.from)
		return nil, denial
	}
	s.known.Store(&known{list, caller})
	return context.WithValue(ctx, sessionKey{}, s), nil
}

// mayTake says whether a caller may act in a role.
func (g *Guard) mayTake(caller *access.Caller, list *access.List, role access.Role, e *evidence) *access.Denial {
	switch {
	case !caller.Has(role):
		return &access.Denial{Known: true, Reason: access.WrongRole, Message: caller.Name + " does not have the role " + role.String()}
	case list == nil && role == access.Admin && !e.certified() && !e.local():
		return &access.Denial{Known: true, Reason: access.WrongPlace, Message: "without an access file, the role admin is for callers on this host, and for those with a certificate"}
	}
	return nil
}

// refused tells of somebody who is.
func (g *Guard) refused(door string, d *access.Denial, caller *access.Caller, from net.Addr) {
	what := d.Message
	if caller != nil {
		what = caller.Name + ": " + what
	}
	g.cfg.Refused(door, d.Reason, from, what)
}

// current returns who asks, by the access file in force now.
func (g *Guard) current(s *session) (*access.Caller, *access.Denial) {
	list := g.list()
	if k := s.known.Load(); k.list == list {
		return k.caller, nil
	}
	caller, denial := g.identify(&s.evidence, list)
	if denial != nil {
		return nil, denial
	}
	s.known.Store(&known{list, caller})
	return caller, nil
}

// HTTP finds out who sent a request and whether they have a role. The context is the one to answer it in.
func (g *Guard) HTTP(r *http.Request, role access.Role) (context.Context, *access.Denial) {
	if list := g.list(); list != nil && list.MetricsOpen && r.URL.Path == "/metrics" {
		return r.Context(), nil
	}
	e := evidence{authorization: r.Header["Authorization"], tls: r.TLS}
	if ap, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		e.from = net.TCPAddrFromAddrPort(ap)
	}
	return g.admit(r.Context(), "http", role, e)
}

// grpc finds out who calls a method and whether they may.
func (g *Guard) grpc(ctx context.Context, method string) (context.Context, error) {
	role, listed := g.roles[method]
	if listed && role == access.Open {
		return ctx, nil
	}
	var e evidence
	if p, ok := peer.FromContext(ctx); ok {
		e.from = p.Addr
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			e.tls = &info.State
		}
	}
	if !listed {
		// Fail safe: whoever registers a service says in methodRoles who may use it, and a test that they did.
		g.cfg.Refused("grpc", access.WrongRole, e.from, "method without a role")
		return nil, status.Error(codes.PermissionDenied, "this method is for nobody")
	}
	e.authorization = metadata.ValueFromIncomingContext(ctx, "authorization")
	ctx, denial := g.admit(ctx, "grpc", role, e)
	if denial != nil {
		return nil, statusOf(denial)
	}
	return ctx, nil
}

func statusOf(d *access.Denial) error {
	if d.Known {
		return status.Error(codes.PermissionDenied, d.Message)
	}
	return status.Error(codes.Unauthenticated, d.Message)
}

// Unary is the interceptor of calls.
func (g *Guard) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	ctx, err := g.grpc(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	return handle(ctx, req)
}

// Stream is the interceptor of streams.
func (g *Guard) Stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	ctx, err := g.grpc(stream.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	return handle(srv, &admitted{stream, ctx, g, g.roles[info.FullMethod]})
}

// admitted is a stream whose caller is known.
type admitted struct {
	grpc.ServerStream
	ctx   context.Context
	guard *Guard
	role  access.Role
}

// Context implements grpc.ServerStream.
func (a *admitted) Context() context.Context { return a.ctx }

// SendMsg implements grpc.ServerStream. A caller who no longer may is told nothing more. Those who check are answered what they
// have asked: Service holds each check to the file by itself.
func (a *admitted) SendMsg(m any) error {
	if from, ok := a.ctx.Value(sessionKey{}).(*session); ok && a.role != access.Check {
		caller, denial := a.guard.current(from)
		if denial == nil {
			denial = a.guard.mayTake(caller, a.guard.list(), a.role, &from.evidence)
		}
		if denial != nil {
			a.guard.refused("grpc", denial, caller, from.evidence.from)
			return statusOf(denial)
		}
	}
	return a.ServerStream.SendMsg(m)
}

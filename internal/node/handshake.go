package node

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/reload"
)

// certs returns the certificates of a listener, or nil if it uses plain text.
func (s *security) certs(listener string) *reload.Certs {
	if listener == "peer" {
		return s.peers
	}
	return s.callers
}

// callerRules returns the rules for callers' certificates at a listener.
func (s *security) callerRules(listener string) reload.Rules {
	rules := reload.Rules{MinVersion: tls.VersionTLS12, Rejected: s.rejectedCert(listener)}
	switch {
	case s.cfg.TLSClientCAFile == "":
	case listener == "http" || s.cfg.AccessFile != "":
		// A caller may send a token in place of a certificate, and a probe has neither. auth demands one of them where
		// it is needed.
		rules.Demand = reload.IfGiven
	default:
		rules.Demand = reload.Required
	}
	return rules
}

func (s *security) rejectedCert(listener string) func(net.Addr, *reload.RejectedError) {
	return func(from net.Addr, err *reload.RejectedError) {
		s.denials.note(listener, err.Reason, from, err.Error())
	}
}

// serveHTTP serves until the server is shut down.
func (s *security) serveHTTP(server *http.Server, l net.Listener) error {
	server.ErrorLog = log.New(httpErrors{s}, "", 0)
	if s.callers == nil {
		return server.Serve(l)
	}
	server.TLSConfig = s.callers.Server(s.callerRules("http"), "h2", "http/1.1")
	return server.ServeTLS(l, "", "")
}

// httpErrors takes net/http's log: a line for each failed handshake and each GOAWAY of a caller. A caller can cause
// such lines as often as it likes.
type httpErrors struct{ s *security }

// Write implements io.Writer. net/http writes one message with each call.
func (h httpErrors) Write(p []byte) (int, error) {
	text, ok := strings.CutPrefix(string(p), "http: TLS handshake error from ")
	if !ok {
		h.s.denials.httpError("http", strings.TrimSpace(string(p)))
		return len(p), nil
	}
	from, what, _ := strings.Cut(strings.TrimSpace(text), ": ")
	if !strings.HasPrefix(what, "certs: ") { // rejectedCert has noted it
		var addr net.Addr
		if ap, err := netip.ParseAddrPort(from); err == nil {
			addr = net.TCPAddrFromAddrPort(ap)
		}
		h.s.badHandshake("http", addr, errors.New(what), strings.Contains(what, "HTTP request to an HTTPS server") ||
			strings.Contains(what, "does not look like a TLS handshake"))
	}
	return len(p), nil
}

// badHandshake notes a TLS handshake that failed for another reason than the caller's certificate.
func (s *security) badHandshake(listener string, from net.Addr, err error, plain bool) {
	reason := "handshake"
	if plain {
		reason = "plain_text_on_tls_port"
	}
	s.denials.note(listener, reason, from, err.Error())
}

// grpcServer returns the credentials of the server for callers (grpc), or for other nodes (peer).
func (s *security) grpcServer(listener string) grpc.ServerOption {
	creds, rules := insecure.NewCredentials(), s.callerRules(listener)
	if listener == "peer" {
		rules = s.peerRules()
	}
	if certs := s.certs(listener); certs != nil {
		creds = credentials.NewTLS(certs.Server(rules, "h2"))
	}
	return grpc.Creds(watchedCredentials{creds, s, listener})
}

// peerRules returns the rules for other nodes' certificates, as servers and as clients.
func (s *security) peerRules() reload.Rules {
	return reload.Rules{MinVersion: tls.VersionTLS13, Demand: reload.Required, Name: s.cfg.PeerTLSName,
		Rejected: s.rejectedCert("peer")}
}

// peerClient returns the credentials with which this node connects to others, or nil for plain text.
func (s *security) peerClient() credentials.TransportCredentials {
	if s.peers == nil {
		return nil
	}
	return boundCredentials{credentials.NewTLS(s.peers.Client(s.peerRules())), s}
}

// boundCredentials bind a connection to another node to the certificate that the node presented: see
// reload.Certs.BindClient.
type boundCredentials struct {
	credentials.TransportCredentials
	s *security
}

// ClientHandshake implements credentials.TransportCredentials.
func (b boundCredentials) ClientHandshake(ctx context.Context, authority string,
	raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := b.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		return nil, nil, err
	}
	bound, err := b.s.peers.BindClient(conn, info.(credentials.TLSInfo).State, b.s.peerRules())
	if err != nil {
		_ = conn.Close() // the error says why
		return nil, nil, err
	}
	return bound, info, nil
}

// Clone implements credentials.TransportCredentials.
func (b boundCredentials) Clone() credentials.TransportCredentials {
	return boundCredentials{b.TransportCredentials.Clone(), b.s}
}

// watchedCredentials note failed handshakes, which gRPC does not report. A connection is authenticated by its first
// call, which says whose it is, and not by its certificate: one caller could otherwise take all connections.
type watchedCredentials struct {
	credentials.TransportCredentials
	s        *security
	listener string
}

// ServerHandshake implements credentials.TransportCredentials.
func (w watchedCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := w.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		w.s.handshakeFailed(w.listener, raw, err)
		return conn, info, err
	}
	return admission.Frames(conn, raw), info, nil
}

// Clone implements credentials.TransportCredentials.
func (w watchedCredentials) Clone() credentials.TransportCredentials {
	return watchedCredentials{w.TransportCredentials.Clone(), w.s, w.listener}
}

// handshakeFailed notes a failed TLS handshake, unless it was noted already or the other end has closed the connection,
// as probes of the port do.
func (s *security) handshakeFailed(listener string, raw net.Conn, err error) {
	var refused *reload.RejectedError
	var record tls.RecordHeaderError
	switch {
	case errors.As(err, &refused), errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed),
		errors.Is(err, context.Canceled):
	default:
		s.badHandshake(listener, raw.RemoteAddr(), err, errors.As(err, &record))
	}
}

// respHandshake returns the function that makes a TLS connection of the Redis protocol, or nil for plain text.
func (s *security) respHandshake() func(net.Conn) (net.Conn, auth.Credentials, error) {
	if s.callers == nil {
		return nil
	}
	cfg := s.callers.Server(s.callerRules("resp"))
	return func(raw net.Conn) (net.Conn, auth.Credentials, error) {
		conn := tls.Server(raw, cfg)
		if err := conn.Handshake(); err != nil {
			s.handshakeFailed("resp", raw, err)
			return nil, auth.Credentials{}, err
		}
		state := conn.ConnectionState()
		return conn, auth.Credentials{TLS: &state, From: raw.RemoteAddr()}, nil
	}
}

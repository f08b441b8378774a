package node

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/audit"
	"github.com/weirlimit/weir/internal/certs"
	"github.com/weirlimit/weir/internal/file"
	"github.com/weirlimit/weir/internal/filewatch"
	"github.com/weirlimit/weir/internal/ingress"
	"github.com/weirlimit/weir/internal/memory"
	"github.com/weirlimit/weir/internal/metrics"
)

// forCallers reports whether there is a port for callers.
func (cfg *Config) forCallers() bool {
	return cfg.HTTPPort != PortOff || cfg.GRPCPort != PortOff || cfg.RESPPort != PortOff
}

// open lists what keeps strangers out of the ports that others can reach, and is not given: nothing on loopback.
func (cfg *Config) open() (missing []string) {
	if isLoopback(cfg.Bind) {
		return nil
	}
	s := cfg.Security
	if cfg.forCallers() && s.AccessFile == "" && s.TLS.CA == "" {
		missing = append(missing, "access-file or tls-client-ca-file (whoever reaches a port for callers may do everything)")
	}
	if cfg.PeerPort != PortOff && s.PeerTLS.Cert == "" {
		missing = append(missing, "peer-tls-cert-file, peer-tls-key-file, peer-tls-ca-file and peer-tls-name (whoever reaches the peer port is a node)")
	}
	if cfg.GossipPort != PortOff && s.GossipKeyFile == "" {
		missing = append(missing, "gossip-key-file (whoever reaches the gossip port may say who is a member)")
	}
	if cfg.GossipPort != PortOff && s.SecretFile == "" {
		missing = append(missing, "cluster-secret-file (whoever sends keys can aim them at one node)")
	}
	return missing
}

// checkOpen refuses to open ports to others without what keeps strangers out, unless that is wanted.
func (cfg *Config) checkOpen() error {
	missing := cfg.open()
	if len(missing) == 0 || cfg.Security.Insecure {
		return nil
	}
	return fmt.Errorf("bind: %s is reached from other hosts, and this is not given: %s. \"weir secrets DIRECTORY\" makes all of them; the setting insecure does without",
		cfg.Bind, strings.Join(missing, "; "))
}

// callerSettings are the settings of the files for callers.
var callerSettings = certs.Files{Cert: "tls-cert-file", Key: "tls-key-file", CA: "tls-client-ca-file"}

// validate reports the first thing that is wrong with what is given together.
func (c *Security) validate() error {
	if c.TLS.CA != "" && c.TLS.Cert == "" && c.TLS.Key == "" {
		return errors.New("tls-client-ca-file: callers present certificates over TLS only: give tls-cert-file and tls-key-file")
	}
	if err := c.TLS.Validate(callerSettings); err != nil {
		return err
	}
	peer := []struct{ flag, value string }{
		{"peer-tls-cert-file", c.PeerTLS.Cert}, {"peer-tls-key-file", c.PeerTLS.Key}, {"peer-tls-ca-file", c.PeerTLS.CA}, {"peer-tls-name", c.PeerName},
	}
	for _, given := range peer {
		for _, missing := range peer {
			if given.value != "" && missing.value == "" {
				return fmt.Errorf("%s: goes with %s: nodes prove to each other who they are with all four of peer-tls-…, or talk in plain text without any", given.flag, missing.flag)
			}
		}
	}
	return nil
}

// security is what a node has of it while it runs.
type security struct {
	cfg     Security
	log     *slog.Logger
	metrics *metrics.Security
	denials *denials
	callers *certs.Source                     // nil: plain text
	peers   *certs.Source                     // nil: plain text
	access  *filewatch.Watcher[*auth.Callers] // nil: no access file
	auth    *auth.Authorizer
	audit   *audit.Log // nil: none

	gossipKeys  *filewatch.Watcher[[][]byte] // nil: gossip in plain text
	keysChanged chan struct{}                // holds a token when their file has
}

// openSecurity reads the files. With an error nothing is left open.
func openSecurity(cfg Security, log *slog.Logger) (_ *security, err error) {
	s := &security{cfg: cfg, log: log, keysChanged: make(chan struct{}, 1)}
	s.metrics = metrics.NewSecurity(s.expiries)
	s.denials = newDenials(log, s.metrics)
	defer func() {
		if err != nil {
			s.close()
			s.closeAudit()
		}
	}()
	if cfg.TLS != (certs.Files{}) {
		if s.callers, err = s.openCerts("certificates", cfg.TLS, callerSettings, ""); err != nil {
			return nil, err
		}
	}
	if cfg.PeerTLS != (certs.Files{}) {
		flags := certs.Files{Cert: "peer-tls-cert-file", Key: "peer-tls-key-file", CA: "peer-tls-ca-file"}
		if s.peers, err = s.openCerts("peer_certificates", cfg.PeerTLS, flags, cfg.PeerName); err != nil {
			return nil, err
		}
	}
	if s.audit, err = s.openAudit(); err != nil {
		return nil, fmt.Errorf("audit-log: %w", err)
	}
	authConfig := auth.Config{
		NeedCertificate: cfg.TLS.CA != "" && cfg.AccessFile == "",
		Denied:          s.denials.note,
		Now:             s.denials.now,
	}
	if cfg.AccessFile != "" {
		if s.access, err = s.openAccess(); err != nil {
			return nil, fmt.Errorf("access-file: %w", err)
		}
		authConfig.Callers = s.access.Current
	}
	if s.audit != nil {
		authConfig.Audit = s.audit.Record
	}
	s.auth = auth.New(authConfig)
	if cfg.GossipKeyFile != "" {
		if s.gossipKeys, err = s.openGossipKeys(); err != nil {
			return nil, err
		}
	}
	s.warnReadable(cfg.TLS.Key, cfg.PeerTLS.Key, cfg.GossipKeyFile, cfg.SecretFile)
	return s, nil
}

// warnReadable says which of the files with keys other users of the host may read. Their group may: that is how an orchestrator
// gives a file to a process.
func (s *security) warnReadable(files ...string) {
	for _, name := range files {
		if name == "" {
			continue
		}
		if open, err := file.ReadableByOthers(name); err == nil && open { // what else is wrong is reported by who reads it
			s.log.Warn("key file readable by other users", "file", name, "hint", "chmod o-r")
		}
	}
}

// openAudit returns nil where there is no audit log.
func (s *security) openAudit() (*audit.Log, error) {
	if s.cfg.AuditLog == "" {
		return nil, nil
	}
	return audit.Open(audit.Config{
		Name: s.cfg.AuditLog, Stderr: s.cfg.Stderr, Now: s.denials.now, MaxQueued: memory.LogQueue,
		OnError: func(err error) { s.log.Error("audit log not written", "error", err) },
	})
}

// record has the audit log keep an event, if there is one.
func (s *security) record(e auth.Event) {
	if s.audit != nil {
		s.audit.Record(e)
	}
}

// reopenAudit opens the file of the audit log anew, which may have been moved away.
func (s *security) reopenAudit() {
	if s.audit == nil {
		return
	}
	if err := s.audit.Reopen(); err != nil {
		s.log.Error("audit log not opened anew", "error", err)
	}
}

func (s *security) closeAudit() {
	if s.audit == nil {
		return
	}
	if err := s.audit.Close(); err != nil {
		s.log.Warn("audit log not closed", "error", err)
	}
}

func (s *security) openAccess() (*filewatch.Watcher[*auth.Callers], error) {
	s.metrics.Watching("access")
	return filewatch.Start([]string{s.cfg.AccessFile}, filewatch.Config[*auth.Callers]{
		Parse:   func(contents [][]byte) (*auth.Callers, error) { return auth.Parse(s.cfg.AccessFile, contents[0]) },
		MaxSize: auth.MaxFile,
		OnChange: func(l *auth.Callers) {
			s.metrics.Reloaded("access", true)
			s.log.Info("security file changed", "what", "access", "callers", l.Len())
		},
		OnError: s.reloadFailed("access"),
	})
}

// openCerts opens certificates; ownName is what this side's own must have where it presents what it demands.
func (s *security) openCerts(what string, files, flags certs.Files, ownName string) (*certs.Source, error) {
	s.metrics.Watching(what)
	return certs.Open(files, certs.Config{
		Flags: flags, OwnName: ownName, Now: s.cfg.Now,
		OnChange: func() {
			s.metrics.Reloaded(what, true)
			s.log.Info("security file changed", "what", what)
			s.warnReadable(files.Key)
		},
		OnError: s.reloadFailed(what),
	})
}

// reloadFailed returns what is to be done when files have changed and cannot be taken.
func (s *security) reloadFailed(what string) func(error) {
	return func(err error) {
		s.metrics.Reloaded(what, false)
		s.log.Error("security file rejected, previous content stays in force", "what", what, "error", err)
	}
}

// expiries tells when the certificates in use expire.
func (s *security) expiries() map[string]time.Time {
	all := make(map[string]time.Time)
	if s.callers != nil {
		all["callers"] = s.callers.Expiry()
	}
	if s.peers != nil {
		all["peers"] = s.peers.Expiry()
	}
	return all
}

// warn says once, at the start, what an operator may not have meant.
func (s *security) warn(cfg Config) {
	if isLoopback(cfg.Bind) {
		return
	}
	open := cfg.open()
	if s.callers == nil && cfg.forCallers() {
		open = append(open, "tls-cert-file and tls-key-file (callers are answered in plain text, where tokens can be read on their way)")
	}
	if len(open) > 0 {
		s.log.Warn("this node listens beyond loopback, and is open", "bind", cfg.Bind, "without", strings.Join(open, "; "))
	}
}

// isLoopback reports whether an address is one that no other host reaches.
func isLoopback(address string) bool {
	ip, err := netip.ParseAddr(address)
	return err == nil && ip.Unmap().IsLoopback()
}

// plain reports whether a listener speaks plain text.
func (s *security) plain(listener string) bool {
	if listener == "peer" {
		return s.peers == nil
	}
	return s.callers == nil
}

// callerRules are those for callers' certificates at a listener.
func (s *security) callerRules(listener string) certs.Rules {
	rules := certs.Rules{MinVersion: tls.VersionTLS12, Rejected: s.rejectedCert(listener)}
	switch {
	case s.cfg.TLS.CA == "":
	case listener == "http" || s.cfg.AccessFile != "":
		// A token may stand in for a certificate, and probes have neither: auth demands one where it is needed.
		rules.Demand = certs.IfGiven
	default:
		rules.Demand = certs.Required
	}
	return rules
}

func (s *security) rejectedCert(listener string) func(net.Addr, *certs.RejectedError) {
	return func(from net.Addr, err *certs.RejectedError) { s.denials.note(listener, err.Reason, from, err.Error()) }
}

// serveHTTP serves until the server is shut down.
func (s *security) serveHTTP(server *http.Server, l net.Listener) error {
	server.ErrorLog = log.New(httpComplaints{s}, "", 0)
	if s.callers == nil {
		return server.Serve(l)
	}
	server.TLSConfig = s.callers.Server(s.callerRules("http"), "h2", "http/1.1")
	return server.ServeTLS(l, "", "")
}

// httpComplaints is what net/http writes to its log: a line for each failed handshake, each GOAWAY of a caller, and more that a
// caller can cause as often as it likes.
type httpComplaints struct{ s *security }

// Write implements io.Writer. net/http hands over one message at a time.
func (h httpComplaints) Write(p []byte) (int, error) {
	text, ok := strings.CutPrefix(string(p), "http: TLS handshake error from ")
	if !ok {
		h.s.denials.complain("http", strings.TrimSpace(string(p)))
		return len(p), nil
	}
	from, what, _ := strings.Cut(strings.TrimSpace(text), ": ")
	if !strings.HasPrefix(what, "certs: ") { // which has been noted
		var addr net.Addr
		if ap, err := netip.ParseAddrPort(from); err == nil {
			addr = net.TCPAddrFromAddrPort(ap)
		}
		h.s.badHandshake("http", addr, errors.New(what), strings.Contains(what, "HTTP request to an HTTPS server") || strings.Contains(what, "does not look like a TLS handshake"))
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

// grpcServer returns the options of the server for callers.
func (s *security) grpcServer() []grpc.ServerOption {
	creds := insecure.NewCredentials()
	if s.callers != nil {
		creds = credentials.NewTLS(s.callers.Server(s.callerRules("grpc"), "h2"))
	}
	return []grpc.ServerOption{grpc.Creds(watchedCredentials{creds, s, "grpc"})}
}

var errTooManyConnections = status.Error(codes.Unavailable, "there are too many connections")

// authorizeGRPC authorizes a call over gRPC before its request is read.
func (s *security) authorizeGRPC(ctx context.Context, method string) (context.Context, error) {
	ctx, err := s.auth.GRPC(ctx, method)
	if err == nil {
		err = s.stay(ctx)
	}
	return ctx, err
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

// stayStream is the interceptor of streams that auth.Authorizer's has authorized.
func (s *security) stayStream(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if err := s.stay(stream.Context()); err != nil {
		return err
	}
	return handle(srv, stream)
}

// stay has the connection of an authenticated caller count as such, if there is room for it.
func (s *security) stay(ctx context.Context) error {
	if p, ok := peer.FromContext(ctx); ok && auth.Authenticated(ctx) && !ingress.Of(p.Addr).Authenticated(s.nameOf(ctx)) {
		return errTooManyConnections
	}
	return nil
}

// authorizeHTTP authorizes a request over HTTP before its body is read.
func (s *security) authorizeHTTP(r *http.Request, role auth.Role) (context.Context, *auth.Denial) {
	ctx, denial := s.auth.HTTP(r, role)
	if denial == nil && auth.Authenticated(ctx) && !ingress.FromContext(ctx).Authenticated(s.nameOf(ctx)) {
		return nil, &auth.Denial{Message: "there are too many connections"} // which is closed already
	}
	return ctx, denial
}

// peerRules are those for the certificates of other nodes, in both directions.
func (s *security) peerRules() certs.Rules {
	return certs.Rules{MinVersion: tls.VersionTLS13, Demand: certs.Required, Name: s.cfg.PeerName, Rejected: s.rejectedCert("peer")}
}

// peerServer returns the options of the server for other nodes.
func (s *security) peerServer() []grpc.ServerOption {
	creds := insecure.NewCredentials()
	if s.peers != nil {
		creds = credentials.NewTLS(s.peers.Server(s.peerRules(), "h2"))
	}
	return []grpc.ServerOption{grpc.Creds(watchedCredentials{creds, s, "peer"})}
}

// peerClient returns how this node proves itself to others, nil where it does not.
func (s *security) peerClient() credentials.TransportCredentials {
	if s.peers == nil {
		return nil
	}
	return boundCredentials{credentials.NewTLS(s.peers.Client(s.peerRules())), s}
}

// boundCredentials bind connections to other nodes to the certificates that these present.
type boundCredentials struct {
	credentials.TransportCredentials
	s *security
}

// ClientHandshake implements credentials.TransportCredentials.
func (b boundCredentials) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
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

// watchedCredentials notes the handshakes that fail, which gRPC keeps to itself. Connections whose handshake has proved a certificate
// are authenticated.
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
	if t, ok := info.(credentials.TLSInfo); ok && len(t.State.PeerCertificates) > 0 && !ingress.Of(raw.RemoteAddr()).Authenticated("") { // whose it is says the first call
		return nil, nil, errTooManyConnections
	}
	return ingress.Frames(conn, raw), info, nil
}

// handshakeFailed notes a TLS handshake that failed, unless that has been done or it was somebody who tried whether the port is open.
func (s *security) handshakeFailed(listener string, raw net.Conn, err error) {
	var refused *certs.RejectedError
	var record tls.RecordHeaderError
	switch {
	case errors.As(err, &refused), errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, context.Canceled):
	default:
		s.badHandshake(listener, raw.RemoteAddr(), err, errors.As(err, &record))
	}
}

// respHandshake returns what makes connections of the Redis protocol ones over TLS, nil where that is spoken in plain text.
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

// authenticateRESP authenticates a connection of the Redis protocol. Its commands demand the roles that they need.
func (s *security) authenticateRESP(ctx context.Context, c auth.Credentials) (context.Context, *auth.Denial) {
	return s.auth.Authorize(ctx, "resp", auth.RoleOpen, c)
}

// Clone implements credentials.TransportCredentials.
func (w watchedCredentials) Clone() credentials.TransportCredentials {
	return watchedCredentials{w.TransportCredentials.Clone(), w.s, w.listener}
}

package reload

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// CertFiles names the files of a Certs: PEM files, which may be symbolic links.
type CertFiles struct {
	// Cert has the certificate and its intermediates, Key its private key. Both or neither.
	Cert, Key string
	// CA has the certificates of the trusted authorities. Empty: none.
	CA string
}

// CertConfig configures a Certs. Flags is required.
type CertConfig struct {
	// Flags are the names of the settings of the files, for messages.
	Flags CertFiles
	// OwnName is for both sides of a connection that demand the same of each other, as nodes do. Cert must then be
	// issued by an authority in CA, be valid for both ends of a connection, and have this name (see Rules.Name). Other
	// files are rejected, by OpenCerts too, because other nodes would reject the certificate. A certificate that is not
	// valid yet is accepted, because clocks differ. Empty: not checked.
	OwnName string
	// OnChange is called when new files are in force, and OnError when changed files are invalid: the earlier ones stay
	// in force. Neither is called for the files that OpenCerts itself loads. The calls are one at a time, and must not
	// call Close. Both may be nil.
	OnChange func()
	OnError  func(error)
	// Now returns the time by which certificates expire. Nil: time.Now.
	Now func() time.Time
}

// Certs is the certificate, key and authorities in files. It is safe for concurrent use. When its Watcher is closed,
// the contents in force stay in use.
//
// Certs verifies the other side's certificate itself, at every connection, also a resumed one, against the authorities
// in force at that moment. crypto/tls does not: it gives no reason of a rejection, and cannot have one name stand for a
// whole cluster. A connection is bound to the certificate that the other side presented: it ends when that certificate
// expires, or is no longer valid under the authorities in force. Revocation is not checked: a certificate is valid
// until it expires or its authority is removed from the file.
type Certs struct {
	*Watcher[*certContent]
	files CertFiles
	cfg   CertConfig
}

// certContent is the content of all files, which changes together.
type certContent struct {
	cert  *tls.Certificate // nil without CertFiles.Cert
	roots *x509.CertPool   // nil without CertFiles.CA
}

// Validate returns what is wrong with the names of the files. The error begins with the name of the setting.
func (f CertFiles) Validate(settings CertFiles) error {
	switch {
	case f.Cert != "" && f.Key == "":
		return fmt.Errorf("%s: goes with %s: give both", settings.Cert, settings.Key)
	case f.Cert == "" && f.Key != "":
		return fmt.Errorf("%s: goes with %s: give both", settings.Key, settings.Cert)
	}
	return nil
}

// OpenCerts reads the files and watches them until Close. Its errors begin with the names of the settings.
func OpenCerts(files CertFiles, cfg CertConfig) (*Certs, error) {
	if err := files.Validate(cfg.Flags); err != nil {
		return nil, err
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	s := &Certs{files: files, cfg: cfg}
	onChange := func(*certContent) {
		if cfg.OnChange != nil {
			cfg.OnChange()
		}
	}
	var names, flags []string
	for _, f := range [][2]string{{files.Cert, cfg.Flags.Cert}, {files.Key, cfg.Flags.Key}, {files.CA, cfg.Flags.CA}} {
		if f[0] != "" {
			names, flags = append(names, f[0]), append(flags, f[1])
		}
	}
	var err error
	if s.Watcher, err = Start(names,
		Config[*certContent]{Parse: s.parse, OnChange: onChange, OnError: cfg.OnError}); err != nil {
		return nil, fmt.Errorf("%s: %w", strings.Join(flags, ", "), err)
	}
	return s, nil
}

// Client reads the files once, for a client that verifies servers as crypto/tls does. Its errors begin with the names
// of the settings.
func (f CertFiles) Client(settings CertFiles) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if f == (CertFiles{}) {
		return config, nil
	}
	s, err := OpenCerts(f, CertConfig{Flags: settings})
	if err != nil {
		return nil, err
	}
	s.Close()
	content := s.Current()
	if config.RootCAs = content.roots; content.cert != nil {
		config.Certificates = []tls.Certificate{*content.cert}
	}
	return config, nil
}

// parse parses the files. Its errors never contain a part of a key.
func (s *Certs) parse(contents [][]byte) (*certContent, error) {
	c := new(certContent)
	if s.files.Cert != "" {
		cert, err := tls.X509KeyPair(contents[0], contents[1])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.files.Cert, err)
		}
		if s.cfg.Now().After(cert.Leaf.NotAfter) {
			return nil, fmt.Errorf("%s: the certificate has expired at %v", s.files.Cert, cert.Leaf.NotAfter)
		}
		c.cert = &cert
		contents = contents[2:]
	}
	if s.files.CA != "" {
		var err error
		if c.roots, err = Authorities(contents[0]); err != nil {
			return nil, fmt.Errorf("%s: %w", s.files.CA, err)
		}
	}
	if s.cfg.OwnName != "" {
		if err := s.usable(c); err != nil {
			return nil, fmt.Errorf("%s: others with this %s would reject it: %w", s.files.Cert, s.cfg.Flags.CA, err)
		}
	}
	return c, nil
}

// usable returns why another side with the same authorities and Rules would reject the certificate, or nil.
func (s *Certs) usable(c *certContent) error {
	if c.cert == nil {
		return errors.New("there is no certificate")
	}
	chain, err := c.chain()
	if err != nil {
		return err
	}
	now := s.cfg.Now()
	if begins := chain[0].NotBefore; begins.After(now) {
		now = begins
	}
	for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		if _, err := verified(chain, c.roots, now, s.cfg.OwnName, usage); err != nil {
			return err.err
		}
	}
	return nil
}

// chain returns the certificate and its intermediates.
func (c *certContent) chain() ([]*x509.Certificate, error) {
	return x509.ParseCertificates(slices.Concat(c.cert.Certificate...))
}

// Authorities parses certificates in PEM form. Unlike x509.CertPool.AppendCertsFromPEM it ignores no block: without the
// error, an ignored authority would show only when a caller is rejected.
func Authorities(data []byte) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	for n := 1; ; n++ {
		block, rest := pem.Decode(data)
		if block == nil {
			if n == 1 {
				return nil, errors.New("holds no certificate in PEM form")
			}
			return pool, nil
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("block %d is a %s: only certificates belong here", n, block.Type)
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w", n, err)
		}
		pool.AddCert(cert)
		data = rest
	}
}

// Expiry returns when the first certificate of the chain in force expires; zero: there is none.
func (s *Certs) Expiry() time.Time {
	c := s.Current()
	if c.cert == nil {
		return time.Time{}
	}
	chain, _ := c.chain() // cannot fail: crypto/tls has parsed it
	first := c.cert.Leaf
	for _, cert := range chain {
		if cert.NotAfter.Before(first.NotAfter) {
			first = cert
		}
	}
	return first.NotAfter
}

// Demand is what the other side must present.
type Demand uint8

// The demands.
const (
	Nothing  Demand = iota // nothing; no certificate is asked for
	IfGiven                // a certificate, if presented, must be valid
	Required               // a valid certificate
)

// Rules are what a connection must fulfil.
type Rules struct {
	MinVersion uint16 // of TLS, a constant of crypto/tls
	Demand     Demand // of servers; a client always requires the server's certificate
	// Name must be among the DNS and URI names in the certificate's subject alternative names, exactly, whatever the
	// name of the host. Empty: a server accepts any name; a client must set it.
	Name string
	// Rejected, if set, is called for every certificate that was rejected, and for one that was missing. from is the
	// other side's address; nil: it is a server.
	Rejected func(from net.Addr, err *RejectedError)
}

// The reasons of a RejectedError.
const (
	NoCertificate    = "no_certificate"
	Expired          = "certificate_expired"
	UnknownAuthority = "unknown_authority"
	WrongIdentity    = "wrong_identity"
	BadCertificate   = "bad_certificate" // any other reason, such as another key usage
)

// RejectedError says why the other side's certificate was rejected.
type RejectedError struct {
	Reason string // one of the constants above
	err    error
}

func (e *RejectedError) Error() string { return "certs: " + e.err.Error() }

func (e *RejectedError) Unwrap() error { return e.err }

// Server returns the TLS configuration of a listener. protocols are those of ALPN, the preferred first. CertFiles must
// have a certificate.
func (s *Certs) Server(rules Rules, protocols ...string) *tls.Config {
	config := func(conn net.Conn) *tls.Config {
		c := s.Current()
		out := &tls.Config{
			MinVersion: rules.MinVersion, NextProtos: protocols,
			VerifyConnection: func(state tls.ConnectionState) error {
				if rules.Demand == Nothing {
					return nil
				}
				var from net.Addr
				if conn != nil {
					from = conn.RemoteAddr()
				}
				check, err := s.verify(state, rules, from, x509.ExtKeyUsageClientAuth)
				if bound, ok := conn.(Bound); ok && err == nil && check != nil {
					bound.CheckWith(check)
				}
				return err
			},
		}
		if c.cert != nil {
			out.Certificates = []tls.Certificate{*c.cert}
		}
		if rules.Demand != Nothing {
			// ClientCAs only tells clients which of their certificates to present; verify decides, by the authorities
			// then in force.
			out.ClientAuth, out.ClientCAs = tls.RequestClientCert, c.roots
		}
		// In a resumed session no certificate is presented anew: a certificate that was replaced, or an authority that
		// was removed, would stay valid as long as the ticket.
		out.SessionTicketsDisabled = rules.Demand != Nothing
		return out
	}
	outer := config(nil)
	outer.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) { return config(hello.Conn), nil }
	return outer
}

// Client returns the TLS configuration of a client, whose server's certificate must be issued by an authority in
// CertFiles and have rules.Name.
func (s *Certs) Client(rules Rules) *tls.Config {
	rules.Demand = Required
	return &tls.Config{
		MinVersion: rules.MinVersion,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if c := s.Current(); c.cert != nil {
				return c.cert, nil
			}
			return new(tls.Certificate), nil // for crypto/tls: no certificate
		},
		// crypto/tls would use the authorities at the time of this call, and does not check URI names. VerifyConnection
		// checks all that it leaves out.
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			_, err := s.verify(state, rules, nil, x509.ExtKeyUsageServerAuth)
			return err
		},
	}
}

// Bound is a connection that calls check after each read and before each write, and ends with its first error. If the
// connection that a listener passes to TLS implements Bound, it is bound to the certificate that the other side
// presents.
type Bound interface {
	CheckWith(check func() error)
}

// BindClient returns conn bound to the server's certificate. state is that of its handshake, which had the
// configuration of Client with the same rules.
func (s *Certs) BindClient(conn net.Conn, state tls.ConnectionState, rules Rules) (net.Conn, error) {
	rules.Demand = Required
	check, err := s.verify(state, rules, nil, x509.ExtKeyUsageServerAuth)
	if err != nil {
		return nil, err
	}
	return &boundConn{conn, check}, nil
}

// boundConn is a connection bound to a certificate.
type boundConn struct {
	net.Conn
	check func() error
}

// Read implements net.Conn.
func (c *boundConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		if err := c.checked(); err != nil {
			return 0, err
		}
	}
	return n, err
}

// Write implements net.Conn.
func (c *boundConn) Write(p []byte) (int, error) {
	if err := c.checked(); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

func (c *boundConn) checked() error {
	err := c.check()
	if err != nil {
		_ = c.Close() // the error says why
	}
	return err
}

// verdict is the result of a verification. The zero value: nothing has been verified.
type verdict struct {
	content *certContent // whose authorities were used
	until   time.Time    // when the first certificate of the chain expires
	err     error
}

// verify is the one place where certificates are verified. check verifies the certificate again later; it is nil if
// there is no certificate.
func (s *Certs) verify(state tls.ConnectionState, rules Rules, from net.Addr,
	usage x509.ExtKeyUsage) (check func() error, _ error) {
	refused := func(err *RejectedError) *RejectedError {
		if rules.Rejected != nil {
			rules.Rejected(from, err)
		}
		return err
	}
	if len(state.PeerCertificates) == 0 {
		if rules.Demand == IfGiven {
			return nil, nil
		}
		return nil, refused(&RejectedError{NoCertificate, errors.New("no certificate was presented")})
	}
	var mu sync.Mutex
	var last verdict
	check = func() error { // only a comparison while neither the authorities change nor a certificate expires
		content, now := s.Current(), s.cfg.Now()
		mu.Lock()
		defer mu.Unlock()
		if last.err != nil || last.content == content && !now.After(last.until) {
			return last.err
		}
		until, err := verified(state.PeerCertificates, content.roots, now, rules.Name, usage)
		if last = (verdict{content: content, until: until}); err != nil {
			last.err = refused(err)
		}
		return last.err
	}
	if err := check(); err != nil {
		return nil, err
	}
	return check, nil
}

// verified returns until when chain[0] is valid, or why it is rejected.
func verified(chain []*x509.Certificate, roots *x509.CertPool, now time.Time, name string,
	usage x509.ExtKeyUsage) (until time.Time, _ *RejectedError) {
	leaf := chain[0]
	options := x509.VerifyOptions{
		Roots: roots, Intermediates: x509.NewCertPool(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage},
	}
	for _, c := range chain[1:] {
		options.Intermediates.AddCert(c)
	}
	if options.Roots == nil {
		// crypto/x509 would use the system's authorities, which also issue certificates to strangers.
		return until, &RejectedError{UnknownAuthority, errors.New("no authority is trusted")}
	}
	ways, err := leaf.Verify(options)
	if err != nil {
		return until, &RejectedError{reasonOf(err), fmt.Errorf("certificate of %s: %w", describe(leaf), err)}
	}
	if (name != "" || usage == x509.ExtKeyUsageServerAuth) && !slices.Contains(names(leaf), name) {
		return until, &RejectedError{WrongIdentity,
			fmt.Errorf("certificate of %s, where %q is expected", describe(leaf), name)}
	}
	for _, way := range ways {
		first := slices.MinFunc(way, func(a, b *x509.Certificate) int { return a.NotAfter.Compare(b.NotAfter) })
		if first.NotAfter.After(until) {
			until = first.NotAfter
		}
	}
	return until, nil
}

func reasonOf(err error) string {
	var invalid x509.CertificateInvalidError
	var unknown x509.UnknownAuthorityError
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return Expired
	case errors.As(err, &unknown):
		return UnknownAuthority
	}
	return BadCertificate
}

// names returns the DNS and URI names in the subject alternative names.
func names(cert *x509.Certificate) []string {
	all := slices.Clone(cert.DNSNames)
	for _, u := range cert.URIs {
		all = append(all, u.String())
	}
	return all
}

// describe names a certificate in a message. It quotes and shortens the text, which an untrusted caller may have made.
func describe(cert *x509.Certificate) string {
	return fmt.Sprintf("%.200q", cmp.Or(strings.Join(names(cert), " "), cert.Subject.CommonName))
}

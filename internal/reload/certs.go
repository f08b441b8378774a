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
	"sync/atomic"
	"time"
)

// CertFiles names what Certs reads: PEM files, which may be links.
type CertFiles struct {
	// Cert holds the certificate with those that lead up to its authority, Key its private key. Both or neither.
	Cert, Key string
	// CA holds the certificates of the authorities whose certificates are trusted. Empty: none.
	CA string
}

// CertConfig says how files are watched and who is told. Flags is required.
type CertConfig struct {
	// Flags are the names of the settings that the files come from, for messages.
	Flags CertFiles
	// OwnName is for those who present what they demand, as nodes do to each other: Cert must be by one of the authorities in CA,
	// fit for both ends of a connection, and have this name (see Rules.Name). Other files are not taken, not even by OpenCerts: whoever
	// presented them would be cut off. That a certificate is not valid yet is no reason, for clocks differ. Empty: not looked at.
	OwnName string
	// OnChange is called when new files are in force, OnError when they cannot be: what was in force stays. Not for those
	// that OpenCerts itself loads. One call at a time, which must not call Close. Both may be nil.
	OnChange func()
	OnError  func(error)
	// Now tells the time of day that certificates expire by; nil stands for time.Now.
	Now func() time.Time
}

// Certs is what the files hold. It is safe for concurrent use. What is in force when its Watcher is closed stays in use.
//
// The other side's certificate is verified here and not by crypto/tls, at every connection (resumed ones too) against the
// authorities in force at that moment, so that a rejection has a reason and one name can stand for a whole cluster. A
// connection is bound to the certificate that the other side presented: it ends when that certificate has expired, or is no
// longer valid under the authorities in force. Revocation is not checked: a certificate is valid until it expires or its authority is
// removed from the file.
type Certs struct {
	*Watcher[*certContent]
	files CertFiles
	cfg   CertConfig
}

// certContent is what belongs together.
type certContent struct {
	cert  *tls.Certificate // nil without CertFiles.Cert
	roots *x509.CertPool   // nil without CertFiles.CA
}

// Validate says what is wrong with the names alone, under those of their settings.
func (f CertFiles) Validate(settings CertFiles) error {
	switch {
	case f.Cert != "" && f.Key == "":
		return fmt.Errorf("%s: goes with %s: give both", settings.Cert, settings.Key)
	case f.Cert == "" && f.Key != "":
		return fmt.Errorf("%s: goes with %s: give both", settings.Key, settings.Cert)
	}
	return nil
}

// OpenCerts reads the files and keeps watching them until Close. Errors name the flag.
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
	if s.Watcher, err = Start(names, Config[*certContent]{Parse: s.parse, OnChange: onChange, OnError: cfg.OnError}); err != nil {
		return nil, fmt.Errorf("%s: %w", strings.Join(flags, ", "), err)
	}
	return s, nil
}

// Client reads the files once, for a client of servers whose certificates it verifies as crypto/tls does. Errors name the setting.
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

// parse reads what the files hold. No part of a key is ever in its errors.
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

// usable says why others with the same authorities and Rules would reject the certificate.
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

// chain is the certificate with those that lead up to its authority.
func (c *certContent) chain() ([]*x509.Certificate, error) {
	return x509.ParseCertificates(slices.Concat(c.cert.Certificate...))
}

// Authorities reads certificates in PEM form. Unlike x509.CertPool.AppendCertsFromPEM it passes over nothing: an authority that is left out without a
// word shows only when somebody is refused.
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

// Expiry is when the first of the certificates in force that this side presents expires, or zero without one.
func (s *Certs) Expiry() time.Time {
	c := s.Current()
	if c.cert == nil {
		return time.Time{}
	}
	chain, _ := c.chain() // which crypto/tls has taken
	first := c.cert.Leaf
	for _, cert := range chain {
		if cert.NotAfter.Before(first.NotAfter) {
			first = cert
		}
	}
	return first.NotAfter
}

// Demand is what the other side has to present.
type Demand uint8

// The demands.
const (
	Nothing  Demand = iota // no certificate is asked for
	IfGiven                // one that is presented must be good
	Required               // one must be presented, and be good
)

// Rules are what connections have to be like.
type Rules struct {
	MinVersion uint16 // of TLS, as in crypto/tls
	Demand     Demand // of servers; a client always requires the server's certificate
	// Name must be among the names (DNS or URI) in the certificate's subject alternative names, exactly, whatever the host's
	// name is. Empty: any name will do for a server; a client has to say one.
	Name string
	// Rejected, when set, is told of every certificate that was rejected, and of one that was missing. from is the other
	// side's address, nil for that of a server.
	Rejected func(from net.Addr, err *RejectedError)
}

// The reasons of a RejectedError.
const (
	NoCertificate    = "no_certificate"
	Expired          = "certificate_expired"
	UnknownAuthority = "unknown_authority"
	WrongIdentity    = "wrong_identity"
	BadCertificate   = "bad_certificate" // for anything else, such as a key usage that does not fit
)

// RejectedError says why the other side's certificate was not good enough.
type RejectedError struct {
	Reason string // one of the constants above
	err    error
}

func (e *RejectedError) Error() string { return "certs: " + e.err.Error() }

func (e *RejectedError) Unwrap() error { return e.err }

// Server returns the configuration of a listener. protocols are those to agree on by ALPN, the preferred first. Without
// a certificate in CertFiles it cannot be used.
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
			// verify does the rest, with what is in force then. ClientCAs only tells clients which of theirs to present.
			out.ClientAuth, out.ClientCAs = tls.RequestClientCert, c.roots
		}
		// A resumed session presents no certificate anew: one that has been replaced, or an authority that has been taken
		// out, would go on counting for as long as the ticket does.
		out.SessionTicketsDisabled = rules.Demand != Nothing
		return out
	}
	outer := config(nil)
	outer.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) { return config(hello.Conn), nil }
	return outer
}

// Client returns the configuration of connections to servers, whose certificate must be by one of the authorities in
// CertFiles, and for rules.Name.
func (s *Certs) Client(rules Rules) *tls.Config {
	rules.Demand = Required
	return &tls.Config{
		MinVersion: rules.MinVersion,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if c := s.Current(); c.cert != nil {
				return c.cert, nil
			}
			return new(tls.Certificate), nil // none, says crypto/tls
		},
		// crypto/tls would use the authorities of the moment when the configuration was made, and knows no names that are
		// URIs. VerifyConnection does all that it leaves out.
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			_, err := s.verify(state, rules, nil, x509.ExtKeyUsageServerAuth)
			return err
		},
	}
}

// Bound is a connection that calls check after each read and before each write, and ends with its first error. One that a
// listener hands to TLS is bound to the certificate that the other side presents.
type Bound interface {
	CheckWith(check func() error)
}

// BindClient returns conn, on which a handshake by the configuration of Client with the same rules has ended in state, bound to the
// server's certificate.
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

// verdict is what was found when a certificate was verified.
type verdict struct {
	content *certContent // the authorities were in
	until   time.Time    // when the first certificate on the way to an authority expires
	err     error
}

// verify is the one place where certificates are looked at. check says later whether the certificate is still good; it is nil where
// there is none.
func (s *Certs) verify(state tls.ConnectionState, rules Rules, from net.Addr, usage x509.ExtKeyUsage) (check func() error, _ error) {
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
	var last atomic.Pointer[verdict]
	last.Store(&verdict{}) // of no content: nothing has been verified
	var mu sync.Mutex      // held while it is verified anew
	check = func() error { // a comparison as long as neither the authorities change nor anything expires
		content, now := s.Current(), s.cfg.Now()
		holds := func(d *verdict) bool { return d.err != nil || d.content == content && !now.After(d.until) }
		if d := last.Load(); holds(d) {
			return d.err
		}
		mu.Lock()
		defer mu.Unlock()
		if d := last.Load(); holds(d) {
			return d.err
		}
		d := &verdict{content: content}
		until, err := verified(state.PeerCertificates, content.roots, now, rules.Name, usage)
		if d.until = until; err != nil {
			d.err = refused(err)
		}
		last.Store(d)
		return d.err
	}
	if err := check(); err != nil {
		return nil, err
	}
	return check, nil
}

// verified says until when a certificate, the first of chain, is good, or why it is not good enough.
func verified(chain []*x509.Certificate, roots *x509.CertPool, now time.Time, name string, usage x509.ExtKeyUsage) (until time.Time, _ *RejectedError) {
	leaf := chain[0]
	options := x509.VerifyOptions{
		Roots: roots, Intermediates: x509.NewCertPool(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage},
	}
	for _, c := range chain[1:] {
		options.Intermediates.AddCert(c)
	}
	if options.Roots == nil {
		// crypto/x509 would take the system's. Whom the system trusts to be a web server is not thereby one of us.
		return until, &RejectedError{UnknownAuthority, errors.New("no authority is trusted")}
	}
	ways, err := leaf.Verify(options)
	if err != nil {
		return until, &RejectedError{reasonOf(err), fmt.Errorf("certificate of %s: %w", describe(leaf), err)}
	}
	if (name != "" || usage == x509.ExtKeyUsageServerAuth) && !slices.Contains(names(leaf), name) {
		return until, &RejectedError{WrongIdentity, fmt.Errorf("certificate of %s, where %q is expected", describe(leaf), name)}
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

// names are those in the subject alternative names that can be demanded.
func names(cert *x509.Certificate) []string {
	all := slices.Clone(cert.DNSNames)
	for _, u := range cert.URIs {
		all = append(all, u.String())
	}
	return all
}

// describe names a certificate in a message. What is in it was made by somebody who may not be trusted.
func describe(cert *x509.Certificate) string {
	return fmt.Sprintf("%.200q", cmp.Or(strings.Join(names(cert), " "), cert.Subject.CommonName))
}

// Package certstest makes certificates for tests: authorities, and certificates that they sign. They are for tests
// only.
package certstest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/must"
)

// Authority signs certificates.
type Authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	// PEM is the authority's certificate.
	PEM []byte
}

// NewAuthority makes an authority.
func NewAuthority(t testing.TB, name string) *Authority {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: serial(t), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(24 * time.Hour),
		IsCA:     true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der := must.Value(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))(t)
	cert := must.Value(x509.ParseCertificate(der))(t)
	return &Authority{t: t, cert: cert, key: key, PEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

// Leaf describes a certificate. The zero value is for a client and a server without a name, valid for some hours.
type Leaf struct {
	CommonName string
	DNS, URIs  []string
	IPs        []net.IP
	Expired    bool
	NotAfter   time.Time          // zero: in some hours
	Usages     []x509.ExtKeyUsage // nil: client and server
}

// Issue signs a certificate, and returns it and its key in PEM form.
func (a *Authority) Issue(leaf Leaf) (cert, key []byte) {
	a.t.Helper()
	private := newKey(a.t)
	template := &x509.Certificate{
		SerialNumber: serial(a.t), Subject: pkix.Name{CommonName: leaf.CommonName}, DNSNames: leaf.DNS,
		IPAddresses: leaf.IPs,
		NotBefore:   time.Now().Add(-time.Hour), NotAfter: leaf.NotAfter, ExtKeyUsage: leaf.Usages,
		KeyUsage: x509.KeyUsageDigitalSignature,
	}
	if leaf.Usages == nil {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	}
	if leaf.NotAfter.IsZero() {
		template.NotAfter = time.Now().Add(12 * time.Hour)
	}
	if leaf.Expired {
		template.NotAfter = time.Now().Add(-time.Minute)
	}
	for _, text := range leaf.URIs {
		u := must.Value(url.Parse(text))(a.t)
		template.URIs = append(template.URIs, u)
	}
	der := must.Value(x509.CreateCertificate(rand.Reader, template, a.cert, private.Public(), a.key))(a.t)
	pkcs8 := must.Value(x509.MarshalPKCS8PrivateKey(private))(a.t)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

// Pair signs a certificate, and returns it for crypto/tls.
func (a *Authority) Pair(leaf Leaf) tls.Certificate {
	a.t.Helper()
	cert, key := a.Issue(leaf)
	return must.Value(tls.X509KeyPair(cert, key))(a.t)
}

// Pool returns a pool with the authority.
func (a *Authority) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return pool
}

// Write writes a certificate, its key and the authority's certificate into files of a directory, and returns their
// names: tls.crt, tls.key and ca.crt. Each file is replaced as a whole.
func (a *Authority) Write(dir string, leaf Leaf) (cert, key, ca string) {
	a.t.Helper()
	certPEM, keyPEM := a.Issue(leaf)
	cert, key, ca = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"), filepath.Join(dir, "ca.crt")
	for file, content := range map[string][]byte{cert: certPEM, key: keyPEM, ca: a.PEM} {
		must.NoError(a.t, os.WriteFile(file+".new", content, 0o600))
		must.NoError(a.t, os.Rename(file+".new", file))
	}
	return cert, key, ca
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	return must.Value(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
}

func serial(t testing.TB) *big.Int {
	t.Helper()
	return must.Value(rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100)))(t)
}

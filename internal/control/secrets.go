package control

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	_ "embed"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/reload"
)

// Templates, for package fmt, of the files that operators may edit.
var (
	//go:embed secrets_access.yaml
	accessTemplate string
	//go:embed secrets_kustomization.yaml
	kustomizationTemplate string
)

// SecretsConfig configures WriteSecrets.
type SecretsConfig struct {
	Namespace string // of the cluster in Kubernetes
	// the Service for callers; SERVICE-headless belongs to it, and the names of Secrets begin with it
	Service  string
	Names    []string // more host names and addresses by which callers reach nodes
	PeerName string   // in every node's certificate
	Days     int      // validity of certificates in days, 1 to 3650; that of authorities is ten times as long
}

// Validate returns what is wrong with a configuration. The error begins with the name of the setting: namespace,
// service, peer-tls-name, names or days.
func (c *SecretsConfig) Validate() error {
	type setting struct{ setting, value string }
	names := []setting{{"namespace", c.Namespace}, {"service", c.Service}, {"peer-tls-name", c.PeerName}}
	for _, name := range c.Names {
		names = append(names, setting{"names", name})
	}
	for _, name := range names {
		if name.value == "" || strings.ContainsAny(name.value, "/ \"\n") {
			return fmt.Errorf("%s: %q is not a name", name.setting, name.value)
		}
	}
	if c.Days < 1 || c.Days > 3650 {
		return fmt.Errorf("days: %d is not a number of days, 1 to 3650", c.Days)
	}
	return nil
}

// callerNames returns the names by which callers reach nodes.
func (c *SecretsConfig) callerNames() []string {
	names := []string{"localhost", "127.0.0.1", "::1"}
	for _, service := range []string{c.Service, c.Service + "-headless"} {
		full := service + "." + c.Namespace
		names = append(names, service, full, full+".svc", full+".svc.cluster.local")
	}
	headless := "*." + c.Service + "-headless." + c.Namespace
	return append(append(names, headless, headless+".svc", headless+".svc.cluster.local"), c.Names...)
}

// secretFile is one of the files of a set.
type secretFile struct {
	name    string // under the directory
	content []byte
}

// WriteSecrets returns an error that wraps ErrExists if one of the files exists.
var ErrExists = errors.New("is there already")

// WriteSecrets makes a set of secrets, valid from now on, in a directory, in files that only their owner may read. It
// returns the names of the files. Unless overwrite is set, it writes nothing if one of them exists. The configuration
// must be valid.
//
// The secrets are authorities, certificates, tokens with their access file, a gossip key and the cluster's secret.
// WriteSecrets neither keeps nor renews any of an earlier set.
func WriteSecrets(directory string, c SecretsConfig, now time.Time, overwrite bool) ([]string, error) {
	files, err := c.make(now)
	if err != nil {
		return nil, err
	}
	var made []string
	for _, one := range files {
		name := filepath.Join(directory, one.name)
		switch _, err := os.Lstat(name); {
		case err == nil && !overwrite:
			return nil, fmt.Errorf("%s %w", name, ErrExists)
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return nil, err
		}
		made = append(made, one.name)
	}
	for _, one := range files {
		name := filepath.Join(directory, one.name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			return nil, err
		}
		if err := (&reload.Replacer{Name: name}).Replace(one.content); err != nil {
			return nil, err
		}
	}
	return made, nil
}

// make makes the files of a set.
func (c *SecretsConfig) make(now time.Time) ([]secretFile, error) {
	callers, err := c.newAuthority("weir callers", c.callerNames(), now, x509.ExtKeyUsageServerAuth)
	if err != nil {
		return nil, err
	}
	nodes, err := c.newAuthority("weir nodes", []string{c.PeerName}, now, x509.ExtKeyUsageServerAuth,
		x509.ExtKeyUsageClientAuth)
	if err != nil {
		return nil, err
	}
	caller, operator, prometheus := auth.NewToken(), auth.NewToken(), auth.NewToken()
	access := fmt.Sprintf(accessTemplate, auth.Hash(caller), auth.Hash(prometheus), auth.Hash(operator))
	secret := func(name string) string { return c.Service + "-" + name }
	callersTLS, nodesTLS := secret("callers-tls"), secret("nodes-tls")
	files := []secretFile{
		{"authorities/callers.crt", callers.pem}, {"authorities/callers.key", callers.keyPEM},
		{"authorities/nodes.crt", nodes.pem}, {"authorities/nodes.key", nodes.keyPEM},
		{"tokens/caller", []byte(caller)}, {"tokens/operator", []byte(operator)},
		{secret("access") + "/access.yaml", []byte(access)},
		{callersTLS + "/ca.crt", callers.pem}, {callersTLS + "/tls.crt", callers.issued},
		{callersTLS + "/tls.key", callers.issuedKey},
		{secret("cluster") + "/gossip-keys", randomLine()}, {secret("cluster") + "/secret", randomLine()},
		{secret("metrics") + "/token", []byte(prometheus)},
		{nodesTLS + "/ca.crt", nodes.pem}, {nodesTLS + "/tls.crt", nodes.issued},
		{nodesTLS + "/tls.key", nodes.issuedKey},
	}
	return append(files, secretFile{"kustomization.yaml", c.kustomization(files)},
		secretFile{"namespace.yaml",
			fmt.Appendf(nil, "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: %s\n", c.Namespace)}), nil
}

// kustomization returns a file that makes Secrets of the directories whose names begin with the Service's name.
func (c *SecretsConfig) kustomization(files []secretFile) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, kustomizationTemplate, c.Namespace)
	last := ""
	for _, file := range files {
		dir := filepath.Dir(file.name)
		if !strings.HasPrefix(dir, c.Service+"-") {
			continue
		}
		if dir != last {
			fmt.Fprintf(&b, "  - name: %s\n    files:\n", dir)
			last = dir
		}
		fmt.Fprintf(&b, "      - %s\n", file.name)
	}
	return []byte(b.String())
}

// randomLine returns 256 random bits in base64, the form of gossip keys and of the cluster's secret.
func randomLine() []byte {
	b := make([]byte, 32)
	rand.Read(b) // never fails
	return append(base64.StdEncoding.AppendEncode(nil, b), '\n')
}

// authority is a certificate authority, and the one certificate that it has issued.
type authority struct {
	cert              *x509.Certificate
	key               *ecdsa.PrivateKey
	pem, keyPEM       []byte
	issued, issuedKey []byte // the issued certificate in PEM, and its key
}

// newAuthority makes an authority, and has it issue a certificate for the Service with these names.
func (c *SecretsConfig) newAuthority(name string, names []string, now time.Time,
	usages ...x509.ExtKeyUsage) (a *authority, err error) {
	a = new(authority)
	a.pem, a.keyPEM, err = a.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}, now, 10*c.Days)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: c.Service}, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: usages,
	}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else if !slices.Contains(template.DNSNames, name) {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	a.issued, a.issuedKey, err = a.sign(template, now, c.Days)
	return a, err
}

// sign makes a certificate of the template and its key. The authority signs it; an authority that has no key yet signs
// itself.
func (a *authority) sign(template *x509.Certificate, now time.Time, days int) (cert, key []byte, err error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	// The clocks of other hosts may be behind.
	template.NotBefore, template.NotAfter = now.Add(-5*time.Minute), now.AddDate(0, 0, days)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, k
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &k.PublicKey, signer)
	if err != nil {
		return nil, nil, err
	}
	if a.cert == nil {
		a.key = k
		if a.cert, err = x509.ParseCertificate(der); err != nil {
			return nil, nil, err
		}
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), nil
}

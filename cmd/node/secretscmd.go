package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/auth"
)

// secretsFlags say what secrets are for.
type secretsFlags struct {
	namespace, service string
	names              []string
	peerName           string
	days               int
	force              bool
}

func newSecrets() *cobra.Command {
	var f secretsFlags
	cmd := &cobra.Command{
		Use:   "secrets DIRECTORY",
		Short: "Make the certificates, keys and tokens of a secure cluster",
		Long: `Make in a directory all that a cluster needs to keep strangers out: two authorities, certificates for callers and between
nodes, a gossip key, the cluster's secret, and an access file with tokens of a caller, an operator and Prometheus.

The directory has one directory for each Secret of deploy/k8s, and a kustomization of them: kubectl apply -k DIRECTORY.
On hosts, give the same files to every node:

  --tls-cert-file callers-tls/tls.crt --tls-key-file callers-tls/tls.key --tls-client-ca-file callers-tls/ca.crt
  --peer-tls-cert-file nodes-tls/tls.crt --peer-tls-key-file nodes-tls/tls.key --peer-tls-ca-file nodes-tls/ca.crt
  --peer-tls-name weir-node --access-file access/access.yaml
  --gossip-key-file cluster/gossip-keys --cluster-secret-file cluster/secret

each under DIRECTORY/SERVICE-. Keep DIRECTORY/authorities and DIRECTORY/tokens elsewhere: no node needs them.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			made, err := writeSecrets(args[0], f)
			if err != nil {
				return err
			}
			for _, name := range made {
				fmt.Fprintln(cmd.OutOrStdout(), filepath.Join(args[0], name))
			}
			return nil
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.namespace, "namespace", "weir", "Kubernetes namespace of the cluster")
	fs.StringVar(&f.service, "service", "weir", "name of the Service that callers use; the headless one is SERVICE-headless, and Secrets begin with it")
	fs.StringSliceVar(&f.names, "names", nil, "more host names and addresses that callers reach nodes at, separated by commas")
	fs.StringVar(&f.peerName, "peer-tls-name", "weir-node", "name in every node's certificate")
	fs.IntVar(&f.days, "days", 365, "days that certificates are good for; authorities are good for ten times as long")
	fs.BoolVar(&f.force, "force", false, "write over what is there: nodes with the old secrets and with the new ones do not talk to each other")
	return cmd
}

func (f *secretsFlags) validate() error {
	for _, name := range []struct{ flag, value string }{{"--namespace", f.namespace}, {"--service", f.service}, {"--peer-tls-name", f.peerName}} {
		if name.value == "" || strings.ContainsAny(name.value, "/ \"\n") {
			return fmt.Errorf("%s: %q is not a name", name.flag, name.value)
		}
	}
	if f.days < 1 || f.days > 3650 {
		return fmt.Errorf("--days: %d is not a number of days, 1 to 3650", f.days)
	}
	return nil
}

// callerNames are the names that callers reach nodes by.
func (f *secretsFlags) callerNames() []string {
	names := []string{"localhost", "127.0.0.1", "::1"}
	for _, service := range []string{f.service, f.service + "-headless"} {
		full := service + "." + f.namespace
		names = append(names, service, full, full+".svc", full+".svc.cluster.local")
	}
	headless := "*." + f.service + "-headless." + f.namespace
	return append(append(names, headless, headless+".svc", headless+".svc.cluster.local"), f.names...)
}

// secretFile is a file to be written.
type secretFile struct {
	name    string // under the directory
	content []byte
}

// writeSecrets makes secrets in a directory, and returns the names of the files. Without force it writes nothing where any of
// them is there.
func writeSecrets(directory string, f secretsFlags) ([]string, error) {
	if err := f.validate(); err != nil {
		return nil, err
	}
	files, err := f.make(time.Now())
	if err != nil {
		return nil, err
	}
	var made []string
	for _, file := range files {
		name := filepath.Join(directory, file.name)
		switch _, err := os.Lstat(name); {
		case err == nil && !f.force:
			return nil, fmt.Errorf("%s is there already: give another directory, or --force to write over it", name)
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return nil, err
		}
		made = append(made, file.name)
	}
	for _, file := range files {
		name := filepath.Join(directory, file.name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			return nil, err
		}
		if err := replaceFile(name, file.content); err != nil {
			return nil, err
		}
	}
	return made, nil
}

// replaceFile writes a file that only its owner may read, whatever was there, all or nothing.
func replaceFile(name string, content []byte) (err error) {
	t, err := os.CreateTemp(filepath.Dir(name), ".weir-") // with mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(t.Name()))
		}
	}()
	if _, err := t.Write(content); err != nil {
		return errors.Join(err, t.Close())
	}
	if err := t.Close(); err != nil {
		return err
	}
	return os.Rename(t.Name(), name)
}

// make makes everything, good from now on.
func (f *secretsFlags) make(now time.Time) ([]secretFile, error) {
	callers, err := newAuthority("weir callers", now, 10*f.days)
	if err != nil {
		return nil, err
	}
	nodes, err := newAuthority("weir nodes", now, 10*f.days)
	if err != nil {
		return nil, err
	}
	callersCert, callersKey, err := callers.issue(f.service, f.callerNames(), now, f.days, x509.ExtKeyUsageServerAuth)
	if err != nil {
		return nil, err
	}
	nodesCert, nodesKey, err := nodes.issue(f.service, []string{f.peerName}, now, f.days, x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth)
	if err != nil {
		return nil, err
	}
	caller, operator, prometheus := auth.NewToken(), auth.NewToken(), auth.NewToken()
	access := fmt.Sprintf(`# A beginning: who calls, who scrapes, who looks after it. Callers have the tokens, this file their hashes.
callers:
  - name: caller
    tokens: [%q]
    roles: [check]
    policies: ["*"]
  - name: prometheus
    tokens: [%q]
    roles: [read]
  - name: operator
    tokens: [%q]
    roles: [check, refund, read, topology, admin]
    policies: ["*"]
    namespaces: ["*"]
`, auth.Hash(caller), auth.Hash(prometheus), auth.Hash(operator))
	secret := func(name string) string { return f.service + "-" + name }
	files := []secretFile{
		{"authorities/callers.crt", callers.pem}, {"authorities/callers.key", callers.keyPEM},
		{"authorities/nodes.crt", nodes.pem}, {"authorities/nodes.key", nodes.keyPEM},
		{"tokens/caller", []byte(caller)}, {"tokens/operator", []byte(operator)},
		{secret("access") + "/access.yaml", []byte(access)},
		{secret("callers-tls") + "/ca.crt", callers.pem}, {secret("callers-tls") + "/tls.crt", callersCert}, {secret("callers-tls") + "/tls.key", callersKey},
		{secret("cluster") + "/gossip-keys", randomLine()}, {secret("cluster") + "/secret", randomLine()},
		{secret("metrics") + "/token", []byte(prometheus)},
		{secret("nodes-tls") + "/ca.crt", nodes.pem}, {secret("nodes-tls") + "/tls.crt", nodesCert}, {secret("nodes-tls") + "/tls.key", nodesKey},
	}
	return append(files, secretFile{"kustomization.yaml", f.kustomization(files)},
		secretFile{"namespace.yaml", fmt.Appendf(nil, "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: %s\n", f.namespace)}), nil
}

// kustomization makes Secrets of the files in directories whose names begin with the Service's, and their namespace.
func (f *secretsFlags) kustomization(files []secretFile) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, `# Made by weir secrets. The Secrets' names do not change with what is in them: nodes read changes.
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: %s
resources:
  - namespace.yaml
generatorOptions:
  disableNameSuffixHash: true
secretGenerator:
`, f.namespace)
	last := ""
	for _, file := range files {
		dir := filepath.Dir(file.name)
		if !strings.HasPrefix(dir, f.service+"-") {
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

// randomLine is 256 random bits in base64, as gossip keys and the cluster's secret are read.
func randomLine() []byte {
	b := make([]byte, 32)
	rand.Read(b) // never fails
	return append(base64.StdEncoding.AppendEncode(nil, b), '\n')
}

// authority is one that certificates are issued by.
type authority struct {
	cert        *x509.Certificate
	key         *ecdsa.PrivateKey
	pem, keyPEM []byte
}

func newAuthority(name string, now time.Time, days int) (*authority, error) {
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	a := new(authority)
	var err error
	a.pem, a.keyPEM, err = a.sign(template, now, days)
	return a, err
}

// issue makes a certificate, in PEM, and its key.
func (a *authority) issue(common string, names []string, now time.Time, days int, usages ...x509.ExtKeyUsage) (cert, key []byte, err error) {
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: common}, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: usages,
	}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else if !slices.Contains(template.DNSNames, name) {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	return a.sign(template, now, days)
}

// sign signs what the template says with the authority's key; an authority that has none yet signs itself.
func (a *authority) sign(template *x509.Certificate, now time.Time, days int) (cert, key []byte, err error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)); err != nil {
		return nil, nil, err
	}
	template.NotBefore, template.NotAfter = now.Add(-5*time.Minute), now.AddDate(0, 0, days) // other hosts' clocks may be behind
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
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), nil
}

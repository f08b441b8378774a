package reload

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

const (
	cluster = "spiffe://example.org/weir"
	caller  = "checkout.example.org"
)

func open(t *testing.T, files CertFiles) *Certs {
	t.Helper()
	s := must.Value(OpenCerts(files, CertConfig{Flags: CertFiles{"cert", "key", "ca"}}))(t)
	t.Cleanup(func() { s.Close() })
	return s
}

// issued is a Source with a certificate of a, that trusts a.
func issued(t *testing.T, a *certstest.Authority, leaf certstest.Leaf) *Certs {
	t.Helper()
	cert, key, ca := a.Write(t.TempDir(), leaf)
	return open(t, CertFiles{cert, key, ca})
}

// meet has a client and a server shake hands and exchange a byte, and returns what each thought of it.
func meet(t *testing.T, server, client *tls.Config) (state tls.ConnectionState, serverErr, clientErr error) {
	t.Helper()
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		raw, err := l.Accept()
		if err != nil {
			done <- err
			return
		}
		conn := tls.Server(raw, server)
		defer conn.Close()
		if err := conn.Handshake(); err != nil {
			done <- err
			return
		}
		_, err = conn.Write([]byte{1})
		done <- err
	}()
	conn, err := tls.Dial("tcp", l.Addr().String(), client)
	if err == nil {
		defer conn.Close()
		// Of TLS 1.3 the client knows only now what the server thinks of it.
		_, err = conn.Read(make([]byte, 1))
		state = conn.ConnectionState()
	}
	return state, <-done, err
}

func reason(err error) string {
	var refused *RejectedError
	if errors.As(err, &refused) {
		return refused.Reason
	}
	return ""
}

// TestPeers: who may and who may not talk to a node of the cluster, in both directions.
func TestPeers(t *testing.T) {
	ours, theirs := certstest.NewAuthority(t, "ours"), certstest.NewAuthority(t, "theirs")
	member := certstest.Leaf{URIs: []string{cluster}}
	// Whose authority is another's, but who trusts ours: so that it is the other side who refuses.
	crossed := func(t *testing.T) *Certs {
		cert, key, _ := theirs.Write(t.TempDir(), member)
		_, _, ca := ours.Write(t.TempDir(), member)
		return open(t, CertFiles{cert, key, ca})
	}
	expired := func(t *testing.T) *Certs {
		later := func() time.Time { return time.Now().Add(-2 * time.Minute) }
		cert, key, ca := ours.Write(t.TempDir(), certstest.Leaf{URIs: []string{cluster}, Expired: true})
		s, err := OpenCerts(CertFiles{cert, key, ca}, CertConfig{Flags: CertFiles{"cert", "key", "ca"}, Now: later})
		must.NoError(t, err)
		t.Cleanup(func() { s.Close() })
		return s
	}
	for _, c := range []struct {
		name string
		make func(*testing.T) *Certs
		want string
	}{
		{"a member", func(t *testing.T) *Certs { return issued(t, ours, member) }, ""},
		{"another name", func(t *testing.T) *Certs {
			return issued(t, ours, certstest.Leaf{URIs: []string{"spiffe://example.org/other"}})
		}, WrongIdentity},
		{"the name as common name only",
			func(t *testing.T) *Certs { return issued(t, ours, certstest.Leaf{CommonName: cluster}) }, WrongIdentity},
		{"the name as the beginning of another",
			func(t *testing.T) *Certs { return issued(t, ours, certstest.Leaf{URIs: []string{cluster + "/x"}}) },
			WrongIdentity},
		{"another authority", crossed, UnknownAuthority},
		{"expired", expired, Expired},
	} {
		t.Run(c.name, func(t *testing.T) {
			var told []string
			rules := Rules{MinVersion: tls.VersionTLS13, Demand: Required, Name: cluster,
				Rejected: func(_ net.Addr, err *RejectedError) { told = append(told, err.Reason) }}
			quiet := rules
			quiet.Rejected = nil
			node, other := issued(t, ours, member), c.make(t)
			state, serverErr, _ := meet(t, node.Server(rules), other.Client(quiet))
			if got := reason(serverErr); got != c.want || (serverErr == nil) != (c.want == "") {
				t.Errorf("as a client: %v, want %q", serverErr, c.want)
			}
			expect.True(t, c.want != "" || state.Version == tls.VersionTLS13, "version %x", state.Version)
			_, _, clientErr := meet(t, other.Server(quiet), node.Client(rules))
			if got := reason(clientErr); got != c.want || (clientErr == nil) != (c.want == "") {
				t.Errorf("as a server: %v, want %q", clientErr, c.want)
			}
			want := strings.TrimSuffix(strings.Repeat(c.want+" ", 2), " ")
			expect.True(t, c.want == "" || strings.Join(told, " ") == want, "told of %q, want %q", told, want)
		})
	}
	t.Run("a certificate for servers only", func(t *testing.T) {
		node := issued(t, ours, member)
		half := issued(t, ours, certstest.Leaf{URIs: []string{cluster},
			Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
		rules := Rules{MinVersion: tls.VersionTLS13, Demand: Required, Name: cluster}
		_, err, _ := meet(t, node.Server(rules), half.Client(rules))
		expect.Equal(t, reason(err), BadCertificate, "as a client: %v", err)
		_, _, err = meet(t, half.Server(rules), node.Client(rules))
		expect.NoError(t, err, "as a server")
	})
	t.Run("TLS 1.2", func(t *testing.T) {
		node := issued(t, ours, member)
		client := issued(t, ours, member).Client(Rules{Name: cluster})
		client.MaxVersion = tls.VersionTLS12
		_, err, _ := meet(t, node.Server(Rules{MinVersion: tls.VersionTLS13, Demand: Required, Name: cluster}), client)
		expect.True(t, err != nil, "was accepted")
	})
	t.Run("a client that demands no name", func(t *testing.T) {
		node := issued(t, ours, member)
		_, _, err := meet(t, node.Server(Rules{}), node.Client(Rules{}))
		expect.Equal(t, reason(err), WrongIdentity, "%v", err)
	})
}

func TestOpenErrors(t *testing.T) {
	a := certstest.NewAuthority(t, "a")
	dir := t.TempDir()
	cert, key, ca := a.Write(dir, certstest.Leaf{})
	_, otherKey, _ := a.Write(t.TempDir(), certstest.Leaf{})
	oldCert, oldKey, _ := a.Write(t.TempDir(), certstest.Leaf{Expired: true})
	empty := filepath.Join(dir, "empty")
	must.NoError(t, os.WriteFile(empty, nil, 0o600))
	for _, c := range []struct {
		files CertFiles
		want  string
	}{
		{CertFiles{Cert: cert}, "cert: goes with key"},
		{CertFiles{Key: key}, "key: goes with cert"},
		{CertFiles{Cert: cert, Key: otherKey}, "cert, key: " + cert + ": tls: private key does not match public key"},
		{CertFiles{Cert: cert, Key: empty}, "cert, key: " + cert},
		{CertFiles{Cert: oldCert, Key: oldKey}, "the certificate has expired"},
		{CertFiles{Cert: cert, Key: filepath.Join(dir, "none")}, "cert, key: open "},
		{CertFiles{CA: filepath.Join(dir, "none")}, "ca: open "},
		{CertFiles{CA: empty}, "ca: " + empty + ": holds no certificate"},
		{CertFiles{CA: key}, "ca: " + key + ": block 1 is a PRIVATE KEY"},
	} {
		s, err := OpenCerts(c.files, CertConfig{Flags: CertFiles{"cert", "key", "ca"}})
		expect.ErrorContains(t, err, c.want, "%+v", c.files)
		if err == nil {
			s.Close()
		}
	}
	if pem, err := os.ReadFile(ca); err != nil {
		t.Error(err)
	} else if _, err := Authorities(append(pem,
		[]byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")...)); err == nil ||
		!strings.Contains(err.Error(), "certificate 2") {
		t.Errorf("%v", err)
	}
}

// TestOwnName: a certificate that others would refuse is not taken, at the start or later, and what was in force stays.
func TestOwnName(t *testing.T) {
	a, b := certstest.NewAuthority(t, "a"), certstest.NewAuthority(t, "b")
	good := certstest.Leaf{URIs: []string{"weir://other", cluster}}
	config := func() CertConfig { return CertConfig{Flags: CertFiles{"cert", "key", "ca"}, OwnName: cluster} }
	ofOther := func(dir string) CertFiles { // by a, where b is trusted
		cert, key, ca := a.Write(dir, good)
		must.NoError(t, os.WriteFile(ca, b.PEM, 0o600))
		return CertFiles{cert, key, ca}
	}
	of := func(dir string, leaf certstest.Leaf) CertFiles {
		cert, key, ca := a.Write(dir, leaf)
		return CertFiles{cert, key, ca}
	}
	bad := map[string]func(dir string) CertFiles{
		"signed by unknown authority": ofOther,
		`where "` + cluster + `" is`: func(dir string) CertFiles {
			return of(dir, certstest.Leaf{URIs: []string{"weir://other"}, DNS: []string{"weir"}})
		},
		"incompatible key usage": func(dir string) CertFiles {
			return of(dir, certstest.Leaf{URIs: []string{cluster},
				Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		},
		"incompatible key usage ": func(dir string) CertFiles {
			return of(dir, certstest.Leaf{URIs: []string{cluster},
				Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
		},
	}
	for want, files := range bad {
		s, err := OpenCerts(files(t.TempDir()), config())
		if err == nil {
			s.Close()
		}
		want = strings.TrimSpace(want)
		expect.True(t, err != nil && strings.HasPrefix(err.Error(), "cert, key, ca: ") &&
			strings.Contains(err.Error(), want), "%v, want %s", err, want)
	}
	cert, key, _ := a.Write(t.TempDir(), good)
	if s, err := OpenCerts(CertFiles{Cert: cert, Key: key}, config()); err == nil ||
		!strings.Contains(err.Error(), "no authority") {
		s.Close()
		t.Errorf("%v", err)
	}

	dir := t.TempDir()
	changed, failed := make(chan struct{}, 10), make(chan error, 10)
	cfg := config()
	cfg.OnChange, cfg.OnError = func() { changed <- struct{}{} }, func(err error) { failed <- err }
	files := of(dir, good)
	s := must.Value(OpenCerts(files, cfg))(t)
	defer s.Close()
	before := s.Expiry()
	for want, write := range bad {
		want = strings.TrimSpace(want)
		write(dir)
		// between two files that do not belong together there are other errors
		for s.Err() == nil || !strings.Contains(s.Err().Error(), want) {
			<-failed
		}
		expect.True(t, s.Expiry().Equal(before), "%s is taken", want)
	}
	soon := time.Now().Add(time.Hour).Truncate(time.Second)
	good.NotAfter = soon
	of(dir, good)
	for s.Err() != nil || !s.Expiry().Equal(soon) {
		select {
		case <-changed:
		case <-failed:
		}
	}

	// Nobody's clock is so exact that one could wait for the moment from which on a certificate is valid.
	cfg = config()
	cfg.Now = func() time.Time { return time.Now().Add(-2 * time.Hour) }
	early := must.Value(OpenCerts(of(t.TempDir(), good), cfg))(t)
	early.Close()
}

// FuzzAuthorities: whatever a file of authorities holds, none of its blocks is passed over.
func FuzzAuthorities(f *testing.F) {
	dir := f.TempDir()
	a := certstest.NewAuthority(f, "a")
	cert, key, ca := a.Write(dir, certstest.Leaf{DNS: []string{"x"}})
	for _, name := range []string{cert, key, ca} {
		text := must.Value(os.ReadFile(name))(f)
		f.Add(text)
		f.Add(append(bytes.Clone(text), text...))
		f.Add(text[:len(text)/2])
	}
	f.Add([]byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		pool, err := Authorities(data)
		must.Equal(t, (pool == nil), err != nil, "%v, %v", pool, err)
		if err != nil {
			return
		}
		want := x509.NewCertPool()
		blocks := 0
		for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
			cert, err := x509.ParseCertificate(block.Bytes)
			must.NoError(t, err, "block %d is taken and is no certificate", blocks+1)
			want.AddCert(cert)
			blocks++
		}
		must.True(t, blocks != 0 && pool.Equal(want), "%d blocks, and not all of them in the pool", blocks)
	})
}

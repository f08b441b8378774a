package reload

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

// bindable is a connection of a listener that TLS is spoken on.
type bindable struct{ boundConn }

func (b *bindable) CheckWith(check func() error) { b.check = check }

// echo serves TLS connections that send back what they get, until the test ends.
func echo(t *testing.T, config *tls.Config) (address string) {
	t.Helper()
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			conn := tls.Server(&bindable{boundConn{raw, func() error { return nil }}}, config)
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn) // the client sees it end
			}()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return l.Addr().String()
}

// TestBoundConnections: a connection goes on for as long as the other side's certificate is good, and no longer: at
// either end.
func TestBoundConnections(t *testing.T) {
	a, b := certstest.NewAuthority(t, "a"), certstest.NewAuthority(t, "b")
	const name = "node.test"
	leaf := certstest.Leaf{DNS: []string{name}, NotAfter: time.Now().Add(time.Hour)}
	for _, c := range []struct {
		name   string
		change func(later func(time.Duration), trust func(...*certstest.Authority))
		want   string // the reason; empty: the connection goes on
	}{
		{"nothing", func(func(time.Duration), func(...*certstest.Authority)) {}, ""},
		{"some time", func(later func(time.Duration), _ func(...*certstest.Authority)) { later(59 * time.Minute) }, ""},
		{"too much time", func(later func(time.Duration), _ func(...*certstest.Authority)) { later(61 * time.Minute) },
			Expired},
		{"another authority beside it",
			func(_ func(time.Duration), trust func(...*certstest.Authority)) { trust(a, b) }, ""},
		{"another authority in its place",
			func(_ func(time.Duration), trust func(...*certstest.Authority)) { trust(b) }, UnknownAuthority},
		{"another, and then time", func(later func(time.Duration), trust func(...*certstest.Authority)) {
			trust(a, b)
			later(61 * time.Minute)
		}, Expired},
	} {
		for _, end := range []string{"server", "client"} { // which looks at the other's certificate
			var skew atomic.Int64
			cert, key, ca := a.Write(t.TempDir(), certstest.Leaf{DNS: []string{name}})
			changed := make(chan struct{}, 10)
			own, err := OpenCerts(CertFiles{cert, key, ca}, CertConfig{
				Now:      func() time.Time { return time.Now().Add(time.Duration(skew.Load())) },
				OnChange: func() { changed <- struct{}{} },
			})
			must.NoError(t, err)
			told := make(chan string, 10)
			rules := Rules{MinVersion: tls.VersionTLS13, Demand: Required, Name: name,
				Rejected: func(_ net.Addr, err *RejectedError) { told <- err.Reason }}
			other := &tls.Config{Certificates: []tls.Certificate{a.Pair(leaf)}, RootCAs: a.Pool(), ServerName: name}
			var conn net.Conn
			if end == "server" {
				conn, err = tls.Dial("tcp", echo(t, own.Server(rules)), other)
			} else {
				var dialed *tls.Conn
				if dialed, err = tls.Dial("tcp", echo(t, other), own.Client(rules)); err == nil {
					conn, err = own.BindClient(dialed, dialed.ConnectionState(), rules)
				}
			}
			must.NoError(t, err)
			exchange := func() error {
				if _, err := conn.Write([]byte{1}); err != nil {
					return err
				}
				_, err := io.ReadFull(conn, make([]byte, 1))
				return err
			}
			must.NoError(t, exchange(), "%s", end)
			c.change(func(d time.Duration) { skew.Store(int64(d)) }, func(authorities ...*certstest.Authority) {
				var all []byte
				for _, a := range authorities {
					all = append(all, a.PEM...)
				}
				must.NoError(t, os.WriteFile(ca, all, 0o600))
				own.Reload()
				<-changed
			})
			err = exchange()
			conn.Close()
			expect.True(t, (err == nil) == (c.want == "") && (end != "client" || err == nil || reason(err) == c.want),
				"%s, at the %s: %v", c.name, end, err)
			expect.True(t, end != "client" || !errors.Is(err, io.EOF), "%s: the other end closed first", c.name)
			own.Close()
			if c.want != "" {
				expect.Equal(t, <-told, c.want, "%s, at the %s: told", c.name, end)
			}
			if len(told) > 0 { // once, however many reads and writes there were
				t.Errorf("%s, at the %s: told of %s, too", c.name, end, <-told)
			}
		}
	}
}

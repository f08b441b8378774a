package admission

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/fifo"
)

// Conn is a connection of a Listener.
type Conn struct {
	net.Conn
	listener *Listener
	source   *source
	ended    chan struct{} // closed with the connection
	end      sync.Once

	known         chan struct{} // closed when the connection is authenticated
	authenticated atomic.Bool   // written under the listener's lock
	named         atomic.Bool   // it counts to a caller; the same
	heard         atomic.Bool   // something has been read
	bytes         atomic.Int64  // read before it was authenticated
	calls, begun  atomic.Int64  // over gRPC that began before it was: those that go on, and all
	fewer         fifo.Signal   // set when a call has ended
	check         atomic.Pointer[func() error]

	// Guarded by the listener's lock.
	served   time.Time // since when; zero: it waits
	place    fairshare.Taken
	memory   fairshare.Taken
	rejected *time.Timer // closes the connection, which is beyond a bound; nil: it is not
	gone     bool        // counted in nothing any more
}

// addr is the address of a connection's other end, by which those who are given no more than that find the connection.
type addr struct {
	net.Addr
	conn *Conn
}

// RemoteAddr implements net.Conn. ConnOf finds the Conn by it.
func (c *Conn) RemoteAddr() net.Addr { return addr{c.Conn.RemoteAddr(), c} }

// ConnOf returns the Conn that has an address as its RemoteAddr, such as gRPC's peer.Peer has; nil where there is none.
func ConnOf(a net.Addr) *Conn {
	of, _ := a.(addr)
	return of.conn
}

type connKey struct{}

// ConnContext is http.Server.ConnContext: requests' contexts have the Conn that FromContext returns.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, ConnOf(c.RemoteAddr()))
}

// FromContext returns the Conn of an HTTP request, nil where there is none.
func FromContext(ctx context.Context) *Conn {
	c, _ := ctx.Value(connKey{}).(*Conn)
	return c
}

// Authenticated notes that whoever is at the other end has been authenticated, as that caller (empty: callers are not told apart, or
// which one it is is not known yet), and reports whether the connection may stay. One beyond the bounds on authenticated
// connections is closed. It counts to the first caller that is named, and is cheap from then on. A nil Conn may stay.
func (c *Conn) Authenticated(caller string) bool {
	if c == nil || c.authenticated.Load() && (caller == "" || c.named.Load()) {
		return true
	}
	l := c.listener
	l.mu.Lock()
	before := c.authenticated.Load()
	if c.gone || c.rejected != nil || before && (caller == "" || c.named.Load()) {
		defer l.mu.Unlock()
		return !c.gone && c.rejected == nil
	}
	if before {
		l.giveLocked(c)
	}
	s := c.source
	full := !before && l.cfg.MaxPerSource > 0 && s.authenticated >= l.cfg.MaxPerSource
	if !full {
		full = !l.takeLocked(c, caller)
	}
	if full {
		c.rejected = time.AfterFunc(l.cfg.RejectAfter, func() { _ = c.Close() }) // nobody is there to hear of it
		l.mu.Unlock()
		if c.note(TooManyConnections); l.cfg.RejectAfter == 0 {
			_ = c.Close() // before there is an answer
		}
		return false
	}
	c.named.Store(caller != "")
	if before {
		l.mu.Unlock()
		return true
	}
	l.took += (min(time.Since(c.served), maxGrace) - l.took) / 8
	l.forgetLocked(c)
	c.gone = false
	l.sources[s.prefix] = s
	s.authenticated++
	c.authenticated.Store(true)
	close(c.known)
	l.unlock(l.serveLocked())
	return true
}

// IsAuthenticated reports whether Authenticated has been called. It is true for a nil Conn.
func (c *Conn) IsAuthenticated() bool { return c == nil || c.authenticated.Load() }

// Served returns since when the connection is served.
func (c *Conn) Served() time.Time { return c.served }

// CheckWith has check called after each read and before each write. The connection ends with its first error.
func (c *Conn) CheckWith(check func() error) { c.check.Store(&check) }

// checked returns the error of CheckWith's function.
func (c *Conn) checked() error {
	check := c.check.Load()
	if check == nil {
		return nil
	}
	err := (*check)()
	if err != nil {
		_ = c.Close() // the error says why
	}
	return err
}

// reject closes the connection because of a bound. Its other end is told, unless it has said something, which is answered in order.
func (c *Conn) reject(why Rejection) {
	c.note(why)
	if tell := c.listener.cfg.Farewell; tell != nil && !c.heard.Load() {
		_ = c.SetWriteDeadline(time.Now().Add(farewellPatience))
		_, _ = c.Conn.Write(tell(why))
	}
	_ = c.Close() // nobody is there to hear of it
}

// note tells of a rejection.
func (c *Conn) note(why Rejection) {
	if c.listener.cfg.Rejected != nil {
		c.listener.cfg.Rejected(c.Conn.RemoteAddr(), why)
	}
}

var (
	errForeign = errors.New("ingress: TLS where plain text is spoken")
	errBytes   = errors.New("ingress: too much sent before authentication")
)

// tlsHandshake is the first byte of a TLS connection (RFC 8446, 5.1), with which neither HTTP nor HTTP/2 begins.
const tlsHandshake = 22

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	if !c.authenticated.Load() {
		left, err := c.allowance()
		if err != nil {
			return 0, err
		}
		p = p[:min(int64(len(p)), left)]
	}
	n, err := c.Conn.Read(p)
	if !c.authenticated.Load() {
		c.bytes.Add(int64(n))
	}
	if c.hear() && n > 0 && p[0] == tlsHandshake && c.listener.cfg.Foreign != nil {
		c.listener.cfg.Foreign(c.Conn.RemoteAddr())
		return 0, errForeign
	}
	if n > 0 {
		if err := c.checked(); err != nil {
			return 0, err
		}
	}
	return n, err
}

// allowance returns how much may be read while the connection is anonymous. When it is used up, the one that authenticates it
// has a moment to do so: it may not have had the processor yet.
func (c *Conn) allowance() (int64, error) {
	used := c.bytes.Load()
	if left := anonymousBytes - used; left > 0 {
		return left, nil
	}
	if left := anonymousBytes + int64(time.Since(c.served).Seconds()*anonymousRate) - used; left > 0 {
		return left, nil
	}
	timer := time.NewTimer(authenticationPatience)
	defer timer.Stop()
	select {
	case <-c.known:
		return 1 << 62, nil
	case <-c.ended:
		return 0, net.ErrClosed
	case <-timer.C:
	}
	c.reject(TooManyBytes)
	return 0, errBytes
}

// Write implements net.Conn.
func (c *Conn) Write(p []byte) (int, error) {
	if err := c.checked(); err != nil {
		return 0, err
	}
	if slowest := c.listener.cfg.WriteTimeout; slowest > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(slowest)); err != nil {
			return 0, err
		}
	}
	return c.Conn.Write(p)
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	err := c.Conn.Close()
	c.end.Do(func() {
		close(c.ended)
		l := c.listener
		l.mu.Lock()
		if c.rejected != nil {
			c.rejected.Stop()
		}
		l.forgetLocked(c)
		l.unlock(l.serveLocked())
	})
	return err
}

// EndWrites tells the other end that nothing more comes, while what it sends can still be read. It does nothing for a nil Conn, and
// where the connection cannot do it.
func (c *Conn) EndWrites() error {
	if c == nil {
		return nil
	}
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// hear notes that something has been read, and reports whether it is the first time.
func (c *Conn) hear() bool { return !c.heard.Load() && !c.heard.Swap(true) }

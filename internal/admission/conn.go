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

// Conn is a connection of a Listener: waiting, then served and anonymous, then authenticated (see Listener). The
// methods that say so may be called for a nil Conn, which stands for a connection of another listener.
type Conn struct {
	net.Conn
	listener *Listener
	source   *source
	ended    chan struct{} // closed with the connection
	end      sync.Once

	known         chan struct{}          // closed when the connection is authenticated
	authenticated atomic.Bool            // written under the listener's lock
	caller        atomic.Pointer[string] // that it counts to, or nil: it is not authenticated
	heard         atomic.Bool            // something has been read
	bytes         atomic.Int64           // read before the connection was authenticated
	calls, begun  atomic.Int64           // that began while the connection was anonymous: in progress, and all (gRPC)
	fewer         fifo.Signal            // set when a call has ended
	check         atomic.Pointer[func() error]

	// Guarded by the listener's lock.
	served   time.Time // when the connection was served; zero: it waits
	place    fairshare.Taken
	memory   fairshare.Taken
	rejected *time.Timer // closes the connection, which is beyond a bound; nil: the connection is within the bounds
	gone     bool        // no count contains the connection any more
}

// addr is a connection's remote address. ConnOf finds the Conn by it, for code that has only the address, such as
// gRPC's handlers.
type addr struct {
	net.Addr
	conn *Conn
}

// RemoteAddr implements net.Conn. ConnOf finds the Conn by it.
func (c *Conn) RemoteAddr() net.Addr { return addr{c.Conn.RemoteAddr(), c} }

// ConnOf returns the Conn whose RemoteAddr returned the address, such as the Addr of gRPC's peer.Peer. It returns nil
// for any other address.
func ConnOf(a net.Addr) *Conn {
	of, _ := a.(addr)
	return of.conn
}

type connKey struct{}

// ConnContext is for http.Server.ConnContext: it puts the Conn into the contexts of the connection's requests, for
// FromContext.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, ConnOf(c.RemoteAddr()))
}

// FromContext returns the Conn of an HTTP request's context, or nil if it has none.
func FromContext(ctx context.Context) *Conn {
	c, _ := ctx.Value(connKey{}).(*Conn)
	return c
}

// Authenticated notes that the other end of the connection has authenticated as this caller, and reports whether the
// connection may stay. The caller is empty if callers are not told apart. The connection counts to the first caller;
// later calls take no lock. If the connection is beyond the bounds on authenticated connections, Authenticated closes
// it after ListenerConfig.RejectAfter. A nil Conn may stay.
func (c *Conn) Authenticated(caller string) bool {
	if c == nil || c.authenticated.Load() {
		return true
	}
	l := c.listener
	l.mu.Lock()
	if c.gone || c.rejected != nil || c.authenticated.Load() {
		defer l.mu.Unlock()
		return !c.gone && c.rejected == nil
	}
	s := c.source
	if l.cfg.MaxPerSource > 0 && s.authenticated >= l.cfg.MaxPerSource || !l.takeLocked(c, caller) {
		c.rejected = time.AfterFunc(l.cfg.RejectAfter, func() { _ = c.Close() }) // the remote end is gone if this fails
		l.mu.Unlock()
		if c.note(TooManyConnections); l.cfg.RejectAfter == 0 {
			_ = c.Close() // before there is an answer
		}
		return false
	}
	named := caller // so that other calls allocate nothing
	c.caller.Store(&named)
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

// IsAuthenticated reports whether Authenticated has returned true. It is true for a nil Conn.
func (c *Conn) IsAuthenticated() bool { return c == nil || c.authenticated.Load() }

// Begin counts a request over HTTP/2, whose connection has others, until end is called. If ok is false, the request
// is not to be carried out: ListenerConfig.Memory has no room for one more of this caller, or an anonymous connection
// has too many, and Begin has closed it.
func (c *Conn) Begin(anonymous bool) (end func(), ok bool) {
	if !anonymous {
		who, memory := "", c.listener.cfg.Memory
		if caller := c.caller.Load(); caller != nil {
			who = *caller
		}
		taken, ok := memory.TakeAll(who, PerStream)
		return func() { memory.Give(taken) }, ok
	}
	n := c.calls.Add(1)
	if n <= maxConnRequests {
		return c.callEnded, true
	}
	if n == maxConnRequests+1 {
		c.reject(TooManyAnonymous)
	}
	return func() {}, false
}

// Served returns when the connection was served: when it left the queue of waiting connections.
func (c *Conn) Served() time.Time { return c.served }

// CheckWith sets a function that is called after each read and before each write. The Conn closes itself when check
// returns an error.
func (c *Conn) CheckWith(check func() error) { c.check.Store(&check) }

// checked calls the function that CheckWith has set.
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

// reject closes the connection because of a bound. It sends a Farewell only if nothing was read: an answer to a request
// must come in order.
func (c *Conn) reject(why Rejection) {
	c.note(why)
	if tell := c.listener.cfg.Farewell; tell != nil && !c.heard.Load() {
		_ = c.SetWriteDeadline(time.Now().Add(farewellPatience))
		_, _ = c.Conn.Write(tell(why))
	}
	_ = c.Close() // the remote end is gone if this fails
}

// note reports a rejection to ListenerConfig.Rejected.
func (c *Conn) note(why Rejection) {
	if c.listener.cfg.Rejected != nil {
		c.listener.cfg.Rejected(c.Conn.RemoteAddr(), why)
	}
}

var (
	errForeign = errors.New("admission: TLS where plain text is spoken")
	errBytes   = errors.New("admission: too much sent before authentication")
)

// tlsHandshake is the first byte of a TLS connection (RFC 8446, 5.1). No HTTP/1 or HTTP/2 connection begins with it.
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

// allowance returns how many bytes may be read while the connection is anonymous. When it has used them up, allowance
// waits for a moment, because the goroutine that authenticates the connection may not have run yet.
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

// EndWrites tells the other end that no more bytes come. The connection can still be read. EndWrites does nothing for a
// nil Conn, or if the connection has no CloseWrite.
func (c *Conn) EndWrites() error {
	if c == nil {
		return nil
	}
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// hear notes that a read has returned, and reports whether it is the first one.
func (c *Conn) hear() bool { return !c.heard.Load() && !c.heard.Swap(true) }

package main

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// door is a listener that knows the connections on which the caller has said nothing yet: those of load balancers that
// try whether the port is open, or of browsers that connect in advance. Servers that are told to stop wait for them, 5 s
// for HTTP and 2 min for gRPC, as if a request were on its way.
type door struct {
	net.Listener
	// foreign, when set, is told of a caller who begins to speak TLS where plain text is spoken; it is cut off.
	foreign func(from net.Addr)
	// max is how many connections there may be at a time; 0: any number. full, which goes with it, is told of each that was
	// closed at once because there were as many.
	max  int64
	full func(from net.Addr)
	// slowest is how long a single write may take before the connection ends: the time that a caller has who does not read.
	// 0: any. Not for net/http, which sets deadlines of its own.
	slowest time.Duration

	open atomic.Int64 // connections

	mu     sync.Mutex
	silent map[*doorConn]struct{}
}

// doorConn is a connection through a door.
type doorConn struct {
	net.Conn
	door  *door
	heard atomic.Bool // something has been read, or the connection has ended
	gone  atomic.Bool // closed
}

// patienceWithSilence is how long a silent connection may stay when its server stops: time enough for what is on its way.
const patienceWithSilence = 250 * time.Millisecond

// Accept implements net.Listener.
func (d *door) Accept() (net.Conn, error) {
	var conn net.Conn
	for conn == nil {
		var err error
		if conn, err = d.Listener.Accept(); err != nil {
			return nil, err
		}
		if d.open.Add(1) > d.max && d.max > 0 {
			// Closed rather than left to wait in the system's queue: a caller who is told can go to another node.
			d.open.Add(-1)
			d.full(conn.RemoteAddr())
			_ = conn.Close() // nobody is there to hear of it
			conn = nil
		}
	}
	c := &doorConn{Conn: conn, door: d}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.silent == nil {
		d.silent = make(map[*doorConn]struct{})
	}
	d.silent[c] = struct{}{}
	return c, nil
}

// hush closes the connections that are still silent after a while. It is called when the listener is being closed; the
// caller stops the timer when the server has ended before.
func (d *door) hush() *time.Timer {
	return time.AfterFunc(patienceWithSilence, func() {
		d.mu.Lock()
		silent := make([]*doorConn, 0, len(d.silent))
		for c := range d.silent {
			silent = append(silent, c)
		}
		d.mu.Unlock()
		for _, c := range silent {
			_ = c.Close() // the server sees it end, and forgets it
		}
	})
}

// Read implements net.Conn.
func (c *doorConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.hear() && n > 0 && p[0] == tlsHandshake && c.door.foreign != nil {
		c.door.foreign(c.RemoteAddr())
		return 0, errForeign
	}
	return n, err
}

// tlsHandshake is the first byte of a TLS connection (RFC 8446, 5.1), with which neither HTTP nor HTTP/2 begins.
const tlsHandshake = 22

var errForeign = errors.New("TLS where plain text is spoken")

// Write implements net.Conn.
func (c *doorConn) Write(p []byte) (int, error) {
	if c.door.slowest > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(c.door.slowest)); err != nil {
			return 0, err
		}
	}
	return c.Conn.Write(p)
}

// Close implements net.Conn.
func (c *doorConn) Close() error {
	c.hear()
	if !c.gone.Swap(true) {
		c.door.open.Add(-1)
	}
	return c.Conn.Close()
}

// hear notes that the connection is silent no more, and reports whether it was until now.
func (c *doorConn) hear() bool {
	if c.heard.Load() || c.heard.Swap(true) {
		return false
	}
	c.door.mu.Lock()
	defer c.door.mu.Unlock()
	delete(c.door.silent, c)
	return true
}

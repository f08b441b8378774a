package admission

import (
	"net"
	"time"

	"golang.org/x/net/http2"
)

// maxConnCalls is the most calls that an anonymous connection may have at a time: one to be authorized, and health
// checks. A call takes some KiB, and its headers up to 32 KiB, however few bytes their compressed form has. All
// anonymous connections together take three quarters of MaxCalls at most (TestDivide).
const maxConnCalls = 4

// maxConnRequests is the most requests over HTTP/2 that an anonymous connection may have at a time: a page and its
// files. A request takes up to 48 KiB until its caller has read the answer.
const maxConnRequests = 8

// On an anonymous connection, anonymousCallBurst calls may begin at once, and anonymousCallRate more in each second.
// Without this bound, memory for calls that are denied at once would make the heap grow faster than the garbage
// collector frees it.
const anonymousCallBurst, anonymousCallRate = 16, 10

// Frames returns conn, from which a server with the options of Calls reads HTTP/2 frames in plain text. raw is the Conn
// below conn. While raw is anonymous, a Read returns bytes of one frame only, and no frame begins while maxConnCalls
// calls go on or too many calls have begun.
func Frames(conn, raw net.Conn) net.Conn {
	c := ConnOf(raw.RemoteAddr())
	if c == nil {
		return conn
	}
	return &frames{Conn: conn, below: c, left: len(http2.ClientPreface)}
}

// frames is a connection that is read frame by frame while it is anonymous. One goroutine at a time may read from it.
type frames struct {
	net.Conn
	below  *Conn
	left   int // bytes left of the preface, or of a frame's payload
	header [frameHeader]byte
	read   int // bytes of the header that have been read
}

const frameHeader = 9 // RFC 9113, 4.1

// Read implements net.Conn.
func (f *frames) Read(p []byte) (int, error) {
	if f.below.authenticated.Load() {
		return f.Conn.Read(p)
	}
	if f.left > 0 {
		n, err := f.Conn.Read(p[:min(len(p), f.left)])
		f.left -= n
		return n, err
	}
	if f.read == 0 {
		if err := f.below.awaitTurn(); err != nil {
			return 0, err
		}
	}
	n, err := f.Conn.Read(p[:min(len(p), frameHeader-f.read)])
	copy(f.header[f.read:], p[:n])
	if f.read += n; f.read == frameHeader {
		f.read = 0
		f.left = int(f.header[0])<<16 | int(f.header[1])<<8 | int(f.header[2])
	}
	return n, err
}

// callBegan and callEnded count the calls of an anonymous connection.
func (c *Conn) callBegan() {
	c.calls.Add(1)
	c.begun.Add(1)
}

func (c *Conn) callEnded() {
	c.calls.Add(-1)
	c.fewer.Set()
}

// awaitTurn waits until another call may begin, or the connection is authenticated.
func (c *Conn) awaitTurn() error {
	for {
		var wait <-chan time.Time
		early := time.Duration(c.begun.Load()-anonymousCallBurst) * time.Second / anonymousCallRate
		switch {
		case c.calls.Load() >= maxConnCalls:
		case early <= 0:
			return nil
		default:
			if early -= time.Since(c.served); early <= 0 {
				return nil
			}
			wait = time.After(early)
		}
		select {
		case <-c.known:
			return nil
		case <-c.ended:
			return net.ErrClosed
		case <-c.fewer:
		case <-wait:
		}
	}
}

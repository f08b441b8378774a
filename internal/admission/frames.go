package admission

import (
	"net"
	"time"

	"golang.org/x/net/http2"
)

// maxConnCalls are the calls that an anonymous connection may have at a time: one to be authorized, beside health checks. A call
// takes some KiB, and its headers up to 32 KiB, whatever few bytes they were compressed to.
const maxConnCalls = 4

// anonymousCallBurst calls may begin on an anonymous connection at once, and anonymousCallRate in each second: what is allocated for
// calls that are denied as fast as they come would make the heap grow before the garbage collector has freed it.
const anonymousCallBurst, anonymousCallRate = 16, 10

// Frames returns conn, on which the frames of HTTP/2 are read in plain text, for a server that has the options of Calls. While raw,
// the Conn below it, is anonymous, it hands out one frame at a time, and none while there are maxConnCalls calls, or too many have begun.
func Frames(conn, raw net.Conn) net.Conn {
	c := ConnOf(raw.RemoteAddr())
	if c == nil {
		return conn
	}
	return &frames{Conn: conn, below: c, left: len(http2.ClientPreface)}
}

// frames is a connection that is read frame by frame while it is anonymous. It is for one reader.
type frames struct {
	net.Conn
	below  *Conn
	left   int // bytes of the preface, or of a frame's payload
	header [frameHeader]byte
	read   int // bytes of the header
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

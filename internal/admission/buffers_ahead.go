package admission

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
)

// aheadSize is how many bytes are received at a time for a small read, such as of a frame's header.
const aheadSize = 8 << 10

// ahead has the bytes of a connection that were received and not read. It has a buffer only while there are such bytes,
// so that an idle connection has none. One goroutine at a time may call receive.
type ahead struct {
	raw syscall.RawConn // nil: receive reads from the connection below
	mu  sync.Mutex
	buf *[]byte // from the pool of the Buffers; nil: there are no bytes
	off int     // how many bytes of buf have been read
	end bool    // the connection is closed; keep takes no buffer any more
}

// rawOf returns the system's connection below a net.Conn, or nil if it has none.
func rawOf(under net.Conn) syscall.RawConn {
	s, ok := under.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return nil // the reads will fail as well, and return the error
	}
	return raw
}

// receive reads the bytes that are there, or waits for some.
func (c *conn) receive(p []byte) (int, error) {
	if n := c.ahead.take(c.bound, p); n > 0 || len(p) == 0 {
		return n, nil
	}
	if c.ahead.raw == nil || len(p) >= aheadSize/2 {
		return c.Conn.Read(p)
	}
	var buf *[]byte
	var n int
	var failed error
	// The function is called when there may be bytes, until it returns true.
	err := c.ahead.raw.Read(func(fd uintptr) bool {
		buf = c.bound.Get(aheadSize)
		for n, failed = syscall.Read(int(fd), *buf); failed == syscall.EINTR; {
			n, failed = syscall.Read(int(fd), *buf)
		}
		if n <= 0 {
			c.bound.Put(buf)
		}
		return failed != syscall.EAGAIN
	})
	switch {
	case err != nil:
		return 0, err
	case failed != nil:
		return 0, &net.OpError{Op: "read", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(),
			Err: os.NewSyscallError("read", failed)}
	case n == 0:
		return 0, io.EOF
	}
	got := copy(p, (*buf)[:n])
	c.ahead.keep(c.bound, buf, got, n)
	return got, nil
}

// take copies bytes from the buffer to p.
func (a *ahead) take(b *Buffers, p []byte) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.buf == nil {
		return 0
	}
	n = copy(p, (*a.buf)[a.off:])
	if a.off += n; a.off == len(*a.buf) {
		b.Put(a.buf)
		a.buf = nil
	}
	return n
}

// keep keeps a buffer of n bytes, the first off of which have been read.
func (a *ahead) keep(b *Buffers, buf *[]byte, off, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if off == n || a.end {
		b.Put(buf)
		return
	}
	*buf = (*buf)[:n]
	a.buf, a.off = buf, off
}

// close returns the buffer to the pool.
func (a *ahead) close(b *Buffers) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.end = true; a.buf != nil {
		b.Put(a.buf)
		a.buf = nil
	}
}

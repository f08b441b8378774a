package admission

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
)

// aheadSize is how much is received at a time for small reads, such as of the header of a frame.
const aheadSize = 8 << 10

// ahead is what has been received of a connection and not been read. It has a buffer only while there is something, so that an idle
// connection has none. Its receive is for one goroutine at a time.
type ahead struct {
	raw syscall.RawConn // nil: reads are those of the connection below
	mu  sync.Mutex
	buf *[]byte // of the bound's pool; nil: there is nothing
	off int     // of it has been read
	end bool    // the connection is closed, and takes no buffer any more
}

// rawOf returns what a connection is of the system; nil where it is nothing.
func rawOf(under net.Conn) syscall.RawConn {
	s, ok := under.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return nil // reads tell
	}
	return raw
}

// receive reads what there is, or waits for it.
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
	// Called when there may be something to receive, and until there is.
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
		return 0, &net.OpError{Op: "read", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError("read", failed)}
	case n == 0:
		return 0, io.EOF
	}
	got := copy(p, (*buf)[:n])
	c.ahead.keep(c.bound, buf, got, n)
	return got, nil
}

// take reads from the buffer.
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

// keep keeps a buffer of n bytes of which off have been read.
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

// close gives the buffer back.
func (a *ahead) close(b *Buffers) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.end = true; a.buf != nil {
		b.Put(a.buf)
		a.buf = nil
	}
}

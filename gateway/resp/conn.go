package resp

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/limit"
)

// This file has a connection. serve reads with fill and runs rounds; a round parses the commands that have come, runs
// them (command.go), and writes their answers. flush has the queued checks decided. A command that answers at once must
// call flush before it appends to scratch.out (do and failed see to it), so that answers keep their order.

const (
	// firstBuffer is the size of a connection's first buffer for reading. It doubles, up to knownBounds.size, while
	// callers send more at once.
	firstBuffer = 4 << 10
	// maxRound bounds the commands of a round; maxOut is the number of bytes of answers at which they are written
	// before the next command runs. The two bound the memory of a connection whose caller does not read.
	maxRound = 256
	maxOut   = 64 << 10
	// maxEarly bounds the commands of a connection before it is authenticated. Clients send a handful; each costs the
	// node more than its sender.
	maxEarly = 100
	// keepOut bounds the memory for answers that is kept for another round.
	keepOut = 2 * maxOut
	// fewChecks is the number of checks up to which a batch is not counted against Config.Requests. In a larger batch
	// each check counts as perCheck bytes, about the size of the check and its answer.
	fewChecks, perCheck = 16, 1 << 10
	// keepBuffer is the silence after which a connection has a buffer of firstBuffer again.
	keepBuffer = time.Second
	// drainQuiet is the silence after which a draining connection ends, and drainLongest how long such a connection is
	// read at most.
	drainQuiet, drainLongest = 25 * time.Millisecond, time.Second
	// lingerTime and lingerBytes bound what is read and thrown away after the last answer. A connection that is closed
	// with unread bytes is reset, and the caller may lose answers.
	lingerTime, lingerBytes = 250 * time.Millisecond, 1 << 20
)

// conn is a connection. Only its own goroutine (serve) uses it, except for drain.
type conn struct {
	server *Server
	raw    net.Conn // as accepted
	net.Conn
	id     int64
	came   time.Time
	buf    []byte
	from   int       // where the next command in buf begins
	to     int       // where the bytes in buf end
	piece  time.Time // since when buf has had the beginning of a command; zero: it has none
	ending bool      // no further command is run

	ctx         context.Context // for decisions; nil: not authenticated
	credentials auth.Credentials
	early       int  // commands since the connection was opened or last authenticated
	tried       bool // arrive has called isAuthenticated for the connection's credentials
	proto       int
	name        string
	libName     string
	libVersion  string

	mu    sync.Mutex
	until time.Time // when draining ends; zero: drain has not been called
}

func newConn(s *Server, raw net.Conn) *conn {
	return &conn{server: s, raw: raw, Conn: raw, id: s.ids.Add(1), came: time.Now(), proto: resp2}
}

// scratch is the memory of a round. The connection holds it until its answers are written.
type scratch struct {
	burst
	argv    []string
	out     []byte
	pending []pending
	checks  []limit.Check
	results []limit.Result
	// last has the results of earlier look-ups in this round, because the commands of a pipeline are mostly alike.
	last struct {
		name    string // of the last command, as sent
		command *spec
		limit   [3]string // of the last CL.THROTTLE, as sent
		bucket  *bucket
	}
}

// serve reads and answers commands until the connection ends.
func (c *conn) serve() {
	defer c.raw.Close()
	if !c.shake() {
		return
	}
	c.buf = make([]byte, firstBuffer)
	for !c.ending {
		if err := c.fill(); err != nil {
			if begun, _ := c.draining(); begun {
				c.linger()
			}
			return
		}
		c.arrive()
		for !c.ending && c.from < c.to {
			more, err := c.round()
			if err != nil {
				return
			}
			if !more {
				break
			}
		}
	}
	c.linger()
}

// shake does the TLS handshake, if there is one to do.
func (c *conn) shake() bool {
	c.credentials.From = c.raw.RemoteAddr()
	if c.server.cfg.Handshake == nil {
		return true
	}
	if d := c.server.cfg.CommandTimeout; d > 0 {
		_ = c.raw.SetDeadline(time.Now().Add(d)) // an error returns with the next read
	}
	secured, credentials, err := c.server.cfg.Handshake(c.raw)
	if err != nil {
		return false
	}
	c.Conn, c.credentials = secured, credentials
	_ = c.raw.SetDeadline(time.Time{}) // likewise
	return true
}

// fill reads more bytes into buf.
func (c *conn) fill() error {
	switch {
	case c.from == c.to:
		c.from, c.to = 0, 0
	case c.from > 0:
		c.to = copy(c.buf, c.buf[c.from:c.to])
		c.from = 0
	}
	if c.to == len(c.buf) { // round has run all complete commands: what is left is one command, shorter than its bound
		c.grow()
	}
	if err := c.await(time.Now()); err != nil {
		return err
	}
	n, err := c.Read(c.buf[c.to:])
	if begun, _ := c.draining(); n == 0 && c.spare() && !begun && errors.Is(err, os.ErrDeadlineExceeded) {
		c.buf = make([]byte, firstBuffer)
		return c.fill()
	}
	c.to += n
	if c.to == len(c.buf) && c.ctx != nil {
		c.grow() // the next batch may be larger
	}
	if n > 0 {
		return nil
	}
	return err
}

// spare says that the buffer is large and empty.
func (c *conn) spare() bool { return c.to == 0 && len(c.buf) > firstBuffer }

func (c *conn) grow() {
	if size := min(2*len(c.buf), knownBounds.size); size > len(c.buf) {
		c.buf = append(make([]byte, 0, size), c.buf...)[:size]
	}
}

// await sets the deadline of the next read.
func (c *conn) await(now time.Time) error {
	wait, since := c.server.cfg.IdleTimeout, now
	switch {
	case c.from < c.to && c.piece.IsZero():
		c.piece = now
		fallthrough
	case c.from < c.to:
		wait, since = c.server.cfg.CommandTimeout, c.piece
	case c.ctx == nil:
		wait = c.server.cfg.CommandTimeout
	}
	if c.spare() && (wait == 0 || wait > keepBuffer) {
		wait = keepBuffer
	}
	var at time.Time
	if wait > 0 {
		at = since.Add(wait)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if quiet := now.Add(drainQuiet); !c.until.IsZero() && (at.IsZero() || quiet.Before(at)) {
		at = quiet
	}
	return c.SetReadDeadline(at)
}

// drain has the connection end when it has answered what has come.
func (c *conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	c.until = now.Add(drainLongest)
	_ = c.raw.SetReadDeadline(now.Add(drainQuiet)) // an error returns with the read
}

// draining says whether drain has been called, and whether drainLongest has passed since.
func (c *conn) draining() (begun, over bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	begun = !c.until.IsZero()
	return begun, begun && time.Now().After(c.until)
}

// linger ends the connection in a way that lets the caller receive all that was written.
func (c *conn) linger() {
	if s, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		if s.CloseWrite() != nil {
			return
		}
	}
	if admission.ConnOf(c.raw.RemoteAddr()).EndWrites() != nil ||
		c.raw.SetReadDeadline(time.Now().Add(lingerTime)) != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, c.raw, lingerBytes) // until lingerTime has passed
}

// round runs the commands that have come, at most maxRound, and writes their answers. more says that buf may have
// further complete commands. An error means that the connection cannot be written to.
func (c *conn) round() (more bool, err error) {
	s := c.server.scratch.Get().(*scratch)
	bounds, most := knownBounds, maxRound
	if c.ctx == nil {
		bounds, most = openBounds, 1 // one command, because it may authenticate the caller and so change the bounds
	}
	used, bad := s.parse(c.buf[c.from:c.to], bounds, most)
	// One copy for all commands, because buf is reused while keys may still be on their way to other nodes.
	text := string(c.buf[c.from : c.from+used])
	c.from += used
	if used > 0 {
		c.piece = time.Time{}
	}
	for _, at := range s.cmds {
		if c.ending {
			break
		}
		s.argv = s.argv[:0]
		for _, a := range s.args[at.first : at.first+at.n] {
			s.argv = append(s.argv, text[a.from:a.to])
		}
		if c.command(s, s.argv); len(s.out) >= maxOut {
			c.flush(s)
			if err := c.write(s); err != nil {
				return false, err
			}
		}
	}
	c.flush(s)
	if bad != nil && !c.ending {
		c.fail(s, "ERR", bad.Error())
		c.ending = true
	}
	if err := c.write(s); err != nil {
		return false, err
	}
	if _, over := c.draining(); over {
		c.ending = true
	}
	more = len(s.cmds) == most
	c.server.recycle(s) // not after a panic, when other goroutines may still use s
	return more, nil
}

// write writes the answers in s.out.
func (c *conn) write(s *scratch) error {
	if len(s.out) == 0 {
		return nil
	}
	counted, held := admission.ConnOf(c.raw.RemoteAddr()), int64(cap(s.out))
	counted.Hold(held)
	defer counted.Release(held)
	_, err := c.Write(s.out)
	s.out = s.out[:0]
	return err
}

// recycle empties a scratch and returns it to the pool.
func (s *Server) recycle(r *scratch) {
	if cap(r.out) > keepOut {
		return
	}
	clear(r.argv[:cap(r.argv)])
	clear(r.checks[:cap(r.checks)])
	clear(r.pending[:cap(r.pending)])
	clear(r.results)
	*r = scratch{
		burst: burst{cmds: r.cmds[:0], args: r.args[:0]}, argv: r.argv[:0], out: r.out[:0], pending: r.pending[:0],
		checks: r.checks[:0], results: r.results[:0],
	}
	s.scratch.Put(r)
}

// fail answers a command with an error.
func (c *conn) fail(s *scratch, code, text string) {
	s.out = appendError(s.out, code, text)
	c.server.cfg.Failed(code)
}

// isAuthenticated says whether the caller is authenticated at this moment. If it is not yet, the credentials of the
// connection are tried.
func (c *conn) isAuthenticated() bool {
	if c.ctx == nil {
		ctx, denial := c.server.cfg.Authenticate(context.Background(), c.credentials)
		if denial == nil {
			c.enter(ctx)
		}
		return c.ctx != nil
	}
	return c.server.cfg.Current(c.ctx)
}

// arrive authenticates, when the first bytes come, a caller whose connection is enough for that: by its certificate, or
// where callers have no tokens. Such a caller does not count as a stranger, and has the bounds of authenticated ones
// from its first command on.
func (c *conn) arrive() {
	certified := c.credentials.TLS != nil && len(c.credentials.TLS.PeerCertificates) > 0
	if c.ctx == nil && !c.tried && (certified || !c.server.cfg.Tokens) {
		c.tried = true
		c.isAuthenticated()
	}
}

// enter makes ctx's caller the caller of the connection. It returns false when there are too many connections of
// authenticated callers.
func (c *conn) enter(ctx context.Context) bool {
	c.ctx = ctx
	if admission.ConnOf(c.raw.RemoteAddr()).Authenticated(c.server.cfg.Caller(ctx)) {
		return true
	}
	c.ending = true // Authenticated has closed the connection
	return false
}

// flush has the queued checks decided, and answers them.
func (c *conn) flush(s *scratch) {
	n := len(s.checks)
	if n == 0 {
		return
	}
	began := time.Now()
	if n > fewChecks {
		// Enter fails only when the context ends
		taken, _ := c.server.cfg.Requests.Enter(context.Background(), int64(n)*perCheck)
		defer c.server.cfg.Requests.Leave(taken)
	}
	s.results = slices.Grow(s.results[:0], n)[:n]
	if err := c.server.cfg.Service.CheckTo(c.ctx, s.checks, nil, s.results); err != nil && n == 1 {
		s.results[0] = limit.Result{Err: err}
	} else if err != nil {
		// The error charged nothing. It is about one of the checks, so each is decided by itself, and the others get
		// their answers.
		for i := range s.checks {
			if err := c.server.cfg.Service.CheckTo(c.ctx, s.checks[i:i+1], nil, s.results[i:i+1]); err != nil {
				s.results[i] = limit.Result{Err: err}
			}
		}
	}
	for i := range s.results {
		c.answer(s, &s.pending[i], &s.results[i])
	}
	c.server.cfg.Decided(time.Since(began))
	s.pending, s.checks = s.pending[:0], s.checks[:0]
}

package resp

import (
	"context"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/limit"
)

const (
	// firstBuffer is what a connection reads into. It grows while callers send more at once, to knownBounds.size.
	firstBuffer = 4 << 10
	// maxRound is how many commands are carried out before their answers are written, and maxOut how many bytes of answers there may
	// be before no more commands are begun: what a connection takes whose caller does not read follows from them.
	maxRound = 256
	maxOut   = 64 << 10
	// maxEarly is how many commands a connection may send before it is authenticated: a client sends a handful, and each costs the
	// node more than its sender.
	maxEarly = 100
	// keepOut is how much room for answers is kept for the next round, of any connection.
	keepOut = 2 * maxOut
	// fewChecks are not counted against Config.Requests. Of more, each takes perCheck bytes, about: the check and its answer.
	fewChecks, perCheck = 16, 1 << 10
	// drainQuiet is how long nothing may come on a connection that is to end, and drainLongest how long it is read at most.
	drainQuiet, drainLongest = 25 * time.Millisecond, time.Second
	// lingerTime and lingerBytes bound what is read, and thrown away, after the last answer: a connection that is closed with
	// something unread is reset, and the other end may lose the answers.
	lingerTime, lingerBytes = 250 * time.Millisecond, 1 << 20
)

// conn is a connection. It is its goroutine's, but for drain.
type conn struct {
	server *Server
	raw    net.Conn // as accepted
	net.Conn
	id     int64
	came   time.Time
	buf    []byte
	from   int       // where in buf the next command begins
	to     int       // where what has been read ends
	piece  time.Time // since when there is the beginning of a command; zero: there is none
	ending bool      // no more commands are carried out

	ctx         context.Context // to decide in; nil: not authenticated
	credentials auth.Credentials
	early       int  // commands since the connection was last authenticated, or came
	tried       bool // isAuthenticated has been called for what the connection presents
	proto       int
	name        string
	libName     string
	libVersion  string

	mu    sync.Mutex
	until time.Time // when draining ends; zero: not draining
}

func newConn(s *Server, raw net.Conn) *conn {
	return &conn{server: s, raw: raw, Conn: raw, id: s.ids.Add(1), came: time.Now(), proto: resp2}
}

// scratch is what a round takes, and gives back before anything is waited for but decisions.
type scratch struct {
	burst
	argv    []string
	out     []byte
	pending []pending
	checks  []limit.Check
	results []limit.Result
	// last is what was found out for the commands before: those of a pipeline are mostly alike.
	last struct {
		name    string // of a command, as it was sent
		command *spec
		limit   [3]string // of CL.THROTTLE, as it was sent
		bucket  *bucket
	}
}

// serve serves the connection until it ends.
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

// shake makes the connection one over TLS, if it is to be.
func (c *conn) shake() bool {
	c.credentials.From = c.raw.RemoteAddr()
	if c.server.cfg.Handshake == nil {
		return true
	}
	if d := c.server.cfg.CommandTimeout; d > 0 {
		_ = c.raw.SetDeadline(time.Now().Add(d)) // an error shows with the next read
	}
	secured, credentials, err := c.server.cfg.Handshake(c.raw)
	if err != nil {
		return false
	}
	c.Conn, c.credentials = secured, credentials
	_ = c.raw.SetDeadline(time.Time{}) // likewise
	return true
}

// fill reads more.
func (c *conn) fill() error {
	switch {
	case c.from == c.to:
		c.from, c.to = 0, 0
	case c.from > 0:
		c.to = copy(c.buf, c.buf[c.from:c.to])
		c.from = 0
	}
	if c.to == len(c.buf) { // of which a round has taken what it could: the rest is one command, shorter than its bound
		c.grow()
	}
	if err := c.await(time.Now()); err != nil {
		return err
	}
	n, err := c.Read(c.buf[c.to:])
	c.to += n
	if c.to == len(c.buf) && c.ctx != nil {
		c.grow() // callers who send more at once get larger batches
	}
	if n > 0 {
		return nil
	}
	return err
}

func (c *conn) grow() {
	if size := min(2*len(c.buf), knownBounds.size); size > len(c.buf) {
		c.buf = append(make([]byte, 0, size), c.buf...)[:size]
	}
}

// await sets when the next read has to have brought something.
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

// drain has the connection end when what has come is answered.
func (c *conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	c.until = now.Add(drainLongest)
	_ = c.raw.SetReadDeadline(now.Add(drainQuiet)) // an error shows with the read
}

// draining reports whether drain has been called, and whether the time for that is over.
func (c *conn) draining() (begun, over bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	begun = !c.until.IsZero()
	return begun, begun && time.Now().After(c.until)
}

// linger ends the connection so that the other end gets all that was written.
func (c *conn) linger() {
	if s, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		_ = c.SetWriteDeadline(time.Now().Add(lingerTime)) // of TLS; an error shows with what comes next
		if s.CloseWrite() != nil {
			return
		}
	}
	if admission.ConnOf(c.raw.RemoteAddr()).EndWrites() != nil || c.raw.SetReadDeadline(time.Now().Add(lingerTime)) != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, c.raw, lingerBytes) // until nothing comes
}

// round carries out the commands that have come, up to maxRound, and writes their answers. It reports whether there may be more. An
// error means that the connection is of no use any more.
func (c *conn) round() (more bool, err error) {
	s := c.server.scratch.Get().(*scratch)
	bounds, most := knownBounds, maxRound
	if c.ctx == nil {
		bounds, most = openBounds, 1 // which may change the bounds for the next
	}
	used, bad := s.parse(c.buf[c.from:c.to], bounds, most)
	// One copy for all: the buffer is used again, and the keys go on to be asked of other nodes.
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
	c.server.recycle(s) // not after a panic: others may still be at it
	return more, nil
}

// write sends the answers that there are.
func (c *conn) write(s *scratch) error {
	if len(s.out) == 0 {
		return nil
	}
	held := int64(len(s.out))
	c.server.cfg.Buffers.Hold(held)
	defer c.server.cfg.Buffers.Release(held)
	_, err := c.Write(s.out)
	s.out = s.out[:0]
	return err
}

// recycle keeps the room of a round for another one, and nothing that was in it.
func (s *Server) recycle(r *scratch) {
	if cap(r.out) > keepOut {
		return
	}
	clear(r.argv[:cap(r.argv)])
	clear(r.checks[:cap(r.checks)])
	clear(r.pending[:cap(r.pending)])
	clear(r.results)
	*r = scratch{
		burst: burst{cmds: r.cmds[:0], args: r.args[:0]}, argv: r.argv[:0], out: r.out[:0], pending: r.pending[:0], checks: r.checks[:0], results: r.results[:0],
	}
	s.scratch.Put(r)
}

// fail answers a command with an error.
func (c *conn) fail(s *scratch, code, text string) {
	s.out = appendError(s.out, code, text)
	c.server.cfg.Failed(code)
}

// isAuthenticated reports whether the caller is authenticated now, by what its connection presents if it has not said more.
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

// arrive authenticates a caller who need not say more than its connection does, when it begins to say something: the bounds on what strangers
// may send, and on how many of them there may be, are not for it.
func (c *conn) arrive() {
	certified := c.credentials.TLS != nil && len(c.credentials.TLS.PeerCertificates) > 0
	if c.ctx == nil && !c.tried && (certified || !c.server.cfg.Tokens) {
		c.tried = true
		c.isAuthenticated()
	}
}

// enter has the caller be who it has proved to be. It reports false when there are too many connections of authenticated callers.
func (c *conn) enter(ctx context.Context) bool {
	c.ctx = ctx
	if admission.ConnOf(c.raw.RemoteAddr()).Authenticated(c.server.cfg.Caller(ctx)) {
		return true
	}
	c.ending = true // the connection has been closed
	return false
}

// flush has the checks that wait decided, and answers them.
func (c *conn) flush(s *scratch) {
	n := len(s.checks)
	if n == 0 {
		return
	}
	began := time.Now()
	if n > fewChecks {
		taken, _ := c.server.cfg.Requests.Enter(context.Background(), int64(n)*perCheck) // whose end is the only error
		defer c.server.cfg.Requests.Leave(taken)
	}
	s.results = slices.Grow(s.results[:0], n)[:n]
	if err := c.server.cfg.Service.CheckTo(c.ctx, s.checks, nil, s.results); err != nil && n == 1 {
		s.results[0] = limit.Result{Err: err}
	} else if err != nil {
		// Nothing was charged: one of them is not acceptable, which must not be the others' loss.
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

// Package resp serves the Redis protocol: CL.THROTTLE as the module redis-cell has it, WEIR.CHECK and WEIR.PEEK for
// policies, and the commands by which clients of Redis begin and describe a connection (AUTH, HELLO, PING, CLIENT,
// COMMAND, …). It keeps no data and answers any other command with an error.
//
// The protocol is RESP2 and, after HELLO 3, RESP3 (https://redis.io/docs/latest/develop/reference/protocol-spec/). The
// commands that one read brings are decided and answered in their order, in batches. The parser is the package's own,
// because the parser of github.com/tidwall/redcon v1.6.2 is not safe for untrusted input: an array of 9·10¹⁸ elements
// keeps it busy for ever, a bulk string of 2⁶³−1 bytes or of −7 makes it panic, the size of a command has no bound, and
// each piece of a command that arrives in pieces takes more stack.
//
// The package does not promise answers to a caller that closes its connection before they come. It authenticates
// through its Config, and bounds what a connection holds. The listener bounds the number of connections (package
// admission).
//
// The path of a command: conn.fill reads, conn.round parses what has come and runs each command (conn.command,
// conn.do). Checks are queued (conn.queue) and decided as a batch by conn.flush, before any other answer is written, so
// that answers keep the order of commands.
package resp

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
)

// Service decides checks.
type Service interface {
	// CheckTo decides a batch in order and writes the answers to results; see limiter.BatchService.
	CheckTo(ctx context.Context, checks []limit.Check, denied limit.Denials, results []limit.Result) error
}

// Config configures a Server. All fields but Handshake and Requests are required; the zero value of IdleTimeout,
// CommandTimeout and Tokens has the meaning stated.
type Config struct {
	Service Service
	// Authenticate authenticates a caller by its credentials, and returns the context for deciding its commands.
	Authenticate func(ctx context.Context, c auth.Credentials) (context.Context, *auth.Denial)
	// Current says whether the caller of a context that Authenticate returned is still valid: its token may have been
	// withdrawn.
	Current func(ctx context.Context) bool
	// Caller returns the caller's name of a context that Authenticate returned, by which connections are shared out;
	// empty: no name.
	Caller func(ctx context.Context) string
	// Tokens says that callers may have tokens. Without, AUTH is answered as by a Redis without a password.
	Tokens bool
	// Handshake, when set, does the TLS handshake of a connection. The connection has a deadline for it.
	Handshake func(net.Conn) (net.Conn, auth.Credentials, error)
	// IdleTimeout bounds how long an authenticated connection may send nothing between commands; 0: no bound.
	IdleTimeout time.Duration
	// CommandTimeout bounds three times: a command's from its first byte to its last, that until an unauthenticated
	// connection sends something, and that of a TLS handshake; 0: no bound.
	CommandTimeout time.Duration
	// Requests bounds the bytes that batches of checks take while they are decided. Batches of up to fewChecks are not
	// counted. Nil: no bound.
	Requests *admission.Gate
	// Version is this program's version, for HELLO and INFO.
	Version string
	// Decided is called with the time that each batch took.
	Decided func(took time.Duration)
	// Failed is called with the code of each error answer, such as ERR or NOAUTH.
	Failed func(code string)
	// Panicked is called with each panic of a connection; what is "connection". The connection ends without further
	// answers.
	Panicked func(what string, p *panics.Error)
	// Suspicious is called when a caller speaks HTTP, as a browser does that a web page has send requests to this port.
	Suspicious func(from net.Addr)
}

// Server serves the protocol. New makes it. Its methods are safe for concurrent use.
type Server struct {
	cfg      Config
	commands map[string]*spec // by name, in lower case
	began    time.Time
	ids      atomic.Int64
	scratch  sync.Pool // of *scratch

	mu       sync.Mutex
	conns    map[*conn]struct{}
	draining bool
	ended    sync.WaitGroup // goroutines of connections
}

// New returns a Server that has no listener yet: see Serve.
func New(cfg Config) *Server {
	s := &Server{cfg: cfg, commands: make(map[string]*spec), began: time.Now(), conns: make(map[*conn]struct{})}
	for _, c := range specs() {
		s.commands[c.name] = &c
	}
	s.scratch.New = func() any { return new(scratch) }
	return s
}

// Serve accepts and serves the connections of l. It returns nil when l is closed, and the error when Accept fails.
func (s *Server) Serve(l net.Listener) error {
	for {
		raw, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		} else if err != nil {
			return err
		}
		c := newConn(s, raw)
		s.mu.Lock()
		if s.draining {
			s.mu.Unlock()
			_ = raw.Close()
			continue
		}
		s.conns[c] = struct{}{}
		s.ended.Go(func() {
			defer func() {
				s.mu.Lock()
				defer s.mu.Unlock()
				delete(s.conns, c)
			}()
			panics.Tell(func(p *panics.Error) { s.cfg.Panicked("connection", p) }, c.serve)
		})
		s.mu.Unlock()
	}
}

// Shutdown has each connection end once it has answered what has come, and waits for all of them. A connection that
// keeps sending is ended after drainLongest. When ctx is done before, Shutdown closes the remaining connections and
// returns ctx's error. The caller must have closed the listeners.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	for c := range s.conns {
		c.drain()
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		s.ended.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	for c := range s.conns {
		_ = c.raw.Close() // its goroutine ends with the error of its next read or write
	}
	s.mu.Unlock()
	<-done
	return ctx.Err()
}

// connections returns the number of open connections.
func (s *Server) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

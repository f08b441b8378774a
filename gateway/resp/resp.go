// Package resp answers the Redis protocol: CL.THROTTLE as the module redis-cell has it, WEIR.CHECK and WEIR.PEEK for
// policies, and the commands that clients send to a Redis server besides (AUTH, HELLO, PING, CLIENT, COMMAND, …). It keeps
// no data and answers no other command.
//
// The protocol is RESP2 and, after HELLO 3, RESP3 (https://redis.io/docs/latest/develop/reference/protocol-spec/). The commands that
// one read brings are decided as one batch: in their order, and answered in it. The parser is the package's own, because
// that of github.com/tidwall/redcon v1.6.2 is not safe for untrusted input: an array of 9·10¹⁸ elements keeps it busy for
// ever, a bulk string of 2⁶³−1 bytes or of −7 makes it panic, a command may grow without bound, and each piece of one that
// arrives in pieces takes more stack.
//
// The package does not promise that a caller who does not wait for answers gets any. It authenticates through its Config, and bounds
// what a connection holds; how many connections there are is the listener's to bound (package ingress).
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

// Service decides.
type Service interface {
	// CheckTo decides a batch in order, with the answers in results; see limiter.BatchService.
	CheckTo(ctx context.Context, checks []limit.Check, denied limit.Denials, results []limit.Result) error
}

// Buffers counts bytes in use by connections; see admission.Buffers.
type Buffers interface {
	Hold(bytes int64)
	Release(bytes int64)
}

// Config configures a Server. All but Handshake and Requests is required.
type Config struct {
	Service Service
	// Authenticate authenticates a caller by its credentials, and returns the context to decide its commands in.
	Authenticate func(ctx context.Context, c auth.Credentials) (context.Context, *auth.Denial)
	// Current reports whether the caller of a context of Authenticate is still known: its token may have been withdrawn.
	Current func(ctx context.Context) bool
	// Caller returns the name of the caller whom a context of Authenticate is for, to share connections by; empty: it is not told apart.
	Caller func(ctx context.Context) string
	// Tokens is set where callers may have tokens. Otherwise AUTH is answered as by a Redis without a password.
	Tokens bool
	// Handshake, when set, makes a connection one over TLS. It is to be done by the connection's deadline.
	Handshake func(net.Conn) (net.Conn, auth.Credentials, error)
	// IdleTimeout is how long an authenticated connection may be without a command; 0: for ever.
	IdleTimeout time.Duration
	// CommandTimeout is how long a command may take from its first byte to its last, how long an unauthenticated connection may be
	// without one, and how long a TLS handshake may take; 0: any time.
	CommandTimeout time.Duration
	// Requests bounds the bytes that batches of checks take while they are decided; those of a few are not counted. Nil: any number.
	Requests *admission.Gate
	// Buffers counts the bytes of answers that are being written.
	Buffers Buffers
	// Version is this program's version, for HELLO and INFO.
	Version string
	// Decided is called with the time that each batch took to decide.
	Decided func(took time.Duration)
	// Failed is called with the code of each error that is answered, such as ERR or NOAUTH.
	Failed func(code string)
	// Panicked is called with each panic of a "connection", which ends with it: what has been answered is not known.
	Panicked func(what string, p *panics.Error)
	// Suspicious is called for a caller who speaks HTTP: a web page that has a browser send commands.
	Suspicious func(from net.Addr)
}

// Server serves the protocol. Use New. It is safe for concurrent use.
type Server struct {
	cfg      Config
	commands map[string]*spec // by name, in lower case
	began    time.Time
	ids      atomic.Int64
	scratch  sync.Pool // of *scratch

	mu       sync.Mutex
	conns    map[*conn]struct{}
	draining bool
	ended    sync.WaitGroup // of connections
}

// New returns a Server, which Serve has serve.
func New(cfg Config) *Server {
	s := &Server{cfg: cfg, commands: make(map[string]*spec), began: time.Now(), conns: make(map[*conn]struct{})}
	for _, c := range specs() {
		s.commands[c.name] = &c
	}
	s.scratch.New = func() any { return new(scratch) }
	return s
}

// Serve serves the connections of l until that is closed, which is no error, or fails.
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
			_ = raw.Close() // nobody is there to hear of it
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

// Shutdown has each connection end once it has answered what has come, and waits for all. Those that go on sending have a second.
// When ctx is over first the rest is cut off, which is its error. The listener is to be closed before.
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
		_ = c.raw.Close() // its goroutine sees it end
	}
	s.mu.Unlock()
	<-done
	return ctx.Err()
}

// connections returns how many there are.
func (s *Server) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

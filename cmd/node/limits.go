package main

import (
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/weirlimit/weir/internal/ingress"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/rpc"
)

// limitsConfig bounds what callers can hold on to, at each listener. A zero stands for the default, which newLimits has.
type limitsConfig struct {
	MaxConnections int           // of authenticated callers at a time, at each listener; -1: any number
	MaxPerSource   int           // of them, those of one source address; -1: any number; 0: half of MaxConnections
	MaxAnonymous   int           // connections that are not authenticated, at a time, at each listener
	MaxAge         time.Duration // of a connection; -1: any
	IdleTimeout    time.Duration // of a connection over gRPC without calls; -1: any
	MaxStreams     int           // calls at a time on one connection of HTTP/2, which gRPC is
	MaxMessage     int64         // bytes of a request's body
	MaxHeader      int64         // bytes of a request's header fields
	FirstMessage   time.Duration // for the first message of a call over gRPC
	WriteTimeout   time.Duration // for a caller who does not read
	MaxUnread      int64         // bytes of answers that wait for callers of streams to read, about
	MaxInFlight    int           // checks that wait for other nodes or for copies
}

// Defaults, and what is fixed.
const (
	defaultMaxConnections = 10_000
	defaultMaxAge         = time.Hour
	defaultIdleTimeout    = 10 * time.Minute
	defaultMaxStreams     = 1000
	defaultMaxMessage     = 4 << 20 // a full batch with the longest keys
	defaultMaxHeader      = 32 << 10
	defaultFirstMessage   = 10 * time.Second
	defaultWriteTimeout   = 30 * time.Second
	defaultMaxUnread      = 256 << 20

	// Windows of callers' connections, in bytes: how much of a stream, and of all of a connection's, may be on its way to the node
	// before it reads. gRPC by itself would raise them to megabytes for each stream of a caller who sends fast. A stream carries
	// 64 MiB/s over 1 ms; a larger message gets a window of its size while it is being read.
	callerStreamWindow     = 64 << 10
	callerConnectionWindow = 1 << 20

	// maxPeerStreams is for a few streams that last and some short calls; each node has a connection of its own.
	maxPeerStreams = 100
	// A connection on which nothing comes is asked whether somebody is there, and ended when nobody answers.
	keepaliveTime, keepaliveTimeout = time.Minute, 20 * time.Second
)

// newLimits returns c with every zero replaced by its default.
func newLimits(c limitsConfig) limitsConfig {
	if c.MaxConnections == 0 {
		c.MaxConnections = defaultMaxConnections
	}
	if c.MaxPerSource == 0 && c.MaxConnections > 0 {
		c.MaxPerSource = max(c.MaxConnections/2, 1)
	}
	if c.MaxAnonymous == 0 {
		c.MaxAnonymous = ingress.DefaultMaxAnonymous
	}
	if c.MaxAge == 0 {
		c.MaxAge = defaultMaxAge
	}
	if c.IdleTimeout == 0 {
		c.IdleTimeout = defaultIdleTimeout
	}
	if c.MaxStreams == 0 {
		c.MaxStreams = defaultMaxStreams
	}
	if c.MaxMessage == 0 {
		c.MaxMessage = defaultMaxMessage
	}
	if c.MaxHeader == 0 {
		c.MaxHeader = defaultMaxHeader
	}
	if c.MaxInFlight == 0 {
		c.MaxInFlight = limiter.DefaultMaxInFlight
	}
	if c.FirstMessage == 0 {
		c.FirstMessage = defaultFirstMessage
	}
	if c.WriteTimeout == 0 {
		c.WriteTimeout = defaultWriteTimeout
	}
	if c.MaxUnread == 0 {
		c.MaxUnread = defaultMaxUnread
	}
	return c
}

// limitsFlags are the same as the command line writes them.
type limitsFlags struct {
	connections, streams int
	perSource, anonymous int
	age, idle            time.Duration
	inFlight             int
	message, header      parsed[int64]
	unread               parsed[int64]
	write, firstMessage  time.Duration
}

func (f *limitsFlags) register(fs *pflag.FlagSet) {
	fs.IntVar(&f.connections, "max-connections", defaultMaxConnections, "connections of authenticated callers at a time at each port; more are closed; 0: no bound")
	fs.IntVar(&f.perSource, "max-connections-per-source", 0, "those of them from one source, an IPv4 address or an IPv6 /64; 0: half of --max-connections")
	fs.IntVar(&f.anonymous, "max-anonymous-connections", ingress.DefaultMaxAnonymous, "connections at a time at each port whose callers have not been authenticated yet; more wait, and sources take turns")
	fs.DurationVar(&f.age, "max-connection-age", defaultMaxAge, "age from which a caller or node is asked to take another connection; set it below half of what short-lived client certificates live; 0: no bound")
	fs.DurationVar(&f.idle, "idle-timeout", defaultIdleTimeout, "how long a gRPC connection may stay without calls; 0: no bound")
	fs.IntVar(&f.streams, "max-streams", defaultMaxStreams, "calls at a time on one connection of gRPC or HTTP/2; more wait at the caller")
	fs.Var(f.message.by(parseSize(1<<10, 1<<30), "size", "4MiB"), "max-message-size", "largest body of a request, HTTP or gRPC")
	fs.Var(f.header.by(parseSize(1<<10, 1<<20), "size", "32KiB"), "max-header-size", "largest header of a request, HTTP or gRPC")
	fs.IntVar(&f.inFlight, "max-in-flight", limiter.DefaultMaxInFlight, "checks that wait at a time for other nodes or for copies; more are answered by on_error; 0: the default")
	fs.DurationVar(&f.firstMessage, "first-message-timeout", defaultFirstMessage, "longest time between the headers and the first message of a gRPC call")
	fs.DurationVar(&f.write, "write-timeout", defaultWriteTimeout, "longest time that a gRPC connection, or a stream on it, may be stuck because its caller does not read")
	fs.Var(f.unread.by(parseSize(1<<20, 1<<40), "size", "256MiB"), "max-unread", "answers of all streams of checks that wait for their callers to read; streams with more than their share of it are ended then")
}

// config is what the flags say.
func (f *limitsFlags) config() (limitsConfig, error) {
	c := limitsConfig{
		MaxPerSource: f.perSource, MaxAnonymous: f.anonymous, MaxAge: f.age, IdleTimeout: f.idle,
		MaxConnections: f.connections, MaxStreams: f.streams, MaxMessage: f.message.value, MaxHeader: f.header.value,
		FirstMessage: f.firstMessage, WriteTimeout: f.write, MaxInFlight: f.inFlight, MaxUnread: f.unread.value,
	}
	switch {
	case f.connections < 0:
		return c, fmt.Errorf("--max-connections: %d is negative", f.connections)
	case f.connections == 0:
		c.MaxConnections = -1
	}
	if f.perSource < 0 {
		return c, fmt.Errorf("--max-connections-per-source: %d is negative", f.perSource)
	}
	if f.anonymous < 1 {
		return c, fmt.Errorf("--max-anonymous-connections: %d is not positive: every connection begins as one", f.anonymous)
	}
	for _, bound := range []struct {
		flag string
		d    *time.Duration
	}{{"--max-connection-age", &c.MaxAge}, {"--idle-timeout", &c.IdleTimeout}} {
		if *bound.d != 0 && *bound.d < time.Second {
			return c, fmt.Errorf("%s: %v is too short: give a second or more, or 0 for no bound", bound.flag, *bound.d)
		}
		if *bound.d == 0 {
			*bound.d = -1
		}
	}
	if f.streams < 1 || f.streams > 1_000_000 {
		return c, fmt.Errorf("--max-streams: %d is not a number from 1 to 1000000", f.streams)
	}
	if f.inFlight < 0 {
		return c, fmt.Errorf("--max-in-flight: %d is negative", f.inFlight)
	}
	if f.firstMessage < 100*time.Millisecond {
		return c, fmt.Errorf("--first-message-timeout: %v is too short; a slow network needs some seconds", f.firstMessage)
	}
	if f.write < 100*time.Millisecond {
		return c, fmt.Errorf("--write-timeout: %v is too short; a slow network needs some seconds", f.write)
	}
	return c, nil
}

// parseSize returns a parser of amounts of memory within bounds.
func parseSize(least, most uint64) func(string) (int64, error) {
	return func(s string) (int64, error) {
		n, err := humanize.ParseBytes(s)
		if err != nil || n < least || n > most {
			return 0, fmt.Errorf("%q is not a size from %s to %s", s, humanize.IBytes(least), humanize.IBytes(most))
		}
		return int64(n), nil
	}
}

// listener returns the configuration of a listener (http, grpc or peer).
func (c *limitsConfig) listener(name string, s *security) ingress.ListenerConfig {
	cfg := ingress.ListenerConfig{
		MaxConnections: max(c.MaxConnections, 0), MaxPerSource: max(c.MaxPerSource, 0), MaxAnonymous: c.MaxAnonymous,
		Rejected: func(from net.Addr, why ingress.Rejection) { s.refusals.note(name, string(why), from, rejections[why]) },
	}
	if name != "http" {
		cfg.WriteTimeout = c.WriteTimeout
	}
	if s.plain(name) {
		cfg.Foreign = func(from net.Addr) {
			s.refusals.note(name, "tls_on_plain_port", from, "TLS where plain text is spoken")
		}
	}
	return cfg
}

// rejections say which bound a connection was closed for.
var rejections = map[ingress.Rejection]string{
	ingress.TooManyConnections: "--max-connections, --max-connections-per-source",
	ingress.TooManyAnonymous:   "--max-anonymous-connections",
	ingress.TooManyBytes:       "too much was sent before authentication",
}

// grpcServer returns the options of the server for callers.
func (c *limitsConfig) grpcServer() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.InitialWindowSize(callerStreamWindow), grpc.InitialConnWindowSize(callerConnectionWindow),
		grpc.MaxRecvMsgSize(int(c.MaxMessage)), grpc.MaxConcurrentStreams(uint32(c.MaxStreams)), grpc.MaxHeaderListSize(uint32(c.MaxHeader)),
		c.keepalive(),
	}
}

// peerServer returns the options of the server for other nodes.
func (c *limitsConfig) peerServer() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxConcurrentStreams(maxPeerStreams), grpc.MaxHeaderListSize(uint32(c.MaxHeader)),
		grpc.InitialWindowSize(rpc.StreamWindow), grpc.InitialConnWindowSize(rpc.ConnectionWindow),
		c.keepalive(),
	}
}

// keepalive bounds how long a connection over gRPC stays. From MaxAge on, or a tenth before, the caller is asked to open another
// one and to begin no more calls. Streams, which may go on for ever, are ended a little later in good order: see
// ingress.CallsConfig.MaxAge. What is still there when all of them have had the time to end is cut off.
func (c *limitsConfig) keepalive() grpc.ServerOption {
	p := keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveTimeout, MaxConnectionIdle: max(c.IdleTimeout, 0)}
	if c.MaxAge > 0 {
		p.MaxConnectionAge, p.MaxConnectionAgeGrace = c.MaxAge, c.streamAge()-c.MaxAge+c.MaxAge/10+ingress.EndPatience+10*time.Second
	}
	return grpc.KeepaliveParams(p)
}

// streamAge is how old a connection may become before its streams are ended: gRPC spreads what it does at MaxAge over a tenth of it
// in both directions. 0: any age.
func (c *limitsConfig) streamAge() time.Duration {
	if c.MaxAge <= 0 {
		return 0
	}
	return c.MaxAge + c.MaxAge/10 + time.Second
}

// aged asks callers over HTTP whose connection has reached MaxAge to open another one, with the answer to a request.
func (c *limitsConfig) aged(handler http.Handler) http.Handler {
	if c.MaxAge <= 0 {
		return handler
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if conn := ingress.FromContext(r.Context()); conn != nil && time.Since(conn.Served()) > c.MaxAge {
			w.Header().Set("Connection", "close") // over HTTP/2 net/http makes a GOAWAY of it
		}
		handler.ServeHTTP(w, r)
	})
}

// httpServer has a server keep to the limits, beside the times that it has.
func (c *limitsConfig) httpServer(s *http.Server) *http.Server {
	s.MaxHeaderBytes = int(c.MaxHeader)
	s.ConnContext = ingress.ConnContext
	s.Handler = c.aged(s.Handler)
	s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: c.MaxStreams}
	return s
}

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

	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/rpc"
)

// limitsConfig bounds what callers can hold on to, at each door. A zero stands for the default, which newLimits has.
type limitsConfig struct {
	MaxConnections int           // at a time, at each door; -1: any number
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
	inFlight             int
	message, header      parsed[int64]
	unread               parsed[int64]
	write, firstMessage  time.Duration
}

func (f *limitsFlags) register(fs *pflag.FlagSet) {
	fs.IntVar(&f.connections, "max-connections", defaultMaxConnections, "connections at a time at each port; more are closed at once; 0: no bound")
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
	c := limitsConfig{MaxConnections: f.connections, MaxStreams: f.streams, MaxMessage: f.message.value, MaxHeader: f.header.value, FirstMessage: f.firstMessage, WriteTimeout: f.write, MaxInFlight: f.inFlight, MaxUnread: f.unread.value}
	switch {
	case f.connections < 0:
		return c, fmt.Errorf("--max-connections: %d is negative", f.connections)
	case f.connections == 0:
		c.MaxConnections = -1
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

// doors has the doors keep to the limits.
func (c *limitsConfig) doors(refusals *refusals, http, grpc, peer *door) {
	for _, d := range []struct {
		name string
		door *door
	}{{"http", http}, {"grpc", grpc}, {"peer", peer}} {
		if d.door == nil {
			continue
		}
		d.door.max = max(int64(c.MaxConnections), 0)
		d.door.full = func(from net.Addr) {
			refusals.note(d.name, "too_many_connections", from, fmt.Sprintf("there are %d (--max-connections)", c.MaxConnections))
		}
		if d.name != "http" {
			d.door.slowest = c.WriteTimeout
		}
	}
}

// grpcServer returns the options of the server for callers.
func (c *limitsConfig) grpcServer() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.InitialWindowSize(callerStreamWindow), grpc.InitialConnWindowSize(callerConnectionWindow),
		grpc.MaxRecvMsgSize(int(c.MaxMessage)), grpc.MaxConcurrentStreams(uint32(c.MaxStreams)), grpc.MaxHeaderListSize(uint32(c.MaxHeader)),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}),
	}
}

// peerServer returns the options of the server for other nodes.
func (c *limitsConfig) peerServer() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxConcurrentStreams(maxPeerStreams), grpc.MaxHeaderListSize(uint32(c.MaxHeader)),
		grpc.InitialWindowSize(rpc.StreamWindow), grpc.InitialConnWindowSize(rpc.ConnectionWindow),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}),
	}
}

// httpServer has a server keep to the limits, beside the times that it has.
func (c *limitsConfig) httpServer(s *http.Server) *http.Server {
	s.MaxHeaderBytes = int(c.MaxHeader)
	s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: c.MaxStreams}
	return s
}

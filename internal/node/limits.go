package node

import (
	"cmp"
	"fmt"
	"math"
	"net"
	"net/http"
	"time"

	"github.com/dustin/go-humanize"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/observe"
)

const (
	// streamWorkers goroutines carry out callers' calls, one call after the other. A new goroutine has to grow and copy
	// its stack several times on the way to a decision. A call that finds no worker free gets a new goroutine.
	streamWorkers = 256
	// callerConnectionWindow bounds the bytes in flight to the node on all streams of a caller's connection. gRPC does
	// not count bytes that have arrived, read or not.
	callerConnectionWindow = 1 << 20
	// callerReadBuffer stays with an idle connection, and is a part of admission.PerConnection. It has room for the
	// frames of several small calls.
	callerReadBuffer = 2 << 10

	// maxPeerStreams is enough for a few lasting streams and some short calls: each node has its own connection.
	maxPeerStreams = 100
	// After keepaliveTime without bytes, the node pings a connection. It ends the connection if no answer comes within
	// keepaliveTimeout.
	keepaliveTime, keepaliveTimeout = time.Minute, 20 * time.Second
)

// fitted returns the budget with the settings that an operator has chosen: those in c, and state (the bytes for state;
// 0: what the other parts leave; -1: no bound). err is about a setting that cannot fit whatever the others are. If the
// settings together do not fit, over has the chosen ones.
func (c *Limits) fitted(m admission.Budget, state int64) (fitted admission.Budget, over []string, err error) {
	for _, part := range []struct {
		flag         string
		chosen, most int64
	}{
		{"max-connections", int64(c.MaxConnections), math.MaxInt64},
		{"max-anonymous-connections", int64(c.MaxAnonymousConnections), math.MaxInt64},
		{"max-streams", int64(c.MaxStreams), math.MaxInt64},
		{"max-in-flight", int64(c.MaxInFlight), math.MaxInt64},
		{"max-unread", c.MaxUnread, m.Limit},
		{"max-message-size", c.MaxMessageSize, m.Limit / 4},
		{"max-memory", state, m.Limit},
	} {
		if part.chosen > part.most {
			return m, nil, fmt.Errorf("%s: %s do not fit into what the process may use, %s: %s at most", part.flag,
				humanize.IBytes(uint64(part.chosen)), humanize.IBytes(uint64(m.Usable)),
				humanize.IBytes(uint64(part.most)))
		}
		if part.chosen != 0 {
			over = append(over, part.flag)
		}
	}
	if c.MaxConnections != 0 {
		m.Admit(max(c.MaxConnections, 0))
	}
	m.MaxAnonymous, m.MaxInFlight = cmp.Or(c.MaxAnonymousConnections, m.MaxAnonymous),
		cmp.Or(c.MaxInFlight, m.MaxInFlight)
	m.Unread, m.Buffers = cmp.Or(c.MaxUnread, m.Unread), max(m.Buffers, 2*c.MaxMessageSize)
	if m.Refit(); state > 0 {
		m.State = state
	}
	if m.Sum() <= m.Limit && state >= 0 && c.MaxConnections >= 0 {
		over = nil
	}
	return m, over, nil
}

// listener returns the configuration of a listener: http, grpc, peer or resp.
func (c *Limits) listener(name string, s *security, callers *fairshare.Places) admission.ListenerConfig {
	if name == "peer" {
		callers = nil
	}
	cfg := admission.ListenerConfig{
		Memory: callers, ConnBytes: admission.PerConnection,
		MaxConnections: max(c.MaxConnections, 0), MaxPerSource: max(c.MaxConnectionsPerSource, 0),
		MaxAnonymous: c.MaxAnonymousConnections,
		Rejected:     func(from net.Addr, why admission.Rejection) { s.denials.note(name, string(why), from, rejections[why]) },
	}
	if name != "http" {
		cfg.WriteTimeout = c.WriteTimeout
	}
	if name == "grpc" || name == "peer" {
		cfg.RejectAfter = rejectAfter
		cfg.Farewell = func(why admission.Rejection) []byte {
			return goAway("this node has too many connections: " + rejections[why])
		}
	}
	if s.certs(name) == nil {
		cfg.Foreign = func(from net.Addr) {
			s.denials.note(name, "tls_on_plain_port", from, "TLS where plain text is spoken")
		}
	} else {
		cfg.ConnBytes += admission.PerTLS
	}
	return cfg
}

// rejectAfter is how long a connection beyond a bound stays open after the answer that says so.
const rejectAfter = 100 * time.Millisecond

// goAway returns an HTTP/2 frame (RFC 9113, 6.8) that says why a connection is rejected before HTTP/2 is set up on it.
// A client takes it for a failed connection, and waits longer each time before it connects again.
func goAway(why string) []byte {
	const goAwayFrame, enhanceYourCalm = 7, 0xb
	frame := []byte{0, 0, byte(8 + len(why)), goAwayFrame, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, enhanceYourCalm}
	return append(frame, why...)
}

// rejections are the texts of the bounds for which connections are rejected.
var rejections = map[admission.Rejection]string{
	admission.TooManyConnections: "max-connections, max-connections-per-source, or the memory for callers",
	admission.TooManyAnonymous:   "max-anonymous-connections",
	admission.TooManyBytes:       "too much was sent before authentication",
}

// grpcServer returns the options of the server for callers.
func (c *Limits) grpcServer(m admission.Budget) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ReadBufferSize(callerReadBuffer),
		grpc.InitialWindowSize(m.StreamWindow), grpc.InitialConnWindowSize(callerConnectionWindow),
		grpc.MaxRecvMsgSize(int(c.MaxMessageSize)), grpc.MaxConcurrentStreams(uint32(c.MaxStreams)),
		grpc.MaxHeaderListSize(uint32(c.MaxHeaderSize)),
		c.keepalive(),
	}
}

// peerServer returns the options of the server for other nodes.
func (c *Limits) peerServer(m admission.Budget) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxConcurrentStreams(maxPeerStreams), grpc.MaxHeaderListSize(uint32(c.MaxHeaderSize)),
		grpc.InitialWindowSize(m.PeerWindow), grpc.InitialConnWindowSize(4 * m.PeerWindow),
		c.keepalive(),
	}
}

// keepalive bounds the age of a gRPC connection. At MaxConnectionAge, give or take a tenth, gRPC asks the caller to
// open another connection and to begin no more calls on this one. Streams, which may have no end of their own, are
// ended a little later, at streamAge (see admission.CallsConfig.MaxAge). gRPC closes the connection when all of them
// have had the time to end.
func (c *Limits) keepalive() grpc.ServerOption {
	p := keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveTimeout,
		MaxConnectionIdle: max(c.IdleTimeout, 0)}
	if c.MaxConnectionAge > 0 {
		p.MaxConnectionAge, p.MaxConnectionAgeGrace = c.MaxConnectionAge,
			c.streamAge()-c.MaxConnectionAge+c.MaxConnectionAge/10+admission.EndPatience+10*time.Second
	}
	return grpc.KeepaliveParams(p)
}

// streamAge is the age of a connection at which its streams are ended: gRPC acts at a random time within a tenth around
// MaxConnectionAge, and streamAge is later. 0: any age.
func (c *Limits) streamAge() time.Duration {
	if c.MaxConnectionAge <= 0 {
		return 0
	}
	return c.MaxConnectionAge + c.MaxConnectionAge/10 + time.Second
}

// httpServer sets the limits of an HTTP server, except its timeouts.
func (c *Limits) httpServer(s *http.Server) *http.Server {
	s.MaxHeaderBytes = int(c.MaxHeaderSize)
	s.ConnContext = admission.ConnContext
	// net/http, unlike gRPC, counts received bytes until they are read.
	const window = 64 << 10
	s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: c.MaxStreams, MaxReceiveBufferPerConnection: window,
		MaxReceiveBufferPerStream: window}
	return s
}

// readRoom writes the metrics of callers' connections, calls, streams and their memory, and their bounds.
func (n *Node) readRoom(to observe.Lines) {
	connections := to.Gauges("weir_connections", "Connections of authenticated callers, by listener.", "listener")
	most := to.Gauges("weir_connections_max", "The most connections of authenticated callers; 0: any number.",
		"listener")
	for name, l := range map[string]*admission.Listener{"http": n.listeners.http, "grpc": n.listeners.grpc,
		"resp": n.listeners.resp} {
		if l != nil {
			authenticated, _, _ := l.Connections()
			connections(float64(authenticated), name)
			most(float64(max(n.limits.MaxConnections, 0)), name)
		}
	}
	taken, all := n.callersMemory.InUse()
	to.Gauge("weir_callers_bytes", "Memory of callers' connections and streams while they are idle.", float64(taken))
	to.Gauge("weir_callers_bytes_max", "The most such memory; 0: any.", float64(all))
	if c := n.calls.Load(); c != nil {
		unary, streams := c.InUse()
		calls := to.Gauges("weir_calls", "Calls of callers over gRPC that are carried out, by kind (unary, stream).",
			"kind")
		calls(float64(unary), "unary")
		calls(float64(streams), "stream")
		to.Gauges("weir_calls_max", "The most unary calls at a time.", "kind")(float64(n.cfg.Memory.MaxCalls), "unary")
	}
}

package admission

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/fifo"
)

// ListenerConfig configures a Listener. A bound of zero is no bound.
type ListenerConfig struct {
	// MaxConnections bounds the authenticated connections. MaxPerSource bounds those of one source: an IPv4 address or
	// an IPv6 /64. Once half of MaxConnections are taken, a caller may have no more of them than are free
	// (fairshare.Places).
	MaxConnections, MaxPerSource int
	// Memory has the bytes that the connections of several listeners share with calls (see CallsConfig). A connection
	// takes ConnBytes of them when it is authenticated. Nil: no bound.
	Memory    *fairshare.Places
	ConnBytes int
	// MaxAnonymous bounds the connections that are served and not authenticated yet. Each takes up to 100 KiB over
	// gRPC. Required.
	MaxAnonymous int
	// WriteTimeout bounds a single write to a caller that does not read. A listener of net/http must leave it zero:
	// net/http sets deadlines.
	WriteTimeout time.Duration
	// Foreign, if set, is called when a caller begins a TLS handshake on a port without TLS. The connection ends.
	Foreign func(from net.Addr)
	// Farewell, if set, returns what to send on a connection that is rejected before anything of it was read. It must
	// be short.
	Farewell func(Rejection) []byte
	// RejectAfter is how long an authenticated connection beyond a bound stays open, so that the answer that says so
	// reaches the caller.
	RejectAfter time.Duration
	// Rejected, if set, is called for each connection that the Listener rejects.
	Rejected func(from net.Addr, why Rejection)
}

const (
	// maxWaiting bounds the connections that wait to be served. Each costs a file descriptor, and hardly any memory.
	maxWaiting = 1024
	// A served connection may be closed in favour of a waiting one if it has not authenticated within anonymousGrace,
	// or within graceFactor times the average time that callers took lately, if that is longer, up to maxGrace. So a
	// node that is short of processor time does not reject callers because it is slow itself.
	anonymousGrace, maxGrace = time.Second, 5 * time.Second
	graceFactor              = 4
	// anonymousBytes are read from a connection before it is authenticated, and anonymousRate more in each second:
	// enough for a handshake with a chain of certificates, for the first requests, and for probes that share a
	// connection.
	anonymousBytes, anonymousRate = 128 << 10, 1 << 10
	// authenticationPatience is how long a connection that has sent anonymousBytes waits for the handler that
	// authenticates it.
	authenticationPatience = time.Second
	// Probes never authenticate. So while the authenticated connections are at their bound, new connections are served
	// up to spareAnonymous anonymous ones in all, or up to spareOfSource of a source that is at its own bound. More are
	// rejected at once.
	spareAnonymous, spareOfSource = 16, 4
	// farewellPatience bounds the write of a Farewell. The empty send buffer of a new connection has room for it.
	farewellPatience = 5 * time.Millisecond
	// silencePatience is how long CloseSilent waits before it closes connections.
	silencePatience = 250 * time.Millisecond
)

// Rejection is why a connection was closed.
type Rejection string

// The rejections.
const (
	TooManyConnections Rejection = "too_many_connections" // too many authenticated connections, in all or of the source
	// closed in favour of a waiting connection, or one of too many that waited
	TooManyAnonymous Rejection = "too_many_anonymous"
	TooManyBytes     Rejection = "too_many_bytes" // too many bytes before authentication
)

// Listener is a net.Listener that bounds connections by source. It is safe for concurrent use. Use NewListener, and
// call Close when done.
//
// The path of a connection:
//
//	accept              takes it from the system; it waits, unread
//	serveLocked         makes it ready for Accept: it is anonymous now
//	Conn.Authenticated  counts it to its source and caller, or rejects it
//	Conn.Close          ends its counts, and serves the next one that waits
//
// At most MaxAnonymous connections are anonymous. When there is room, the sources with waiting connections take turns,
// and of a source the newest connection is served first, because the caller has most likely given up the oldest. While
// connections wait, the Listener closes the oldest anonymous connection of the source that has the most of them, if its
// time to authenticate (anonymousGrace) is over. So a source that floods the port delays only itself, and no
// authenticated connection is closed for a new one.
type Listener struct {
	net.Listener
	cfg     ListenerConfig
	accepts sync.WaitGroup

	mu        sync.Mutex
	changed   *sync.Cond // a connection is ready, or the listener is closed
	sources   map[netip.Prefix]*source
	turns     []*source // the sources with waiting connections, in the order of their turns
	ready     []*Conn   // served, and not yet returned by Accept
	waiting   int
	anonymous int               // how many connections are served and not authenticated
	took      time.Duration     // a moving average of the time from being served to being authenticated
	places    *fairshare.Places // of authenticated connections
	retry     *time.Timer       // calls serveLocked when the next anonymous connection may be closed
	closed    error             // the error of Accept; nil: the listener is open
}

// source is an address prefix and its connections.
type source struct {
	prefix        netip.Prefix
	waiting       []*Conn // in the order in which they came
	anonymous     []*Conn // in the order in which they were served
	authenticated int
}

// NewListener returns a Listener that accepts from l.
func NewListener(l net.Listener, cfg ListenerConfig) *Listener {
	if cfg.Memory == nil {
		cfg.Memory = fairshare.New(0)
	}
	n := &Listener{Listener: l, cfg: cfg, places: fairshare.New(cfg.MaxConnections),
		sources: make(map[netip.Prefix]*source)}
	n.changed = sync.NewCond(&n.mu)
	n.retry = time.AfterFunc(time.Hour, func() {
		n.mu.Lock()
		defer n.unlock(n.serveLocked())
	})
	n.retry.Stop()
	n.accepts.Go(n.accept)
	return n
}

// accept takes connections from the system until the listener is closed.
func (l *Listener) accept() {
	for delay := time.Duration(0); ; {
		raw, err := l.Listener.Accept()
		var temporary interface{ Temporary() bool }
		if errors.As(err, &temporary) && temporary.Temporary() && !errors.Is(err, net.ErrClosed) {
			// Such as too many open files. net/http and gRPC wait in the same way.
			delay = min(max(2*delay, 5*time.Millisecond), time.Second)
			time.Sleep(delay)
			continue
		}
		delay = 0
		l.mu.Lock()
		if err != nil {
			l.closed = err
			l.changed.Broadcast()
			l.mu.Unlock()
			return
		}
		l.addLocked(raw)
		l.unlock(l.serveLocked())
	}
}

// addLocked adds a new connection to those that wait.
func (l *Listener) addLocked(raw net.Conn) {
	prefix := sourceOf(raw.RemoteAddr())
	s := l.sources[prefix]
	if s == nil {
		s = &source{prefix: prefix}
		l.sources[prefix] = s
	}
	c := &Conn{Conn: raw, listener: l, source: s, ended: make(chan struct{}), known: make(chan struct{}),
		fewer: fifo.NewSignal()}
	if s.waiting = append(s.waiting, c); len(s.waiting) == 1 {
		l.turns = append(l.turns, s)
	}
	l.waiting++
}

// sourceOf returns the source that an address belongs to.
func sourceOf(a net.Addr) netip.Prefix {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Prefix{} // a source of its own, for addresses that are no IP addresses
	}
	ip, bits := ap.Addr().Unmap().WithZone(""), 32
	if ip.Is6() {
		bits = 64
	}
	p, _ := ip.Prefix(bits) // cannot fail: bits fits the address
	return p
}

// rejected is a connection to close, and why.
type rejected struct {
	*Conn
	why Rejection
}

// fullLocked reports whether a new connection of this source must be rejected, because an authenticated one would be
// beyond a bound and the spare ones for probes are taken.
func (l *Listener) fullLocked(s *source) bool {
	if l.anonymous >= min(spareAnonymous, l.cfg.MaxAnonymous) {
		taken, most := l.places.InUse()
		bytes, all := l.cfg.Memory.InUse()
		if most > 0 && taken >= most || all > 0 && bytes+int64(l.cfg.ConnBytes) > all {
			return true
		}
	}
	return l.cfg.MaxPerSource > 0 && s.authenticated >= l.cfg.MaxPerSource &&
		len(s.anonymous) >= min(spareOfSource, l.cfg.MaxAnonymous)
}

// serveLocked serves waiting connections while there is room. It returns the connections to close.
func (l *Listener) serveLocked() (out []rejected) {
	if l.closed != nil {
		return nil
	}
	now := time.Now()
	for l.waiting > 0 {
		if s := l.turns[0]; l.fullLocked(s) {
			newest := s.waiting[len(s.waiting)-1]
			l.forgetLocked(newest)
			out = append(out, rejected{newest, TooManyConnections})
			continue
		}
		if l.anonymous >= l.cfg.MaxAnonymous {
			oldest := l.largestLocked(func(s *source) []*Conn { return s.anonymous })
			if age, grace := now.Sub(oldest.served),
				min(max(graceFactor*l.took, anonymousGrace), maxGrace); age < grace {
				l.retry.Reset(grace - age)
				break
			}
			l.forgetLocked(oldest)
			out = append(out, rejected{oldest, TooManyAnonymous})
			continue
		}
		s := l.turns[0]
		c := s.waiting[len(s.waiting)-1]
		s.waiting[len(s.waiting)-1] = nil
		s.waiting = s.waiting[:len(s.waiting)-1]
		l.turns = l.turns[1:]
		if len(s.waiting) > 0 {
			l.turns = append(l.turns, s)
		}
		l.waiting--
		c.served = now
		s.anonymous = append(s.anonymous, c)
		l.anonymous++
		l.ready = append(l.ready, c)
		l.changed.Signal()
	}
	for l.waiting > maxWaiting {
		oldest := l.largestLocked(func(s *source) []*Conn { return s.waiting })
		l.forgetLocked(oldest)
		out = append(out, rejected{oldest, TooManyAnonymous})
	}
	return out
}

// takeLocked takes a place and memory for a caller's connection, and reports whether there was room.
func (l *Listener) takeLocked(c *Conn, caller string) bool {
	if c.place = l.places.Take(caller, 1); c.place.N == 0 {
		return false
	}
	var fits bool
	if c.memory, fits = l.cfg.Memory.TakeAll(caller, l.cfg.ConnBytes); !fits {
		l.giveLocked(c)
	}
	return fits
}

// giveLocked gives back what takeLocked has taken. A second call does nothing.
func (l *Listener) giveLocked(c *Conn) {
	l.places.Give(c.place)
	l.cfg.Memory.Give(c.memory)
	c.place, c.memory = fairshare.Taken{}, fairshare.Taken{}
}

// largestLocked returns the oldest connection of the source that has the most connections in the list that of returns.
// There must be one.
func (l *Listener) largestLocked(of func(*source) []*Conn) *Conn {
	var most []*Conn
	for _, s := range l.sources {
		list := of(s)
		if len(list) > len(most) || len(list) > 0 && len(list) == len(most) && list[0].served.Before(most[0].served) {
			most = list
		}
	}
	return most[0]
}

// forgetLocked takes a connection out of all counts. A second call does nothing.
func (l *Listener) forgetLocked(c *Conn) {
	s := c.source
	switch i, j := slices.Index(s.anonymous, c), slices.Index(s.waiting, c); {
	case c.gone:
		return
	case c.authenticated.Load():
		s.authenticated--
		l.giveLocked(c)
	case i >= 0:
		s.anonymous = slices.Delete(s.anonymous, i, i+1)
		l.anonymous--
	case j >= 0:
		s.waiting = slices.Delete(s.waiting, j, j+1)
		l.waiting--
		if len(s.waiting) == 0 {
			l.turns = slices.DeleteFunc(l.turns, func(other *source) bool { return other == s })
		}
	}
	c.gone = true
	if s.authenticated == 0 && len(s.anonymous) == 0 && len(s.waiting) == 0 {
		delete(l.sources, s.prefix)
	}
}

// unlock unlocks the listener and rejects these connections.
func (l *Listener) unlock(all []rejected) {
	l.mu.Unlock()
	for _, c := range all {
		c.reject(c.why)
	}
}

// Accept implements net.Listener. The connection that it returns is a *Conn.
func (l *Listener) Accept() (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for len(l.ready) > 0 {
			c := l.ready[0]
			l.ready[0] = nil
			l.ready = l.ready[1:]
			if !c.gone {
				return c, nil
			}
		}
		if l.closed != nil {
			return nil, l.closed
		}
		l.changed.Wait()
	}
}

// Close implements net.Listener. It closes the connections that Accept has not returned, and no others.
func (l *Listener) Close() error {
	err := l.Listener.Close()
	l.accepts.Wait()
	l.mu.Lock()
	l.retry.Stop()
	left := l.ready
	for _, s := range l.sources {
		left = append(left, s.waiting...)
	}
	l.ready = nil
	left = slices.Clone(left)
	l.mu.Unlock()
	for _, c := range left {
		_ = c.Close() // the remote end is gone if this fails
	}
	return err
}

// CloseSilent closes, after silencePatience, the connections on which nothing has come: those of load balancers that
// probe the port, and of browsers that connect in advance. A server that is stopping would wait for them, net/http for
// 5 s and gRPC for 2 min. Call CloseSilent when the listener is being closed, and stop the timer when the server has
// ended.
func (l *Listener) CloseSilent() *time.Timer {
	return time.AfterFunc(silencePatience, func() {
		var silent []*Conn
		l.mu.Lock()
		for _, s := range l.sources {
			for _, c := range s.anonymous { // a connection of which nothing was read is anonymous
				if !c.heard.Load() {
					silent = append(silent, c)
				}
			}
		}
		l.mu.Unlock()
		for _, c := range silent {
			_ = c.Close() // the server reads the error, and forgets the connection
		}
	})
}

// Connections returns how many connections there are: authenticated, served and anonymous, and waiting.
func (l *Listener) Connections() (authenticated, anonymous, waiting int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	taken, _ := l.places.InUse()
	return int(taken), l.anonymous, l.waiting
}

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

// ListenerConfig configures a Listener. Zero bounds stand for none.
type ListenerConfig struct {
	// MaxConnections bounds the authenticated connections, MaxPerSource those of one source: an IPv4 address or an IPv6 /64. Of
	// MaxConnections no caller has more than are free once half are taken (fairshare.Places).
	MaxConnections, MaxPerSource int
	// Memory has the bytes that the connections of several listeners share with calls (see CallsConfig), and ConnBytes is what one takes
	// of it from when it is authenticated. Nil: any number.
	Memory    *fairshare.Places
	ConnBytes int
	// MaxAnonymous bounds the connections that are served and not authenticated yet, each of which takes up to 100 KiB over gRPC. Required.
	MaxAnonymous int
	// WriteTimeout bounds a single write: the time that a caller has who does not read. Not for net/http, which sets deadlines.
	WriteTimeout time.Duration
	// Foreign, when set, is called for a caller who begins a TLS handshake on a port without TLS. Its connection ends.
	Foreign func(from net.Addr)
	// Farewell, when set, returns what a connection is told that is rejected before anything of it was read. It must be short.
	Farewell func(Rejection) []byte
	// RejectAfter is how long a connection stays that is authenticated and beyond a bound, for the answer that says so.
	RejectAfter time.Duration
	// Rejected, when set, is called for each connection that a bound closes, with the Rejection.
	Rejected func(from net.Addr, why Rejection)
}

const (
	// maxWaiting bounds the connections that wait to be served. They cost a file descriptor each, and hardly any memory.
	maxWaiting = 1024
	// anonymousGrace is the time that a connection has to authenticate before it can be closed in favour of one that waits: or graceFactor
	// times as long as callers took lately, up to maxGrace, so that a machine that is short of processor closes none for its own slowness.
	anonymousGrace, maxGrace = time.Second, 5 * time.Second
	graceFactor              = 4
	// anonymousBytes are read from a connection before it is authenticated, and anonymousRate more in each second: enough for a
	// handshake with a chain of certificates and the first requests, and for probes that share a connection.
	anonymousBytes, anonymousRate = 128 << 10, 1 << 10
	// authenticationPatience is how long a connection that has sent so much waits for the handler that authenticates it.
	authenticationPatience = time.Second
	// While as many connections are authenticated as may be, new ones are served, unauthenticated, up to spareAnonymous, and spareOfSource
	// of one source that has as many as it may: for probes, which never authenticate. Others are rejected at once.
	spareAnonymous, spareOfSource = 16, 4
	// farewellPatience bounds the write of a Farewell, for which the empty buffer of a new connection has room.
	farewellPatience = 5 * time.Millisecond
	// silencePatience is how long a connection on which nothing has come stays when its server stops.
	silencePatience = 250 * time.Millisecond
)

// Rejection is why a connection was closed.
type Rejection string

// The rejections.
const (
	TooManyConnections Rejection = "too_many_connections" // authenticated ones, of all or of the source
	TooManyAnonymous   Rejection = "too_many_anonymous"   // closed for one that waited, or one too many that waited
	TooManyBytes       Rejection = "too_many_bytes"       // before authentication
)

// Listener is a net.Listener that bounds connections by source. A connection is anonymous until Conn.Authenticated is called. Of
// the anonymous ones a bounded number is served; others wait unread, and are served in turn by source, the newest of a source
// first, because the oldest has most likely been given up. While connections wait, those that were served for a second without
// authenticating (for up to maxGrace, when callers take long) are closed: of the source with most of them, the oldest. So a source that
// floods the port takes turns with itself, and an authenticated connection never makes room. Use NewListener, and Close when done. It is
// safe for concurrent use.
type Listener struct {
	net.Listener
	cfg     ListenerConfig
	accepts sync.WaitGroup

	mu        sync.Mutex
	changed   *sync.Cond // ready or closed
	sources   map[netip.Prefix]*source
	turns     []*source // those with waiting connections, in turn
	ready     []*Conn   // served, and not accepted yet
	waiting   int
	anonymous int               // served
	took      time.Duration     // a moving average of the time from being served to being authenticated
	places    *fairshare.Places // of authenticated ones
	retry     *time.Timer       // looks again for one to close
	closed    error             // why Accept fails; nil: open
}

// source is an address, with the connections from it.
type source struct {
	prefix        netip.Prefix
	waiting       []*Conn // the newest last
	anonymous     []*Conn // served, the oldest first
	authenticated int
}

// NewListener returns a Listener that accepts from l.
func NewListener(l net.Listener, cfg ListenerConfig) *Listener {
	if cfg.Memory == nil {
		cfg.Memory = fairshare.New(0)
	}
	n := &Listener{Listener: l, cfg: cfg, places: fairshare.New(cfg.MaxConnections), sources: make(map[netip.Prefix]*source)}
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
			// Such as too many open files: net/http and gRPC wait in the same way.
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

// addLocked has a new connection wait.
func (l *Listener) addLocked(raw net.Conn) {
	prefix := sourceOf(raw.RemoteAddr())
	s := l.sources[prefix]
	if s == nil {
		s = &source{prefix: prefix}
		l.sources[prefix] = s
	}
	c := &Conn{Conn: raw, listener: l, source: s, ended: make(chan struct{}), known: make(chan struct{}), fewer: fifo.NewSignal()}
	if s.waiting = append(s.waiting, c); len(s.waiting) == 1 {
		l.turns = append(l.turns, s)
	}
	l.waiting++
}

// sourceOf returns the source that an address belongs to.
func sourceOf(a net.Addr) netip.Prefix {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Prefix{} // no network that has addresses
	}
	ip, bits := ap.Addr().Unmap().WithZone(""), 32
	if ip.Is6() {
		bits = 64
	}
	p, _ := ip.Prefix(bits) // which fits
	return p
}

// rejected is a connection to be closed, and why.
type rejected struct {
	*Conn
	why Rejection
}

// fullLocked reports whether a connection of a source would be one too many if it authenticated, and more are not served for probes.
func (l *Listener) fullLocked(s *source) bool {
	if l.anonymous >= min(spareAnonymous, l.cfg.MaxAnonymous) {
		taken, most := l.places.InUse()
		bytes, all := l.cfg.Memory.InUse()
		if most > 0 && taken >= most || all > 0 && bytes+int64(l.cfg.ConnBytes) > all {
			return true
		}
	}
	return l.cfg.MaxPerSource > 0 && s.authenticated >= l.cfg.MaxPerSource && len(s.anonymous) >= min(spareOfSource, l.cfg.MaxAnonymous)
}

// serveLocked serves connections that wait, as far as there is room. It returns those to be closed.
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
			if age, grace := now.Sub(oldest.served), min(max(graceFactor*l.took, anonymousGrace), maxGrace); age < grace {
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

// takeLocked takes a place for a connection of a caller, and reports whether there is one.
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

// giveLocked gives back what takeLocked has taken, once.
func (l *Listener) giveLocked(c *Conn) {
	l.places.Give(c.place)
	l.cfg.Memory.Give(c.memory)
	c.place, c.memory = fairshare.Taken{}, fairshare.Taken{}
}

// largestLocked returns the oldest connection of the source that has most of a kind, of which there is one.
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

// forgetLocked takes a connection out of what it is counted in.
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

// unlock unlocks and closes connections that were forgotten.
func (l *Listener) unlock(all []rejected) {
	l.mu.Unlock()
	for _, c := range all {
		c.reject(c.why)
	}
}

// Accept implements net.Listener. The connection is a *Conn.
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

// Close implements net.Listener. Connections that have not been accepted are closed, others stay.
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
		_ = c.Close() // nobody is there to hear of it
	}
	return err
}

// CloseSilent closes the connections on which nothing has come, after a moment: those of load balancers that try whether the port is
// open, and of browsers that connect in advance. Servers that are told to stop wait for them, 5 s for HTTP and 2 min for gRPC. It
// is called when the listener is being closed; the caller stops the timer when the server has ended before.
func (l *Listener) CloseSilent() *time.Timer {
	return time.AfterFunc(silencePatience, func() {
		var silent []*Conn
		l.mu.Lock()
		for _, s := range l.sources {
			for _, c := range s.anonymous { // as are all of which nothing was read
				if !c.heard.Load() {
					silent = append(silent, c)
				}
			}
		}
		l.mu.Unlock()
		for _, c := range silent {
			_ = c.Close() // the server sees it end, and forgets it
		}
	})
}

// Connections returns how many connections there are: authenticated, served without being so, and waiting.
func (l *Listener) Connections() (authenticated, anonymous, waiting int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	taken, _ := l.places.InUse()
	return int(taken), l.anonymous, l.waiting
}

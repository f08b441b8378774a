package admission

import (
	"cmp"
	"container/list"
	"maps"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// patience is how long a connection waits for room before relieve closes connections, and the shortest time between
	// two such closings: a connection's memory is free some milliseconds after its end.
	patience = 125 * time.Millisecond
	// again is the time within which a new shortage of room is a part of the last: what was freed did not last.
	again = 8 * patience
	// step is the most that one Read returns while the memory fills. net/http reads a body in pieces as large as what
	// it has read of it already, so without step a hundred connections would take all room before any of them looks
	// again.
	step = 8 << 10
	// brief is how long a connection that has received at most light bytes waits before it looks again.
	brief = 10 * time.Millisecond
)

// Buffers bounds the bytes that all connections of a server hold together: received and unread, or to be written. Its
// methods are safe for concurrent use.
//
// gRPC bounds what one stream receives, by its window, and the message that is being read, by its size. It does not
// bound what all streams receive together: it opens a connection's own window again when data arrives, read or not. So
// Buffers counts bytes where they are allocated, in the pool of the server's buffers.
//
// At soft, connections that have received much lately are not read until there is room again; their callers see a slow
// network. Room may not come for a while, because halves of messages or unread answers take it. Then Buffers closes the
// connection that has received the most since the memory began to fill, with what waits to be written to it. While
// other connections fill the room again at once, it closes twice as much each time.
//
// gRPC forgets the buffers of messages that nobody has read when their stream ends. Their count ends when the collector
// frees them, so Buffers has the collector run before it closes connections.
//
// Buffers may close a connection that did not cause the shortage. It does not count what messages take once they are
// decoded.
type Buffers struct {
	// At soft, connections that have received more than light bytes since the memory began to fill wait. At hard, all
	// connections wait. The bytes between soft and hard are room for light bytes from every connection, and for a read
	// in progress on each.
	soft, hard, light int64
	pools             [classes]sync.Pool // of *buffer, by class
	used              atomic.Int64
	// how often the memory has begun to fill, which means: used has risen above half of soft
	filling    atomic.Int64
	full       func(from net.Addr)
	collecting sync.Mutex

	mu    sync.Mutex
	room  chan struct{} // closed and replaced when used falls below soft
	conns map[*conn]struct{}
	last  time.Time // when connections were last closed for want of room
	times int       // how often they were in this shortage
}

// NewBuffers returns Buffers of most bytes for at most so many connections. full is called for each connection that is
// closed for want of room.
func NewBuffers(most int64, connections int, full func(from net.Addr)) *Buffers {
	return &Buffers{
		soft: most / 2, hard: most, light: max(most/8/int64(connections), 4<<10), full: full,
		room: make(chan struct{}), conns: make(map[*conn]struct{}),
	}
}

// Used returns how many bytes are in use.
func (b *Buffers) Used() int64 { return b.used.Load() }

// Hold counts n bytes that a connection takes outside the pool.
func (b *Buffers) Hold(n int64) {
	if now := b.used.Add(n); now >= b.soft/2 && now-n < b.soft/2 {
		b.filling.Add(1)
	}
}

// Release ends the count of n bytes that Hold or Get has counted.
func (b *Buffers) Release(n int64) {
	if now := b.used.Add(-n); now < b.soft && now+n >= b.soft {
		b.mu.Lock()
		defer b.mu.Unlock()
		close(b.room)
		b.room = make(chan struct{})
	}
}

// Listener returns l with connections that keep to the bound. The server that uses them must use b as its pool of
// buffers.
func (b *Buffers) Listener(l net.Listener) net.Listener { return listener{l, b} }

type listener struct {
	net.Listener
	bound *Buffers
}

// Accept implements net.Listener.
func (l listener) Accept() (net.Conn, error) {
	under, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: under, bound: l.bound, gone: make(chan struct{})}
	l.bound.mu.Lock()
	defer l.bound.mu.Unlock()
	l.bound.conns[c] = struct{}{}
	return c, nil
}

// conn is a connection that keeps to the bound.
type conn struct {
	net.Conn
	bound *Buffers
	once  sync.Once
	gone  chan struct{} // closed when the connection is

	// brought is how many bytes have been read since filling had the value of since.
	brought, since atomic.Int64
	unread         atomic.Int64 // bytes that wait to be written

	mu      sync.Mutex
	answers list.List // of *answer: over gRPC, that wait to be written
	ended   bool
}

// Read implements net.Conn. It waits for room before it reads.
func (c *conn) Read(p []byte) (int, error) {
	b := c.bound
	for used := b.used.Load(); used >= b.hard || used >= b.soft && c.lately() > b.light; used = b.used.Load() {
		if !c.wait() {
			return 0, net.ErrClosed
		}
	}
	if len(p) > step && b.used.Load() >= b.soft/2 {
		p = p[:step]
	}
	n, err := c.Conn.Read(p)
	if filling := b.filling.Load(); c.since.Load() != filling {
		c.since.Store(filling)
		c.brought.Store(0)
	}
	c.brought.Add(int64(n))
	return n, err
}

// lately returns how many bytes the connection has received since the memory last began to fill.
func (c *conn) lately() int64 {
	if c.since.Load() != c.bound.filling.Load() {
		return 0
	}
	return c.brought.Load()
}

// weight returns for how many bytes the connection may be closed.
func (c *conn) weight() int64 { return c.lately() + c.unread.Load() }

// wait waits until there may be room. It returns false if the connection has been closed.
func (c *conn) wait() bool {
	b := c.bound
	b.mu.Lock()
	room := b.room
	b.mu.Unlock()
	if b.used.Load() < b.soft {
		return true // room may have been replaced after used fell below soft
	}
	long := patience
	if c.lately() <= b.light {
		long = brief // it may read below hard, which room does not tell
	}
	timer := time.NewTimer(long)
	defer timer.Stop()
	select {
	case <-room:
	case <-timer.C:
		b.relieve(time.Now())
	case <-c.gone:
		return false
	}
	return true
}

// relieve has the collector run if there is still no room. If there is none the next time, it closes the connections
// that have received the most, too.
func (b *Buffers) relieve(now time.Time) {
	heaviest, full := b.heaviest(now)
	for _, c := range heaviest {
		_ = c.Close() // the server reads the error, and frees or forgets what the connection held
		b.full(c.RemoteAddr())
	}
	if full && b.collecting.TryLock() {
		defer b.collecting.Unlock()
		runtime.GC()
	}
}

// heaviest returns the connections to close at an instant; full: there is no room. It takes connections in the order of
// the bytes that they have received lately or do not read, the most first, until these bytes are half of what must be
// freed. It takes only connections that have more than light of such bytes, and more than an eighth of the bytes of the
// first.
//
// The first time in a shortage it returns none. Each time that this was not enough, because the others took what was
// freed, it closes twice as much, and includes connections that have received half as much. Otherwise halves of
// messages would take all room for as long as they arrive; they wait in the buffers of the callers' systems even after
// the callers have gone.
func (b *Buffers) heaviest(now time.Time) (heaviest []*conn, full bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	missing := (b.used.Load() - b.soft/4*3) / 2
	if missing < b.soft/8 || now.Sub(b.last) < patience {
		return nil, false
	}
	recent := now.Sub(b.last) < again
	b.last = now
	if !recent {
		b.times = 0
		return nil, true
	}
	missing <<= b.times
	least := 3 + b.times
	b.times = min(b.times+1, 20)
	all := slices.SortedFunc(maps.Keys(b.conns), func(c, d *conn) int { return cmp.Compare(d.weight(), c.weight()) })
	n := 0
	for n < len(all) && missing > 0 && all[n].weight() > max(b.light, all[0].weight()>>least) {
		missing -= all[n].weight()
		n++
	}
	return all[:n], true
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.once.Do(func() {
		close(c.gone)
		c.bound.mu.Lock()
		defer c.bound.mu.Unlock()
		delete(c.bound.conns, c)
	})
	c.forget()
	return c.Conn.Close()
}

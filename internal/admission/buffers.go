package admission

import (
	"cmp"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/mem"
)

const (
	// patience is how long connections wait for room before one is closed, and the time from one that is closed to the next:
	// the end of a connection frees its memory within some milliseconds.
	patience = 250 * time.Millisecond
	// step is how much of a connection is read at a time while the memory fills: net/http reads a body by as much as it has read
	// already, so that a hundred connections would take it all between two looks.
	step = 8 << 10
	// brief is how long a connection that brings little waits before it looks again.
	brief = 10 * time.Millisecond
)

// Buffers is a bound for all connections of a server. Its methods are safe for concurrent use.
//
// gRPC bounds what a stream receives by its window, and by the size of the message that is being read, but not what all streams
// receive together; the connection's own window is opened again when data arrives, read or not. So the bytes are counted where
// they are allocated, in the pool of the server's buffers. At the bound, connections that have brought much lately are not read
// any more until there is room again, which their callers see as a slow network; when there is none for a while, because what
// takes it is halves of messages, or answers that nobody reads, the connection that has brought the most since the memory began
// to fill is closed, and twice as much at a time for as long as the others fill the room again at once.
//
// It does not promise to find the right connection to close, nor anything about what messages take once they are decoded.
type Buffers struct {
	// At soft, connections that have brought more than light since the memory began to fill wait; at hard all of them do. Between
	// them there is room for what all connections may bring before they are heavy, and for a read of each that is in progress.
	soft, hard, light int64
	pool              mem.BufferPool
	used              atomic.Int64
	filling           atomic.Int64 // counts how often the memory has begun to fill: to be more than half of soft
	full              func(from net.Addr)

	mu     sync.Mutex
	room   chan struct{} // closed, and made anew, when used falls below soft
	conns  map[*conn]struct{}
	last   time.Time // when a connection was closed for want of room
	times  int       // how often that was so since the memory began to fill for the time that during says
	during int64
}

// NewBuffers returns Buffers of so many bytes for at most so many connections. When connections are closed for want of room, full is
// told of each.
func NewBuffers(most int64, connections int, full func(from net.Addr)) *Buffers {
	sizes := []int{smallest}
	for size := 2 << 10; size <= 8<<20; size *= 2 {
		sizes = append(sizes, size)
	}
	return &Buffers{
		soft: most / 2, hard: most, light: max(most/8/int64(connections), 4<<10), pool: mem.NewTieredBufferPool(sizes...), full: full,
		room: make(chan struct{}), conns: make(map[*conn]struct{}),
	}
}

// smallest is the least capacity of a buffer. One that gRPC takes for too small for a pool (1 KiB) does not come back.
const smallest = 1152

// Used returns how many bytes are in use.
func (b *Buffers) Used() int64 { return b.used.Load() }

// Get implements mem.BufferPool.
func (b *Buffers) Get(length int) *[]byte {
	buf := b.pool.Get(max(length, smallest))
	*buf = (*buf)[:length]
	b.Hold(int64(cap(*buf)))
	return buf
}

// Put implements mem.BufferPool.
func (b *Buffers) Put(buf *[]byte) {
	b.Release(int64(cap(*buf)))
	b.pool.Put(buf)
}

// Hold counts bytes that a connection takes and that are not of the pool.
func (b *Buffers) Hold(n int64) {
	if now := b.used.Add(n); now >= b.soft/2 && now-n < b.soft/2 {
		b.filling.Add(1)
	}
}

// Release counts them no more.
func (b *Buffers) Release(n int64) {
	if now := b.used.Add(-n); now < b.soft && now+n >= b.soft {
		b.mu.Lock()
		defer b.mu.Unlock()
		close(b.room)
		b.room = make(chan struct{})
	}
}

// Listener returns l, whose connections keep to the bound. They are to be used by a server with b for its buffers.
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
	c := &conn{Conn: under, bound: l.bound, ahead: ahead{raw: rawOf(under)}, gone: make(chan struct{})}
	l.bound.mu.Lock()
	defer l.bound.mu.Unlock()
	l.bound.conns[c] = struct{}{}
	return c, nil
}

// conn is a connection that keeps to the bound.
type conn struct {
	net.Conn
	bound *Buffers
	ahead ahead
	once  sync.Once
	gone  chan struct{} // closed when the connection is

	// brought is what has been read since the memory began to fill for the time that since says.
	brought, since atomic.Int64
}

// Read implements net.Conn. It waits for room.
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
	n, err := c.receive(p)
	if filling := b.filling.Load(); c.since.Load() != filling {
		c.since.Store(filling)
		c.brought.Store(0)
	}
	c.brought.Add(int64(n))
	return n, err
}

// lately returns what the connection has brought since the memory last began to fill.
func (c *conn) lately() int64 {
	if c.since.Load() != c.bound.filling.Load() {
		return 0
	}
	return c.brought.Load()
}

// wait waits until there may be room, and reports false when the connection has been closed.
func (c *conn) wait() bool {
	b := c.bound
	b.mu.Lock()
	room := b.room
	b.mu.Unlock()
	if b.used.Load() < b.soft {
		return true // there is, since before room was looked up
	}
	long := patience
	if c.lately() <= b.light {
		long = brief // it needs not wait until there is as much room as others need
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

// relieve closes connections that have brought the most, if there is no room still.
func (b *Buffers) relieve(now time.Time) {
	for _, c := range b.heaviest(now) {
		_ = c.Close() // its server sees it end, and frees what it held
		b.full(c.RemoteAddr())
	}
}

// heaviest returns the connections to be closed at an instant: of those that have brought about as much as the one that brought the
// most, until they have brought half of what is to be freed. Each may have had more written than it brought. Where that has not
// been enough, because the others took what was freed, it is twice as much the next time, of those that have brought half as much
// as well, and so on: halves of messages, which wait in the buffers of the callers' systems even when the callers have gone, would
// take all room for as long as there are any.
func (b *Buffers) heaviest(now time.Time) []*conn {
	b.mu.Lock()
	defer b.mu.Unlock()
	missing := (b.used.Load() - b.soft/4*3) / 2
	if missing < b.soft/8 || now.Sub(b.last) < patience {
		return nil
	}
	b.last = now
	if filling := b.filling.Load(); b.during != filling {
		b.times, b.during = 0, filling
	}
	missing <<= b.times
	least := 3 + b.times
	b.times = min(b.times+1, 20)
	all := slices.SortedFunc(maps.Keys(b.conns), func(c, d *conn) int { return cmp.Compare(d.lately(), c.lately()) })
	n := 0
	for n < len(all) && missing > 0 && all[n].lately() > max(b.light, all[0].lately()>>least) {
		missing -= all[n].lately()
		n++
	}
	return all[:n]
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.once.Do(func() {
		close(c.gone)
		c.bound.mu.Lock()
		defer c.bound.mu.Unlock()
		delete(c.bound.conns, c)
	})
	defer c.ahead.close(c.bound) // from a read in progress on, nothing is kept
	return c.Conn.Close()
}

package admission

import (
	"container/list"

	"google.golang.org/grpc/mem"
)

// maxUnread is the most answers that an anonymous connection over gRPC may have at a time that are not written. All
// other connections are bounded by their calls.
const maxUnread = anonymousCallBurst

// answer is a message to a caller over gRPC, and the pool of its bytes. It holds its call's place until the bytes are
// written, which may be long after the handler has returned, or until the connection ends: gRPC then forgets the
// answers that waited for their caller, and returns no buffer of them. It also forgets an answer that comes just after
// its caller has ended the call: that one holds the place until the collector has freed its buffer.
type answer struct {
	message any
	call    *call

	// Guarded by the connection's lock.
	lent  *lent // counts the bytes
	bytes int64
	at    *list.Element // of the connection's answers; nil: it is not among them
}

// answer returns what to send in place of a message. A call that is over sends nothing any more.
func (k *call) answer(message any) any {
	for n := k.holds.Load(); n > 0 && k.buffered != nil; n = k.holds.Load() {
		if k.holds.CompareAndSwap(n, n+1) {
			a := &k.only
			if k.room == &k.calls.streams {
				a = new(answer) // one of many
			}
			a.message, a.call = message, k
			return a
		}
	}
	return message
}

// Pooled implements wire.Pooled.
func (a *answer) Pooled() (message any, pool mem.BufferPool) { return a.message, a }

// Get implements mem.BufferPool. The codec calls it once.
func (a *answer) Get(length int) *[]byte {
	c := a.call.buffered
	b := c.bound.Get(length)
	a.bytes, a.lent = int64(cap(*b)), bufferOf(b).lent
	n, open := c.keep(a)
	if !open {
		a.lent.end()
		a.call.letGo()
	}
	if n > maxUnread && !a.call.conn.IsAuthenticated() {
		a.call.conn.reject(TooManyAnonymous)
	}
	return b
}

// Put implements mem.BufferPool.
func (a *answer) Put(b *[]byte) {
	a.end()
	a.lent.answer.Store(nil)
	a.call.buffered.bound.Put(b)
}

// end ends what the answer holds, unless it has ended.
func (a *answer) end() {
	if a.call.buffered.drop(a) {
		a.call.letGo()
	}
}

// keep counts an answer that is to be written, and returns how many there are; open: the connection is.
func (c *conn) keep(a *answer) (n int, open bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return 0, false
	}
	a.at = c.answers.PushBack(a)
	a.lent.answer.Store(a)
	c.unread.Add(a.bytes)
	return c.answers.Len(), true
}

// drop undoes keep. It returns false if the answer is not counted any more.
func (c *conn) drop(a *answer) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if a.at == nil {
		return false
	}
	c.answers.Remove(a.at)
	a.at = nil
	c.unread.Add(-a.bytes)
	return true
}

// forget ends the counts of all answers, for ever.
func (c *conn) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for e := c.answers.Front(); e != nil; e = e.Next() {
		a := e.Value.(*answer)
		a.at = nil
		a.lent.end()
		a.lent.answer.Store(nil) // the collector keeps lent, and so would keep what the answer refers to
		a.call.letGo()
	}
	c.answers.Init()
	c.ended = true
}

// Hold counts bytes to be written that the connection takes outside the pool, until Release. A nil Conn counts nothing.
func (c *Conn) Hold(bytes int64) { c.held(bytes, (*Buffers).Hold) }

// Release ends the count of bytes that Hold has counted.
func (c *Conn) Release(bytes int64) { c.held(-bytes, func(b *Buffers, n int64) { b.Release(-n) }) }

func (c *Conn) held(bytes int64, count func(*Buffers, int64)) {
	if in := c.buffered(); in != nil {
		in.unread.Add(bytes)
		count(in.bound, bytes)
	}
}

// buffered returns the connection below that keeps to the bound of Buffers, or nil.
func (c *Conn) buffered() *conn {
	if c == nil {
		return nil
	}
	below, _ := c.Conn.(*conn)
	return below
}

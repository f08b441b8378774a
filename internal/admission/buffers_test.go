package admission

import (
	"net"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/mem"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

const most = 1 << 20

// caller is a connection as its caller and its server have it.
type caller struct {
	there, here net.Conn
}

// bufferPipes is a listener of connections in memory.
type bufferPipes chan net.Conn

func (p bufferPipes) Accept() (net.Conn, error) { return <-p, nil }
func (p bufferPipes) Close() error              { return nil }
func (p bufferPipes) Addr() net.Addr            { return &net.TCPAddr{} }

func (b *Buffers) connect(t *testing.T) caller {
	t.Helper()
	here, there := net.Pipe()
	l := make(bufferPipes, 1)
	l <- here
	c := must.Value(b.Listener(l).Accept())(t)
	t.Cleanup(func() { there.Close(); c.Close() })
	return caller{there, c}
}

// read has the server read n bytes that the caller sends.
func (c caller) read(n int) error {
	go func() { _, _ = c.there.Write(make([]byte, n)) }()
	for n > 0 {
		got, err := c.here.Read(make([]byte, n))
		if err != nil {
			return err
		}
		n -= got
	}
	return nil
}

// TestPool: what is taken is counted until it is given back, small buffers too.
func TestPool(t *testing.T) {
	b := NewBuffers(most, 10, nil)
	for _, n := range []int{0, 1, 100, 1024, 1025, 5000, 16 << 10, 9 << 20} {
		buf := b.Get(n)
		expect.True(t, len(*buf) == n && !mem.IsBelowBufferPoolingThreshold(cap(*buf)) && b.Used() == int64(cap(*buf)),
			"%d: length %d, capacity %d, counted %d", n, len(*buf), cap(*buf), b.Used())
		mem.NewBuffer(buf, b).Free()
		expect.True(t, b.Used() == 0, "%d: %d are left", n, b.Used())
	}
}

// TestForgotten: the count of buffers that nobody returns ends when the collector frees them. No connection is closed
// for them, and they do not count twice.
func TestForgotten(t *testing.T) {
	b := NewBuffers(most, 10, func(net.Addr) { t.Error("a connection is closed") })
	c := b.connect(t)
	for range 4 {
		b.Get(int(b.soft) / 8)
	}
	must.NoError(t, c.read(int(b.light)+1))
	for range 4 {
		b.Get(int(b.soft) / 8)
	}
	kept := b.Get(1)
	must.NoError(t, c.read(1)) // waits until there is room
	testkit.Eventually(t, "the forgotten ones to count no more", func() bool {
		runtime.GC()
		return b.Used() == smallest
	})
	b.Put(kept)
	runtime.GC()
	expect.Equal(t, b.Used(), 0, "bytes in the end")
}

// TestForgottenAnswer: the place of a call whose answer gRPC forgets is free when the collector has freed the answer's
// buffer, though the connection stays open.
func TestForgottenAnswer(t *testing.T) {
	b := NewBuffers(most, 10, func(net.Addr) { t.Error("a connection is closed") })
	calls := NewCalls(CallsConfig{MaxCalls: 2})
	c := b.connect(t).here.(*conn)
	ask := func() *answer {
		request := mem.NewBuffer(b.Get(1), b)
		k := &call{calls: calls, read: func(any) error { request.Free(); return nil }, room: &calls.calls}
		must.NoError(t, k.begin(t.Context()))
		k.buffered = c
		must.NoError(t, k.receive(nil))
		defer k.done()
		return k.answer(nil).(*answer)
	}
	forgotten := ask()
	mem.NewBuffer(forgotten.Get(1), forgotten)
	waits := ask()
	kept := waits.Get(1)
	testkit.Eventually(t, "the place of the forgotten one", func() bool {
		runtime.GC()
		unary, _ := calls.InUse()
		return unary == 1 && b.Used() == smallest
	})
	waits.Put(kept)
	runtime.GC()
	unary, _ := calls.InUse()
	expect.True(t, unary == 0 && b.Used() == 0 && c.unread.Load() == 0, "calls %d, bytes %d, unread %d", unary,
		b.Used(), c.unread.Load())
}

// TestForgottenConnection: nothing keeps an answer that waits when its connection ends, nor what its call refers to,
// which may be the answer's own buffer.
func TestForgottenConnection(t *testing.T) {
	b, calls, free := NewBuffers(most, 10, nil), NewCalls(CallsConfig{}), make(chan struct{})
	c := b.connect(t).here.(*conn)
	k := &call{calls: calls, room: &calls.calls}
	must.NoError(t, k.begin(t.Context()))
	k.buffered = c
	kept := k.answer(nil).(*answer).Get(1)
	k.read = func(any) error { *kept = nil; return nil }
	runtime.AddCleanup(bufferOf(kept), func(free chan struct{}) { close(free) }, free)
	must.NoError(t, c.Close())
	testkit.Eventually(t, "the buffer to be freed", func() bool {
		runtime.GC()
		select {
		case <-free:
			return true
		default:
			return false
		}
	})
}

// TestWait: at the bound, connections that bring much wait until there is room, and those that bring little do not.
func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBuffers(most, 10, func(net.Addr) { t.Error("a connection is closed") })
		heavy, light := b.connect(t), b.connect(t)
		held := b.Get(b.heldTo(b.soft))
		must.NoError(t, heavy.read(int(b.light)+1))
		var wait sync.WaitGroup
		read := false
		wait.Go(func() {
			expect.NoError(t, heavy.read(1))
			read = true
		})
		synctest.Wait()
		expect.True(t, !read, "the heavy one is read")
		expect.NoError(t, light.read(1))
		time.Sleep(patience / 2)
		b.Put(held)
		wait.Wait()
	})
}

// heldTo returns how much to take for a count of n.
func (b *Buffers) heldTo(n int64) int { return int(n - b.used.Load()) }

// TestRelieve: where there is no room for a while the connection that has brought the most since the memory began to
// fill is closed, and it alone.
func TestRelieve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		closed := 0
		b := NewBuffers(most, 10, func(net.Addr) { closed++ })
		old, heaviest, heavy, light := b.connect(t), b.connect(t), b.connect(t), b.connect(t)
		must.NoError(t, old.read(most)) // long ago
		b.Hold(b.soft / 2)
		for _, c := range []struct {
			caller
			n int
		}{{heaviest, most / 4}, {heavy, int(b.light) + 1}, {light, 1}} {
			must.NoError(t, c.read(c.n))
		}
		b.Hold(b.soft / 2)
		errs := make(chan error, 1)
		go func() { errs <- heavy.read(1) }()
		time.Sleep(2*patience + time.Millisecond)
		synctest.Wait()
		_, err := heaviest.here.Read(make([]byte, 1))
		expect.True(t, err != nil, "the heaviest one is open")
		expect.True(t, closed == 1, "%d are closed", closed)
		b.Release(b.soft)
		expect.NoError(t, <-errs)
		expect.NoError(t, light.read(1))
		expect.NoError(t, old.read(1))
	})
}

// TestRelieveUnread: a connection that has brought little and does not read what it has asked for is closed before one
// that brings much. What it held counts no more, also if the server returns it later.
func TestRelieveUnread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBuffers(most, 10, func(net.Addr) {})
		unread, busy := b.connect(t), b.connect(t)
		under := unread.here.(*conn)
		above := &Conn{Conn: under, listener: &Listener{}}
		above.authenticated.Store(true)
		k := &call{calls: NewCalls(CallsConfig{}), conn: above, buffered: above.buffered()}
		k.room = &k.calls.calls
		k.holds.Store(1)
		late := k.answer("").(*answer)
		buf := late.Get(int(b.soft) / 2)
		k.done()
		above.Hold(b.soft / 2)
		must.NoError(t, busy.read(int(b.light)))
		errs := make(chan error, 1)
		go func() { errs <- busy.read(most / 4) }()
		time.Sleep(2 * patience)
		synctest.Wait()
		_, err := unread.here.Read(make([]byte, 1))
		expect.True(t, err != nil, "the one that does not read is open")
		above.Release(b.soft / 2)
		expect.NoError(t, <-errs)
		late.Put(buf)
		expect.Equal(t, b.Used(), 0, "bytes in the end")
		expect.Equal(t, k.holds.Load(), 0, "holds of the call in the end")
		expect.True(t, k.answer("") == "", "an answer of a call that is over is counted")
	})
}

// TestRelieveMore: where there is no room again after connections were closed, twice as much is closed the next time.
// Where the memory has been less than half full for a while, the collector runs first, and it begins with one again.
func TestRelieveMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		closed := 0
		b := NewBuffers(most, 20, func(net.Addr) { closed++ })
		fill := func(brought ...int64) {
			b.Hold(b.soft / 2)
			for _, n := range brought {
				must.NoError(t, b.connect(t).read(int(n)))
			}
			b.Hold(b.soft / 2)
		}
		now := time.Now()
		relieve := func(want ...int) {
			t.Helper()
			for _, want := range want {
				was := closed
				now = now.Add(patience)
				b.relieve(now)
				must.Equal(t, closed-was, want, "are closed")
			}
		}
		much := b.soft / 8
		fill(much, much, much, much, much, much, much, much)
		relieve(0, 1, 2, 4, 1, 0) // of the last there is one left
		b.Release(b.soft)
		now = now.Add(again)
		fill(much, much, much)
		relieve(0, 1, 2)
		b.Release(b.soft)
		fill(much, much, much)
		relieve(3) // a part of the same shortage
		b.Release(b.soft)
		now = now.Add(again)
		fill(much, much/9, much/9, b.light)
		relieve(0, 1, 2, 0) // at first what has brought an eighth or less is not asked
	})
}

// TestClose: a connection that waits for room and is closed waits no more.
func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBuffers(most, 10, nil)
		c := b.connect(t)
		b.Hold(b.hard)
		errs := make(chan error, 1)
		go func() {
			_, err := c.here.Read(make([]byte, 1))
			errs <- err
		}()
		synctest.Wait()
		c.here.Close()
		expect.ErrorIs(t, <-errs, net.ErrClosed)
	})
}

// TestStep: little is read at a time while the memory fills, and as much as is asked for before.
func TestStep(t *testing.T) {
	b := NewBuffers(most, 10, nil)
	c := b.connect(t)
	go func() { _, _ = c.there.Write(make([]byte, 10*step)) }()
	read := func() int {
		return must.Value(c.here.Read(make([]byte, 2*step)))(t)
	}
	expect.Equal(t, read(), 2*step, "bytes are read")
	b.Hold(b.soft / 2)
	expect.Equal(t, read(), step, "bytes are read while the memory fills")
}

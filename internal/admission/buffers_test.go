package admission

import (
	"errors"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/mem"
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
	c, err := b.Listener(l).Accept()
	if err != nil {
		t.Fatal(err)
	}
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
		if len(*buf) != n || mem.IsBelowBufferPoolingThreshold(cap(*buf)) || b.Used() != int64(cap(*buf)) {
			t.Errorf("%d: length %d, capacity %d, counted %d", n, len(*buf), cap(*buf), b.Used())
		}
		mem.NewBuffer(buf, b).Free()
		if b.Used() != 0 {
			t.Errorf("%d: %d are left", n, b.Used())
		}
	}
}

// TestWait: at the bound, connections that bring much wait until there is room, and those that bring little do not.
func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBuffers(most, 10, func(net.Addr) { t.Error("a connection is closed") })
		heavy, light := b.connect(t), b.connect(t)
		held := b.Get(b.heldTo(b.soft))
		if err := heavy.read(int(b.light) + 1); err != nil {
			t.Fatal(err)
		}
		var wait sync.WaitGroup
		read := false
		wait.Go(func() {
			if err := heavy.read(1); err != nil {
				t.Error(err)
			}
			read = true
		})
		synctest.Wait()
		if read {
			t.Error("the heavy one is read")
		}
		if err := light.read(1); err != nil {
			t.Error(err)
		}
		time.Sleep(patience / 2)
		b.Put(held)
		wait.Wait()
	})
}

// heldTo returns how much to take for a count of n.
func (b *Buffers) heldTo(n int64) int { return int(n - b.used.Load()) }

// TestRelieve: where there is no room for a while the connection that has brought the most since the memory began to fill is
// closed, and it alone.
func TestRelieve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		closed := 0
		b := NewBuffers(most, 10, func(net.Addr) { closed++ })
		old, heaviest, heavy, light := b.connect(t), b.connect(t), b.connect(t), b.connect(t)
		if err := old.read(most); err != nil { // long ago
			t.Fatal(err)
		}
		b.Hold(b.soft / 2)
		for _, c := range []struct {
			caller
			n int
		}{{heaviest, most / 4}, {heavy, int(b.light) + 1}, {light, 1}} {
			if err := c.read(c.n); err != nil {
				t.Fatal(err)
			}
		}
		b.Hold(b.soft / 2)
		errs := make(chan error, 1)
		go func() { errs <- heavy.read(1) }()
		time.Sleep(patience + time.Millisecond)
		synctest.Wait()
		if _, err := heaviest.here.Read(make([]byte, 1)); err == nil {
			t.Error("the heaviest one is open")
		}
		if closed != 1 || b.Closed() != 1 {
			t.Errorf("%d are closed", closed)
		}
		b.Release(b.soft)
		if err := <-errs; err != nil {
			t.Error(err)
		}
		if err := light.read(1); err != nil {
			t.Error(err)
		}
		if err := old.read(1); err != nil {
			t.Error(err)
		}
	})
}

// TestRelieveMore: where there is no room again after connections were closed, twice as much is closed the next time; once the
// memory has been less than half full, it begins with one again.
func TestRelieveMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		closed := 0
		b := NewBuffers(most, 20, func(net.Addr) { closed++ })
		fill := func(brought ...int64) {
			b.Hold(b.soft / 2)
			for _, n := range brought {
				if err := b.connect(t).read(int(n)); err != nil {
					t.Fatal(err)
				}
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
				if closed-was != want {
					t.Fatalf("%d are closed, want %d", closed-was, want)
				}
			}
		}
		much := b.soft / 8
		fill(much, much, much, much, much, much, much, much)
		relieve(1, 2, 4, 1, 0) // of the last there is one left
		b.Release(b.soft)
		fill(much, much, much)
		relieve(1, 2)
		b.Release(b.soft)
		fill(much, much/9, much/9, b.light)
		relieve(1, 2, 0) // at first what has brought an eighth or less is not asked
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
		if err := <-errs; !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
}

// TestStep: little is read at a time while the memory fills, and as much as is asked for before.
func TestStep(t *testing.T) {
	b := NewBuffers(most, 10, nil)
	c := b.connect(t)
	go func() { _, _ = c.there.Write(make([]byte, 10*step)) }()
	read := func() int {
		n, err := c.here.Read(make([]byte, 2*step))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := read(); n != 2*step {
		t.Errorf("%d bytes are read, want %d", n, 2*step)
	}
	b.Hold(b.soft / 2)
	if n := read(); n != step {
		t.Errorf("%d bytes are read while the memory fills, want %d", n, step)
	}
}

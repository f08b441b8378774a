package admission

import (
	"math/bits"
	"runtime"
	"sync/atomic"
	"unsafe"
)

const (
	// smallest is the least capacity of a buffer. gRPC does not return buffers of up to 1 KiB to the pool.
	smallest = 1152
	// classes are the capacities of the buffers that are reused: smallest, and the powers of two from 2 KiB to 8 MiB.
	classes = 14
)

// buffer is a buffer of Buffers. gRPC has a pointer to its first field.
type buffer struct {
	bytes []byte
	lent  *lent
}

// lent counts the bytes of a buffer from Get until Put, or until the collector frees the buffer.
type lent struct {
	bound  *Buffers
	bytes  atomic.Int64           // 0: the buffer is not in use, or counts no more
	answer atomic.Pointer[answer] // that the buffer is of; nil: of none
}

// end ends the count.
func (l *lent) end() { l.bound.Release(l.bytes.Swap(0)) }

// forgotten ends all that a buffer holds which the collector has freed.
func (l *lent) forgotten() {
	l.end()
	if a := l.answer.Load(); a != nil {
		a.end()
	}
}

// classOf returns the class of the buffers for a length, and their capacity. Larger buffers than those of the last
// class are not reused.
func classOf(length int) (class, size int) {
	if length <= smallest {
		return 0, smallest
	}
	if class = bits.Len(uint(length-1)) - 10; class < classes {
		return class, 1 << (class + 10)
	}
	return classes, length
}

// Get implements mem.BufferPool. The bytes have any values.
func (b *Buffers) Get(length int) *[]byte {
	class, size := classOf(length)
	var buf *buffer
	if class < classes {
		buf, _ = b.pools[class].Get().(*buffer)
	}
	if buf == nil {
		buf = &buffer{make([]byte, size), &lent{bound: b}}
		runtime.AddCleanup(buf, (*lent).forgotten, buf.lent)
	}
	buf.bytes = buf.bytes[:length]
	buf.lent.bytes.Store(int64(size))
	b.Hold(int64(size))
	return &buf.bytes
}

// Put implements mem.BufferPool. The buffer must be of Get.
func (b *Buffers) Put(bytes *[]byte) {
	buf := bufferOf(bytes)
	buf.lent.end()
	if class, _ := classOf(cap(*bytes)); class < classes {
		b.pools[class].Put(buf)
	}
}

// bufferOf returns the buffer of bytes of Get.
func bufferOf(bytes *[]byte) *buffer { return (*buffer)(unsafe.Pointer(bytes)) }

// Package varint reads numbers and strings from the front of untrusted bytes. Unsigned numbers are varints of protobuf
// and encoding/binary, signed ones are in zigzag; strings and bytes come after their length. A Reader checks only that
// a value is there, and within its bound.
package varint

import "encoding/binary"

// Reader reads from the front of Rest. After the first mistake Rest is empty, and all later reads return zero. A Reader
// of a string returns substrings, a Reader of bytes returns subslices.
type Reader[T string | []byte] struct {
	Rest T
	bad  bool
}

// Of returns a Reader of data.
func Of[T string | []byte](data T) Reader[T] { return Reader[T]{Rest: data} }

// Failed reports whether there was a mistake.
func (r *Reader[T]) Failed() bool { return r.bad }

// Fail notes a mistake: the caller cannot use what it has read.
func (r *Reader[T]) Fail() { r.Rest, r.bad = r.Rest[:0], true }

// Byte reads a byte.
func (r *Reader[T]) Byte() byte {
	if len(r.Rest) == 0 {
		r.Fail()
		return 0
	}
	b := r.Rest[0]
	r.Rest = r.Rest[1:]
	return b
}

// Uvarint reads an unsigned number.
func (r *Reader[T]) Uvarint() (v uint64) {
	for i := range min(len(r.Rest), binary.MaxVarintLen64) {
		c := r.Rest[i]
		if i == binary.MaxVarintLen64-1 && c > 1 {
			break
		}
		v |= uint64(c&0x7f) << (7 * i)
		if c < 0x80 {
			r.Rest = r.Rest[i+1:]
			return v
		}
	}
	r.Fail()
	return 0
}

// Uint reads an unsigned number, at most most.
func (r *Reader[T]) Uint(most uint64) uint64 {
	n := r.Uvarint()
	if n > most {
		r.Fail()
		return 0
	}
	return n
}

// Varint reads a signed number.
func (r *Reader[T]) Varint() int64 {
	v := r.Uvarint()
	return int64(v>>1) ^ -int64(v&1)
}

// Fixed64 reads a number of eight bytes, little-endian.
func (r *Reader[T]) Fixed64() (n uint64) {
	const size = 8
	if len(r.Rest) < size {
		r.Fail()
		return 0
	}
	for i := range size {
		n |= uint64(r.Rest[i]) << (8 * i)
	}
	r.Rest = r.Rest[size:]
	return n
}

// Take reads n bytes.
func (r *Reader[T]) Take(n uint64) T {
	if n > uint64(len(r.Rest)) {
		r.Fail()
		return r.Rest
	}
	b := r.Rest[:n]
	r.Rest = r.Rest[n:]
	return b
}

// Text reads a length, at most most, and as many bytes.
func (r *Reader[T]) Text(most uint64) T { return r.Take(r.Uint(most)) }

// AppendText appends a string or bytes after their length.
func AppendText[T string | []byte](to []byte, text T) []byte {
	return append(binary.AppendUvarint(to, uint64(len(text))), text...)
}

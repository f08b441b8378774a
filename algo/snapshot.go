package algo

import (
	"encoding/binary"
	"errors"
)

// A snapshot is a state without its clock: every instant is written as an age, and the reader counts the ages from its
// own present. Units of a snapshot that is on the way for a time therefore expire late by that time, and never early.
// The limits are not part of a snapshot: reader and writer must agree on them by other means.
//
// It begins with a byte for the version of the format, 1. Then comes, for each limit that is not unlimited, a byte with
// the algorithm's number, to which 128 is added when it is idle; otherwise follows
//
//	fixed_window     age of the window's start, count; of a calendar window: signed start in seconds since 1970 UTC,
//	                 count
//	sliding_window   age of the newest slot's start, number of older slots that follow, the counts, the newest first
//	sliding_counter  age of the window's start, previous count, present count
//	token_bucket,    time until full (or empty), remainder in limit-ths of a nanosecond
//	leaky_bucket
//	sliding_log      units, signed age of the newest entry, ticks from the oldest entry to the newest; then the entries,
//	                 the oldest first: twice the ticks since the previous one, plus one and followed by the number of
//	                 units when it is a run
//	concurrency      number of leases, time until the last could expire; then for each twice its slot, plus one and
//	                 followed by the slot that its id names when that is another one, nonce (0: nameless), time until
//	                 it expires, units
//
// as unsigned varints in nanoseconds where nothing else is said. Signed ones are zigzag-coded.
const snapshotVersion = 1

// idleFlag marks a limit of which nothing is in use.
const idleFlag = 0x80

// ErrSnapshot is returned for bytes that are no snapshot of a state of these limits.
var ErrSnapshot = errors.New("algo: malformed snapshot")

func appendUint(dst []byte, n int64) []byte { return binary.AppendUvarint(dst, uint64(n)) }
func appendInt(dst []byte, n int64) []byte  { return binary.AppendVarint(dst, n) }

// reader takes numbers off the front of data. After a failure it goes on returning zeros.
type reader struct {
	data []byte
	err  error
}

func (r *reader) fail() {
	r.err, r.data = ErrSnapshot, nil
}

func (r *reader) byte() byte {
	if len(r.data) == 0 {
		r.fail()
		return 0
	}
	b := r.data[0]
	r.data = r.data[1:]
	return b
}

// uint reads a number from 0 to most.
func (r *reader) uint(most int64) int64 {
	n, size := binary.Uvarint(r.data)
	if size <= 0 || n > uint64(most) {
		r.fail()
		return 0
	}
	r.data = r.data[size:]
	return int64(n)
}

// int reads a number from -most to most.
func (r *reader) int(most int64) int64 {
	n, size := binary.Varint(r.data)
	if size <= 0 || n < -most || n > most {
		r.fail()
		return 0
	}
	r.data = r.data[size:]
	return n
}

// age reads the age of something that may be in use still.
func (r *reader) age() int64 { return r.uint(2 * int64(MaxWindow)) }

// string reads a byte of length, 0 to most, and so many bytes.
func (r *reader) string(most int) string {
	n := int(r.byte())
	if n > most || n > len(r.data) {
		r.fail()
		return ""
	}
	text := string(r.data[:n])
	r.data = r.data[n:]
	return text
}

func appendWord(dst []byte, n uint64) []byte { return binary.LittleEndian.AppendUint64(dst, n) }

// word reads eight bytes.
func (r *reader) word() uint64 {
	if len(r.data) < 8 {
		r.fail()
		return 0
	}
	n := binary.LittleEndian.Uint64(r.data)
	r.data = r.data[8:]
	return n
}

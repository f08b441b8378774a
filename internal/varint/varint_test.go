package varint

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

// FuzzReader: numbers are read as encoding/binary does, from bytes and from strings, and nothing is read beyond the
// end.
func FuzzReader(f *testing.F) {
	for _, v := range []uint64{0, 1, 127, 128, math.MaxInt64, math.MaxUint64} {
		f.Add(binary.AppendUvarint(nil, v))
	}
	f.Add(bytes.Repeat([]byte{0xff}, 11))
	f.Add(append(bytes.Repeat([]byte{0xff}, 9), 2))
	f.Add([]byte{0x80, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		want, size := binary.Uvarint(data)
		signed, _ := binary.Varint(data)
		a, b, c := Of(data), Of(string(data)), Of(data)
		if x, y := a.Uvarint(), b.Uvarint(); size > 0 && (x != want || y != want || len(a.Rest) != len(data)-size) ||
			size <= 0 && (x != 0 || !a.Failed() || len(a.Rest) != 0) {
			t.Errorf("%x: %d and %d, want %d in %d bytes; %x is left", data, x, y, want, size, a.Rest)
		}
		x := c.Varint()
		expect.True(t, (size <= 0 || x == signed) && (size > 0 || x == 0), "%x: %d, want %d", data, x, signed)
		d := Of(data)
		text := d.Text(math.MaxUint64)
		expect.True(t, (size <= 0 || want > uint64(len(data)-size) || bytes.Equal(text, data[size:][:want])) &&
			(size > 0 && want <= uint64(len(data)-size) || len(text) == 0 && d.Failed()), "%x: text %x", data, text)
		for range len(data) + 1 {
			d.Byte()
		}
		expect.True(t, d.Failed() && d.Byte() == 0 && d.Uvarint() == 0 && d.Fixed64() == 0 && len(d.Take(1)) == 0,
			"%x: something is read beyond the end", data)
	})
}

// TestBounds: what is larger than it may be ends reading.
func TestBounds(t *testing.T) {
	r := Of([]byte{5, 6})
	n := r.Uint(5)
	expect.True(t, n == 5 && !r.Failed(), "%d", n)
	n = r.Uint(5)
	expect.True(t, n == 0 && r.Failed() && len(r.Rest) == 0, "%d", n)
	r = Of(AppendText(nil, "four"))
	s := r.Text(3)
	expect.True(t, len(s) == 0 && r.Failed(), "%q", s)
	r = Of(AppendText(AppendText(nil, "four"), []byte("more")))
	if s := string(r.Text(4)) + string(r.Text(4)); s != "fourmore" || r.Failed() {
		t.Errorf("%q", s)
	}
	fixed := []byte{1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7}
	r = Of(fixed)
	a, b := r.Fixed64(), r.Fixed64()
	expect.True(t, a == binary.LittleEndian.Uint64(fixed) && b == 0 && r.Failed(), "%x %x", a, b)
}

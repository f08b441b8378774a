package varint

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"testing"
)

// FuzzReader: numbers are read as encoding/binary does, from bytes and from strings, and nothing is read beyond the end.
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
		if x, y := a.Uvarint(), b.Uvarint(); size > 0 && (x != want || y != want || len(a.Rest) != len(data)-size) || size <= 0 && (x != 0 || !a.Failed() || len(a.Rest) != 0) {
			t.Errorf("%x: %d and %d, want %d in %d bytes; %x is left", data, x, y, want, size, a.Rest)
		}
		if x := c.Varint(); size > 0 && x != signed || size <= 0 && x != 0 {
			t.Errorf("%x: %d, want %d", data, x, signed)
		}
		d := Of(data)
		if text := d.Text(math.MaxUint64); size > 0 && want <= uint64(len(data)-size) && !bytes.Equal(text, data[size:][:want]) ||
			(size <= 0 || want > uint64(len(data)-size)) && (len(text) > 0 || !d.Failed()) {
			t.Errorf("%x: text %x", data, text)
		}
		for range len(data) + 1 {
			d.Byte()
		}
		if !d.Failed() || d.Byte() != 0 || d.Uvarint() != 0 || d.Fixed64() != 0 || len(d.Take(1)) != 0 {
			t.Errorf("%x: something is read beyond the end", data)
		}
	})
}

// TestBounds: what is larger than it may be ends reading.
func TestBounds(t *testing.T) {
	r := Of([]byte{5, 6})
	if n := r.Uint(5); n != 5 || r.Failed() {
		t.Errorf("%d", n)
	}
	if n := r.Uint(5); n != 0 || !r.Failed() || len(r.Rest) != 0 {
		t.Errorf("%d", n)
	}
	r = Of(AppendText(nil, "four"))
	if s := r.Text(3); len(s) != 0 || !r.Failed() {
		t.Errorf("%q", s)
	}
	r = Of(AppendText(AppendText(nil, "four"), []byte("more")))
	if s := string(r.Text(4)) + string(r.Text(4)); s != "fourmore" || r.Failed() {
		t.Errorf("%q", s)
	}
	fixed := slices.Concat([]byte{1, 2, 3, 4}, []byte{1, 2, 3, 4, 5, 6, 7, 8}, []byte{1, 2, 3})
	r = Of(fixed)
	if a, b, c := r.Fixed32(), r.Fixed64(), r.Fixed32(); a != binary.LittleEndian.Uint32(fixed) || b != binary.LittleEndian.Uint64(fixed[4:]) || c != 0 || !r.Failed() {
		t.Errorf("%x %x %x", a, b, c)
	}
}

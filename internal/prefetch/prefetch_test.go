package prefetch

import (
	"testing"
	"unsafe"
)

// TestLine: whatever is named is not changed, and nothing happens where there is no memory.
func TestLine(t *testing.T) {
	x := [3]uint64{1, 2, 3}
	Line(unsafe.Pointer(&x[1]))
	Line(nil)
	if x != [3]uint64{1, 2, 3} {
		t.Error(x)
	}
}

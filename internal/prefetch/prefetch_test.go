package prefetch

import (
	"testing"
	"unsafe"

	"github.com/weirlimit/weir/test/expect"
)

// TestLine: whatever is named is not changed, and nothing happens where there is no memory.
func TestLine(t *testing.T) {
	x := [3]uint64{1, 2, 3}
	Line(unsafe.Pointer(&x[1]))
	Line(nil)
	expect.Equal(t, x, [3]uint64{1, 2, 3})
}

package ownership

import (
	"testing"
	"unsafe"
)

// What keeping a copy reads of a partition lies in few cache lines.
func TestLayout(t *testing.T) {
	const line = 64
	var pt part
	if size := unsafe.Sizeof(pt); size%line != 0 {
		t.Errorf("a part has %d bytes: not whole cache lines", size)
	}
	if end := unsafe.Offsetof(pt.followers) + unsafe.Offsetof(pt.followers[0].waits); end > 3*line {
		t.Errorf("what is read of the backup ends at byte %d", end)
	}
	if begin := unsafe.Offsetof(pt.known); begin%line != 0 {
		t.Errorf("what is read of a copy begins at byte %d, not with a cache line", begin)
	}
	if length := unsafe.Offsetof(pt.incoming) + unsafe.Offsetof(pt.incoming.from) - unsafe.Offsetof(pt.known); length > 3*line {
		t.Errorf("what is read of a copy takes %d bytes", length)
	}
}

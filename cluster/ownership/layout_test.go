package ownership

import (
	"testing"
	"unsafe"

	"github.com/weirlimit/weir/test/expect"
)

// What keeping a copy reads of a partition lies in few cache lines.
func TestLayout(t *testing.T) {
	const line = 64
	var pt part
	size := unsafe.Sizeof(pt)
	expect.Equal(t, size%line, 0, "a part has %d bytes: not whole cache lines", size)
	end := unsafe.Offsetof(pt.followers) + unsafe.Offsetof(pt.followers[0].waits)
	expect.True(t, end <= 3*line, "what is read of the backup ends at byte %d", end)
	begin := unsafe.Offsetof(pt.known)
	expect.Equal(t, begin%line, 0, "what is read of a copy begins at byte %d, not with a cache line", begin)
	length := unsafe.Offsetof(pt.incoming) + unsafe.Offsetof(pt.incoming.from) - unsafe.Offsetof(pt.known)
	expect.True(t, length <= 3*line, "what is read of a copy takes %d bytes", length)
}

package node

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weirlimit/weir/test/expect"
)

// TestClocks: leases are counted on CLOCK_BOOTTIME.
func TestClocks(t *testing.T) {
	read := func() int64 {
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
			t.Skip("no CLOCK_BOOTTIME:", err)
		}
		return ts.Nano()
	}
	_, leases := clocks()
	before, got, after := read(), leases(), read()
	expect.True(t, got >= before && got <= after, "the clock of leases reads %d between %d and %d", got, before, after)
}

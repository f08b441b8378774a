package node

import (
	"testing"

	"golang.org/x/sys/unix"
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
	if got < before || got > after {
		t.Errorf("the clock of leases reads %d between %d and %d", got, before, after)
	}
}

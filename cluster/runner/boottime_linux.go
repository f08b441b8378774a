package runner

import "golang.org/x/sys/unix"

// BootTime reads the clock that leases are counted on, in nanoseconds: it goes on while the host is suspended, cannot
// be set, and means nothing on another host.
func BootTime() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("runner: no CLOCK_BOOTTIME: " + err.Error()) // every Linux that Go runs on has it
	}
	return ts.Nano()
}

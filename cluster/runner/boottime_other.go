//go:build !linux

package runner

import "time"

// BootTime reads the clock that leases are counted on, in nanoseconds. Only Linux has one that both goes on while the
// host is suspended and cannot be set; elsewhere, which is for development, it is the wall clock.
func BootTime() int64 { return time.Now().UnixNano() }

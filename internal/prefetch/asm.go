//go:build amd64 || arm64

package prefetch

import "unsafe"

// Line asks for the cache line that p points into. It does not wait for it.
//
//go:noescape
func Line(p unsafe.Pointer)

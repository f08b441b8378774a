//go:build amd64 || arm64

package prefetch

import "unsafe"

// Line has the processor fetch the cache line that p points into. It does not wait.
//
//go:noescape
func Line(p unsafe.Pointer)

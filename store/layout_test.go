package store

import (
	"testing"
	"unsafe"
)

// Locks of neighbouring shards, and what is read under them, lie in cache lines of their own.
func TestLayout(t *testing.T) {
	const line = 64
	if size := unsafe.Sizeof(shard{}); size%line != 0 {
		t.Errorf("a shard has %d bytes: not whole cache lines", size)
	}
	if end := unsafe.Offsetof(shard{}.specs) + unsafe.Sizeof(shard{}.specs); end > line {
		t.Errorf("what a decision reads of a shard ends at byte %d, beyond one cache line", end)
	}
	if size := unsafe.Sizeof(partition{}); size > line {
		t.Errorf("a partition has %d bytes: more than one cache line", size)
	}
}

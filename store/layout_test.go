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
	// What there is one of for each partition with a follower.
	for name, size := range map[string]uintptr{
		"extras": unsafe.Sizeof(extras{}), "role": unsafe.Sizeof(role{}), "follower": unsafe.Sizeof(follower{}),
	} {
		if size%line != 0 {
			t.Errorf("a %s has %d bytes: not whole cache lines", name, size)
		}
	}
	if end := unsafe.Offsetof(extras{}.answers) + unsafe.Offsetof(answers{}.by); end > line+8 { // but for a list's capacity
		t.Errorf("what a change reads of extras ends at byte %d, beyond one cache line", end)
	}
	if size := unsafe.Sizeof(partition{}); size > line {
		t.Errorf("a partition has %d bytes: more than one cache line", size)
	}
}

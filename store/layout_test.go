package store

import (
	"testing"
	"unsafe"

	"github.com/weirlimit/weir/test/expect"
)

// Locks of neighbouring shards, and what is read under them, lie in cache lines of their own.
func TestLayout(t *testing.T) {
	const line = 64
	size := unsafe.Sizeof(shard{})
	expect.Equal(t, size%line, 0, "a shard has %d bytes: not whole cache lines", size)
	end := unsafe.Offsetof(shard{}.specs) + unsafe.Sizeof(shard{}.specs)
	expect.True(t, end <= line, "what a decision reads of a shard ends at byte %d, beyond one cache line", end)
	// What there is one of for each partition with a follower.
	for name, size := range map[string]uintptr{
		"extras": unsafe.Sizeof(extras{}), "role": unsafe.Sizeof(role{}), "follower": unsafe.Sizeof(follower{}),
	} {
		expect.Equal(t, size%line, 0, "a %s has %d bytes: not whole cache lines", name, size)
	}
	end = unsafe.Offsetof(extras{}.answers) + unsafe.Offsetof(answers{}.by)
	expect.True(t, end <= line+8,
		"what a change reads of extras ends at byte %d, beyond one cache line", end) // but for a list's capacity
	size = unsafe.Sizeof(partition{})
	expect.True(t, size <= line, "a partition has %d bytes: more than one cache line", size)
}

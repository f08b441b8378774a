package collision

import (
	"slices"
	"testing"

	"github.com/cespare/xxhash/v2"
)

// The keys do what they are for: whatever stands before them, and whatever the seed.
func TestKeys(t *testing.T) {
	for _, before := range []string{"", "\x05\x00\x00\x00\x00\x00\x00\x00login", string(make([]byte, 32))} {
		for _, seed := range []uint64{0, 7, 0xb14e93aaa315fb67, 0x123456789abcdef0} {
			seen, hashes := map[string]bool{}, []uint64(nil)
			for key := range Keys(len(before), 1<<16) {
				if seen[key] = true; slices.ContainsFunc([]byte(key), func(c byte) bool { return c >= 0x80 }) {
					t.Fatalf("%q is not ASCII", key)
				}
				var d xxhash.Digest
				d.ResetWithSeed(seed)
				d.WriteString(before)
				d.WriteString(key)
				hashes = append(hashes, d.Sum64())
			}
			slices.Sort(hashes)
			if hashes = slices.Compact(hashes); len(seen) != 1<<16 || len(hashes) != 1 {
				t.Errorf("after %q, seed %#x: %d keys have %d hashes", before, seed, len(seen), len(hashes))
			}
		}
	}
}

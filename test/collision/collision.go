// Package collision makes keys that XXH64 gives one hash, whatever its seed: what an attacker would send to a limiter
// that placed keys by it. It is for tests only. It promises that for a seed drawn at random, not for each: one in some
// ten thousand parts keys.
package collision

import (
	"encoding/binary"
	"iter"
	"slices"
)

// The primes of XXH64 that its accumulators use; see xxhash_spec.md at github.com/Cyan4973/xxHash.
const (
	prime1 = 11400714785074694791
	prime2 = 14029467366897019727
)

// Keys returns up to 65,536 different keys, each of some 64 to 95 ASCII characters: XXH64 of before bytes, whatever
// they are, and of a key, is the same for all keys.
//
// XXH64 takes each 32 bytes as four words for four accumulators: v becomes rotl(v + w·prime2, 31)·prime1. A difference
// of k·2^33 + j in the first w·prime2 is one of k + j·2^31 after the rotation, for small k and j and but for carries at
// two places, and thus for nearly all v, which is all that the seed has a part in. The next word takes it away again.
// So two words of one accumulator have as many alternatives as there are small k and j; those of which all bytes are
// ASCII are kept, 16 for each accumulator.
func Keys(before, n int) iter.Seq[string] {
	const alternatives = 16
	var of [4][][2]uint64
	inverse := uint64(prime2) // modulo 2^64, by Newton's iteration
	for range 6 {
		inverse *= 2 - prime2*inverse
	}
	for lane := range of {
		first, second := uint64(0x3030303030303030)+uint64(lane), uint64(0x4040404040404040)
		of[lane] = append(of[lane], [2]uint64{first, second})
		for k := uint64(1); len(of[lane]) < alternatives; k++ {
			for j := range uint64(1 << 12) {
				w := [2]uint64{first + (k<<33+j)*inverse, second - (k+j<<31)*prime1*inverse}
				if (w[0]|w[1])&0x8080808080808080 == 0 && len(of[lane]) < alternatives {
					of[lane] = append(of[lane], w)
				}
			}
		}
	}
	pad := slices.Repeat([]byte{'-'}, (32-before%32)%32)
	return func(yield func(string) bool) {
		for i := range min(n, 1<<16) {
			first, second := slices.Clone(pad), []byte(nil)
			for lane := range of {
				w := of[lane][i>>(4*lane)%alternatives]
				first, second = binary.LittleEndian.AppendUint64(first, w[0]),
					binary.LittleEndian.AppendUint64(second, w[1])
			}
			if !yield(string(append(first, second...))) {
				return
			}
		}
	}
}

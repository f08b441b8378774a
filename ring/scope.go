package ring

import (
	"encoding/binary"
	"math/bits"
)

// Scope hashes keys of one scope under one seed: Hash in less time, for who hashes millions of them a second. It
// is not changed by use, and safe for concurrent use.
type Scope struct {
	seed  uint64
	size  int      // bytes before the key: the scope's length, in eight bytes, and the scope
	words []uint64 // of these, as many as fill whole words
	tail  uint64   // the rest
	short int      // how many bytes that is, 0 to 7

	rounds []uint64  // of each of words: round(0, word)
	lanes  [4]uint64 // the accumulators once words have gone into them
}

// NewScope returns the Scope of that seed and name.
func NewScope(seed uint64, scope string) *Scope {
	b := append(binary.LittleEndian.AppendUint64(nil, uint64(len(scope))), scope...)
	s := &Scope{seed: seed, size: len(b), short: len(b) % 8}
	for ; len(b) >= 8; b = b[8:] {
		s.words = append(s.words, binary.LittleEndian.Uint64(b))
	}
	s.tail = load(string(b))
	s.lanes = lanes(seed)
	for i, w := range s.words {
		s.rounds = append(s.rounds, round(0, w))
		s.lanes[i%4] = round(s.lanes[i%4], w)
	}
	return s
}

// load reads up to eight bytes as a word.
func load(s string) (w uint64) {
	for i := min(len(s), 8) - 1; i >= 0; i-- {
		w = w<<8 | uint64(s[i])
	}
	return w
}

// whole reads the eight bytes at i as a word.
func whole(s string, i int) uint64 {
	s = s[i : i+8]
	return uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24 |
		uint64(s[4])<<32 | uint64(s[5])<<40 | uint64(s[6])<<48 | uint64(s[7])<<56
}

// The primes of xxHash's 64-bit variant.
const (
	prime1 = 11400714785074694791
	prime2 = 14029467366897019727
	prime3 = 1609587929392839161
	prime4 = 9650029242287828579
	prime5 = 2870177450012600261
)

func round(acc, w uint64) uint64 { return bits.RotateLeft64(acc+w*prime2, 31) * prime1 }

func merge(h, acc uint64) uint64 { return (h^round(0, acc))*prime1 + prime4 }

func mix(h, w uint64) uint64 { return bits.RotateLeft64(h^round(0, w), 27)*prime1 + prime4 }

// lanes are the accumulators before the first word.
func lanes(seed uint64) [4]uint64 {
	v := [4]uint64{seed, seed, seed, seed}
	v[0] += prime1
	v[0] += prime2
	v[1] += prime2
	v[3] -= prime1
	return v
}

func join(v1, v2, v3, v4 uint64) uint64 {
	h := bits.RotateLeft64(v1, 1) + bits.RotateLeft64(v2, 7) + bits.RotateLeft64(v3, 12) + bits.RotateLeft64(v4, 18)
	return merge(merge(merge(merge(h, v1), v2), v3), v4)
}

// finish takes in what is left of less than a word.
func finish(h uint64, rest uint64, left int) uint64 {
	if left >= 4 {
		h = bits.RotateLeft64(h^(rest&0xffffffff)*prime1, 23)*prime2 + prime3
		rest, left = rest>>32, left-4
	}
	for ; left > 0; left-- {
		h = bits.RotateLeft64(h^(rest&0xff)*prime5, 11) * prime1
		rest >>= 8
	}
	h = (h ^ h>>33) * prime2
	h = (h ^ h>>29) * prime3
	return h ^ h>>32
}

// Hash is the package's Hash with the seed and scope of s: XXH64 of what stands before the key and of the key, without putting
// them one behind the other first. (The library's digest copies both into itself.) XXH64 takes blocks of four words into four
// accumulators that know nothing of each other until the last block, so that what the words before the key make of them is
// known; of words after the last block, or where there is none, a part of the work is. See xxhash_spec.md at
// github.com/Cyan4973/xxHash.
func (s *Scope) Hash(key string) uint64 {
	total, m := s.size+len(key), len(s.words)
	n := total / 8 // words in all
	if len(key) < 8 || total >= 32 && m > n&^3 {
		return s.hash(key)
	}
	// The word that begins with the tail; those after it are in key at the multiples of eight behind at.
	begun, at := s.tail|whole(key, 0)<<(8*s.short&63), 8-s.short
	h := s.seed + prime5
	i := m
	if total >= 32 {
		v1, v2, v3, v4 := s.lanes[0], s.lanes[1], s.lanes[2], s.lanes[3]
		if i < n&^3 {
			// The block that m words are in already.
			switch i % 4 {
			case 0:
				v1, v2, v3, v4 = round(v1, begun), round(v2, whole(key, at)), round(v3, whole(key, at+8)), round(v4, whole(key, at+16))
			case 1:
				v2, v3, v4 = round(v2, begun), round(v3, whole(key, at)), round(v4, whole(key, at+8))
			case 2:
				v3, v4 = round(v3, begun), round(v4, whole(key, at))
			case 3:
				v4 = round(v4, begun)
			}
			at += 8 * (3 - i%4)
			for i = i&^3 + 4; i < n&^3; i += 4 {
				block := key[at : at+32]
				v1, v2, v3, v4 = round(v1, whole(block, 0)), round(v2, whole(block, 8)), round(v3, whole(block, 16)), round(v4, whole(block, 24))
				at += 32
			}
		}
		h = join(v1, v2, v3, v4)
		h += uint64(total)
	} else {
		h += uint64(total)
		for _, w := range s.rounds {
			h = bits.RotateLeft64(h^w, 27)*prime1 + prime4
		}
	}
	if i == m {
		h = mix(h, begun)
	}
	for ; at+8 <= len(key); at += 8 {
		h = mix(h, whole(key, at))
	}
	left := len(key) - at
	return finish(h, whole(key, len(key)-8)>>(8*(8-left)&63), left)
}

// hash is Hash for keys that are short and scopes that are long.
func (s *Scope) hash(key string) uint64 {
	total := s.size + len(key)
	n, at := total/8, 0 // words in all, and the next one
	// begun has the word that begins with the tail; the ones after it begin in key at skip.
	begun, skip := s.tail, 0
	if s.short > 0 {
		skip = 8 - s.short
		begun |= load(key[:min(skip, len(key))]) << (8 * s.short)
	} else {
		begun, skip = load(key[:min(8, len(key))]), 8
	}
	word := func(i int) uint64 {
		switch i -= len(s.words); {
		case i < 0:
			return s.words[i+len(s.words)]
		case i == 0:
			return begun
		default:
			return load(key[skip+8*(i-1):])
		}
	}
	h := s.seed + prime5
	if total >= 32 {
		v := lanes(s.seed)
		for ; at+4 <= n; at += 4 {
			for i := range v {
				v[i] = round(v[i], word(at+i))
			}
		}
		h = join(v[0], v[1], v[2], v[3])
	}
	h += uint64(total)
	for ; at < n; at++ {
		h = mix(h, word(at))
	}
	left := total % 8
	rest := begun // the key ends in the word of the tail
	if n > len(s.words) {
		rest = load(key[len(key)-left:])
	}
	return finish(h, rest, left)
}

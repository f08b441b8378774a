package ring

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"unsafe"

	"github.com/dchest/siphash"
)

// HashKeySize is the length of HashKey.Bytes.
const HashKeySize = 16

// HashKey is the key of the hash that places keys: 128 bits, the same on all nodes of a cluster. Who does not have it can
// neither work out nor aim at the partition of a key, or at two keys with one hash. The zero value is that of a cluster
// without a secret: everybody knows it, and it protects nothing. A HashKey shows nothing of itself when it is printed.
type HashKey struct {
	k0, k1 uint64
	drop   uint64 // bits of a hash that Truncated takes away
}

// ParseHashKey is the reverse of Bytes.
func ParseHashKey(b []byte) (HashKey, error) {
	switch len(b) {
	case 0:
		return HashKey{}, nil
	case HashKeySize:
		return HashKey{k0: binary.LittleEndian.Uint64(b), k1: binary.LittleEndian.Uint64(b[8:])}, nil
	}
	return HashKey{}, errors.New("a hash key has 16 bytes")
}

// RandomHashKey returns a key that nobody else has.
func RandomHashKey() HashKey {
	var b [HashKeySize]byte
	rand.Read(b[:])
	return HashKey{k0: binary.LittleEndian.Uint64(b[:]), k1: binary.LittleEndian.Uint64(b[8:])}
}

// Bytes is the key as it is told to those who may know it: HashKeySize bytes, or none for the zero value.
func (k HashKey) Bytes() []byte {
	if k == (HashKey{}) {
		return nil
	}
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, k.k0), k.k1)
}

// Format implements fmt.Formatter, for all verbs.
func (k HashKey) Format(f fmt.State, _ rune) { io.WriteString(f, "[hash key]") }

// Truncated returns a key whose hashes, and those of its scopes, have only the lowest bits of the proper ones: for tests of
// what must hold although hashes are equal.
func (k HashKey) Truncated(bits int) HashKey {
	k.drop = ^uint64(0) << bits
	return k
}

// Scope is what parts equal keys from one another, a policy's name for instance, together with a HashKey: whatever of a hash
// does not depend on the key. It is safe for concurrent use.
type Scope struct{ key HashKey }

// Scope returns the scope of that name.
//
// A scope has a key of its own, SipHash-2-4-128 of its name under k, and the hash of a key is SipHash-2-4-64 of the key under
// that. Where SipHash is a pseudo-random function, this is one of the pair of name and key (the cascade of Bellare, Canetti and
// Krawczyk, "Pseudorandom functions revisited", 1996; depth two): names have independent keys, so that neither the pairs
// ("ab", "c") and ("a", "bc") nor equal keys in two scopes have to do with one another, and no length has to be hashed. Hashes,
// some of which can be observed, are never keys: the two lengths of SipHash are two functions.
func (k HashKey) Scope(name string) Scope {
	k.k0, k.k1 = siphash.Hash128(k.k0, k.k1, bytesOf(name))
	return Scope{k}
}

// Format implements fmt.Formatter: a scope's key is no more shown than a HashKey is.
func (s Scope) Format(f fmt.State, verb rune) { s.key.Format(f, verb) }

// Hash places a key. It allocates nothing.
func (s Scope) Hash(key string) uint64 {
	return siphash.Hash(s.key.k0, s.key.k1, bytesOf(key)) &^ s.key.drop
}

// bytesOf is a string's bytes without a copy, to be read only.
func bytesOf(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }

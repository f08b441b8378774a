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

// HashKey is the key of the hash of keys: 128 bits, the same on all nodes of a cluster. A caller without it can neither
// compute nor choose the partition of a key, nor find two keys with equal hashes. The zero value belongs to clusters
// without a secret: it is known to everyone and protects nothing. Printing a HashKey shows nothing of it.
type HashKey struct {
	k0, k1 uint64
	drop   uint64 // bits of a hash that are set to 0: see Truncated
}

// ParseHashKey is the inverse of Bytes. An error says that b has neither 0 nor HashKeySize bytes.
func ParseHashKey(b []byte) (HashKey, error) {
	switch len(b) {
	case 0:
		return HashKey{}, nil
	case HashKeySize:
		return HashKey{k0: binary.LittleEndian.Uint64(b), k1: binary.LittleEndian.Uint64(b[8:])}, nil
	}
	return HashKey{}, errors.New("a hash key has 16 bytes")
}

// RandomHashKey returns a random key.
func RandomHashKey() HashKey {
	var b [HashKeySize]byte
	rand.Read(b[:])
	return HashKey{k0: binary.LittleEndian.Uint64(b[:]), k1: binary.LittleEndian.Uint64(b[8:])}
}

// Bytes returns the key, for those who may know it: HashKeySize bytes, or none for the zero value.
func (k HashKey) Bytes() []byte {
	if k == (HashKey{}) {
		return nil
	}
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, k.k0), k.k1)
}

// Format implements fmt.Formatter, for all verbs.
func (k HashKey) Format(f fmt.State, _ rune) { io.WriteString(f, "[hash key]") }

// Truncated returns a key whose hashes, and those of its scopes, keep only their lowest bits. It is for tests of keys
// with equal hashes.
func (k HashKey) Truncated(bits int) HashKey {
	k.drop = ^uint64(0) << bits
	return k
}

// Scope is a name, such as that of a policy, together with a HashKey. Equal keys in different scopes have independent
// hashes. It is safe for concurrent use.
type Scope struct{ key HashKey }

// Scope returns the scope with a name.
//
// A scope has a key of its own, the SipHash-2-4-128 of its name under k, and the hash of a key is the SipHash-2-4-64 of
// the key under that. If SipHash is a pseudo-random function, so is this function of name and key (the cascade of
// Bellare, Canetti and Krawczyk, "Pseudorandom functions revisited", 1996; depth two). Names have independent keys.
// Therefore the pairs ("ab", "c") and ("a", "bc") have unrelated hashes, as equal keys in two scopes have, and no
// lengths need to be hashed. Hashes, some of which callers can observe, are never used as keys: the two lengths of
// SipHash are two functions.
func (k HashKey) Scope(name string) Scope {
	k.k0, k.k1 = siphash.Hash128(k.k0, k.k1, bytesOf(name))
	return Scope{k}
}

// Format implements fmt.Formatter. It does not show the scope's key.
func (s Scope) Format(f fmt.State, verb rune) { s.key.Format(f, verb) }

// Hash returns the hash of a key. It allocates nothing.
func (s Scope) Hash(key string) uint64 {
	return siphash.Hash(s.key.k0, s.key.k1, bytesOf(key)) &^ s.key.drop
}

// bytesOf returns a string's bytes without a copy. They must not be changed.
func bytesOf(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }

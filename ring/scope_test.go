package ring

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/collision"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// The values are those of Appendix A of "SipHash: a fast short-input PRF" (Aumasson, Bernstein, 2012), and of vectors.h
// of the reference implementation for the length of 128 bits: an input of 15 bytes 0, 1, 2, … under the key 0, 1, 2, …,
// and none.
func TestSipHash(t *testing.T) {
	const input = "\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e"
	got, want := (Scope{testKey}).Hash(input), uint64(0xa129ca6149be45e5)
	expect.Equal(t, got, want, "64 bits")
	if got, want := testKey.Scope("").key, (HashKey{k0: 0xe6a825ba047f81a3, k1: 0x930255c71472f66d}); got != want {
		t.Errorf("128 bits: %#x %#x, want %#x %#x", got.k0, got.k1, want.k0, want.k1)
	}
}

func TestHash(t *testing.T) {
	type pair struct{ scope, key string }
	pairs := []pair{{"ab", "c"}, {"a", "bc"}, {"", "abc"}, {"abc", ""}, {"", ""}, {"a", ""}, {"", "a"},
		{"\x01", "\x00"}, {"a\x00", "b"}, {"a", "\x00b"}, {"\x02\x00\x00\x00\x00\x00\x00\x00ab", "c"}}
	seen := map[uint64]pair{}
	for _, p := range pairs {
		for _, k := range []HashKey{{}, testKey, {k1: 1}} {
			h := Hash(k, p.scope, p.key)
			other, dup := seen[h]
			expect.True(t, !dup, "%q hashes as %q", p, other)
			seen[h] = p
		}
	}
	scope, key := "login", strings.Repeat("k", 200)
	s := testKey.Scope(scope)
	n := testing.AllocsPerRun(100, func() { Hash(testKey, scope, key); s.Hash(key) })
	expect.True(t, n == 0, "Hash allocates %v times", n)
}

func TestHashKeyBytes(t *testing.T) {
	k, err := ParseHashKey(testKey.Bytes())
	expect.True(t, k == testKey && err == nil, "%v, %v", k == testKey, err)
	if k, err := ParseHashKey(HashKey{}.Bytes()); k != (HashKey{}) || err != nil {
		t.Errorf("%v, %v", k == (HashKey{}), err)
	}
	for _, n := range []int{1, 8, 15, 17, 32} {
		_, err := ParseHashKey(make([]byte, n))
		expect.True(t, err != nil, "%d bytes are taken", n)
	}
	a, b := RandomHashKey(), RandomHashKey()
	expect.True(t, a != b, "two random keys are equal")
}

// A hash key is in no log and no message, however it is written down.
func TestHashKeyIsNotPrinted(t *testing.T) {
	var b bytes.Buffer
	scope := testKey.Scope("")
	config := struct {
		HashKey HashKey
		Scope   Scope
	}{testKey, scope}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d", "%x", "%X"} {
		fmt.Fprintf(&b, verb+verb+verb+verb, testKey, &testKey, config, scope)
	}
	slog.New(slog.NewTextHandler(&b, nil)).Info("node started", "key", testKey, "config", config)
	slog.New(slog.NewJSONHandler(&b, nil)).Info("node started", "key", testKey, "config", config)
	must.NoError(t, json.NewEncoder(&b).Encode(config))
	text := strings.ToLower(b.String())
	for _, word := range []uint64{testKey.k0, testKey.k1, scope.key.k0, scope.key.k1} {
		for _, form := range []string{"%d", "%x"} {
			expect.True(t, !strings.Contains(text, fmt.Sprintf(form, word)), "the key is in %s", text)
		}
	}
	expect.True(t, !strings.Contains(text, fmt.Sprintf("%x", testKey.Bytes())), "the key is in %s", text)
}

func TestTruncated(t *testing.T) {
	for i := range 100 {
		key := fmt.Sprint(i)
		got, want := Hash(testKey.Truncated(4), "p", key), Hash(testKey, "p", key)&15
		expect.Equal(t, got, want, "%q", key)
	}
}

// spread fails the test unless the keys lie in the partitions, and the upper halves of their hashes in 4096 places, as
// keys thrown at random do.
func spread(t *testing.T, s Scope, keys []string) {
	t.Helper()
	count, places := make([]int, Partitions), make([]int, 4096)
	for _, key := range keys {
		h := s.Hash(key)
		count[Partition(h)]++
		places[h>>52]++
	}
	for what, count := range map[string][]int{"partitions": count, "places": places} {
		// Pearson's statistic of n counts has a mean of n-1 and a standard deviation of √(2(n-1)), which is 90 here.
		mean, chi := float64(len(keys))/float64(len(count)), 0.0
		for _, n := range count {
			chi += (float64(n) - mean) * (float64(n) - mean) / mean
		}
		expect.True(t, math.Abs(chi-float64(len(count)-1)) <= 6*90,
			"%s: a statistic of %.0f, want %d or so; %d to %d keys", what, chi, len(count)-1, slices.Min(count),
			slices.Max(count))
	}
}

func TestKeysSpread(t *testing.T) {
	keys := make([]string, 16*Partitions)
	for i := range keys {
		keys[i] = fmt.Sprint(i)
	}
	spread(t, testKey.Scope("login"), keys)
}

// Keys that XXH64 gives one hash are keys like others: under a secret, and under the key that stands for none.
func TestCollisionsSpread(t *testing.T) {
	// Before a key XXH64 was given the scope, and its length in eight bytes.
	keys := slices.Collect(collision.Keys(8+len("login"), 1<<16))
	for _, k := range []HashKey{testKey, {}} {
		spread(t, k.Scope("login"), keys)
	}
}

func BenchmarkHash(b *testing.B) {
	for _, key := range []string{"user:1234567890", strings.Repeat("k", 64)} {
		b.Run(fmt.Sprint("pair/", len(key)), func(b *testing.B) {
			for b.Loop() {
				Hash(testKey, "login", key)
			}
		})
		b.Run(fmt.Sprint("scope/", len(key)), func(b *testing.B) {
			s := testKey.Scope("login")
			for b.Loop() {
				s.Hash(key)
			}
		})
	}
}

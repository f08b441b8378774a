package cluster

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func TestKeyring(t *testing.T) {
	key := func(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }
	one, two := KeyID(key(1)), KeyID(key(2))
	must.True(t, one != two && len(one) == 16 && !strings.Contains(one, "0101"), "ids %s and %s", one, two)
	c := startNode(t, config("a"), func(c *Config) { c.Keys = [][]byte{key(1)} })
	want := func(keys ...Key) {
		t.Helper()
		got := c.Keys()
		expect.True(t, slices.Equal(got, keys), "keys %v, want %v", got, keys)
	}
	fails := func(err error, part string) {
		t.Helper()
		expect.ErrorContains(t, err, part)
	}
	want(Key{one, true})
	fails(c.UseKey(two), "has no key")
	fails(c.RemoveKey(one), "is in use")
	fails(c.AddKey(key(1)[:15]), "has 15 bytes")
	for range 2 { // twice is as good as once
		expect.NoError(t, c.AddKey(key(2)))
	}
	want(Key{one, true}, Key{two, false})
	expect.NoError(t, c.UseKey(two))
	want(Key{two, true}, Key{one, false})
	for range 2 {
		expect.NoError(t, c.RemoveKey(one))
	}
	want(Key{two, true})
	for i := range MaxKeys - 1 {
		expect.NoError(t, c.AddKey(key(byte(10+i))))
	}
	fails(c.AddKey(key(99)), "there are 16 keys already")

	plain := startNode(t, config("b"))
	expect.True(t, plain.Keys() == nil && errors.Is(plain.AddKey(key(1)), ErrPlain) &&
		errors.Is(plain.UseKey(one), ErrPlain) && errors.Is(plain.RemoveKey(one), ErrPlain),
		"a node in plain text has keys")
}

package cluster

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestKeyring(t *testing.T) {
	key := func(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }
	one, two := KeyID(key(1)), KeyID(key(2))
	if one == two || len(one) != 16 || strings.Contains(one, "0101") {
		t.Fatalf("ids %s and %s", one, two)
	}
	cfg := config("a")
	cfg.Keys = [][]byte{key(1)}
	c := startNode(t, cfg)
	want := func(keys ...Key) {
		t.Helper()
		if got := c.Keys(); !slices.Equal(got, keys) {
			t.Errorf("keys %v, want %v", got, keys)
		}
	}
	fails := func(err error, part string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%v, want %s", err, part)
		}
	}
	want(Key{one, true})
	fails(c.UseKey(two), "has no key")
	fails(c.RemoveKey(one), "is in use")
	fails(c.AddKey(key(1)[:15]), "has 15 bytes")
	for range 2 { // twice is as good as once
		if err := c.AddKey(key(2)); err != nil {
			t.Error(err)
		}
	}
	want(Key{one, true}, Key{two, false})
	if err := c.UseKey(two); err != nil {
		t.Error(err)
	}
	want(Key{two, true}, Key{one, false})
	for range 2 {
		if err := c.RemoveKey(one); err != nil {
			t.Error(err)
		}
	}
	want(Key{two, true})
	for i := range MaxKeys - 1 {
		if err := c.AddKey(key(byte(10 + i))); err != nil {
			t.Error(err)
		}
	}
	fails(c.AddKey(key(99)), "there are 16 keys already")

	plain := startNode(t, config("b"))
	if plain.Keys() != nil || !errors.Is(plain.AddKey(key(1)), ErrPlain) || !errors.Is(plain.UseKey(one), ErrPlain) || !errors.Is(plain.RemoveKey(one), ErrPlain) {
		t.Error("a node in plain text has keys")
	}
}

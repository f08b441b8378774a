package main

import (
	"strings"
	"testing"
)

func TestHashSeed(t *testing.T) {
	const secret = "0123456789abcdef0123456789abcdef"
	seed := func(content string) uint64 {
		t.Helper()
		s, err := hashSeed(writeFile(t, "secret", content))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	// Nodes of different builds must agree: this value, worked out with another HKDF, never changes.
	if got, want := seed(secret), uint64(0xb14e93aaa315fb67); got != want {
		t.Errorf("%#x, was %#x", got, want)
	}
	if seed(secret) != seed(" "+secret+"\n") {
		t.Error("space around the secret counts")
	}
	if seed(secret) == seed(secret+"0") {
		t.Error("different secrets, one seed")
	}
	if none, err := hashSeed(""); none != 0 || err != nil {
		t.Errorf("%v, %v", none, err)
	}
	if _, err := hashSeed(writeFile(t, "secret", secret[:minSecret-1])); err == nil || strings.Contains(err.Error(), secret[:minSecret-1]) {
		t.Errorf("%v", err)
	}
}
